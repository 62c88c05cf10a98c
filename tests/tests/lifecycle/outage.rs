//! Failures of the store.

use std::{convert::Infallible, ops::RangeInclusive, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Request, StatusCode};
use serde_json::Value;
use tests::{
    Effects, Scripted, Step, TestResponse, app,
    barrier::{Barrier, bounded, eventually},
    created, creating, post, send,
    unreadable_store::UnreadableStore,
};
use tokio::{
    runtime::Handle,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep},
};
use tower_idempotency::{
    ConcurrentRequests, ErrorKind, IdempotencyLayer, MemoryStore, OrphanPolicy, StoreFailure,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
    store::{Acquired, Store},
    transaction::LeaseExt,
};

use crate::panicking_store::PanickingStore;

mod late_queries;

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

fn assert_unavailable(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        response.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(response.header("retry-after"), Some("1"));
    let problem: Value = serde_json::from_slice(&response.body).expect("JSON");
    assert_eq!(problem["code"], "store-unavailable");
    assert_eq!(problem["retryable"], true);
}

// F-090, S-256
#[tokio::test(start_paused = true)]
async fn failed_acquire_executes_nothing() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::CallLost);
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    assert_unavailable(&send(&app, order()).await);
    assert_eq!(effects.count(), 0);
    assert_eq!(store.calls(Operation::Acquire), 3, "three tries");
    let claims = store.claims();
    let token = claims[0].token;
    assert!(claims.iter().all(|claim| claim.token == token), "one token");

    store.clear_faults();
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
    let last = store.claims().pop().expect("a claim");
    assert_ne!(last.token, token, "and another for another request");
}

// S-257
#[tokio::test(start_paused = true)]
async fn acquire_is_tried_three_times() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Acquire, vec![Fault::CallLost; 2]);
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(store.calls(Operation::Acquire), 3);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

/// A store in which acquires with these numbers hang. They take effect after every client has stopped waiting.
struct StalledStore {
    injector: FaultInjector<MemoryStore>,
    /// The numbers of the acquires, counted from 1.
    hanging: RangeInclusive<u64>,
}

impl StalledStore {
    fn new(hanging: RangeInclusive<u64>) -> Self {
        let injector = FaultInjector::new(MemoryStore::new());
        let hangs = hanging.clone();
        injector.set_script(move |op, nth| match op {
            Operation::Acquire if hangs.contains(&nth) => Fault::HangCall,
            _ => Fault::None,
        });
        Self { injector, hanging }
    }

    /// Executes the acquires that hang, which all have one claim, and checks that the lease is granted. Later acquires do
    /// not hang.
    async fn execute_late_acquires(&self) {
        self.injector.set_script(|_, _| Fault::None);
        let mut executed = 0;
        for (claim, nth) in self.injector.claims().iter().zip(1..) {
            if self.hanging.contains(&nth) {
                let acquired = self.injector.inner().acquire(claim).await;
                assert!(matches!(acquired, Ok(Acquired::Granted { .. })));
                executed += 1;
            }
        }
        assert!(executed > 0, "no acquire hangs");
    }

    /// Waits for this number of releases.
    async fn wait_for_releases(&self, number: u64) {
        bounded(async {
            while self.injector.calls(Operation::Release) < number {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }
}

// F-097, S-261
#[tokio::test(start_paused = true)]
async fn lease_granted_after_release_is_released_again() {
    for releases in 1..=4 {
        let store = StalledStore::new(1..=u64::MAX);
        let layer =
            IdempotencyLayer::new(store.injector.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        let (app, effects) = creating(layer.clone());
        assert_unavailable(&send(&app, order()).await);
        store.wait_for_releases(releases).await;
        sleep(Duration::from_millis(1)).await;
        assert_eq!(
            layer.in_flight(),
            0,
            "drain waits for the first release only"
        );
        store.execute_late_acquires().await;
        assert_eq!(send(&app, order()).await.code(), "in-progress");
        store.wait_for_releases(releases + 1).await;
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        assert_eq!(effects.count(), 1);

        sleep(Duration::from_secs(60)).await;
        let all = store.injector.calls(Operation::Release);
        assert!(all <= 6, "{all} releases for one lease");
    }
}

/// Returns a service whose first execution waits at the barrier and releases its key.
fn releasing_first(layer: IdempotencyLayer, barrier: &Barrier) -> (Router, Effects) {
    let barrier = barrier.clone();
    app(layer, move |n, _req| {
        let barrier = barrier.clone();
        async move {
            if n > 1 {
                return created(n);
            }
            barrier.pass().await;
            StatusCode::BAD_GATEWAY.into_response()
        }
    })
}

fn spawn_order(app: &Router) -> JoinHandle<TestResponse> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, order()).await })
}

/// Lets the late acquire of the duplicate take effect, and checks that the lease is released and a retry is executed.
async fn assert_late_lease_is_released(
    store: &StalledStore,
    layer: &IdempotencyLayer,
    (app, effects): &(Router, Effects),
) {
    store.execute_late_acquires().await;
    sleep(Duration::from_secs(5)).await;
    assert!(store.injector.inner().is_empty(), "the lease was released");
    assert_eq!(send(app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
    eventually("nothing is in flight", || layer.in_flight() == 0).await;
}

// S-947, F-928
#[tokio::test(start_paused = true)]
async fn late_acquire_of_refused_duplicate_is_released() {
    for waits in [false, true] {
        let (store, barrier) = (StalledStore::new(2..=2), Barrier::closed());
        let mut layer =
            IdempotencyLayer::new(store.injector.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        if waits {
            layer = layer.with_concurrent_requests(ConcurrentRequests::Wait(MOMENT));
        }
        let service = releasing_first(layer.clone(), &barrier);
        let first = spawn_order(&service.0);
        barrier.arrival().await;
        assert_eq!(send(&service.0, order()).await.code(), "in-progress");
        barrier.open_for_good();
        let first = first.await.expect("no panic");
        assert_eq!(first.status, StatusCode::BAD_GATEWAY);
        assert_late_lease_is_released(&store, &layer, &service).await;
    }
}

// S-947, F-928
#[tokio::test(start_paused = true)]
async fn late_acquire_of_released_execution_is_released() {
    let (store, barrier) = (StalledStore::new(1..=1), Barrier::open());
    let layer =
        IdempotencyLayer::new(store.injector.clone()).with_orphan_policy(OrphanPolicy::Refuse);
    let service = releasing_first(layer.clone(), &barrier);
    let first = send(&service.0, order()).await;
    assert_eq!(first.status, StatusCode::BAD_GATEWAY);
    assert_late_lease_is_released(&store, &layer, &service).await;
}

// S-947, F-946
/// The client of a waiter disconnects while a call of the waiter may still acquire the lease. The waiter releases it.
#[tokio::test(start_paused = true)]
async fn late_acquire_of_dropped_waiter_is_released() {
    let (store, barrier) = (StalledStore::new(2..=2), Barrier::closed());
    let layer = IdempotencyLayer::new(store.injector.clone())
        .with_orphan_policy(OrphanPolicy::Refuse)
        .with_concurrent_requests(ConcurrentRequests::Wait(MOMENT * 10));
    let service = releasing_first(layer.clone(), &barrier);
    let first = spawn_order(&service.0);
    barrier.arrival().await;
    let waiter = spawn_order(&service.0);
    let repeated = || store.injector.calls(Operation::Acquire) > 2;
    eventually("the call of the waiter was repeated", repeated).await;
    sleep(MOMENT / 10).await;
    waiter.abort();
    assert!(waiter.await.is_err(), "the client has left");
    barrier.open_for_good();
    let first = first.await.expect("no panic");
    assert_eq!(first.status, StatusCode::BAD_GATEWAY);
    assert_late_lease_is_released(&store, &layer, &service).await;
}

const MOMENT: Duration = Duration::from_millis(100);

// F-093
#[tokio::test(start_paused = true)]
async fn request_without_key_needs_no_store() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault_for_all(&Fault::HangCall);
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let keyless = Request::post("/orders").body(Body::from("order"));
    let started = Instant::now();
    let response = send(&app, keyless.expect("a request")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert_eq!((effects.count(), store.all_calls()), (1, 0));
}

// F-093, S-081
#[tokio::test(start_paused = true)]
async fn background_release_takes_no_permit() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault_for_all(&Fault::HangCall);
    // One caller can have 10 of 13 requests in flight.
    let layer = IdempotencyLayer::new(store.clone()).with_max_in_flight(13);
    let (app, effects) = creating(layer.clone());
    let mut hanging = JoinSet::new();
    for _ in 0..10 {
        let app = app.clone();
        hanging.spawn(async move { send(&app, order()).await });
    }
    for response in hanging.join_all().await {
        assert_unavailable(&response);
    }
    // Another entry, whose calls do not hang. The releases of the first entry continue to hang.
    for operation in [Operation::Acquire, Operation::Complete] {
        store.enqueue(operation, [Fault::None]);
    }
    let other = send(&app, post("/orders", "another", "order")).await;
    assert_eq!(other.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
    assert_eq!(layer.in_flight(), 10, "drain waits for releases");
    sleep(Duration::from_secs(30)).await;
    assert_eq!(layer.in_flight(), 0);
}

// F-096
/// Each refused request leaves a task that releases the lease that it may have acquired. The number of tasks is
/// limited.
#[tokio::test(start_paused = true)]
async fn background_releases_are_bounded() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone()).with_max_in_flight(10);
    let (app, _) = creating(layer.clone());
    send(&app, order()).await;
    store.set_fault(Operation::Acquire, Fault::ReplyLost);
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for n in 1..=100 {
        let req = post("/orders", &n.to_string(), "order");
        assert_unavailable(&send(&app, req).await);
        sleep(Duration::from_millis(10)).await;
    }
    let now = tasks();
    assert!(now <= before + 12, "{before} tasks, then {now}");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(store.inner().len(), 1, "and all leases are released");
    sleep(Duration::from_secs(30)).await;
    assert_eq!((tasks(), layer.in_flight()), (before, 0));
}

// F-092, S-262
#[tokio::test(start_paused = true)]
async fn hanging_store_costs_bounded_time() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::HangCall);
    let layer = IdempotencyLayer::new(store.clone());
    for (layer, bound) in [
        (layer.clone(), Duration::from_secs(4)),
        (
            layer.with_store_timeout(Duration::from_millis(100)),
            Duration::from_millis(200),
        ),
    ] {
        let (app, effects) = creating(layer);
        let started = Instant::now();
        assert_unavailable(&send(&app, order()).await);
        assert!(started.elapsed() <= bound, "{:?}", started.elapsed());
        assert!(started.elapsed() >= bound / 2, "{:?}", started.elapsed());
        assert_eq!(effects.count(), 0);
    }
}

// F-091, S-263
#[tokio::test(start_paused = true)]
async fn unprotected_execution_is_configurable() {
    for fault in [Fault::CallLost, Fault::HangCall] {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault(Operation::Acquire, fault);
        let layer = IdempotencyLayer::new(store.clone())
            .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
        let (app, effects) = app(layer, async |n, req: Request<Body>| {
            assert!(req.extensions().get::<tower_idempotency::Lease>().is_none());
            let policy = [("x-idempo-policy", "no-store")];
            (policy, created(n)).into_response()
        });
        for n in 1..=2 {
            let response = send(&app, order()).await;
            assert_eq!(response.status, StatusCode::CREATED);
            assert_eq!(response.text(), format!("{{\"execution\":{n}}}"));
            assert_eq!(response.header("x-idempo-policy"), None);
            assert!(!response.is_replay());
        }
        assert_eq!(effects.count(), 2);
    }
}

// S-264
#[tokio::test(start_paused = true)]
async fn unprotected_panic_leaves_no_lease() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Acquire, vec![Fault::ReplyLost; 3]);
    let layer = IdempotencyLayer::new(store.clone())
        .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = app(layer.clone(), async |n, _: Request<Body>| {
        assert_ne!(n, 1, "the intended panic");
        created(n)
    });
    let panicking = app.clone();
    let panicked = tokio::spawn(async move { send(&panicking, order()).await }).await;
    assert!(panicked.expect_err("a panic").is_panic());
    layer.drain(Duration::from_secs(10)).await;
    assert!(store.inner().is_empty());
    assert_eq!(effects.count(), 1);
}

// S-081
#[tokio::test(start_paused = true)]
async fn background_release_buffers_no_bytes() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::ReplyLost);
    store.set_fault(Operation::Release, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone())
        .with_max_in_flight(100)
        .with_max_buffered(100_000, 100_000);
    let (app, _) = creating(layer.clone());
    for n in 1..=20 {
        let req = post("/orders", &n.to_string(), vec![b'x'; 50_000]);
        assert_unavailable(&send(&app, req).await);
        assert!(layer.in_flight() > 0, "a release is in flight");
    }
}

// F-091, S-265
#[tokio::test(start_paused = true)]
async fn unprotected_execution_is_for_outages_only() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone())
        .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = creating(layer);
    send(&app, order()).await;
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(
        send(&app, post("/orders", "k", "other")).await.code(),
        "key-reused"
    );
    assert_eq!(effects.count(), 1);
}

// F-999, S-990
/// The store works, and has an entry of the key. So no setting for its failures executes the request.
#[tokio::test(start_paused = true)]
async fn unreadable_entry_never_executes() {
    for policy in [
        StoreFailure::Refuse,
        StoreFailure::DangerouslyExecuteUnprotected,
    ] {
        let store = UnreadableStore::default();
        let injector = store.0.clone();
        let layer = IdempotencyLayer::new(store).with_store_failure(policy);
        let (app, effects) = creating(layer.clone());
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        for attempts in [1, 1, 2] {
            if attempts == 2 {
                injector.enqueue(Operation::Acquire, [Fault::CallLost]);
            }
            let before = injector.calls(Operation::Acquire);
            let refused = send(&app, order()).await;
            assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(refused.code(), "store-unavailable");
            assert!(!refused.is_retryable());
            assert_eq!(refused.header("retry-after"), None);
            assert_eq!(injector.calls(Operation::Acquire) - before, attempts);
            // Only an attempt without a reply may still acquire the key.
            sleep(Duration::from_secs(1)).await;
            let releases = injector.calls(Operation::Release);
            assert_eq!(releases > 0, attempts == 2, "{releases} releases");
        }
        assert_eq!(effects.count(), 1);

        let work = async |_lease| Ok::<_, WorkError<Infallible>>(7_u32);
        let first = layer.run_once("job", "job", work).await;
        assert_eq!(first.expect("it runs"), Outcome::Executed(7));
        let error = layer.run_once("job", "job", work).await;
        let error = error.expect_err("the entry cannot be read");
        assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        assert!(!error.is_retryable());
    }
}

// F-094, S-275
/// A panic of the store has the same consequences as an error: no second effect, and no blocked key.
#[tokio::test(start_paused = true)]
async fn store_panic_counts_as_failure() {
    for panics in [Operation::Acquire, Operation::Complete, Operation::Release] {
        for times in [1, 3] {
            for takes_effect in [false, true] {
                let store = PanickingStore::new(panics, times, takes_effect);
                let layer = IdempotencyLayer::new(store).with_orphan_policy(OrphanPolicy::Refuse);
                let (app, effects) = app(layer.clone(), move |n, _| async move {
                    if n == 1 && panics == Operation::Release {
                        return StatusCode::BAD_GATEWAY.into_response();
                    }
                    created(n)
                });
                let first = send(&app, order()).await;
                let what = format!("{panics:?} {times} {takes_effect}");
                match (panics, times) {
                    (Operation::Acquire, 3) => assert_unavailable(&first),
                    (Operation::Release, _) => assert_eq!(first.status, StatusCode::BAD_GATEWAY),
                    _ => assert_eq!(first.status, StatusCode::CREATED, "{what}"),
                }
                sleep(Duration::from_secs(20)).await;
                send(&app, order()).await;
                let retry = send(&app, order()).await;
                assert!(retry.is_replay(), "{what}: {retry:?}");
                let expected = if panics == Operation::Release { 2 } else { 1 };
                assert_eq!(effects.count(), expected, "{what}");
                assert_eq!(layer.in_flight(), 0, "{what}");
            }
        }
    }
}

// F-094, S-276
/// A waiter treats a panic of `wait_for_change` like its return, which is only a hint.
#[tokio::test(start_paused = true)]
async fn waiter_survives_panic_in_wait_for_change() {
    for takes_effect in [false, true] {
        let store = PanickingStore::new(Operation::WaitForChange, u64::MAX, takes_effect);
        let inner = store.injector.clone();
        let layer = IdempotencyLayer::new(store)
            .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(20)));
        let (app, effects) = app(layer.clone(), async |n, _| {
            sleep(Duration::from_secs(10)).await;
            created(n)
        });
        let sent = || {
            tokio::spawn({
                let app = app.clone();
                async move { send(&app, order()).await }
            })
        };
        let first = sent();
        sleep(Duration::from_millis(1)).await;
        let waiting: Vec<_> = (0..5).map(|_| sent()).collect();
        assert!(!first.await.expect("no panic").is_replay());
        for waiter in waiting {
            assert!(
                waiter.await.expect("no panic").is_replay(),
                "{takes_effect}"
            );
        }
        // There is a backoff between the calls.
        assert!(
            inner.calls(Operation::Acquire) < 50,
            "{}",
            inner.calls(Operation::Acquire)
        );
        assert_eq!((effects.count(), layer.in_flight()), (1, 0));
    }
}

// F-099, S-267
#[tokio::test(start_paused = true)]
async fn response_is_sent_if_record_is_unstored() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone());
    let (app, effects) = creating(layer.clone());
    let first = send(&app, order()).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(
        store.calls(Operation::Complete) >= 3,
        "the layer tried to store it"
    );
    assert_eq!(send(&app, order()).await.code(), "in-progress");
    sleep(Duration::from_secs(5)).await;
    assert_eq!(send(&app, order()).await.code(), "in-progress");
    assert_eq!(store.calls(Operation::Release), 0, "the key stays held");
    assert_eq!(effects.count(), 1);

    store.clear_faults();
    sleep(Duration::from_secs(2)).await;
    let replay = send(&app, order()).await;
    assert!(replay.is_replay(), "the background task tried to store it");
    assert_eq!(replay.body, first.body);
    assert_eq!(effects.count(), 1);
    assert_eq!(layer.in_flight(), 0);
}

/// The client has read its response, and the layer still holds the record.
#[tokio::test(start_paused = true)]
async fn unstored_record_counts_as_buffered() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone())
        .with_max_buffered(100_000, 100_000)
        .with_compression_above(usize::MAX);
    let (app, effects) = app(layer, async |_, _| {
        Response::new(Body::new(Scripted::new([Step::Data(
            vec![7; 50_000].into(),
        )])))
    });
    let first = send(&app, order()).await;
    assert_eq!(first.body.len(), 50_000);
    drop(first);
    store.clear_faults();
    let post = |key| post("/orders", key, "order");
    assert_eq!(send(&app, post("large")).await.body.len(), 50_000);
    assert_eq!(
        send(&app, post("large")).await.code(),
        "response-not-retained"
    );

    sleep(Duration::from_secs(2)).await;
    assert_eq!(send(&app, post("later")).await.body.len(), 50_000);
    assert!(send(&app, post("later")).await.is_replay());
    assert_eq!(effects.count(), 3);
}

// S-277
#[tokio::test(start_paused = true)]
async fn definite_store_reply_is_not_retried() {
    let store = FaultInjector::new(MemoryStore::new());
    let inner_store = store.clone();
    let (inner, _) = creating(IdempotencyLayer::new(inner_store));
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), move |n, _req| {
        let inner = inner.clone();
        async move {
            // The same request while this one runs.
            let duplicate = send(&inner, order()).await;
            assert_eq!(duplicate.code(), "in-progress");
            created(n)
        }
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(store.calls(Operation::Acquire), 2);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(
        send(&app, post("/orders", "k", "x")).await.code(),
        "key-reused"
    );
    assert_eq!(store.calls(Operation::Acquire), 4);
    assert_eq!(effects.count(), 1);
}

// F-113, S-278
#[tokio::test(start_paused = true)]
async fn full_store_refuses_new_leases() {
    let store = MemoryStore::new().with_max_entries(1);
    let inner = creating(IdempotencyLayer::new(store.clone()));
    let (refusing, refused) = inner;
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), move |n, _req| {
        let refusing = refusing.clone();
        async move {
            let mut refusals = Vec::new();
            for caller in ["one", "two", "three", "four"] {
                let mut req = post("/orders", "k2", "order");
                let credential = HeaderValue::from_static(caller);
                req.headers_mut().insert("authorization", credential);
                refusals.push(send(&refusing, req).await);
            }
            // A caller that shares its group with the lease holder gets 429: one of 1,024.
            let refused = |response: &TestResponse| {
                response.is_retryable() && response.status.as_u16() >= 429
            };
            assert!(refusals.iter().all(refused), "{refusals:?}");
            let mut others = refusals.iter().filter(|response| response.status == 503);
            assert_unavailable(others.next().expect("three of four, at least"));
            created(n)
        }
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((effects.count(), refused.count()), (1, 0));
}

// F-106, S-279
#[tokio::test(start_paused = true)]
async fn record_is_stored_after_store_data_loss() {
    // Releases the lease while the handler runs, as if the store had lost its data.
    let store = FaultInjector::new(MemoryStore::new());
    let injector = store.clone();
    let (app, effects) = app(
        IdempotencyLayer::new(store),
        move |n, req: Request<Body>| {
            let injector = injector.clone();
            async move {
                let lease = req.extensions().get::<tower_idempotency::Lease>();
                let lease = lease.expect("a lease").lease_ref();
                tower_idempotency::Store::release(&injector, &lease)
                    .await
                    .expect("released");
                assert!(injector.inner().is_empty());
                created(n)
            }
        },
    );
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-159
#[tokio::test(start_paused = true)]
async fn lost_lease_without_record_is_outcome_unknown() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::LeaseLost);
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let response = send(&app, order()).await;
    assert_eq!(response.status, StatusCode::CONFLICT);
    assert_eq!(response.code(), "outcome-unknown");
    assert!(
        response.is_retryable(),
        "the lease holder may still respond"
    );
    assert_eq!(response.header("retry-after"), Some("1"));
    assert_eq!(effects.count(), 1);
}
