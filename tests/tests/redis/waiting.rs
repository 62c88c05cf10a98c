//! Waiting for an answer that another process is about to give.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use http::StatusCode;
use tests::{
    Answer, app,
    gate::{Gate, bounded, eventually},
    playground::Playground,
    post, send,
    servers::redis::RedisServer,
};
use tokio::task::JoinHandle;
use tower_idempotency::{ConcurrentRequests, IdempotencyLayer};

async fn waiting_layer(server: &RedisServer) -> IdempotencyLayer {
    IdempotencyLayer::new(server.store().await)
        .with_store_timeout(Duration::from_secs(10))
        .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(20)))
}

/// Two services as two processes would be: nothing in common but the server. The first one's handler waits at the gate.
async fn two_services(server: &RedisServer, gate: &Gate) -> (Router, Router) {
    let held = gate.clone();
    let (first, _) = app(waiting_layer(server).await, move |n, _| {
        let held = held.clone();
        async move {
            held.pass().await;
            format!("execution {n} of the first")
        }
    });
    let (second, _) = app(waiting_layer(server).await, async |n, _| {
        format!("execution {n} of the second")
    });
    (first, second)
}

fn sent(app: &Router, key: &str) -> JoinHandle<(Answer, Instant)> {
    let (app, req) = (app.clone(), post("/orders", key, "tea"));
    tokio::spawn(async move { (send(&app, req).await, Instant::now()) })
}

/// Until so many channels have somebody who listens.
async fn listened_to(server: &RedisServer, channels: usize) {
    for _ in 0..5_000 {
        if server.list(&["PUBSUB", "CHANNELS"]).len() == channels {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("expected {channels} channels with listeners");
}

/// Until a waiter has just looked, and looks again in a second: without a push it would hear no sooner.
async fn just_looked(server: &RedisServer) {
    tokio::time::sleep(Duration::from_millis(2_000)).await;
    let looks = || server.commandstats().get("evalsha").copied().unwrap_or(0);
    let before = looks();
    eventually("the waiter looks", || looks() > before).await;
}

/// Of trials of which a machine may spoil two by standing still.
fn median(mut latencies: Vec<Duration>) -> Duration {
    latencies.sort();
    println!("{latencies:?}");
    latencies[latencies.len() / 2]
}

/// What a waiter may take that is woken, on a machine that is busy; less than half of what one takes that looks.
const SOON: Duration = Duration::from_millis(400);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_is_answered_soon_after_a_completion_elsewhere() {
    bounded(async {
        let server = RedisServer::start(&[]);
        let gate = Gate::shut();
        let (first, second) = two_services(&server, &gate).await;
        let mut latencies = Vec::new();
        for n in 0..5 {
            let key = format!("k{n}");
            let running = sent(&first, &key);
            gate.arrival().await;
            let waiter = sent(&second, &key);
            just_looked(&server).await;
            gate.let_through(1);
            let (answer, answered) = running.await.expect("the first answer");
            let (replay, heard) = waiter.await.expect("the waiter's answer");
            assert_eq!(replay.body, answer.body);
            assert!(replay.is_replay());
            latencies.push(heard.saturating_duration_since(answered));
        }
        let median = median(latencies);
        assert!(median <= SOON, "{median:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_in_another_process_is_answered_soon_after_the_completion() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let args = ["--store", &url, "--in-flight", "wait"];
    let first = Arc::new(Playground::start(&args));
    let second = Arc::new(Playground::start(&args));
    let mut latencies = Vec::new();
    for n in 0..5 {
        let key = format!("k{n}");
        let post = |playground: &Arc<Playground>| {
            let (playground, key) = (Arc::clone(playground), key.clone());
            tokio::spawn(async move {
                // A quarter of a second after a look of the waiter, and so three quarters before the next one.
                let answer = playground.post("/slow/3000", &key, b"tea").await;
                (answer, Instant::now())
            })
        };
        let running = post(&first);
        first.has_begun(n + 1).await;
        let waiting = post(&second);
        let (answer, answered) = running.await.expect("an answer");
        let (replay, heard) = waiting.await.expect("an answer");
        assert_eq!((replay.is_replay(), &replay.body), (true, &answer.body));
        latencies.push(heard.saturating_duration_since(answered));
    }
    let median = median(latencies);
    assert!(median <= SOON, "{median:?}");
    assert_eq!(second.executions().await, 0);
}

/// The listener comes back by itself, and hears again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_listens_is_back_after_the_connection_was_lost() {
    bounded(async {
        let server = RedisServer::start(&[]);
        let gate = Gate::shut();
        let (first, second) = two_services(&server, &gate).await;
        let running = sent(&first, "k");
        gate.arrival().await;
        let waiter = sent(&second, "k");
        listened_to(&server, 1).await;
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        listened_to(&server, 0).await;
        listened_to(&server, 1).await;
        gate.let_through(1);
        let (answer, _) = running.await.expect("the first answer");
        let (replay, _) = waiter.await.expect("the waiter's answer");
        assert_eq!((replay.is_replay(), &replay.body), (true, &answer.body));
    })
    .await;
}

/// A waiter whose turn comes after a release elsewhere takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_elsewhere_lets_a_waiter_execute() {
    bounded(async {
        let server = RedisServer::start(&[]);
        let gate = Gate::shut();
        let held = gate.clone();
        let (first, _) = app(waiting_layer(&server).await, move |_, _| {
            let held = held.clone();
            async move {
                held.pass().await;
                StatusCode::BAD_GATEWAY
            }
        });
        let (second, effects) = app(waiting_layer(&server).await, async |n, _| {
            format!("execution {n} of the second")
        });
        let running = sent(&first, "k");
        gate.arrival().await;
        let waiters: Vec<_> = (0..5).map(|_| sent(&second, "k")).collect();
        listened_to(&server, 1).await;
        gate.let_through(1);
        running.await.expect("an answer");
        for waiter in waiters {
            let (answer, _) = waiter.await.expect("an answer");
            assert_eq!(answer.text(), "execution 1 of the second");
        }
        assert_eq!(effects.count(), 1);
    })
    .await;
}

/// Nobody listens for ever to what nobody waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_are_left_once_nobody_waits() {
    bounded(async {
        let server = RedisServer::start(&[]);
        let gate = Gate::shut();
        let (first, second) = two_services(&server, &gate).await;
        let mut all = Vec::new();
        for key in ["a", "b", "c"] {
            all.push(sent(&first, key));
            gate.arrival().await;
            all.push(sent(&second, key));
        }
        listened_to(&server, 3).await;
        gate.open_for_good();
        for answer in all {
            answer.await.expect("an answer");
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while !server.list(&["PUBSUB", "CHANNELS"]).is_empty() {
            assert!(Instant::now() < deadline, "somebody still listens");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}
