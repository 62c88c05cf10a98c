//! The DynamoDB store on dynoxide.

mod checks;
mod completed;
mod conformance;
mod connect;
mod costs;
mod faults;
#[path = "../sql/held_request.rs"]
mod held_request;
mod late_writes;
mod listing;
mod secrets;
mod skew;
mod versions;
