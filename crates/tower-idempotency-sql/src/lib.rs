//! Transactions of handlers that are fenced by their lease, independent of the driver.
//!
//! Applications use the crate of their driver, such as `tower-idempotency-tokio-postgres`. This crate contains the
//! statements, errors and protocol that those crates share. It links no driver.
//!
//! # A crate for another driver
//!
//! Implement [`Driver`] for an open transaction of the driver. [`FencedTransaction`] then executes the protocol. The
//! documentation of [`MySqlFence`] and of [`SqliteFence`] has an example for each of these databases. The example for
//! PostgreSQL is:
//!
//! ```
//! use tower_idempotency::{Lease, store::LeaseRef};
//! use tower_idempotency_sql::{
//!     Driver, FencedTransaction, LeaseStatus, PostgresFence, RecordStatus, RecordWrite, SqlError, TransactionError,
//! };
//! # mod some_driver {
//! #     pub struct Transaction;
//! #     pub struct Error { pub sqlstate: Option<String>, pub message: String }
//! #     impl Transaction {
//! #         pub async fn query(&mut self, _: &str, _: &[&[u8]], _: i64) -> Result<Option<[bool; 2]>, Error> { Ok(None) }
//! #         pub async fn run(&mut self, _: &str) -> Result<(), Error> { Ok(()) }
//! #     }
//! #     pub async fn connect() -> Result<Transaction, Error> { Ok(Transaction) }
//! # }
//!
//! // This module relies on the parameters and columns of this version.
//! const _: () = assert!(PostgresFence::VERSION == 1);
//!
//! struct Open(some_driver::Transaction);
//!
//! impl Driver for Open {
//!     type Fence = PostgresFence;
//!     type Target = some_driver::Transaction;
//!
//!     fn target(&self) -> &Self::Target {
//!         &self.0
//!     }
//!
//!     fn target_mut(&mut self) -> &mut Self::Target {
//!         &mut self.0
//!     }
//!
//!     async fn lease_status(&mut self, fence: &PostgresFence, lease: &LeaseRef) -> Result<LeaseStatus, SqlError> {
//!         let parameters = [lease.id.as_bytes().as_slice(), lease.token.as_bytes().as_slice()];
//!         let row = self.0.query(fence.lease_status_sql(), &parameters, 0).await.map_err(failure)?;
//!         Ok(LeaseStatus::from_row(row.map(|[is_held, _]| is_held)))
//!     }
//!
//!     async fn write_record(&mut self, fence: &PostgresFence, write: RecordWrite<'_>) -> Result<RecordStatus, SqlError> {
//!         let parameters = [write.id(), write.token(), write.record()];
//!         let row = self.0.query(fence.write_record_sql(), &parameters, write.retention_millis()).await.map_err(failure)?;
//!         let [is_marked, is_written] = row.unwrap_or_default();
//!         Ok(RecordStatus::from_row(is_marked, is_written))
//!     }
//!
//!     async fn commit(mut self) -> Result<(), SqlError> {
//!         self.0.run("commit").await.map_err(failure)
//!     }
//!
//!     async fn rollback(mut self) -> Result<(), SqlError> {
//!         self.0.run("rollback").await.map_err(failure)
//!     }
//! }
//!
//! /// Begins a handler's transaction. `fence` is `&store` of a `PostgresStore`.
//! pub async fn begin(
//!     fence: impl Into<PostgresFence>,
//!     lease: &Lease,
//! ) -> Result<FencedTransaction<impl Driver>, TransactionError> {
//!     let open = open().await.map_err(|error| TransactionError::database(failure(error)).register(lease))?;
//!     FencedTransaction::begin(fence.into(), lease, open).await
//! }
//!
//! async fn open() -> Result<Open, some_driver::Error> {
//!     let mut open = Open(some_driver::connect().await?);
//!     open.0.run(PostgresFence::BEGIN).await?;
//!     Ok(open)
//! }
//!
//! fn failure(error: some_driver::Error) -> SqlError {
//!     match error.sqlstate {
//!         Some(code) => SqlError::from_reported(&code, &error.message),
//!         None => SqlError::from_driver(error.message),
//!     }
//! }
//! ```
//!
//! # Features
//!
//! `sqlx` converts errors of sqlx 0.9 with `From`. The store's crate enables it.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod fence;
mod table;
mod task;
mod transaction;

pub use self::{
    error::SqlError,
    fence::{Fence, MySqlFence, PostgresFence, RecordWrite, SqliteFence},
    table::{Table, TableNameError},
    task::begin_in_task,
    transaction::{
        CommitError, Driver, FencedTransaction, LeaseStatus, RecordStatus, TransactionError,
        TransactionErrorKind,
    },
};
