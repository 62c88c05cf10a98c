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
//! Those of the store contract, at whatever isolation level connections default to. An effect that a handler has in a
//! transaction of its own is not part of them: after a crash between the effect and its record the request is executed
//! again, unless the layer refuses orphans. What the database loses in a crash or a failover is lost here as well.
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

mod checkpoint;
mod completer;
mod connections;
mod entry;
mod error;
mod fenced;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod hex;
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
    completer::{Completer, Completing, Orphan, Sweep},
    error::SqlError,
    fenced::{CommitError, Fenced, TransactionError, TransactionErrorKind},
    purge::Purger,
    sql_store::SqlStore,
    table::TableNameError,
};
