//! Response futures that are dropped after each possible poll, with a working or a failing store.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Arc, LazyLock},
    task::Poll,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{Request, StatusCode};
use tests::{
    Effects,
    barrier::{Barrier, bounded, eventually},
    bodies::{Piece, pieces},
    read, send,
};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, Lease, MemoryStore,
    conformance::{Fault, FaultInjector, Operation},
    run_once::WorkError,
};
use tracing::{Dispatch, Instrument, Level, subscriber::NoSubscriber};

/// Returns the output of the future. Drops the future if it is still pending after this number of polls.
async fn dropped_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    poll_fn(move |cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// The action of the handler after its effect.
#[derive(Clone, Copy)]
enum HandlerEnd {
    Responds(StatusCode),
    RespondsTooMuch,
    Panics,
}

#[derive(Clone)]
struct World {
    layer: IdempotencyLayer,
    app: Router,
    begun: Effects,
    finished: Effects,
}

impl World {
    /// Creates a handler that yields before and after its effect, and that reads and writes its bodies in pieces.
    fn new(layer: IdempotencyLayer, ending: HandlerEnd) -> Self {
        let (begun, finished) = (Effects::default(), Effects::default());
        let database = (begun.clone(), finished.clone());
        let handler = async move |body: axum::body::Bytes| {
            assert_eq!(body, "one two");
            let (begun, finished) = database;
            tokio::task::yield_now().await;
            let n = begun.happen();
            tokio::task::yield_now().await;
            finished.happen();
            tokio::task::yield_now().await;
            let mut body = format!("execution {n}");
            let status = match ending {
                HandlerEnd::Responds(status) => status,
                HandlerEnd::RespondsTooMuch => {
                    body.push_str(&" and so on".repeat(100));
                    StatusCode::OK
                }
                HandlerEnd::Panics => panic!("the intended panic"),
            };
            let (first, second) = body.split_at(5);
            let [first, second] = [first, second].map(|part| Piece::Data(part.to_owned().into()));
            (status, pieces([first, Piece::Wait, second, Piece::Wait])).into_response()
        };
        Self {
            app: Router::new()
                .route("/", post(handler))
                .route_layer(layer.clone()),
            layer,
            begun,
            finished,
        }
    }

    fn request() -> Request<Body> {
        let data = |data: &'static str| Piece::Data(data.into());
        let body = pieces([data("one "), Piece::Wait, data("two"), Piece::Wait]);
        tests::post("/", "k", body)
    }

    fn call(&self) -> impl Future<Output = Result<Response, Infallible>> + Send + 'static {
        self.app.clone().oneshot(Self::request())
    }

    async fn wait_until_idle(&self) {
        eventually("nothing is in flight", || self.layer.in_flight() == 0).await;
        assert_eq!(
            self.begun.count(),
            self.finished.count(),
            "effects that began and did not finish"
        );
    }

    /// Sends a request after all work has ended, and checks that the key is not blocked.
    async fn retry(&self) -> tests::TestResponse {
        let response = send(&self.app, Self::request()).await;
        self.wait_until_idle().await;
        response
    }
}

/// Drops the request after each number of polls until it completes. Calls `check` after each, and returns the largest
/// number of polls.
async fn at_every_poll<Fut: Future<Output = ()>>(
    world: impl Fn() -> World,
    check: impl Fn(World, Option<tests::TestResponse>) -> Fut,
) -> usize {
    for polls in 0..1_000 {
        let world = world();
        let res = dropped_after(polls, world.call()).await;
        let response = match res {
            Some(res) => Some(read(res.unwrap()).await),
            None => None,
        };
        let ended = response.is_some();
        world.wait_until_idle().await;
        check(world, response).await;
        if ended {
            return polls;
        }
    }
    panic!("the request never completed");
}

/// Asserts at most one effect, whenever the request is dropped. The retries receive the same response as the request,
/// if the request received one.
async fn executes_once_at_every_poll(store: impl Fn() -> FaultInjector<MemoryStore>) {
    let world = || {
        let layer = IdempotencyLayer::new(store());
        World::new(layer, HandlerEnd::Responds(StatusCode::CREATED))
    };
    let polls = at_every_poll(world, async |world, response| {
        assert!(world.begun.count() <= 1);
        let executed = world.begun.count() == 1;
        let retry = world.retry().await;
        assert_eq!(retry.status, StatusCode::CREATED, "{retry:?}");
        assert_eq!(retry.is_replay(), executed);
        assert_eq!(retry.text(), "execution 1");
        let again = world.retry().await;
        assert!(again.is_replay());
        assert_eq!(again.body, retry.body);
        if let Some(response) = response {
            assert!(!response.is_replay());
            assert_eq!(response.body, retry.body);
        }
        assert_eq!(world.begun.count(), 1);
    })
    .await;
    assert!(polls >= 9, "only {polls} polls, fewer than awaits");
}

// F-003, S-143
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_leaves_one_effect_and_response() {
    bounded(executes_once_at_every_poll(|| {
        FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield)
    }))
    .await;
}

// F-005
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_survives_lost_acquire_reply() {
    let store = || {
        FaultInjector::new(MemoryStore::new()).with_script(|op, nth| match (op, nth) {
            (Operation::Acquire, 1) => Fault::ReplyLost,
            _ => Fault::Yield,
        })
    };
    bounded(executes_once_at_every_poll(store)).await;
}

// F-005
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_survives_lost_complete_reply() {
    let store = || {
        FaultInjector::new(MemoryStore::new()).with_script(|op, nth| match (op, nth) {
            (Operation::Complete, 1) => Fault::ReplyLost,
            _ => Fault::Yield,
        })
    };
    bounded(executes_once_at_every_poll(store)).await;
}

#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_survives_background_completion() {
    let store = || {
        FaultInjector::new(MemoryStore::new()).with_script(|op, nth| match (op, nth) {
            (Operation::Complete, 1..=5) => Fault::CallLost,
            _ => Fault::Yield,
        })
    };
    bounded(executes_once_at_every_poll(store)).await;
}

// F-005
// All replies are lost, so no handler runs, and the layer releases the lease that the store may hold.
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_releases_after_unreadable_record() {
    let world = || {
        let store = FaultInjector::new(MemoryStore::new()).with_script(|op, nth| match (op, nth) {
            (Operation::Acquire, 1..=3) | (Operation::Release, 1) => Fault::ReplyLost,
            (Operation::Release, 2..=4) => Fault::CallLost,
            _ => Fault::Yield,
        });
        World::new(
            IdempotencyLayer::new(store),
            HandlerEnd::Responds(StatusCode::CREATED),
        )
    };
    let check = async |world: World, response: Option<tests::TestResponse>| {
        if let Some(response) = response {
            assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
        }
        assert_eq!(world.begun.count(), 0);
        // If the request was dropped before its acquire, the faults are still queued for this one.
        let mut retry = world.retry().await;
        if retry.status == StatusCode::SERVICE_UNAVAILABLE {
            assert_eq!(world.begun.count(), 0);
            retry = world.retry().await;
        }
        assert_eq!(retry.status, StatusCode::CREATED, "{retry:?}");
        assert!(world.retry().await.is_replay());
        assert_eq!(world.begun.count(), 1);
    };
    bounded(at_every_poll(world, check)).await;
}

#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_releases_key_if_not_recorded() {
    for releases_failing in [0, 1, 4] {
        let world = || {
            let store =
                FaultInjector::new(MemoryStore::new()).with_script(move |op, nth| match op {
                    Operation::Release if nth <= releases_failing => Fault::CallLost,
                    _ => Fault::Yield,
                });
            let ending = HandlerEnd::Responds(StatusCode::INTERNAL_SERVER_ERROR);
            World::new(IdempotencyLayer::new(store), ending)
        };
        let check = async |world: World, _| {
            let before = world.begun.count();
            assert!(before <= 1);
            let retry = world.retry().await;
            assert_eq!(retry.status, StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(world.begun.count(), before + 1, "the retry executes");
        };
        bounded(at_every_poll(world, check)).await;
    }
}

// F-089
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_leaves_tombstone_if_too_large() {
    let world = || {
        let layer = IdempotencyLayer::new(
            FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield),
        );
        World::new(layer.with_response_limit(100), HandlerEnd::RespondsTooMuch)
    };
    let check = async |world: World, response: Option<tests::TestResponse>| {
        assert!(world.begun.count() <= 1);
        let executed = world.begun.count() == 1;
        let retry = world.retry().await;
        if executed {
            assert_eq!(retry.status, StatusCode::CONFLICT);
            assert_eq!(retry.code(), "response-not-retained");
        } else {
            assert_eq!(retry.status, StatusCode::OK);
        }
        if let Some(response) = response {
            assert_eq!(response.body.len(), "execution 1".len() + 1_000);
        }
        assert_eq!(world.retry().await.code(), "response-not-retained");
        assert_eq!(world.begun.count(), 1);
    };
    bounded(at_every_poll(world, check)).await;
}

// F-017
#[tokio::test(start_paused = true)]
async fn drop_at_any_poll_releases_key_after_panic() {
    for polls in 0..100 {
        let layer = IdempotencyLayer::new(
            FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield),
        );
        let world = World::new(layer, HandlerEnd::Panics);
        let dropped = tokio::spawn(dropped_after(polls, world.call())).await;
        world.wait_until_idle().await;
        let before = world.begun.count();
        assert!(before <= 1);
        let retry = tokio::spawn(world.call()).await;
        assert!(retry.unwrap_err().is_panic(), "the key is free");
        assert_eq!(world.begun.count(), before + 1);
        if dropped.is_err() {
            assert!(polls >= 9, "only {polls} polls, fewer than awaits");
            return;
        }
    }
    panic!("the handler never panicked");
}

// F-059, S-141
#[tokio::test(start_paused = true)]
async fn dropped_waiter_affects_no_other_request() {
    for owner_fails in [false, true] {
        let (mut polls, mut permits_freed) = (0, 0);
        loop {
            let barrier = Barrier::closed();
            let (effects, database, held) =
                (Effects::default(), Effects::default(), barrier.clone());
            let counted = effects.clone();
            let layer = IdempotencyLayer::new(
                FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield),
            )
            .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(10)))
            .with_max_waiters(1, 1);
            let app = Router::new()
                .route(
                    "/",
                    post(async move || {
                        let call = database.happen();
                        if call == 1 {
                            held.pass().await;
                        }
                        if call == 1 && owner_fails {
                            return (StatusCode::BAD_GATEWAY, String::new());
                        }
                        tokio::task::yield_now().await;
                        (StatusCode::OK, format!("effect {}", counted.happen()))
                    }),
                )
                .route_layer(layer.clone());
            let request = || tests::post("/", "k", "");
            let owner = tokio::spawn({
                let app = app.clone();
                async move { send(&app, request()).await }
            });
            barrier.arrival().await;
            // The first request ends by itself after a while, so that some waiter is polled to its end.
            let opens = barrier.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(200)).await;
                opens.open_for_good();
            });
            let waiter = dropped_after(polls, app.clone().oneshot(request())).await;
            let ended = waiter.is_some();
            let left_at = layer.in_flight();
            if !ended && barrier.arrivals() == 0 && !owner.is_finished() && left_at == 1 {
                // The only permit for waiters is free again.
                let next = tokio::spawn({
                    let app = app.clone();
                    async move { send(&app, request()).await }
                });
                assert_eq!(next.await.unwrap().status, StatusCode::OK);
                permits_freed += 1;
            }
            let first = owner.await.unwrap();
            eventually("nothing is in flight", || layer.in_flight() == 0).await;
            let retry = send(&app, request()).await;
            assert_eq!(retry.text(), "effect 1");
            assert_eq!(effects.count(), 1);
            if owner_fails {
                assert_eq!(first.status, StatusCode::BAD_GATEWAY);
            } else {
                assert_eq!(first.body, retry.body);
            }
            if let Some(waiter) = waiter {
                let waiter = read(waiter.unwrap()).await;
                assert_eq!(waiter.body, retry.body);
            }
            if ended {
                break;
            }
            polls += 1;
        }
        assert!(polls >= 5, "only {polls} polls, fewer than awaits");
        assert!(permits_freed > 0, "no waiter released its permit");
    }
}

// The request body is incomplete, so the handler has not run.
#[tokio::test(start_paused = true)]
async fn drop_during_request_body_executes_nothing() {
    bounded(async {
        for after in 0..3 {
            let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::Yield);
            let world = World::new(
                IdempotencyLayer::new(store.clone()),
                HandlerEnd::Responds(StatusCode::CREATED),
            );
            let data = (0..after).map(|_| Piece::Data("one ".into()));
            let body = pieces(data.chain([Piece::Stall, Piece::Data("two".into())]));
            let req = tests::post("/", "k", body);
            let dropped = dropped_after(1, world.app.clone().oneshot(req)).await;
            assert!(dropped.is_none());
            assert_eq!(
                world.layer.in_flight(),
                0,
                "the request is cancelled at once"
            );
            assert_eq!(store.calls(Operation::Acquire), 0);
            assert_eq!(world.retry().await.text(), "execution 1");
        }
    })
    .await;
}

/// Returns a service whose handler has its effect when the barrier opens.
fn serve_behind_barrier(layer: &IdempotencyLayer, barrier: &Barrier, effects: &Effects) -> Router {
    let (barrier, effects) = (barrier.clone(), effects.clone());
    let handler = async move || {
        barrier.pass().await;
        format!("effect {}", effects.happen())
    };
    Router::new()
        .route("/", post(handler))
        .route_layer(layer.clone())
}

type Boxed = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// Polls the future until its handler is at the barrier, and returns it.
async fn poll_to_barrier(
    future: impl Future<Output = Result<Response, Infallible>> + Send + 'static,
    barrier: &Barrier,
) -> Boxed {
    let mut future: Boxed = Box::pin(future);
    tokio::select! {
        biased;
        _ = &mut future => panic!("the barrier is closed"),
        () = barrier.arrival() => {}
    }
    future
}

// F-003
#[test]
fn future_dropped_outside_runtime_continues() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let effects = Effects::default();
    // The second round uses a new runtime, after the first one has ended.
    for round in 1..=2 {
        let runtime = Runtime::new().unwrap();
        let barrier = Barrier::closed();
        let app = serve_behind_barrier(&layer, &barrier, &effects);
        let request = || tests::post("/", &format!("k{round}"), "");
        let future = runtime.block_on(poll_to_barrier(app.clone().oneshot(request()), &barrier));
        drop(future);
        barrier.open_for_good();
        runtime.block_on(bounded(async {
            eventually("the handler has its effect", || effects.count() == round).await;
            eventually("nothing is in flight", || layer.in_flight() == 0).await;
            assert!(send(&app, request()).await.is_replay());
        }));
        assert_eq!(effects.count(), round);
    }
}

#[test]
fn future_dropped_in_ending_runtime_continues() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let (effects, barrier) = (Effects::default(), Barrier::closed());
    let app = serve_behind_barrier(&layer, &barrier, &effects);
    let request = || tests::post("/", "k", "");
    let runtime = Runtime::new().unwrap();
    let future = runtime.block_on(poll_to_barrier(app.clone().oneshot(request()), &barrier));
    let passing = tokio::runtime::Builder::new_current_thread().build();
    passing.unwrap().block_on(async move { drop(future) });
    barrier.open_for_good();
    runtime.block_on(bounded(async {
        eventually("the handler has its effect", || effects.count() == 1).await;
        eventually("nothing is in flight", || layer.in_flight() == 0).await;
        assert!(send(&app, request()).await.is_replay());
    }));
    assert_eq!(effects.count(), 1);
}

// F-029, S-147
// If a task is aborted or a runtime ends, the lease expires.
#[test]
fn runtime_end_during_handler_leaves_orphan() {
    for dropped_first in [true, false] {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let (effects, barrier) = (Effects::default(), Barrier::closed());
        let app = serve_behind_barrier(&layer, &barrier, &effects);
        let request = || tests::post("/", "k", "");
        let runtime = Runtime::new().unwrap();
        let future = app.clone().oneshot(request());
        if dropped_first {
            let future = runtime.block_on(poll_to_barrier(future, &barrier));
            drop(future);
        } else {
            runtime.spawn(future);
            runtime.block_on(bounded(barrier.arrival()));
        }
        // Waits until its tasks have ended. A task that is left when the barrier opens would run to completion.
        runtime.shutdown_timeout(Duration::from_secs(60));
        barrier.open_for_good();
        assert_eq!(effects.count(), 0);
        let paused = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build();
        paused.unwrap().block_on(bounded(async {
            assert_eq!(send(&app, request()).await.code(), "in-progress");
            // The lease expires: the default is 15 s.
            tokio::time::sleep(Duration::from_secs(16)).await;
            let response = send(&app, request()).await;
            assert_eq!(
                (response.status, response.is_replay()),
                (StatusCode::OK, false)
            );
            assert!(send(&app, request()).await.is_replay());
        }));
        assert_eq!(effects.count(), 1);
    }
}

// F-003
// If the client disconnects, the handler continues under the same lease.
#[tokio::test(start_paused = true)]
async fn lease_is_renewed_after_caller_drops() {
    bounded(async {
        let barrier = Barrier::closed();
        let seen = Arc::new(std::sync::Mutex::new(None));
        let (held, sees) = (barrier.clone(), Arc::clone(&seen));
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let app = Router::new()
            .route(
                "/",
                post(async move |lease: Lease| {
                    held.pass().await;
                    *sees.lock().unwrap() = Some(lease.is_held());
                }),
            )
            .route_layer(layer.clone());
        let call = app.clone().oneshot(tests::post("/", "k", ""));
        drop(poll_to_barrier(call, &barrier).await);
        barrier.open_for_good();
        eventually("nothing is in flight", || layer.in_flight() == 0).await;
        assert_eq!(*seen.lock().unwrap(), Some(true));
    })
    .await;
}

/// Returns the log of a call that runs in a span and continues after its caller has left.
fn log_after_caller_left(level: Level, calls: Calls) -> String {
    // If the program has only one subscriber, a thread without a subscriber that reaches an event first disables the
    // event for all threads. This second one prevents that.
    static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
    LazyLock::force(&ANOTHER);
    let log = Arc::<std::sync::Mutex<Vec<u8>>>::default();
    let writer = Arc::clone(&log);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(move || Shared(Arc::clone(&writer)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    tracing::subscriber::with_default(subscriber.finish(), || {
        runtime.block_on(bounded(async {
            let barrier = Barrier::closed();
            let layer = IdempotencyLayer::new(MemoryStore::new());
            let call = calls(layer.clone(), barrier.clone());
            let call = call.instrument(tracing::info_span!("caller", request = 7));
            drop(poll_to_barrier(call, &barrier).await);
            barrier.open_for_good();
            eventually("nothing is in flight", || layer.in_flight() == 0).await;
        }));
    });
    let said = log.lock().expect("no panic").clone();
    let said = String::from_utf8(said).expect("text");
    let line = said.lines().find(|line| line.contains("it goes on"));
    line.expect("it goes on").to_owned()
}

type Calls = fn(IdempotencyLayer, Barrier) -> Boxed;

fn start_request(layer: IdempotencyLayer, barrier: Barrier) -> Boxed {
    let handler = async move || {
        barrier.pass().await;
        tracing::info!("it goes on");
    };
    let app = Router::new().route("/", post(handler)).route_layer(layer);
    Box::pin(app.oneshot(tests::post("/", "k", "")))
}

fn start_run(layer: IdempotencyLayer, barrier: Barrier) -> Boxed {
    Box::pin(async move {
        let work = async move |_lease: Lease| {
            barrier.pass().await;
            tracing::info!("it goes on");
            Ok::<_, WorkError<()>>(())
        };
        let _ = layer.run_once("k", "", work).await.expect("an outcome");
        Ok(Response::new(Body::empty()))
    })
}

struct Shared(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// F-004
// An operator finds the outcome of a request under the request's span, at any log level of the layer.
#[test]
fn detached_handler_runs_in_span_of_caller() {
    for level in [Level::INFO, Level::DEBUG] {
        for calls in [start_request, start_run] {
            let line = log_after_caller_left(level, calls);
            assert!(line.contains("caller{request=7}"), "{level}: {line}");
        }
    }
}
