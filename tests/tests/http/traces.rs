//! Traces: the record keeps the `traceparent` of its execution, and replays link to it.

use std::{
    convert::Infallible,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Extension, Router,
    body::Body,
    extract::Request as AxumRequest,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post as route,
};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, StatusCode};
use tests::{
    creating,
    observed::observed,
    post, send,
    wire::{H1, Server},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    ExecutionTrace, IdempotencyLayer, MemoryStore, NeedsAttention,
    conformance::{Fault, FaultInjector},
    store::{Acquired, Store},
};
use tracing::{Dispatch, Instrument, field::Empty, info_span, subscriber::NoSubscriber};
use tracing_subscriber::{fmt::format::FmtSpan, util::SubscriberInitExt};

const FIRST: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const RETRY: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn traced_order(traceparent: &str) -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    let value = traceparent.parse().expect("a header value");
    req.headers_mut().insert("traceparent", value);
    req
}

/// Sends an order with this `traceparent` and a retry with another one. Returns the record of the order, and the trace of
/// the replay.
async fn replay_with_trace(
    sent: &str,
    set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
) -> (Bytes, Option<ExecutionTrace>) {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
    let (app, effects) = creating(set(IdempotencyLayer::new(store.clone())));
    send(&app, traced_order(sent)).await;
    let replay = app.oneshot(traced_order(RETRY)).await.expect("a replay");
    assert_eq!(effects.count(), 1);
    assert_eq!(replay.headers()["idempotent-replayed"], "true");
    for (name, value) in replay.headers() {
        let value = value.to_str().expect("text");
        assert!(name != "traceparent" && !value.contains("4bf92f"), "{name}");
    }
    let claims = store.claims();
    let Ok(Acquired::Completed { record, .. }) = store.inner().acquire(&claims[0]).await else {
        panic!("the entry is completed");
    };
    let trace = replay.extensions().get::<ExecutionTrace>().copied();
    assert_eq!(ExecutionTrace::in_record(&claims[0].id, &record), trace);
    (record, trace)
}

fn contains(record: &[u8], text: &str) -> bool {
    let mut parts = record.windows(text.len());
    parts.any(|part| part == text.as_bytes())
}

// S-965
#[tokio::test(start_paused = true)]
async fn trace_is_not_recorded_by_default() {
    let (record, trace) = replay_with_trace(FIRST, |layer| layer).await;
    assert_eq!(trace, None);
    assert!(!contains(&record, "traceparent") && !contains(&record, "4bf92f"));
}

// S-998
#[tokio::test(start_paused = true)]
async fn replay_links_to_trace_of_execution() {
    for compress_above in [usize::MAX, 0] {
        let (_, trace) = replay_with_trace(FIRST, |layer| {
            layer
                .with_trace_links(true)
                .with_compression_above(compress_above)
        })
        .await;
        let trace = trace.expect("an extension");
        assert_eq!(trace.as_str(), FIRST);
        assert_eq!(trace.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(trace.span_id(), "00f067aa0ba902b7");
    }
    for sent in ["00-hostile", &format!("{FIRST}{}", "f".repeat(4096))] {
        let (record, trace) = replay_with_trace(sent, |layer| layer.with_trace_links(true)).await;
        assert_eq!(trace, None);
        assert!(!contains(&record, "traceparent") && !contains(&record, "hostile"));
    }
}

/// A process without the setting shows no trace, although the record has one.
// S-965
#[tokio::test(start_paused = true)]
async fn layer_without_trace_links_shows_no_trace() {
    let store = MemoryStore::new();
    let (app, _) = creating(IdempotencyLayer::new(store.clone()).with_trace_links(true));
    send(&app, traced_order(FIRST)).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    let replay = app.oneshot(traced_order(RETRY)).await.expect("a replay");
    assert_eq!(effects.count(), 0);
    assert!(replay.extensions().get::<ExecutionTrace>().is_none());
}

// S-999
#[tokio::test(start_paused = true)]
async fn rejection_because_of_record_links_to_trace() {
    const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");
    let attention = || (StatusCode::BAD_GATEWAY, Extension(REFUND_FAILED), "sorry").into_response();
    let too_large = || "x".repeat(100).into_response();
    let handlers: [fn() -> Response; 2] = [attention, too_large];
    for handler in handlers {
        let layer = IdempotencyLayer::new(MemoryStore::new())
            .with_trace_links(true)
            .with_response_limit(64);
        let app = Router::new()
            .route("/orders", route(move || async move { handler() }))
            .route_layer(layer);
        send(&app, traced_order(FIRST)).await;
        let retry = app.oneshot(traced_order(RETRY)).await.expect("a rejection");
        assert_eq!(retry.status(), StatusCode::CONFLICT);
        let trace = retry.extensions().get::<ExecutionTrace>();
        assert_eq!(trace.map(ExecutionTrace::as_str), Some(FIRST));
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The outer layer that a service with OpenTelemetry has: it adds the link to the span of the retry.
async fn add_link(req: AxumRequest, next: Next) -> Response {
    let mut res = next.run(req).await;
    if let Some(trace) = res.extensions().get::<ExecutionTrace>() {
        let link = format!("{}/{}", trace.trace_id(), trace.span_id());
        let link = HeaderValue::from_str(&link).expect("hexadecimal digits");
        res.headers_mut().insert("x-link", link);
    }
    res
}

// S-998
#[tokio::test]
async fn trace_is_linked_over_http() {
    // A second dispatcher: see `tests::observed`.
    let _other = Dispatch::new(NoSubscriber::new());
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let _guard = subscriber.set_default();
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_trace_links(true);
    let (app, effects) = creating(layer);
    let server = Server::start(app.layer(middleware::from_fn(add_link))).await;
    let request = |traceparent: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nhost: localhost\r\nidempotency-key: k\r\n\
             traceparent: {traceparent}\r\ncontent-length: 5\r\n\r\norder"
        )
    };
    let mut client = H1::connect(server.addr()).await;
    client.send(request(FIRST)).await;
    let first = client.response().await.expect("a response");
    assert_eq!(first.header("x-link"), None);
    assert!(!log.text().contains("execution_trace_id"), "{}", log.text());
    client.send(request(RETRY)).await;
    let replay = client.response().await.expect("a replay");
    assert!(replay.is_replay());
    assert_eq!(
        replay.header("x-link"),
        Some("4bf92f3577b34da6a3ce929d0e0e4736/00f067aa0ba902b7")
    );
    assert_eq!(effects.count(), 1);
    let log = log.text();
    let linked: Vec<_> = log
        .lines()
        .filter(|line| line.contains("4bf92f3577b34da6a3ce929d0e0e4736"))
        .collect();
    let of_span = "idempotency{execution_trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"}";
    assert!(linked.iter().any(|line| line.contains(of_span)), "{log}");
    let event = linked.iter().find(|line| line.contains("replayed"));
    assert!(
        event.is_some_and(|line| line.contains("execution_trace_id=\"4bf9")),
        "{log}"
    );
    assert!(!log.contains("0af7651916cd43dd8448eb211c80319c"), "{log}");
    server.shut_down().await;
}

// S-968
#[test]
fn outcome_is_field_of_span_of_caller() {
    // At `debug` the layer has a span of its own inside the span of the caller.
    for level in ["info", "debug"] {
        let (_, log) = observed(level, async {
            let (app, _) = creating(IdempotencyLayer::new(MemoryStore::new()));
            let keyless = Request::post("/orders").body(Body::empty());
            for (expected, req) in [
                ("executed", post("/orders", "k", "order")),
                ("replayed", post("/orders", "k", "order")),
                ("key-reused", post("/orders", "k", "other order")),
                ("malformed-key", post("/orders", "\"", "order")),
                ("none", keyless.expect("a request")),
            ] {
                let span = info_span!("request", expected, idempotency.outcome = Empty);
                send(&app, req).instrument(span).await;
            }
        });
        for outcome in ["executed", "replayed", "key-reused", "malformed-key"] {
            let fields = format!("expected=\"{outcome}\" idempotency.outcome=\"{outcome}\"");
            assert!(log.contains(&fields), "{level}: {log}");
        }
        assert!(log.contains("request{expected=\"none\"}"), "{level}: {log}");
    }
}

/// Some callers enter their span only when they poll the future.
// S-968
#[test]
fn outcome_is_field_of_span_of_poll() {
    async fn created<B>(_: Request<B>) -> Result<Response, Infallible> {
        Ok(StatusCode::CREATED.into_response())
    }
    let (_, log) = observed("info", async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let mut service = layer.layer(service_fn(created));
        for (outcome, key) in [("executed", "k"), ("malformed-key", "\"")] {
            let Ok(service) = service.ready().await;
            let response = service.call(post("/orders", key, "order"));
            let span = info_span!("request", outcome, idempotency.outcome = Empty);
            assert!(response.instrument(span).await.is_ok());
        }
    });
    for outcome in ["executed", "malformed-key"] {
        let fields = format!("outcome=\"{outcome}\" idempotency.outcome=\"{outcome}\"");
        assert!(log.contains(&fields), "{log}");
    }
}

/// The outer layer records the outcome of the inner one.
// S-968
#[test]
fn outcome_of_nested_layer_is_recorded_once() {
    let inner_key = HeaderName::from_static("x-inner-key");
    for level in ["info", "debug"] {
        let (_, log) = observed(level, async {
            let inner = IdempotencyLayer::new(MemoryStore::new());
            let (app, _) = creating(inner.with_header(inner_key.clone()));
            let app = app.layer(IdempotencyLayer::new(MemoryStore::new()));
            for (outcome, key, inner) in [
                ("executed", "a", "b"),
                ("replayed", "a", "b"),
                ("malformed-key", "c", "\""),
            ] {
                let mut req = post("/orders", key, "order");
                let inner = HeaderValue::from_static(inner);
                req.headers_mut().insert(&inner_key, inner);
                let span = info_span!("request", outcome, idempotency.outcome = Empty);
                send(&app, req).instrument(span).await;
            }
        });
        for outcome in ["executed", "replayed", "malformed-key"] {
            let fields = format!("outcome=\"{outcome}\" idempotency.outcome=\"{outcome}\"}}");
            assert!(log.contains(&fields), "{level}: {log}");
        }
    }
}
