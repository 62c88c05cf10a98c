//! Redis and Valkey as the store of [`tower_idempotency`]: one execution and one answer across many processes.
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
//! A new request costs two round trips, a replay or a refusal one. An entry is one hash with a time to live; each method of
//! the store is one script over that one key, so it happens as a whole or not at all, by the server's clock.
//!
//! # What Redis can promise here, and what not
//!
//! A lease is as durable as the server that keeps it. Set `maxmemory-policy noeviction`: every other policy evicts live
//! leases when memory is full, and then a request is executed twice. A server that comes back without its data, or a
//! failover to a replica that has not got them yet, loses leases and records as well: what was in flight or answered a
//! moment before may be executed again. Nothing in Redis excludes that; [`RedisOptions::with_wait`] narrows it. Whatever
//! happens, a record that exists is never overwritten before its time, and all who get an answer get the stored one.
//! `docs/redis.md` in the repository has the table of faults, each with its outcome and its test.
//!
//! # Crate features
//!
//! None is on by default.
//!
//! | feature | adds |
//! |---|---|
//! | `cluster` | `RedisOptions::connect_cluster` |
//! | `sentinel` | `RedisOptions::connect_sentinel` |
//! | `deadpool` | `RedisOptions::connect_pool`, over a pool that the application has already |
//! | `tls` | `rediss://`, by rustls with the certificates of the system |
//!
//! Another way to connect, such as a Unix socket or certificates of your own, is [`RedisOptions::connect_client`] with a
//! client of the [`redis`] crate, which is exported here.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod check;
#[cfg(feature = "cluster")]
mod cluster;
mod error;
mod link;
mod listen;
mod options;
mod redial;
mod scripts;
mod store;

pub use redis;

pub use self::{
    error::{ConnectError, ConnectErrorKind},
    options::{Eviction, RedisOptions},
    store::RedisStore,
};
