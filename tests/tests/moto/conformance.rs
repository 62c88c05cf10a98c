//! The DynamoDB store passes the suite on moto, without faults and without races.
//!
//! Moto executes one call at a time, and each takes milliseconds. So the suite runs with faults and with races only on dynoxide.
//! Moto is a second reader of the expressions, and the other cases send all of those that the races send.

use std::time::Duration;

use tests::{
    conformance::run_chosen_cases,
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
    let subject = async || subject(&server).await;
    run_chosen_cases(THREADS, |name| !races_threads(name), subject, |_| None);
}

/// Returns `true` for a case that races threads.
fn races_threads(name: &str) -> bool {
    name.starts_with("concurrent_")
        || name.starts_with("one_of_32_")
        || name == "lease_prevents_lost_increments"
}
