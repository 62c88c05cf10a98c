//! Amazon DynamoDB store for [`tower_idempotency`]: leases and records in one table, written conditionally.
//!
//! ```no_run
//! use tower_idempotency::IdempotencyLayer;
//! use tower_idempotency_dynamodb::{DynamoDbStore, aws_sdk_dynamodb::Client};
//!
//! # async fn f(client: Client) -> Result<(), tower_idempotency_dynamodb::DynamoDbError> {
//! // `client` belongs to the application, with its region, credentials and endpoint.
//! let store = DynamoDbStore::new(&client, "payments-idempotency");
//! store.create_table().await?; // or use CloudFormation or Terraform
//! let layer = IdempotencyLayer::new(store);
//! # Ok(())
//! # }
//! ```
//!
//! A new request costs two calls, a replay or a rejected request one. An entry is one item. Each store method makes a
//! conditional write to that item; if the condition fails, the service returns the conflicting item. No call scans the
//! table.
//!
//! A sparse index lists entries that are in progress, orphaned or in need of an operator's attention, for
//! [`inspect`](tower_idempotency::inspect). It lists completed entries too if
//! [`with_completed_index`](DynamoDbOptions::with_completed_index) is set.
//!
//! # Guarantees and limits
//!
//! DynamoDB has no clock that a condition could read, so each process compares deadlines with its own clock. Clocks may
//! differ by up to [`with_clock_skew`](DynamoDbOptions::with_clock_skew) (default: 2 s). If they differ by more, a process
//! whose clock is ahead takes over leases that are still held, and the request executes twice.
//! [`check`](tower_idempotency::store::Store::check) and the resolutions of operators compare the clock with that of the
//! service, and fail in this case. Such a process also treats a record as expired too early, by the difference beyond the
//! allowance. A retry in that period executes again, and gets another response.
//!
//! An item may have 400 KB: the layer replaces a record above 350 KiB by a tombstone. The service deletes expired items up
//! to days late; the store treats an expired item as absent at once. In a global table the last writer wins, so two regions
//! may hold the same lease: use each key in one region only.
//!
//! `docs/stores/dynamodb.md` in the repository documents the table, the cost of requests, and each fault with its outcome
//! and test.
//!
//! # Crate features
//!
//! No feature is enabled by default.
//!
//! | feature | adds |
//! |---|---|
//! | `connect` | `DynamoDbStore::connect`, from a URL; region and credentials come from [sources of the SDK](DynamoDbOptions::connect); enables `tls` |
//! | `tls` | `https_client`: HTTPS through rustls and *ring*, for a client of an SDK that was built without TLS; enables `ring` of rustls: see `docs/reference/versions.md` |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod check;
mod clock;
#[cfg(feature = "connect")]
mod connect;
mod error;
mod expression;
#[cfg(feature = "tls")]
mod https;
mod identity_cache;
mod inspect;
mod item;
mod options;
mod service_clock;
mod store;
mod table;
mod table_client;
mod writes;

pub use aws_sdk_dynamodb;

#[cfg(feature = "tls")]
pub use self::https::https_client;
pub use self::{
    error::{DynamoDbError, DynamoDbErrorKind},
    options::DynamoDbOptions,
    store::DynamoDbStore,
};
