//! A minimal database: one lock guards leases, records and the handlers' own rows, so that a transaction can write both.

use std::{
    fmt,
    future::{Future, pending},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::response::Response;
use bytes::Bytes;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};
use tower_idempotency::{
    Body, Lease, MemoryStore,
    conformance::{FaultInjector, Operation},
    store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
    transaction::{LeaseExt, Prepared},
};

use crate::barrier::Barrier;

/// The fault of the next commit.
#[derive(Clone, Debug, Default)]
pub enum CommitFault {
    /// No fault: the transaction is committed.
    #[default]
    Committed,
    /// The commit never reaches the database, and fails.
    CallLost,
    /// The transaction is committed, but the commit fails: the reply is lost.
    ReplyLost,
    /// The commit does not reach the database, and does not return.
    HangCall,
    /// The transaction is committed, but the commit does not return.
    HangReply,
    /// The commit does not return, and reaches the database when the barrier lets it through.
    UnderWay(Barrier),
    /// The commit fails because the connection is cut, but the database executes it when the barrier lets it through.
    Late(Barrier),
}

/// The database, and a store in it. Clones share one database.
#[derive(Clone, Default)]
pub struct Ledger {
    /// The store of the leases and records.
    pub store: FaultInjector<MemoryStore>,
    rows: Arc<Lock<Vec<String>>>,
    fault: Arc<Mutex<CommitFault>>,
    /// The largest record.
    limit: Option<usize>,
}

impl Ledger {
    /// Creates a database on a store that may have leases and records.
    #[must_use]
    pub fn on(store: MemoryStore) -> Self {
        Self {
            store: FaultInjector::new(store),
            ..Self::default()
        }
    }

    /// Returns a ledger for another process with the same database. It has its own call counts and faults.
    #[must_use]
    pub fn another(&self) -> Self {
        Self {
            store: FaultInjector::new(self.store.inner().clone()),
            fault: Arc::default(),
            ..self.clone()
        }
    }

    /// Limits records to this number of bytes.
    #[must_use]
    pub fn with_limit(self, bytes: usize) -> Self {
        Self {
            limit: Some(bytes),
            ..self
        }
    }

    /// Sets the fault of the next commit.
    pub fn next(&self, fault: CommitFault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// Returns the committed rows.
    pub async fn rows(&self) -> Vec<String> {
        self.rows.lock().await.clone()
    }

    /// Begins a transaction.
    #[must_use]
    pub fn begin(&self) -> Transaction {
        Transaction {
            ledger: self.clone(),
            rows: Vec::new(),
        }
    }
}

/// The rows that a handler has written and not yet committed. Dropping it discards them.
#[derive(Debug)]
pub struct Transaction {
    ledger: Ledger,
    rows: Vec<String>,
}

/// The error if a response cannot be committed.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "for tests")]
pub enum Failed {
    /// The layer does not record this response.
    NotRecordable(Box<Response<Body<axum::body::Body>>>),
    /// The response was not committed, or the outcome is unknown.
    Store(StoreError),
}

impl Transaction {
    /// Writes a row.
    pub fn insert(&mut self, row: impl Into<String>) {
        self.rows.push(row.into());
    }

    /// Commits the rows and the record of `res` under the lease.
    ///
    /// # Errors
    ///
    /// Returns an error if nothing is committed, or the outcome is unknown.
    pub async fn commit(
        self,
        lease: &Lease,
        res: Response,
    ) -> Result<Response<Body<axum::body::Body>>, Failed> {
        let not_recorded = |not: tower_idempotency::transaction::NotRecordable<_>| {
            Failed::NotRecordable(Box::new(not.into_output()))
        };
        let mut prepared = lease.prepare(res).await.map_err(not_recorded)?;
        if self.ledger.limit < Some(prepared.record().len()) && self.ledger.limit.is_some() {
            prepared = prepared.into_tombstone().map_err(not_recorded)?;
        }
        self.commit_prepared(prepared).await.map_err(Failed::Store)
    }

    /// Commits the rows and the prepared record.
    ///
    /// # Errors
    ///
    /// Returns an error if nothing is committed, or the outcome is unknown.
    pub async fn commit_prepared<T>(self, prepared: Prepared<T>) -> Result<T, StoreError> {
        let (lease, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention();
        prepared.commit(self.write(lease, record, retention)).await
    }

    /// Executes a commit at the database.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] if the token does not hold the lease; a failure of the database if [`next`](Ledger::next)
    /// has set one.
    pub async fn write(
        self,
        lease: LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let cut = || Err(StoreError::backend("the connection was cut"));
        let fault = {
            let mut fault = self.ledger.fault.lock();
            std::mem::take(&mut **fault.as_mut().unwrap_or_else(|poison| poison.get_mut()))
        };
        if let CommitFault::CallLost = fault {
            return cut();
        }
        if let CommitFault::HangCall = fault {
            return pending().await;
        }
        if let CommitFault::UnderWay(barrier) = fault {
            let ledger = self.ledger.clone();
            let late = async move {
                barrier.pass().await;
                let rows = Arc::clone(&ledger.rows).lock_owned().await;
                let store = ledger.store.inner().clone();
                let _ = apply(store, rows, self.rows, lease, record, retention).await;
            };
            tokio::spawn(late);
            return pending().await;
        }
        let rows = Arc::clone(&self.ledger.rows).lock_owned().await;
        let apply = apply(
            self.ledger.store.inner().clone(),
            rows,
            self.rows,
            lease,
            record,
            retention,
        );
        match fault {
            CommitFault::Late(barrier) => {
                tokio::spawn(async move {
                    barrier.pass().await;
                    let _ = apply.await;
                });
                cut()
            }
            CommitFault::ReplyLost => {
                apply.await?;
                cut()
            }
            CommitFault::HangReply => {
                apply.await?;
                pending().await
            }
            CommitFault::Committed
            | CommitFault::CallLost
            | CommitFault::HangCall
            | CommitFault::UnderWay(_) => apply.await,
        }
    }
}

/// The transaction at the database, which holds its lock.
async fn apply(
    store: MemoryStore,
    mut rows: OwnedMutexGuard<Vec<String>>,
    written: Vec<String>,
    lease: LeaseRef,
    record: Bytes,
    retention: Ttl,
) -> Result<(), StoreError> {
    // Checks that the token holds the lease. Without an entry, `complete` alone would store the record.
    store.renew(&lease, Ttl::from_secs(1)).await?;
    store.complete(&lease, record, retention).await?;
    rows.extend(written);
    Ok(())
}

impl Ledger {
    /// Makes a call in a separate transaction.
    async fn alone<T>(&self, call: impl Future<Output = T>) -> T {
        let _rows = self.rows.lock().await;
        call.await
    }
}

impl Store for Ledger {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.alone(self.store.acquire(claim)).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.alone(self.store.renew(lease, ttl)).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.alone(self.store.complete(lease, record, retention))
            .await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.alone(self.store.release(lease)).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        self.store.wait_for_change(id, timeout).await;
    }
}

impl Ledger {
    /// Returns the number of calls that the layer made to a method.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.store.calls(operation)
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").finish_non_exhaustive()
    }
}
