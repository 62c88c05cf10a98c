//! Shares of principals in a full store.

use super::{super::details::Details, *};

fn scope_of(principal: u8) -> ScopeDigest {
    ScopeDigest::from_bytes([principal; 16])
}

/// Returns a store in which the principals of the tests have different groups. Two of them share one with a probability of 1 in
/// 1,024.
fn store_with_groups() -> MemoryStore {
    loop {
        let store = MemoryStore::new();
        let mut groups = [1, 2, 3, 9].map(|it| store.table.shared.group(Some(&scope_of(it))));
        groups.sort_unstable();
        if groups.windows(2).all(|pair| pair[0] != pair[1]) {
            return store;
        }
    }
}

fn claim_of(principal: u8, n: u64) -> Claim {
    Claim {
        scope: Some(scope_of(principal)),
        ..claim(u64::from(principal) << 24 | n)
    }
}

async fn record_of(store: &MemoryStore, principal: u8, n: u64, len: usize) {
    retained_record_of(store, principal, n, len, HOUR).await;
}

/// Stores a record for as long as one that needs attention.
async fn longest_record_of(store: &MemoryStore, principal: u8, n: u64, len: usize) {
    retained_record_of(store, principal, n, len, Ttl::MAX).await;
}

async fn retained_record_of(
    store: &MemoryStore,
    principal: u8,
    n: u64,
    len: usize,
    retention: Ttl,
) {
    let claim = claim_of(principal, n);
    store.acquire(&claim).await.unwrap();
    let record = Bytes::from(vec![principal; len]);
    store
        .complete(&claim.lease_ref(1), record, retention)
        .await
        .unwrap();
}

async fn records_of(store: &MemoryStore, principal: u8, records: u64) -> u64 {
    let mut found = 0;
    for n in 0..records {
        let id = claim_of(principal, n).id;
        let probe = Claim::new(id, FINGERPRINT).unwrap();
        if let Acquired::Completed { .. } = store.acquire(&probe).await.unwrap() {
            found += 1;
        } else {
            store.release(&probe.lease_ref(1)).await.unwrap();
        }
    }
    found
}

// S-966, F-940
/// A caller loses no records while another caller stores many records of any size.
#[tokio::test(start_paused = true)]
async fn one_caller_evicts_only_its_own_records() {
    const MAX: usize = 4 << 20;
    for len in [0, 1000, 64 << 10, 1 << 20] {
        let store = store_with_groups().with_max_bytes(MAX);
        for n in 0..20 {
            record_of(&store, 1, n, 1000).await;
            record_of(&store, 2, n, 1000).await;
        }
        // The records of the other callers are older than those of the hostile caller.
        let before = store.bytes();
        assert!(before < MAX / 64 * 2);
        let total = 3 * MAX / (ENTRY_BYTES + len);
        for n in 0..total as u64 {
            record_of(&store, 9, n, len).await;
        }
        assert!(store.bytes() <= MAX);
        assert!(store.bytes() > MAX / 4 * 3 - len, "alone it may use all");
        assert_eq!(records_of(&store, 1, 20).await, 20, "{len}");
        assert_eq!(records_of(&store, 2, 20).await, 20, "{len}");
    }
}

// S-966
/// The shares count entries as well as bytes, so small records do not evict a few large ones.
#[tokio::test(start_paused = true)]
async fn small_records_do_not_evict_large_ones() {
    let store = store_with_groups().with_max_entries(1000);
    for n in 0..100 {
        record_of(&store, 1, n, 100_000).await;
    }
    for n in 0..5000 {
        record_of(&store, 2, n, 0).await;
    }
    assert_eq!(store.len(), 1000);
    assert_eq!(records_of(&store, 1, 100).await, 100);
}

// S-966
#[tokio::test(start_paused = true)]
async fn two_large_callers_get_equal_shares() {
    let store = store_with_groups().with_max_bytes(4 << 20);
    for n in 0..400 {
        record_of(&store, 1, n, 10_000).await;
    }
    for n in 0..1000 {
        record_of(&store, 2, n, 10_000).await;
    }
    let [first, second] = [
        records_of(&store, 1, 400).await,
        records_of(&store, 2, 1000).await,
    ];
    assert!(first.abs_diff(second) < first / 4, "{first} and {second}");
}

// S-966
/// A record that needs attention has the longest retention. It is often the only record of its caller in its shard: there
/// are 64 shards, and 51 of the larger records fit.
#[tokio::test(start_paused = true)]
async fn record_with_longest_retention_is_evicted_last() {
    for (len, count) in [(100, 10_000), (20_000, 1000)] {
        let store = store_with_groups().with_max_bytes(1 << 20);
        longest_record_of(&store, 1, 0, 500).await;
        for n in 1..count {
            record_of(&store, 1, n, len).await;
        }
        assert_eq!(records_of(&store, 1, 1).await, 1, "{len}");
    }
}

// S-966
/// The other records belong to other callers, and most of these are not large.
#[tokio::test(start_paused = true)]
async fn longest_retention_outlives_other_callers() {
    let store = store_with_groups().with_max_entries(100);
    longest_record_of(&store, 1, 0, 500).await;
    for n in 0..1000 {
        record(&store, n, 0, HOUR).await;
    }
    assert_eq!(store.len(), 100);
    assert_eq!(records_of(&store, 1, 1).await, 1);
}

// S-966
/// Otherwise each insertion would search all shards for other records of the first caller, and there are none.
#[tokio::test(start_paused = true)]
async fn longest_retention_does_not_count_in_share() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    for n in 0..5 {
        longest_record_of(&store, 1, n, 100_000).await;
    }
    for n in 0..3 {
        record_of(&store, 2, n, 20_000).await;
    }
    let shared = &store.table.shared;
    let second = shared.group(Some(&scope_of(2)));
    assert_eq!(shared.usage.largest(&shared.budget), Some(second));
}

/// The large record needs the bytes of the only other record, and of some with the longest retention.
#[tokio::test(start_paused = true)]
async fn longest_retention_is_evicted_if_no_other_is_left() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    for n in 0..5 {
        longest_record_of(&store, 1, n, 90_000).await;
    }
    record_of(&store, 2, 0, 1000).await;
    record_of(&store, 3, 0, 700_000).await;
    assert_eq!(records_of(&store, 2, 1).await, 0);
    assert_eq!(records_of(&store, 3, 1).await, 1);
    assert_eq!(records_of(&store, 1, 5).await, 3);
}

// S-966
/// A caller whose requests all need attention cannot evict the records of others.
#[tokio::test(start_paused = true)]
async fn longest_retention_fills_half_of_store() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    for n in 0..100 {
        record_of(&store, 1, n, 1000).await;
    }
    for n in 0..2000 {
        longest_record_of(&store, 9, n, 1000).await;
    }
    assert_eq!(records_of(&store, 1, 100).await, 100);
    // Others can use the other half.
    for n in 0..300 {
        record_of(&store, 2, n, 1000).await;
    }
    assert_eq!(records_of(&store, 1, 100).await, 100);
    assert_eq!(records_of(&store, 2, 300).await, 300);
}

// S-966
/// Many callers with such records cannot evict others either, nor can one caller evict its own shorter records with them.
#[tokio::test(start_paused = true)]
async fn longest_retention_of_many_fills_half_of_store() {
    for callers in [1, 200] {
        let store = MemoryStore::new().with_max_entries(2000);
        for n in 0..200 {
            record_of(&store, 1, n, 0).await;
        }
        for n in 0..5000 {
            longest_record_of(&store, (n % callers) as u8 + 1, 200 + n, 0).await;
        }
        assert_eq!(records_of(&store, 1, 200).await, 200, "{callers} callers");
    }
}

/// The shares apply to records with the longest retention as well.
#[tokio::test(start_paused = true)]
async fn callers_with_longest_retention_have_shares() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    for n in 0..10 {
        longest_record_of(&store, 1, n, 1000).await;
    }
    for n in 0..2000 {
        longest_record_of(&store, 9, n, 1000).await;
    }
    assert_eq!(records_of(&store, 1, 10).await, 10);
}

#[tokio::test(start_paused = true)]
async fn take_over_keeps_group_of_first_claim() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    record_of(&store, 1, 0, 450_000).await;
    // A completer takes the orphan over, and knows no scope.
    let orphan = claim_of(9, 0);
    store.acquire(&orphan).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let again = Claim {
        scope: None,
        token: Token::from_bytes([3; 16]),
        ..orphan.clone()
    };
    let taken = store.acquire(&again).await.unwrap();
    assert!(matches!(taken, Acquired::Granted { takeover: true, .. }));
    let record = Bytes::from(vec![0; 400_000]);
    store
        .complete(&again.lease_ref(2), record, HOUR)
        .await
        .unwrap();
    for n in 1..4 {
        record_of(&store, 9, n, 100_000).await;
    }
    assert_eq!(records_of(&store, 1, 1).await, 1);
}

/// The entry may be deleted before its record is stored.
#[tokio::test(start_paused = true)]
async fn record_without_entry_counts_for_its_caller() {
    let store = store_with_groups().with_max_bytes(1 << 20);
    record_of(&store, 1, 0, 450_000).await;
    let lease = claim_of(9, 0).lease_ref(1);
    let record = Bytes::from(vec![0; 400_000]);
    store.complete(&lease, record, HOUR).await.unwrap();
    for n in 1..4 {
        record_of(&store, 9, n, 100_000).await;
    }
    assert_eq!(records_of(&store, 1, 1).await, 1);
}

/// Claims fresh keys until the store refuses one. Returns the claims with a lease.
async fn lease_until_refused(store: &MemoryStore, principal: u8) -> (Vec<Claim>, StoreError) {
    let mut leases = Vec::new();
    loop {
        let claim = claim_of(principal, leases.len() as u64);
        match store.acquire(&claim).await {
            Ok(Acquired::Granted { .. }) => leases.push(claim),
            Ok(other) => panic!("{other:?}"),
            Err(error) => return (leases, error),
        }
    }
}

// S-983, F-947
#[tokio::test(start_paused = true)]
async fn orphans_of_one_caller_leave_room_to_others() {
    let store = store_with_groups().with_max_entries(80);
    let (leases, error) = lease_until_refused(&store, 9).await;
    assert!(matches!(error, StoreError::CallerLimit), "{error}");
    assert_eq!(leases.len(), 60, "three quarters");
    // The leases become orphans.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let again = store.acquire(&leases[0]).await.unwrap();
    assert!(matches!(again, Acquired::Granted { .. }), "its own lease");
    for principal in [1, 2] {
        let (leases, _) = lease_until_refused(&store, principal).await;
        assert_eq!(leases.len(), 10, "an eighth");
    }
    assert_full(store.acquire(&claim_of(3, 0)).await.unwrap_err());
    // A record makes room, because it can be evicted.
    let lease = leases[0].lease_ref(1);
    store.complete(&lease, Bytes::new(), HOUR).await.unwrap();
    let granted = store.acquire(&claim_of(3, 0)).await.unwrap();
    assert!(matches!(granted, Acquired::Granted { .. }));
}

// S-983, F-947
/// Orphans are never evicted. A caller could otherwise replace the records of all others by its orphans. Its own records that need
/// attention stay too.
#[tokio::test(start_paused = true)]
async fn orphans_of_one_caller_evict_no_records_of_others() {
    let store = store_with_groups().with_max_entries(800);
    for n in 0..400 {
        record_of(&store, 1, n, 0).await;
    }
    for n in 0..250 {
        record_of(&store, 2, n, 0).await;
    }
    // The other callers have more records than this one.
    for n in 1000..1040 {
        record_of(&store, 9, n, 0).await;
    }
    for n in 1040..1050 {
        longest_record_of(&store, 9, n, 0).await;
    }
    let (leases, error) = lease_until_refused(&store, 9).await;
    assert!(matches!(error, StoreError::CallerLimit), "{error}");
    assert_eq!(leases.len(), 140, "100 free entries, and its 40 records");
    for n in 1040..1050 {
        let probe = Claim::new(claim_of(9, n).id, FINGERPRINT).unwrap();
        let found = store.acquire(&probe).await.unwrap();
        assert!(matches!(found, Acquired::Completed { .. }), "{n}");
    }
    assert_eq!(records_of(&store, 1, 400).await, 400);
    assert_eq!(records_of(&store, 2, 250).await, 250);
    let granted = store.acquire(&claim_of(3, 0)).await.unwrap();
    assert!(matches!(granted, Acquired::Granted { .. }));
}

/// A service may have one caller only.
#[tokio::test(start_paused = true)]
async fn lone_caller_replaces_its_records_by_leases() {
    for retention in [HOUR, Ttl::MAX] {
        let store = MemoryStore::new().with_max_entries(800);
        for n in 1000..1800 {
            retained_record_of(&store, 9, n, 0, retention).await;
        }
        let (leases, error) = lease_until_refused(&store, 9).await;
        assert!(matches!(error, StoreError::CallerLimit), "{error}");
        assert_eq!(leases.len(), 600, "three quarters");
        assert_eq!(store.len(), 800);
    }
}

/// The share of leases applies to bytes too.
#[tokio::test(start_paused = true)]
async fn leases_of_one_caller_leave_bytes_to_others() {
    let store = store_with_groups().with_max_bytes(80 * ENTRY_BYTES);
    for (principal, leases) in [(9, 60), (1, 10), (2, 10)] {
        let (granted, _) = lease_until_refused(&store, principal).await;
        assert_eq!(granted.len(), leases);
    }
}

/// The details of an entry use bytes as well.
#[tokio::test(start_paused = true)]
async fn leases_with_details_leave_bytes_to_others() {
    let cost = ENTRY_BYTES + Details::cost_of("").bytes;
    let store = store_with_groups().with_max_bytes(80 * cost).with_details();
    for (principal, leases) in [(9, 60), (1, 10), (2, 10)] {
        let (granted, _) = lease_until_refused(&store, principal).await;
        assert_eq!(granted.len(), leases);
    }
}
