//! Limits of the store: evictions, expiry and shards.

use super::*;

// F-113
#[tokio::test]
async fn fm_114_full_store_rejects_and_loses_no_lease() {
    let store = MemoryStore::new().with_max_entries(100);
    let mut leases = Vec::new();
    for n in 0..100 {
        leases.push(hold(&store, n).await);
    }
    let text = assert_full(store.acquire(&claim(100)).await.unwrap_err());
    insta::assert_snapshot!(text, @"leases and orphans fill the memory store of at most 100 entries and 268435456 bytes: raise `with_max_entries` or `with_max_bytes`");
    for lease in &leases {
        store.renew(lease, HOUR).await.unwrap();
    }
    assert_eq!(store.len(), 100);
    store.release(&leases[7]).await.unwrap();
    hold(&store, 100).await;
}

async fn assert_completed(store: &MemoryStore, id: &KeyId) {
    let claim = Claim::new(*id, FINGERPRINT).unwrap();
    let found = store.acquire(&claim).await.unwrap();
    assert!(matches!(found, Acquired::Completed { .. }), "{found:?}");
}

/// The operator resolves the record that an eviction would take first. Its decision must not execute the request again.
#[tokio::test(start_paused = true)]
async fn resolution_in_full_store_keeps_its_entry() {
    let attention = Resolution::NeedsAttention(NeedsAttention::new("examine"));
    let (record, _) = attention.record(&id(0)).unwrap();
    let max = 20 * (ENTRY_BYTES + record.len());
    let store = store_with_one_shard(max);
    for n in 0..20 {
        let claim = Claim {
            scope: None,
            ..claim(n)
        };
        store.acquire(&claim).await.unwrap();
        let (record, retention) = attention.record(&claim.id).unwrap();
        let lease = claim.lease_ref(1);
        store.complete(&lease, record, retention).await.unwrap();
    }
    assert_eq!(store.bytes(), max);
    let page = store.list(&Query::new(State::NeedsAttention)).await;
    let first = page.unwrap().entries[0].clone();
    let complete = Resolution::Complete {
        record: vec![1; 400].into(),
        retention: HOUR,
    };
    let resolved = store.resolve(first.seen(), &complete).await.unwrap();
    assert!(resolved.is_applied());
    assert_eq!(store.len(), 20, "no other record is evicted");
    // The next write evicts others.
    hold(&store, 100).await;
    assert!(store.bytes() <= max);
    assert_completed(&store, first.id()).await;
}

// F-113
#[tokio::test(start_paused = true)]
async fn orphan_is_resolved_in_store_full_of_orphans() {
    let max = 80 * ENTRY_BYTES;
    let store = store_with_one_shard(max);
    for n in 0..80 {
        hold(&store, n).await;
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    let page = store.list(&Query::new(State::Orphaned)).await.unwrap();
    let resolutions = [
        Resolution::Complete {
            record: vec![1; 400].into(),
            retention: HOUR,
        },
        Resolution::NeedsAttention(NeedsAttention::new("examine")),
    ];
    for (entry, resolution) in page.entries.iter().zip(&resolutions) {
        let resolved = store.resolve(entry.seen(), resolution).await.unwrap();
        assert!(resolved.is_applied());
        assert_completed(&store, entry.id()).await;
    }
    assert!(store.bytes() > max + 400);
    // The records are the only entries that the next write can evict.
    hold(&store, 100).await;
    assert!(store.bytes() <= max);
}

// F-112
#[tokio::test(start_paused = true)]
async fn orphans_are_never_evicted() {
    let store = MemoryStore::new().with_max_entries(100);
    for n in 0..100 {
        hold(&store, n).await;
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_full(store.acquire(&claim(100)).await.unwrap_err());
    tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
    for n in 100..200 {
        hold(&store, n).await;
    }
}

#[tokio::test]
async fn records_expiring_soonest_are_evicted_first() {
    let table = Table::new(1, 10, usize::MAX);
    let of_one_caller = |n| Claim {
        scope: None,
        ..claim(n)
    };
    let mut claims: Vec<Claim> = (0..11).map(of_one_caller).collect();
    let last = claims.pop().unwrap();
    for (n, claim) in claims.iter().enumerate() {
        let retention = Ttl::from_secs(1000 - n as u64);
        table.acquire(claim, 0).unwrap();
        table
            .complete(&claim.lease_ref(1), &mut Bytes::new(), retention, 0)
            .unwrap();
    }
    table.acquire(&last, 0).unwrap();
    for claim in &claims[..9] {
        let found = table.acquire(claim, 0).unwrap();
        assert!(matches!(found, Acquired::Completed { .. }));
    }
    // Each acquire of an evicted record now evicts the next record.
    let found = table.acquire(&claims[9], 0).unwrap();
    assert!(matches!(found, Acquired::Granted { .. }));
    let found = table.acquire(&claim(8), 0).unwrap();
    assert!(matches!(found, Acquired::Granted { .. }));
}

#[tokio::test]
async fn records_of_other_shards_are_evicted() {
    let store = MemoryStore::new().with_max_entries(100);
    for n in 0..100 {
        record(&store, n, 10, HOUR).await;
    }
    let mut leases = Vec::new();
    for n in 100..200 {
        leases.push(hold(&store, n).await);
    }
    assert_eq!((store.len(), store.bytes()), (100, 100 * ENTRY_BYTES));
    assert_full(store.acquire(&claim(200)).await.unwrap_err());
}

#[tokio::test]
async fn small_records_are_evicted_for_large_record() {
    let store = MemoryStore::new().with_max_bytes(1_000_000);
    for n in 0..2000 {
        record(&store, n, 1000, HOUR).await;
    }
    assert!(store.bytes() <= 1_000_000 && store.bytes() > 900_000);
    record(&store, 5000, 700_000, HOUR).await;
    assert!(has_record(&store, 5000).await);
    assert!(store.bytes() <= 1_000_000);
}

#[tokio::test]
async fn record_above_limit_is_rejected_without_eviction() {
    let store = MemoryStore::new().with_max_bytes(10_000);
    record(&store, 1, 100, HOUR).await;
    let lease = hold(&store, 2).await;
    let limit = 10_000 - ENTRY_BYTES;
    let refused = store.complete(&lease, vec![0; limit + 1].into(), HOUR);
    match refused.await.unwrap_err() {
        StoreError::RecordTooLarge { limit: found } => assert_eq!(found, limit),
        other => panic!("{other}"),
    }
    assert!(has_record(&store, 1).await);
    store.renew(&lease, HOUR).await.unwrap();
    let largest = store.complete(&lease, vec![0; limit].into(), HOUR);
    largest.await.unwrap();
    assert!(has_record(&store, 2).await);
    assert_eq!((store.len(), store.bytes()), (1, 10_000));
}

/// The details of an entry reduce the size of its record.
#[tokio::test]
async fn record_beside_details_is_limited_without_eviction() {
    let store = MemoryStore::new().with_max_bytes(10_000).with_details();
    for n in 0..3 {
        record(&store, n, 100, HOUR).await;
    }
    let claim = Claim {
        operation: "POST /orders".into(),
        ..claim(7)
    };
    store.acquire(&claim).await.unwrap();
    let lease = claim.lease_ref(1);
    let limit = 10_000 - ENTRY_BYTES - Details::cost_of("POST /orders").bytes;
    for len in [limit + 1, 10_000 - ENTRY_BYTES] {
        let refused = store.complete(&lease, vec![0; len].into(), HOUR).await;
        match refused.unwrap_err() {
            StoreError::RecordTooLarge { limit: found } => assert_eq!(found, limit),
            other => panic!("{other}"),
        }
    }
    let record = Bytes::from(vec![0; limit + 1]);
    let change = Change::Complete {
        token: claim.token,
        record,
        retention: HOUR,
    };
    let refused = store.change(&claim.id, |_| true, &change, store.now());
    match refused.unwrap_err() {
        StoreError::RecordTooLarge { limit: found } => assert_eq!(found, limit),
        other => panic!("{other}"),
    }
    for n in 0..3 {
        assert!(has_record(&store, n).await);
    }
    let largest = store.complete(&lease, vec![0; limit].into(), HOUR);
    largest.await.unwrap();
    assert!(has_record(&store, 7).await);
    assert_eq!((store.len(), store.bytes()), (1, 10_000));
}

#[tokio::test]
async fn complete_without_capacity_leaves_lease() {
    let store = MemoryStore::new().with_max_bytes(100 * ENTRY_BYTES);
    let mut leases = Vec::new();
    for n in 0..100 {
        leases.push(hold(&store, n).await);
    }
    let refused = store.complete(&leases[0], "x".into(), HOUR).await;
    assert_full(refused.unwrap_err());
    store.renew(&leases[0], HOUR).await.unwrap();
    store.release(&leases[1]).await.unwrap();
    store.complete(&leases[0], "x".into(), HOUR).await.unwrap();
    assert!(has_record(&store, 0).await);
}

#[tokio::test]
async fn store_of_zero_size_rejects_all_claims() {
    for store in [
        MemoryStore::new().with_max_entries(0),
        MemoryStore::new().with_max_bytes(0),
    ] {
        assert_full(store.acquire(&claim(1)).await.unwrap_err());
        assert_eq!((store.len(), store.bytes()), (0, 0));
    }
}

#[tokio::test]
async fn lowered_limits_apply_to_clones_from_next_write() {
    let store = MemoryStore::new();
    for n in 0..100 {
        record(&store, n, 10, HOUR).await;
    }
    let _same = store.clone().with_max_entries(10);
    hold(&store, 1000).await;
    assert_eq!(store.len(), 10);
}

/// The work under the lock of a shard takes time in proportion to its entries.
#[tokio::test]
async fn limits_of_empty_store_decide_number_of_shards() {
    let shards = |store: &MemoryStore| store.table.shards.len();
    assert_eq!(shards(&MemoryStore::new()), 64);
    let large = MemoryStore::new().with_max_entries(10_000_000);
    assert_eq!(shards(&large), 64, "records may be large");
    let large = large.with_max_bytes(4 << 30);
    assert_eq!(shards(&large), 1024);
    let large = large.with_max_bytes(64 << 30);
    assert_eq!(shards(&large), 4096, "a shard for 4,096 entries");
    assert_eq!(shards(&large.with_max_entries(0)), 64);
    let unlimited = MemoryStore::new().with_max_entries(usize::MAX);
    assert_eq!(shards(&unlimited.with_max_bytes(usize::MAX)), 16_384);

    let store = MemoryStore::new();
    let lease = hold(&store, 1).await;
    let store = store.with_max_bytes(4 << 30);
    assert_eq!(shards(&store), 64);
    store.renew(&lease, HOUR).await.expect("the lease is kept");
    store.release(&lease).await.unwrap();
    let clone = store.clone();
    assert_eq!(shards(&store.with_max_bytes(8 << 30)), shards(&clone));
}

/// Pages continue in each of the shards, whose numbers need two bytes.
#[tokio::test]
async fn large_store_lists_each_entry_once() {
    let store = MemoryStore::new().with_max_bytes(64 << 30);
    let store = store.with_max_entries(10_000_000);
    for n in 0..1000 {
        record(&store, n, 10, HOUR).await;
    }
    let mut query = Query::new(State::Completed);
    let mut listed = Vec::new();
    loop {
        let page = store.list(&query).await.unwrap();
        listed.extend(page.entries.iter().map(|entry| *entry.id()));
        if page.next.is_none() {
            break;
        }
        query = query.with_page(page.next);
    }
    assert_eq!(listed.len(), 1000);
    listed.sort_unstable();
    listed.dedup();
    assert_eq!(listed.len(), 1000);
}

#[tokio::test(start_paused = true)]
async fn later_writes_remove_expired_entries() {
    let store = MemoryStore::new();
    for n in 0..1000 {
        record(&store, n, 10, Ttl::from_secs(60)).await;
    }
    tokio::time::sleep(Duration::from_secs(61)).await;
    for n in 1000..2000 {
        record(&store, n, 10, HOUR).await;
    }
    assert!(store.len() < 1100, "{}", store.len());
    assert_eq!(store.bytes(), store.len() * (ENTRY_BYTES + 10));
}
