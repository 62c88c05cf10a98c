#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backoff;
mod body;
mod budget;
mod copy;
mod error;
mod first_sent;
mod grpc;
mod key;
mod keys;
mod layer;
#[cfg(feature = "reqwest")]
mod middleware;
mod operation;
mod outbox;
mod problem;
mod protocol;
mod retry_after;
mod series;
mod service;
mod settings;
mod sticky;
mod telemetry;
mod verdict;
mod warning;

pub use self::{
    body::ResponseBody,
    budget::Budget,
    error::Error,
    key::InvalidKey,
    keys::{IdempotencyKeyLayer, SetIdempotencyKey},
    layer::RetryLayer,
    operation::{Operation, Outcome},
    outbox::{
        Entry, FileOutbox, Outbox, OutboxError, OutboxLayer, OutboxService, Recovered, Recovery,
    },
    protocol::Protocol,
    service::{ResponseFuture, Retry},
    sticky::ProviderChoice,
    verdict::{Attempt, Cause, Verdict},
};

#[cfg(feature = "outbox-postgres")]
pub use self::outbox::PostgresOutbox;
#[cfg(feature = "outbox-sqlite")]
pub use self::outbox::SqliteOutbox;
#[cfg(any(feature = "outbox-postgres", feature = "outbox-sqlite"))]
pub use sqlx;

/// The examples of the guide, which run as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/retries.md")]
pub struct Guide;
