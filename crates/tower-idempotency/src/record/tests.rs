use std::time::{Duration, UNIX_EPOCH};

use http::header;

use super::*;

const ID: KeyId = KeyId::from_bytes([7; 32]);
const PLAIN: Codec = Codec {
    compress_above: usize::MAX,
    max_inflated: 1 << 20,
};
const DEFLATING: Codec = Codec {
    compress_above: 0,
    max_inflated: 1 << 20,
};

fn headers(lines: &[(&'static str, &[u8])]) -> HeaderMap {
    lines
        .iter()
        .map(|&(name, value)| {
            (
                HeaderName::from_static(name),
                http::HeaderValue::from_bytes(value).expect("a header value"),
            )
        })
        .fold(HeaderMap::new(), |mut map, (name, value)| {
            map.append(name, value);
            map
        })
}

fn everything(_: &HeaderName) -> bool {
    true
}

fn encode(codec: Codec, status: u16, headers: &HeaderMap, body: &[u8]) -> Bytes {
    let status = StatusCode::from_u16(status).expect("a status");
    codec.encode_response(&ID, status, headers, &everything, body, None)
}

fn response(codec: Codec, record: &Bytes) -> StoredResponse {
    match codec.decode(&ID, record).expect("a record") {
        Record::Response(response) => response,
        other @ (Record::Tombstone { .. } | Record::Value(_)) => {
            panic!("a response, not {other:?}")
        }
    }
}

fn json(length: usize) -> Vec<u8> {
    let mut body = b"[".to_vec();
    for n in 0_u64.. {
        let digits = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        body.extend_from_slice(
            format!(r#"{{"id":{n},"amount":{digits},"currency":"EUR"}},"#).as_bytes(),
        );
        if body.len() >= length {
            break;
        }
    }
    body.truncate(length);
    body
}

#[test]
fn a_response_comes_back_as_it_was() {
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
        let record = encode(codec, 201, &lines, &body);
        let found = response(codec, &record);
        assert_eq!(found.status, StatusCode::CREATED);
        assert!(found.headers.iter().eq(lines.iter()));
        assert_eq!(found.body, body);
        assert_eq!(found.trailers, None);
        let age = found.recorded_at.elapsed().expect("a time in the past");
        assert!(age < Duration::from_secs(60));
    }
}
