//! Names, units and labels of the metrics, through the [`metrics`](https://docs.rs/metrics) facade.
//!
//! `docs/operations/metrics-and-alarms.md` explains each metric, and `ops/` contains alert rules for Prometheus and a
//! dashboard for Grafana.
//!
//! # Values from the start
//!
//! `increase()` of Prometheus needs a sample from before the first event. A layer therefore [registers](register) every
//! counter with value 0 and all values of its label:
//!
//! - when it is created, for a recorder that is installed before;
//! - at its first request, for a recorder that is installed later. The events of that request may then be invisible to
//!   `increase()`. Call [`register`] after you install the recorder to avoid this.
//!
//! The codes of [`NeedsAttention`](crate::NeedsAttention) come from handlers and are not known at the start. The two
//! counters that have them are registered without a label.
//!
//! A recorder must not remove idle metrics, as `metrics-exporter-prometheus` does with an `idle_timeout`.
//!
//! # Names of layers
//!
//! A service with several layers can give each a name with [`with_name`](crate::IdempotencyLayer::with_name). All metrics of
//! such a layer have the label `layer` with its name, also those from the start. The series without the label stay at 0 if
//! each layer has a name.
//!
//! Several layers may share a store, a tier or a switch. Their metrics never have the label:
//! `idempotency_memory_evicted_total`, `idempotency_tier_replays_total`, `idempotency_tier_dropped_total`,
//! `idempotency_enforcement_changed_total`, and those of other crates, such as `idempotency_redis_evicting`.
//!
//! # Buckets
//!
//! `metrics-exporter-prometheus` renders a histogram as a summary, unless its buckets are set. Summaries of several
//! processes cannot be added up, and the dashboard shows no times then.
//!
//! ```
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//! use tower_idempotency::{
//!     IdempotencyLayer, MemoryStore,
//!     metrics::{RECORD_BYTES_BUCKETS, SECONDS_BUCKETS},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let recorder = PrometheusBuilder::new()
//!     .set_buckets_for_metric(Matcher::Full("idempotency_handler_seconds".into()), SECONDS_BUCKETS)?
//!     .set_buckets_for_metric(Matcher::Full("idempotency_store_seconds".into()), SECONDS_BUCKETS)?
//!     .set_buckets_for_metric(Matcher::Full("idempotency_record_bytes".into()), RECORD_BYTES_BUCKETS)?
//!     .install_recorder()?;
//! let layer = IdempotencyLayer::new(MemoryStore::new());
//!
//! let page = recorder.render();
//! assert!(page.contains("idempotency_lease_lost_total 0"));
//! assert!(page.contains(r#"idempotency_store_seconds_bucket{operation="acquire",le="0.001"} 0"#));
//! # drop(layer);
//! # Ok(())
//! # }
//! ```

use ::metrics::Unit;

mod keys;

pub(crate) use self::keys::LayerKeys;

/// Bounds of buckets for `idempotency_handler_seconds` and `idempotency_store_seconds`, in seconds: 0.5 ms to 60 s.
///
/// A call of a store on the same network takes about 1 ms, and the default timeout of a store call is 2 s. A quantile beyond
/// the last bound is reported as the last bound, so add larger ones for handlers that take minutes.
pub const SECONDS_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
    60.0,
];

/// Bounds of buckets for `idempotency_record_bytes`, in bytes: 256 B to 4 MiB, each four times the one before.
///
/// The default limit of a recorded response body is 4 MiB. DynamoDB stores items of at most 400 KiB.
pub const RECORD_BYTES_BUCKETS: &[f64] = &[
    256.0,
    1_024.0,
    4_096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
];

/// Kind and unit of a metric.
#[derive(Clone, Copy)]
enum MetricKind {
    Counter,
    Gauge,
    Seconds,
    Bytes,
}

/// A metric, its label, and the values of the label.
struct Metric {
    kind: MetricKind,
    name: &'static str,
    help: &'static str,
    /// Empty if the metric has no label.
    label: &'static str,
    /// Empty if the metric has no label, or if handlers choose its values.
    values: &'static [&'static str],
    /// `false` if a store or a switch counts it, which several layers may share.
    is_of_layer: bool,
}

impl Metric {
    const fn new(kind: MetricKind, name: &'static str, help: &'static str) -> Self {
        Self {
            kind,
            name,
            help,
            label: "",
            values: &[],
            is_of_layer: true,
        }
    }

    const fn counter(name: &'static str, help: &'static str) -> Self {
        Self::new(MetricKind::Counter, name, help)
    }

    const fn by(self, label: &'static str, values: &'static [&'static str]) -> Self {
        Self {
            label,
            values,
            ..self
        }
    }

    /// Marks a metric that never has the name of a layer.
    const fn without_layer(self) -> Self {
        Self {
            is_of_layer: false,
            ..self
        }
    }

    fn describe(&self) {
        let (name, help) = (self.name, self.help);
        match self.kind {
            MetricKind::Counter => ::metrics::describe_counter!(name, Unit::Count, help),
            MetricKind::Gauge => ::metrics::describe_gauge!(name, Unit::Count, help),
            MetricKind::Seconds => ::metrics::describe_histogram!(name, Unit::Seconds, help),
            MetricKind::Bytes => ::metrics::describe_histogram!(name, Unit::Bytes, help),
        }
    }

    /// Registers the metric, with one label if `value` is given. Does not change an existing value.
    fn register(&self, value: Option<&'static str>) {
        let labels: Vec<_> = value.map(|value| (self.label, value)).into_iter().collect();
        match self.kind {
            MetricKind::Counter => ::metrics::counter!(self.name, &labels).increment(0),
            MetricKind::Gauge => ::metrics::gauge!(self.name, &labels).increment(0.0),
            // A histogram has no neutral sample. Its registration is enough for the exporter of Prometheus.
            MetricKind::Seconds | MetricKind::Bytes => {
                drop(::metrics::histogram!(self.name, &labels));
            }
        }
    }
}

/// Calls of a store.
const OPERATIONS: &[&str] = &["acquire", "renew", "complete", "release"];

// `scripts/check-ops` reads this table.
const METRICS: &[Metric] = &[
    Metric::counter(
        "idempotency_granted_total",
        "Leases granted, including takeovers. Each is an execution.",
    ),
    Metric::counter("idempotency_replayed_total", "Responses from a record."),
    Metric::counter(
        "idempotency_in_progress_total",
        "Duplicates that found the first request in progress.",
    ),
    Metric::counter(
        "idempotency_waiting_total",
        "Duplicates that began to wait for the first request.",
    ),
    Metric::counter(
        "idempotency_mismatch_total",
        "Requests whose key was used with another request.",
    ),
    Metric::counter(
        "idempotency_refused_total",
        "Requests, items and calls that the layer rejected, by the code of the refusal.",
    )
    .by(
        "code",
        &[
            "missing-key",
            "malformed-key",
            "key-too-long",
            "body-too-large",
            "body-timeout",
            "body-unreadable",
            "principal-missing",
            "principal-ambiguous",
            "unfinished-transaction",
            "not-unary",
            "key-reused",
            "in-progress",
            "outcome-unknown",
            "response-not-retained",
            "store-unavailable",
            "overloaded",
            "caller-limit",
            "draining",
        ],
    ),
    Metric::counter(
        "idempotency_passed_through_total",
        "Requests with a key that the layer does not cover.",
    )
    .by("reason", &["method", "skip", "connect", "upgrade", "grpc"]),
    #[cfg(feature = "grpc")]
    Metric::counter(
        "idempotency_grpc_streams_total",
        "Calls of protected gRPC methods that are streams, by the side with several messages.",
    )
    .by("side", &["request", "response"]),
    Metric::counter(
        "idempotency_unsafe_requests_total",
        "Requests with an unsafe method, by their protection.",
    )
    .by(
        "coverage",
        &[
            "keyed", "derived", "no_key", "method", "skip", "connect", "upgrade", "grpc", "off",
        ],
    ),
    Metric::counter(
        "idempotency_observed_total",
        "Observed requests, by the treatment that they would get.",
    )
    .by(
        "outcome",
        &[
            "fresh",
            "would_replay",
            "would_mismatch",
            "would_conflict",
            "would_refuse_retry",
            "would_refuse_key",
            "would_exceed",
            "no_key",
            "not_judged",
        ],
    ),
    Metric::counter(
        "idempotency_observed_differs_total",
        "Observed retries whose response is not the one that a replay would be.",
    )
    .by("part", &["status", "body"]),
    Metric::counter(
        "idempotency_enforcement_changed_total",
        "Changes of the enforcement at run time.",
    )
    .without_layer(),
    Metric::counter(
        "idempotency_anonymous_total",
        "Requests with a key and without credentials, which share one scope.",
    ),
    Metric::counter(
        "idempotency_principal_changed_total",
        "Requests whose key and content this process just saw under another principal.",
    ),
    Metric::counter(
        "idempotency_released_total",
        "Executions that ended without a record. Their keys are free or orphans.",
    )
    .by(
        "reason",
        &[
            "status",
            "no_store",
            "broken_request",
            "broken_body",
            "unrecordable",
            "error",
            "panic",
            "failed",
            "commit_failed",
            "unfinished_transaction",
            "outcome_unknown",
        ],
    ),
    Metric::counter(
        "idempotency_tombstones_total",
        "Tombstones in place of responses that are not recorded.",
    )
    .by("reason", &["too_large", "streamed", "panicked"]),
    Metric::counter(
        "idempotency_tombstone_replays_total",
        "Retries that were rejected for a tombstone.",
    ),
    Metric::counter(
        "idempotency_detached_total",
        "Clients that disconnected while their request continued in the background.",
    ),
    Metric::counter(
        "idempotency_takeover_total",
        "Orphans that were taken over and executed again.",
    ),
    Metric::counter(
        "idempotency_orphaned_total",
        "Retries of orphans that the orphan policy refused.",
    ),
    Metric::counter(
        "idempotency_failed_total",
        "Executions that failed and left an orphan.",
    )
    .by("reason", &["panic", "error", "broken_body"]),
    Metric::counter(
        "idempotency_unfinished_transactions_total",
        "Successes that were not recorded, since a transaction was neither committed nor rolled back.",
    ),
    Metric::counter(
        "idempotency_held_total",
        "Executions that failed or whose outcome is unknown, and that hold their key until the lease expires.",
    ),
    Metric::counter(
        "idempotency_needs_attention_total",
        "Executions that ended with NeedsAttention, by its code.",
    )
    .by("reason", &[]),
    Metric::counter(
        "idempotency_unresolved_total",
        "Retries that were rejected because of NeedsAttention, by its code.",
    )
    .by("reason", &[]),
    Metric::counter(
        "idempotency_renew_late_total",
        "Renewals that began more than a third of the lease after they were due.",
    ),
    Metric::counter(
        "idempotency_overdue_total",
        "Executions that took longer than with_overdue_after allows.",
    ),
    Metric::counter(
        "idempotency_lease_lost_total",
        "Leases that were lost while their handler ran.",
    ),
    Metric::counter(
        "idempotency_unrecorded_total",
        "Responses that were sent and never recorded.",
    ),
    Metric::counter(
        "idempotency_unprotected_total",
        "Executions without a lease, if the configuration allows them.",
    ),
    Metric::counter(
        "idempotency_bad_record_total",
        "Reads of a record or an entry that is damaged, too large, of a later version or of another type.",
    ),
    Metric::counter(
        "idempotency_store_error_total",
        "Store calls that failed or timed out.",
    )
    .by("operation", OPERATIONS),
    Metric::counter(
        "idempotency_memory_evicted_total",
        "Records that a full MemoryStore evicted before their expiry.",
    )
    .without_layer(),
    #[cfg(feature = "tiered")]
    Metric::counter(
        "idempotency_tier_replays_total",
        "Acquires that found a record in the tier of the process or in the store behind it.",
    )
    .by("source", &["tier", "store"])
    .without_layer(),
    #[cfg(feature = "tiered")]
    Metric::counter(
        "idempotency_tier_dropped_total",
        "Records that a tier removed before their age had passed, or that are too large for it.",
    )
    .by("reason", &["full", "size"])
    .without_layer(),
    Metric::new(
        MetricKind::Gauge,
        "idempotency_in_flight",
        "Requests in the layer, including those whose clients disconnected.",
    ),
    Metric::new(
        MetricKind::Seconds,
        "idempotency_handler_seconds",
        "Seconds from the call of the handler to the head of its response, its error or its panic.",
    ),
    Metric::new(
        MetricKind::Seconds,
        "idempotency_store_seconds",
        "Seconds of each attempt of a store call.",
    )
    .by("operation", OPERATIONS),
    Metric::new(
        MetricKind::Bytes,
        "idempotency_record_bytes",
        "Bytes of each stored record.",
    ),
];

/// Describes all metrics of this crate to the current recorder, and registers them with value 0.
///
/// Every layer does this when it is created and at its first request. Call it yourself if you install the recorder after you
/// create the layers: see the [module documentation](self). A value that a metric already has does not change.
///
/// Registers the metrics of each layer that has a [name](crate::IdempotencyLayer::with_name) too.
pub fn register() {
    register_unnamed();
    LayerKeys::register_all();
}

/// Describes all metrics, and registers those without the name of a layer.
pub(crate) fn register_unnamed() {
    for metric in METRICS {
        metric.describe();
        if metric.values.is_empty() {
            metric.register(None);
        }
        for value in metric.values {
            metric.register(Some(value));
        }
    }
}

/// Returns `true` if [`register`] registers the metric with this label, or if handlers choose the values of the label.
pub(crate) fn is_registered(name: &str, label: Option<(&str, &str)>) -> bool {
    let found = METRICS.iter().find(|metric| metric.name == name);
    found.is_some_and(|metric| match label {
        None => metric.label.is_empty(),
        Some((label, value)) => {
            metric.label == label && (metric.values.is_empty() || metric.values.contains(&value))
        }
    })
}
