//! Waiting for an answer that another process is about to give.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use http::StatusCode;
use tests::{
    Answer, app,
    gate::{Gate, bounded},
    playground::Playground,
    post, send,
    servers::redis::RedisServer,
};
use tokio::task::JoinHandle;
use tower_idempotency::{IdempotencyLayer, InFlight};
use tower_idempotency_redis::RedisStore;

async fn waiting_layer(server: &RedisServer) -> IdempotencyLayer {
    let store = RedisStore::connect(&server.url()).await;
    IdempotencyLayer::new(store.expect("the server runs"))
        .with_in_flight(InFlight::Wait(Duration::from_secs(20)))
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
    for _ in 0..1000 {
        if server.list(&["PUBSUB", "CHANNELS"]).len() == channels {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("expected {channels} channels with listeners");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_is_answered_within_50_ms_of_a_completion_elsewhere() {
    bounded(async {
        let server = RedisServer::start(&[]);
        let gate = Gate::shut();
        let (first, second) = two_services(&server, &gate).await;
        let mut latencies = Vec::new();
        for n in 0..15 {
            let key = format!("k{n}");
            let running = sent(&first, &key);
            gate.arrival().await;
            let waiter = sent(&second, &key);
            // So long that without the push the next look is two tenths of a second away.
            tokio::time::sleep(Duration::from_millis(450)).await;
            gate.let_through(1);
            let (answer, answered) = running.await.expect("the first answer");
            let (replay, heard) = waiter.await.expect("the waiter's answer");
            assert_eq!(replay.body, answer.body);
            assert!(replay.is_replay());
            latencies.push(heard.saturating_duration_since(answered));
        }
        latencies.sort();
        let median = latencies[latencies.len() / 2];
        println!("median {median:?}, worst {:?}", latencies.last());
        assert!(median <= Duration::from_millis(50), "{median:?}");
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
    for n in 0..11 {
        let key = format!("k{n}");
        let post = |playground: &Arc<Playground>| {
            let (playground, key) = (Arc::clone(playground), key.clone());
            tokio::spawn(async move {
                let answer = playground.post("/slow/700", &key, b"tea").await;
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
    latencies.sort();
    let median = latencies[latencies.len() / 2];
    println!("median {median:?}, worst {:?}", latencies.last());
    assert!(median <= Duration::from_millis(50), "{median:?}");
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
