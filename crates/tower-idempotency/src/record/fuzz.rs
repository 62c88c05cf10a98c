//! Tests with damaged and forged records, the same on every run. The golden files are their corpus.

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

/// Returns golden and generated records, all of them readable.
fn originals(random: &mut Random) -> Vec<Bytes> {
    let mut originals = golden::files();
    // The largest record costs as much as a thousand others, and adds only its size. Other tests cover it.
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

/// Decodes a record and returns `true` on success. Panics if that allocates more than twice the size of the record
/// plus 64 KiB. Also panics if the operators' view differs from the decoded record.
fn decodes(record: &Bytes) -> bool {
    let mut readable = false;
    if record.get(1) == Some(&SEALED) {
        assert!(PLAIN.decode(&ID, record).is_err());
    }
    let mut fields = Payload::default();
    if record.get(1) == Some(&0)
        && let Some(payload) = record.get(PREFIX..)
        && payload::plain::read(payload, &mut fields).is_some()
    {
        let read = payload::parse_any_fields(payload).expect("both readers read it");
        assert_eq!(fields, read);
    }
    if let Ok(Record::Attention { attention, .. }) = PLAIN.decode(&ID, record) {
        assert_eq!(NeedsAttention::in_record(record), Some(attention));
    }
    let allocated = allocation_counter::measure(|| readable = PLAIN.decode(&ID, record).is_ok());
    let most = |size: usize| 2 * u64::try_from(size).expect("a length") + 64 * 1024;
    if allocated.bytes_max > most(record.len()) {
        let size = record.len().max(inflated(record).len());
        assert!(
            allocated.bytes_max <= most(size),
            "{allocated:?} for {size} bytes"
        );
    }
    readable
}

/// Returns the inflated bytes of a deflated record, and ignores the declared length.
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

// F-108
#[test]
fn corrupt_records_never_decode() {
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
fn forged_records_decode_or_are_rejected() {
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
            _ => *random.pick(&[0, 0, 0, 0, 0, 0, DEFLATED, ATTENTION, SEALED]),
        };
        readable += usize::from(decodes(&sealed(flags, &rest)));
    }
    assert!(readable > inputs / 100, "{readable}");
}

#[test]
fn forged_deflated_records_decode_or_are_rejected() {
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
        // A broken stream does not affect the next one.
        if random.once_in(64) {
            assert!(decodes(random.pick(&originals)));
        }
    }
    assert!(readable > 0);
}

// F-111
#[test]
fn forged_deflated_payloads_decode_or_are_rejected() {
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
