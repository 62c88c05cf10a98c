//! The DynamoDB store passes the suite on dynoxide.

use std::time::Duration;

use tests::{
    conformance::{run_all_cases as every_case, run_all_inspect_cases},
    servers::dynamodb::{StandIn, shared},
};
use tower_idempotency::conformance::{Case, ManualClock, Plan, Subject};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

const UNIT: Duration = Duration::from_millis(50);

async fn with_skew(skew: Duration) -> Subject<DynamoDbStore> {
    with_options(DynamoDbOptions::new(), skew).await
}

async fn with_options(options: DynamoDbOptions, skew: Duration) -> Subject<DynamoDbStore> {
    let clock = ManualClock::new();
    let time = clock.clone();
    let options = options
        .with_clock(move || time.now())
        .with_clock_skew(skew)
        .with_timeout(Duration::from_secs(30));
    let store = shared(StandIn::Dynoxide).store(options).await;
    Subject::new(store)
        .with_unit(UNIT)
        .with_clock(clock)
        .with_push(false)
}

async fn exact() -> Subject<DynamoDbStore> {
    with_skew(Duration::ZERO).await
}

/// Returns a subject with an allowance for skew, which only delays expiry.
async fn allowing_for_skew() -> Subject<DynamoDbStore> {
    with_skew(UNIT / 2).await
}

/// Returns a subject whose index has completed entries too.
async fn with_completed_index(skew: Duration) -> Subject<DynamoDbStore> {
    with_options(DynamoDbOptions::new().with_completed_index(true), skew).await
}

#[test]
fn dynoxide_direct() {
    every_case(exact, |_| None);
}

#[test]
fn dynoxide_calls_lost() {
    every_case(exact, |_| Some(Plan::CallsLost));
}

#[test]
fn dynoxide_replies_lost() {
    every_case(exact, |_| Some(Plan::RepliesLost));
}

#[test]
fn dynoxide_slow() {
    every_case(exact, |pause| Some(Plan::Slow(pause)));
}

#[test]
fn dynoxide_alternating() {
    every_case(exact, |pause| Some(Plan::Alternating(pause)));
}

#[test]
fn dynoxide_allowing_for_skew_direct() {
    every_case(allowing_for_skew, |_| None);
}

#[test]
fn dynoxide_allowing_for_skew_alternating() {
    every_case(allowing_for_skew, |pause| Some(Plan::Alternating(pause)));
}

#[test]
fn dynoxide_operators() {
    run_all_inspect_cases(async || exact().await.with_inspector());
}

#[test]
fn dynoxide_allowing_for_skew_operators() {
    run_all_inspect_cases(async || allowing_for_skew().await.with_inspector());
}

#[test]
fn dynoxide_completed_index_direct() {
    every_case(
        async || with_completed_index(Duration::ZERO).await,
        |_| None,
    );
}

#[test]
fn dynoxide_completed_index_alternating() {
    let subject = async || with_completed_index(Duration::ZERO).await;
    every_case(subject, |pause| Some(Plan::Alternating(pause)));
}

#[test]
fn dynoxide_completed_index_operators() {
    let skew = Duration::ZERO;
    run_all_inspect_cases(async || with_completed_index(skew).await.with_inspector());
}

#[test]
fn dynoxide_completed_index_with_skew_operators() {
    let skew = UNIT / 2;
    run_all_inspect_cases(async || with_completed_index(skew).await.with_inspector());
}

/// Checks the cases that detect best if a resolution is not one conditional write under a new token.
#[test]
fn dynoxide_resolutions_are_fenced() {
    for case in [
        "one_of_32_resolutions_is_applied",
        "concurrent_free_and_holder_agree",
        "broken_lease_cannot_complete",
        "reacquired_key_is_not_resolved",
    ] {
        let subject = async || exact().await.with_inspector();
        Case::named(case).run(false, subject, |_| None);
    }
}
