//! The DynamoDB store passes the suite on moto: as it is, and with each kind of lost call and reply in turn.
//!
//! Moto makes one call at a time, and each takes milliseconds: the plans of the suite one by one are for dynoxide.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tests::{
    conformance::every_case_at_once,
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

fn one_by_one(plan: impl Fn(Duration) -> Option<Plan> + Sync) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    every_case_at_once(subject, plan);
}

#[test]
fn moto_direct() {
    one_by_one(|_| None);
}

#[test]
fn moto_alternating() {
    one_by_one(|pause| Some(Plan::Alternating(pause)));
}
