use std::{
    cell::Cell,
    time::{Duration, UNIX_EPOCH},
};

use http::HeaderValue;
use proptest::{collection::vec, prelude::*};
use serde::Serialize;

use super::*;
use crate::random::Random;

pub(super) const ID: KeyId = KeyId::from_bytes([7; 32]);
pub(super) const PLAIN: Codec = Codec {
    compress_above: usize::MAX,
    max_inflated: 1 << 20,
};
pub(super) const DEFLATING: Codec = Codec {
    compress_above: 0,
    max_inflated: 1 << 20,
};

pub(super) fn headers(lines: &[(&str, &[u8])]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for &(name, value) in lines {
        map.append(
            HeaderName::from_bytes(name.as_bytes()).expect("a header name"),
            HeaderValue::from_bytes(value).expect("a header value"),
        );
    }
    map
}

/// Returns a typical JSON document of a service, cut at `length`.
pub(super) fn json(length: usize) -> Vec<u8> {
    let mut body = b"[".to_vec();
    for n in 0_u64.. {
        let digits = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let member = format!(r#"{{"id":{n},"amount":{digits},"currency":"EUR","paid":true}},"#);
        body.extend_from_slice(member.as_bytes());
        if body.len() >= length {
            break;
        }
    }
    body.truncate(length);
    body
}

/// Returns a record of this version around any `rest`.
pub(super) fn sealed(flags: u8, rest: &[u8]) -> Bytes {
    let mut record = vec![VERSION, flags, 0, 0, 0, 0];
    record.extend_from_slice(rest);
    repair(&mut record);
    Bytes::from(record)
}

/// Computes the checksum of a changed record.
pub(super) fn repair(record: &mut [u8]) {
    if let Some((&mut [_, flags, ref mut written @ ..], rest)) =
        record.split_first_chunk_mut::<PREFIX>()
    {
        *written = checksum(&ID, flags, rest).to_le_bytes();
    }
}

/// Returns the inflated length `declared` and the deflate stream of `payload`.
pub(super) fn deflated(declared: usize, payload: &[u8]) -> Vec<u8> {
    let declared = u32::try_from(declared).expect("a length");
    let mut rest = declared.to_le_bytes().to_vec();
    assert!(deflate::deflate(payload, &mut rest));
    rest
}

fn replay_all(_: &HeaderName) -> bool {
    true
}

fn encode(codec: Codec, status: u16, headers: &HeaderMap, body: &[u8]) -> Bytes {
    let status = StatusCode::from_u16(status).expect("a status");
    codec.encode_response(&ID, status, headers, &replay_all, body, None)
}

fn response(codec: Codec, record: &Bytes) -> StoredResponse {
    match codec.decode(&ID, record).expect("a record") {
        Record::Response(response) => response,
        other @ (Record::Tombstone { .. } | Record::Value(_) | Record::Attention { .. }) => {
            panic!("expected a response, found {other:?}")
        }
    }
}

fn error_text(record: &Bytes) -> String {
    let error = PLAIN.decode(&ID, record).expect_err("an error");
    let message = error.to_string();
    message
        .strip_prefix("unreadable record: ")
        .expect("the prefix")
        .to_owned()
}

fn messagepack(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec(value).expect("MessagePack")
}

fn bin(bytes: &[u8]) -> Vec<u8> {
    messagepack(&payload::Bin(bytes))
}

/// The fields of a payload, each with its MessagePack.
type Fields = Vec<(&'static str, Vec<u8>)>;

fn fields() -> Fields {
    vec![
        ("kind", messagepack(&"response")),
        ("status", messagepack(&200)),
        ("recorded_at", messagepack(&1_700_000_000_000_u64)),
        ("headers", messagepack(&[(); 0])),
        ("body", bin(b"hello")),
    ]
}

fn with(name: &'static str, value: Vec<u8>) -> Fields {
    let mut fields = without(name);
    fields.push((name, value));
    fields
}

fn without(name: &'static str) -> Fields {
    let mut fields = fields();
    fields.retain(|field| field.0 != name);
    fields
}

fn payload_of(fields: &Fields) -> Vec<u8> {
    let mut payload = vec![0x80 | u8::try_from(fields.len()).expect("few fields")];
    for (name, value) in fields {
        payload.extend(messagepack(name));
        payload.extend(value);
    }
    payload
}

fn record_of(fields: &Fields) -> Bytes {
    sealed(0, &payload_of(fields))
}

#[test]
fn response_roundtrips() {
    let lines = headers(&[
        ("content-type", b"application/json"),
        ("link", b"</a>; rel=next"),
        ("x-latin1", b"caf\xe9"),
        ("location", b"/orders/1"),
        ("link", b"</b>; rel=prev"),
        ("x-empty", b""),
    ]);
    let body = json(4000);
    for codec in [PLAIN, DEFLATING] {
        let found = response(codec, &encode(codec, 201, &lines, &body));
        assert_eq!(found.status, StatusCode::CREATED);
        assert!(found.headers.iter().eq(lines.iter()));
        assert_eq!(found.body, body);
        assert_eq!(found.trailers, None);
        let age = found.recorded_at.elapsed().expect("a time in the past");
        assert!(age < Duration::from_secs(60));
    }
}

#[test]
fn small_record_has_known_bytes() {
    let record = PLAIN.encode_response_at(
        Origin::from(&ID),
        StatusCode::OK,
        &headers(&[("etag", b"\"1\""), ("x-b", b"\xff")]),
        &replay_all,
        b"hello",
        None,
        UNIX_EPOCH + Duration::from_millis(1_700_000_000_000),
    );
    let mut expected = vec![1, 0];
    expected.extend(checksum(&ID, 0, &record[PREFIX..]).to_le_bytes());
    expected.extend(b"\x85");
    expected.extend(b"\xa4kind\xa8response");
    expected.extend(b"\xa6status\xcc\xc8");
    expected.extend(b"\xabrecorded_at\xcf\x00\x00\x01\x8b\xcf\xe5\x68\x00");
    expected.extend(b"\xa7headers\x92\x92\xa4etag\xc4\x03\"1\"\x92\xa3x-b\xc4\x01\xff");
    expected.extend(b"\xa4body\xc4\x05hello");
    assert_eq!(record, expected);
}

#[test]
fn tombstone_has_status_and_reason_only() {
    let record = PLAIN.encode_tombstone(&ID, StatusCode::CREATED, TombstoneReason::Streamed);
    assert_eq!(
        record[PREFIX..],
        b"\x83\xa4kind\xa9tombstone\xa6status\xcc\xc9\xa6reason\xa8streamed"[..]
    );
    for reason in [TombstoneReason::TooLarge, TombstoneReason::Streamed] {
        let record = PLAIN.encode_tombstone(&ID, StatusCode::CREATED, reason);
        let expected = Record::Tombstone {
            status: StatusCode::CREATED,
            reason,
        };
        assert_eq!(PLAIN.decode(&ID, &record).expect("a record"), expected);
    }
}

#[test]
fn value_roundtrips() {
    for value in [&b""[..], b"\x93\x01\x02\x03", &json(5000)] {
        for codec in [PLAIN, DEFLATING] {
            let record = codec.encode_value(&ID, value);
            let expected = Record::Value(Bytes::copy_from_slice(value));
            assert_eq!(codec.decode(&ID, &record).expect("a record"), expected);
        }
    }
}

// F-108
#[test]
fn any_changed_bit_is_rejected() {
    for codec in [PLAIN, DEFLATING] {
        let record = encode(codec, 200, &headers(&[("etag", b"1")]), &json(200));
        for at in 0..record.len() {
            for bit in 0..8 {
                let mut changed = record.to_vec();
                changed[at] ^= 1 << bit;
                assert!(codec.decode(&ID, &Bytes::from(changed)).is_err(), "{at}");
            }
        }
    }
}

// F-108
#[test]
fn truncated_or_extended_record_is_rejected() {
    for codec in [PLAIN, DEFLATING] {
        let record = encode(codec, 200, &headers(&[("etag", b"1")]), &json(200));
        for length in 0..record.len() {
            assert!(codec.decode(&ID, &record.slice(..length)).is_err());
            // Also with a checksum that matches the remaining bytes.
            let mut cut = record[..length].to_vec();
            repair(&mut cut);
            assert!(codec.decode(&ID, &Bytes::from(cut)).is_err(), "{length}");
        }
        for more in [&b"\0"[..], b"\xc0", b"\x90", b"\xc1", b"more"] {
            let mut longer = record.to_vec();
            longer.extend_from_slice(more);
            assert!(codec.decode(&ID, &longer.clone().into()).is_err());
            repair(&mut longer);
            assert!(codec.decode(&ID, &longer.into()).is_err());
        }
    }
}

// F-109
#[test]
fn record_of_other_key_is_rejected() {
    let record = encode(PLAIN, 200, &HeaderMap::new(), b"mine");
    let error = PLAIN
        .decode(&KeyId::from_bytes([8; 32]), &record)
        .expect_err("an error");
    assert!(error.to_string().contains("under this key"), "{error}");
}

// F-110
#[test]
fn unknown_versions_and_flags_are_refused() {
    let mut record = encode(PLAIN, 200, &HeaderMap::new(), b"").to_vec();
    record[0] = 2;
    repair(&mut record);
    assert_eq!(
        error_text(&record.clone().into()),
        "expected version 1, found 2"
    );
    record[0] = 1;
    for flags in (3..=u8::MAX).filter(|flags| *flags != SEALED) {
        record[1] = flags;
        repair(&mut record);
        let expected = format!("expected the flags 0, 1, 2 or 4, found {flags}");
        assert_eq!(error_text(&record.clone().into()), expected);
        assert_eq!(NeedsAttention::in_record(&record), None);
    }
}

// S-964
#[test]
fn sealed_records_are_refused_as_sealed() {
    let expected = "expected a record in clear, found a sealed one, which a later version wrote";
    let plain = encode(PLAIN, 200, &HeaderMap::new(), b"");
    for rest in [&[][..], &[7; 36], &plain[PREFIX..]] {
        let record = sealed(SEALED, rest);
        assert_eq!(error_text(&record), expected);
        assert_eq!(NeedsAttention::in_record(&record), None);
    }
    // Damage and an unknown key are two findings.
    let mut damaged = sealed(SEALED, &[7; 36]).to_vec();
    damaged[20] ^= 1;
    assert!(error_text(&damaged.into()).starts_with("expected the checksum"));
    // The code stays readable, for operators' queries.
    let record = sealed(ATTENTION, b"\x0drefund-failed\xc1\x03\x00\x00\x00");
    assert_eq!(error_text(&record), expected);
    assert_eq!(NeedsAttention::in_record(&record), Some(REFUND_FAILED));
}

const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");

#[test]
fn attention_record_has_known_bytes() {
    let attention = REFUND_FAILED.with_reason("provider said no");
    let record = Codec::encode_attention(&ID, Some(StatusCode::BAD_GATEWAY), &attention);
    let mut expected = vec![1, 2];
    expected.extend(checksum(&ID, 2, &record[PREFIX..]).to_le_bytes());
    expected.extend(b"\x0drefund-failed\x83");
    expected.extend(b"\xa4kind\xa9attention");
    expected.extend(b"\xa6status\xcd\x01\xf6");
    expected.extend(b"\xa6reason\xb0provider said no");
    assert_eq!(record, expected);
    assert_eq!(NeedsAttention::in_record(&record), Some(attention));
    // Any other record is not an attention record, whatever bytes it contains.
    for other in [
        encode(PLAIN, 200, &HeaderMap::new(), &record),
        PLAIN.encode_value(&ID, &record),
        record.slice(..PREFIX),
        record.slice(..PREFIX + 5),
        Bytes::new(),
    ] {
        assert_eq!(NeedsAttention::in_record(&other), None, "{other:?}");
    }
}

#[test]
fn attention_roundtrips_with_bounded_reason() {
    for status in [None, Some(StatusCode::OK)] {
        for (reason, kept) in [("", 0), ("x", 1), (&"é".repeat(600), 1024)] {
            let attention = REFUND_FAILED.with_reason(reason);
            assert_eq!(attention.reason().len(), kept);
            let record = Codec::encode_attention(&ID, status, &attention);
            assert!(record.len() < 1200, "{}", record.len());
            let expected = Record::Attention { status, attention };
            assert_eq!(PLAIN.decode(&ID, &record).expect("a record"), expected);
        }
    }
    // The cut never splits a character.
    let odd = REFUND_FAILED.with_reason(format!("x{}", "é".repeat(600)));
    assert_eq!(odd.reason().len(), 1023);
    assert!(!format!("{odd:?}").contains('é'), "{odd:?}");
}

#[test]
fn decode_rejects_invalid_code() {
    const LONGEST: &str = "0123456789012345678901234567890123456789012345678901234567890-az";
    assert_eq!(NeedsAttention::new(LONGEST).code().len(), 64);
    for code in [
        "",
        "Refund",
        "refund failed",
        "refund_failed",
        "caf\u{e9}",
        "x\n",
        &LONGEST.repeat(2)[..65],
    ] {
        let mut rest = vec![u8::try_from(code.len()).expect("short")];
        rest.extend(code.bytes());
        let record = Codec::encode_attention(&ID, None, &REFUND_FAILED);
        rest.extend(&record[PREFIX + 14..]);
        let record = sealed(ATTENTION, &rest);
        assert_eq!(
            error_text(&record),
            "expected a code of 1 to 64 of a-z, 0-9 and -, found something else"
        );
        assert_eq!(NeedsAttention::in_record(&record), None);
    }
}

#[test]
#[should_panic(expected = "a code is 1 to 64 of a-z, 0-9 and -")]
fn new_panics_on_invalid_code() {
    let _ = NeedsAttention::new("refund failed");
}

#[test]
fn each_kind_of_record_has_its_flags() {
    let kind = "expected one of the kinds response, tombstone, value and attention, each under its flags, found another";
    let attention = Codec::encode_attention(&ID, None, &REFUND_FAILED);
    assert_eq!(error_text(&sealed(0, &attention[PREFIX + 14..])), kind);
    let mut rest = attention[PREFIX..PREFIX + 14].to_vec();
    rest.extend(&encode(PLAIN, 200, &HeaderMap::new(), b"")[PREFIX..]);
    assert_eq!(error_text(&sealed(ATTENTION, &rest)), kind);
}

#[test]
fn plain_body_and_headers_share_record_buffer() {
    let record = encode(PLAIN, 200, &headers(&[("x-a", b"value")]), &json(1000));
    let found = response(PLAIN, &record);
    let within = |part: &[u8]| record.as_ptr_range().contains(&part.as_ptr());
    assert!(within(&found.body));
    assert!(within(found.headers["x-a"].as_bytes()));
}

#[test]
fn record_has_no_spare_capacity() {
    for codec in [PLAIN, DEFLATING] {
        for length in [0, 1, 255, 256, 1000, 65_535, 65_536, 100_000] {
            let record = encode(codec, 200, &headers(&[("x-a", b"value")]), &json(length));
            let length = record.len();
            assert_eq!(Vec::from(record).capacity(), length);
        }
    }
}

#[test]
fn payload_size_is_tight_upper_bound() {
    let long = vec![b'v'; 70_000];
    let values = [&b""[..], b"short", &long[..255], &long[..256], &long];
    for value in values {
        let payload = Payload {
            status: Some(999),
            recorded_at: Some(u64::MAX),
            headers: Some(Lines(vec![("content-type", value); 20])),
            trailers: Some(Lines(vec![("content-type", value); 20])),
            sensitive: Some(payload::Bin(&value[..value.len().min(256)])),
            body: Some(payload::Bin(value)),
            ..Payload::new(Kind::Response, Origin::from(&ID))
        };
        let mut out = Vec::new();
        payload.write(&mut out);
        assert!(payload.size() >= out.len());
        assert!(payload.size() < out.len() + 64);
    }
    let payload = Payload {
        status: Some(999),
        reason: Some(TombstoneReason::TooLarge.name()),
        ..Payload::new(Kind::Tombstone, Origin::from(&ID))
    };
    let mut out = Vec::new();
    payload.write(&mut out);
    assert!(payload.size() >= out.len());
}

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

#[test]
fn payload_over_threshold_is_deflated_if_smaller() {
    let body = json(1000);
    let plain = encode(PLAIN, 200, &HeaderMap::new(), &body);
    let length = plain.len() - PREFIX;
    for (compress_above, deflated) in [(0, true), (length - 1, true), (length, false)] {
        let codec = Codec {
            compress_above,
            ..PLAIN
        };
        let record = encode(codec, 200, &HeaderMap::new(), &body);
        assert_eq!(record[1], u8::from(deflated));
        assert_eq!(record.len() < plain.len(), deflated);
    }

    let noise = Random::new(9).bytes(4000);
    let record = encode(DEFLATING, 200, &HeaderMap::new(), &noise);
    assert_eq!(record[1], 0);
}

/// Regression test: a compressor stopped at too long output retained a part of each attempt, until it panicked.
#[test]
fn incompressible_bodies_leave_compressor_clean() {
    let noise = Random::new(8).bytes(200);
    let body = json(1000);
    for _ in 0..2000 {
        assert_eq!(encode(DEFLATING, 200, &HeaderMap::new(), &noise)[1], 0);
    }
    let record = encode(DEFLATING, 200, &HeaderMap::new(), &body);
    assert_eq!(record[1], DEFLATED);
    assert_eq!(response(DEFLATING, &record).body, body);
}

#[test]
fn compressor_always_has_capacity_to_finish() {
    let random = &mut Random::new(10);
    for length in [0, 1, 7, 100, 1000, 65_535, 65_536, 300_000] {
        // The bytes with the longest codes, almost without repetition.
        let mut expensive = random.bytes(length);
        expensive.iter_mut().for_each(|byte| *byte |= 0x90);
        for payload in [random.bytes(length), expensive, vec![0; length]] {
            assert!(deflate::deflate(&payload, &mut Vec::new()), "{length}");
        }
    }
}

#[test]
fn payload_above_inflate_limit_is_not_deflated() {
    let codec = Codec {
        compress_above: 0,
        max_inflated: 1000,
    };
    let body = json(2000);
    let record = encode(codec, 200, &HeaderMap::new(), &body);
    assert_eq!(record[1], 0);
    assert_eq!(response(codec, &record).body, body);
}

#[test]
fn large_bodies_inflate_in_several_pieces() {
    for length in [32_000, 32_768, 65_536, 100_000, 900_000] {
        let body = json(length);
        let record = encode(DEFLATING, 200, &HeaderMap::new(), &body);
        assert_eq!(record[1], DEFLATED);
        assert_eq!(response(DEFLATING, &record).body, body);
    }
}

// F-111
#[test]
fn bomb_above_limit_is_rejected_before_inflating() {
    let codec = Codec {
        max_inflated: 1 << 24,
        ..DEFLATING
    };
    let bomb = encode(codec, 200, &HeaderMap::new(), &vec![0; 1 << 21]);
    assert!(bomb.len() < (1 << 21) / 20);
    let allocated = allocation_counter::measure(|| {
        assert!(
            error_text(&bomb).starts_with("expected an inflated length of at most 1048576 bytes")
        );
    });
    assert!(allocated.bytes_max < 1000);
}

// F-111
#[test]
fn bomb_within_limit_allocates_at_most_twice_its_size() {
    let body = vec![0; PLAIN.max_inflated - 1000];
    let bomb = encode(DEFLATING, 200, &HeaderMap::new(), &body);
    assert!(bomb.len() < body.len() / 100);
    assert_eq!(response(PLAIN, &bomb).body, body);
    let allocated = allocation_counter::measure(|| assert!(PLAIN.decode(&ID, &bomb).is_ok()));
    let most = 2 * body.len() as u64 + 64 * 1024;
    assert!(allocated.bytes_max <= most, "{allocated:?}");
}

#[test]
fn wrong_inflated_length_is_rejected() {
    let payload = payload_of(&fields());
    let length = payload.len();
    for declared in [0, 1, length - 1, length + 1, 1 << 20] {
        let message = error_text(&sealed(DEFLATED, &deflated(declared, &payload)));
        let expected = format!("expected {declared} bytes after inflating, found ");
        assert!(message.starts_with(&expected), "{message}");
    }
    let record = sealed(DEFLATED, &deflated(length, &payload));
    assert!(PLAIN.decode(&ID, &record).is_ok());
}

// F-111
#[test]
fn declared_length_alone_allocates_nothing() {
    // The first use sets up the deflate state of this thread.
    let rest = deflated(1 << 20, &payload_of(&fields()));
    let record = sealed(DEFLATED, &rest);
    assert!(PLAIN.decode(&ID, &record).is_err());
    let allocated = allocation_counter::measure(|| {
        assert!(PLAIN.decode(&ID, &record).is_err());
    });
    assert!(allocated.bytes_max < 64 * 1024, "{allocated:?}");
}

#[test]
fn bytes_after_deflate_stream_are_rejected() {
    let payload = payload_of(&fields());
    let mut rest = deflated(payload.len(), &payload);
    rest.extend_from_slice(b"abc");
    assert_eq!(
        error_text(&sealed(DEFLATED, &rest)),
        "expected nothing after the deflate stream, found 3 bytes"
    );
    for rest in [&b""[..], b"\x05\0\0", b"\x05\0\0\0", b"\x05\0\0\0\xff\xff"] {
        assert_eq!(
            error_text(&sealed(DEFLATED, rest)),
            "expected a deflate stream, found something else"
        );
    }
}

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
    for status in [0, 99, 1000, 65_535, 65_536] {
        let record = record_of(&with("status", messagepack(&status)));
        assert!(PLAIN.decode(&ID, &record).is_err(), "{status}");
    }
    for status in [100, 599, 600, 999] {
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
        status in 100_u16..=999,
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
