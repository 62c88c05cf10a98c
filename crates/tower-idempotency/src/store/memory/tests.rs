use std::{future::Future, pin::pin, task::Poll};

use super::{budget::ENTRY_BYTES, details::Details, *};
use crate::{
    inspect::{Inspect as _, Query, State},
    store::{Fingerprint, ScopeDigest, Token},
};

const HOUR: Ttl = Ttl::from_secs(3600);
const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([7; 32]);

const fn id(n: u64) -> KeyId {
    let mut bytes = [0; 32];
    [bytes[0], bytes[1], bytes[2], bytes[3], ..] = n.to_le_bytes();
    KeyId::from_bytes(bytes)
}

/// A claim of a caller of its own.
fn claim(n: u64) -> Claim {
    let mut scope = [0; 16];
    scope[..8].copy_from_slice(&n.to_le_bytes());
    Claim {
        scope: Some(ScopeDigest::from_bytes(scope)),
        ..Claim::new(id(n), FINGERPRINT).unwrap()
    }
}

async fn hold(store: &MemoryStore, n: u64) -> LeaseRef {
    let claim = claim(n);
    let acquired = store.acquire(&claim).await.unwrap();
    let first = Acquired::Granted {
        generation: 1,
        takeover: false,
    };
    assert_eq!(acquired, first);
    claim.lease_ref(1)
}

async fn record(store: &MemoryStore, n: u64, len: usize, retention: Ttl) {
    let lease = hold(store, n).await;
    let record = Bytes::from(vec![1; len]);
    store.complete(&lease, record, retention).await.unwrap();
}

async fn has_record(store: &MemoryStore, n: u64) -> bool {
    let claim = claim(n);
    match store.acquire(&claim).await.unwrap() {
        Acquired::Completed { .. } => true,
        Acquired::Granted { .. } => {
            store.release(&claim.lease_ref(1)).await.unwrap();
            false
        }
        other @ (Acquired::InProgress { .. } | Acquired::Orphaned { .. }) => panic!("{other:?}"),
    }
}

fn assert_full(error: StoreError) {
    let StoreError::Backend(source) = error else {
        panic!("expected a full store, found {error}");
    };
    assert!(source.downcast_ref::<MemoryFull>().is_some(), "{source}");
}

mod bounds {
    use super::*;

    // F-113
    #[tokio::test]
    async fn fm_114_full_store_rejects_and_loses_no_lease() {
        let store = MemoryStore::new().with_max_entries(100);
        let mut leases = Vec::new();
        for n in 0..100 {
            leases.push(hold(&store, n).await);
        }
        assert_full(store.acquire(&claim(100)).await.unwrap_err());
        for lease in &leases {
            store.renew(lease, HOUR).await.unwrap();
        }
        assert_eq!(store.len(), 100);
        store.release(&leases[7]).await.unwrap();
        hold(&store, 100).await;
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
        let refused = store.change(&claim.id, |_| true, &change, store.nanos());
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
        assert_eq!(shards(&unlimited.with_max_bytes(usize::MAX)), 65_536);

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
}

mod waiters {
    use super::*;

    const N: u64 = 1;
    const ID: KeyId = id(N);

    async fn yield_to_tasks() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }

    #[tokio::test(start_paused = true)]
    async fn completion_wakes_and_removes_all_waiters() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let start = Instant::now();
        let mut waiters = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let store = store.clone();
            waiters.spawn(async move { store.wait_for_change(&ID, Duration::from_secs(10)).await });
        }
        yield_to_tasks().await;
        assert_eq!(store.table.waiter_groups(), 1);
        store.complete(&lease, "x".into(), HOUR).await.unwrap();
        waiters.join_all().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(store.table.waiter_groups(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_waiters_are_removed() {
        let store = MemoryStore::new();
        hold(&store, N).await;
        {
            let mut first = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
            assert!(poll_once(first.as_mut()).is_pending());
            {
                let mut second = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
                assert!(poll_once(second.as_mut()).is_pending());
            }
            assert_eq!(store.table.waiter_groups(), 1);
        }
        assert_eq!(store.table.waiter_groups(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn stale_waiter_drop_leaves_new_waiters() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let mut old = Box::pin(store.wait_for_change(&ID, HOUR.as_duration()));
        assert!(poll_once(old.as_mut()).is_pending());
        store.release(&lease).await.unwrap();
        let lease = hold(&store, N).await;
        let mut new = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
        assert!(poll_once(new.as_mut()).is_pending());
        drop(old);
        assert_eq!(store.table.waiter_groups(), 1);
        store.release(&lease).await.unwrap();
        assert!(poll_once(new).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_wake_at_lease_expiry() {
        let store = MemoryStore::new();
        let claim = claim(N);
        store.acquire(&claim).await.unwrap();
        let start = Instant::now();
        store.wait_for_change(&ID, HOUR.as_duration()).await;
        let waited = start.elapsed();
        let lease = claim.lease.as_duration();
        assert!(
            waited >= lease && waited < lease + Duration::from_millis(5),
            "{waited:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_keep_waiting_while_lease_is_renewed() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let waiter = {
            let store = store.clone();
            tokio::spawn(async move {
                let start = Instant::now();
                store.wait_for_change(&ID, HOUR.as_duration()).await;
                start.elapsed()
            })
        };
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_secs(10)).await;
            store.renew(&lease, Ttl::from_secs(15)).await.unwrap();
        }
        store.complete(&lease, "x".into(), HOUR).await.unwrap();
        assert_eq!(waiter.await.unwrap(), Duration::from_secs(100));
    }

    #[tokio::test(start_paused = true)]
    async fn longest_wait_timeout_is_accepted() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let mut waiter = pin!(store.wait_for_change(&ID, Duration::MAX));
        assert!(poll_once(waiter.as_mut()).is_pending());
        store.release(&lease).await.unwrap();
        assert!(poll_once(waiter).is_ready());
    }
}

// F-045
#[tokio::test]
async fn longest_times_do_not_overflow() {
    let store = MemoryStore::new();
    let claim = Claim {
        lease: Ttl::MAX,
        orphan_retention: Ttl::MAX,
        ..claim(1)
    };
    store.acquire(&claim).await.unwrap();
    let lease = claim.lease_ref(1);
    store.renew(&lease, Ttl::MAX).await.unwrap();
    let waited = tokio::time::timeout(
        Duration::from_millis(1),
        store.wait_for_change(&claim.id, Duration::MAX),
    );
    assert!(waited.await.is_err());
    store.complete(&lease, "x".into(), Ttl::MAX).await.unwrap();
    assert!(has_record(&store, 1).await);
}

// F-103
/// An entry is expired at the very instant of expiry.
#[test]
fn fm_57_expiry_is_exact_to_nanosecond() {
    const SECOND: u64 = 1_000_000_000;
    let table = Table::new(1, 10, 10_000);
    let holder = Claim {
        lease: Ttl::from_secs(1),
        orphan_retention: Ttl::from_secs(1),
        ..claim(1)
    };
    table.acquire(&holder, 0).unwrap();
    let acquire_at = |now| {
        let refusing = Claim {
            orphans: crate::store::OrphanPolicy::Refuse,
            ..claim(1)
        };
        table.acquire(&refusing, now).unwrap()
    };
    assert_eq!(
        acquire_at(SECOND - 1),
        Acquired::InProgress {
            fingerprint: FINGERPRINT,
            expires_in: Duration::from_nanos(1)
        }
    );
    let since = |nanos| Acquired::Orphaned {
        fingerprint: FINGERPRINT,
        since: Duration::from_nanos(nanos),
    };
    assert_eq!(acquire_at(SECOND), since(0));
    assert_eq!(acquire_at(2 * SECOND - 1), since(SECOND - 1));
    assert!(matches!(acquire_at(2 * SECOND), Acquired::Granted { .. }));

    let completed = holder.lease_ref(1);
    let completed = LeaseRef {
        id: id(2),
        ..completed
    };
    table
        .complete(&completed, &mut Bytes::new(), Ttl::from_secs(1), 0)
        .unwrap();
    let acquire_at = |now| table.acquire(&claim(2), now).unwrap();
    assert!(matches!(acquire_at(SECOND - 1), Acquired::Completed { .. }));
    assert!(matches!(acquire_at(SECOND), Acquired::Granted { .. }));
}

#[test]
fn store_and_futures_are_send() {
    fn assert_shareable<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn assert_send<T: Send>(_: T) {}
    let store = MemoryStore::default();
    assert_shareable(&store);
    let claim = Claim {
        token: Token::from_bytes([1; 16]),
        ..claim(1)
    };
    assert_send(store.acquire(&claim));
    assert_send(store.wait_for_change(&claim.id, Duration::ZERO));
    assert_eq!(format!("{store:?}"), "MemoryStore { len: 0, bytes: 0, .. }");
    assert!(store.is_empty());
}

mod fairness;
