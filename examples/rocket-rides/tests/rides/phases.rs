//! Single rides.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rocket_rides::{migrate, provider::Mood};
use tests::{
    HANG_GUARD,
    barrier::within,
    proxy::{ConnectionEnd, Fault, Proxy},
    servers::postgres,
};
use tower_idempotency::Preset;
use tower_idempotency_sqlx::sqlx;

use crate::harness::Harness;

#[tokio::test]
async fn ride_is_charged_once_and_replayed() {
    let harness = Harness::new("booked").await;
    let first = harness.ride("k", "card-1").await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    let location = first.header("location").expect("a location").to_owned();
    let retry = harness.ride("k", "card-1").await;
    assert!(retry.is_replay() && !first.is_replay());
    assert_eq!(retry.body, first.body);
    assert_eq!(retry.header("location"), Some(location.as_str()));
    assert_eq!(harness.rides().await, ["booked"]);
    assert_eq!(harness.charges().await.len(), 1);
    assert_eq!(harness.receipts().await, 1);
}

#[tokio::test]
async fn declined_card_is_recorded() {
    let harness = Harness::new("declined").await;
    let first = harness.ride("k", "declined-1").await;
    assert_eq!(first.status, StatusCode::PAYMENT_REQUIRED, "{first:?}");
    let retry = harness.ride("k", "declined-1").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!((retry.status, retry.body), (first.status, first.body));
    assert_eq!(harness.rides().await, ["declined"]);
    assert_eq!(harness.receipts().await, 0);
    // Another key is another ride.
    assert_eq!(
        harness.ride("l", "card-1").await.status,
        StatusCode::CREATED
    );
}

/// PostgreSQL refuses a zero, and a line break would forge a line of the mailbox.
#[tokio::test]
async fn control_characters_are_refused_finally() {
    let harness = Harness::new("controls").await;
    for (key, card) in [
        ("k", r"card\u0000"),
        ("l", r"card\n9 9 bob@example.com 2000"),
    ] {
        for is_replay in [false, true] {
            let response = harness.ride(key, card).await;
            assert_eq!(response.status, StatusCode::UNPROCESSABLE_ENTITY);
            assert_eq!(response.is_replay(), is_replay, "{response:?}");
        }
    }
    assert!(harness.rides().await.is_empty());
}

#[tokio::test]
async fn unresponsive_provider_charges_once() {
    let harness = Harness::new("moods").await;
    let moods = [
        Mood::Failing,
        Mood::Hanging,
        Mood::ChargingThenFailing,
        Mood::ChargingThenHanging,
    ];
    for (mood, n) in moods.into_iter().zip(1..) {
        let (key, card) = (format!("{mood:?}"), format!("card-{n}"));
        harness.set_mood(mood).await;
        for _ in 0..2 {
            let response = harness.ride_without_provider(&key, &card).await;
            assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{mood:?}");
            assert!(response.header("retry-after").is_some(), "{mood:?}");
        }
        harness.set_mood(Mood::Well).await;
        let response = harness.ride(&key, &card).await;
        assert_eq!(response.status, StatusCode::CREATED, "{mood:?}");
        assert!(!response.is_replay());
        assert_eq!(harness.charges().await.len(), n, "{mood:?}");
        assert_eq!(harness.rides().await, vec!["booked"; n], "{mood:?}");
        assert_eq!(harness.receipts().await, n as i64, "{mood:?}");
    }
}

#[tokio::test]
async fn replayed_provider_failure_needs_attention() {
    let harness = Harness::new("recorded_failure").await;
    harness.set_mood(Mood::RecordingFailures).await;
    let first = harness.ride("k", "card-1").await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE, "{first:?}");
    harness.set_mood(Mood::Well).await;
    let second = harness.ride("k", "card-1").await;
    assert_eq!(second.status, StatusCode::INTERNAL_SERVER_ERROR);
    let third = harness.ride("k", "card-1").await;
    assert_eq!(third.status, StatusCode::CONFLICT, "{third:?}");
    assert!(third.text().contains("charge-unknown"), "{third:?}");
    assert_eq!(harness.charges().await.len(), 1);
    assert_eq!(harness.rides().await, ["created"]);
}

/// Sends more rides than the pool has connections: a connection that hung has to be replaced.
#[tokio::test]
async fn rides_recover_after_unresponsive_database() {
    let proxy = Proxy::start(postgres::shared().address());
    let harness = Harness::with_proxy("silent", (&proxy, Duration::from_secs(1))).await;
    for n in 1..=11 {
        let (key, card) = (format!("k{n}"), format!("card-{n}"));
        proxy.once(Fault::reply_to("insert into rides"), ConnectionEnd::Hang);
        let deadline = Instant::now() + HANG_GUARD;
        // On a busy machine, a ride may reach its timeout before it reaches the proxy.
        while proxy.injected_faults() < n {
            assert!(Instant::now() < deadline, "no connection is free");
            let response = within(HANG_GUARD, harness.ride(&key, &card)).await;
            assert_eq!(
                response.status,
                StatusCode::SERVICE_UNAVAILABLE,
                "{response:?}"
            );
        }
    }
    // The rides were not stored.
    assert!(harness.rides().await.is_empty());
    for n in 1..=11 {
        let (key, card) = (format!("k{n}"), format!("card-{n}"));
        let mut response = harness.ride(&key, &card).await;
        let deadline = Instant::now() + HANG_GUARD;
        while response.status == StatusCode::SERVICE_UNAVAILABLE && Instant::now() < deadline {
            response = harness.ride(&key, &card).await;
        }
        assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    }
    assert_eq!(harness.rides().await, vec!["booked"; 11]);
    assert_eq!(harness.charges().await.len(), 11);
    assert_eq!(harness.receipts().await, 11);
}

#[tokio::test]
async fn completer_finishes_abandoned_rides() {
    let harness = Harness::new("abandoned").await;
    harness.set_mood(Mood::ChargingThenFailing).await;
    harness.ride("k", "card-1").await;
    harness.ride("l", "declined-1").await;
    assert_eq!(harness.rides().await, ["created", "created"]);

    // The rides are not lost if the completer cannot finish them either.
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.not_recorded), (2, 2), "{swept:?}");
    harness.set_mood(Mood::Well).await;
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.executed), (2, 2), "{swept:?}");

    let mut rides = harness.rides().await;
    rides.sort();
    assert_eq!(rides, ["booked", "declined"]);
    assert_eq!(harness.charges().await.len(), 2);
    assert_eq!(harness.receipts().await, 1);
    // A client that retries late gets the recorded response.
    let late = harness.ride("k", "card-1").await;
    assert!(late.is_replay(), "{late:?}");
    assert_eq!(late.status, StatusCode::CREATED);
    let late = harness.ride("l", "declined-1").await;
    assert!(late.is_replay(), "{late:?}");
    assert_eq!(late.status, StatusCode::PAYMENT_REQUIRED);
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!(swept.due, 0, "{swept:?}");
}

/// Only the client knows its request, and it retries.
#[tokio::test]
async fn completer_records_nothing_without_checkpoint() {
    for (name, preset) in [("left_ietf", Preset::Ietf), ("left_stripe", Preset::Stripe)] {
        let harness = Harness::with_preset(name, preset).await;
        harness.begin_request().await;
        let swept = harness.completer.sweep().await.expect("a sweep");
        assert_eq!(swept.due, 1, "{swept:?}");
        assert_eq!(harness.unfinished_requests().await, 1, "{preset:?}");
    }
}

/// Each attempt restarts the retention of the orphan, which would never expire.
#[tokio::test]
async fn completer_ends_old_request_without_checkpoint() {
    let harness = Harness::new("old_begun").await;
    harness.begin_request().await;
    let older = "update tower_idempotency set created = created - 25 * 3600000";
    let older = sqlx::query(older).execute(&harness.pool).await;
    assert_eq!(older.expect("an update").rows_affected(), 1);
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.executed), (1, 1), "{swept:?}");
    assert_eq!(harness.unfinished_requests().await, 0);
    assert!(harness.rides().await.is_empty());
}

#[tokio::test]
async fn database_without_creation_times_is_migrated() {
    let harness = Harness::new("undated").await;
    harness.ride("k", "card-1").await;
    let before = "alter table rides drop column created; alter table receipts drop column attempts;
        create index receipts_to_deliver on receipts (id) where delivered is null";
    let before = sqlx::raw_sql(before).execute(&harness.pool).await;
    before.expect("as it was");
    for _ in 0..2 {
        migrate(&harness.pool).await.expect("migrated");
    }
    let response = harness.ride("l", "card-1").await;
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    assert_eq!(harness.rides().await, ["booked", "booked"]);
    let index = "select indexdef from pg_indexes where indexname = 'receipts_to_deliver'";
    let index: String = sqlx::query_scalar(index)
        .fetch_one(&harness.pool)
        .await
        .expect("an index");
    assert!(index.contains("(attempts, id)"), "{index}");
}

/// A process that waits for a lock of a table lets all later writers wait as well.
#[tokio::test]
async fn migrated_database_is_migrated_beside_writers() {
    let harness = Harness::new("busy").await;
    let mut writer = harness.pool.begin().await.expect("a transaction");
    let write = "lock table rides, receipts in row exclusive mode";
    let locked = sqlx::query(write).execute(&mut *writer).await;
    locked.expect("locked");
    let migrated = within(Duration::from_secs(30), migrate(&harness.pool)).await;
    migrated.expect("migrated");
    writer.rollback().await.expect("rolled back");
}

/// An operator allows retries of a request that needed attention after its first phase. Each one continues from that phase,
/// and none makes another ride.
#[tokio::test]
async fn allowed_retries_continue_ride() {
    let harness = Harness::new("allowed").await;
    harness.set_mood(Mood::ChargingThenFailing).await;
    harness.ride("k", "card-1").await;
    harness.age_rides("25 hours").await;
    harness.set_mood(Mood::Well).await;
    for _ in 0..2 {
        let response = harness.ride("k", "card-1").await;
        assert_eq!(response.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(harness.rides().await, ["created"]);
        harness.allow_retry().await;
    }
    // The operator has found that the provider still has the key.
    harness.make_ride_recent().await;
    let response = harness.ride("k", "card-1").await;
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    assert_eq!(harness.rides().await, ["booked"]);
    assert_eq!(harness.charges().await.len(), 1);
}

// F-153
/// The provider was unreachable for so long that it may have deleted the key of the charge, and would charge again.
#[tokio::test]
async fn provider_is_not_called_after_charge_key_expiry() {
    let harness = Harness::new("forgotten").await;
    harness.set_mood(Mood::ChargingThenFailing).await;
    harness.ride("k", "card-1").await;
    harness.ride("l", "card-2").await;
    // The completer fails, and each attempt extends the retention of the orphans.
    harness.age_rides("22 hours").await;
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.not_recorded), (2, 2), "{swept:?}");
    harness.age_rides("3 hours").await;
    harness.forget_keys().await;
    harness.set_mood(Mood::Well).await;

    let response = harness.ride("k", "card-1").await;
    assert_eq!(
        response.status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "{response:?}"
    );
    let swept = harness.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.executed), (1, 1), "{swept:?}");
    for (key, card) in [("k", "card-1"), ("l", "card-2")] {
        let late = harness.ride(key, card).await;
        assert_eq!(late.status, StatusCode::CONFLICT, "{late:?}");
        assert!(late.text().contains("charge-unknown"), "{late:?}");
    }
    assert_eq!(harness.charges().await.len(), 2);
    assert_eq!(harness.rides().await, ["created", "created"]);
}
