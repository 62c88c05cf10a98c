//! A recorder of metrics that panics, and a subscriber that does.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Extension,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use metrics::{Counter, CounterFn};
use tests::{
    Effects, app, creating,
    observed::{Counters, paused, with_panicking_reports},
    post, send,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, MemoryStore, NeedsAttention, Retention,
    conformance::{Fault, FaultInjector, Operation},
    run_once::WorkError,
};

use crate::observability::{FLOWS, QuotingValue};

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

// F-802
/// Each flow also asserts its responses.
#[test]
fn panics_of_reports_change_no_flow() {
    for (name, flow) in FLOWS {
        let expected = paused().block_on(flow());
        let effects = with_panicking_reports(paused(), async |panics: &AtomicU64| {
            let effects = flow().await;
            assert!(panics.load(Ordering::SeqCst) > 0, "{name}: no report");
            effects
        });
        assert_eq!(effects, expected, "{name}");
    }
}

// F-802
/// The store loses completions, and the layer reports each loss. It then stores the record: at the next attempt, or in a
/// background task.
#[test]
fn panics_of_reports_lose_no_record() {
    with_panicking_reports(paused(), async |_: &AtomicU64| {
        for lost in [0, 1, 3, 7] {
            let store = FaultInjector::new(MemoryStore::new());
            store.enqueue(Operation::Complete, vec![Fault::CallLost; lost]);
            let layer = IdempotencyLayer::new(store);
            let (app, effects) = creating(layer.clone());
            let first = send(&app, post("/orders", "k", "tea")).await;
            // The lease has expired.
            sleep(Duration::from_secs(20)).await;
            let retry = send(&app, post("/orders", "k", "tea")).await;
            assert_eq!(retry.text(), first.text(), "{lost}");
            assert!(retry.is_replay(), "{lost}");
            assert_eq!((effects.count(), layer.in_flight()), (1, 0), "{lost}");
        }
    });
}

// F-802
/// The layer reports something about each of these responses before it stores the record.
#[test]
fn panics_of_reports_release_no_key() {
    let layer = || IdempotencyLayer::new(MemoryStore::new());
    with_panicking_reports(paused(), async |_: &AtomicU64| {
        let cases: [(&str, IdempotencyLayer, fn() -> Response); 6] = [
            ("complete", layer(), || "done".into_response()),
            ("too large", layer().with_response_limit(1), || {
                "done".into_response()
            }),
            ("policy", layer(), || {
                [("x-idempo-policy", "keep")].into_response()
            }),
            ("seconds", layer(), || {
                [("x-idempo-persist-for-seconds", "0")].into_response()
            }),
            ("retention", layer(), || {
                Extension(Retention::For(Duration::ZERO)).into_response()
            }),
            (
                "setting",
                layer().with_replayed_headers(|name| panic!("no rule for {name}")),
                || "done".into_response(),
            ),
        ];
        for (name, layer, respond) in cases {
            let (app, effects) = app(layer.clone(), move |_, _| std::future::ready(respond()));
            for _ in 0..2 {
                send(&app, post("/orders", "k", "tea")).await;
            }
            assert_eq!((effects.count(), layer.in_flight()), (1, 0), "{name}");
        }
        let (layer, effects) = (layer(), Effects::default());
        for _ in 0..2 {
            let effects = effects.clone();
            let work = move |_: Lease| {
                effects.happen();
                async { Ok::<_, WorkError<Infallible>>(QuotingValue) }
            };
            drop(layer.run_once("k", "tea", work).await);
        }
        assert_eq!((effects.count(), layer.in_flight()), (1, 0));
    });
}
