//! The DynamoDB store on dynoxide.

mod conformance;
mod costs;
mod faults;
mod fleet;
mod listing;
mod skew;
