//! Executions that end with `NeedsAttention`: no retry executes, and each retry receives the code.

use std::{convert::Infallible, time::Duration};

use axum::{
    Extension, Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use tests::{
    Effects, Scripted, Step, TestResponse, app,
    barrier::{Barrier, bounded},
    ledger::{CommitFault, Ledger},
    playground::Playground,
    post,
    scratch::Scratch,
    send,
    servers::{
        dynamodb::{self, StandIn},
        mariadb, postgres, redis,
    },
    sql,
};
use tokio::time::{advance, sleep, timeout};
use tower_idempotency::{
    ConcurrentRequests, FingerprintBy, IdempotencyLayer, Lease, MemoryStore, NeedsAttention,
    Preset, Retention, Store, TakeOverOutcome, Ttl, Unrecordable,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
    store::{Acquired, Claim, Fingerprint, KeyId},
    transaction::LeaseExt,
};
use tower_idempotency_dynamodb::DynamoDbOptions;

const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");
const REASON: &str = "refund re_7 of 1250 EUR";
/// A store timeout that no call reaches, even on a slow machine.
const UNHURRIED: Duration = Duration::from_secs(60);

fn attention() -> NeedsAttention {
    REFUND_FAILED.with_reason(REASON)
}

fn order() -> Request<Body> {
    post("/cancel", "k", "{}")
}

/// Returns the handler's response, with a status that is never recorded.
fn attention_response(n: u64) -> Response {
    let text = format!("execution {n}: we will be in touch");
    (StatusCode::BAD_GATEWAY, Extension(attention()), text).into_response()
}

fn attention_app(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, _| attention_response(n))
}

fn assert_unresolved(retry: &TestResponse) {
    assert_eq!(retry.status, StatusCode::CONFLICT, "{retry:?}");
    assert_eq!(retry.code(), "outcome-unknown", "{}", retry.text());
    let problem: serde_json::Value = serde_json::from_slice(&retry.body).expect("JSON");
    assert_eq!(problem["reason"], "refund-failed");
    assert_eq!(problem["retryable"], false);
    assert!(!retry.text().contains("re_7"), "{}", retry.text());
    assert!(!retry.is_replay());
    assert_eq!(retry.header("retry-after"), None);
}

fn assert_needs_attention(first: &TestResponse) {
    assert_eq!(first.status, StatusCode::BAD_GATEWAY, "{first:?}");
    assert_eq!(first.text(), "execution 1: we will be in touch");
}

// ---- Every store ----

/// The first client receives the handler's response. After that no process executes the request, at any later time.
async fn refuses_retries_until_resolved(store: impl Store + Clone) {
    let layer = |store| IdempotencyLayer::new(store).with_store_timeout(UNHURRIED);
    let (one, effects) = attention_app(layer(store.clone()));
    let (other, others) = attention_app(layer(store));
    assert_needs_attention(&send(&one, order()).await);
    for app in [&one, &other, &one] {
        assert_unresolved(&send(app, order()).await);
        let another = send(app, post("/cancel", "k", "another request")).await;
        assert_eq!(another.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(another.code(), "key-reused");
    }
    assert_eq!((effects.count(), others.count()), (1, 0));

    // Of 32 new requests at once, one executes.
    let mut racers = tokio::task::JoinSet::new();
    for n in 0..32 {
        let app = if n % 2 == 0 {
            one.clone()
        } else {
            other.clone()
        };
        racers.spawn(bounded(async move {
            loop {
                let response = send(&app, post("/cancel", "raced", "{}")).await;
                // A server may cancel calls that wait too long for one row.
                if response.status != StatusCode::SERVICE_UNAVAILABLE {
                    return response;
                }
            }
        }));
    }
    let mut failed = 0;
    for response in racers.join_all().await {
        match response.status {
            StatusCode::BAD_GATEWAY => failed += 1,
            _ if response.code() == "in-progress" => {}
            _ => assert_unresolved(&response),
        }
    }
    assert_eq!(failed, 1);
    assert_eq!(effects.count() + others.count(), 2);
    assert_unresolved(&send(&one, post("/cancel", "raced", "{}")).await);
}

// S-212
#[tokio::test(start_paused = true)]
async fn attention_blocks_key_until_resolved_in_memory() {
    refuses_retries_until_resolved(MemoryStore::new()).await;
}

// S-213
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_blocks_key_until_resolved_in_redis() {
    let server = redis::shared();
    let store = server.store().await;
    refuses_retries_until_resolved(store).await;
}

// S-214
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_blocks_key_until_resolved_in_postgres() {
    let store = sql::postgres(postgres::shared(), "attention_layer").await;
    refuses_retries_until_resolved(store).await;
}

// S-215
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_blocks_key_until_resolved_in_mariadb() {
    let store = sql::mariadb(mariadb::shared(), "attention_layer").await;
    refuses_retries_until_resolved(store).await;
}

// S-216
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_blocks_key_until_resolved_in_sqlite() {
    let scratch = Scratch::new();
    refuses_retries_until_resolved(sql::sqlite(&scratch).await).await;
}

// S-217
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_blocks_key_until_resolved_in_dynamodb() {
    let server = dynamodb::shared(StandIn::Dynoxide);
    let patient = DynamoDbOptions::new().with_timeout(UNHURRIED);
    refuses_retries_until_resolved(server.store(patient).await).await;
}

// S-218
/// The process that reported the failure is killed. Another process on the same file refuses the retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attention_outlives_its_process() {
    let scratch = Scratch::new();
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    let first = Playground::start(&["--store", &store]);
    let response = first.post("/attention", "k", b"tea").await;
    assert_eq!(response.status, StatusCode::BAD_GATEWAY);
    drop(first);
    let second = Playground::start(&["--store", &store]);
    for _ in 0..2 {
        let retry = second.post("/attention", "k", b"tea").await;
        assert_eq!(retry.status, StatusCode::CONFLICT);
        assert_eq!(retry.code(), "outcome-unknown");
        assert!(retry.text().contains(r#""reason":"half-done""#));
    }
    assert_eq!(second.executions().await, 0);
}

// ---- Handlers ----

// S-219
#[tokio::test(start_paused = true)]
async fn attention_ignores_retention_and_maximum() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_retention(Ttl::from_secs(1))
        .with_max_retention(Ttl::from_secs(2));
    let (app, effects) = attention_app(layer);
    send(&app, order()).await;
    advance(Duration::from_secs(99 * 365 * 24 * 60 * 60)).await;
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-220
#[tokio::test(start_paused = true)]
async fn attention_overrides_any_response() {
    type Handler = fn() -> Response;
    let responses: [(&str, Handler); 6] = [
        ("recorded", || "done".into_response()),
        ("not recorded", || StatusCode::BAD_GATEWAY.into_response()),
        ("informational", || StatusCode::PROCESSING.into_response()),
        ("no-store", || {
            (
                [("x-idempo-policy", "no-store")],
                Extension(Retention::NoStore),
                "x",
            )
                .into_response()
        }),
        ("too large", || tests::noise(5 << 20).into_response()),
        ("broken", || {
            Response::new(Body::new(Scripted::new([Step::from("half"), Step::Fail])))
        }),
    ];
    for (name, response) in responses {
        let (app, effects) = app(IdempotencyLayer::new(MemoryStore::new()), move |_, _| {
            let mut res = response();
            res.extensions_mut().insert(attention());
            std::future::ready(res)
        });
        let first = tower::ServiceExt::oneshot(app.clone(), order()).await;
        let first = first.expect("infallible");
        assert_eq!(first.status(), response().status(), "{name}");
        assert!(!first.headers().contains_key("x-idempo-policy"), "{name}");
        assert!(
            first.extensions().get::<NeedsAttention>().is_none(),
            "{name}"
        );
        // A response that is not recorded is not buffered: it reaches the client as it arrives.
        drop(first);
        assert_unresolved(&send(&app, order()).await);
        assert_eq!(effects.count(), 1, "{name}");
    }
}

// S-221
/// The response to an incomplete request is not recorded. The effect of its handler still needs attention.
#[tokio::test(start_paused = true)]
async fn attention_is_recorded_after_aborted_request() {
    let layer =
        IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(FingerprintBy::head_only());
    let (app, effects) = app(layer, async |n, req: Request<Body>| {
        let body = http_body_util::BodyExt::collect(req.into_body()).await;
        assert!(n > 1 || body.is_err());
        attention_response(n)
    });
    let half = Body::new(Scripted::new([Step::from("half"), Step::Fail]));
    assert_needs_attention(&send(&app, post("/cancel", "k", half)).await);
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-222
#[tokio::test(start_paused = true)]
async fn attention_is_stored_before_first_byte() {
    let barrier = Barrier::closed();
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(
        Operation::Complete,
        [Fault::HoldCall(barrier.clone().into())],
    );
    let (app, effects) = attention_app(IdempotencyLayer::new(store));
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, order()).await }
    });
    barrier.arrival().await;
    assert!(!first.is_finished());
    assert_eq!(send(&app, order()).await.code(), "in-progress");
    barrier.open_for_good();
    assert_needs_attention(&bounded(first).await.expect("no panic"));
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-223
#[tokio::test(start_paused = true)]
async fn waiter_is_refused_with_attention_code() {
    let wait = ConcurrentRequests::Wait(Duration::from_secs(60));
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_concurrent_requests(wait);
    let (app, effects) = app(layer, async |n, _| {
        sleep(Duration::from_secs(5)).await;
        attention_response(n)
    });
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let app = app.clone();
        waiters.spawn(async move { send(&app, order()).await });
    }
    let mut failed = 0;
    for response in waiters.join_all().await {
        match response.status {
            StatusCode::BAD_GATEWAY => failed += 1,
            _ => assert_unresolved(&response),
        }
    }
    assert_eq!((failed, effects.count()), (1, 1));
}

// S-224
/// The refusal has the format of the preset or of the service's own renderer, like every refusal.
#[tokio::test(start_paused = true)]
async fn attention_refusal_has_preset_format() {
    let quoted = || post("/cancel", "\"k\"", "{}");
    for (preset, shape) in [
        (Preset::Recommended, r#""reason":"refund-failed""#),
        (Preset::Ietf, r#""reason":"refund-failed""#),
        (
            Preset::Stripe,
            r#""reason":"refund-failed","type":"idempotency_error""#,
        ),
        (
            Preset::Idempo,
            r#"{"error":{"message":"an execution of this request failed and needs attention (refund-failed)"#,
        ),
    ] {
        let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
        let (app, effects) = attention_app(layer);
        assert_needs_attention(&send(&app, quoted()).await);
        let retry = send(&app, quoted()).await;
        assert_eq!(retry.status, StatusCode::CONFLICT, "{preset:?}");
        assert!(retry.text().contains(shape), "{}", retry.text());
        assert!(!retry.text().contains("re_7"), "{}", retry.text());
        assert_eq!(effects.count(), 1, "{preset:?}");
    }
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_error_response(|error| {
        let code = error.reason().unwrap_or("none").to_owned();
        let mut res = http::Response::new(code.into());
        *res.status_mut() = StatusCode::IM_A_TEAPOT;
        res
    });
    let (app, _) = attention_app(layer);
    send(&app, order()).await;
    let retry = send(&app, order()).await;
    assert_eq!(retry.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(retry.text(), "refund-failed");
    let another = send(&app, post("/cancel", "k", "another request")).await;
    assert_eq!(another.text(), "none");
}

// ---- Failures ----

// S-225
#[tokio::test(start_paused = true)]
async fn attention_survives_lost_complete_reply() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Complete, [Fault::ReplyLost]);
    let (app, effects) = attention_app(IdempotencyLayer::new(store));
    assert_needs_attention(&send(&app, order()).await);
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-226
#[tokio::test(start_paused = true)]
async fn unstored_attention_holds_key_until_stored() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let (app, effects) = attention_app(IdempotencyLayer::new(store.clone()));
    assert_needs_attention(&send(&app, order()).await);
    assert_eq!(send(&app, order()).await.code(), "in-progress");
    store.clear_faults();
    sleep(Duration::from_secs(5)).await;
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-226
/// The outage is longer than the lease.
#[tokio::test(start_paused = true)]
async fn attention_unstored_at_lease_end_is_stored_later() {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), async |n, _| {
        sleep(Duration::from_secs(30)).await;
        attention_response(n)
    });
    store.set_fault(Operation::Renew, Fault::CallLost);
    store.set_fault(Operation::Complete, Fault::CallLost);
    assert_needs_attention(&send(&app, order()).await);
    sleep(Duration::from_secs(1)).await;
    store.clear_faults();
    sleep(Duration::from_secs(2)).await;
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// S-227
/// If a store rejects even the reason as too large, the layer stores the code alone. The key is never released.
#[tokio::test(start_paused = true)]
async fn attention_reason_too_large_is_dropped() {
    for unrecordable in [Unrecordable::Tombstone, Unrecordable::Release] {
        let store = FaultInjector::new(MemoryStore::new());
        store.enqueue(Operation::Complete, [Fault::RecordTooLarge(200)]);
        let layer = IdempotencyLayer::new(store.clone()).with_unrecordable(unrecordable);
        let (app, effects) = attention_app(layer.clone());
        assert_needs_attention(&send(&app, order()).await);
        assert_unresolved(&send(&app, order()).await);

        store.enqueue(Operation::Complete, [Fault::RecordTooLarge(200)]);
        let first = run(&layer, &effects).await.expect("an outcome");
        assert_eq!(first, Outcome::Failed("the provider is down"));
        let again = run(&layer, &effects).await.expect("an outcome");
        assert_eq!(again, unresolved());
        assert_eq!(effects.count(), 2);
    }
    let ledger = Ledger::default().with_limit(70);
    let (app, _) = committing(&ledger);
    assert_needs_attention(&send(&app, order()).await);
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(ledger.rows().await, ["seat 1 given away"]);
}

// S-228
#[tokio::test(start_paused = true)]
async fn late_attention_reason_too_large_is_dropped() {
    for unrecordable in [Unrecordable::Tombstone, Unrecordable::Release] {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_script(|op, nth| match (op, nth) {
            (Operation::Complete, 1..=3) => Fault::CallLost,
            (Operation::Complete, 4) => Fault::RecordTooLarge(200),
            _ => Fault::None,
        });
        let layer = IdempotencyLayer::new(store.clone()).with_unrecordable(unrecordable);
        let (app, effects) = attention_app(layer);
        assert_needs_attention(&send(&app, order()).await);
        sleep(Duration::from_secs(20)).await;
        assert_unresolved(&send(&app, order()).await);
        assert_eq!(effects.count(), 1);
    }
}

// S-230
/// A key has one response: the response of the process that took over and finished first.
#[tokio::test(start_paused = true)]
async fn attention_after_lost_lease_keeps_stored_record() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let (rival, _) = app(
        IdempotencyLayer::new(store.clone()),
        async |_, _| "refunded",
    );
    let (late, effects) = {
        let rival = rival.clone();
        app(IdempotencyLayer::new(store), move |n, _| {
            let rival = rival.clone();
            async move {
                sleep(Duration::from_secs(16)).await;
                assert_eq!(send(&rival, order()).await.text(), "refunded");
                attention_response(n)
            }
        })
    };
    let response = send(&late, order()).await;
    assert_eq!(response.text(), "refunded");
    assert!(send(&late, order()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// ---- Transactions ----

fn bank(ledger: &Ledger, late: fn(u64) -> Response) -> (Router, Effects) {
    let ledger = ledger.clone();
    app(IdempotencyLayer::new(ledger.clone()), move |n, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let ledger = ledger.clone();
        async move {
            let mut tx = ledger.begin();
            tx.insert(format!("refund {n}"));
            let commit = tx.commit(&lease, "refunded".into_response());
            let _ = timeout(Duration::from_secs(1), commit).await;
            late(n)
        }
    })
}

// S-232
/// A key has one response: the response that was committed with its effect.
#[tokio::test(start_paused = true)]
async fn committed_response_overrides_later_attention() {
    // The commit is acknowledged, or its reply is lost.
    for fault in [
        CommitFault::Committed,
        CommitFault::ReplyLost,
        CommitFault::HangReply,
    ] {
        let ledger = Ledger::default();
        ledger.next(fault);
        let (app, effects) = bank(&ledger, attention_response);
        let first = send(&app, order()).await;
        assert_eq!(first.text(), "refunded");
        assert!(send(&app, order()).await.is_replay());
        assert_eq!((ledger.rows().await.len(), effects.count()), (1, 1));
    }
}

// S-233
#[tokio::test(start_paused = true)]
async fn attention_after_failed_commit_is_recorded() {
    for fault in [CommitFault::CallLost, CommitFault::HangCall] {
        let ledger = Ledger::default();
        ledger.next(fault);
        let (app, effects) = bank(&ledger, attention_response);
        assert_needs_attention(&send(&app, order()).await);
        assert_unresolved(&send(&app, order()).await);
        assert_eq!((ledger.rows().await.len(), effects.count()), (0, 1));
    }
}

/// Returns a service that commits a part of its effect and the record that needs attention, in one transaction.
fn committing(ledger: &Ledger) -> (Router, Effects) {
    let database = ledger.clone();
    app(IdempotencyLayer::new(ledger.clone()), move |n, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let ledger = database.clone();
        async move {
            let mut tx = ledger.begin();
            tx.insert(format!("seat {n} given away"));
            match tx.commit(&lease, attention_response(n)).await {
                Ok(res) => res.into_response(),
                Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
            }
        }
    })
}

// S-234
#[tokio::test(start_paused = true)]
async fn attention_can_be_committed_with_effect() {
    let ledger = Ledger::default();
    let (app, effects) = committing(&ledger);
    assert_needs_attention(&send(&app, order()).await);
    assert_eq!(
        ledger.calls(Operation::Complete),
        0,
        "committed by the handler"
    );
    assert_unresolved(&send(&app, order()).await);
    assert_eq!(ledger.rows().await, ["seat 1 given away"]);
    assert_eq!(effects.count(), 1);
}

// ---- Takeovers ----

// S-235
#[tokio::test(start_paused = true)]
async fn takeover_with_attention_is_final() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let claim = || {
        let (id, fingerprint) = (KeyId::from_bytes([7; 32]), Fingerprint::from_bytes([8; 32]));
        Claim::new(id, fingerprint).expect("randomness")
    };
    store.acquire(&claim()).await.expect("in memory");
    advance(Duration::from_secs(16)).await;
    let finish = async |lease: Lease| {
        assert!(lease.is_takeover());
        Ok::<_, Infallible>(attention_response(2))
    };
    let taken = layer.take_over(claim(), finish).await.expect("a lease");
    let TakeOverOutcome::Executed(res) = taken else {
        panic!("expected an execution, found {taken:?}");
    };
    assert_eq!(res.status(), StatusCode::BAD_GATEWAY);
    advance(Duration::from_secs(60 * 60 * 24 * 365)).await;
    let again = layer.take_over(claim(), finish).await.expect("an answer");
    assert!(matches!(again, TakeOverOutcome::NoOrphan), "{again:?}");
    let Acquired::Completed { record, .. } = store.acquire(&claim()).await.expect("in memory")
    else {
        panic!("expected a record");
    };
    assert_eq!(NeedsAttention::in_record(&record), Some(attention()));
}

// ---- run_once ----

type Work = Result<Outcome<u32, &'static str>, tower_idempotency::Error>;

async fn run(layer: &IdempotencyLayer, effects: &Effects) -> Work {
    let effects = effects.clone();
    let work = async move |_lease: Lease| {
        effects.happen();
        Err(WorkError::NeedsAttention(
            attention(),
            "the provider is down",
        ))
    };
    layer.run_once("message-42", "refund 7", work).await
}

fn unresolved() -> Outcome<u32, &'static str> {
    let code = "refund-failed".to_owned();
    Outcome::NeedsAttention { code }
}

// S-236
#[tokio::test(start_paused = true)]
async fn work_that_needs_attention_is_not_run_again() {
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_retention(Ttl::from_secs(1));
    let effects = Effects::default();
    let first = run(&layer, &effects).await.expect("an outcome");
    assert_eq!(first, Outcome::Failed("the provider is down"));
    for _ in 0..3 {
        advance(Duration::from_secs(60 * 60)).await;
        assert_eq!(
            run(&layer, &effects).await.expect("an outcome"),
            unresolved()
        );
    }
    let work = async |_lease: Lease| Ok::<u32, WorkError<Infallible>>(1);
    let other = layer.run_once("message-42", "refund 8", work).await;
    assert_eq!(other.expect("an outcome"), Outcome::Mismatch);
    assert_eq!(effects.count(), 1);
}

// S-237
#[tokio::test(start_paused = true)]
async fn work_attention_holds_key_until_stored() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::default();
    let first = run(&layer, &effects).await.expect("an outcome");
    assert_eq!(first, Outcome::Failed("the provider is down"));
    let meanwhile = run(&layer, &effects).await.expect("an outcome");
    assert!(matches!(meanwhile, Outcome::InProgress { .. }));
    store.clear_faults();
    sleep(Duration::from_secs(5)).await;
    for _ in 0..2 {
        let retried = run(&layer, &effects).await.expect("an outcome");
        assert_eq!(retried, unresolved());
        // Longer than the retention of a value.
        sleep(Duration::from_secs(2 * 24 * 3600)).await;
    }
    assert_eq!(effects.count(), 1);
}

// S-238
#[tokio::test(start_paused = true)]
async fn committed_value_overrides_later_attention() {
    for fault in [
        CommitFault::Committed,
        CommitFault::ReplyLost,
        CommitFault::HangReply,
    ] {
        let ledger = Ledger::default();
        ledger.next(fault);
        let layer = IdempotencyLayer::new(ledger.clone());
        let database = ledger.clone();
        let work = async move |lease: Lease| {
            let mut tx = database.begin();
            tx.insert("refund");
            let commit = tx.commit_prepared(lease.prepare_value(7));
            let _ = timeout(Duration::from_secs(1), commit).await;
            Err(WorkError::NeedsAttention(attention(), "too late"))
        };
        let first: Work = layer.run_once("message-42", "refund 7", work).await;
        let first = first.expect("an outcome");
        assert!(
            matches!(first, Outcome::Executed(7) | Outcome::Replayed(7)),
            "{first:?}"
        );
        let again = run(&layer, &Effects::default()).await;
        assert_eq!(again.expect("an outcome"), Outcome::Replayed(7));
        assert_eq!(ledger.rows().await, ["refund"]);
    }
}
