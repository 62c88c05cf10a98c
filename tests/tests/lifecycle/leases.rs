//! Leases: renewal, loss, takeover, and their state when the store fails.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Waker},
    time::Duration,
};

use axum::{Router, body::Body, response::IntoResponse, routing::post};
use http::{Request, StatusCode};
use tests::{
    Effects, TestResponse,
    barrier::{Barrier, bounded, eventually, within},
    observed::paused,
    send,
};
use tokio::{
    runtime::{Handle, Runtime},
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tower::ServiceExt as _;
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, Lease, MemoryStore, MissingKey, OrphanPolicy,
    StoreFailure, Ttl, Unrecordable,
    conformance::{Fault, FaultInjector, Hold, Operation},
};

use crate::panicking_store::PanickingStore;

mod finishing;

/// A process: its own layer in front of a store that may be shared, and a handler held at a barrier.
#[derive(Clone)]
struct Node {
    layer: IdempotencyLayer,
    store: FaultInjector<MemoryStore>,
    app: Router,
    barrier: Barrier,
    effects: Effects,
    leases: Arc<Mutex<Vec<Lease>>>,
    status: Arc<Mutex<StatusCode>>,
}

impl Node {
    fn new() -> Self {
        Self::with_store(&MemoryStore::new(), &Effects::default(), |layer| layer)
    }

    fn with_store(
        store: &MemoryStore,
        effects: &Effects,
        configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let store = FaultInjector::new(store.clone());
        let layer = configure(IdempotencyLayer::new(store.clone()));
        let status = Arc::new(Mutex::new(StatusCode::CREATED));
        let mut node = Self {
            app: Router::new(),
            layer,
            store,
            barrier: Barrier::closed(),
            effects: effects.clone(),
            leases: Arc::default(),
            status,
        };
        let this = node.clone();
        let handler = async move |lease: Option<Lease>| {
            this.leases.lock().expect("no poison").extend(lease);
            let n = this.effects.happen();
            this.barrier.pass().await;
            let status = *this.status.lock().expect("no poison");
            (status, format!("execution {n}")).into_response()
        };
        node.app = Router::new()
            .route("/", post(handler))
            .route_layer(node.layer.clone());
        node
    }

    /// Returns a second process on the same store.
    fn another(&self) -> Self {
        Self::with_store(self.store.inner(), &self.effects, |layer| layer)
    }

    fn send(&self) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        tokio::spawn(async move { send(&app, request()).await })
    }

    /// Sends a request. Returns its task and its lease when its handler runs.
    async fn start(&self) -> (JoinHandle<TestResponse>, Lease) {
        let request = self.send();
        timeout(LONG, self.barrier.arrival())
            .await
            .expect("it runs");
        let leases = self.leases.lock().expect("no poison");
        (request, leases.last().expect("a lease").clone())
    }

    async fn response(&self) -> TestResponse {
        send(&self.app, request()).await
    }

    fn answers_with(&self, status: StatusCode) {
        *self.status.lock().expect("no poison") = status;
    }

    /// Lets the running handler return a 500, which is not recorded. Waits for the response.
    async fn finish_without_record(&self, running: JoinHandle<TestResponse>) {
        self.answers_with(StatusCode::INTERNAL_SERVER_ERROR);
        self.barrier.open_for_good();
        let response = joined(running).await;
        assert_eq!(response.status, StatusCode::INTERNAL_SERVER_ERROR);
    }

    /// Injects the fault into every call of these methods.
    fn fail(&self, operations: &'static [Operation], fault: Fault) {
        self.store.set_script(move |operation, _| {
            if operations.contains(&operation) {
                fault.clone()
            } else {
                Fault::None
            }
        });
    }

    fn recover(&self) {
        self.store.set_script(|_, _| Fault::None);
    }
}

fn request() -> Request<Body> {
    tests::post("/", "k", "{}")
}

async fn joined(response: JoinHandle<TestResponse>) -> TestResponse {
    response.await.expect("no panic")
}

const LONG: Duration = Duration::from_secs(600);
const LEASE: Duration = Duration::from_secs(15);

// ---- Renewals ----

// F-039
#[tokio::test(start_paused = true)]
async fn handler_longer_than_lease_holds_it() {
    within(LONG, async {
        let node = Node::new();
        let other = node.another();
        let (first, lease) = node.start().await;
        for _ in 0..60 {
            sleep(Duration::from_secs(1)).await;
            assert!(lease.is_held());
            assert_eq!(node.response().await.code(), "in-progress");
            assert_eq!(other.response().await.code(), "in-progress");
        }
        // No renewal is due at this moment.
        sleep(Duration::from_millis(500)).await;
        let renewals = node.store.calls(Operation::Renew);
        assert_eq!(renewals, 12, "renewals in 60 s");
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        assert!(!lease.is_held(), "the lease has ended");
        lease.lost().await;
        assert!(other.response().await.is_replay());
        sleep(LONG / 2).await;
        assert_eq!(
            node.store.calls(Operation::Renew),
            renewals,
            "behaviours 112"
        );
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}

// S-166
#[tokio::test(start_paused = true)]
async fn finished_lease_wakes_waiter_immediately() {
    bounded(async {
        let node = Node::new();
        let (first, lease) = node.start().await;
        let waiter = tokio::spawn(async move {
            lease.lost().await;
            Instant::now()
        });
        // The waiter is polled, and waits.
        sleep(Duration::from_secs(1)).await;
        assert!(!waiter.is_finished());
        let finished = Instant::now();
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        let woken = waiter.await.expect("no panic");
        assert!(woken < finished + LEASE / 3, "{:?}", woken - finished);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn short_request_makes_no_renewal() {
    bounded(async {
        let node = Node::new();
        let (first, _) = node.start().await;
        sleep(LEASE / 3 - Duration::from_millis(10)).await;
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.status, StatusCode::CREATED);
        sleep(LEASE).await;
        assert_eq!(node.store.calls(Operation::Renew), 0);
    })
    .await;
}

// F-040, F-042
#[tokio::test(start_paused = true)]
async fn renewal_failures_within_lease_are_harmless() {
    for act in [
        Fault::CallLost,
        Fault::ReplyLost,
        Fault::HangCall,
        Fault::HangReply,
    ] {
        within(LONG, async {
            let node = Node::new();
            let other = node.another();
            let (first, lease) = node.start().await;
            node.fail(&[Operation::Renew], act);
            sleep(Duration::from_secs(12)).await;
            assert!(
                node.store.calls(Operation::Renew) >= 3,
                "the renewal is repeated"
            );
            node.recover();
            for _ in 0..60 {
                sleep(Duration::from_secs(1)).await;
                assert!(lease.is_held());
                assert_eq!(other.response().await.code(), "in-progress");
            }
            assert!(timeout(LEASE, lease.lost()).await.is_err());
            node.barrier.open_for_good();
            assert_eq!(joined(first).await.text(), "execution 1");
            assert!(other.response().await.is_replay());
            assert_eq!(node.effects.count(), 1);
        })
        .await;
    }
}

// F-040, S-163
#[tokio::test(start_paused = true)]
async fn hanging_renewal_leaves_time_for_second() {
    within(LONG, async {
        let configure = |layer: IdempotencyLayer| layer.with_lease_ttl(Ttl::from_secs(3));
        let node = Node::with_store(&MemoryStore::new(), &Effects::default(), configure);
        let (first, lease) = node.start().await;
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Renew, 1) => Fault::HangCall,
            _ => Fault::None,
        });
        assert!(timeout(LEASE, lease.lost()).await.is_err());
        assert_eq!(node.another().response().await.code(), "in-progress");
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}

// F-094, S-165
#[tokio::test(start_paused = true)]
async fn panicking_renewal_counts_as_failed() {
    within(LONG, async {
        let node = Node::new();
        let (first, lease) = node.start().await;
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Renew, 1) => Fault::Panic,
            _ => Fault::None,
        });
        assert!(timeout(LEASE * 2, lease.lost()).await.is_err());
        assert_eq!(node.another().response().await.code(), "in-progress");
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}

// S-165
#[tokio::test(start_paused = true)]
async fn renewal_panicking_on_call_counts_as_failed() {
    within(LONG, async {
        let store = PanickingStore::new(Operation::Renew, 1, false);
        let calls = Arc::clone(&store.calls);
        let layer = IdempotencyLayer::new(store);
        let handler = async |lease: Lease| {
            let lost = timeout(LEASE * 2, lease.lost()).await;
            assert!(lost.is_err(), "the lease was renewed");
        };
        let app = Router::new().route("/", post(handler)).route_layer(layer);
        assert_eq!(send(&app, request()).await.status, StatusCode::OK);
        let calls = calls.lock().expect("no poison");
        assert!(
            calls[1] - calls[0] >= LEASE / 12,
            "repeated without delay: {calls:?}"
        );
    })
    .await;
}

// F-041
// The lease duration counts from before the last successful renewal was sent.
#[tokio::test(start_paused = true)]
async fn unrenewed_lease_is_not_held_until_renewal() {
    within(LONG, async {
        let node = Node::new();
        let started = Instant::now();
        let (first, lease) = node.start().await;
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Renew, 1) => {
                Fault::HoldCall(Hold::new(|| sleep(Duration::from_millis(1_500))))
            }
            (Operation::Renew, _) => Fault::CallLost,
            _ => Fault::None,
        });
        lease.lost().await;
        assert!(!lease.is_held());
        let lost_after = started.elapsed() - LEASE / 3;
        assert!(
            lost_after >= LEASE && lost_after < LEASE + Duration::from_millis(10),
            "{lost_after:?}"
        );
        // No other process acquired the lease meanwhile, so this node holds it again.
        node.recover();
        sleep(Duration::from_secs(3)).await;
        assert!(lease.is_held());
        assert_eq!(node.another().response().await.code(), "in-progress");
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        assert!(node.another().response().await.is_replay());
    })
    .await;
}

// F-041
#[tokio::test(start_paused = true)]
async fn lost_renewal_notifies_handler_immediately() {
    bounded(async {
        let node = Node::new();
        let started = Instant::now();
        let (first, lease) = node.start().await;
        node.fail(&[Operation::Renew], Fault::LeaseLost);
        lease.lost().await;
        assert!(!lease.is_held());
        let lost_after = started.elapsed();
        assert!(
            lost_after < LEASE / 3 + Duration::from_millis(10),
            "{lost_after:?}"
        );
        sleep(LEASE).await;
        assert_eq!(
            node.store.calls(Operation::Renew),
            1,
            "there is nothing to renew"
        );
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
    })
    .await;
}

/// Another process may hold the key, so the response of this one is not the valid one.
#[tokio::test(start_paused = true)]
async fn unstored_record_after_lost_lease_is_unknown() {
    bounded(async {
        let node = Node::new();
        let (first, lease) = node.start().await;
        node.fail(&[Operation::Renew], Fault::LeaseLost);
        lease.lost().await;
        node.fail(&[Operation::Complete], Fault::CallLost);
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(first.code(), "outcome-unknown", "{first:?}");
    })
    .await;
}

// F-042
#[tokio::test(start_paused = true)]
async fn renewal_during_finish_is_last() {
    bounded(async {
        let (node, reply) = (Node::new(), Barrier::closed());
        let (first, lease) = node.start().await;
        let barrier = reply.clone();
        node.store.set_script(move |op, _| match op {
            Operation::Renew => Fault::HoldReply(barrier.clone().into()),
            _ => Fault::None,
        });
        reply.arrival().await;
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.text(), "execution 1");
        reply.open_for_good();
        sleep(LEASE).await;
        assert_eq!(node.store.calls(Operation::Renew), 1);
        assert!(!lease.is_held());
        assert!(node.response().await.is_replay());
    })
    .await;
}

// F-043
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocking_handler_does_not_starve_renewal() {
    bounded(async {
        let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
        let effects = Effects::default();
        let counted = effects.clone();
        let (go_on, signal) = std::sync::mpsc::channel::<()>();
        let signal = Arc::new(Mutex::new(signal));
        let blocks = async move || {
            counted.happen();
            let signal = signal.lock().expect("no poison");
            signal
                .recv_timeout(Duration::from_secs(120))
                .expect("the test goes on");
        };
        // Renewals are 2 s apart, so a machine that stalls for 2 s loses no lease.
        let layer = IdempotencyLayer::new(store.clone()).with_lease_ttl(Ttl::from_secs(6));
        let app = Router::new().route("/", post(blocks)).route_layer(layer);
        // The first round has the first lease of the layer, the second one a lease after a time without leases.
        for round in 1..=2 {
            let request = || tests::post("/", &format!("k{round}"), "{}");
            let renewals = store.calls(Operation::Renew);
            let (app, first) = (app.clone(), request());
            let first = {
                let app = app.clone();
                tokio::spawn(async move { send(&app, first).await })
            };
            eventually("the lease is renewed", || {
                store.calls(Operation::Renew) >= renewals + 2
            })
            .await;
            assert_eq!(send(&app, request()).await.code(), "in-progress");
            go_on.send(()).expect("it waits");
            assert_eq!(joined(first).await.status, StatusCode::OK);
            assert!(send(&app, request()).await.is_replay());
            assert_eq!(effects.count(), round);
            sleep(Duration::from_millis(150)).await;
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn one_task_renews_all_leases_of_layer() {
    within(LONG, async {
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        let store =
            Arc::new(FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None));
        let layer = IdempotencyLayer::new(Arc::clone(&store));
        let slow = async || sleep(Duration::from_secs(60)).await;
        let app = Router::new()
            .route("/", post(slow))
            .route_layer(layer.clone());
        let mut requests = JoinSet::new();
        for key in 0..1_000 {
            let app = app.clone();
            requests.spawn(async move { send(&app, tests::post("/", &key.to_string(), "")).await });
        }
        sleep(Duration::from_secs(31)).await;
        assert_eq!(tasks() - before, 1_000 + 1);
        let renewals = store.calls(Operation::Renew);
        assert!(
            (5_000..=6_000).contains(&renewals),
            "{renewals} renewals of 1,000 leases"
        );
        for response in requests.join_all().await {
            assert_eq!(response.status, StatusCode::OK);
        }
        assert_eq!(tasks() - before, 1, "the renewer waits for the next lease");
        let dropped = Instant::now();
        drop((app, layer));
        eventually("the renewer ends", || tasks() == before).await;
        assert!(dropped.elapsed() < Duration::from_millis(100));
        assert_eq!(Arc::strong_count(&store), 1, "no task holds the store");
    })
    .await;
}

#[test]
fn renewal_continues_in_second_runtime() {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
    let layer = IdempotencyLayer::new(store.clone()).with_lease_ttl(Ttl::from_millis(300));
    // Responds after four renewals. Its lease is the only one that has not ended.
    let renewed_four_times = async move || {
        let before = store.calls(Operation::Renew);
        while store.calls(Operation::Renew) < before + 4 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let handler = post(renewed_four_times);
    let app = Router::new().route("/", handler).route_layer(layer);
    for round in 1..=2 {
        let runtime = Runtime::new().expect("a runtime");
        let key = round.to_string();
        let response = runtime.block_on(bounded(send(&app, tests::post("/", &key, ""))));
        assert_eq!(response.status, StatusCode::OK);
        assert!(!response.is_replay());
    }
}

// S-164
/// Renewals run in the runtime of the layer's first lease. Later leases may belong to another runtime.
#[test]
fn renewal_moves_when_its_runtime_ends() {
    let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
        layer.with_lease_ttl(Ttl::from_secs(3))
    });
    let (ends, stays) = (Runtime::new(), Runtime::new());
    let (ends, stays) = (ends.expect("a runtime"), stays.expect("a runtime"));
    let quick = |key: &str| {
        let (app, key) = (node.app.clone(), key.to_owned());
        async move { send(&app, tests::post("/", &key, "{}")).await }
    };
    node.barrier.release(1);
    ends.block_on(bounded(quick("first")));
    node.fail(&[Operation::Renew], Fault::HangCall);
    let slow = stays.spawn(quick("slow"));
    stays.block_on(eventually("the lease is being renewed", || {
        node.store.calls(Operation::Renew) > 0
    }));
    drop(ends);
    node.recover();
    stays.block_on(async {
        // Another lease starts the renewals again.
        let another = tokio::spawn(quick("another"));
        sleep(Duration::from_secs(4)).await;
        let lease = node.leases.lock().expect("no poison")[1].clone();
        eventually("the lease is renewed", || lease.is_held()).await;
        node.barrier.open_for_good();
        let responses = [bounded(slow).await, bounded(another).await];
        for response in responses {
            assert_eq!(response.expect("no panic").status, StatusCode::CREATED);
        }
    });
    assert_eq!(node.effects.count(), 3);
}

/// A thread without a runtime polls a request, for example under another executor. The renewals cannot start there.
#[test]
fn lease_expires_if_renewals_cannot_start() {
    let effects = Effects::default();
    let executed = effects.clone();
    let handler = post(async move || {
        executed.happen();
    });
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let app = Router::new().route("/", handler).route_layer(layer);
    let request = app.clone().oneshot(tests::post("/", "k", ""));
    let poll = AssertUnwindSafe(|| {
        let mut request = pin!(request);
        let mut cx = Context::from_waker(Waker::noop());
        request.as_mut().poll(&mut cx).is_ready()
    });
    assert!(catch_unwind(poll).is_err(), "a lease without renewals");
    assert_eq!(effects.count(), 0);
    paused().block_on(async {
        let early = send(&app, tests::post("/", "k", "")).await;
        assert_eq!(early.status, StatusCode::CONFLICT, "a lease is held");
        // This lease starts the renewals.
        send(&app, tests::post("/", "other", "")).await;
        sleep(4 * LEASE).await;
        let response = send(&app, tests::post("/", "k", "")).await;
        assert_eq!(response.status, StatusCode::OK);
        assert!(!response.is_replay());
    });
    assert_eq!(effects.count(), 2);
}

// ---- Takeovers ----

/// Returns a node whose lease was not renewed while its handler runs, and another node that has taken the lease over.
async fn taken_over() -> (
    Node,
    JoinHandle<TestResponse>,
    Lease,
    Node,
    JoinHandle<TestResponse>,
    Lease,
) {
    let node = Node::new();
    let (first, lease) = node.start().await;
    node.fail(&[Operation::Renew], Fault::HangCall);
    let other = node.another();
    sleep(LEASE - Duration::from_millis(10)).await;
    assert_eq!(other.response().await.code(), "in-progress");
    sleep(Duration::from_millis(20)).await;
    assert!(!lease.is_held(), "the paused process can detect it");
    let (second, taken) = other.start().await;
    assert!(taken.is_held());
    assert!((lease.generation(), lease.is_takeover()) == (1, false));
    assert!((taken.generation(), taken.is_takeover()) == (2, true));
    (node, first, lease, other, second, taken)
}

// F-035, F-038, S-155
#[tokio::test(start_paused = true)]
async fn lost_lease_returns_stored_response() {
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        other.barrier.open_for_good();
        let second = joined(second).await;
        assert_eq!((second.text(), second.is_replay()), ("execution 2", false));
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 2", true));
        for node in [&node, &other] {
            let retry = node.response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 2", true));
        }
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// F-038
#[tokio::test(start_paused = true)]
async fn lost_lease_is_unknown_while_rival_runs() {
    within(LONG, async {
        let (node, first, _, other, second, taken) = taken_over().await;
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!(first.status, StatusCode::CONFLICT);
        assert_eq!(first.code(), "outcome-unknown");
        assert!(taken.is_held(), "the first node did not get the lease back");
        assert_eq!(node.response().await.code(), "in-progress");
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        assert_eq!(node.response().await.text(), "execution 2");
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// The lease of the other process has expired too.
#[tokio::test(start_paused = true)]
async fn lost_lease_is_not_retaken_as_orphan() {
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        other.fail(&[Operation::Renew], Fault::HangCall);
        sleep(LEASE * 2).await;
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.code(), "outcome-unknown");
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        assert_eq!(node.response().await.text(), "execution 2");
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// F-037
#[tokio::test(start_paused = true)]
async fn failed_handler_after_lost_lease_releases_nothing() {
    within(LONG, async {
        let (node, first, _, other, second, taken) = taken_over().await;
        node.finish_without_record(first).await;
        assert!(taken.is_held());
        assert_eq!(node.response().await.code(), "in-progress");
        other.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        assert_eq!(node.response().await.text(), "execution 2");
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// S-156
#[tokio::test(start_paused = true)]
async fn lost_lease_stores_record_if_rival_left_none() {
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        other.finish_without_record(second).await;
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
        for node in [&node, &other] {
            let retry = node.response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        }
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

// S-157
#[tokio::test(start_paused = true)]
async fn record_after_lost_lease_stored_when_store_recovers() {
    // The store fails when the record is stored, or earlier, when the layer queries the state that the other node left.
    for fails in [Operation::Complete, Operation::Acquire] {
        within(LONG, async {
            let (node, first, _, other, second, _) = taken_over().await;
            other.answers_with(StatusCode::INTERNAL_SERVER_ERROR);
            let left = other.barrier.clone();
            let barrier = Barrier::closed();
            let held = barrier.clone();
            node.store.set_script(move |op, nth| match (op, nth) {
                // The completion finds the lease lost. Its reply arrives after the other node has released the entry.
                (Operation::Complete, 1) => Fault::HoldReply(held.clone().into()),
                (op, 2..=4) if op == fails => Fault::CallLost,
                _ => Fault::None,
            });
            node.barrier.open_for_good();
            barrier.arrival().await;
            left.open_for_good();
            let second = joined(second).await;
            assert_eq!(second.status, StatusCode::INTERNAL_SERVER_ERROR);
            barrier.open_for_good();
            assert_eq!(joined(first).await.code(), "outcome-unknown");
            sleep(Duration::from_secs(5)).await;
            let retry = other.response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
            assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
        })
        .await;
    }
}

// S-158
/// Like the test before, but the store fails before it can report that the lease was lost.
#[tokio::test(start_paused = true)]
async fn record_is_stored_after_unreported_lease_loss() {
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        other.finish_without_record(second).await;
        node.store.set_script(|op, nth| match (op, nth) {
            (Operation::Complete, 1..=3) => Fault::CallLost,
            _ => Fault::None,
        });
        node.barrier.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
        sleep(Duration::from_secs(1)).await;
        let retry = other.response().await;
        assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
    })
    .await;
}

// S-151
// The effect of the first execution may have happened, for any outcome of the second execution.
#[tokio::test(start_paused = true)]
async fn takeover_without_outcome_is_taken_over_again() {
    within(LONG, async {
        let (node, _, _, other, second, _) = taken_over().await;
        other.finish_without_record(second).await;
        let reused = send(&other.app, tests::post("/", "k", "another request")).await;
        assert_eq!(reused.code(), "key-reused");
        other.answers_with(StatusCode::CREATED);
        assert_eq!(other.response().await.text(), "execution 3");
        let third = other.leases.lock().expect("no poison")[1].clone();
        assert_eq!((third.generation(), third.is_takeover()), (3, true));
        assert!(other.response().await.is_replay());
        assert_eq!(node.effects.count(), 3);
    })
    .await;
}

// S-153
#[tokio::test(start_paused = true)]
async fn takeover_that_never_ran_is_taken_over_again() {
    for act in [Fault::ReplyLost, Fault::HangReply] {
        within(LONG, async {
            let node = Node::new();
            let (first, _) = node.start().await;
            node.fail(&[Operation::Renew], Fault::HangCall);
            sleep(LEASE * 2).await;
            let other = node.another();
            other.barrier.open_for_good();
            other.fail(&[Operation::Acquire], act);
            assert_eq!(other.response().await.code(), "store-unavailable");
            other.recover();
            sleep(Duration::from_secs(1)).await;
            assert_eq!(other.response().await.text(), "execution 2");
            let taken = other.leases.lock().expect("no poison")[0].clone();
            assert_eq!((taken.generation(), taken.is_takeover()), (3, true));
            node.barrier.open_for_good();
            assert_eq!(joined(first).await.text(), "execution 2");
        })
        .await;
    }
}

// The other execution leaves no record, between the completion of this one and its query.
#[tokio::test(start_paused = true)]
async fn lost_lease_stores_own_record_after_rival_releases() {
    within(LONG, async {
        let (node, first, _, other, second, _) = taken_over().await;
        let query = Barrier::closed();
        let barrier = query.clone();
        node.store.set_script(move |op, _| match op {
            Operation::Acquire => Fault::HoldCall(barrier.clone().into()),
            _ => Fault::None,
        });
        node.barrier.open_for_good();
        query.arrival().await;
        other.finish_without_record(second).await;
        query.open_for_good();
        let first = joined(first).await;
        assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
        for node in [&node, &other] {
            let retry = node.response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        }
        assert_eq!(node.effects.count(), 2);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn late_response_is_stored_without_takeover() {
    for policy in [OrphanPolicy::TakeOver, OrphanPolicy::Refuse] {
        within(LONG, async {
            let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
                layer.with_orphan_policy(policy)
            });
            let (first, _) = node.start().await;
            node.fail(&[Operation::Renew], Fault::CallLost);
            sleep(LEASE * 3).await;
            node.barrier.open_for_good();
            let first = joined(first).await;
            assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
            let retry = node.another().response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
        })
        .await;
    }
}

// F-031
#[tokio::test(start_paused = true)]
async fn refused_orphan_executes_only_after_expiry() {
    within(LONG * 10, async {
        let kept = Ttl::from_secs(3_600);
        let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
            let refusing = layer.with_orphan_policy(OrphanPolicy::Refuse);
            refusing
                .with_orphan_retention(kept)
                .with_concurrent_requests(ConcurrentRequests::Wait(LONG))
        });
        let (first, _) = node.start().await;
        node.fail(&[Operation::Renew], Fault::CallLost);
        // A waiter is notified when the lease expires.
        let started = Instant::now();
        let waiter = node.response().await;
        assert_eq!(
            (waiter.status, waiter.code().as_str()),
            (StatusCode::CONFLICT, "outcome-unknown")
        );
        assert!(
            started.elapsed() <= LEASE + Duration::from_secs(1),
            "{:?}",
            started.elapsed()
        );
        assert_eq!(node.response().await.code(), "outcome-unknown");
        first.abort();
        node.barrier.open_for_good();
        sleep(kept.as_duration() - LEASE - Duration::from_secs(60)).await;
        let refused = node.response().await;
        // The handler did not stop when its client disconnected, so its response is recorded.
        assert_eq!((refused.text(), refused.is_replay()), ("execution 1", true));
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn waiter_takes_over_after_lease_expiry() {
    within(LONG, async {
        let node = Node::new();
        let (first, _) = node.start().await;
        node.fail(&[Operation::Renew], Fault::CallLost);
        let other = Node::with_store(node.store.inner(), &node.effects, |layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(LONG))
        });
        let started = Instant::now();
        let (second, taken) = other.start().await;
        assert!(started.elapsed() < LEASE + Duration::from_millis(50));
        assert_eq!((taken.generation(), taken.is_takeover()), (2, true));
        other.barrier.open_for_good();
        node.barrier.open_for_good();
        assert_eq!(joined(second).await.text(), "execution 2");
        assert_eq!(joined(first).await.text(), "execution 2");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn derived_key_is_stable_across_takeover() {
    within(LONG, async {
        let (node, _, lease, _, _, taken) = taken_over().await;
        let charge = lease.derive("charge");
        assert_eq!(charge, taken.derive("charge"));
        assert_eq!(charge, lease.clone().derive("charge"));
        assert!(charge.len() == 64 && charge.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let mut seen = vec![charge];
        let mut differs = |key: String| {
            assert!(!seen.contains(&key), "{key} twice");
            seen.push(key);
        };
        for name in ["", "charge ", "Charge", "chargecharge", "refund"] {
            differs(lease.derive(name));
        }
        // Requests with another key, and of another caller.
        node.barrier.open_for_good();
        let mut other = tests::post("/", "l", "{}");
        assert_eq!(send(&node.app, other).await.status, StatusCode::CREATED);
        other = request();
        let bearer = http::HeaderValue::from_static("Bearer x");
        other
            .headers_mut()
            .insert(http::header::AUTHORIZATION, bearer);
        assert_eq!(send(&node.app, other).await.status, StatusCode::CREATED);
        let leases = node.leases.lock().expect("no poison");
        for lease in &leases[1..] {
            differs(lease.derive("charge"));
        }
        assert_eq!(leases.len(), 3);
    })
    .await;
}

// ---- A store that fails ----

// F-090, F-096, S-260
#[tokio::test(start_paused = true)]
async fn nothing_is_executed_when_no_lease_can_be_taken() {
    for (act, at_most) in [
        (Fault::CallLost, Duration::from_millis(60)),
        (Fault::ReplyLost, Duration::from_millis(60)),
        (Fault::HangCall, Duration::from_millis(4_010)),
        (Fault::HangReply, Duration::from_millis(4_010)),
    ] {
        within(LONG, async {
            let node = Node::new();
            node.barrier.open_for_good();
            let is_granted = matches!(act, Fault::ReplyLost | Fault::HangReply);
            node.fail(&[Operation::Acquire], act);
            let started = Instant::now();
            let refused = node.response().await;
            assert!(started.elapsed() <= at_most, "{:?}", started.elapsed());
            assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(refused.code(), "store-unavailable");
            assert_eq!(refused.header("retry-after"), Some("1"));
            assert!(node.store.calls(Operation::Acquire) <= 3);
            assert_eq!(node.effects.count(), 0);
            assert_eq!(node.store.inner().len(), usize::from(is_granted));
            node.recover();
            // The layer releases the lease that the store may have granted, long before it would expire.
            sleep(Duration::from_millis(100)).await;
            assert!(node.store.inner().is_empty());
            let retry = node.response().await;
            assert_eq!(
                (retry.status, retry.is_replay()),
                (StatusCode::CREATED, false)
            );
            assert!(!node.leases.lock().expect("no poison")[0].is_takeover());
            assert!(node.response().await.is_replay());
            assert_eq!(node.effects.count(), 1);
        })
        .await;
    }
}

// F-095, S-258
#[tokio::test(start_paused = true)]
async fn retried_acquire_finds_own_lease() {
    for act in [Fault::ReplyLost, Fault::HangReply] {
        within(LONG, async {
            let node = Node::new();
            node.barrier.open_for_good();
            node.store.set_script(move |op, nth| match (op, nth) {
                (Operation::Acquire, 1) => act.clone(),
                _ => Fault::None,
            });
            let first = node.response().await;
            assert_eq!(
                (first.status, first.is_replay()),
                (StatusCode::CREATED, false)
            );
            assert_eq!(node.store.calls(Operation::Acquire), 2);
            let lease = node.leases.lock().expect("no poison")[0].clone();
            assert_eq!((lease.generation(), lease.is_takeover()), (1, false));
            assert!(node.response().await.is_replay());
            assert_eq!(node.effects.count(), 1);
        })
        .await;
    }
}

// S-259
/// If the reply to an acquire arrives after its lease would have expired, the layer does not execute. It queries the
/// store again.
#[tokio::test(start_paused = true)]
async fn late_grant_is_acquired_again() {
    let slow = |layer: IdempotencyLayer| {
        layer
            .with_lease_ttl(Ttl::from_secs(1))
            .with_store_timeout(Duration::from_secs(10))
    };
    for taken_over in [true, false] {
        within(LONG, async {
            let (store, effects) = (MemoryStore::new(), Effects::default());
            let late = Node::with_store(&store, &effects, slow);
            let reply = Barrier::closed();
            let held_back = reply.clone();
            late.store.set_script(move |op, nth| match (op, nth) {
                (Operation::Acquire, 1) => Fault::HoldReply(held_back.clone().into()),
                _ => Fault::None,
            });
            late.barrier.open_for_good();
            let response = late.send();
            sleep(Duration::from_secs(2)).await;
            if taken_over {
                let other = late.another();
                other.barrier.open_for_good();
                assert_eq!(other.response().await.text(), "execution 1");
            }
            reply.open_for_good();
            let response = joined(response).await;
            assert_eq!(
                (response.text(), response.is_replay()),
                ("execution 1", taken_over)
            );
            assert_eq!(effects.count(), 1);
            assert_eq!(late.store.calls(Operation::Acquire), 2);
        })
        .await;
    }
}

// F-098, S-271
#[tokio::test(start_paused = true)]
async fn retried_completion_finds_own_record() {
    for act in [
        Fault::CallLost,
        Fault::ReplyLost,
        Fault::HangCall,
        Fault::HangReply,
    ] {
        within(LONG, async {
            let node = Node::new();
            node.barrier.open_for_good();
            node.store.set_script(move |op, nth| match (op, nth) {
                (Operation::Complete, 1) => act.clone(),
                _ => Fault::None,
            });
            let first = node.response().await;
            assert_eq!(first.status, StatusCode::CREATED);
            assert_eq!((first.text(), first.is_replay()), ("execution 1", false));
            assert_eq!(node.store.calls(Operation::Complete), 2);
            let retry = node.another().response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
            assert_eq!(node.effects.count(), 1);
        })
        .await;
    }
}

// F-092, F-099, S-272
#[tokio::test(start_paused = true)]
async fn response_precedes_record_during_store_failure() {
    for (act, at_most) in [
        (Fault::CallLost, Duration::from_millis(60)),
        (Fault::HangCall, Duration::from_millis(4_010)),
    ] {
        within(LONG, async {
            let node = Node::new();
            let other = node.another();
            node.barrier.open_for_good();
            node.fail(&[Operation::Complete, Operation::Renew], act);
            let started = Instant::now();
            let first = node.response().await;
            assert!(started.elapsed() <= at_most, "{:?}", started.elapsed());
            assert_eq!(first.status, StatusCode::CREATED);
            for _ in 0..8 {
                sleep(Duration::from_secs(1)).await;
                assert_eq!(other.response().await.code(), "in-progress");
            }
            node.recover();
            sleep(Duration::from_secs(3)).await;
            let retry = other.response().await;
            assert!(retry.is_replay());
            assert_eq!((retry.body, node.effects.count()), (first.body, 1));
            assert_eq!(node.layer.in_flight(), 0);
        })
        .await;
    }
}

// F-100, S-268
// The store keeps the lease alive and refuses the record, as a full Redis does.
#[tokio::test(start_paused = true)]
async fn unstorable_record_does_not_hold_key_forever() {
    for ops in [
        &[Operation::Complete][..],
        &[Operation::Complete, Operation::Renew],
    ] {
        within(LONG, async {
            let node = Node::new();
            node.barrier.open_for_good();
            let other = node.another();
            other.barrier.open_for_good();
            node.store.set_script(move |op, _| {
                if ops.contains(&op) {
                    Fault::CallLost
                } else {
                    Fault::None
                }
            });
            assert_eq!(node.response().await.status, StatusCode::CREATED);
            sleep(LEASE / 2).await;
            assert_eq!(other.response().await.code(), "in-progress");
            sleep(LEASE * 2).await;
            assert_eq!(node.layer.in_flight(), 0, "the permit is released");
            let renewals = node.store.calls(Operation::Renew);
            let again = other.response().await;
            assert_eq!(
                (again.status, again.is_replay()),
                (StatusCode::CREATED, false)
            );
            let lease = other.leases.lock().expect("no poison")[0].clone();
            assert!(lease.is_takeover(), "the execution is a takeover");
            sleep(LEASE * 2).await;
            assert_eq!(node.store.calls(Operation::Renew), renewals);
            assert_eq!(node.effects.count(), 2);
        })
        .await;
    }
}

// F-101, S-273
#[tokio::test(start_paused = true)]
async fn failed_release_is_retried_in_background() {
    for (act, seconds) in [(Fault::CallLost, 2), (Fault::HangCall, 4)] {
        within(LONG, async {
            let node = Node::new();
            node.barrier.open_for_good();
            node.answers_with(StatusCode::BAD_GATEWAY);
            node.fail(&[Operation::Release], act);
            let started = Instant::now();
            let failed = node.response().await;
            assert_eq!(
                (failed.status, failed.text()),
                (StatusCode::BAD_GATEWAY, "execution 1")
            );
            assert!(started.elapsed() <= Duration::from_millis(4_010));
            assert_eq!(node.another().response().await.code(), "in-progress");
            node.recover();
            node.answers_with(StatusCode::CREATED);
            sleep(Duration::from_secs(seconds)).await;
            let retry = node.response().await;
            assert_eq!(
                (retry.status, retry.text()),
                (StatusCode::CREATED, "execution 2")
            );
            assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
        })
        .await;
    }
}

// F-101
#[tokio::test(start_paused = true)]
async fn unreleasable_key_is_free_after_lease_expiry() {
    within(LONG, async {
        let node = Node::new();
        node.barrier.open_for_good();
        node.answers_with(StatusCode::BAD_GATEWAY);
        node.fail(&[Operation::Release], Fault::CallLost);
        assert_eq!(node.response().await.status, StatusCode::BAD_GATEWAY);
        sleep(LEASE + Duration::from_secs(2)).await;
        assert_eq!(node.layer.in_flight(), 0);
        node.answers_with(StatusCode::CREATED);
        assert_eq!(node.response().await.text(), "execution 2");
        assert_eq!(node.store.calls(Operation::Renew), 0);
    })
    .await;
}

// F-099, S-269
/// The store fails for longer than the lease lasts. It recovers when no client waits any more, and its entry is
/// unchanged.
#[tokio::test(start_paused = true)]
async fn record_unstored_at_lease_end_is_stored_later() {
    for policy in [OrphanPolicy::TakeOver, OrphanPolicy::Refuse] {
        within(LONG, async {
            let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
                layer.with_orphan_policy(policy)
            });
            let (first, _) = node.start().await;
            node.fail(&[Operation::Renew, Operation::Complete], Fault::CallLost);
            sleep(LEASE * 2).await;
            node.barrier.open_for_good();
            assert_eq!(joined(first).await.text(), "execution 1");
            sleep(Duration::from_secs(1)).await;
            assert_eq!(
                node.layer.in_flight(),
                1,
                "the layer still tries to store it"
            );
            node.recover();
            sleep(Duration::from_secs(2)).await;
            let retry = node.another().response().await;
            assert_eq!((retry.text(), retry.is_replay()), ("execution 1", true));
            assert_eq!((node.effects.count(), node.layer.in_flight()), (1, 0));
        })
        .await;
    }
}

// S-274
#[tokio::test(start_paused = true)]
async fn key_unreleased_at_lease_end_is_released_later() {
    within(LONG, async {
        let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
            layer.with_orphan_policy(OrphanPolicy::Refuse)
        });
        node.answers_with(StatusCode::BAD_GATEWAY);
        let (first, _) = node.start().await;
        node.fail(&[Operation::Renew, Operation::Release], Fault::CallLost);
        sleep(LEASE * 2).await;
        node.barrier.open_for_good();
        assert_eq!(joined(first).await.status, StatusCode::BAD_GATEWAY);
        sleep(Duration::from_secs(1)).await;
        node.recover();
        node.answers_with(StatusCode::CREATED);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(node.response().await.text(), "execution 2");
        assert_eq!((node.effects.count(), node.layer.in_flight()), (2, 0));
    })
    .await;
}

// F-105
#[tokio::test(start_paused = true)]
async fn record_too_large_for_store_follows_setting() {
    within(LONG, async {
        for unrecordable in [Unrecordable::Tombstone, Unrecordable::Release] {
            let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
                layer.with_unrecordable(unrecordable)
            });
            node.barrier.open_for_good();
            node.store.set_script(|op, nth| match (op, nth) {
                (Operation::Complete, 1) => Fault::RecordTooLarge(10),
                _ => Fault::None,
            });
            assert_eq!(node.response().await.text(), "execution 1");
            let retry = node.response().await;
            if unrecordable == Unrecordable::Tombstone {
                assert_eq!(retry.status, StatusCode::CONFLICT);
                assert_eq!(retry.code(), "response-not-retained");
                assert_eq!(node.effects.count(), 1);
            } else {
                assert_eq!(retry.text(), "execution 2");
                assert_eq!(node.effects.count(), 2);
            }
        }
        // Not even the tombstone fits. The key stays in progress until the lease expires, and no retry executes before
        // that.
        let node = Node::new();
        node.barrier.open_for_good();
        node.fail(&[Operation::Complete], Fault::RecordTooLarge(1));
        assert_eq!(node.response().await.text(), "execution 1");
        assert_eq!(node.another().response().await.code(), "in-progress");
        sleep(LEASE * 3).await;
        assert_eq!((node.effects.count(), node.layer.in_flight()), (1, 0));
    })
    .await;
}

// F-105, S-270
/// The store recovers when no client waits any more, and rejects the record for its size only then.
#[tokio::test(start_paused = true)]
async fn late_record_too_large_follows_setting() {
    within(LONG, async {
        for unrecordable in [Unrecordable::Tombstone, Unrecordable::Release] {
            let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
                layer.with_unrecordable(unrecordable)
            });
            node.barrier.open_for_good();
            node.store.set_script(|op, nth| match (op, nth) {
                (Operation::Complete, 1..=3) => Fault::CallLost,
                (Operation::Complete, 4) => Fault::RecordTooLarge(200),
                _ => Fault::None,
            });
            assert_eq!(node.response().await.text(), "execution 1");
            sleep(Duration::from_secs(3)).await;
            assert_eq!(node.layer.in_flight(), 0);
            let retry = node.response().await;
            if unrecordable == Unrecordable::Tombstone {
                assert_eq!(retry.code(), "response-not-retained");
                sleep(LEASE * 2).await;
                assert_eq!(node.response().await.code(), "response-not-retained");
                assert_eq!(node.effects.count(), 1);
            } else {
                assert_eq!(retry.text(), "execution 2");
            }
        }
    })
    .await;
}

// S-920
/// The layer does not record the response in the end. A retry calls the other service with the same key.
#[tokio::test(start_paused = true)]
async fn late_release_keeps_downstream_key() {
    within(LONG, async {
        let store = FaultInjector::new(MemoryStore::new());
        let keys = Arc::new(Mutex::new(Vec::new()));
        let layer = IdempotencyLayer::new(store.clone())
            .with_missing_key(MissingKey::Derive)
            .with_unrecordable(Unrecordable::Release);
        let made = Arc::clone(&keys);
        let (app, _) = tests::app(layer.clone(), move |n, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease");
            made.lock().expect("a lock").push(lease.derive("charge"));
            async move { tests::created(n) }
        });
        store.set_script(|op, nth| match (op, nth) {
            (Operation::Complete, 1..=3) => Fault::CallLost,
            (Operation::Complete, 4) => Fault::RecordTooLarge(200),
            _ => Fault::None,
        });
        let keyless = || {
            let req = Request::post("/orders").header("authorization", "a");
            req.body(Body::from("{}")).expect("a request")
        };
        let first = send(&app, keyless()).await;
        assert_eq!(first.status, StatusCode::CREATED);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(layer.in_flight(), 0);
        assert!(store.calls(Operation::Complete) >= 4);
        let retry = send(&app, keyless()).await;
        assert_eq!(retry.text(), "{\"execution\":2}");
        let keys = keys.lock().expect("a lock");
        assert_eq!(keys[0], keys[1]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn unprotected_execution_only_during_outage() {
    for act in [Fault::CallLost, Fault::ReplyLost] {
        within(LONG, async {
            let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
                layer.with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
            });
            node.barrier.open_for_good();
            node.fail(&[Operation::Acquire], act);
            for n in 1..=3 {
                let response = node.response().await;
                assert_eq!(response.text(), format!("execution {n}"));
                assert!(!response.is_replay());
            }
            assert_eq!(node.store.calls(Operation::Complete), 0);
            assert!(node.leases.lock().expect("no poison").is_empty());
            node.recover();
            sleep(Duration::from_secs(1)).await;
            assert_eq!(node.response().await.text(), "execution 4");
            assert!(node.response().await.is_replay());
            assert_eq!((node.effects.count(), node.layer.in_flight()), (4, 0));
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn maximum_store_timeout_never_expires() {
    bounded(async {
        let node = Node::with_store(&MemoryStore::new(), &Effects::default(), |layer| {
            let layer = layer.with_store_timeout(Duration::MAX);
            layer
                .with_collect_timeout(Duration::MAX)
                .with_body_timeout(Duration::MAX)
        });
        node.barrier.open_for_good();
        assert_eq!(node.response().await.text(), "execution 1");
        assert!(node.response().await.is_replay());
        assert_eq!(node.effects.count(), 1);
    })
    .await;
}
