//! Header lines of records.

use super::*;

// F-084
#[test]
fn connection_and_framing_headers_are_not_stored() {
    let lines = headers(&[
        ("connection", b"close, X-Hop"),
        ("connection", b" x-other ,"),
        ("keep-alive", b"timeout=5"),
        ("proxy-connection", b"close"),
        ("te", b"trailers"),
        ("trailer", b"x-sum"),
        ("transfer-encoding", b"chunked"),
        ("upgrade", b"h2c"),
        ("content-length", b"5"),
        ("x-idempo-policy", b"no-store"),
        ("x-idempo-persist-for-seconds", b"5"),
        ("x-hop", b"1"),
        ("x-other", b"1"),
        ("x-kept", b"1"),
    ]);
    let found = response(PLAIN, &encode(PLAIN, 200, &lines, b""));
    assert_eq!(found.headers, headers(&[("x-kept", b"1")]));
}

#[test]
fn framing_headers_in_record_are_not_replayed() {
    let lines = messagepack(&[
        ("content-length", payload::Bin(b"999")),
        ("transfer-encoding", payload::Bin(b"chunked")),
        ("x-kept", payload::Bin(b"1")),
    ]);
    let found = response(PLAIN, &record_of(&with("headers", lines)));
    assert_eq!(found.headers, headers(&[("x-kept", b"1")]));
}

#[test]
fn default_excludes_only_single_exchange_headers() {
    let denied = [
        "date",
        "age",
        "via",
        "server-timing",
        "traceparent",
        "tracestate",
        "x-request-id",
        "set-cookie",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-remaining",
        "x-ratelimit-limit",
        "x-rate-limit-reset",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-authentication-info",
        "authentication-info",
        "dpop-nonce",
        "replay-nonce",
        "set-cookie2",
        "clear-site-data",
        "access-control-allow-origin",
        "access-control-expose-headers",
        "cache-status",
        "proxy-status",
        "traceresponse",
        "baggage",
        "request-id",
        "x-correlation-id",
        "x-amzn-requestid",
        "x-b3-traceid",
        "x-datadog-trace-id",
        "x-cloud-trace-context",
        "x-ms-request-id",
        "uber-trace-id",
        "uberctx-user",
        "cf-ray",
        "connection",
        "content-length",
        "transfer-encoding",
        "x-idempo-policy",
    ];
    let kept = [
        "content-type",
        "content-encoding",
        "content-language",
        "etag",
        "last-modified",
        "location",
        "link",
        "cache-control",
        "vary",
        "retry-after",
        "www-authenticate",
        "x-transaction-id",
        "x-dates",
        "x-rate",
        "x-b3",
    ];
    for (names, expected) in [(&denied[..], false), (&kept[..], true)] {
        for name in names {
            let name = HeaderName::from_static(name);
            assert_eq!(replayed_by_default(&name), expected, "{name}");
        }
    }
}

#[test]
fn replay_filter_is_called_once_per_line() {
    let calls = Cell::new(0);
    // A filter with changing results must not cause an unreadable record.
    let alternating = |_: &HeaderName| {
        calls.set(calls.get() + 1);
        calls.get() % 2 == 0
    };
    let lines = headers(&[
        ("x-a", b"1"),
        ("x-a", b"2"),
        ("connection", b"close"),
        ("x-b", b"3"),
        ("x-c", b"4"),
    ]);
    let record = PLAIN.encode_response(&ID, StatusCode::OK, &lines, &alternating, b"", None);
    let expected = headers(&[("x-a", b"2"), ("x-c", b"4")]);
    assert_eq!(response(PLAIN, &record).headers, expected);
    assert_eq!(calls.get(), 4);
}

// F-086
#[test]
fn trailers_are_recorded_like_headers() {
    let trailers = headers(&[
        ("grpc-status", b"0"),
        ("x-sum", b"\xe9"),
        ("connection", b"x-hop"),
        ("x-hop", b"1"),
        ("te", b"trailers"),
        ("x-sum", b"2"),
        ("x-denied", b"1"),
    ]);
    let allowed = |name: &HeaderName| name != "x-denied";
    let record = PLAIN.encode_response(
        &ID,
        StatusCode::OK,
        &HeaderMap::new(),
        &allowed,
        b"",
        Some(&trailers),
    );
    let expected = headers(&[("grpc-status", b"0"), ("x-sum", b"\xe9"), ("x-sum", b"2")]);
    assert_eq!(response(PLAIN, &record).trailers, Some(expected));
}

#[test]
fn bodiless_statuses_store_no_body() {
    for status in [204, 304] {
        let found = response(PLAIN, &encode(PLAIN, status, &HeaderMap::new(), b"ghost"));
        assert!(found.body.is_empty());
        let record = record_of(&with("status", messagepack(&status)));
        assert_eq!(
            error_text(&record),
            format!("expected no body under the status {status}, found 5 bytes")
        );
    }
}

#[test]
fn too_many_header_lines_leave_tombstone() {
    let lines = |count: usize| {
        let mut map = HeaderMap::new();
        for n in 0..count {
            map.append("x-a", HeaderValue::from(n));
        }
        map
    };
    let found = response(PLAIN, &encode(PLAIN, 201, &lines(128), b"body"));
    assert_eq!(found.headers.len(), 128);
    let record = encode(PLAIN, 201, &lines(129), b"body");
    let expected = Record::Tombstone {
        status: StatusCode::CREATED,
        reason: TombstoneReason::TooLarge,
    };
    assert_eq!(PLAIN.decode(&ID, &record).expect("a record"), expected);
}
