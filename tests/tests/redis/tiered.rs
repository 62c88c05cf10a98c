//! `Tiered` in front of Redis: the conformance suite, calls counted by the server, and a deleted record.

use std::time::Duration;

use axum::Router;
use http::StatusCode;
use tests::{
    Effects,
    conformance::run_all_cases,
    creating,
    layered::Layered,
    post, send,
    servers::redis::{RedisServer, UNHURRIED, shared},
};
use tower_idempotency::{
    IdempotencyLayer, Tiered,
    conformance::{Plan, Processes, Subject},
    store::Store,
};
use tower_idempotency_redis::RedisStore;

fn assert_conforms<S: Store>(
    store: impl AsyncFn() -> S + Sync,
    plan: impl Fn(Duration) -> Option<Plan> + Sync,
) {
    run_all_cases(async || Subject::new(store().await), plan);
}

#[test]
fn suite_passes() {
    let store = async || Layered::new(Tiered::new(shared().store().await));
    assert_conforms(store, |_| None);
}

#[test]
fn suite_passes_if_replies_are_lost() {
    let store = async || Layered::new(Tiered::new(shared().store().await));
    assert_conforms(store, |_| Some(Plan::RepliesLost));
}

#[test]
fn suite_passes_on_two_processes() {
    let store = async || {
        let mut processes = Vec::new();
        for _ in 0..2 {
            processes.push(Tiered::new(shared().store().await));
        }
        Layered::new(Processes::new(processes))
    };
    assert_conforms(store, |_| None);
}

/// Returns a process with a tier that keeps records for longer than the test.
async fn process(server: &RedisServer) -> (Router, Effects, Tiered<RedisStore>) {
    let tiered = Tiered::new(server.store().await).with_max_age(Duration::from_secs(3600));
    let layer = IdempotencyLayer::new(tiered.clone()).with_store_timeout(UNHURRIED);
    let (app, effects) = creating(layer);
    (app, effects, tiered)
}

/// Returns the number of scripts that clients ran.
fn scripts(server: &RedisServer) -> u64 {
    server.commandstats().get("evalsha").copied().unwrap_or(0)
}

// F-980
#[tokio::test]
async fn replay_makes_no_round_trip() {
    let server = RedisServer::start(&[]);
    let (first, effects, _) = process(&server).await;
    let (second, others, _) = process(&server).await;
    let response = send(&first, post("/orders", "k", "tea")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    let executed = scripts(&server);
    for _ in 0..5 {
        let replay = send(&first, post("/orders", "k", "tea")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, response.body);
    }
    assert_eq!(scripts(&server), executed);
    for _ in 0..5 {
        let replay = send(&second, post("/orders", "k", "tea")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, response.body);
    }
    assert_eq!(scripts(&server), executed + 1);
    assert_eq!((effects.count(), others.count()), (1, 0));
}

// F-986
/// An operator deletes the record, and then turns the tier of the process off.
#[tokio::test]
async fn deleted_record_is_replayed_until_age_is_zero() {
    let server = RedisServer::start(&[]);
    let (app, effects, tiered) = process(&server).await;
    send(&app, post("/orders", "k", "tea")).await;
    server.command(&["FLUSHALL"]);
    let replay = send(&app, post("/orders", "k", "tea")).await;
    assert!(replay.is_replay());
    let _off = tiered.with_max_age(Duration::ZERO);
    let executed = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(executed.text(), "{\"execution\":2}");
    assert_eq!(effects.count(), 2);
}

// F-980
/// Two processes race for the first execution of a key, and then get retries.
#[tokio::test]
async fn processes_agree_on_responses() {
    let server = RedisServer::start(&[]);
    let (first, effects, _) = process(&server).await;
    let (second, others, _) = process(&server).await;
    for n in 0..100 {
        let key = n.to_string();
        let order = || post("/orders", &key, "tea");
        tokio::join!(send(&first, order()), send(&second, order()));
        let mut bodies = Vec::new();
        for app in [&first, &second, &first, &second] {
            let replay = send(app, order()).await;
            assert!(replay.is_replay(), "{replay:?}");
            bodies.push(replay.body);
        }
        assert!(bodies.iter().all(|body| *body == bodies[0]), "{bodies:?}");
    }
    assert_eq!(effects.count() + others.count(), 100);
}
