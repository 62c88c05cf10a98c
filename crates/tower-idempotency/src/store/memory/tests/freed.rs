//! Tests of freed records. The store frees them after it has released the lock of their shard. A purge frees few large ones at
//! once.

use std::{
    sync::{
        Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Waker},
};

use super::*;

const LEN: usize = 100;

/// The freed buffers of [`Watched`] records.
#[derive(Default)]
struct Freed {
    all: AtomicUsize,
    under_lock: AtomicUsize,
}

impl Freed {
    /// Returns the number of freed buffers, and the number of those that were freed under a lock.
    fn counts(&self) -> (usize, usize) {
        (self.all.load(Relaxed), self.under_lock.load(Relaxed))
    }
}

/// The buffer of a record. Counts if it is freed while a shard is locked.
struct Watched {
    table: Weak<Table>,
    freed: Arc<Freed>,
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &[1; LEN]
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Some(table) = self.table.upgrade() else {
            return;
        };
        self.freed.all.fetch_add(1, Relaxed);
        if table.shards.iter().any(|shard| shard.try_lock().is_err()) {
            self.freed.under_lock.fetch_add(1, Relaxed);
        }
    }
}

/// Stores a record of [`LEN`] bytes whose buffer is watched.
async fn watched_record(store: &MemoryStore, freed: &Arc<Freed>, n: u64, retention: Ttl) {
    let lease = hold(store, n).await;
    let record = Bytes::from_owner(Watched {
        table: Arc::downgrade(&store.table),
        freed: Arc::clone(freed),
    });
    store.complete(&lease, record, retention).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn expired_records_are_freed_without_lock() {
    let (store, freed) = (store_with_one_shard(usize::MAX), Arc::<Freed>::default());
    for n in 0..10 {
        watched_record(&store, &freed, n, Ttl::from_secs(60)).await;
    }
    tokio::time::sleep(Duration::from_secs(61)).await;
    let lost = store.renew(&claim(5).lease_ref(1), HOUR).await;
    assert!(matches!(lost, Err(StoreError::LeaseLost)));
    assert_eq!(freed.counts(), (1, 0), "found by a call for its key");
    hold(&store, 100).await;
    assert_eq!(freed.counts(), (3, 0), "found by a write");
    let deleted = store.delete_expired(0, 100, store.now()).unwrap();
    assert_eq!((deleted.entries, deleted.bytes), (7, 7 * LEN));
    assert!(deleted.is_exhausted);
    assert_eq!(freed.counts(), (10, 0));
}

#[tokio::test(start_paused = true)]
async fn evicted_records_are_freed_without_lock() {
    const COST: usize = ENTRY_BYTES + LEN;
    let (store, freed) = (store_with_one_shard(20 * COST), Arc::<Freed>::default());
    for n in 0..20 {
        watched_record(&store, &freed, n, HOUR).await;
    }
    let lease = hold(&store, 100).await;
    assert_eq!(freed.counts(), (1, 0));
    // More than one lock evicts.
    let record = Bytes::from(vec![1; 10 * COST]);
    store.complete(&lease, record, HOUR).await.unwrap();
    assert_eq!(freed.counts(), (11, 0));
    assert!(has_record(&store, 100).await);
}

#[tokio::test(start_paused = true)]
async fn resolved_records_are_freed_without_lock() {
    let (store, freed) = (store_with_one_shard(usize::MAX), Arc::<Freed>::default());
    let token = Token::from_bytes([3; 16]);
    let changes = [
        Change::Delete,
        Change::Orphan {
            token,
            retention: HOUR,
        },
        Change::Complete {
            token,
            record: "resolved".into(),
            retention: HOUR,
        },
    ];
    for (at, change) in changes.iter().enumerate() {
        let n = at as u64;
        watched_record(&store, &freed, n, HOUR).await;
        let changed = store.change(&id(n), |_| true, change, store.now());
        assert!(changed.unwrap());
        assert_eq!(freed.counts(), (at + 1, 0));
    }
    assert_eq!(store.bytes(), 2 * ENTRY_BYTES + "resolved".len());
}

/// Other tasks can run after each large record, because it takes long to free one.
#[tokio::test(start_paused = true)]
async fn purge_yields_after_each_large_record() {
    let store = store_with_one_shard(usize::MAX);
    for n in 0..3 {
        record(&store, n, 4 << 20, Ttl::from_secs(60)).await;
    }
    tokio::time::sleep(Duration::from_secs(61)).await;
    let mut purge = pin!(store.purge(1000));
    for left in [2, 1] {
        let mut context = Context::from_waker(Waker::noop());
        assert!(purge.as_mut().poll(&mut context).is_pending());
        assert_eq!(store.len(), left);
    }
    assert_eq!(purge.await.unwrap(), 3);
    assert!(store.is_empty());
}
