//! Metrics that a scrape lists before the first request.

use std::collections::{BTreeMap, BTreeSet};

use axum::{Router, routing::post};
use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
    with_local_recorder,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tests::{
    metrics_page,
    observed::{Metrics, total},
    send,
};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    metrics::{RECORD_BYTES_BUCKETS, SECONDS_BUCKETS, register},
};

use crate::observability::{FLOWS, counted};

pub(crate) fn recorder() -> PrometheusRecorder {
    let seconds = Matcher::Suffix("_seconds".to_owned());
    let bytes = Matcher::Suffix("_bytes".to_owned());
    PrometheusBuilder::new()
        .set_buckets_for_metric(seconds, SECONDS_BUCKETS)
        .and_then(|builder| builder.set_buckets_for_metric(bytes, RECORD_BYTES_BUCKETS))
        .expect("buckets")
        .build_recorder()
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn app(layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/", post(async || "paid"))
        .route_layer(layer)
}

pub(crate) fn block_on(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(future);
}

/// Returns the metrics and label values that the documents list for the main crate.
pub(crate) fn documented() -> BTreeMap<String, metrics_page::Documented> {
    let mut documented = metrics_page::documented();
    // The store for Redis sets its gauge when it connects. Clients and the proxy are other processes.
    documented.remove("idempotency_redis_evicting");
    documented.retain(|name, _| !["client_", "proxy_"].iter().any(|part| name.contains(part)));
    documented
}

pub(crate) fn assert_lists_every_metric(page: &str) {
    let listed = metrics_page::parse(page);
    let names: BTreeSet<_> = listed.keys().collect();
    let documented = documented();
    assert_eq!(names, documented.keys().collect(), "{page}");
    for (name, expected) in &documented {
        let found = &listed[name];
        assert_eq!(found.kind, expected.kind, "{name}");
        assert!(!found.help.is_empty(), "{name}");
        let values: BTreeSet<_> = found
            .samples
            .iter()
            .map(|it| it.label(&expected.label))
            .collect();
        assert_eq!(values, expected.values, "{name}");
    }
}

/// Returns the samples that are not 0.
pub(crate) fn counted_samples(page: &str) -> Vec<String> {
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    let counted = samples.filter(|line| !line.is_empty() && !line.ends_with(" 0"));
    counted.map(str::to_owned).collect()
}

// F-871, S-871
#[test]
fn scrape_before_first_request_lists_every_metric() {
    let recorder = recorder();
    let layer = with_local_recorder(&recorder, layer);
    let page = recorder.handle().render();
    assert_lists_every_metric(&page);
    assert_eq!(counted_samples(&page), [""; 0], "{page}");
    drop(layer);
}

// S-871
/// The recorder is installed after the layer was created, and before the first request.
#[test]
fn first_request_registers_every_metric() {
    let (layer, recorder) = (layer(), recorder());
    with_local_recorder(&recorder, || {
        assert_eq!(recorder.handle().render(), "");
        let response = async { drop(send(&app(layer), tests::post("/", "k", "")).await) };
        block_on(response);
    });
    let page = recorder.handle().render();
    assert_lists_every_metric(&page);
    assert!(page.contains("\nidempotency_granted_total 1\n"), "{page}");
}

// S-871
#[test]
fn first_run_once_registers_every_metric() {
    let (layer, recorder) = (layer(), recorder());
    with_local_recorder(&recorder, || {
        block_on(async {
            let work = async |_lease| Ok::<_, tower_idempotency::run_once::WorkError<()>>(());
            let outcome = layer.run_once("k", "", work).await;
            assert!(outcome.is_ok(), "{outcome:?}");
        });
    });
    assert_lists_every_metric(&recorder.handle().render());
}

// S-871
#[test]
fn register_keeps_values() {
    let recorder = recorder();
    with_local_recorder(&recorder, || {
        register();
        assert_lists_every_metric(&recorder.handle().render());
        metrics::counter!("idempotency_lease_lost_total").increment(3);
        metrics::gauge!("idempotency_in_flight").set(2.0);
        metrics::histogram!("idempotency_record_bytes").record(100.0);
        register();
        drop(layer());
    });
    let page = recorder.handle().render();
    for line in [
        "idempotency_lease_lost_total 3",
        "idempotency_in_flight 2",
        "idempotency_record_bytes_count 1",
    ] {
        assert!(page.lines().any(|it| it == line), "{line} in {page}");
    }
}

// S-871
/// Every counter that a request can change is present at 0 before. Codes of `NeedsAttention` are exceptions, because
/// they come from handlers.
#[test]
fn every_counted_label_value_was_registered() {
    let recorder = recorder();
    let layer = with_local_recorder(&recorder, layer);
    let listed = metrics_page::parse(&recorder.handle().render());
    drop(layer);
    let mut series = BTreeSet::new();
    for (name, metric) in &listed {
        for sample in &metric.samples {
            series.insert(sample.series(name));
        }
    }
    let open = [
        "idempotency_needs_attention_total{",
        "idempotency_unresolved_total{",
    ];
    for (flow, start) in FLOWS {
        for name in counted(start).keys() {
            let is_open = open.iter().any(|open| name.starts_with(open));
            assert!(is_open || series.contains(name), "{flow}: {name}");
        }
    }
}

// S-873
/// The alert `IdempotencyOutcomeMissing` subtracts the counted outcomes from the executions that began.
#[test]
fn every_execution_is_counted_with_its_outcome() {
    for (flow, start) in FLOWS {
        let counted = counted(start);
        let (began, ended) = (sum(&counted, &["granted_total"]), sum(&counted, &OUTCOMES));
        let missing = match flow {
            // The process of the first execution has died.
            "orphan refused" | "takeover" => 1.0,
            // The store does not report if the handler's commit arrived.
            "commit cut off by a panic" => 1.0,
            _ => 0.0,
        };
        assert_eq!(began - ended, missing, "{flow} {counted:?}");
    }
}

/// The counters that `ops/prometheus/rules.yml` subtracts.
const OUTCOMES: [&str; 6] = [
    "record_bytes",
    "released_total",
    "failed_total",
    "held_total",
    "unrecorded_total",
    "lease_lost_total",
];

fn sum(counted: &Metrics, names: &[&str]) -> f64 {
    let totals = names.iter();
    totals
        .map(|name| total(counted, &format!("idempotency_{name}")))
        .sum()
}

// ---- Cost ----

/// Counts the metrics that are looked up.
#[derive(Default)]
struct Lookups(std::sync::atomic::AtomicUsize);

impl Lookups {
    fn add(&self) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn take(&self) -> usize {
        self.0.swap(0, std::sync::atomic::Ordering::Relaxed)
    }
}

impl Recorder for Lookups {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        self.add();
    }

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        self.add();
    }

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {
        self.add();
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        self.add();
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        self.add();
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        self.add();
        Histogram::noop()
    }
}

// S-872
/// Only the first request registers. Each further request looks up the metrics that it changes and no others.
#[test]
fn later_requests_look_up_only_their_metrics() {
    let lookups = Lookups::default();
    with_local_recorder(&lookups, || {
        block_on(async {
            let app = app(layer());
            assert!(lookups.take() > 60, "the layer registers");
            send(&app, tests::post("/", "first", "")).await;
            assert!(lookups.take() > 60, "the first request registers");
            for key in ["second", "third"] {
                send(&app, tests::post("/", key, "")).await;
                // Two lookups for requests in flight, one for the grant and two for store calls. Two more are for handler
                // and record, and one each for the anonymous caller and the coverage.
                assert_eq!(lookups.take(), 9, "{key}");
            }
            send(&app, tests::post("/", "third", "")).await;
            // Two lookups for requests in flight, and one each for the acquire, the replay, the anonymous caller and the
            // coverage.
            assert_eq!(lookups.take(), 6);
        });
    });
}
