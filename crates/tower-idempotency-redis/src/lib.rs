//! Redis and Valkey store for [`tower_idempotency`]: one execution and one response per key across processes.
//!
//! ```no_run
//! use axum::{Router, routing::post};
//! use tower_idempotency::IdempotencyLayer;
//! use tower_idempotency_redis::RedisStore;
//!
//! # async fn f() -> Result<(), tower_idempotency_redis::ConnectError> {
//! let store = RedisStore::connect("redis://127.0.0.1:6379/0").await?;
//! let app: Router = Router::new()
//!     .route("/payments", post(async || "paid"))
//!     .route_layer(IdempotencyLayer::new(store));
//! # Ok(())
//! # }
//! ```
//!
//! A new request costs two round trips, a replay or a rejected request one. An entry is one hash with a time to live. Each
//! store method runs one script on that key and those of its indexes. The script is atomic and uses the server's clock.
//!
//! # Guarantees and limits
//!
//! A lease is as durable as the server that stores it. Set `maxmemory-policy noeviction`: every other policy evicts live
//! leases when memory is full, and a retry then executes the request a second time.
//!
//! A server also loses leases and records if it restarts without its data, or if a failover promotes a replica that lacks
//! recent writes. Requests that were running or had just completed may then execute again. Redis cannot rule this out;
//! [`RedisOptions::with_wait`] narrows the window.
//!
//! No call overwrites an existing record before it expires. Every client that gets a response gets the stored one.
//! `docs/stores/redis.md` in the repository lists each fault with its outcome and its test.
//!
//! # Crate features
//!
//! No feature is enabled by default.
//!
//! | feature | adds |
//! |---|---|
//! | `cluster` | `RedisOptions::connect_cluster` |
//! | `sentinel` | `RedisOptions::connect_sentinel` |
//! | `deadpool` | `RedisOptions::connect_pool`, for a connection pool of the application |
//! | `metrics` | a gauge of the eviction policy through the `metrics` facade |
//! | `tls` | `rediss://`, through rustls with the system's certificates; see [`RedisOptions::connect`] for its cryptography |
//!
//! Other connections, such as a Unix socket or custom certificates, need a client of the [`redis`] crate: see
//! [`RedisOptions::connect_client`]. This crate re-exports [`redis`].

#![cfg_attr(docsrs, feature(doc_cfg))]

mod connect;
mod connection;
mod error;
mod index;
mod inspect;
mod notifications;
mod options;
mod scripts;
mod server_check;
mod store;

pub use redis;

pub use self::{
    error::{ConnectError, ConnectErrorKind},
    inspect::IndexRepair,
    options::{Eviction, RedisOptions},
    store::RedisStore,
};
