//! The DynamoDB store on dynoxide.

mod checks;
mod conformance;
mod costs;
mod faults;
mod listing;
mod skew;
