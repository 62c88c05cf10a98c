//! Exactly-once handlers with [`tokio_postgres`], for the PostgreSQL store of `tower-idempotency-sqlx`.
//!
//! The store keeps its own connections. The handler's transaction runs on a client of tokio-postgres that is connected to
//! the database of the store. [`begin`] fences it by the lease, and [`FencedTransaction::commit`] commits the handler's
//! writes and the record together, or neither.
//!
//! ```no_run
//! use http::Response;
//! use tokio_postgres::Client;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sqlx::PostgresStore;
//! use tower_idempotency_tokio_postgres::{CommitError, begin};
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! async fn pay(store: PostgresStore, client: &mut Client, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let tx = begin(&store, &lease, client).await?;
//!     tx.execute("insert into payments (amount) values ($1)", &[&7_i32]).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! ```
//!
//! This crate does not link sqlx. `&store` converts to the [statements](PostgresFence) of the store.
//!
//! # Pools
//!
//! An object of `deadpool-postgres` or `bb8-postgres` derefs to the client. The pool gets a connection back after the
//! transaction was rolled back or committed, in the order in which the statements were sent.
//!
//! ```no_run
//! use deadpool_postgres::Pool;
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sqlx::PostgresStore;
//! use tower_idempotency_tokio_postgres::{CommitError, begin, tokio_postgres};
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! // Functions of the application keep their signatures, if they take the types of tokio-postgres.
//! async fn debit(tx: &tokio_postgres::Transaction<'_>) -> Result<u64, tokio_postgres::Error> {
//!     tx.execute("update accounts set amount = amount - $1", &[&7_i32]).await
//! }
//!
//! async fn pay(store: PostgresStore, pool: Pool, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let mut client = pool.get().await?;
//!     let tx = begin(&store, &lease, &mut client).await?;
//!     debit(&tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! ```
//!
//! Only a client of deadpool creates a `deadpool_postgres::Transaction`. Change functions that take this type to
//! [`GenericClient`](tokio_postgres::GenericClient).
//!
//! # Limits
//!
//! Checkpoints need `PostgresStore::begin`, which uses sqlx. Both kinds of transaction may be used with one store.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod transaction;

pub use tokio_postgres;
pub use tower_idempotency_sql::{
    CommitError, PostgresFence, SqlError, TransactionError, TransactionErrorKind,
};

pub use self::transaction::{ClientTransaction, FencedTransaction, begin};
