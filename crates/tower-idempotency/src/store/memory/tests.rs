use std::{future::Future, pin::pin, task::Poll};

use super::{budget::ENTRY_BYTES, details::Details, *};
use crate::{
    inspect::{Inspect as _, Query, Resolution, State},
    record::NeedsAttention,
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

fn store_with_one_shard(max_bytes: usize) -> MemoryStore {
    MemoryStore {
        table: Arc::new(Table::new(1, usize::MAX, max_bytes)),
        epoch: Instant::now(),
    }
}

/// Returns the text of the error.
fn assert_full(error: StoreError) -> String {
    let StoreError::Backend(source) = error else {
        panic!("expected a full store, found {error}");
    };
    assert!(source.downcast_ref::<MemoryFull>().is_some(), "{source}");
    source.to_string()
}

mod bounds;

mod waiters {
    use tokio::task::JoinHandle;

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

    /// Waits for a change in a task, which returns how long it took.
    fn spawn_waiter(store: &MemoryStore) -> JoinHandle<Duration> {
        let store = store.clone();
        tokio::spawn(async move {
            let start = Instant::now();
            store.wait_for_change(&ID, HOUR.as_duration()).await;
            start.elapsed()
        })
    }

    /// A failed execution leaves an orphan by a renewal of one millisecond.
    #[tokio::test(start_paused = true)]
    async fn waiters_wake_if_lease_is_shortened() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let waiter = spawn_waiter(&store);
        tokio::time::sleep(Duration::from_secs(1)).await;
        store.renew(&lease, Ttl::MIN).await.unwrap();
        assert_eq!(waiter.await.unwrap(), Duration::from_secs(1));
        assert_eq!(store.table.waiter_groups(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_keep_waiting_while_lease_is_renewed() {
        let store = MemoryStore::new();
        let lease = hold(&store, N).await;
        let waiter = spawn_waiter(&store);
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
/// An entry is expired at the instant of its expiry.
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

/// Each retry gets an error until an operator resolves the record, so the record must be listed until then.
#[tokio::test(start_paused = true)]
async fn attention_record_is_listed_for_years() {
    let store = MemoryStore::new();
    tokio::time::advance(HOUR.as_duration()).await;
    let lease = hold(&store, 1).await;
    let attention = Resolution::NeedsAttention(NeedsAttention::new("examine"));
    let (record, retention) = attention.record(&lease.id).unwrap();
    store.complete(&lease, record, retention).await.unwrap();
    for years in [0, 2, 90] {
        tokio::time::advance(HOUR.as_duration() * 24 * 365 * years).await;
        let page = store.list(&Query::new(State::NeedsAttention)).await;
        assert_eq!(page.unwrap().entries.len(), 1, "{years}");
        let summary = store.summary(10).await.unwrap();
        let count = summary.count(State::NeedsAttention).unwrap();
        assert_eq!((count.value, count.is_exact), (1, true), "{years}");
    }
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

/// A layer or a store above this one holds the future of each call in its own future, for as long as a request takes.
#[test]
fn futures_stay_small() {
    /// Two references and the state of the future, rounded up.
    const ACQUIRE: usize = 32;
    /// Two references, the record, its retention and the state of the future, rounded up.
    const COMPLETE: usize = 80;
    let store = MemoryStore::new();
    let claim = claim(1);
    let acquire = size_of_val(&store.acquire(&claim));
    assert!(acquire <= ACQUIRE, "{acquire}");
    let lease = claim.lease_ref(1);
    let complete = size_of_val(&store.complete(&lease, Bytes::new(), HOUR));
    assert!(complete <= COMPLETE, "{complete}");
}

mod fairness;
mod freed;
mod full;
