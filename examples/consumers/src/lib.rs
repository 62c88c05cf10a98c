//! Idempotency without HTTP: a queue's consumer and a counter of many writers, with their leases and records in DynamoDB.
//!
//! The two differ in what their effect can bear. An addition to the [`Counter`] carries a token by which the database knows
//! it again, so whatever was left half done is done again. A parcel of [`Shipments`] cannot be called back, so whatever was
//! left half done is refused, and what nobody can be sure of goes to the dead letters.

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

/// What went wrong on the way to the database.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
