//! PostgreSQL, MySQL, MariaDB and SQLite as stores of `tower-idempotency`.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "postgres")]
mod connections;
mod error;
#[cfg(feature = "postgres")]
mod hex;
#[cfg(feature = "postgres")]
mod postgres;
mod purge;
mod table;

pub use sqlx;

#[cfg(feature = "postgres")]
pub use self::postgres::PostgresStore;
pub use self::{error::SqlError, purge::Purger, table::TableNameError};
