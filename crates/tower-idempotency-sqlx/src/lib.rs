//! PostgreSQL, MySQL, MariaDB and SQLite as stores of `tower-idempotency`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod connections;
mod entry;
mod error;
#[cfg(feature = "postgres")]
mod hex;
#[cfg(feature = "postgres")]
mod postgres;
mod purge;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;

pub use sqlx;

#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStore;
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteStore;
pub use self::{error::SqlError, purge::Purger, table::TableNameError};
