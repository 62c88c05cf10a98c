//! PostgreSQL, MySQL, MariaDB and SQLite as stores of `tower-idempotency`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod connections;
mod entry;
mod error;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod hex;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod purge;
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
pub use self::{error::SqlError, purge::Purger, table::TableNameError};
