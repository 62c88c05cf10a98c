//! Servers that shut down with requests in flight. Graceful shutdown and `drain` wait for work, and the layer rejects
//! keyed requests meanwhile.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use http::{Request, StatusCode};
use tests::{
    TestResponse,
    barrier::{bounded, eventually},
    held_server::{HeldServer, PHASES, Phase},
    on_both_runtimes, send,
    wire::{Disconnect, H1, H2, poll_briefly, post_bytes},
};
use tokio::runtime;
use tower::{Layer, Service, service_fn};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Ttl,
    conformance::{Fault, FaultInjector, Operation},
};

on_both_runtimes! {
    // F-046
    shutdown_and_drain_wait_for_all_work,
    // F-046
    drain_waits_for_handler_of_disconnected_client,
    // F-048
    drain_timeout_leaves_lease,
    // F-046
    keyed_requests_are_refused_while_draining,
}

const LONG: Duration = Duration::from_secs(60);

fn layer_on(store: &MemoryStore) -> IdempotencyLayer {
    IdempotencyLayer::new(store.clone())
}

/// Returns the response of another process on the same store.
async fn next_process(store: &MemoryStore, key: &str) -> (TestResponse, u64) {
    let held = HeldServer::with_layer(layer_on(store)).await;
    let response = send(&held.app, tests::post("/orders", key, "{}")).await;
    (response, held.begun.count())
}

async fn shutdown_and_drain_wait_for_all_work() {
    for phase in PHASES {
        let store = MemoryStore::new();
        let held = HeldServer::start(layer_on(&store), &[phase], |app| app).await;
        let addr = held.server.addr();
        let mut stays = H1::connect(addr).await;
        stays.send(post_bytes("/orders", "stays", "{}")).await;
        held.arrival(phase).await;
        let leaves = H2::connect(addr).await;
        let stream = leaves.post("/orders", "leaves", "{}").await;
        held.arrival(phase).await;
        stream.reset();
        held.wait_for_departure().await;
        leaves.lose().await;

        assert_eq!(
            poll_briefly(held.server.shut_down()).await,
            None,
            "a client waits"
        );
        assert!(!held.layer.drain(Duration::from_millis(20)).await);
        held.open_barriers();
        let response = stays.response().await.expect("the server finishes");
        assert_eq!(response.status, StatusCode::CREATED);
        held.server.shut_down().await;
        assert!(held.layer.drain(LONG).await);
        assert_eq!((held.begun.count(), held.finished.count()), (2, 2));

        let (retry, effects) = next_process(&store, "stays").await;
        assert_eq!((retry.body, effects), (response.body, 0));
        let (retry, effects) = next_process(&store, "leaves").await;
        assert!(retry.is_replay());
        assert_eq!(effects, 0);
    }
}

// The server does not wait for this handler, because its client has disconnected.
async fn drain_waits_for_handler_of_disconnected_client() {
    for phase in PHASES {
        for leave in [Disconnect::Close, Disconnect::Reset] {
            let store = MemoryStore::new();
            let held = HeldServer::start(layer_on(&store), &[phase], |app| app).await;
            let mut client = H1::connect(held.server.addr()).await;
            client.send(post_bytes("/orders", "k", "{}")).await;
            held.arrival(phase).await;
            client.disconnect(leave);
            held.wait_for_departure().await;
            held.server.shut_down().await;
            assert_eq!(
                poll_briefly(held.layer.drain(LONG)).await,
                None,
                "the handler runs"
            );
            held.open_barriers();
            assert!(held.layer.drain(LONG).await);
            assert_eq!(held.finished.count(), 1);
            let (retry, effects) = next_process(&store, "k").await;
            assert!(retry.is_replay());
            assert_eq!(effects, 0);
        }
    }
}

async fn drain_timeout_leaves_lease() {
    let store = MemoryStore::new();
    let held = HeldServer::start(layer_on(&store), &[Phase::DuringTheEffect], |app| app).await;
    let mut client = H1::connect(held.server.addr()).await;
    client.send(post_bytes("/orders", "k", "{}")).await;
    held.arrival(Phase::DuringTheEffect).await;
    client.disconnect(Disconnect::Close);
    held.wait_for_departure().await;
    assert!(!held.layer.drain(Duration::from_millis(20)).await);
    let (retry, effects) = next_process(&store, "k").await;
    assert_eq!((retry.code().as_str(), effects), ("in-progress", 0));
}

async fn keyed_requests_are_refused_while_draining() {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
    let held = HeldServer::with_layer(IdempotencyLayer::new(store.clone())).await;
    let request = || tests::post("/orders", "k", "{}");
    assert_eq!(send(&held.app, request()).await.status, StatusCode::CREATED);
    assert!(held.layer.drain(LONG).await);
    let acquires = store.calls(Operation::Acquire);
    // First requests and retries are both rejected, so that the client retries on another process.
    for key in ["k", "other"] {
        let refused = send(&held.app, tests::post("/orders", key, "{}")).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.code(), "draining");
        assert_eq!(refused.header("retry-after"), Some("1"));
    }
    assert_eq!(store.calls(Operation::Acquire), acquires);
    assert_eq!(held.begun.count(), 1);
    // Requests that the layer does not cover pass through.
    let unkeyed = Request::post("/orders").body(axum::body::Body::empty());
    let unkeyed = send(&held.app, unkeyed.expect("a valid request")).await;
    assert_eq!(unkeyed.status, StatusCode::CREATED);
}

// F-047
#[tokio::test(start_paused = true)]
async fn drain_waits_for_background_completion() {
    bounded(async {
        let store = FaultInjector::new(MemoryStore::new()).with_script(|op, _| match op {
            Operation::Complete => Fault::CallLost,
            _ => Fault::None,
        });
        let held = HeldServer::with_layer(IdempotencyLayer::new(store.clone())).await;
        let response = send(&held.app, tests::post("/orders", "k", "{}")).await;
        assert_eq!(response.status, StatusCode::CREATED);
        assert!(!held.layer.drain(Duration::from_secs(3)).await);
        store.set_script(|_, _| Fault::None);
        assert!(held.layer.drain(LONG).await);
        let (retry, effects) = next_process(store.inner(), "k").await;
        assert!(retry.is_replay());
        assert_eq!((retry.body, effects), (response.body, 0));
    })
    .await;
}

// F-047
#[tokio::test(start_paused = true)]
async fn drain_waits_for_background_release() {
    bounded(async {
        let store = FaultInjector::new(MemoryStore::new()).with_script(|op, _| match op {
            Operation::Release => Fault::CallLost,
            _ => Fault::None,
        });
        let layer = IdempotencyLayer::new(store.clone()).with_lease_ttl(Ttl::from_secs(60));
        let mut failing = layer.layer(service_fn(async |_| {
            Err::<http::Response<axum::body::Body>, _>("it failed")
        }));
        let failed = failing.call(tests::post("/orders", "k", "{}")).await;
        assert_eq!(failed.err(), Some("it failed"), "behaviours 155");
        assert!(!layer.drain(Duration::from_secs(3)).await);
        store.set_script(|_, _| Fault::None);
        assert!(layer.drain(LONG).await);
        let (retry, effects) = next_process(store.inner(), "k").await;
        assert_eq!((retry.status, effects), (StatusCode::CREATED, 1));
    })
    .await;
}

// F-046
// A request is rejected, or drain waits for it.
#[test]
fn drain_admits_no_later_request() {
    const EACH: usize = 50;
    const RACES: u32 = 5;
    let deadline = Instant::now() + LONG;
    let (mut admitted, mut refused, mut races) = (0, 0, 0);
    loop {
        let is_seen = admitted >= EACH && refused >= EACH;
        let late = Instant::now() >= deadline;
        if is_seen && (races >= RACES || late) {
            return;
        }
        assert!(!late, "{admitted} admitted, {refused} refused");
        races += 1;
        let of_race = race_requests_with_drains();
        admitted += of_race.0;
        refused += of_race.1;
    }
}

/// Sends one request to each of many layers while another thread drains the layer. Asserts that no drain has ended before
/// a request was admitted. Returns the numbers of requests that were admitted and refused.
fn race_requests_with_drains() -> (usize, usize) {
    const ROUNDS: usize = 1_000;
    let store = MemoryStore::new();
    let layers: Vec<_> = (0..ROUNDS).map(|_| layer_on(&store)).collect();
    let together = AtomicUsize::new(0);
    // Both threads arrive here before one continues.
    let meet = |round: usize| {
        together.fetch_add(1, Ordering::SeqCst);
        for spins in 1.. {
            if together.load(Ordering::SeqCst) >= (round + 1) * 2 {
                return;
            }
            if spins % 50 == 0 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    };
    let mut responses = Vec::new();
    let slipped_in = std::thread::scope(|scope| {
        let draining = scope.spawn(|| {
            let runtime = new_runtime();
            let drained = layers.iter().enumerate().map(|(round, layer)| {
                meet(round * 2);
                let drained = runtime.block_on(layer.drain(Duration::ZERO));
                meet(round * 2 + 1);
                drained && layer.in_flight() > 0
            });
            drained.filter(|slipped_in| *slipped_in).count()
        });
        for (round, layer) in layers.iter().enumerate() {
            let mut app = layer.layer(service_fn(async |_| {
                Ok::<_, ()>(http::Response::new(axum::body::Body::empty()))
            }));
            let request = tests::post("/", "k", "");
            meet(round * 2);
            // Each request is a little later than the one before, until it is certainly after the drain.
            let delay = round % 100;
            for _ in 0..delay * delay / 5 {
                std::hint::spin_loop();
            }
            // Not polled: an admitted request is in flight until both threads have met again.
            let response = app.call(request);
            meet(round * 2 + 1);
            responses.push(response);
        }
        draining.join().expect("no panic")
    });
    assert_eq!(slipped_in, 0, "requests admitted after the drain had ended");
    let runtime = new_runtime();
    let statuses = responses.into_iter().map(|response| {
        let response = runtime.block_on(response);
        response.expect("the service does not fail").status()
    });
    let (admitted, refused): (Vec<_>, Vec<_>) = statuses.partition(StatusCode::is_success);
    for status in &refused {
        assert_eq!(*status, StatusCode::SERVICE_UNAVAILABLE);
    }
    (admitted.len(), refused.len())
}

fn new_runtime() -> runtime::Runtime {
    let runtime = runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime")
}

#[tokio::test]
async fn cancelled_drain_keeps_layer_closed() {
    bounded(async {
        let held = HeldServer::hold_in(Phase::DuringTheEffect).await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        held.arrival(Phase::DuringTheEffect).await;
        assert_eq!(poll_briefly(held.layer.drain(LONG)).await, None);
        let refused = send(&held.app, tests::post("/orders", "other", "{}")).await;
        assert_eq!(refused.code(), "draining");
        held.open_barriers();
        assert_eq!(
            client.response().await.map(|response| response.status),
            Some(StatusCode::CREATED)
        );
        eventually("nothing is in flight", || held.layer.in_flight() == 0).await;
        assert_eq!(held.begun.count(), 1);
    })
    .await;
}
