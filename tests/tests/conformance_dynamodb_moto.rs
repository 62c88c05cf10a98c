//! The DynamoDB store passes the suite on moto: as it is, and with each kind of lost call and reply in turn.
//!
//! Moto makes one call at a time, and each takes milliseconds: the plans of the suite one by one are for dynoxide.

use std::time::Duration;

use tests::{
    conformance::every_case_at_once_in_turn,
    servers::dynamodb::{StandIn, shared},
};
use tower_idempotency::conformance::{Plan, Subject};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

async fn subject() -> Subject<DynamoDbStore> {
    let options = DynamoDbOptions::new()
        .with_clock_skew(Duration::ZERO)
        .with_timeout(Duration::from_secs(10));
    let store = shared(StandIn::Moto).store(options).await;
    Subject::new(store)
        .with_unit(Duration::from_millis(400))
        .with_push(false)
}

#[test]
fn moto_direct() {
    every_case_at_once_in_turn(subject, |_| None);
}

#[test]
fn moto_alternating() {
    every_case_at_once_in_turn(subject, |pause| Some(Plan::Alternating(pause)));
}
