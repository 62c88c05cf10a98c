//! Tests with records of earlier builds, which must always decode.
//!
//! `WRITE_GOLDEN=1 cargo test -p tower-idempotency golden` writes missing files and never overwrites one. A file that
//! no longer decodes shows a reader that lost compatibility. A new version of the format adds a folder.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, UNIX_EPOCH},
};

use super::{
    tests::{DEFLATING, ID, PLAIN, headers, json},
    *,
};

fn response(status: u16, lines: &[(&str, &[u8])], body: &[u8]) -> StoredResponse {
    StoredResponse {
        status: StatusCode::from_u16(status).expect("a status"),
        headers: headers(lines),
        body: Bytes::copy_from_slice(body),
        trailers: None,
        traceparent: None,
        recorded_at: UNIX_EPOCH + Duration::from_millis(1_767_225_600_123),
    }
}

const TRACEPARENT: &[u8] = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn tombstone(reason: TombstoneReason) -> Record {
    Record::Tombstone {
        status: StatusCode::CREATED,
        reason,
    }
}

/// Returns the file, the codec that wrote it, and its record.
fn golden() -> Vec<(&'static str, Codec, Record)> {
    let created = response(
        201,
        &[
            ("content-type", b"application/json"),
            ("location", b"/orders/1"),
            ("etag", b"\"1\""),
        ],
        br#"{"id":1,"amount":1250,"currency":"EUR"}"#,
    );
    let with_trailers = StoredResponse {
        trailers: Some(headers(&[("grpc-status", b"0"), ("x-sum", b"\xff\xfe")])),
        ..response(
            200,
            &[("content-type", b"application/grpc")],
            &[0, 255, 128],
        )
    };
    let odd_headers = response(
        200,
        &[
            ("link", b"</a>; rel=next"),
            ("link", b"</b>; rel=prev"),
            ("x-latin1", b"caf\xe9"),
            ("x-empty", b""),
            ("x-long", &[b'v'; 300]),
        ],
        b"",
    );
    let mut sensitive = StoredResponse {
        trailers: Some(headers(&[("x-sum", b"42"), ("x-signature", b"hunter2")])),
        ..response(
            200,
            &[
                ("etag", b"\"1\""),
                ("x-token", b"hunter2"),
                ("x-token", b"hunter3"),
            ],
            b"hello",
        )
    };
    for (lines, name) in [
        (Some(&mut sensitive.headers), "x-token"),
        (sensitive.trailers.as_mut(), "x-signature"),
    ] {
        let value = lines.and_then(|lines| lines.get_mut(name));
        value.expect("a line").set_sensitive(true);
    }
    let traced = StoredResponse {
        traceparent: ExecutionTrace::parse(TRACEPARENT),
        ..response(200, &[], b"traced")
    };
    let large = response(200, &[("content-type", b"application/json")], &json(70_000));
    vec![
        ("response", PLAIN, Record::Response(created.clone())),
        (
            "response-deflated",
            DEFLATING,
            Record::Response(StoredResponse {
                body: Bytes::from(json(1000)),
                ..created
            }),
        ),
        (
            "response-large-deflated",
            DEFLATING,
            Record::Response(large),
        ),
        ("response-trailers", PLAIN, Record::Response(with_trailers)),
        ("response-odd-headers", PLAIN, Record::Response(odd_headers)),
        ("response-sensitive", PLAIN, Record::Response(sensitive)),
        (
            "response-no-content",
            PLAIN,
            Record::Response(response(204, &[], b"")),
        ),
        ("response-traceparent", PLAIN, Record::Response(traced)),
        (
            "tombstone-too-large",
            PLAIN,
            tombstone(TombstoneReason::TooLarge),
        ),
        (
            "tombstone-streamed",
            PLAIN,
            tombstone(TombstoneReason::Streamed),
        ),
        (
            "tombstone-panicked",
            PLAIN,
            tombstone(TombstoneReason::Panicked),
        ),
        (
            "value",
            PLAIN,
            Record::Value(Bytes::from_static(b"\x82\xa2id\x01\xa2ok\xc3")),
        ),
        (
            "attention",
            PLAIN,
            Record::Attention {
                status: Some(StatusCode::BAD_GATEWAY),
                attention: NeedsAttention::new("refund-failed")
                    .with_reason("refund re_7: the provider answered 500 five times"),
            },
        ),
        (
            "attention-of-run-once",
            PLAIN,
            Record::Attention {
                status: None,
                attention: NeedsAttention::new("stock-2-below-zero"),
            },
        ),
    ]
}

fn encode(codec: Codec, record: &Record) -> Bytes {
    match record {
        Record::Response(response) => codec.encode_response_at(
            Origin {
                id: &ID,
                traceparent: response.traceparent.as_ref(),
            },
            response.status,
            &response.headers,
            &|_| true,
            &response.body,
            response.trailers.as_ref(),
            response.recorded_at,
        ),
        Record::Tombstone { status, reason } => codec.encode_tombstone(&ID, *status, *reason),
        Record::Value(value) => codec.encode_value(&ID, value),
        Record::Attention { status, attention } => Codec::encode_attention(&ID, *status, attention),
    }
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1")
}

fn path(name: &str) -> PathBuf {
    folder().join(name).with_extension("bin")
}

fn file(name: &str) -> Bytes {
    let path = path(name);
    fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .into()
}

/// Returns the golden files, for tests that start from real records.
pub(super) fn files() -> Vec<Bytes> {
    golden().iter().map(|(name, ..)| file(name)).collect()
}

/// With `WRITE_GOLDEN`, files that are missing are written first.
#[test]
fn every_golden_file_has_its_record() {
    let records = golden();
    for (name, codec, record) in &records {
        let path = path(name);
        if std::env::var_os("WRITE_GOLDEN").is_some() && !path.exists() {
            fs::write(path, encode(*codec, record)).expect("a golden file");
        }
    }
    let mut expected: Vec<PathBuf> = records.iter().map(|(name, ..)| path(name)).collect();
    let folder = fs::read_dir(folder()).expect("the folder of golden files");
    let mut found: Vec<PathBuf> = folder.map(|file| file.expect("a file").path()).collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

// F-110
#[test]
fn golden_records_decode() {
    for (name, codec, expected) in golden() {
        let found = codec.decode(&ID, &file(name)).expect(name);
        assert_eq!(found, expected, "{name}");
        // Equality ignores which values are sensitive.
        assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{name}");
    }
}

#[test]
fn plain_golden_records_are_encoded_unchanged() {
    // The output for the same input may change with the version of the compressor.
    for (name, codec, record) in golden() {
        if codec.compress_above == usize::MAX {
            assert_eq!(encode(codec, &record), file(name), "{name}");
        }
    }
}

/// A process of an earlier build also reads the records of this one. The compressed bytes may differ.
#[test]
fn deflated_golden_records_keep_their_payload() {
    for (name, codec, record) in golden() {
        if codec.compress_above == usize::MAX {
            continue;
        }
        let records = [encode(codec, &record), file(name)];
        let [current, golden] = records.map(|record| {
            // Version and flags, without the checksum. The inflated length precedes the stream.
            let payload = super::deflate::inflate(&record[6..], codec.max_inflated).expect(name);
            ([record[0], record[1]], payload)
        });
        assert_eq!(current, golden, "{name}");
    }
}
