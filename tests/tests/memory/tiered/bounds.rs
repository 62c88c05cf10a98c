//! The byte limit of the tier, and its division among callers.

use tokio::time::advance;

use super::*;

/// Bytes that the tier counts in addition to a record.
const OVERHEAD: usize = 320;
const PREFIX: usize = 6;
const MIB: usize = 1024 * 1024;

/// Completes the key `n` of a caller with a record of this size.
async fn record(tiered: &Tiered<Backend>, caller: u64, n: u64, len: usize) {
    let mut claim = claim(n);
    let mut scope = [0; 16];
    scope[..8].copy_from_slice(&caller.to_le_bytes());
    claim.scope = Some(ScopeDigest::from_bytes(scope));
    execute(tiered, &claim, &vec![1; len - PREFIX], HOUR).await;
}

async fn is_in_tier(tiered: &Tiered<Backend>, n: u64) -> bool {
    let (record, calls) = replay(tiered, n).await;
    assert!(record.is_some());
    calls == 0
}

// F-987
#[tokio::test(start_paused = true)]
async fn bytes_stay_within_bound() {
    const LARGEST: usize = 100_000;
    const CAP: usize = MIB;
    let tiered = tiered().with_max_bytes(CAP);
    let mut counted = 0;
    for n in 0..600 {
        let len = PREFIX + usize::try_from(n).expect("small") * 7919 % LARGEST;
        record(&tiered, n % 50, n, len).await;
        assert!(tiered.bytes() <= CAP);
        counted += len + OVERHEAD;
        if counted <= CAP {
            assert_eq!(tiered.bytes(), counted);
        }
    }
    assert!(tiered.bytes() > CAP - 2 * LARGEST, "{}", tiered.bytes());
    assert!(counted > 20 * CAP && tiered.len() > 10);
}

#[tokio::test(start_paused = true)]
async fn record_above_eighth_is_not_kept() {
    let tiered = tiered().with_max_bytes(8 * 10_000);
    record(&tiered, 1, 1, 10_000 - OVERHEAD).await;
    record(&tiered, 1, 2, 10_001 - OVERHEAD).await;
    assert!(is_in_tier(&tiered, 1).await);
    assert!(!is_in_tier(&tiered, 2).await);
}

#[tokio::test(start_paused = true)]
async fn oldest_records_are_removed_first() {
    let tiered = tiered().with_max_bytes(100 * 1000);
    for n in 0..150 {
        record(&tiered, 1, n, 1000 - OVERHEAD).await;
        advance(Duration::from_millis(1)).await;
    }
    assert_eq!((tiered.len(), tiered.bytes()), (100, 100_000));
    for n in 50..150 {
        assert!(is_in_tier(&tiered, n).await, "{n}");
    }
    assert!(!is_in_tier(&tiered, 49).await);
}

// F-988
/// Small records of many callers, and one caller with many records that are large or small.
#[tokio::test(start_paused = true)]
async fn one_caller_does_not_push_out_others() {
    const OTHERS: u64 = 100;
    for len in [100_000, 500] {
        let tiered = tiered().with_max_bytes(2 * MIB);
        for n in 0..OTHERS * 5 {
            record(&tiered, n % OTHERS, n, 1000).await;
        }
        let hostile = u64::try_from(10 * MIB / (len + OVERHEAD)).expect("small");
        for n in 0..hostile {
            record(&tiered, OTHERS, 1_000_000 + n, len).await;
        }
        let mut kept = 0;
        for n in 0..OTHERS * 5 {
            kept += u64::from(is_in_tier(&tiered, n).await);
        }
        // Some callers may be in the group of the hostile one.
        println!(
            "{kept} of {} kept beside records of {len} bytes",
            OTHERS * 5
        );
        assert!(kept >= OTHERS * 5 * 9 / 10, "{kept}");
        assert!(is_in_tier(&tiered, 1_000_000 + hostile - 1).await);
    }
}

#[tokio::test(start_paused = true)]
async fn lone_caller_uses_whole_tier() {
    let tiered = tiered().with_max_bytes(MIB);
    for n in 0..5000 {
        record(&tiered, 1, n, 1000).await;
    }
    assert!(tiered.bytes() > MIB - 2 * (1000 + OVERHEAD));
}

#[tokio::test(start_paused = true)]
async fn expired_records_are_evicted_first() {
    let tiered = tiered().with_max_bytes(100 * 1000);
    // Many callers hold records that have passed their age, and then one caller fills the tier.
    for n in 0..100 {
        record(&tiered, n, n, 1000 - OVERHEAD).await;
    }
    advance(Duration::from_secs(60)).await;
    for n in 100..190 {
        record(&tiered, 1000, n, 1000 - OVERHEAD).await;
    }
    for n in 100..190 {
        assert!(is_in_tier(&tiered, n).await, "{n}");
    }
}

/// Without pressure, later records remove those that have passed their age.
#[tokio::test(start_paused = true)]
async fn expired_records_are_removed_in_time() {
    let tiered = tiered();
    for n in 0..1000 {
        record(&tiered, n, n, 1000).await;
    }
    advance(Duration::from_secs(60)).await;
    for n in 1000..4000 {
        record(&tiered, n, n, 1000).await;
    }
    assert_eq!(tiered.len(), 3000);
}

/// The records of two lives of a key count until the older one has passed its age.
#[tokio::test(start_paused = true)]
async fn replaced_record_counts_until_removed() {
    let tiered = tiered();
    let weight = 1000 + OVERHEAD;
    for life in 1..=2 {
        let payload = [1; 1000 - PREFIX];
        execute(&tiered, &claim(1), &payload, Ttl::from_secs(1)).await;
        advance(Duration::from_secs(1)).await;
        assert_eq!((tiered.len(), tiered.bytes()), (1, life * weight));
    }
    advance(Duration::from_secs(60)).await;
    // Each later record cleans its own group and one other.
    for n in 10..310 {
        record(&tiered, n, n, 1000).await;
    }
    assert_eq!((tiered.len(), tiered.bytes()), (300, 300 * weight));
}

#[tokio::test(start_paused = true)]
async fn lower_bound_applies_from_next_record() {
    let tiered = tiered();
    for n in 0..100 {
        record(&tiered, n, n, 1000).await;
    }
    let _smaller = tiered.clone().with_max_bytes(20_000);
    record(&tiered, 1000, 1000, 1000).await;
    assert!(tiered.bytes() <= 20_000);
    assert!(is_in_tier(&tiered, 1000).await);
}
