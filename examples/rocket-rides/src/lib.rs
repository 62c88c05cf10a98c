//! Books rides on rockets: a request writes to a database, charges a card at a payment provider and sends a receipt. It may
//! be retried, abandoned or killed at any instruction without a second charge.
//!
//! Begin with `rides.rs`; the README explains how to run it.

mod careless;
mod database;
mod failure;
mod payments;
pub mod provider;
mod receipts;
mod rides;
mod serve;

pub use self::{
    careless::careless,
    database::connect,
    failure::Failure,
    payments::{Payments, Unavailable, Verdict},
    receipts::{Mailbox, deliver, deliver_one},
    rides::{Rides, app, completer, migrate},
    serve::{GRACE, serve},
};
