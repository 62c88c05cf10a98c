//! Compressed records.

use super::*;

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

/// Regression test: a compressor that stopped at an output limit retained a part of each attempt, until it panicked.
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
