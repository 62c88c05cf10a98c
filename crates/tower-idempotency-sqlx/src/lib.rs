//! PostgreSQL, MySQL, MariaDB and SQLite as stores of [`tower_idempotency`].
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # async fn layer() -> Result<tower_idempotency::IdempotencyLayer, Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use tower_idempotency::IdempotencyLayer;
//! use tower_idempotency_sqlx::PostgresStore;
//!
//! let store = PostgresStore::from_url("postgres://app@localhost/app")?;
//! store.migrate().await?;
//! let purger = store.spawn_purger(Duration::from_secs(60)); // until it is dropped
//! # std::mem::forget(purger);
//! let layer = IdempotencyLayer::new(store);
//! # Ok(layer)
//! # }
//! ```
//!
//! # Guarantees
//!
//! Those of the store contract, at whatever isolation level connections default to. What the database loses in a crash or a
//! failover is lost here as well.
//!
//! **Exactly once**, where a handler commits its effect together with the record, in a transaction of the same database that
//! is fenced by its lease: [`FencedTransaction`]. However its process is killed or paused, and whoever took it over, there is one effect
//! and one answer, or none of both. An effect that a handler has elsewhere, or in a transaction of its own, is not part of
//! this: after a crash between the effect and its record the request is executed again, unless the layer refuses orphans.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # mod example {
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sqlx::{PostgresStore, sqlx::{self, PgPool}};
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! async fn pay(store: PostgresStore, pool: PgPool, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let mut tx = store.begin(&lease, &pool).await?;
//!     sqlx::query("insert into payments (amount) values (7)").execute(&mut *tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await?)
//! }
//! # }
//! ```
//!
//! Requests of several phases end each with a [checkpoint](FencedTransaction::checkpoint), from which a takeover goes on. A
//! [`Completer`] finishes those whose clients do not come back.
//!
//! # Features
//!
//! None is on by default.
//!
//! | feature | adds |
//! |---|---|
//! | `postgres` | `PostgresStore`: PostgreSQL 14 or later |
//! | `mysql` | `MySqlStore`: MySQL 8.0, MariaDB 10.6, or later |
//! | `sqlite` | `SqliteStore`: SQLite, compiled in |
//! | `tls` | TLS to the servers, by rustls with the certificates of the operating system; without it they are reached in the clear |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(any(feature = "mysql", feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "what the stores share, without a store")
)]

mod bounded;
mod checkpoint;
mod completer;
mod connections;
mod entry;
mod error;
mod fenced;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod hex;
mod line;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod purge;
mod sql_store;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;

pub use sqlx;

#[cfg(feature = "mysql")]
pub use self::mysql::MySqlStore;
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStore;
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteStore;
pub use self::{
    checkpoint::Checkpoint,
    completer::{Completer, CompleterTask, Orphan, Sweep},
    error::SqlError,
    fenced::{CommitError, FencedTransaction, TransactionError, TransactionErrorKind},
    purge::Purger,
    sql_store::SqlStore,
    table::TableNameError,
};
