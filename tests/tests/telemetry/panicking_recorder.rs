//! A recorder of metrics that panics while a record is stored.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Extension, response::IntoResponse};
use http::StatusCode;
use metrics::{Counter, CounterFn};
use tests::{app, observed::Counters, post, send};
use tower_idempotency::{IdempotencyLayer, MemoryStore, NeedsAttention};

/// A counter that panics at its first event. Its registration adds 0.
struct PanickingCounter;

impl CounterFn for PanickingCounter {
    fn increment(&self, value: u64) {
        assert_eq!(value, 0, "the intended panic");
    }

    fn absolute(&self, _: u64) {}
}

// F-802
/// The second record takes the place of the first one in the store.
#[tokio::test(start_paused = true)]
async fn panic_of_recorder_hides_no_record() {
    let needing_attention = Arc::<AtomicU64>::default();
    let recorder = Counters([
        (
            "idempotency_memory_evicted_total",
            Counter::from_arc(Arc::new(PanickingCounter)),
        ),
        (
            "idempotency_needs_attention_total",
            Counter::from_arc(Arc::clone(&needing_attention)),
        ),
    ]);
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let layer = IdempotencyLayer::new(MemoryStore::new().with_max_bytes(6_000));
    let (app, effects) = app(layer, async |n, _| match n {
        1 => "x".repeat(5_000).into_response(),
        _ => {
            let attention = NeedsAttention::new("refund-failed").with_reason("x".repeat(1_000));
            (Extension(attention), "failed").into_response()
        }
    });
    for (key, expected) in [("first", 0), ("second", 1)] {
        let response = send(&app, post("/orders", key, "order")).await;
        assert_eq!(response.status, StatusCode::OK);
        assert_eq!(needing_attention.load(Ordering::SeqCst), expected, "{key}");
    }
    let retry = send(&app, post("/orders", "second", "order")).await;
    assert_eq!(retry.code(), "outcome-unknown");
    assert_eq!(effects.count(), 2);
}
