//! Events, spans and counters.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use http_body_util::BodyExt;
use metrics_util::{
    CompositeKey,
    debugging::{DebugValue, DebuggingRecorder},
};
use tests::observed::{paused, with_panicking_reports};
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{Budget, Operation, OutboxLayer, Outcome, RetryLayer};
use tracing::Instrument;

use crate::{
    grpc,
    harness::{
        Reply, Server, field, post, record_events, send, send_as, status, take_events,
        take_recorded,
    },
    outbox_memory::Memory,
};

#[tokio::test(start_paused = true)]
async fn events_and_span_have_resend_count() {
    record_events();
    let span = tracing::info_span!("call", http.request.resend_count = tracing::field::Empty);
    let server = Server::new([status(500), Reply::Broken, status(201)]);
    let call = send(&RetryLayer::new(), &server).instrument(span).await;
    let recorded: Vec<_> = take_recorded()
        .into_iter()
        .map(|(_, value)| value)
        .collect();
    assert_eq!(recorded, ["1", "2"]);
    let events = take_events();
    assert_eq!(field(&events, "http.request.resend_count"), ["1", "2"]);
    assert_eq!(field(&events, "cause"), ["transient", "transient"]);
    let text = format!("{events:?}");
    assert!(
        !text.contains(call.operation.key()) && !text.contains("espresso"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn first_attempt_makes_no_event() {
    record_events();
    send(&RetryLayer::new(), &Server::new([status(201)])).await;
    assert!(take_events().is_empty());
}

/// Returns the counters of the client that are not 0 as text, sorted.
fn counters(recorder: &DebuggingRecorder) -> Vec<String> {
    let mut lines = registered_counters(recorder);
    lines.retain(|line| !line.ends_with(" 0"));
    lines
}

/// Returns all registered counters of the client as text, sorted.
fn registered_counters(recorder: &DebuggingRecorder) -> Vec<String> {
    let line = |(key, _, _, value): (CompositeKey, _, _, DebugValue)| {
        let labels: Vec<_> = key
            .key()
            .labels()
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        let DebugValue::Counter(count) = value else {
            panic!("{key:?} is no counter")
        };
        format!("{} {} {count}", key.key().name(), labels.join(","))
    };
    let mut lines: Vec<_> = recorder
        .snapshotter()
        .snapshot()
        .into_vec()
        .into_iter()
        .map(line)
        .collect();
    lines.sort();
    lines
}

#[test]
fn counters_count_requests_retries_and_outcomes() {
    let recorder = DebuggingRecorder::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let layer = RetryLayer::new().with_budget(Budget::new(35));
            let script = [status(201), status(500), status(429), status(201)];
            let server = Server::new(script.into_iter().chain([Reply::Refused]));
            for _ in 0..3 {
                send(&layer, &server).await;
            }
        });
    });
    insta::assert_snapshot!(counters(&recorder).join("\n"), @r"
    idempotency_client_budget_spent_total cause=not_sent 1
    idempotency_client_outcomes_total outcome=definite 2
    idempotency_client_outcomes_total outcome=not_executed 1
    idempotency_client_requests_total  3
    idempotency_client_retries_total cause=not_sent 1
    idempotency_client_retries_total cause=throttled 1
    idempotency_client_retries_total cause=transient 1
    ");
}

/// The outcome of a gRPC call is counted once the caller has read the trailers, or has dropped the response. The recorder
/// counts from 0 after each snapshot.
#[test]
fn grpc_outcome_is_counted_after_trailers() {
    let recorder = DebuggingRecorder::new();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let lines = metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let layer = RetryLayer::new();
            let reply = grpc::Reply::Message(vec![], Some(grpc::status(0)));
            let (server, _) = grpc::server([reply]);
            let client = layer.layer(server);
            let res = client.clone().oneshot(post("one espresso")).await.unwrap();
            let before = counters(&recorder);
            res.into_body().collect().await.unwrap();
            drop(client.oneshot(post("one espresso")).await.unwrap());
            [before, counters(&recorder)].concat()
        })
    });
    insta::assert_snapshot!(lines.join("\n"), @r"
    idempotency_client_requests_total  1
    idempotency_client_outcomes_total outcome=definite 1
    idempotency_client_outcomes_total outcome=unknown 1
    idempotency_client_requests_total  1
    ");
}

#[test]
fn new_layer_registers_counters() {
    let recorder = DebuggingRecorder::new();
    let layer = metrics::with_local_recorder(&recorder, RetryLayer::new);
    insta::assert_snapshot!(registered_counters(&recorder).join("\n"), @r"
    idempotency_client_budget_spent_total cause=in_progress 0
    idempotency_client_budget_spent_total cause=not_sent 0
    idempotency_client_budget_spent_total cause=throttled 0
    idempotency_client_budget_spent_total cause=transient 0
    idempotency_client_outcomes_total outcome=definite 0
    idempotency_client_outcomes_total outcome=not_executed 0
    idempotency_client_outcomes_total outcome=response_lost 0
    idempotency_client_outcomes_total outcome=unknown 0
    idempotency_client_requests_total  0
    idempotency_client_retries_total cause=in_progress 0
    idempotency_client_retries_total cause=not_sent 0
    idempotency_client_retries_total cause=throttled 0
    idempotency_client_retries_total cause=transient 0
    ");
    drop(layer);
}

/// The layer was created before the recorder was installed.
#[test]
fn first_call_registers_counters() {
    let (layer, recorder) = (RetryLayer::new(), DebuggingRecorder::new());
    metrics::with_local_recorder(&recorder, || {
        paused().block_on(async {
            send(&layer, &Server::new([status(201)])).await;
        });
    });
    let registered = registered_counters(&recorder);
    let zero = "idempotency_client_outcomes_total outcome=unknown 0";
    assert!(registered.iter().any(|it| it == zero), "{registered:?}");
}

// F-802
/// The server has executed each request when its response is counted.
#[test]
fn panics_of_reports_lose_no_response() {
    for script in [vec![status(200)], vec![status(503), status(200)]] {
        with_panicking_reports(paused(), async |panics: &AtomicU64| {
            let call = send(&RetryLayer::new(), &Server::new(script)).await;
            assert_eq!(call.status(), Some(200));
            assert_eq!(call.outcome(), Outcome::Definite);
            assert!(panics.load(Ordering::SeqCst) > 0, "no report");
        });
    }
}

// F-802
#[test]
fn panics_of_reports_change_no_failure() {
    with_panicking_reports(paused(), async |_: &AtomicU64| {
        let server = Server::new([status(503)]);
        let without_budget = RetryLayer::new().with_budget(Budget::new(0));
        let call = send(&without_budget, &server).await;
        assert_eq!(call.status(), Some(503));
        let first_sent = SystemTime::now() - Duration::from_secs(25 * 60 * 60);
        let expired = Operation::new().with_first_sent(first_sent);
        let call = send_as(expired, &RetryLayer::new(), &server).await;
        assert!(call.result.unwrap_err().is_expired());
    });
}

// F-802
/// The server has executed the request, and the outbox fails.
#[test]
fn panics_of_reports_lose_no_stored_response() {
    with_panicking_reports(paused(), async |panics: &AtomicU64| {
        let outbox = Arc::new(Memory::default());
        outbox.fail(Some("remove"));
        let layer = OutboxLayer::new(outbox.clone(), RetryLayer::new());
        let client = layer.layer(Server::new([status(200)]));
        let res = client.oneshot(post("one espresso")).await.unwrap();
        assert_eq!(res.status(), 200);
        assert_eq!(outbox.keys().len(), 1);
        // The call, its outcome, and the warning about the entry.
        assert_eq!(panics.load(Ordering::SeqCst), 3);
    });
}

// F-802
/// The outcome of a gRPC call is counted in a drop, also while its task unwinds. A second panic would end the process.
#[test]
fn panics_of_reports_end_no_drop() {
    with_panicking_reports(paused(), async |panics: &AtomicU64| {
        let reply = grpc::Reply::Message(vec![], Some(grpc::status(0)));
        let (server, _) = grpc::server([reply]);
        let client = RetryLayer::new().layer(server);
        let res = client.oneshot(post("one espresso")).await.unwrap();
        let before = panics.load(Ordering::SeqCst);
        let unwound: Result<(), _> = catch_unwind(AssertUnwindSafe(move || {
            let _res = res;
            panic!("the intended panic of the task");
        }));
        assert!(unwound.is_err());
        assert!(panics.load(Ordering::SeqCst) > before, "no report");
    });
}
