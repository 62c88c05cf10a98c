//! Idempotency without HTTP: a queue's consumer and a counter of many writers, with their leases and records in DynamoDB.
//!
//! The two differ in their effect. An addition to the [`Counter`] carries a token by which the database recognises a retry,
//! so an incomplete update is executed again. A parcel of [`Shipments`] cannot be called back, so an incomplete delivery is
//! refused. If it is unknown whether a parcel was sent, the message goes to the dead letters.

mod counter;
mod queue;
mod shipments;
mod tally;
mod unadded;

pub use self::{
    counter::{Applied, Counter},
    queue::{Delivery, Queue},
    shipments::{Shipments, Verdict},
    tally::Tally,
    unadded::Unadded,
};

/// An error on the way to the database.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
