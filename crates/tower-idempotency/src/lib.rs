//! Makes unsafe HTTP requests safe to retry: a Tower layer for the `Idempotency-Key` header.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod admission;
#[cfg(feature = "axum")]
pub mod axum;
mod body;
mod collect;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod control;
mod engine;
mod error;
mod exchange;
mod fingerprint;
mod future;
mod json;
mod key;
mod layer;
mod lease;
mod limits;
mod preset;
mod problem;
#[cfg(test)]
mod random;
mod record;
mod refusal;
mod replay;
pub mod run_once;
mod scope;
mod service;
pub mod store;
mod telemetry;
mod waiters;

pub use self::{
    body::Body,
    config::{InFlight, Mismatch, MissingKey, StoreFailure, Unretained},
    control::Retention,
    error::{ConfigError, Error, ErrorKind},
    fingerprint::FingerprintBy,
    future::ResponseFuture,
    key::{IdempotencyKey, KeySyntax},
    layer::IdempotencyLayer,
    lease::Lease,
    preset::Preset,
    record::{RecordError, replayed_by_default},
    scope::Principal,
    service::Idempotency,
    store::{MemoryStore, OrphanPolicy, Store, Ttl},
};
