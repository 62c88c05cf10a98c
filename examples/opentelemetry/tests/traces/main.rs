//! The service exports to a collector on loopback, which this test provides.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Bytes, http::Request, routing::post};
use opentelemetry_example::{app, install_metrics, install_traces};
use opentelemetry_proto::tonic::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::any_value::Value,
    trace::v1::{Span, span::SpanKind},
};
use prost::Message;
use tests::{TestResponse, server_process::send_http, wire::Server};
use tokio::task::spawn_blocking;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

const KEY: &str = "key-8e03978e";
/// The traces of the two attempts of the client.
const TRACES: [&str; 2] = [
    "4bf92f3577b34da6a3ce929d0e0e4736",
    "0af7651916cd43dd8448eb211c80319c",
];

/// The bodies that the service has exported.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<Bytes>>>);

impl Collector {
    async fn start(&self) -> Server {
        let received = Arc::clone(&self.0);
        let receive = async move |body: Bytes| received.lock().expect("no panic").push(body);
        Server::start(Router::new().route("/v1/traces", post(receive))).await
    }

    fn bodies(&self) -> Vec<Bytes> {
        self.0.lock().expect("no panic").clone()
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self
            .bodies()
            .into_iter()
            .map(|body| ExportTraceServiceRequest::decode(body).expect("a request of OTLP"));
        let resources = requests.flat_map(|request| request.resource_spans);
        let scopes = resources.flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the only span with this name in a trace.
fn span_of<'a>(spans: &'a [Span], trace: &str, name: &str) -> Option<&'a Span> {
    let mut found = spans
        .iter()
        .filter(|span| hex(&span.trace_id) == trace && span.name == name);
    let span = found.next();
    assert!(found.next().is_none(), "two spans {name} in {trace}");
    span
}

fn attribute(span: &Span, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|it| it.key == name)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        other => Some(format!("{other:?}")),
    }
}

async fn pay(server: &Server, trace: &str) -> TestResponse {
    let req = Request::post(format!("http://{}/payments", server.addr()))
        .header("idempotency-key", KEY)
        .header("authorization", "Bearer secret-of-ada")
        .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
    send_http(req, "7 EUR").await.expect("a response")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_links_to_trace_of_execution() {
    let collector = Collector::default();
    let receiver = collector.start().await;
    let url = format!("http://{}/v1/traces", receiver.addr());
    let traces = spawn_blocking(move || install_traces(&url)).await;
    let traces = traces.expect("no panic").expect("an exporter");
    let metrics = install_metrics().expect("a recorder");
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let server = Server::start(app(layer, metrics)).await;

    let (first, retry) = (pay(&server, TRACES[0]).await, pay(&server, TRACES[1]).await);
    assert_eq!((first.status.as_u16(), retry.status.as_u16()), (201, 201));
    assert_eq!((first.is_replay(), retry.is_replay()), (false, true));
    assert!(
        !retry.headers.contains_key("traceparent"),
        "no trace for clients"
    );
    let flushed = spawn_blocking(move || traces.shutdown_with_timeout(Duration::from_secs(30)));
    flushed
        .await
        .expect("no panic")
        .expect("all spans are exported");

    let spans = collector.spans();
    let server_spans = TRACES.map(|trace| span_of(&spans, trace, "POST /payments"));
    let [execution, replay] = server_spans.map(|span| span.expect("a server span"));
    assert_eq!(replay.kind, SpanKind::Server as i32);
    assert!(execution.links.is_empty());
    let [link] = &replay.links[..] else {
        panic!("expected one link, found {:?}", replay.links);
    };
    assert_eq!(hex(&link.trace_id), TRACES[0]);
    assert_eq!(
        link.span_id, execution.span_id,
        "the span of the server, not of the client"
    );

    for (span, outcome) in [(execution, "executed"), (replay, "replayed")] {
        assert_eq!(
            attribute(span, "idempotency.outcome").as_deref(),
            Some(outcome)
        );
    }
    // The handler ran in the first trace only.
    assert!(span_of(&spans, TRACES[0], "pay").is_some());
    assert!(span_of(&spans, TRACES[1], "pay").is_none());

    let idempotency = span_of(&spans, TRACES[1], "idempotency").expect("the span of the layer");
    assert_eq!(
        attribute(idempotency, "execution_trace_id"),
        Some(TRACES[0].to_owned())
    );
    assert_eq!(idempotency.parent_span_id, replay.span_id);
    let is_replayed = |event: &str| event == "replayed";
    assert!(
        idempotency
            .events
            .iter()
            .any(|event| is_replayed(&event.name))
    );

    let metrics = send_http(
        Request::get(format!("http://{}/metrics", server.addr())),
        "",
    )
    .await;
    let metrics = metrics.expect("a page");
    // Without buckets, the recorder renders a histogram as a summary.
    for line in [
        "idempotency_replayed_total 1",
        "idempotency_handler_seconds_bucket{",
        "idempotency_store_seconds_bucket{",
        "idempotency_record_bytes_bucket{",
    ] {
        assert!(metrics.text().contains(line), "{}", metrics.text());
    }
    for secret in [KEY, "secret-of-ada", "7 EUR"] {
        let is_exported =
            |body: &Bytes| body.windows(secret.len()).any(|it| it == secret.as_bytes());
        assert!(!collector.bodies().iter().any(is_exported), "{secret}");
    }
}
