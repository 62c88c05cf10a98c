//! The name of a layer: a label of its metrics, and a field of its events and of the caller's span.

use std::{collections::BTreeSet, convert::Infallible, time::Duration};

use axum::{Router, body::Body, routing::post};
use http::{Request, Response, Version};
use metrics::with_local_recorder;
use tests::{
    app, creating, metrics_page,
    observed::{Metrics, observed},
    send,
    wire::{Server, post_h1},
};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    Enforcement, GrpcMethods, IdempotencyLayer, Lease, MemoryStore, TakeOverOutcome,
    conformance::{Fault, FaultInjector, Operation},
    items::Item,
    metrics::register,
    run_once::WorkError,
    store::{Claim, Fingerprint, KeyId},
};
use tracing::{Instrument, field::Empty, info_span};

use crate::{
    observability::{FLOWS, counted, logged, with_named_layers},
    registration::{assert_lists_every_metric, block_on, counted_samples, documented, recorder},
};

/// The metrics of stores, tiers and switches, which several layers may share.
const SHARED: [&str; 4] = [
    "idempotency_enforcement_changed_total",
    "idempotency_memory_evicted_total",
    "idempotency_tier_dropped_total",
    "idempotency_tier_replays_total",
];

fn named(name: &str) -> IdempotencyLayer {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    layer.with_name(name).expect("a valid name")
}

fn order(key: &str) -> Request<Body> {
    tests::post("/", key, "order")
}

const PAY: &str = "/payments.v1.Payments/Pay";
const MESSAGE: &str = "\0\0\0\0\x02\x10\x05";

/// A gRPC call with this number of messages.
fn grpc_call(key: &str, messages: usize) -> Request<Body> {
    let call = Request::post(PAY)
        .version(Version::HTTP_2)
        .header("content-type", "application/grpc")
        .header("idempotency-key", key)
        .body(Body::from(MESSAGE.repeat(messages)));
    call.expect("a valid request")
}

/// Returns the series with the label.
fn with_label(series: &str, name: &str) -> String {
    match series.strip_suffix('}') {
        Some(labels) => format!("{labels},layer={name}}}"),
        None => format!("{series}{{layer={name}}}"),
    }
}

/// Returns the message and the fields of a line, if it is an event of the layer.
fn event_of(line: &str) -> Option<&str> {
    let (_, target) = line.rsplit_once(" tower_idempotency::")?;
    let (_, event) = target.split_once(": ")?;
    let is_of_span = ["new", "enter", "exit"].contains(&event) || event.starts_with("close time.");
    (!is_of_span).then_some(event)
}

fn assert_events_have_name(log: &str, name: &str) {
    let field = format!(" layer=\"{name}\"");
    let events: Vec<_> = log.lines().filter_map(event_of).collect();
    assert!(!events.is_empty(), "nothing was captured");
    for event in events {
        assert!(event.contains(&field), "{event}");
    }
}

fn assert_metrics_have_name(metrics: &Metrics, name: &str) {
    let label = format!("layer={name}}}");
    let others = metrics
        .iter()
        .filter(|(series, value)| **value != 0.0 && !series.ends_with(&label));
    let others: Vec<_> = others.collect();
    assert!(others.is_empty(), "{others:?}");
}

/// Asserts that a scrape has the series of each metric with this name.
fn assert_lists_name(page: &str, name: &str) {
    let listed = metrics_page::parse(page);
    for (metric, expected) in documented() {
        let samples = listed[&metric].samples.iter();
        let found: BTreeSet<_> = samples
            .filter(|sample| sample.label("layer").as_deref() == Some(name))
            .map(|sample| sample.label(&expected.label))
            .collect();
        let expected = if SHARED.contains(&metric.as_str()) {
            BTreeSet::new()
        } else {
            expected.values
        };
        assert_eq!(found, expected, "{metric}");
    }
}

// ---- Labels ----

// S-876
#[test]
fn each_metric_of_named_layer_has_label() {
    for (flow, start) in FLOWS {
        let unnamed = counted(start);
        let expected: BTreeSet<_> = unnamed.keys().map(|it| with_label(it, "orders")).collect();
        let named = with_named_layers("orders", || counted(start));
        // The series without the label stay at 0.
        let found: BTreeSet<_> = named
            .into_iter()
            .filter(|(series, value)| *value != 0.0 || series.contains("layer="))
            .map(|(series, _)| series)
            .collect();
        assert_eq!(found, expected, "{flow}");
    }
}

// S-876
#[test]
fn names_separate_layers_of_one_router() {
    let recorder = recorder();
    with_local_recorder(&recorder, || {
        block_on(async {
            let layer = IdempotencyLayer::new(MemoryStore::new());
            let route = |path: &str, name: &str| {
                let layer = layer.clone().with_name(name).expect("a valid name");
                Router::new()
                    .route(path, post(async || "done"))
                    .route_layer(layer)
            };
            let app = route("/payments", "payments").merge(route("/refunds", "refunds"));
            let server = Server::start(app).await;
            for (path, key) in [("/payments", "a"), ("/payments", "a"), ("/refunds", "b")] {
                let response = post_h1(server.addr(), path, key, "").await;
                assert_eq!(response.status, 200);
            }
            server.shut_down().await;
        });
    });
    let page = recorder.handle().render();
    for line in [
        r#"idempotency_granted_total{layer="payments"} 1"#,
        r#"idempotency_granted_total{layer="refunds"} 1"#,
        "idempotency_granted_total 0",
        r#"idempotency_replayed_total{layer="payments"} 1"#,
        r#"idempotency_replayed_total{layer="refunds"} 0"#,
        r#"idempotency_unsafe_requests_total{coverage="keyed",layer="payments"} 2"#,
        r#"idempotency_in_flight{layer="payments"} 0"#,
        r#"idempotency_handler_seconds_count{layer="payments"} 1"#,
        r#"idempotency_store_seconds_count{operation="acquire",layer="payments"} 2"#,
        r#"idempotency_store_seconds_count{operation="acquire"} 0"#,
        r#"idempotency_record_bytes_count{layer="refunds"} 1"#,
    ] {
        assert!(page.lines().any(|it| it == line), "{line} in {page}");
    }
    metrics_page::check(&page);
}

// S-876
#[test]
fn name_applies_without_requests() {
    let (metrics, log) = observed("trace", async {
        let layer = named("jobs");
        let work = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(1);
        for _ in 0..2 {
            let outcome = layer.run_once("k", "", work).await;
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        let head = Request::post("/batch").header("authorization", "Bearer 1");
        let (head, ()) = head.body(()).expect("a valid request").into_parts();
        let pay = async |cents: u8, _lease: Lease| Ok::<_, WorkError<Infallible>>(cents);
        let items = layer.items(&head).expect("a principal");
        let results = items.run(vec![Item::new("a", "pay", 7)], pay).await;
        assert_eq!(results.expect("a small batch").len(), 1);
        let (id, fingerprint) = ([1; 32], [2; 32]);
        let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
        let again = async |_lease: Lease| Ok::<_, Infallible>(Response::new(Body::empty()));
        let outcome = layer.take_over(claim.expect("a token"), again).await;
        assert!(matches!(outcome, Ok(TakeOverOutcome::NoOrphan)));
    });
    assert_metrics_have_name(&metrics, "jobs");
    assert_events_have_name(&log, "jobs");
    for (series, count) in [
        ("idempotency_granted_total", 2.0),
        ("idempotency_replayed_total", 1.0),
        ("idempotency_handler_seconds", 2.0),
        ("idempotency_store_seconds{operation=acquire}", 4.0),
        ("idempotency_store_seconds{operation=release}", 1.0),
    ] {
        assert_eq!(metrics[&with_label(series, "jobs")], count, "{series}");
    }
}

// S-876
#[test]
fn name_applies_to_grpc_calls() {
    let (metrics, log) = observed("trace", async {
        let methods = GrpcMethods::only([PAY]).expect("a valid path");
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
        let (app, effects) = creating(layer.with_name("grpc").expect("a valid name"));
        for (key, messages) in [("a", 2), ("b", 1)] {
            send(&app, grpc_call(key, messages)).await;
        }
        assert_eq!(effects.count(), 1);
    });
    assert_metrics_have_name(&metrics, "grpc");
    assert_events_have_name(&log, "grpc");
    for series in [
        "idempotency_grpc_streams_total{side=request}",
        "idempotency_refused_total{code=not-unary}",
        "idempotency_granted_total",
    ] {
        assert_eq!(metrics[&with_label(series, "grpc")], 1.0, "{series}");
    }
}

// ---- Values from the start ----

// S-871, S-876
#[test]
fn scrape_before_first_request_lists_names() {
    let recorder = recorder();
    let layers = with_local_recorder(&recorder, || {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let named = |name| layer.clone().with_name(name).expect("a valid name");
        [named("payments"), named("refunds")]
    });
    let page = recorder.handle().render();
    assert_lists_every_metric(&page);
    assert_lists_name(&page, "payments");
    assert_lists_name(&page, "refunds");
    assert_eq!(counted_samples(&page), [""; 0], "{page}");
    metrics_page::check(&page);
    drop(layers);
}

// S-871, S-876
/// The recorder is installed after the layer was created, and before the first request.
#[test]
fn first_request_registers_name() {
    for enforcement in [Enforcement::Enforce, Enforcement::Observe, Enforcement::Off] {
        let (layer, recorder) = (named("late").with_enforcement(enforcement), recorder());
        with_local_recorder(&recorder, || {
            let (app, _) = creating(layer);
            block_on(async { drop(send(&app, order("k")).await) });
        });
        let page = recorder.handle().render();
        assert_lists_every_metric(&page);
        assert_lists_name(&page, "late");
    }
}

// S-871, S-876
#[test]
fn register_lists_names_of_all_layers() {
    let (layer, dropped) = (named("kept"), named("dropped"));
    drop(dropped);
    let recorder = recorder();
    with_local_recorder(&recorder, register);
    let page = recorder.handle().render();
    assert_lists_name(&page, "kept");
    assert!(!page.contains("layer=\"dropped\""), "{page}");
    drop(layer);
}

// ---- Events and spans ----

// S-877
#[test]
fn each_event_of_named_layer_has_field() {
    for (flow, start) in FLOWS {
        let log = with_named_layers("orders", || logged(start));
        assert_events_have_name(&log, "orders");
        // At this level the layer has a span of its own.
        let rest = log.replace("idempotency{layer=\"orders\"", "");
        let without_name = ["idempotency{", " idempotency: ", ":idempotency: "];
        let has_unnamed_span = without_name.iter().any(|text| rest.contains(text));
        assert!(!has_unnamed_span, "{flow}: {log}");
    }
}

// S-874, S-877
/// Three leases of each layer are lost in one moment.
#[test]
fn each_name_has_its_own_warnings() {
    let (_, log) = observed("warn", async {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault(Operation::Renew, Fault::LeaseLost);
        let layer = IdempotencyLayer::new(store);
        let mut requests = JoinSet::new();
        for name in ["payments", "refunds"] {
            let layer = layer.clone().with_name(name).expect("a valid name");
            let (app, _) = app(layer, async |_, _| sleep(Duration::from_secs(6)).await);
            for n in 0..3 {
                let (app, request) = (app.clone(), order(&format!("{name}-{n}")));
                requests.spawn(async move { drop(send(&app, request).await) });
            }
        }
        requests.join_all().await;
        // Only the renewer knows the names now, and reports the last events.
        sleep(Duration::from_secs(20)).await;
        drop(layer);
    });
    for name in ["payments", "refunds"] {
        let field = format!(" layer=\"{name}\"");
        let mut lines: Vec<_> = log.lines().filter(|it| it.contains(&field)).collect();
        lines.retain(|line| line.contains("lease lost while the handler was running"));
        let [error, rest] = lines[..] else {
            panic!("{log}");
        };
        assert!(
            error.contains(" ERROR ") && error.ends_with(" count=1"),
            "{error}"
        );
        assert!(rest.contains("earlier event occurred again"), "{rest}");
        assert!(rest.ends_with(" count=2"), "{rest}");
    }
}

// F-883, S-877
/// A clone of the methods shares no state with the others.
#[test]
fn each_layer_warns_about_grpc_streams() {
    let (_, log) = observed("warn", async {
        let methods = GrpcMethods::only([PAY]).expect("a valid path");
        let unnamed = || IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods.clone());
        let layer = unnamed();
        let clone = layer.clone().with_name("clone").expect("a valid name");
        let (a, b) = (named("a"), named("b"));
        let (a, b) = (a.with_grpc(methods.clone()), b.with_grpc(methods.clone()));
        for (n, layer) in [layer, unnamed(), clone, a, b].into_iter().enumerate() {
            let (app, effects) = app(layer, async |_, _| MESSAGE.repeat(2));
            for key in [format!("{n}-first"), format!("{n}-second")] {
                send(&app, grpc_call(&key, 2)).await;
                send(&app, grpc_call(&key, 1)).await;
            }
            assert_eq!(effects.count(), 2);
        }
    });
    let event = "the method is a stream, or the client is faulty ";
    let mut fields: Vec<_> = log
        .lines()
        .filter_map(|line| Some(line.split_once(event)?.1))
        .collect();
    fields.sort_unstable();
    let expected = [
        r#"layer="a" side="request""#,
        r#"layer="a" side="response""#,
        r#"layer="b" side="request""#,
        r#"layer="b" side="response""#,
        r#"layer="clone" side="request""#,
        r#"layer="clone" side="response""#,
        r#"side="request""#,
        r#"side="request""#,
        r#"side="response""#,
        r#"side="response""#,
    ];
    assert_eq!(fields, expected, "{log}");
}

// S-877, S-968
#[test]
fn span_of_caller_gets_name() {
    let (_, log) = observed("info", async {
        let (app, _) = creating(named("payments"));
        for key in ["k", "k", "\""] {
            let span = info_span!(
                "request",
                idempotency.outcome = Empty,
                idempotency.layer = Empty
            );
            send(&app, order(key)).instrument(span).await;
        }
        let (unnamed, _) = creating(IdempotencyLayer::new(MemoryStore::new()));
        let span = info_span!("unnamed", idempotency.layer = Empty);
        send(&unnamed, order("k")).instrument(span).await;
    });
    for outcome in ["executed", "replayed", "malformed-key"] {
        let fields =
            format!("request{{idempotency.outcome=\"{outcome}\" idempotency.layer=\"payments\"}}");
        assert!(log.contains(&fields), "{outcome}: {log}");
    }
    assert!(!log.contains("unnamed{idempotency"), "{log}");
}
