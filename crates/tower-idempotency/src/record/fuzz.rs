//! Damaged and forged records, the same ones on every run. Their corpus are the golden files.

use flate2::{Decompress, FlushDecompress};
use http::HeaderValue;

use super::{
    golden,
    tests::{DEFLATING, ID, PLAIN, deflated, json, repair, sealed},
    *,
};
use crate::{
    fuzz::{inputs, random},
    random::Random,
};

/// Golden records and generated ones, all of them readable.
fn originals(random: &mut Random) -> Vec<Bytes> {
    let mut originals = golden::files();
    // The largest costs as much as a thousand others, and shows nothing but the size; it has tests of its own.
    originals.retain(|record| record.len() < 4096);
    for n in 0..64 {
        let mut headers = HeaderMap::new();
        for _ in 0..random.below(8) {
            let name = *random.pick(&["etag", "x-a", "x-b", "content-type", "link"]);
            let mut value = random.bytes(12);
            value.retain(|byte| *byte >= 0x20 && *byte != 0x7f);
            let mut value = HeaderValue::from_bytes(&value).expect("a header value");
            value.set_sensitive(random.once_in(4));
            headers.append(name, value);
        }
        let length = random.below(300);
        let body = if n % 2 == 0 {
            json(length)
        } else {
            random.bytes(length)
        };
        let trailers = random.once_in(3).then(|| headers.clone());
        let codec = if n % 4 == 0 { DEFLATING } else { PLAIN };
        let status = StatusCode::from_u16(*random.pick(&[200, 201, 204, 404])).expect("a status");
        originals.push(codec.encode_response(
            &ID,
            status,
            &headers,
            &|_| true,
            &body,
            trailers.as_ref(),
        ));
    }
    originals
}

/// Decodes and tells whether it could; fails when that allocates more than twice what there is, and 64 KiB, or when what
/// operators are shown is not what is answered.
fn decodes(record: &Bytes) -> bool {
    let mut readable = false;
    if let Ok(Record::Attention { attention, .. }) = PLAIN.decode(&ID, record) {
        assert_eq!(NeedsAttention::in_record(record), Some(attention));
    }
    let allocated = allocation_counter::measure(|| readable = PLAIN.decode(&ID, record).is_ok());
    let most = |there_is: usize| 2 * u64::try_from(there_is).expect("a length") + 64 * 1024;
    if allocated.bytes_max > most(record.len()) {
        let there_is = record.len().max(inflated(record).len());
        assert!(
            allocated.bytes_max <= most(there_is),
            "{allocated:?} for {there_is} bytes"
        );
    }
    readable
}

/// What comes out of a deflated record, whatever it declares.
fn inflated(record: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PLAIN.max_inflated);
    if record.get(1) == Some(&DEFLATED) && record.len() > PREFIX + 4 {
        let _ = Decompress::new(false).decompress_vec(
            &record[PREFIX + 4..],
            &mut out,
            FlushDecompress::Finish,
        );
    }
    out
}

#[test]
fn records_changed_without_their_checksum_never_decode() {
    let (random, inputs) = (&mut random(1), inputs(500_000));
    let originals = originals(random);
    for _ in 0..inputs {
        let original = random.pick(&originals);
        let mut record = original.to_vec();
        for _ in 0..=random.below(3) {
            random.mutate(&mut record);
        }
        if record != *original {
            let record = Bytes::from(record);
            assert!(!decodes(&record), "{record:?} of {original:?}");
        }
    }
}

#[test]
fn records_changed_with_their_checksum_decode_or_are_refused() {
    let (random, inputs) = (&mut random(2), inputs(250_000));
    let originals = originals(random);
    let mut readable = 0;
    for _ in 0..inputs {
        let original = random.pick(&originals);
        let mut rest = original[PREFIX..].to_vec();
        for _ in 0..=random.below(3) {
            random.mutate(&mut rest);
        }
        let flags = match original[1] {
            ATTENTION => ATTENTION,
            _ => *random.pick(&[0, 0, 0, 0, 0, 0, DEFLATED, ATTENTION]),
        };
        readable += usize::from(decodes(&sealed(flags, &rest)));
    }
    assert!(readable > inputs / 100, "{readable}");
}

#[test]
fn deflated_records_changed_with_their_checksum_decode_or_are_refused() {
    let (random, inputs) = (&mut random(3), inputs(240_000));
    let mut originals = originals(random);
    originals.retain(|record| record[1] == DEFLATED);
    let mut readable = 0;
    for _ in 0..inputs {
        let mut record = random.pick(&originals).to_vec();
        for _ in 0..=random.below(3) {
            random.mutate(&mut record);
        }
        if let [version, flags, ..] = &mut record[..] {
            *version = VERSION;
            *flags = DEFLATED;
        }
        repair(&mut record);
        readable += usize::from(decodes(&Bytes::from(record)));
        // A broken stream leaves nothing behind for the next one.
        if random.once_in(64) {
            assert!(decodes(random.pick(&originals)));
        }
    }
    assert!(readable > 0);
}

#[test]
fn forged_payloads_inside_deflate_decode_or_are_refused() {
    let (random, inputs) = (&mut random(4), inputs(10_000));
    let mut originals = originals(random);
    originals.retain(|record| record[1] == 0);
    let mut readable = 0;
    for _ in 0..inputs {
        let mut payload = random.pick(&originals)[PREFIX..].to_vec();
        if random.once_in(2) {
            random.mutate(&mut payload);
        }
        let declared = match random.below(8) {
            0 => random.below(PLAIN.max_inflated),
            1 => payload.len() + random.below(3),
            _ => payload.len(),
        };
        readable += usize::from(decodes(&sealed(DEFLATED, &deflated(declared, &payload))));
    }
    assert!(readable > inputs / 4, "{readable}");
}
