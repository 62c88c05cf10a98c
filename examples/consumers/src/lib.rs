//! Idempotency without HTTP: consumers of queues, and a counter of many writers.
//!
//! The two differ in their effect. An addition to the [`Counter`] carries a token by which the database recognises a retry,
//! so an incomplete update is executed again. A parcel of [`Shipments`] cannot be called back, so an incomplete delivery is
//! refused. If it is unknown whether a parcel was sent, the message goes to the dead letters. Both have their leases and
//! records in DynamoDB.
//!
//! The [`Consumer`] of a [`retry_queue`] makes several attempts with growing delays. It has its leases, records and messages
//! in PostgreSQL or Redis.

pub mod retry_queue;

mod backoff;
mod carrier;
mod consumer;
mod counter;
mod queue;
mod shipments;
mod stop;
mod tally;
mod unadded;

pub use self::{
    backoff::Backoff,
    carrier::{Carrier, Unsent},
    consumer::Consumer,
    counter::{Applied, Counter},
    queue::{Delivery, Queue},
    shipments::{Shipments, Verdict},
    stop::stop_signal,
    tally::Tally,
    unadded::Unadded,
};

/// An error on the way to the database.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
