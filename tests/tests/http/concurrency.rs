//! Duplicates that arrive while the first request is executed.

use std::sync::atomic::Ordering;

use axum::{Router, body::Body, response::IntoResponse};
use http::{HeaderValue, Request, StatusCode};
use tests::{Effects, Scripted, TestResponse, app, barrier::Barrier, created, post, send};
use tokio::task::JoinHandle;
use tower_idempotency::{
    IdempotencyLayer, KeyReuse, MemoryStore,
    conformance::{FaultInjector, Operation},
};

/// A service whose handlers wait at a barrier.
struct BarrierService {
    app: Router,
    effects: Effects,
    barrier: Barrier,
}

fn serve_behind_barrier(layer: IdempotencyLayer) -> BarrierService {
    let barrier = Barrier::closed();
    let passed = barrier.clone();
    let (app, effects) = app(layer, move |n, _req| {
        let barrier = passed.clone();
        async move {
            barrier.pass().await;
            created(n)
        }
    });
    BarrierService {
        app,
        effects,
        barrier,
    }
}

impl BarrierService {
    /// Sends a request, and returns when its handler is at the barrier.
    async fn start(&self, req: Request<Body>) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        let task = tokio::spawn(async move { send(&app, req).await });
        self.barrier.arrival().await;
        task
    }

    async fn finish(&self, task: JoinHandle<TestResponse>) -> TestResponse {
        self.barrier.release(1);
        task.await.expect("no panic")
    }
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

// S-127
#[tokio::test(start_paused = true)]
async fn separate_request_runs_concurrently() {
    let service = serve_behind_barrier(
        layer()
            .with_key_reuse(KeyReuse::Separate)
            .expect("no status"),
    );
    let first = service.start(order()).await;
    let other = service.start(post("/orders", "k", "another order")).await;
    assert_eq!(service.effects.count(), 2);
    let (first, other) = (service.finish(first).await, service.finish(other).await);
    assert_ne!(first.body, other.body);
}

// F-071, S-128
#[tokio::test(start_paused = true)]
async fn other_caller_runs_concurrently() {
    let service = serve_behind_barrier(layer());
    let by = |token: &'static str| {
        let mut req = order();
        req.headers_mut()
            .insert("authorization", HeaderValue::from_static(token));
        req
    };
    let first = service.start(by("a")).await;
    let other = service.start(by("b")).await;
    assert_eq!(service.effects.count(), 2);
    service.finish(first).await;
    service.finish(other).await;
}

// S-129
// The body is part of the fingerprint, so a mismatch is detected before the duplicate is rejected.
#[tokio::test(start_paused = true)]
async fn duplicate_body_is_read_before_decision() {
    let service = serve_behind_barrier(layer().with_request_limit(8));
    let first = service.start(order()).await;
    let body = Scripted::new(["or", "der"]);
    let taken = body.taken();
    let duplicate = send(&service.app, post("/orders", "k", Body::new(body))).await;
    assert_eq!(duplicate.code(), "in-progress");
    assert_eq!(taken.load(Ordering::SeqCst), 2);
    let larger = send(&service.app, post("/orders", "k", "a larger order")).await;
    assert_eq!(larger.code(), "body-too-large");
    service.finish(first).await;
    assert_eq!(service.effects.count(), 1);
}

// S-130
#[tokio::test(start_paused = true)]
async fn duplicate_during_completion_gets_record() {
    let store = FaultInjector::new(MemoryStore::new());
    let service = serve_behind_barrier(IdempotencyLayer::new(store.clone()));
    let first = service.start(order()).await;
    // The duplicate arrives before the first request has its response, and its body arrives after that. The layer
    // queries the store only then.
    let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
    let late = async_body(receiver);
    let app = service.app.clone();
    let duplicate = tokio::spawn(async move { send(&app, post("/orders", "k", late)).await });
    tokio::task::yield_now().await;
    let first = service.finish(first).await;
    sender.send(()).expect("the receiver waits");
    let duplicate = duplicate.await.expect("no panic");
    assert!(duplicate.is_replay());
    assert_eq!(duplicate.body, first.body);
    assert_eq!(store.calls(Operation::Acquire), 2);
    assert_eq!(service.effects.count(), 1);
}

/// Returns the body `order`, which is sent once the channel receives a message.
fn async_body(signal: tokio::sync::oneshot::Receiver<()>) -> Body {
    struct DelayedBody(Option<tokio::sync::oneshot::Receiver<()>>);
    impl http_body::Body for DelayedBody {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
            let Some(signal) = &mut self.0 else {
                return std::task::Poll::Ready(None);
            };
            let signal = std::pin::Pin::new(signal);
            std::task::ready!(std::future::Future::poll(signal, cx)).expect("a signal");
            self.0 = None;
            let order = bytes::Bytes::from_static(b"order");
            std::task::Poll::Ready(Some(Ok(http_body::Frame::data(order))))
        }
    }
    Body::new(DelayedBody(Some(signal)))
}

// S-131
// With one atomic acquire there is no gap between the query and the read.
#[tokio::test(start_paused = true)]
async fn key_freed_under_duplicate_is_leased_again() {
    let (store, barrier) = (MemoryStore::new(), Barrier::closed());
    let passed = barrier.clone();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), move |n, _req| {
        let barrier = passed.clone();
        async move {
            barrier.pass().await;
            if n == 1 {
                return StatusCode::BAD_GATEWAY.into_response();
            }
            created(n)
        }
    });
    barrier.release(1);
    assert_eq!(send(&app, order()).await.status, StatusCode::BAD_GATEWAY);
    barrier.arrival().await;
    let second = tokio::spawn({
        let app = app.clone();
        async move { send(&app, order()).await }
    });
    barrier.arrival().await;
    assert_eq!(store.len(), 1, "under a lease of its own");
    assert_eq!(send(&app, order()).await.code(), "in-progress");
    barrier.release(1);
    assert_eq!(second.await.expect("no panic").status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
}

// S-132
#[tokio::test(start_paused = true)]
async fn different_keys_run_side_by_side() {
    let service = serve_behind_barrier(layer());
    let mut running = Vec::new();
    for n in 0..32 {
        let req = post("/orders", &format!("k{n}"), "order");
        running.push(service.start(req).await);
    }
    assert_eq!(service.effects.count(), 32, "all of them at once");
    for task in running {
        assert_eq!(service.finish(task).await.status, StatusCode::CREATED);
    }
    assert_eq!(service.effects.count(), 32);
}
