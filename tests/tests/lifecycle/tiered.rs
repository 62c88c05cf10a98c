//! Requests through the layer on `Tiered`: the calls to the store, and one response for each key.

use std::time::Duration;

use axum::{Extension, Router, body::Body, response::IntoResponse};
use http::{Request, StatusCode};
use tests::{
    Effects, app, created, creating,
    ledger::{CommitFault, Ledger},
    post, send,
};
use tokio::time::{advance, sleep};
use tower_idempotency::{
    IdempotencyLayer, Lease, MemoryStore, NeedsAttention, Tiered,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
};

fn order() -> Request<Body> {
    post("/orders", "k", "tea")
}

fn layer(store: &FaultInjector<MemoryStore>) -> IdempotencyLayer {
    IdempotencyLayer::new(Tiered::new(store.clone()))
}

/// Returns a process with its own tier on this store.
fn process(store: &FaultInjector<MemoryStore>) -> (Router, Effects) {
    creating(layer(store))
}

// F-980, S-987
#[tokio::test(start_paused = true)]
async fn replay_makes_no_call() {
    let store = FaultInjector::new(MemoryStore::new());
    let (first, effects) = process(&store);
    let (second, others) = process(&store);
    let response = send(&first, order()).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(
        (
            store.calls(Operation::Acquire),
            store.calls(Operation::Complete)
        ),
        (1, 1)
    );
    for _ in 0..3 {
        let replay = send(&first, order()).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, response.body);
    }
    assert_eq!(store.all_calls(), 2, "the execution alone");
    for _ in 0..3 {
        let replay = send(&second, order()).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, response.body);
    }
    assert_eq!(store.all_calls(), 3, "one for the second process");
    assert_eq!((effects.count(), others.count()), (1, 0));
}

// F-980
#[tokio::test(start_paused = true)]
async fn value_of_run_once_is_replayed_without_call() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = layer(&store);
    let run = || layer.run_once("k", "", |_| async { Ok::<_, WorkError<()>>(7) });
    assert!(matches!(run().await, Ok(Outcome::Executed(7))));
    for _ in 0..3 {
        assert!(matches!(run().await, Ok(Outcome::Replayed(7))));
    }
    assert_eq!(store.all_calls(), 2);
}

// F-989, S-988
#[tokio::test(start_paused = true)]
async fn other_request_under_key_in_tier_is_rejected() {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = process(&store);
    send(&app, order()).await;
    let other = send(&app, post("/orders", "k", "coffee")).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(other.code(), "key-reused");
    assert!(!other.text().contains("execution"));
    assert_eq!(store.all_calls(), 2);
    assert_eq!(effects.count(), 1);
}

// F-983
#[tokio::test(start_paused = true)]
async fn each_retry_of_attention_queries_store() {
    const GAVE_UP: NeedsAttention = NeedsAttention::new("gave-up");
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = app(layer(&store), async |_, _| {
        Extension(GAVE_UP).into_response()
    });
    send(&app, order()).await;
    for retries in 1..=3 {
        let retry = send(&app, order()).await;
        assert_eq!(retry.code(), "outcome-unknown");
        assert_eq!(store.calls(Operation::Acquire), 1 + retries);
    }
    assert_eq!(effects.count(), 1);
}

// F-983
#[tokio::test(start_paused = true)]
async fn each_retry_of_bad_record_queries_store() {
    let store = FaultInjector::new(MemoryStore::new());
    let (writer, _) = process(&store);
    send(&writer, order()).await;
    store.rewrite_records(|record| {
        let mut bytes = record.to_vec();
        *bytes.last_mut().expect("a record") ^= 1;
        bytes.into()
    });
    let (app, effects) = process(&store);
    for retries in 1..=3 {
        let retry = send(&app, order()).await;
        assert_eq!(retry.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(store.calls(Operation::Acquire), 1 + retries);
    }
    assert_eq!(effects.count(), 0);
}

// F-981
/// The first process loses its lease. Its client and all retries get the response of the process that took over.
#[tokio::test(start_paused = true)]
async fn response_after_lost_lease_is_that_of_store() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let (fast, taken_over) = process(&store);
    let rival = fast.clone();
    let (slow, effects) = app(layer(&store), move |_, _| {
        let rival = rival.clone();
        async move {
            sleep(Duration::from_secs(16)).await;
            assert_eq!(send(&rival, order()).await.text(), "{\"execution\":1}");
            "the late one".into_response()
        }
    });
    for app in [&slow, &slow, &fast, &fast] {
        assert_eq!(send(app, order()).await.text(), "{\"execution\":1}");
    }
    assert_eq!((effects.count(), taken_over.count()), (1, 1));
}

// F-982
/// The reply to the commit is lost, and the handler returns another response. The store has the committed one.
#[tokio::test(start_paused = true)]
async fn committed_record_goes_before_completion() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::HangReply);
    let handled = ledger.clone();
    let layer = IdempotencyLayer::new(Tiered::new(ledger.clone()));
    let (app, effects) = app(layer, move |n, req: Request<Body>| {
        let (ledger, lease) = (handled.clone(), req.extensions().get::<Lease>().cloned());
        async move {
            let lease = lease.expect("a lease");
            let mut tx = ledger.begin();
            tx.insert(format!("charge {n}"));
            let commit = tx.commit(&lease, created(n));
            let cut_off = tokio::time::timeout(Duration::from_secs(2), commit).await;
            assert!(cut_off.is_err());
            "another response".into_response()
        }
    });
    for _ in 0..3 {
        let response = send(&app, order()).await;
        assert_eq!(response.text(), "{\"execution\":1}");
    }
    assert!(
        ledger.store.calls(Operation::Complete) > 0,
        "the layer completed"
    );
    assert_eq!(ledger.rows().await, ["charge 1"]);
    assert_eq!(effects.count(), 1);
}

// F-982
#[tokio::test(start_paused = true)]
async fn retried_completion_is_not_kept() {
    for (act, stored) in [(Fault::ReplyLost, true), (Fault::CallLost, false)] {
        let store = FaultInjector::new(MemoryStore::new());
        store.enqueue(Operation::Complete, [act]);
        let (app, effects) = process(&store);
        send(&app, order()).await;
        assert_eq!(
            store.calls(Operation::Complete),
            2,
            "stored at first: {stored}"
        );
        for _ in 0..2 {
            assert!(send(&app, order()).await.is_replay());
            assert_eq!(store.calls(Operation::Acquire), 2);
        }
        assert_eq!(effects.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn tombstone_after_large_record_is_not_kept() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Complete, [Fault::RecordTooLarge(100)]);
    let (app, effects) = process(&store);
    send(&app, order()).await;
    for _ in 0..2 {
        let retry = send(&app, order()).await;
        assert_eq!(retry.code(), "response-not-retained");
        assert_eq!(store.calls(Operation::Acquire), 2);
    }
    assert_eq!(effects.count(), 1);
}

// F-990
#[tokio::test(start_paused = true)]
async fn outage_stops_new_keys_but_no_tier_replays() {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = process(&store);
    send(&app, order()).await;
    for op in [Operation::Acquire, Operation::Complete, Operation::Release] {
        store.set_fault(op, Fault::CallLost);
    }
    assert!(send(&app, order()).await.is_replay());
    let fresh = send(&app, post("/orders", "other", "tea")).await;
    assert_eq!(fresh.status, StatusCode::SERVICE_UNAVAILABLE);
    advance(Duration::from_secs(60)).await;
    let late = send(&app, order()).await;
    assert_eq!(late.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(effects.count(), 1);
}

// F-986
/// The store no longer has the record, as after a deletion by an operator. The tier replays it until its age has passed.
#[tokio::test(start_paused = true)]
async fn deleted_record_is_replayed_for_its_age() {
    let store = FaultInjector::new(MemoryStore::new().with_max_entries(1));
    let (app, effects) = process(&store);
    let (other, _) = process(&store);
    send(&app, order()).await;
    // Another key evicts the record.
    send(&other, post("/orders", "other", "tea")).await;
    advance(Duration::from_secs(60) - Duration::from_millis(1)).await;
    let replay = send(&app, order()).await;
    assert_eq!(replay.text(), "{\"execution\":1}");
    assert_eq!(effects.count(), 1);
    advance(Duration::from_millis(1)).await;
    let executed = send(&app, order()).await;
    assert_eq!(executed.text(), "{\"execution\":2}");
    assert_eq!(effects.count(), 2);
}
