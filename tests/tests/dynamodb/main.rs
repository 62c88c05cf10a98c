//! The DynamoDB store on dynoxide.

mod conformance;
mod costs;
mod faults;
mod listing;
mod skew;
