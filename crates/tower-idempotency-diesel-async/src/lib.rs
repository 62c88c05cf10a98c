//! Exactly-once handlers with [`diesel_async`] on PostgreSQL, for the store of `tower-idempotency-sqlx`.
//!
//! The store uses connections of its own. The handler's transaction runs on a connection of diesel-async to the database
//! of the store. [`begin`] fences it by the lease, and [`commit`](tower_idempotency_sql::FencedTransaction::commit)
//! commits the handler's writes and the record together, or neither.
//!
//! ```no_run
//! use diesel_async::{AsyncPgConnection, RunQueryDsl, pooled_connection::deadpool::Pool};
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_diesel_async::{CommitError, begin, diesel, diesel_async};
//! use tower_idempotency_sqlx::PostgresStore;
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! // Functions of the application keep their signatures.
//! async fn debit(connection: &mut AsyncPgConnection) -> diesel::QueryResult<usize> {
//!     diesel::sql_query("update accounts set amount = amount - 7").execute(connection).await
//! }
//!
//! async fn pay(
//!     store: PostgresStore,
//!     pool: Pool<AsyncPgConnection>,
//!     lease: Lease,
//! ) -> Result<Response<Body<String>>, Failure> {
//!     let mut tx = begin(&store, &lease, pool.get().await?).await?;
//!     debit(&mut tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! ```
//!
//! # Connections
//!
//! [`begin`] takes the connection itself, so that a task can roll back a transaction that is dropped. It takes an object of
//! deadpool or mobc, the result of bb8's `get_owned`, or a `Box` of a connection. After the end of the transaction, the
//! pool gets its connection back. If the rollback fails or takes longer than 5 seconds, the pool closes the connection.
//!
//! # Closures
//!
//! `connection.transaction(..)` commits after its closure has returned. The database may reject that commit after the
//! response has been built. Use [`begin`] for the outer transaction. Nested transactions, also those of closures, are
//! savepoints in it.
//!
//! # Limits
//!
//! diesel reports no SQLSTATE. A missing table is of the kind [`Database`](TransactionErrorKind::Database), and
//! [`TransactionError::code`] returns a code, such as `23505`, only if diesel has a kind for the error. Without a code, a
//! commit that the database rejects is [`Unknown`](TransactionErrorKind::Unknown), for example after an exception of a
//! deferred trigger. Checkpoints need `PostgresStore::begin`, which uses sqlx.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod transaction;

pub use diesel;
pub use diesel_async;
pub use tower_idempotency_sql::{
    CommitError, PostgresFence, SqlError, TransactionError, TransactionErrorKind,
};

pub use self::transaction::{
    BeginFuture, FencedTransaction, OpenTransaction, PgConnectionOwner, begin,
};
