//! Makes unsafe HTTP requests safe to retry: a [Tower](https://docs.rs/tower) layer for the `Idempotency-Key` header.
//!
//! A client that sends `Idempotency-Key` may send the same request as often as it likes: the handler runs once, its
//! response is recorded, and every retry is answered with that response, byte for byte. A duplicate that arrives while
//! the first request is still running is told so, or waits for the answer.
//!
//! ```
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use tower::ServiceExt;
//! use tower_idempotency::{IdempotencyLayer, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let app: Router = Router::new()
//!     .route("/payments", post(async || "paid"))
//!     .route_layer(IdempotencyLayer::new(MemoryStore::new()));
//!
//! let pay = || Request::post("/payments").header("idempotency-key", "8e03978e-40d5").body(Body::empty());
//! let first = app.clone().oneshot(pay()?).await?;
//! let retry = app.oneshot(pay()?).await?;
//! assert!(!first.headers().contains_key("idempotent-replayed"));
//! assert_eq!(retry.headers()["idempotent-replayed"], "true");
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - One stored answer per key: every client that gets a recorded answer gets that one.
//! - While leases hold, one execution at a time. A client that disconnects neither cancels nor repeats the work.
//! - The record is stored before the first byte of the answer leaves. If the store fails at that moment, the answer goes
//!   out all the same, the key stays held while the lease lasts, and storing is tried again for as long as a lease, from then
//!   on. If that fails too, the key is an orphan. The answer waits for at most 4 s (twice
//!   [`with_store_timeout`](IdempotencyLayer::with_store_timeout)), 12 s where it has to be found out first what is stored, as
//!   after a lost lease, and 4 s more where the store says only then that the record is too large for it.
//! - When no lease can be taken because the store is down, nothing is executed, unless [`StoreFailure`] says otherwise.
//! - What is not retained (too large, or streamed) leaves a tombstone: a retry is told so, and not silently run again,
//!   unless [`Unrecordable::Release`] says otherwise, as it does in [`Preset::Idempo`].
//!
//! # Non-guarantees
//!
//! - A process that dies between the effect and the record leaves an orphan; so does a store that takes no record for as
//!   long as a lease. By default a retry takes it over and executes again (at-least-once; [`Lease::is_takeover`]
//!   tells the handler); with [`OrphanPolicy::Refuse`] it is refused (at-most-once) for as long as the orphan is
//!   [remembered](IdempotencyLayer::with_orphan_retention): a retry after that executes again. Exactly-once needs
//!   effect and record in one database transaction, which a layer alone cannot give; a store can, where the database is
//!   also the handler's: see [`transaction`].
//! - A process that is paused for longer than its lease may execute beside the one that took over. Only what is stored
//!   is answered, but both effects happen; [`Lease::is_held`] narrows the window.
//! - A retry under another token is another caller's unless [`with_principal`](IdempotencyLayer::with_principal) says
//!   otherwise: it executes, beside the first one if that still runs; [`Lease::is_takeover`] is false and [`Lease::derive`]
//!   gives another key.
//! - A response that is not recorded, such as a 5xx, frees the key: the retry executes. After a takeover it leaves the
//!   orphan: the retry takes it over in turn.
//! - [`MemoryStore`] is for one process and ends with it: after a restart every retry executes, and is told of nothing.
//!
//! # How a handler steers it
//!
//! Response headers, taken off every answer: `X-Idempo-Policy: no-store` does not record, and
//! `X-Idempo-Persist-For-Seconds: N` sets how long the record lives. [`Retention`] is the typed form of both.
//! [`NeedsAttention`] has retries refused until an operator has looked at what was done. In the request's extensions, and
//! as extractors with the feature `axum`: [`IdempotencyKey`] and [`Lease`].
//!
//! # Where to place it
//!
//! Inside CORS, tracing, compression and authentication; outside body limits and timeouts. A timeout that cuts a
//! handler off frees its key, so that a retry executes again: a handler that pays has a shorter one of its own, and answers with
//! [`NeedsAttention`]; `docs/deploying.md` has the code. With the layers of `tower-http`, from the innermost, which a
//! `Router` takes first:
//!
//! ```text
//! Router::new()
//!     .route("/payments", post(pay))
//!     .route_layer(TimeoutLayer::with_status_code(..))        ends what does not: it executes again
//!     .route_layer(IdempotencyLayer::new(store))              around routes that there are
//!     .layer(authentication)                                  says who is asking: `Principal`
//!     .layer(CompressionLayer::new())                         encodes replays for whoever retries
//!     .layer(TraceLayer::new_for_http())
//!     .layer(
//!         CorsLayer::new()
//!             .allow_headers([AUTHORIZATION, CONTENT_TYPE, IDEMPOTENCY_KEY])
//!             .expose_headers([IDEMPOTENT_REPLAYED, LOCATION, RETRY_AFTER]),
//!     )
//! ```
//!
//! # Stores
//!
//! | store | crate | for |
//! |---|---|---|
//! | [`MemoryStore`] | this one | one process |
//! | `RedisStore` | `tower-idempotency-redis` | many processes; Redis, Valkey, Cluster, Sentinel |
//! | `PostgresStore` | `tower-idempotency-sqlx` | many processes; effect and record in one transaction |
//! | `MySqlStore` | `tower-idempotency-sqlx` | the same; MySQL and MariaDB |
//! | `SqliteStore` | `tower-idempotency-sqlx` | the same, for the processes of one machine |
//! | `DynamoDbStore` | `tower-idempotency-dynamodb` | many processes and functions |
//! | yours | a [`Store`] of five methods | anything with a conditional write |
//!
//! # Crate features
//!
//! | feature | default | what you lose without it |
//! |---|---|---|
//! | `axum` | yes | the extractors, and the original path of requests under `Router::nest`: nested routes with equal inner paths then look like one route |
//! | `metrics` | no | counters, gauges and histograms through the `metrics` facade, as `docs/operations.md` lists them |
//! | `conformance` | no | the suite that every store passes, for those who write one |
//!
//! # Scope of this crate
//!
//! It does not retry: that is the client's half. It does not order requests, limit rates, or authenticate anybody. It
//! knows nothing about the meaning of requests: two different keys are two requests, whatever they say.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod body;
mod clock;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod execution;
#[cfg(feature = "axum")]
pub mod extract;
mod future;
#[cfg(test)]
mod fuzz;
mod layer;
mod lease;
mod limits;
mod operator;
#[cfg(test)]
mod random;
mod record;
mod request;
mod response;
pub mod run_once;
mod service;
pub mod store;
mod take_over;
mod telemetry;
pub mod transaction;

pub use self::{
    body::Body,
    config::preset::Preset,
    error::{ConfigError, Error, ErrorKind},
    execution::rules::{ConcurrentRequests, StoreFailure},
    future::ResponseFuture,
    layer::IdempotencyLayer,
    lease::Lease,
    record::{NeedsAttention, RecordError, replayed_by_default},
    request::{
        fingerprint::{FingerprintBy, original_path_and_query},
        key::{IDEMPOTENCY_KEY, IdempotencyKey, KeySyntax},
        principal::Principal,
        rules::{KeyReuse, MissingKey},
    },
    response::{directives::Retention, replay::IDEMPOTENT_REPLAYED, rules::Unrecordable},
    service::Idempotency,
    store::{MemoryStore, OrphanPolicy, Store, Ttl},
    take_over::TakeOverOutcome,
};
