//! Tools for the tests of a service: a store that fails on request, the entries of a store, and counts of effects.
//!
//! Feature `testing`. Enable it only in `[dev-dependencies]`. `docs/guide/testing.md` has a test of a handler for each
//! promise of the layer.
//!
//! | a test wants | it uses |
//! |---|---|
//! | calls of the store that fail, are slow, or lose their replies | [`FaultInjector`] around any store |
//! | another process that executes the request | [`Entries::add_lease`] |
//! | a process that died, without waiting for its lease | [`Entries::expire_leases`] |
//! | a decision of an operator | [`Entries::resolve`] |
//! | one effect for each key | [`Effects`] |
//! | a database for transactions, without a server | `TemporarySqlite` of `tower-idempotency-sqlx` |
//!
//! ```
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use tower::ServiceExt;
//! use tower_idempotency::{
//!     IdempotencyKey, IdempotencyLayer, Lease, MemoryStore,
//!     testing::{Effects, Entries},
//! };
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (store, effects) = (MemoryStore::new(), Effects::new());
//! let layer = IdempotencyLayer::new(store.clone());
//! let counted = effects.clone();
//! let pay = async move |key: IdempotencyKey, lease: Lease| {
//!     counted.add(key.as_str());
//!     if lease.is_takeover() { "looked first" } else { "paid" }
//! };
//! let app: Router = Router::new().route("/payments", post(pay)).route_layer(layer.clone());
//! let request = || Request::post("/payments").header("idempotency-key", "8e03978e-40d5").body(Body::empty());
//!
//! // Another process executes the request, and dies.
//! let entries = Entries::new(store);
//! entries.add_lease(&layer, &request()?.map(|_| "")).await;
//! assert_eq!(app.clone().oneshot(request()?).await?.status(), 409);
//! assert_eq!(entries.expire_leases().await, 1);
//!
//! // A retry takes the request over.
//! assert_eq!(app.oneshot(request()?).await?.status(), 200);
//! effects.assert_once(["8e03978e-40d5"]);
//! # Ok(())
//! # }
//! ```

mod effects;
mod entries;

pub use self::{effects::Effects, entries::Entries};
pub use crate::faults::{Fault, FaultInjector, Hold, InjectedFault, Operation, Plan};
