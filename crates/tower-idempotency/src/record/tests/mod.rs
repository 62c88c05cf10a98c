mod compression;
mod error_texts;
mod fields;
mod header_lines;

use std::{
    cell::Cell,
    time::{Duration, UNIX_EPOCH},
};

use http::HeaderValue;
use proptest::{collection::vec, prelude::*};
use serde::{Serialize, Serializer};
use smallvec::smallvec;

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

impl Serialize for payload::Bin<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
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

/// Returns a record of version 1 with these flags.
fn known_bytes(flags: u8, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    let checksum = checksum(&ID, flags, &payload).to_le_bytes();
    [&[1, flags], &checksum[..], &payload].concat()
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
    let payload: [&[u8]; 6] = [
        b"\x85",
        b"\xa4kind\xa8response",
        b"\xa6status\xcc\xc8",
        b"\xabrecorded_at\xcf\x00\x00\x01\x8b\xcf\xe5\x68\x00",
        b"\xa7headers\x92\x92\xa4etag\xc4\x03\"1\"\x92\xa3x-b\xc4\x01\xff",
        b"\xa4body\xc4\x05hello",
    ];
    assert_eq!(record, known_bytes(0, &payload));
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
    let payload: [&[u8]; 4] = [
        b"\x0drefund-failed\x83",
        b"\xa4kind\xa9attention",
        b"\xa6status\xcd\x01\xf6",
        b"\xa6reason\xb0provider said no",
    ];
    assert_eq!(record, known_bytes(2, &payload));
    assert_eq!(NeedsAttention::in_record(&record), Some(attention));
    // A record of another kind is not an attention record, even with the same bytes.
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
fn payload_size_is_exact() {
    let long = vec![b'v'; 70_000];
    let values = [&b""[..], b"short", &long[..255], &long[..256], &long];
    let numbers = [
        0,
        0x7f,
        0x80,
        0xff,
        0x100,
        0xffff,
        0x1_0000,
        u32::MAX.into(),
        u64::MAX,
    ];
    let counts = [0, 1, 15, 16, 128].into_iter().cycle();
    for ((value, number), count) in values
        .iter()
        .flat_map(|value| numbers.map(|n| (*value, n)))
        .zip(counts)
    {
        let mut out = Vec::new();
        let payload = Payload {
            status: u16::try_from(number).ok(),
            recorded_at: Some(number),
            headers: Some(Lines(smallvec![("content-type", value); count])),
            trailers: Some(Lines(smallvec![("content-type", value); count])),
            sensitive: Some(payload::Bin(&value[..value.len().min(256)])),
            body: Some(payload::Bin(value)),
            ..Payload::new(PayloadKind::Response, Origin::from(&ID))
        };
        payload.write(&mut out);
        assert_eq!(payload.size(), out.len());
        let mut read = Payload::default();
        let is_read = payload::plain::read(&out, &mut read).is_some();
        assert!(is_read, "the writer's form is read directly");
        assert_eq!(read, payload);
        let read = payload::parse_any_fields(&out).expect("MessagePack");
        assert_eq!(read, payload);
    }
    let payload = Payload {
        status: Some(999),
        reason: Some(TombstoneReason::TooLarge.name()),
        ..Payload::new(PayloadKind::Tombstone, Origin::from(&ID))
    };
    let mut out = Vec::new();
    payload.write(&mut out);
    assert_eq!(payload.size(), out.len());
}
