//! Opens any store of [`tower_idempotency`] from a URL, for programs whose users choose the store.
//!
//! ```
//! use tower_idempotency::Preset;
//! use tower_idempotency_any::{AnyStore, OpenError};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), OpenError> {
//! let store = AnyStore::open("memory").await?;
//! let layer = store.layer(Preset::Recommended);
//!
//! let error = AnyStore::open("mongodb://app:password@host").await.unwrap_err();
//! assert!(error.to_string().ends_with("found mongodb"));
//! # drop(layer);
//! # Ok(())
//! # }
//! ```
//!
//! A library that needs one store should depend on the crate of that store: it has more settings.
//!
//! # URLs
//!
//! | URL | store | feature |
//! |---|---|---|
//! | `memory` | [`MemoryStore`](tower_idempotency::MemoryStore): one process, nothing survives a restart | |
//! | `redis://:PASSWORD@HOST:PORT/DB` | `RedisStore`: Redis or Valkey | `redis` |
//! | `redis+cluster://HOST:PORT,HOST:PORT` | `RedisStore` on a cluster; the URL names some of its nodes | `redis` |
//! | `rediss://..`, `rediss+cluster://..` | the same over TLS | `redis`, `tls` |
//! | `postgres://USER:PASSWORD@HOST/DATABASE` | `PostgresStore` | `postgres` |
//! | `mysql://USER:PASSWORD@HOST/DATABASE` | `MySqlStore`: MySQL or MariaDB | `mysql` |
//! | `sqlite:PATH` | `SqliteStore` in this file | `sqlite` |
//! | `dynamodb://TABLE?endpoint=URL&skew=DURATION&shards=N` | `DynamoDbStore`; each parameter is optional | `dynamodb` |
//!
//! `postgresql` and `mariadb` are other names of `postgres` and `mysql`. Credentials and region of DynamoDB come from the
//! default sources of the AWS SDK. A plain HTTP endpoint is not AWS: placeholders then replace missing ones. `skew` and
//! `shards` are the clock skew and the index shards of the service. A program with fewer shards does not list all entries.
//!
//! `completed-index=true` after the `?` of a URL of Redis or DynamoDB is
//! [`with_completed_index`](OpenOptions::with_completed_index): the store then lists completed entries too.
//!
//! If `completed-index` or a parameter of DynamoDB occurs twice, the last one counts. The driver of Redis has one parameter,
//! `protocol=resp3`. In the URL of a cluster the parameters follow the last node, and each node gets them. A URL is refused if it
//! has a parameter that neither the store nor its driver knows, because the driver would ignore it.
//!
//! In a password, write `%2F` for `/`, `%3F` for `?`, `%40` for `@` and `%25` for `%`. A URL of Redis, PostgreSQL or MySQL is
//! refused if its path has an `@`, or if its first `@` follows a `?`. That `@` may be the end of a password. In a path or a
//! value, write `%40`.
//!
//! In the URL of a cluster, each node has the user and the password: `redis+cluster://:PASSWORD@HOST:PORT,:PASSWORD@HOST:PORT`.
//! Write `%2C` for a `,` in a password. The URL is refused if only some of its nodes have an `@`.
//!
//! Write `%23` for a `#` in a user name, a password or a value. A path of SQLite may have a `#`. Only the URL of Redis may have
//! a fragment, `#insecure`: its driver then does not verify the certificate of the server. Without the feature
//! `tls-rustls-insecure` of the crate `redis`, the driver does not connect.
//!
//! [`OpenOptions`] sets the table or the prefix of keys, and opens a store without creating anything.
//!
//! # Secrets
//!
//! A URL may contain a password. Neither [`OpenError`] nor the `Debug` output of [`AnyStore`] contains it. The error of a server
//! may contain the user, the database or the table: a password in their place is in the message.
//!
//! # Crate features
//!
//! Each store has a feature, and no feature is enabled by default. `tls` adds TLS to Redis, PostgreSQL and MySQL.
//! `tls` and `dynamodb` enable `ring` of rustls: see `docs/reference/versions.md`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod open;
mod options;
mod store;

pub use self::{
    error::{OpenError, OpenErrorKind},
    options::OpenOptions,
    store::{AnyStore, IndexRepair, Purger},
};
