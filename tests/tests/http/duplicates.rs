//! Duplicates that arrive while the first request is executed. They are rejected, or wait for its response.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, response::IntoResponse, routing::post};
use http::StatusCode;
use tests::{
    Effects, TestResponse,
    barrier::{Barrier, bounded, eventually, within},
    send,
    wire::soon,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, MemoryStore, StoreFailure,
    conformance::{Fault, FaultInjector, Operation},
};

/// Handlers that wait at a barrier and return the queued responses in order, then 201.
#[derive(Clone)]
struct Held {
    layer: IdempotencyLayer,
    store: FaultInjector<MemoryStore>,
    app: Router,
    barrier: Barrier,
    effects: Effects,
}

impl Held {
    fn new(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::answering(configure, [])
    }

    fn answering<const N: usize>(
        configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
        statuses: [StatusCode; N],
    ) -> Self {
        let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
        let layer = configure(IdempotencyLayer::new(store.clone()));
        let (barrier, effects) = (Barrier::closed(), Effects::default());
        let statuses = Arc::new(Mutex::new(statuses.into_iter()));
        let (held, counted) = (barrier.clone(), effects.clone());
        let handler = async move || {
            let n = counted.happen();
            held.pass().await;
            let status = statuses.lock().expect("no poison").next();
            let status = status.unwrap_or(StatusCode::CREATED);
            (status, format!("execution {n}")).into_response()
        };
        let app = Router::new()
            .route("/", post(handler))
            .route_layer(layer.clone());
        Self {
            layer,
            store,
            app,
            barrier,
            effects,
        }
    }

    fn waiting() -> Self {
        Self::new(|layer| layer.with_concurrent_requests(ConcurrentRequests::Wait(LONG)))
    }

    /// Sends a request under a key, in a task.
    fn send(&self, key: &'static str) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        tokio::spawn(async move { send(&app, tests::post("/", key, "{}")).await })
    }

    /// Sends the first request, and returns when its handler is at the barrier.
    async fn first(&self) -> JoinHandle<TestResponse> {
        let first = self.send("k");
        self.barrier.arrival().await;
        first
    }

    /// Sends a duplicate, and returns when the layer has queried the store for it.
    async fn duplicate(&self) -> JoinHandle<TestResponse> {
        let asked = self.store.calls(Operation::Acquire);
        let duplicate = self.send("k");
        eventually("it asks", || self.store.calls(Operation::Acquire) > asked).await;
        duplicate
    }
}

const LONG: Duration = Duration::from_secs(600);

async fn joined(response: JoinHandle<TestResponse>) -> TestResponse {
    response.await.expect("no panic")
}

// F-052, S-135
// The rejected request must not release the key of the first.
#[tokio::test(start_paused = true)]
async fn duplicates_are_refused_during_execution() {
    for (in_flight, status) in [
        (ConcurrentRequests::Conflict, StatusCode::CONFLICT),
        (
            ConcurrentRequests::TooManyRequests,
            StatusCode::TOO_MANY_REQUESTS,
        ),
    ] {
        bounded(async {
            let held = Held::new(|layer| layer.with_concurrent_requests(in_flight));
            let first = held.first().await;
            for _ in 0..100 {
                let refused = joined(held.send("k")).await;
                assert_eq!(refused.status, status);
                assert_eq!(refused.code(), "in-progress");
                assert_eq!(refused.header("retry-after"), Some("1"));
                assert!(!refused.is_replay());
            }
            assert_eq!(held.effects.count(), 1);
            held.barrier.open_for_good();
            let first = joined(first).await;
            let retry = joined(held.send("k")).await;
            assert!(retry.is_replay());
            assert_eq!((retry.body, held.effects.count()), (first.body, 1));
            assert_eq!(held.store.calls(Operation::Release), 0);
        })
        .await;
    }
}

// F-065
#[tokio::test(start_paused = true)]
async fn other_request_during_execution_is_key_reuse() {
    for in_flight in [
        ConcurrentRequests::Conflict,
        ConcurrentRequests::TooManyRequests,
        ConcurrentRequests::Wait(LONG),
    ] {
        bounded(async {
            let held = Held::new(|layer| layer.with_concurrent_requests(in_flight));
            let first = held.first().await;
            let started = Instant::now();
            let other = send(&held.app, tests::post("/", "k", "{\"other\":1}")).await;
            assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
            assert_eq!(other.code(), "key-reused");
            assert_eq!(
                started.elapsed(),
                Duration::ZERO,
                "the duplicate does not wait"
            );
            held.barrier.open_for_good();
            assert_eq!(joined(first).await.status, StatusCode::CREATED);
            assert_eq!(held.effects.count(), 1);
        })
        .await;
    }
}

// F-056, S-136
#[tokio::test(start_paused = true)]
async fn waiters_share_one_store_query() {
    bounded(async {
        let held = Held::waiting();
        let first = held.first().await;
        let mut waiters = JoinSet::new();
        for _ in 0..64 {
            waiters.spawn(joined(held.send("k")));
        }
        eventually("all ask", || held.store.calls(Operation::Acquire) == 65).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let polls = held.store.calls(Operation::Acquire) - 65;
        assert!(polls <= 20, "{polls} queries in 10 s");

        let opened = Instant::now();
        held.barrier.open_for_good();
        let first = joined(first).await;
        for waiter in waiters.join_all().await {
            assert_eq!(waiter.status, StatusCode::CREATED);
            assert!(waiter.is_replay());
            assert_eq!(waiter.body, first.body);
        }
        assert_eq!(opened.elapsed(), Duration::ZERO, "the store notifies");
        let asked = held.store.calls(Operation::Acquire) - 65 - polls;
        assert!(asked <= 2, "{asked} waiters queried the store themselves");
        assert_eq!((held.effects.count(), held.layer.in_flight()), (1, 0));
    })
    .await;
}

// F-057
#[tokio::test(start_paused = true)]
async fn waiters_poll_without_notifications() {
    for after in [Duration::from_millis(20), Duration::from_secs(60)] {
        within(LONG, async {
            let held = Held::waiting();
            held.store.set_script(|op, _| match op {
                Operation::WaitForChange => Fault::HangCall,
                _ => Fault::None,
            });
            let first = held.first().await;
            let waiter = held.duplicate().await;
            tokio::time::sleep(after).await;
            let opened = Instant::now();
            held.barrier.open_for_good();
            let first = joined(first).await;
            let waiter = tokio::time::timeout(Duration::from_secs(2), joined(waiter)).await;
            assert_eq!(waiter.expect("an answer").body, first.body);
            assert!(opened.elapsed() <= Duration::from_millis(1_001));
            assert_eq!(held.effects.count(), 1);
        })
        .await;
    }
}

// F-056
// Notifications without a change must not cause a query each.
#[tokio::test(start_paused = true)]
async fn waiters_back_off_on_constant_notifications() {
    bounded(async {
        let held = Held::new(|layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(1)))
        });
        // `wait_for_change` resolves at once, every time. The limit detects a waiter without backoff, for which no time
        // would pass.
        held.store.set_script(|op, nth| match (op, nth) {
            (Operation::WaitForChange, _) => Fault::CallLost,
            (Operation::Acquire, 200..) => Fault::HangCall,
            _ => Fault::None,
        });
        let first = held.first().await;
        let waiter = joined(held.send("k")).await;
        assert_eq!(waiter.code(), "in-progress", "the wait has timed out");
        let asked = held.store.calls(Operation::Acquire);
        assert!(
            asked <= 40,
            "the store was queried {asked} times in a second"
        );
        held.barrier.open_for_good();
        assert_eq!(joined(first).await.status, StatusCode::CREATED);
        assert_eq!(held.effects.count(), 1);
    })
    .await;
}

// F-058, S-137
#[tokio::test(start_paused = true)]
async fn one_waiter_executes_after_release() {
    bounded(async {
        let failed = StatusCode::INTERNAL_SERVER_ERROR;
        let held = Held::answering(
            |layer| layer.with_concurrent_requests(ConcurrentRequests::Wait(LONG)),
            [failed, failed],
        );
        let first = held.first().await;
        let mut waiters = JoinSet::new();
        for _ in 0..8 {
            waiters.spawn(joined(held.send("k")));
        }
        eventually("all ask", || held.store.calls(Operation::Acquire) >= 9).await;

        held.barrier.let_through(1);
        assert_eq!(joined(first).await.status, failed);
        held.barrier.arrival().await;
        assert!(
            soon(held.barrier.arrival()).await.is_none(),
            "only one executes"
        );
        assert!(soon(waiters.join_next()).await.is_none(), "the others wait");
        assert_eq!(held.effects.count(), 2);

        held.barrier.let_through(1);
        let second = waiters.join_next().await.expect("a waiter");
        let second = second.expect("no panic");
        assert_eq!((second.status, second.text()), (failed, "execution 2"));
        held.barrier.arrival().await;
        assert!(
            soon(held.barrier.arrival()).await.is_none(),
            "only one executes"
        );
        assert_eq!(held.effects.count(), 3);

        held.barrier.let_through(1);
        let responses = waiters.join_all().await;
        assert_eq!(responses.len(), 7);
        for response in &responses {
            assert_eq!(response.status, StatusCode::CREATED);
            assert_eq!(response.text(), "execution 3");
        }
        let firsts = responses
            .iter()
            .filter(|response| !response.is_replay())
            .count();
        assert_eq!((firsts, held.effects.count()), (1, 3));
    })
    .await;
}

// F-059, S-138
#[tokio::test(start_paused = true)]
async fn timed_out_waiter_is_refused() {
    bounded(async {
        let waits = Duration::from_millis(3_210);
        let held =
            Held::new(|layer| layer.with_concurrent_requests(ConcurrentRequests::Wait(waits)));
        let first = held.first().await;
        let started = Instant::now();
        let waiter = joined(held.send("k")).await;
        assert_eq!(waiter.status, StatusCode::CONFLICT);
        assert_eq!(waiter.code(), "in-progress");
        assert_eq!(waiter.header("retry-after"), Some("1"));
        let waited = started.elapsed();
        assert!(
            waited >= waits && waited < waits + Duration::from_millis(50),
            "{waited:?}"
        );
        // The lease would have expired by then.
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(joined(held.send("k")).await.code(), "in-progress");
        held.barrier.open_for_good();
        let first = joined(first).await;
        let retry = joined(held.send("k")).await;
        assert!(retry.is_replay());
        assert_eq!((retry.body, held.effects.count()), (first.body, 1));
        assert_eq!(held.store.calls(Operation::Release), 0);
    })
    .await;
}

// F-056, S-139
#[tokio::test(start_paused = true)]
async fn waiters_are_bounded_per_key_and_in_total() {
    bounded(async {
        let held = Held::new(|layer| {
            layer
                .with_concurrent_requests(ConcurrentRequests::Wait(LONG))
                .with_max_waiters(2, 3)
        });
        let mut firsts = Vec::new();
        for key in ["k", "l", "m"] {
            firsts.push(held.send(key));
            held.barrier.arrival().await;
        }
        let waits = async |key| {
            let mut waiter = held.send(key);
            soon(&mut waiter).await.is_none().then_some(waiter)
        };
        let one = waits("k").await.expect("a place");
        let two = waits("k").await.expect("a place");
        assert!(waits("k").await.is_none(), "two wait for this key");
        let three = waits("l").await.expect("a place");
        assert!(waits("l").await.is_none(), "three wait in all");
        assert!(waits("m").await.is_none(), "three wait in all");

        // A client that disconnects releases its permit, even if its waiter was about to query the store.
        let mut waiters = vec![three];
        for leaves in [one, two] {
            let in_flight = held.layer.in_flight();
            leaves.abort();
            assert!(leaves.await.is_err());
            assert_eq!(held.layer.in_flight(), in_flight - 1);
            waiters.push(
                waits("k")
                    .await
                    .expect("the permit of the disconnected client"),
            );
            assert!(waits("k").await.is_none(), "two wait for this key");
            assert!(waits("m").await.is_none(), "three wait in all");
        }
        held.barrier.open_for_good();
        for response in firsts.into_iter().chain(waiters) {
            assert_eq!(joined(response).await.status, StatusCode::CREATED);
        }
        assert_eq!((held.effects.count(), held.layer.in_flight()), (3, 0));
        // The waiters that received a response have released their permits, too.
        held.store.set_script(|_, _| Fault::None);
        assert!(joined(held.send("k")).await.is_replay());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn unlimited_wait_is_accepted() {
    bounded(async {
        let held = Held::new(|layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(Duration::MAX))
        });
        let first = held.first().await;
        let waiter = held.duplicate().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        held.barrier.open_for_good();
        let first = joined(first).await;
        let waiter = joined(waiter).await;
        assert!(waiter.is_replay());
        assert_eq!((waiter.body, held.effects.count()), (first.body, 1));
    })
    .await;
}

// S-140
#[tokio::test(start_paused = true)]
async fn waiter_with_store_failure_passes_its_turn() {
    bounded(async {
        let held = Held::waiting();
        let first = held.first().await;
        let failing = held.duplicate().await;
        let waiting = held.duplicate().await;
        held.store.set_script(|op, _| match op {
            Operation::Acquire => Fault::CallLost,
            _ => Fault::None,
        });
        let failed = joined(failing).await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        held.store.set_script(|_, _| Fault::None);
        held.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(joined(waiting).await.body, first.body);
        assert_eq!(held.effects.count(), 1);
    })
    .await;
}

// F-091, S-266
#[tokio::test(start_paused = true)]
async fn waiter_with_store_failure_never_executes() {
    bounded(async {
        let held = Held::new(|layer| {
            layer
                .with_concurrent_requests(ConcurrentRequests::Wait(LONG))
                .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
        });
        let first = held.first().await;
        let waiting = held.duplicate().await;
        held.store.set_script(|op, _| match op {
            Operation::Acquire => Fault::CallLost,
            _ => Fault::None,
        });
        sleep(Duration::from_secs(5)).await;
        assert_eq!(held.effects.count(), 1, "the first still runs");
        held.barrier.open_for_good();
        joined(first).await;
        let waited = joined(waiting).await;
        assert_eq!(waited.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(held.effects.count(), 1);
    })
    .await;
}
