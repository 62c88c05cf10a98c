//! Fields of payloads.

use super::*;

#[test]
fn every_field_is_required() {
    assert!(PLAIN.decode(&ID, &record_of(&fields())).is_ok());
    for (name, _) in fields() {
        let message = error_text(&record_of(&without(name)));
        match name {
            "kind" => {
                assert!(message.ends_with("found a field missing, given twice or of another type"));
            }
            _ => assert_eq!(message, format!("expected the field {name}, found none")),
        }
    }
    let tombstone = vec![
        ("kind", messagepack(&"tombstone")),
        ("status", messagepack(&200)),
    ];
    assert_eq!(
        error_text(&record_of(&tombstone)),
        "expected the field reason, found none"
    );
    let value = vec![("kind", messagepack(&"value"))];
    assert_eq!(
        error_text(&record_of(&value)),
        "expected the field value, found none"
    );
}

#[test]
fn unknown_fields_are_ignored() {
    for later in [
        messagepack(&1),
        messagepack(&"text"),
        bin(b"bytes"),
        messagepack(&[[("a", 1)]]),
        b"\xc0".to_vec(),
        b"\xd4\x01\x00".to_vec(),
    ] {
        let record = record_of(&with("later", later));
        assert_eq!(response(PLAIN, &record).body, "hello");
    }
}

#[test]
fn deeply_nested_fields_are_rejected() {
    let mut nested = vec![0x91; 500];
    nested.push(0xc0);
    assert!(
        error_text(&record_of(&with("later", nested))).ends_with("found fields nested too deep")
    );
}

#[test]
fn body_not_messagepack_bin_is_rejected() {
    for body in [
        messagepack(&[104, 105]),
        messagepack(&"hi"),
        b"\xc0".to_vec(),
    ] {
        let record = record_of(&with("body", body));
        assert!(PLAIN.decode(&ID, &record).is_err());
    }
}

#[test]
fn fields_without_names_are_rejected() {
    let mut list = vec![0x95];
    for (_, value) in fields() {
        list.extend(value);
    }
    assert!(error_text(&sealed(0, &list)).ends_with("found no map of fields"));
    assert!(error_text(&sealed(0, b"")).ends_with("found no map of fields"));
}

#[test]
fn duplicate_field_is_rejected() {
    let mut fields = fields();
    fields.push(("body", bin(b"other")));
    assert!(PLAIN.decode(&ID, &record_of(&fields)).is_err());
}

// S-123
#[test]
fn values_out_of_range_are_rejected() {
    for status in [0, 99, 100, 103, 199, 1000, 65_535, 65_536] {
        let record = record_of(&with("status", messagepack(&status)));
        assert!(PLAIN.decode(&ID, &record).is_err(), "{status}");
    }
    for status in [200, 599, 600, 999] {
        let record = record_of(&with("status", messagepack(&status)));
        assert!(PLAIN.decode(&ID, &record).is_ok(), "{status}");
    }
    let record = record_of(&with("kind", messagepack(&"another")));
    assert!(error_text(&record).starts_with("expected one of the kinds"));
    // A time far beyond the year 10,000 must not panic.
    let record = record_of(&with("recorded_at", messagepack(&u64::MAX)));
    let _ = PLAIN.decode(&ID, &record);
}

#[test]
fn invalid_headers_are_rejected() {
    for (name, value) in [
        ("Etag", &b"1"[..]),
        ("", b"1"),
        ("a b", b"1"),
        ("x-a", b"1\r\nset-cookie: a=b"),
        ("x-a", b"\0"),
    ] {
        let lines = messagepack(&[(name, payload::Bin(value))]);
        let message = error_text(&record_of(&with("headers", lines)));
        assert!(message.starts_with("expected "), "{message}");
    }
}

// F-111
#[test]
fn missing_list_is_rejected_without_allocation() {
    let record = record_of(&with("headers", b"\xdd\xff\xff\xff\xff".to_vec()));
    let allocated = allocation_counter::measure(|| {
        assert!(PLAIN.decode(&ID, &record).is_err());
    });
    assert!(allocated.bytes_max < 4096, "{allocated:?}");
    let record = record_of(&with("body", b"\xc6\xff\xff\xff\xff".to_vec()));
    let allocated = allocation_counter::measure(|| {
        assert!(PLAIN.decode(&ID, &record).is_err());
    });
    assert!(allocated.bytes_max < 4096, "{allocated:?}");
}

#[test]
fn most_header_lines_allocate_little() {
    let lines: Vec<_> = (0..128)
        .map(|n| (format!("x{n}"), payload::Bin(b"")))
        .collect();
    let mut fields = with("headers", messagepack(&lines));
    fields.push(("trailers", messagepack(&lines)));
    let record = record_of(&fields);
    let allocated = allocation_counter::measure(|| {
        assert_eq!(response(PLAIN, &record).headers.len(), 128);
    });
    let most = 2 * record.len() as u64 + 64 * 1024;
    assert!(allocated.bytes_max <= most, "{allocated:?}");

    let lines: Vec<_> = (0..129).map(|_| ("x", payload::Bin(b""))).collect();
    assert!(
        PLAIN
            .decode(&ID, &record_of(&with("headers", messagepack(&lines))))
            .is_err()
    );
}

#[test]
fn sensitive_positions_without_line_are_ignored() {
    let lines = messagepack(&[("x-a", payload::Bin(b"a")), ("x-b", payload::Bin(b"b"))]);
    let mut fields = with("headers", lines.clone());
    fields.push(("trailers", lines));
    fields.push(("sensitive", bin(&[3, 200, 0, 255, 0, 128])));
    let found = response(PLAIN, &record_of(&fields));
    let trailers = found.trailers.expect("trailers");
    let of = |map: &HeaderMap| ["x-a", "x-b"].map(|name| map[name].is_sensitive());
    assert_eq!(of(&found.headers), [true, false]);
    assert_eq!(of(&trailers), [false, true]);
    // Many positions cost as much as few.
    let most = vec![7; 500_000];
    let record = record_of(&with("sensitive", bin(&most)));
    let allocated = allocation_counter::measure(|| {
        response(PLAIN, &record);
    });
    assert!(allocated.bytes_max < 4096, "{allocated:?}");
    assert!(error_text(&record_of(&with("sensitive", messagepack(&[0])))).contains("another type"));
}

#[test]
fn record_without_sensitive_values_omits_field() {
    let plain = encode(PLAIN, 200, &headers(&[("x-a", b"1")]), b"");
    assert!(!plain.windows(9).any(|bytes| bytes == b"sensitive"));
}

#[test]
fn last_possible_line_can_be_sensitive() {
    let mut lines = HeaderMap::new();
    for n in 0..128 {
        let mut value = HeaderValue::from(n);
        value.set_sensitive(n % 2 == 1);
        lines.append(
            HeaderName::from_bytes(format!("x-{n}").as_bytes()).expect("a name"),
            value,
        );
    }
    let record = PLAIN.encode_response(&ID, StatusCode::OK, &lines, &replay_all, b"", Some(&lines));
    let found = response(PLAIN, &record);
    assert_eq!(format!("{:?}", found.headers), format!("{lines:?}"));
    assert_eq!(
        format!("{:?}", found.trailers),
        format!("{:?}", Some(lines))
    );
}

#[test]
fn record_error_shows_no_record_content() {
    let secrets = [
        record_of(&with("kind", messagepack(&"hunter2"))),
        record_of(&with("body", messagepack(&"hunter2"))),
        record_of(&with("status", messagepack(&"hunter2"))),
        record_of(&with(
            "headers",
            messagepack(&[("Hunter2", payload::Bin(b""))]),
        )),
        record_of(&with("headers", messagepack(&[("x", "hunter2")]))),
    ];
    for record in secrets {
        let error = PLAIN.decode(&ID, &record).expect_err("an error");
        let shown = format!("{error} {error:?}").to_lowercase();
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}

#[test]
fn errors_are_send_and_sync() {
    fn check<T: std::error::Error + Send + Sync + 'static>() {}
    check::<RecordError>();
}

proptest! {
    // F-085
    #[test]
    fn any_response_roundtrips(
        status in 200_u16..=999,
        lines in vec(("x-[a-e]", vec(prop_oneof![0x20_u8..0x7f, 0x80_u8..=0xff], 0..40)), 0..30),
        trailers in proptest::option::of(vec(("x-[a-e]", vec(0x20_u8..0x7f, 0..10)), 0..5)),
        body in vec(any::<u8>(), 0..3000),
        repeat in 1..4_usize,
        deflating in any::<bool>(),
    ) {
        let map = |lines: Vec<(String, Vec<u8>)>| {
            let lines: Vec<_> = lines.iter().map(|(name, value)| (&name[..], &value[..])).collect();
            headers(&lines)
        };
        let codec = if deflating { DEFLATING } else { PLAIN };
        let status = StatusCode::from_u16(status).expect("a status");
        let lines = map(lines);
        let trailers = trailers.map(map).filter(|lines| !lines.is_empty());
        let body = body.repeat(repeat);
        let record =
            codec.encode_response(&ID, status, &lines, &replay_all, &body, trailers.as_ref());
        let found = response(codec, &record);
        prop_assert_eq!(found.status, status);
        prop_assert!(found.headers.iter().eq(lines.iter()));
        prop_assert_eq!(found.trailers, trailers);
        if status != StatusCode::NO_CONTENT && status != StatusCode::NOT_MODIFIED {
            prop_assert_eq!(found.body, body);
        }
    }
}
