//! Amazon DynamoDB as the store of [`tower_idempotency`]: leases and records in one table, a conditional write each.
//!
//! ```no_run
//! use tower_idempotency::IdempotencyLayer;
//! use tower_idempotency_dynamodb::{DynamoDbStore, aws_sdk_dynamodb::Client};
//!
//! # async fn f(client: Client) -> Result<(), tower_idempotency_dynamodb::DynamoDbError> {
//! // `client` is the application's: its region, credentials and endpoint.
//! let store = DynamoDbStore::new(&client, "payments-idempotency");
//! store.create_table().await?; // or by CloudFormation or Terraform
//! let layer = IdempotencyLayer::new(store);
//! # Ok(())
//! # }
//! ```
//!
//! A new request costs two calls, a replay or a refusal one. An entry is one item; each method of the store is one
//! conditional write of it, and a write that is refused says what it found. Nothing is ever scanned. What is in progress,
//! or was left behind, or needs an operator's attention, is in a sparse index for [`DynamoDbStore::in_progress`] and
//! [`DynamoDbStore::needs_attention`].
//!
//! # What DynamoDB can promise here, and what not
//!
//! It has no clock that a condition could read, so deadlines are compared with the clock of the process that asks. Clocks
//! may be apart by [`with_clock_skew`](DynamoDbOptions::with_clock_skew), 2 s unless set; further apart, a process that is
//! ahead takes over leases that are still held, and a request is executed twice. Whatever the clocks say, a record that
//! exists is never overwritten before its time, and all who get an answer get the stored one.
//!
//! An item has room for 400 KB: above 350 KiB a record becomes a tombstone. The service collects what is over up to days
//! late; it counts as absent from its last moment on all the same. In a global table the last writer wins, so two regions
//! may hold one lease: let each key be used in one region.
//!
//! `docs/dynamodb.md` in the repository has the table, what requests cost, and each fault with its outcome and its test.
//!
//! # Crate features
//!
//! None is on by default.
//!
//! | feature | adds |
//! |---|---|
//! | `tls` | `https_client`: HTTPS by rustls and *ring*, for a client of an SDK that was built without |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod clock;
mod credentials;
mod error;
mod expression;
#[cfg(feature = "tls")]
mod https;
mod item;
mod list;
mod options;
mod resolve;
mod store;
mod table;

pub use aws_sdk_dynamodb;

#[cfg(feature = "tls")]
pub use self::https::https_client;
pub use self::{
    error::{DynamoDbError, DynamoDbErrorKind},
    list::{Entry, Listing},
    options::DynamoDbOptions,
    resolve::Resolution,
    store::DynamoDbStore,
};
