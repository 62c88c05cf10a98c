//! The DynamoDB store passes the suite on moto, without faults.
//!
//! Moto executes one call at a time, and each takes milliseconds. So the suite runs with faults only on dynoxide.

use std::time::Duration;

use tests::{
    conformance::run_all_cases_on,
    servers::dynamodb::{DynamoDbServer, StandIn},
};
use tower_idempotency::conformance::{ManualClock, Subject};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

async fn subject(server: &DynamoDbServer) -> Subject<DynamoDbStore> {
    let clock = ManualClock::new();
    let time = clock.clone();
    let options = DynamoDbOptions::new()
        .with_clock(move || time.now())
        .with_clock_skew(Duration::ZERO)
        .with_timeout(Duration::from_secs(30));
    let store = server.store(options).await;
    Subject::new(store).with_clock(clock).with_push(false)
}

/// Number of cases that run at once. Each call waits for all the others.
const THREADS: usize = 8;

// F-178
#[test]
fn moto_direct() {
    let server = DynamoDbServer::start(StandIn::Moto);
    run_all_cases_on(THREADS, async || subject(&server).await, |_| None);
}
