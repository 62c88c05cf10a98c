//! A recorder of metrics that panics while a record is stored.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Extension, response::IntoResponse};
use http::StatusCode;
use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tests::{app, post, send};
use tower_idempotency::{IdempotencyLayer, MemoryStore, NeedsAttention};

/// Counts executions that need attention, and panics if the store reports an eviction.
#[derive(Default)]
struct Panicking {
    need_attention: Arc<AtomicU64>,
}

/// A counter that panics at its first event. Its registration adds 0.
struct PanickingCounter;

impl CounterFn for PanickingCounter {
    fn increment(&self, value: u64) {
        assert_eq!(value, 0, "the intended panic");
    }

    fn absolute(&self, _: u64) {}
}

impl Recorder for Panicking {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match key.name() {
            "idempotency_memory_evicted_total" => Counter::from_arc(Arc::new(PanickingCounter)),
            "idempotency_needs_attention_total" => {
                Counter::from_arc(Arc::clone(&self.need_attention))
            }
            _ => Counter::noop(),
        }
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

// F-802
/// The second record takes the place of the first one in the store.
#[tokio::test(start_paused = true)]
async fn panic_of_recorder_hides_no_record() {
    let recorder = Panicking::default();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let layer = IdempotencyLayer::new(MemoryStore::new().with_max_bytes(6_000));
    let (app, effects) = app(layer, async |n, _| match n {
        1 => "x".repeat(5_000).into_response(),
        _ => {
            let attention = NeedsAttention::new("refund-failed").with_reason("x".repeat(1_000));
            (Extension(attention), "failed").into_response()
        }
    });
    for (key, need_attention) in [("first", 0), ("second", 1)] {
        let response = send(&app, post("/orders", key, "order")).await;
        assert_eq!(response.status, StatusCode::OK);
        let counted = recorder.need_attention.load(Ordering::SeqCst);
        assert_eq!(counted, need_attention, "{key}");
    }
    let retry = send(&app, post("/orders", "second", "order")).await;
    assert_eq!(retry.code(), "outcome-unknown");
    assert_eq!(effects.count(), 2);
}
