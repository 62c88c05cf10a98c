//! Duplicates that arrive while the first request is executed. They are rejected, or wait for its response.

use std::time::Duration;

use axum::response::IntoResponse;
use http::StatusCode;
use tests::{
    TestResponse,
    barrier::{bounded, eventually, within},
    send,
    wire::poll_briefly,
};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_idempotency::{
    ConcurrentRequests, StoreFailure,
    conformance::{Fault, Operation},
};

use crate::world::World;

impl World {
    /// Creates a service whose duplicates wait for at most this time.
    fn with_wait(limit: Duration) -> Self {
        Self::with_closed_barrier(|layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(limit))
        })
    }

    /// Sends the first request, and returns when its handler is at the barrier.
    async fn spawn_first(&self) -> JoinHandle<TestResponse> {
        let first = self.spawn("k", "{}");
        self.barrier.arrival().await;
        first
    }

    /// Sends a duplicate, and returns when the layer has queried the store for it.
    async fn spawn_duplicate(&self) -> JoinHandle<TestResponse> {
        let queries = self.store.calls(Operation::Acquire);
        let duplicate = self.spawn("k", "{}");
        let has_queried = || self.store.calls(Operation::Acquire) > queries;
        eventually("the duplicate queries the store", has_queried).await;
        duplicate
    }
}

const LONG: Duration = Duration::from_secs(600);

async fn joined(response: JoinHandle<TestResponse>) -> TestResponse {
    response.await.expect("no panic")
}

// F-052, S-124, S-125, S-135
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
            let world =
                World::with_closed_barrier(|layer| layer.with_concurrent_requests(in_flight));
            let first = world.spawn_first().await;
            for _ in 0..100 {
                let refused = joined(world.spawn("k", "{}")).await;
                assert_eq!(refused.status, status);
                assert_eq!(refused.code(), "in-progress");
                assert_eq!(refused.header("retry-after"), Some("1"));
                assert!(refused.is_retryable());
                assert!(!refused.is_replay());
            }
            assert_eq!(world.effects.count(), 1);
            world.barrier.open_for_good();
            let first = joined(first).await;
            assert_eq!(first.status, StatusCode::OK);
            let retry = joined(world.spawn("k", "{}")).await;
            assert!(retry.is_replay());
            assert_eq!((retry.body, world.effects.count()), (first.body, 1));
            assert_eq!(world.store.calls(Operation::Release), 0);
        })
        .await;
    }
}

// F-065, S-126
#[tokio::test(start_paused = true)]
async fn other_request_during_execution_is_key_reuse() {
    for in_flight in [
        ConcurrentRequests::Conflict,
        ConcurrentRequests::TooManyRequests,
        ConcurrentRequests::Wait(LONG),
    ] {
        bounded(async {
            let world =
                World::with_closed_barrier(|layer| layer.with_concurrent_requests(in_flight));
            let first = world.spawn_first().await;
            let started = Instant::now();
            for (path, body) in [("/", "{\"other\":1}"), ("/refunds", "{}")] {
                let other = send(&world.app, tests::post(path, "k", body)).await;
                assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
                assert_eq!(other.code(), "key-reused");
                assert_eq!(other.header("retry-after"), None);
            }
            assert_eq!(
                started.elapsed(),
                Duration::ZERO,
                "the duplicate does not wait"
            );
            world.barrier.open_for_good();
            assert_eq!(joined(first).await.status, StatusCode::OK);
            assert_eq!(world.effects.count(), 1);
        })
        .await;
    }
}

// F-056, S-136
#[tokio::test(start_paused = true)]
async fn waiters_share_one_store_query() {
    bounded(async {
        let world = World::with_wait(LONG);
        let first = world.spawn_first().await;
        let mut waiters = JoinSet::new();
        for _ in 0..64 {
            waiters.spawn(joined(world.spawn("k", "{}")));
        }
        eventually("65 queries", || world.store.calls(Operation::Acquire) == 65).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        let polls = world.store.calls(Operation::Acquire) - 65;
        assert!(polls <= 20, "{polls} queries in 10 s");

        let opened = Instant::now();
        world.barrier.open_for_good();
        let first = joined(first).await;
        for waiter in waiters.join_all().await {
            assert_eq!(waiter.status, StatusCode::OK);
            assert!(waiter.is_replay());
            assert_eq!(waiter.body, first.body);
        }
        assert_eq!(opened.elapsed(), Duration::ZERO, "the store notifies");
        let queries = world.store.calls(Operation::Acquire) - 65 - polls;
        assert!(
            queries <= 2,
            "{queries} waiters queried the store themselves"
        );
        assert_eq!((world.effects.count(), world.layer.in_flight()), (1, 0));
    })
    .await;
}

// F-057
#[tokio::test(start_paused = true)]
async fn waiters_poll_without_notifications() {
    for after in [Duration::from_millis(20), Duration::from_secs(60)] {
        within(LONG, async {
            let world = World::with_wait(LONG);
            world.store.set_script(|op, _| match op {
                Operation::WaitForChange => Fault::HangCall,
                _ => Fault::None,
            });
            let first = world.spawn_first().await;
            let waiter = world.spawn_duplicate().await;
            tokio::time::sleep(after).await;
            let opened = Instant::now();
            world.barrier.open_for_good();
            let first = joined(first).await;
            let waiter = tokio::time::timeout(Duration::from_secs(2), joined(waiter)).await;
            assert_eq!(waiter.expect("a response").body, first.body);
            assert!(opened.elapsed() <= Duration::from_millis(1_001));
            assert_eq!(world.effects.count(), 1);
        })
        .await;
    }
}

// F-056
// Notifications without a change must not cause a query each.
#[tokio::test(start_paused = true)]
async fn waiters_back_off_on_constant_notifications() {
    bounded(async {
        let world = World::with_wait(Duration::from_secs(1));
        // `wait_for_change` resolves at once, every time. The limit detects a waiter without backoff, for which no time
        // would pass.
        world.store.set_script(|op, nth| match (op, nth) {
            (Operation::WaitForChange, _) => Fault::CallLost,
            (Operation::Acquire, 200..) => Fault::HangCall,
            _ => Fault::None,
        });
        let first = world.spawn_first().await;
        let waiter = joined(world.spawn("k", "{}")).await;
        assert_eq!(waiter.code(), "in-progress", "the wait has timed out");
        let queries = world.store.calls(Operation::Acquire);
        assert!(queries <= 40, "{queries} queries in a second");
        world.barrier.open_for_good();
        assert_eq!(joined(first).await.status, StatusCode::OK);
        assert_eq!(world.effects.count(), 1);
    })
    .await;
}

// F-058, S-137
#[tokio::test(start_paused = true)]
async fn one_waiter_executes_after_release() {
    bounded(async {
        let failed = StatusCode::INTERNAL_SERVER_ERROR;
        let world = World::with_wait(LONG);
        for (status, body) in [
            (failed, "execution 1"),
            (failed, "execution 2"),
            (StatusCode::OK, "execution 3"),
        ] {
            world.enqueue_response((status, body).into_response());
        }
        let first = world.spawn_first().await;
        let mut waiters = JoinSet::new();
        for _ in 0..8 {
            waiters.spawn(joined(world.spawn("k", "{}")));
        }
        eventually("9 queries", || world.store.calls(Operation::Acquire) >= 9).await;

        world.barrier.release(1);
        assert_eq!(joined(first).await.status, failed);
        world.barrier.arrival().await;
        assert!(
            poll_briefly(world.barrier.arrival()).await.is_none(),
            "only one executes"
        );
        assert!(
            poll_briefly(waiters.join_next()).await.is_none(),
            "the others wait"
        );
        assert_eq!(world.effects.count(), 2);

        world.barrier.release(1);
        let second = waiters.join_next().await.expect("a waiter");
        let second = second.expect("no panic");
        assert_eq!((second.status, second.text()), (failed, "execution 2"));
        world.barrier.arrival().await;
        assert!(
            poll_briefly(world.barrier.arrival()).await.is_none(),
            "only one executes"
        );
        assert_eq!(world.effects.count(), 3);

        world.barrier.release(1);
        let responses = waiters.join_all().await;
        assert_eq!(responses.len(), 7);
        for response in &responses {
            assert_eq!(response.status, StatusCode::OK);
            assert_eq!(response.text(), "execution 3");
        }
        let firsts = responses
            .iter()
            .filter(|response| !response.is_replay())
            .count();
        assert_eq!((firsts, world.effects.count()), (1, 3));
    })
    .await;
}

// F-059, S-138
#[tokio::test(start_paused = true)]
async fn timed_out_waiter_is_refused() {
    bounded(async {
        let waits = Duration::from_millis(3_210);
        let world = World::with_wait(waits);
        let first = world.spawn_first().await;
        let started = Instant::now();
        let waiter = joined(world.spawn("k", "{}")).await;
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
        assert_eq!(joined(world.spawn("k", "{}")).await.code(), "in-progress");
        world.barrier.open_for_good();
        let first = joined(first).await;
        let retry = joined(world.spawn("k", "{}")).await;
        assert!(retry.is_replay());
        assert_eq!((retry.body, world.effects.count()), (first.body, 1));
        assert_eq!(world.store.calls(Operation::Release), 0);
    })
    .await;
}

// F-056, S-139
#[tokio::test(start_paused = true)]
async fn waiters_are_bounded_per_key_and_in_total() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| {
            layer
                .with_concurrent_requests(ConcurrentRequests::Wait(LONG))
                .with_max_waiters(2, 3)
        });
        let mut firsts = Vec::new();
        for key in ["k", "l", "m"] {
            firsts.push(world.spawn(key, "{}"));
            world.barrier.arrival().await;
        }
        let waits = async |key| {
            let mut waiter = world.spawn(key, "{}");
            poll_briefly(&mut waiter).await.is_none().then_some(waiter)
        };
        let one = waits("k").await.expect("a permit");
        let two = waits("k").await.expect("a permit");
        assert!(waits("k").await.is_none(), "two wait for this key");
        let three = waits("l").await.expect("a permit");
        assert!(waits("l").await.is_none(), "three wait in all");
        assert!(waits("m").await.is_none(), "three wait in all");

        // A client that disconnects releases its permit, even if its waiter was about to query the store.
        let mut waiters = vec![three];
        for leaves in [one, two] {
            let in_flight = world.layer.in_flight();
            leaves.abort();
            assert!(leaves.await.is_err());
            assert_eq!(world.layer.in_flight(), in_flight - 1);
            waiters.push(
                waits("k")
                    .await
                    .expect("the permit of the disconnected client"),
            );
            assert!(waits("k").await.is_none(), "two wait for this key");
            assert!(waits("m").await.is_none(), "three wait in all");
        }
        world.barrier.open_for_good();
        for response in firsts.into_iter().chain(waiters) {
            assert_eq!(joined(response).await.status, StatusCode::OK);
        }
        assert_eq!((world.effects.count(), world.layer.in_flight()), (3, 0));
        // The waiters that received a response have released their permits, too.
        world.store.set_script(|_, _| Fault::None);
        assert!(joined(world.spawn("k", "{}")).await.is_replay());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn unlimited_wait_is_accepted() {
    bounded(async {
        let world = World::with_wait(Duration::MAX);
        let first = world.spawn_first().await;
        let waiter = world.spawn_duplicate().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        world.barrier.open_for_good();
        let first = joined(first).await;
        let waiter = joined(waiter).await;
        assert!(waiter.is_replay());
        assert_eq!((waiter.body, world.effects.count()), (first.body, 1));
    })
    .await;
}

// S-140
#[tokio::test(start_paused = true)]
async fn waiter_with_store_failure_passes_its_turn() {
    bounded(async {
        let world = World::with_wait(LONG);
        let first = world.spawn_first().await;
        let failing = world.spawn_duplicate().await;
        let waiting = world.spawn_duplicate().await;
        world.store.set_script(|op, _| match op {
            Operation::Acquire => Fault::CallLost,
            _ => Fault::None,
        });
        let failed = joined(failing).await;
        assert_eq!(failed.status, StatusCode::SERVICE_UNAVAILABLE);
        world.store.set_script(|_, _| Fault::None);
        world.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(joined(waiting).await.body, first.body);
        assert_eq!(world.effects.count(), 1);
    })
    .await;
}

// F-091, S-266
#[tokio::test(start_paused = true)]
async fn waiter_with_store_failure_never_executes() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| {
            layer
                .with_concurrent_requests(ConcurrentRequests::Wait(LONG))
                .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
        });
        let first = world.spawn_first().await;
        let waiting = world.spawn_duplicate().await;
        world.store.set_script(|op, _| match op {
            Operation::Acquire => Fault::CallLost,
            _ => Fault::None,
        });
        sleep(Duration::from_secs(5)).await;
        assert_eq!(world.effects.count(), 1, "the first still runs");
        world.barrier.open_for_good();
        joined(first).await;
        let waited = joined(waiting).await;
        assert_eq!(waited.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(world.effects.count(), 1);
    })
    .await;
}
