//! The DynamoDB store on dynoxide.

mod checks;
mod conformance;
mod costs;
mod faults;
#[path = "../sql/held_request.rs"]
mod held_request;
mod listing;
mod skew;
mod versions;
