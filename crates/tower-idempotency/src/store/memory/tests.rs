use std::{future::Future, pin::pin, task::Poll};

use super::{budget::ENTRY_BYTES, *};
use crate::store::{Fingerprint, Token};

const HOUR: Ttl = Ttl::from_secs(3600);
const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([7; 32]);

const fn id(n: u64) -> KeyId {
    let mut bytes = [0; 32];
    [bytes[0], bytes[1], bytes[2], bytes[3], ..] = n.to_le_bytes();
    KeyId::from_bytes(bytes)
}

fn claim(n: u64) -> Claim {
    Claim::new(id(n), FINGERPRINT).unwrap()
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

    #[tokio::test]
    async fn fm_114_a_store_full_of_leases_refuses_and_loses_none() {
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

    #[tokio::test(start_paused = true)]
    async fn orphans_never_make_way() {
        let store = MemoryStore::new().with_max_entries(10);
        for n in 0..10 {
            hold(&store, n).await;
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_full(store.acquire(&claim(10)).await.unwrap_err());
        tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
        for n in 10..20 {
            hold(&store, n).await;
        }
    }

    #[tokio::test]
    async fn records_that_expire_soonest_make_way_first() {
        let core = Engine::new(1, 10, usize::MAX);
        let mut claims: Vec<Claim> = (0..11).map(claim).collect();
        let last = claims.pop().unwrap();
        for (n, claim) in claims.iter().enumerate() {
            let retention = Ttl::from_secs(1000 - n as u64);
            core.acquire(claim, 0).unwrap();
            core.complete(&claim.lease_ref(1), Bytes::new(), retention, 0)
                .unwrap();
        }
        core.acquire(&last, 0).unwrap();
        for claim in &claims[..9] {
            let found = core.acquire(claim, 0).unwrap();
            assert!(matches!(found, Acquired::Completed { .. }));
        }
        // Each acquire of the one that made way now takes the next one's place.
        let found = core.acquire(&claims[9], 0).unwrap();
        assert!(matches!(found, Acquired::Granted { .. }));
        let found = core.acquire(&claim(8), 0).unwrap();
        assert!(matches!(found, Acquired::Granted { .. }));
    }

    #[tokio::test]
    async fn records_of_other_shards_make_way_too() {
        let store = MemoryStore::new().with_max_entries(50);
        for n in 0..50 {
            record(&store, n, 10, HOUR).await;
        }
        let mut leases = Vec::new();
        for n in 100..150 {
            leases.push(hold(&store, n).await);
        }
        assert_eq!((store.len(), store.bytes()), (50, 50 * ENTRY_BYTES));
        assert_full(store.acquire(&claim(200)).await.unwrap_err());
    }

    #[tokio::test]
    async fn many_small_records_make_way_for_a_large_one() {
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
    async fn a_record_that_could_never_fit_is_refused_and_evicts_nothing() {
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

    #[tokio::test]
    async fn a_complete_without_room_leaves_the_lease_in_place() {
        let store = MemoryStore::new().with_max_bytes(10 * ENTRY_BYTES);
        let mut leases = Vec::new();
        for n in 0..10 {
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
    async fn a_store_of_no_size_refuses_everything() {
        for store in [
            MemoryStore::new().with_max_entries(0),
            MemoryStore::new().with_max_bytes(0),
        ] {
            assert_full(store.acquire(&claim(1)).await.unwrap_err());
            assert_eq!((store.len(), store.bytes()), (0, 0));
        }
    }

    #[tokio::test]
    async fn bounds_that_are_lowered_apply_to_all_clones_from_the_next_write() {
        let store = MemoryStore::new();
        for n in 0..100 {
            record(&store, n, 10, HOUR).await;
        }
        let _same = store.clone().with_max_entries(10);
        hold(&store, 1000).await;
        assert_eq!(store.len(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn later_writes_take_away_what_is_over() {
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

    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }

    #[tokio::test(start_paused = true)]
    async fn completion_wakes_them_all_at_once_and_leaves_nothing_behind() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let start = Instant::now();
        let mut waiters = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let store = store.clone();
            waiters.spawn(async move { store.wait_for_change(&ID, Duration::from_secs(10)).await });
        }
        settle().await;
        assert_eq!(store.engine.waiting(), 1);
        store.complete(&lease, "x".into(), HOUR).await.unwrap();
        waiters.join_all().await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!(store.engine.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_waiters_leave_nothing_behind() {
        let store = MemoryStore::new();
        hold(&store, N).await;
        {
            let mut first = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
            assert!(poll_once(first.as_mut()).is_pending());
            {
                let mut second = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
                assert!(poll_once(second.as_mut()).is_pending());
            }
            assert_eq!(store.engine.waiting(), 1);
        }
        assert_eq!(store.engine.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_dropped_after_the_key_was_taken_anew_leaves_the_new_waiters() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let mut old = Box::pin(store.wait_for_change(&ID, HOUR.as_duration()));
        assert!(poll_once(old.as_mut()).is_pending());
        store.release(&lease).await.unwrap();
        let lease = hold(&store, N).await;
        let mut new = pin!(store.wait_for_change(&ID, HOUR.as_duration()));
        assert!(poll_once(new.as_mut()).is_pending());
        drop(old);
        assert_eq!(store.engine.waiting(), 1);
        store.release(&lease).await.unwrap();
        assert!(poll_once(new).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn they_wake_when_the_lease_ends_and_no_later() {
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
    async fn they_wait_on_while_the_lease_is_renewed() {
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
    async fn within_may_be_as_long_as_it_likes() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let mut waiter = pin!(store.wait_for_change(&ID, Duration::MAX));
        assert!(poll_once(waiter.as_mut()).is_pending());
        store.release(&lease).await.unwrap();
        assert!(poll_once(waiter).is_ready());
    }
}

#[tokio::test]
async fn the_longest_times_do_not_overflow() {
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

/// At the very instant of expiry an entry is expired.
#[test]
fn fm_57_expiry_is_judged_to_the_nanosecond() {
    const SECOND: u64 = 1_000_000_000;
    let engine = Engine::new(1, 10, 10_000);
    let holder = Claim {
        lease: Ttl::from_secs(1),
        orphan_retention: Ttl::from_secs(1),
        ..claim(1)
    };
    engine.acquire(&holder, 0).unwrap();
    let look = |now| {
        let refusing = Claim {
            orphans: crate::store::OrphanPolicy::Refuse,
            ..claim(1)
        };
        engine.acquire(&refusing, now).unwrap()
    };
    assert_eq!(
        look(SECOND - 1),
        Acquired::InProgress {
            fingerprint: FINGERPRINT,
            expires_in: Duration::from_nanos(1)
        }
    );
    let since = |nanos| Acquired::Orphaned {
        fingerprint: FINGERPRINT,
        since: Duration::from_nanos(nanos),
    };
    assert_eq!(look(SECOND), since(0));
    assert_eq!(look(2 * SECOND - 1), since(SECOND - 1));
    assert!(matches!(look(2 * SECOND), Acquired::Granted { .. }));

    let completed = holder.lease_ref(1);
    let completed = LeaseRef {
        id: id(2),
        ..completed
    };
    engine
        .complete(&completed, Bytes::new(), Ttl::from_secs(1), 0)
        .unwrap();
    let look = |now| engine.acquire(&claim(2), now).unwrap();
    assert!(matches!(look(SECOND - 1), Acquired::Completed { .. }));
    assert!(matches!(look(SECOND), Acquired::Granted { .. }));
}

#[test]
fn the_store_and_its_futures_are_what_services_need() {
    fn shared<T: Send + Sync + Clone + 'static>(_: &T) {}
    fn sent<T: Send>(_: T) {}
    let store = MemoryStore::default();
    shared(&store);
    let claim = Claim {
        token: Token::from_bytes([1; 16]),
        ..claim(1)
    };
    sent(store.acquire(&claim));
    sent(store.wait_for_change(&claim.id, Duration::ZERO));
    assert_eq!(format!("{store:?}"), "MemoryStore { len: 0, bytes: 0, .. }");
    assert!(store.is_empty());
}
