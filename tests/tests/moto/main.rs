//! The DynamoDB store on moto.

mod conformance;
