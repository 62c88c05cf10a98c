//! Waiters for a response of another process.

use std::{sync::Arc, time::Duration};

use axum::Router;
use http::StatusCode;
use tests::{
    TestResponse, app,
    barrier::{Barrier, within},
    playground::Playground,
    post, send,
    servers::redis::RedisServer,
};
use tokio::task::JoinHandle;
use tower_idempotency::{ConcurrentRequests, IdempotencyLayer, Ttl};

use crate::{
    events::{HANG, eventually},
    pushes::{until_delays_are_long, until_pushes_have_woken},
};

async fn waiting_layer(server: &RedisServer) -> IdempotencyLayer {
    IdempotencyLayer::new(server.store().await)
        .with_store_timeout(Duration::from_secs(20))
        .with_lease_ttl(Ttl::from_secs(600))
        .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(600)))
}

/// Returns two services that share only the server, like two processes. The first handler waits at the barrier.
async fn two_services(server: &RedisServer, barrier: &Barrier) -> (Router, Router) {
    let held = barrier.clone();
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

fn sent(app: &Router, key: &str) -> JoinHandle<TestResponse> {
    let (app, req) = (app.clone(), post("/orders", key, "tea"));
    tokio::spawn(async move { within(HANG, send(&app, req)).await })
}

/// Waits until clients listen to this number of channels.
async fn wait_for_channels(server: &RedisServer, channels: usize) {
    let is_subscribed = || server.list(&["PUBSUB", "CHANNELS"]).len() == channels;
    eventually("clients listen to the channels", is_subscribed).await;
}

/// Returns the ids of the connections that listen.
fn listeners(server: &RedisServer) -> Vec<String> {
    let clients = server.command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    let ids = clients.lines().filter_map(|line| line.split(' ').next());
    ids.map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_completion_wakes_waiter() {
    let server = RedisServer::start(&[]);
    let barrier = Barrier::closed();
    let (first, second) = two_services(&server, &barrier).await;
    until_pushes_have_woken(async |n| {
        let key = format!("k{n}");
        let running = sent(&first, &key);
        within(HANG, barrier.arrival()).await;
        let monitor = server.monitor();
        let before = server.commandstats()["evalsha"];
        let waiter = sent(&second, &key);
        until_delays_are_long(&server, before).await;
        barrier.release(1);
        let response = running.await.expect("the first response");
        let replay = waiter.await.expect("the waiter's response");
        assert_eq!(replay.body, response.body);
        assert!(replay.is_replay());
        monitor.into_commands()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completion_in_other_process_wakes_waiter() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let args = ["--store", &url, "--in-flight", "wait", "--wait", "120s"];
    let first = Arc::new(Playground::start(&args));
    let second = Arc::new(Playground::start(&args));
    until_pushes_have_woken(async |n| {
        let key = format!("k{n}");
        let post = |playground: &Arc<Playground>| {
            let (playground, key) = (Arc::clone(playground), key.clone());
            // The waiter's delays grow to a second before the handler completes.
            tokio::spawn(async move {
                loop {
                    let response = playground.post("/slow/3000", &key, b"tea").await;
                    // A server that stalls is unavailable to a playground.
                    if response.status != StatusCode::SERVICE_UNAVAILABLE {
                        return response;
                    }
                }
            })
        };
        let running = post(&first);
        first.wait_until_begun(n as u64 + 1).await;
        let monitor = server.monitor();
        let waiting = post(&second);
        let response = running.await.expect("an answer");
        let replay = waiting.await.expect("an answer");
        assert_eq!((replay.is_replay(), &replay.body), (true, &response.body));
        monitor.into_commands()
    })
    .await;
    assert_eq!(second.executions().await, 0);
}

/// The listener reconnects by itself, and receives notifications again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_recovers_after_connection_loss() {
    within(HANG * 2, async {
        let server = RedisServer::start(&[]);
        let barrier = Barrier::closed();
        let (first, second) = two_services(&server, &barrier).await;
        let running = sent(&first, "k");
        barrier.arrival().await;
        let waiter = sent(&second, "k");
        wait_for_channels(&server, 1).await;
        let former = listeners(&server);
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        eventually("another connection listens", || {
            let now = listeners(&server);
            !now.is_empty() && now.iter().all(|it| !former.contains(it))
        })
        .await;
        wait_for_channels(&server, 1).await;
        barrier.release(1);
        let response = running.await.expect("the first response");
        let replay = waiter.await.expect("the waiter's response");
        assert_eq!((replay.is_replay(), &replay.body), (true, &response.body));
    })
    .await;
}

/// A waiter whose turn comes after a release in another process takes over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_release_lets_waiter_execute() {
    within(HANG * 2, async {
        let server = RedisServer::start(&[]);
        let barrier = Barrier::closed();
        let held = barrier.clone();
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
        barrier.arrival().await;
        let waiters: Vec<_> = (0..5).map(|_| sent(&second, "k")).collect();
        wait_for_channels(&server, 1).await;
        barrier.release(1);
        running.await.expect("an answer");
        for waiter in waiters {
            let response = waiter.await.expect("an answer");
            assert_eq!(response.text(), "execution 1 of the second");
        }
        assert_eq!(effects.count(), 1);
    })
    .await;
}

/// A subscription ends when no client waits for its channel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channels_are_left_after_last_waiter() {
    within(HANG * 2, async {
        let server = RedisServer::start(&[]);
        let barrier = Barrier::closed();
        let (first, second) = two_services(&server, &barrier).await;
        let mut all = Vec::new();
        for key in ["a", "b", "c"] {
            all.push(sent(&first, key));
            barrier.arrival().await;
            all.push(sent(&second, key));
        }
        wait_for_channels(&server, 3).await;
        barrier.open_for_good();
        for response in all {
            response.await.expect("an answer");
        }
        wait_for_channels(&server, 0).await;
    })
    .await;
}
