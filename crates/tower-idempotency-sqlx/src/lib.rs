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
//! let store = PostgresStore::connect("postgres://app@localhost/app").await?;
//! let purger = store.spawn_purger(Duration::from_secs(60)); // runs until the drop of `purger`
//! # std::mem::forget(purger);
//! let layer = IdempotencyLayer::new(store);
//! # Ok(layer)
//! # }
//! ```
//!
//! # Guarantees
//!
//! The stores satisfy the store contract at every default isolation level of connections. Data that the database loses
//! in a crash or a failover is lost.
//!
//! **Exactly once**: a handler can commit its effect together with the record, in one transaction that is fenced by its
//! lease. See [`FencedTransaction`]. Its process may be killed or paused at any point, and another process may take the
//! request over. There is then one effect and one recorded response, or neither.
//!
//! This covers no effects outside of that transaction. After a crash between such an effect and its record, a retry
//! executes the request again, unless the layer refuses orphans.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # mod example {
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sqlx::{CommitError, PostgresStore, sqlx::{self, PgPool}};
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! async fn pay(store: PostgresStore, pool: PgPool, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let mut tx = store.begin(&lease, &pool).await?;
//!     sqlx::query("insert into payments (amount) values (7)").execute(&mut *tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! # }
//! ```
//!
//! A request with several phases ends each phase with a [checkpoint](FencedTransaction::checkpoint). A takeover
//! continues after the last checkpoint. A [`Completer`] finishes requests whose clients do not retry.
//!
//! # Features
//!
//! No feature is enabled by default.
//!
//! | feature | adds |
//! |---|---|
//! | `postgres` | `PostgresStore`: PostgreSQL 14 or later |
//! | `mysql` | `MySqlStore`: MySQL 8.0, MariaDB 10.6, or later |
//! | `sqlite` | `SqliteStore`: SQLite, compiled in |
//! | `testing` | `testing::TemporarySqlite`: a database in a temporary file, for the tests of a service |
//! | `tls` | TLS to the servers, with rustls; only `sslmode=verify-full` (MySQL: `ssl-mode=VERIFY_IDENTITY`) in the URL verifies the host; without this feature, connections are not encrypted; enables `ring` of rustls: see `docs/reference/versions.md` |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(any(feature = "mysql", feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "only the stores use the shared code")
)]

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod audit;
mod backend;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod check;
mod completer;
mod connection;
mod entry;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod hex;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod inspect;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod purger;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod row_readers;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "testing")]
pub mod testing;
mod timeout;
mod transaction;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod url;
mod warning;

pub use sqlx;
use tower_idempotency_sql::LeaseStatus;
#[cfg(feature = "mysql")]
pub use tower_idempotency_sql::MySqlFence;
#[cfg(feature = "postgres")]
pub use tower_idempotency_sql::PostgresFence;
#[cfg(feature = "sqlite")]
pub use tower_idempotency_sql::SqliteFence;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
use tower_idempotency_sql::Table;
pub use tower_idempotency_sql::{
    CommitError, SqlError, TableNameError, TransactionError, TransactionErrorKind,
};

#[cfg(feature = "mysql")]
pub use self::mysql::MySqlStore;
#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStore;
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteStore;
pub use self::{
    backend::SqlStore,
    completer::{Completer, CompleterTask, Orphan, SweepStats},
    purger::Purger,
    transaction::{Checkpoint, FencedTransaction},
};
