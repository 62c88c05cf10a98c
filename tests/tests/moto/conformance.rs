//! The DynamoDB store passes the suite on moto: without faults, and with each kind of lost call and reply in turn.
//!
//! Moto executes one call at a time, and each takes milliseconds. The plans of the suite therefore run one by one only
//! on dynoxide.

use std::time::Duration;

use tests::{
    conformance::run_all_cases_exclusively,
    servers::dynamodb::{StandIn, shared},
};
use tower_idempotency::conformance::{ManualClock, Plan, Subject};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

async fn subject() -> Subject<DynamoDbStore> {
    let clock = ManualClock::new();
    let time = clock.clone();
    let options = DynamoDbOptions::new()
        .with_clock(move || time.now())
        .with_clock_skew(Duration::ZERO)
        .with_timeout(Duration::from_secs(30));
    let store = shared(StandIn::Moto).store(options).await;
    Subject::new(store).with_clock(clock).with_push(false)
}

/// Number of cases that run at once. Each call waits for all the others.
const THREADS: usize = 8;

// F-178
#[test]
fn moto_direct() {
    run_all_cases_exclusively(THREADS, subject, |_| None);
}

#[test]
fn moto_alternating() {
    run_all_cases_exclusively(THREADS, subject, |pause| Some(Plan::Alternating(pause)));
}
