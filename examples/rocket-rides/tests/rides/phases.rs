//! Single rides.

use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rocket_rides::{migrate, provider::Mood};
use tests::{
    gate::within,
    proxy::{Fault, Proxy, Then},
    servers::postgres,
};
use tower_idempotency::Preset;
use tower_idempotency_sqlx::sqlx;

use crate::{cast::HANG_GUARD, stage::Stage};

#[tokio::test]
async fn ride_is_charged_once_and_replayed() {
    let stage = Stage::new("booked").await;
    let first = stage.ride("k", "card-1").await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    let location = first.header("location").expect("a location").to_owned();
    let retry = stage.ride("k", "card-1").await;
    assert!(retry.is_replay() && !first.is_replay());
    assert_eq!(retry.body, first.body);
    assert_eq!(retry.header("location"), Some(location.as_str()));
    assert_eq!(stage.rides().await, ["booked"]);
    assert_eq!(stage.charges().await.len(), 1);
    assert_eq!(stage.receipts().await, 1);
}

#[tokio::test]
async fn declined_card_is_recorded() {
    let stage = Stage::new("declined").await;
    let first = stage.ride("k", "declined-1").await;
    assert_eq!(first.status, StatusCode::PAYMENT_REQUIRED, "{first:?}");
    let retry = stage.ride("k", "declined-1").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!((retry.status, retry.body), (first.status, first.body));
    assert_eq!(stage.rides().await, ["declined"]);
    assert_eq!(stage.receipts().await, 0);
    // Another key is another ride.
    assert_eq!(stage.ride("l", "card-1").await.status, StatusCode::CREATED);
}

#[tokio::test]
async fn unresponsive_provider_charges_once() {
    let stage = Stage::new("moods").await;
    let moods = [
        Mood::Failing,
        Mood::Hanging,
        Mood::ChargingThenFailing,
        Mood::ChargingThenHanging,
    ];
    for (mood, n) in moods.into_iter().zip(1..) {
        let (key, card) = (format!("{mood:?}"), format!("card-{n}"));
        stage.set_mood(mood).await;
        for _ in 0..2 {
            let answer = stage.ride_without_provider(&key, &card).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{mood:?}");
            assert!(answer.header("retry-after").is_some(), "{mood:?}");
        }
        stage.set_mood(Mood::Well).await;
        let answer = stage.ride(&key, &card).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{mood:?}");
        assert!(!answer.is_replay());
        assert_eq!(stage.charges().await.len(), n, "{mood:?}");
        assert_eq!(stage.rides().await, vec!["booked"; n], "{mood:?}");
        assert_eq!(stage.receipts().await, n as i64, "{mood:?}");
    }
}

/// Sends more rides than the pool has connections: a connection that hung has to be replaced.
#[tokio::test]
async fn rides_recover_after_unresponsive_database() {
    let way = Proxy::start(postgres::shared().address());
    let stage = Stage::behind("silent", (&way, Duration::from_secs(1))).await;
    for n in 1..=11 {
        let (key, card) = (format!("k{n}"), format!("card-{n}"));
        way.once(Fault::reply_to("insert into rides"), Then::Hang);
        let deadline = Instant::now() + HANG_GUARD;
        // On a busy machine, a ride may reach its timeout before it reaches the proxy.
        while way.hits() < n {
            assert!(Instant::now() < deadline, "no connection is free");
            let answer = within(HANG_GUARD, stage.ride(&key, &card)).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{answer:?}");
        }
    }
    // The rides were not stored.
    assert!(stage.rides().await.is_empty());
    for n in 1..=11 {
        let (key, card) = (format!("k{n}"), format!("card-{n}"));
        let mut answer = stage.ride(&key, &card).await;
        let deadline = Instant::now() + HANG_GUARD;
        while answer.status == StatusCode::SERVICE_UNAVAILABLE && Instant::now() < deadline {
            answer = stage.ride(&key, &card).await;
        }
        assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    }
    assert_eq!(stage.rides().await, vec!["booked"; 11]);
    assert_eq!(stage.charges().await.len(), 11);
    assert_eq!(stage.receipts().await, 11);
}

#[tokio::test]
async fn completer_finishes_abandoned_rides() {
    let stage = Stage::new("abandoned").await;
    stage.set_mood(Mood::ChargingThenFailing).await;
    stage.ride("k", "card-1").await;
    stage.ride("l", "declined-1").await;
    assert_eq!(stage.rides().await, ["created", "created"]);

    // Nothing is lost if the completer cannot finish them either.
    let swept = stage.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.found, swept.failed), (2, 2), "{swept:?}");
    stage.set_mood(Mood::Well).await;
    let swept = stage.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.found, swept.executed), (2, 2), "{swept:?}");

    let mut rides = stage.rides().await;
    rides.sort();
    assert_eq!(rides, ["booked", "declined"]);
    assert_eq!(stage.charges().await.len(), 2);
    assert_eq!(stage.receipts().await, 1);
    // A client that retries late gets the recorded response.
    let late = stage.ride("k", "card-1").await;
    assert!(late.is_replay(), "{late:?}");
    assert_eq!(late.status, StatusCode::CREATED);
    let late = stage.ride("l", "declined-1").await;
    assert!(late.is_replay(), "{late:?}");
    assert_eq!(late.status, StatusCode::PAYMENT_REQUIRED);
    let swept = stage.completer.sweep().await.expect("a sweep");
    assert_eq!(swept.found, 0, "{swept:?}");
}

/// Only the client knows its request, and it retries.
#[tokio::test]
async fn completer_records_nothing_without_checkpoint() {
    for (name, preset) in [("left_ietf", Preset::Ietf), ("left_stripe", Preset::Stripe)] {
        let stage = Stage::recording(name, preset).await;
        // A request that was killed before its first checkpoint.
        let begun = "insert into tower_idempotency (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, \
             created, owner, operation) \
             select sha256('id'), substr(sha256('token'), 1, 16), sha256('fingerprint'), 1, now - 1000, 3600000, \
             now + 3600000, now - 2000, 'tests', 'POST /rides' \
             from (select (extract(epoch from now()) * 1000)::bigint as now) as clock";
        let begun = sqlx::query(begun).execute(&stage.pool).await;
        assert_eq!(begun.expect("begun").rows_affected(), 1);
        let swept = stage.completer.sweep().await.expect("a sweep");
        assert_eq!(swept.found, 1, "{swept:?}");
        let open = "select count(*) from tower_idempotency where record is null";
        let open: i64 = sqlx::query_scalar(open)
            .fetch_one(&stage.pool)
            .await
            .expect("a count");
        assert_eq!(open, 1, "{preset:?}");
    }
}

#[tokio::test]
async fn database_without_creation_times_is_migrated() {
    let stage = Stage::new("undated").await;
    stage.ride("k", "card-1").await;
    let before = sqlx::query("alter table rides drop column created");
    before.execute(&stage.pool).await.expect("as it was");
    for _ in 0..2 {
        migrate(&stage.pool).await.expect("migrated");
    }
    let answer = stage.ride("l", "card-1").await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(stage.rides().await, ["booked", "booked"]);
}

// F-153
/// The provider was unreachable for so long that it may have deleted the key of the charge, and would charge again.
#[tokio::test]
async fn provider_is_not_called_after_charge_key_expiry() {
    let stage = Stage::new("forgotten").await;
    stage.set_mood(Mood::ChargingThenFailing).await;
    stage.ride("k", "card-1").await;
    stage.ride("l", "card-2").await;
    // The completer fails, and each attempt extends the retention of the orphans.
    stage.age_rides("22 hours").await;
    let swept = stage.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.found, swept.failed), (2, 2), "{swept:?}");
    stage.age_rides("3 hours").await;
    stage.forget_keys().await;
    stage.set_mood(Mood::Well).await;

    let answer = stage.ride("k", "card-1").await;
    assert_eq!(
        answer.status,
        StatusCode::INTERNAL_SERVER_ERROR,
        "{answer:?}"
    );
    let swept = stage.completer.sweep().await.expect("a sweep");
    assert_eq!((swept.found, swept.executed), (1, 1), "{swept:?}");
    for (key, card) in [("k", "card-1"), ("l", "card-2")] {
        let late = stage.ride(key, card).await;
        assert_eq!(late.status, StatusCode::CONFLICT, "{late:?}");
        assert!(late.text().contains("charge-unknown"), "{late:?}");
    }
    assert_eq!(stage.charges().await.len(), 2);
    assert_eq!(stage.rides().await, ["created", "created"]);
}
