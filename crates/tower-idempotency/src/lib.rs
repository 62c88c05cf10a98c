//! Makes unsafe HTTP requests safe to retry: a [Tower](https://docs.rs/tower) layer for the `Idempotency-Key` header.
//!
//! A client sends `Idempotency-Key` and may repeat the request as often as it likes. The handler executes once, the layer
//! records its response, and every retry gets that response, byte for byte. A duplicate that arrives during the execution
//! gets 409, or waits for the response.
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
//! - **One recorded response per key.** Every client that gets a recorded response gets the same one.
//! - **One execution at a time** while leases hold. A client that disconnects neither cancels nor repeats the work.
//! - **Store before respond.** The layer stores the record before it sends the first byte of the response.
//! - **No execution without a lease.** If the store fails, nothing is executed, unless [`StoreFailure`] is set otherwise.
//! - **No silent second run.** If a response cannot be recorded (too large, or streamed), the layer stores a tombstone, and
//!   retries get 409. [`Unrecordable::Release`], the setting of [`Preset::Idempo`], changes that.
//!
//! If the store fails when the response is ready, the client still gets the response. The key stays blocked while the lease
//! lasts, and the layer retries storing the record for one lease duration. If that fails too, the key becomes an orphan.
//!
//! Storing delays the response by:
//!
//! | at most | if |
//! |---|---|
//! | 4 s (2 x [store timeout](IdempotencyLayer::with_store_timeout)) | the lease is held |
//! | 12 s (6 x store timeout) | the layer must first query what is stored, for example after a lost lease |
//! | 20 s (10 x store timeout) | the handler reported a commit, and returned another response |
//! | 4 s more | the store rejects the record as too large |
//!
//! # Non-guarantees
//!
//! - **Crashes.** A process that dies between the effect and the record leaves an orphan. A store that accepts no record for
//!   one lease has the same result.
//!   - By default, a retry takes the orphan over and executes again (at-least-once). [`Lease::is_takeover`] notifies the
//!     handler.
//!   - With [`OrphanPolicy::Refuse`], retries get 409 (at-most-once) until the orphan
//!     [expires](IdempotencyLayer::with_orphan_retention) or an operator [resolves](inspect) it. A retry after the expiry
//!     executes again.
//!   - Exactly-once needs the effect and the record in one database transaction. A layer alone cannot do that. A store can,
//!     if the handler uses the same database: see [`transaction`].
//! - **Pauses.** A process that is paused for longer than its lease may execute concurrently with the process that took
//!   over. Clients get only the stored response, but both effects happen. [`Lease::is_held`] makes this less likely.
//! - **Refreshed tokens.** A retry with another token counts as a different caller, unless
//!   [`with_principal`](IdempotencyLayer::with_principal) is set. It executes, possibly concurrently with the first request.
//!   [`Lease::is_takeover`] is then `false`, and [`Lease::derive`] returns another key.
//! - **Responses that are not recorded**, such as a 5xx. The layer releases the key, and a retry executes. After a takeover
//!   it leaves the orphan instead, and the retry takes that over.
//! - **Restarts with [`MemoryStore`].** It belongs to one process and loses all entries with it. After a restart every retry
//!   executes, and [`Lease::is_takeover`] is `false`.
//!
//! # Control from the handler
//!
//! Response headers, which the layer removes from every response:
//!
//! - `X-Idempo-Policy: no-store` prevents the recording.
//! - `X-Idempo-Persist-For-Seconds: N` sets how long the record is stored.
//!
//! [`Retention`] is the typed form of both. With [`NeedsAttention`], retries are rejected until an operator has resolved
//! the failure.
//!
//! Request extensions, and extractors with the feature `axum`: [`IdempotencyKey`] and [`Lease`].
//!
//! # Placement
//!
//! Place the layer inside CORS, tracing, compression and authentication, and outside body limits and timeouts.
//!
//! A timeout that aborts a handler releases its key, so a retry executes again. A handler that makes payments should have a
//! shorter timeout of its own and respond with [`NeedsAttention`]: see `docs/guide/placement.md` for the code.
//!
//! With the layers of `tower-http`, from the innermost to the outermost, which is the order in which a `Router` takes them:
//!
//! ```text
//! Router::new()
//!     .route("/payments", post(pay))
//!     .route_layer(TimeoutLayer::with_status_code(..))        // aborts stuck handlers; a retry executes again
//!     .route_layer(IdempotencyLayer::new(store))              // only around existing routes
//!     .layer(authentication)                                  // identifies the caller: `Principal`
//!     .layer(CompressionLayer::new())                         // compresses replays for the client that retries
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
//! | store | crate | use |
//! |---|---|---|
//! | [`MemoryStore`] | this one | one process |
//! | `RedisStore` | `tower-idempotency-redis` | many processes; Redis, Valkey, Cluster, Sentinel |
//! | `PostgresStore` | `tower-idempotency-sqlx` | many processes; effect and record in one transaction |
//! | `MySqlStore` | `tower-idempotency-sqlx` | the same; MySQL and MariaDB |
//! | `SqliteStore` | `tower-idempotency-sqlx` | the same, for the processes of one machine |
//! | `DynamoDbStore` | `tower-idempotency-dynamodb` | many processes and functions |
//! | `Tiered` (feature `tiered`) | this one | in front of any other store: replays without a round trip |
//! | your own | implements [`Store`], a trait of five methods | any database with conditional writes |
//!
//! Operators find and resolve stuck keys with [`inspect`].
//!
//! # Crate features
//!
//! | feature | default | without it |
//! |---|---|---|
//! | `axum` | yes | no extractors, and no original path of requests below `Router::nest`: nested routes with equal inner paths look like one route; operators see paths in place of routes |
//! | `grpc` | no | no [`with_grpc`](IdempotencyLayer::with_grpc): gRPC calls pass through without protection |
//! | `metrics` | no | no counters, gauges and histograms through the `metrics` facade, as listed in `docs/operations/metrics-and-alarms.md` |
//! | `rate` | no | no [`with_fresh_key_rate`](IdempotencyLayer::with_fresh_key_rate): callers within their share send fresh keys at any rate |
//! | `tiered` | no | no [`Tiered`]: each replay on a server costs a round trip |
//! | `testing` | no | no `testing`: a store that fails on request, the entries of a store, and counts of effects, for the tests of a service |
//! | `conformance` | no | no conformance suite for implementors of a [`Store`] |
//!
//! # Scope of this crate
//!
//! The crate does not retry requests; the client does. It does not order requests or authenticate callers.
//! It does not interpret requests: two different keys are two requests, even if their content is equal.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "axum")]
mod axum_route;
mod body;
mod clock;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod digest;
mod enforcement;
mod error;
mod execution;
#[cfg(feature = "axum")]
pub mod extract;
#[cfg(feature = "testing")]
mod faults;
mod future;
#[cfg(test)]
mod fuzz;
#[cfg(feature = "grpc")]
mod grpc;
mod header_lines;
pub mod inspect;
pub mod items;
mod layer;
mod layer_name;
mod lease;
mod limits;
#[cfg(feature = "metrics")]
pub mod metrics;
mod operator;
mod panics;
pub mod policy;
#[cfg(test)]
mod random;
#[cfg(feature = "rate")]
mod rate;
mod record;
mod request;
mod response;
mod retry;
pub mod run_once;
mod safe_methods;
mod service;
pub mod store;
mod store_client;
mod take_over;
mod telemetry;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "tiered")]
mod tiered;
pub mod transaction;

#[cfg(feature = "grpc")]
pub use self::grpc::{GrpcCode, GrpcMethods, grpc_response};
#[cfg(feature = "tiered")]
pub use self::tiered::Tiered;
pub use self::{
    body::Body,
    config::preset::Preset,
    enforcement::{Enforcement, EnforcementSwitch, Rollout},
    error::{ConfigError, Error, ErrorKind},
    execution::rules::{ConcurrentRequests, ExecutionFailure, StoreFailure},
    future::ResponseFuture,
    layer::IdempotencyLayer,
    lease::Lease,
    policy::Policy,
    record::{ExecutionTrace, NeedsAttention, RecordError, replayed_by_default},
    request::{
        fingerprint::{ACTING_HEADERS, FingerprintBy, original_path_and_query},
        json_fingerprint::JsonFingerprint,
        key::{IDEMPOTENCY_KEY, IdempotencyKey, KeyScope, KeySyntax},
        principal::Principal,
        route::RouteTemplate,
        rules::{KeyReuse, MissingKey},
    },
    response::{directives::Retention, replay::IDEMPOTENT_REPLAYED, rules::Unrecordable},
    service::Idempotency,
    store::{MemoryStore, OrphanPolicy, Store, Ttl},
    take_over::TakeOverOutcome,
};
