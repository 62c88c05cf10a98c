//! A service that is killed at a chosen moment.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rocket_rides::provider::Mood;
use tests::{HANG_GUARD, TestResponse};
use tokio::time::sleep;
use tower_idempotency_sqlx::sqlx::{self, AssertSqlSafe};

use crate::{
    harness::database,
    processes::{PATIENT, Processes, book, set_mood},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ride_killed_after_charge_finishes_without_client() {
    let processes = Processes::start(&database("killed_charged").await, &PATIENT).await;
    assert!(set_mood(&processes.provider, Mood::ChargingThenHanging).await);
    let booking = book(&processes.services[0], "k", "ann", "card-1");
    tokio::select! {
        response = booking => panic!("{response:?}"),
        () = wait_until(async || processes.charges().await.len() == 1) => {}
    }
    processes.services[0].kill();
    assert!(set_mood(&processes.provider, Mood::Well).await);

    let booked = "select count(*) from rides where state = 'booked'";
    wait_until(async || processes.count(booked).await == 1).await;
    processes.wait_until_idle().await;
    let response = retry_until_created(&processes).await;
    assert!(response.is_replay(), "{response:?}");
    assert_eq!(processes.charges().await.len(), 1);
    assert_eq!(processes.count("select count(*) from rides").await, 1);
    assert_eq!(processes.count("select count(*) from receipts").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_killed_before_checkpoint_waits_for_client() {
    let processes = Processes::start(&database("killed_begun").await, &PATIENT).await;
    let mut blocker = processes.pool.begin().await.expect("a transaction");
    let block = sqlx::query("lock table rides in share row exclusive mode");
    block.execute(&mut *blocker).await.expect("no other lock");
    let waiting = "select count(*) from pg_stat_activity \
         where wait_event_type = 'Lock' and datname = current_database()";
    tokio::select! {
        response = book(&processes.services[0], "k", "ann", "card-1") => panic!("{response:?}"),
        () = wait_until(async || processes.count(waiting).await > 0) => {}
    }
    processes.services[0].kill();
    blocker.rollback().await.expect("rolled back");

    // The completers query the request, and leave it to its client.
    let looked =
        "select count(*) from tower_idempotency where generation > 1 and completed is null";
    wait_until(async || processes.count(looked).await == 1).await;
    assert_eq!(processes.count("select count(*) from rides").await, 0);
    let response = retry_until_created(&processes).await;
    assert!(!response.is_replay(), "{response:?}");
    assert_eq!(processes.charges().await.len(), 1);
    assert_eq!(processes.count("select count(*) from rides").await, 1);
}

/// Shows that the tests of crashes can fail: the second execution cannot detect the first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn careless_ride_is_doubled_if_killed_after_charge() {
    let args = [&PATIENT[..], &["--careless"]].concat();
    let processes = Processes::start(&database("killed_careless").await, &args).await;
    assert!(set_mood(&processes.provider, Mood::ChargingThenHanging).await);
    let booking = book(&processes.services[0], "k", "ann", "card-1");
    tokio::select! {
        response = booking => panic!("{response:?}"),
        () = wait_until(async || processes.charges().await.len() == 1) => {}
    }
    processes.services[0].kill();
    assert!(set_mood(&processes.provider, Mood::Well).await);

    retry_until_created(&processes).await;
    let charges = processes.charges().await.len();
    assert!(charges >= 2, "{charges} charges");
    for table in ["rides", "receipts"] {
        let count = AssertSqlSafe(format!("select count(*) from {table}"));
        let count = sqlx::query_scalar(count).fetch_one(&processes.pool).await;
        let count: i64 = count.expect("a count");
        assert!(count >= 2, "{count} {table}");
    }
}

/// Retries until the service responds.
async fn retry_until_created(processes: &Processes) -> TestResponse {
    let deadline = Instant::now() + HANG_GUARD;
    loop {
        match book(&processes.services[1], "k", "ann", "card-1").await {
            Some(response) if response.status == StatusCode::CREATED => return response,
            other => assert!(Instant::now() < deadline, "{other:?}\n{}", processes.logs()),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn wait_until(mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + HANG_GUARD;
    while !holds().await {
        assert!(
            Instant::now() < deadline,
            "the condition does not hold in time"
        );
        sleep(Duration::from_millis(20)).await;
    }
}
