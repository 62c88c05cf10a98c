//! The batch request: its own key, its response, and its client.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{Extension, Json, Router, body::Body, routing::post};
use bytes::Bytes;
use http::{Request, StatusCode, request};
use http_body::Frame;
use serde_json::json;
use tests::{TestResponse, barrier::Barrier, send};
use tokio::time::{sleep, timeout};
use tower::ServiceExt;
use tower_idempotency::{
    GrpcMethods, IdempotencyLayer, KeyScope, MemoryStore, NeedsAttention, Retention,
    conformance::{Fault, FaultInjector, Operation},
    items::{Item, ItemResult},
    run_once::WorkError,
    testing::Effects,
};

use super::layer;

/// A service whose batches have the items of the body, separated by spaces.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) layer: IdempotencyLayer,
    /// Effects by item, and the executions of the handler as `batch`.
    effects: Effects,
    /// `true` if the first execution of the item `b` fails.
    fails_b: bool,
    barrier: Barrier,
}

impl Service {
    pub(super) fn new(layer: IdempotencyLayer) -> Self {
        Self {
            layer,
            effects: Effects::new(),
            fails_b: false,
            barrier: Barrier::open(),
        }
    }

    pub(super) fn with_failing_b(self) -> Self {
        Self {
            fails_b: true,
            ..self
        }
    }

    pub(super) async fn results(
        &self,
        head: &request::Parts,
        body: &str,
    ) -> Vec<ItemResult<String, &'static str>> {
        self.effects.add("batch");
        let batch = body
            .split(' ')
            .map(|key| Item::new(key, key, key.to_owned()));
        let service = self.clone();
        let work = async move |key: String, _lease| {
            service.barrier.pass().await;
            service.effects.add(&key);
            if service.fails_b && key == "b" && service.effects.count(&key) == 1 {
                return Err(WorkError::Release("try later"));
            }
            Ok(key)
        };
        let items = self.layer.items(head).expect("a principal");
        let results = items.run(batch.collect(), work).await;
        results.expect("results")
    }

    fn router(&self) -> Router {
        let service = self.clone();
        let handler = async move |head: request::Parts, body: String| {
            let results = service.results(&head, &body).await;
            (StatusCode::MULTI_STATUS, body_of(&results))
        };
        Router::new()
            .route("/batch", post(handler))
            .layer(self.layer.clone())
    }
}

pub(super) fn body_of(results: &[ItemResult<String, &'static str>]) -> Json<serde_json::Value> {
    let statuses = results.iter().map(|result| result.status().as_u16());
    Json(json!(statuses.collect::<Vec<_>>()))
}

fn batch(key: Option<&str>, body: &'static str) -> Request<Body> {
    let mut req = Request::post("/batch");
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    req.body(Body::from(body)).expect("a valid request")
}

pub(super) async fn send_batch(
    app: &Router,
    key: Option<&str>,
    body: &'static str,
) -> (TestResponse, String) {
    let response = send(app, batch(key, body)).await;
    let text = response.text().to_owned();
    (response, text)
}

// S-416
#[tokio::test(start_paused = true)]
async fn final_batch_is_replayed_as_whole() {
    let service = Service::new(layer());
    let app = service.router();
    for is_replay in [false, true, true] {
        let (response, body) = send_batch(&app, Some("batch-1"), "a b a").await;
        assert_eq!((response.status.as_u16(), &*body), (207, "[200,200,200]"));
        assert_eq!(response.is_replay(), is_replay);
    }
    service.effects.assert_once(["batch", "a", "b"]);
}

// S-417
#[tokio::test(start_paused = true)]
async fn unfinished_batch_is_not_recorded() {
    let service = Service::new(layer()).with_failing_b();
    let app = service.router();
    let (first, body) = send_batch(&app, Some("batch-1"), "a b c").await;
    assert_eq!((first.status.as_u16(), &*body), (207, "[200,500,200]"));
    let (retry, body) = send_batch(&app, Some("batch-1"), "a b c").await;
    assert_eq!((retry.is_replay(), &*body), (false, "[200,200,200]"));
    let (last, body) = send_batch(&app, Some("batch-1"), "a b c").await;
    assert_eq!((last.is_replay(), &*body), (true, "[200,200,200]"));
    let counts = ["batch", "a", "b", "c"].map(|key| service.effects.count(key));
    assert_eq!(counts, [2, 1, 2, 1]);
}

/// The handler returns the record's retention with each response.
#[tokio::test(start_paused = true)]
async fn retention_does_not_record_unfinished_batch() {
    let service = Service::new(layer()).with_failing_b();
    let handler = {
        let service = service.clone();
        async move |head: request::Parts, body: String| {
            let results = service.results(&head, &body).await;
            let week = Retention::For(Duration::from_secs(604_800));
            (Extension(week), body_of(&results))
        }
    };
    let app = Router::new()
        .route("/batch", post(handler))
        .layer(service.layer.clone());
    let (_, first) = send_batch(&app, Some("batch-1"), "a b").await;
    let (_, retry) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!((&*first, &*retry), ("[200,500]", "[200,200]"));
}

// S-417
/// An outer layer with another key must not record the response either.
#[tokio::test(start_paused = true)]
async fn outer_layer_does_not_record_unfinished_batch() {
    let inner = layer().with_key_from(KeyScope::EachCaller, |_| Some("entity-7".to_owned()));
    let service = Service::new(inner).with_failing_b();
    let app = service.router().layer(layer());
    let (_, first) = send_batch(&app, Some("batch-1"), "a b").await;
    let (retry, body) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!((&*first, &*body), ("[200,500]", "[200,200]"));
    assert!(!retry.is_replay());
    let (last, _) = send_batch(&app, Some("batch-1"), "a b").await;
    assert!(last.is_replay());
}

/// The inner layer records no 503. The outer layer records each status, but not that of an unfinished batch.
#[tokio::test(start_paused = true)]
async fn outer_layer_records_no_error_of_unfinished_batch() {
    let inner = layer().with_key_from(KeyScope::EachCaller, |_| Some("entity-7".to_owned()));
    let service = Service::new(inner).with_failing_b();
    let handler = {
        let service = service.clone();
        async move |head: request::Parts, body: String| {
            let results = service.results(&head, &body).await;
            match service.effects.count("batch") {
                1 => (StatusCode::SERVICE_UNAVAILABLE, body_of(&results)),
                _ => (StatusCode::OK, body_of(&results)),
            }
        }
    };
    let app = Router::new()
        .route("/batch", post(handler))
        .layer(service.layer.clone())
        .layer(layer().with_recorded_statuses(|_| true));
    let (first, _) = send_batch(&app, Some("batch-1"), "a b").await;
    let (retry, body) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!((first.status.as_u16(), retry.status.as_u16()), (503, 200));
    assert_eq!((retry.is_replay(), &*body), (false, "[200,200]"));
}

#[tokio::test(start_paused = true)]
async fn abandoned_batch_is_not_recorded() {
    let service = Service {
        barrier: Barrier::closed(),
        ..Service::new(layer())
    };
    let handler = {
        let service = service.clone();
        async move |head: request::Parts, body: String| {
            // The handler stops to wait, and responds with a status that is recorded.
            let results = service.results(&head, &body);
            match timeout(Duration::from_secs(1), results).await {
                Ok(results) => (StatusCode::OK, body_of(&results)),
                Err(_) => (StatusCode::ACCEPTED, Json(json!("later"))),
            }
        }
    };
    let app = Router::new()
        .route("/batch", post(handler))
        .layer(service.layer.clone());
    let (first, _) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!(first.status, 202);
    service.barrier.open_for_good();
    sleep(Duration::from_secs(1)).await;
    let (retry, body) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!((retry.is_replay(), &*body), (false, "[200,200]"));
    assert_eq!(["a", "b"].map(|key| service.effects.count(key)), [1, 1]);
}

/// An operator must examine the batch: that is recorded, although an item failed.
#[tokio::test(start_paused = true)]
async fn attention_is_recorded_for_unfinished_batch() {
    let service = Service::new(layer()).with_failing_b();
    let handler = {
        let service = service.clone();
        async move |head: request::Parts, body: String| {
            let results = service.results(&head, &body).await;
            let attention = NeedsAttention::new("batch-failed");
            (Extension(attention), body_of(&results))
        }
    };
    let app = Router::new()
        .route("/batch", post(handler))
        .layer(service.layer.clone());
    let (first, _) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!(first.status, 200);
    let (retry, _) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!(
        (retry.status.as_u16(), retry.code()),
        (409, "outcome-unknown".to_owned())
    );
    assert_eq!(service.effects.count("batch"), 1);
}

// S-418
#[tokio::test(start_paused = true)]
async fn batch_with_key_ends_after_disconnect() {
    let service = Service {
        barrier: Barrier::closed(),
        ..Service::new(layer())
    };
    let app = service.router();
    let left = app.clone().oneshot(batch(Some("batch-1"), "a b c"));
    assert!(timeout(Duration::from_secs(1), left).await.is_err());
    service.barrier.open_for_good();
    sleep(Duration::from_secs(1)).await;
    let (retry, body) = send_batch(&app, Some("batch-1"), "a b c").await;
    assert_eq!((retry.is_replay(), &*body), (true, "[200,200,200]"));
    service.effects.assert_once(["batch", "a", "b", "c"]);
}

// S-418
/// Without a key, the disconnect drops the handler, but not the items that run.
#[tokio::test(start_paused = true)]
async fn batch_without_key_ends_only_running_items() {
    let service = Service {
        barrier: Barrier::closed(),
        ..Service::new(layer())
    };
    let app = service.router();
    let left = app.clone().oneshot(batch(None, "a b c"));
    assert!(timeout(Duration::from_secs(1), left).await.is_err());
    service.barrier.open_for_good();
    sleep(Duration::from_secs(1)).await;
    let (_, body) = send_batch(&app, None, "a b c d").await;
    assert_eq!(body, "[200,200,200,200]");
    let counts = ["a", "b", "c", "d"].map(|key| service.effects.count(key));
    assert_eq!(counts, [1; 4]);
}

// S-419
/// Another process takes the request over, and meets the items of the first one.
#[tokio::test(start_paused = true)]
async fn lost_request_lease_repeats_no_item() {
    let store = FaultInjector::new(MemoryStore::new());
    // The first renewal is that of the request.
    store.set_script(|op, nth| match (op, nth) {
        (Operation::Renew, 1) => Fault::LeaseLost,
        _ => Fault::None,
    });
    let one = Service {
        barrier: Barrier::closed(),
        ..Service::new(IdempotencyLayer::new(store.clone()))
    };
    let other = Service {
        layer: IdempotencyLayer::new(store),
        ..one.clone()
    };
    let app = one.router();
    let running = tokio::spawn(async move { send_batch(&app, Some("batch-1"), "a b").await });
    one.barrier.arrival().await;
    one.barrier.arrival().await;
    sleep(Duration::from_secs(20)).await;
    let app = other.router();
    let (_, body) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!(body, "[409,409]", "the items have leases of their own");
    one.barrier.open_for_good();
    let (_, body) = running.await.expect("no panic");
    assert_eq!(body, "[200,200]");
    let (_, body) = send_batch(&app, Some("batch-1"), "a b").await;
    assert_eq!(body, "[200,200]");
    let counts = ["batch", "a", "b"].map(|key| one.effects.count(key));
    assert_eq!(counts[1..], [1, 1]);
    assert!(counts[0] >= 2, "the request was executed again");
}

/// A body whose only frame comes from a future.
struct FutureBody(Option<Pin<Box<dyn Future<Output = Bytes> + Send>>>);

impl http_body::Body for FutureBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(data) = &mut self.0 else {
            return Poll::Ready(None);
        };
        let data = ready!(data.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(Some(Ok(Frame::data(data))))
    }
}

/// The handler responds at once, and its body runs the batch.
#[tokio::test(start_paused = true)]
async fn batch_in_response_body_is_not_recorded_unfinished() {
    let service = Service::new(layer()).with_failing_b();
    let of_handler = service.clone();
    let handler = async move |head: request::Parts, body: String| {
        let run = async move {
            let results = of_handler.results(&head, &body).await;
            let statuses: Vec<_> = results.iter().map(|it| it.status().to_string()).collect();
            Bytes::from(statuses.join(","))
        };
        Body::new(FutureBody(Some(Box::pin(run))))
    };
    let app: Router = Router::new()
        .route("/batch", post(handler))
        .route_layer(service.layer.clone());
    let mut texts = Vec::new();
    for _ in 0..3 {
        texts.push(send(&app, batch(Some("k"), "a b")).await.text().to_owned());
    }
    let first = "200 OK,500 Internal Server Error";
    assert_eq!(texts, [first, "200 OK,200 OK", "200 OK,200 OK"]);
    let effects = &service.effects;
    let counts = ["a", "b", "batch"].map(|name| effects.count(name));
    assert_eq!(counts, [1, 2, 2]);
}

/// A middleware inside of the layer removes a credential. All callers without it would share their items.
#[tokio::test(start_paused = true)]
async fn head_without_principal_of_request_is_rejected() {
    let named = layer().with_key_from(KeyScope::EachCaller, |_| Some("entity-7".to_owned()));
    for layer in [layer(), named] {
        for removed in ["authorization", "x-api-key"] {
            let of_handler = layer.clone();
            let handler = async move |mut head: request::Parts| {
                assert!(of_handler.items(&head).is_ok());
                head.headers.remove(removed);
                let error = of_handler.items(&head).expect_err("another principal");
                error.kind().code()
            };
            let app: Router = Router::new()
                .route("/batch", post(handler))
                .route_layer(layer.clone());
            let mut req = batch(Some(removed), "a");
            for name in ["authorization", "x-api-key"] {
                let alice = "alice".parse().expect("a value");
                req.headers_mut().insert(name, alice);
            }
            assert_eq!(send(&app, req).await.text(), "principal-missing");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn head_of_grpc_call_has_its_principal() {
    let layer = layer().with_grpc(GrpcMethods::all());
    let of_handler = layer.clone();
    let handler = async move |mut head: request::Parts| {
        assert!(of_handler.items(&head).is_ok());
        head.headers.remove("authorization");
        let error = of_handler.items(&head).expect_err("another principal");
        error.kind().code()
    };
    let app: Router = Router::new()
        .route("/payments.v1.Payments/Batch", post(handler))
        .layer(layer);
    let req = Request::post("/payments.v1.Payments/Batch")
        .header("content-type", "application/grpc")
        .header("idempotency-key", "k")
        .header("authorization", "alice");
    let req = req.body(Body::from("\0\0\0\0\0")).expect("a valid request");
    assert_eq!(send(&app, req).await.text(), "principal-missing");
}
