//! Events and metrics that operators see, and data that must never appear in them.

use std::{
    cell::Cell,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    Effects, Scripted, Step, TestResponse, app,
    barrier::{Barrier, eventually},
    ledger::{CommitFault, Ledger},
    observed::{self, Metrics, paused, read, total},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{
    ConcurrentRequests, Enforcement, IdempotencyLayer, Lease, MemoryStore, MissingKey,
    NeedsAttention, OrphanPolicy, Principal, Rollout, StoreFailure, Ttl, Unrecordable,
    conformance::{Fault, FaultInjector, Operation},
    run_once::WorkError,
    store::{Acquired, Fingerprint, Store},
    transaction::LeaseExt,
};

const KEY: &str = "raw-key-8e03978e";
const TOKEN: &str = "Bearer raw-token-40d5";
const BODY: &str = "raw-body-43dd";
const QUERY: &str = "raw-query-bc93";
const ANSWER: &str = "raw-response-6894";
const SECRETS: [&str; 6] = [KEY, "raw-token", BODY, QUERY, ANSWER, "raw-cookie"];

fn order() -> Request<Body> {
    keyed(KEY, BODY)
}

fn keyed(key: &str, body: &'static str) -> Request<Body> {
    Request::post(format!("/orders?code={QUERY}"))
        .header("idempotency-key", key)
        .header("authorization", TOKEN)
        .header("cookie", "sid=raw-cookie")
        .body(Body::from(body))
        .expect("a valid request")
}

pub(crate) type StartFlow = fn() -> Flow;

/// Every path that a request can take, each on its own layer. Each flow returns the number of its effects.
pub(crate) const FLOWS: [(&str, StartFlow); 52] = [
    ("observed", || Box::pin(observing(MemoryStore::new()))),
    ("observed, store down", || {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault_for_all(&Fault::CallLost);
        Box::pin(observing(store))
    }),
    ("executed", || Box::pin(executed())),
    ("replayed", || Box::pin(replayed())),
    ("mismatch", || Box::pin(mismatch())),
    ("in progress", || Box::pin(in_progress())),
    ("waited", || Box::pin(waited())),
    ("orphan refused", || Box::pin(orphan(OrphanPolicy::Refuse))),
    ("takeover", || Box::pin(orphan(OrphanPolicy::TakeOver))),
    ("lease lost at the end", || {
        Box::pin(lose_lease(Recovery::Late))
    }),
    ("lease lost meanwhile", || {
        Box::pin(lose_lease(Recovery::Early))
    }),
    ("lease lost at the end, then an error", || {
        Box::pin(lose_lease_and_fail(Recovery::AtEnd))
    }),
    ("lease lost meanwhile, then an error", || {
        Box::pin(lose_lease_and_fail(Recovery::Early))
    }),
    ("lease lost in an outage, then an error", || {
        Box::pin(lose_lease_and_fail(Recovery::Late))
    }),
    ("renewed", || Box::pin(renewed())),
    ("renewed late", || Box::pin(renewed_late())),
    ("acquire failing", || {
        Box::pin(failing(Operation::Acquire, Fault::CallLost))
    }),
    ("acquire hanging", || {
        Box::pin(failing(Operation::Acquire, Fault::HangCall))
    }),
    ("complete failing", || {
        Box::pin(failing(Operation::Complete, Fault::CallLost))
    }),
    ("complete hanging", || {
        Box::pin(failing(Operation::Complete, Fault::HangCall))
    }),
    ("never recorded", || Box::pin(never_recorded())),
    ("renew hanging", || {
        Box::pin(failing(Operation::Renew, Fault::HangCall))
    }),
    ("renew failing", || {
        Box::pin(failing(Operation::Renew, Fault::CallLost))
    }),
    ("release failing", || {
        Box::pin(failing(Operation::Release, Fault::CallLost))
    }),
    ("unprotected", || Box::pin(unprotected())),
    ("too large", || Box::pin(too_large(Unrecordable::Tombstone))),
    ("too large, released", || {
        Box::pin(too_large(Unrecordable::Release))
    }),
    ("streamed", || Box::pin(streamed())),
    ("status", || {
        Box::pin(ending(|| StatusCode::BAD_GATEWAY.into_response()))
    }),
    ("no-store", || {
        Box::pin(ending(|| [("x-idempo-policy", "no-store")].into_response()))
    }),
    ("broken body", || Box::pin(broken_body())),
    ("needs attention", || Box::pin(needs_attention())),
    ("needs attention too late", || Box::pin(too_late())),
    ("needs attention, lease lost", || {
        Box::pin(lose_lease_with_response(Recovery::Late, || {
            Extension(GAVE_UP.with_reason(ANSWER)).into_response()
        }))
    }),
    ("needs attention unprotected", || {
        Box::pin(unprotected_attention())
    }),
    ("commit cut off", || Box::pin(cut_off(Cut::TimedOut))),
    ("commit cut off, then an error", || {
        Box::pin(cut_off(Cut::Failed))
    }),
    ("commit cut off, then an answer", || {
        Box::pin(cut_off(Cut::Answered))
    }),
    ("commit cut off by a panic", || {
        Box::pin(cut_off(Cut::Panicked))
    }),
    ("committed, then an error", || {
        Box::pin(committed_then_failed())
    }),
    ("needs attention, commit in doubt", || {
        Box::pin(attention_after_unknown_commit(CommitFault::HangCall, 0))
    }),
    ("needs attention beside a commit, later", || {
        Box::pin(attention_after_unknown_commit(CommitFault::HangReply, 3))
    }),
    ("never recorded, and no reply", || {
        Box::pin(neither_recorded_nor_reported())
    }),
    ("panic", || Box::pin(panicking())),
    ("bad record", || Box::pin(bad_record())),
    ("caller left", || Box::pin(caller_disconnects())),
    ("refused", || Box::pin(refused())),
    ("anonymous", || Box::pin(anonymous())),
    ("refreshed token", || Box::pin(refreshed_token())),
    ("principal missing", || {
        let principal = Principal::extension(|account: &u64| account.to_be_bytes());
        Box::pin(without_principal(principal, "principal-missing"))
    }),
    ("principal ambiguous", || {
        Box::pin(without_principal(
            Principal::cookie("sid"),
            "principal-ambiguous",
        ))
    }),
    ("passed through", || Box::pin(passed_through())),
];

pub(crate) type Flow = std::pin::Pin<Box<dyn Future<Output = u64>>>;

fn answering(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |_, _| ANSWER.into_response())
}

fn layer_on(store: &FaultInjector<MemoryStore>) -> IdempotencyLayer {
    new_layer(store.clone())
}

fn new_layer(store: impl Store) -> IdempotencyLayer {
    let layer = IdempotencyLayer::new(store);
    match NAME.get() {
        Some(name) => layer.with_name(name).expect("a valid name"),
        None => layer,
    }
}

thread_local! {
    static NAME: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Runs flows whose layers have a name.
pub(crate) fn with_named_layers<T>(name: &'static str, run: impl FnOnce() -> T) -> T {
    NAME.set(Some(name));
    let result = run();
    NAME.set(None);
    result
}

async fn executed() -> u64 {
    let (app, effects) = answering(layer_on(&FaultInjector::new(MemoryStore::new())));
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    effects.count()
}

async fn replayed() -> u64 {
    let (app, effects) = answering(layer_on(&FaultInjector::new(MemoryStore::new())));
    send(&app, order()).await;
    assert!(send(&app, order()).await.is_replay());
    effects.count()
}

async fn mismatch() -> u64 {
    let (app, effects) = answering(layer_on(&FaultInjector::new(MemoryStore::new())));
    send(&app, order()).await;
    let other = send(&app, keyed(KEY, "raw-body-other")).await;
    assert_eq!(other.code(), "key-reused");
    effects.count()
}

async fn anonymous() -> u64 {
    let (app, effects) = answering(layer_on(&FaultInjector::new(MemoryStore::new())));
    let mut req = order();
    req.headers_mut().remove("authorization");
    req.headers_mut().remove("cookie");
    send(&app, req).await;
    effects.count()
}

async fn refreshed_token() -> u64 {
    let (app, effects) = answering(layer_on(&FaultInjector::new(MemoryStore::new())));
    send(&app, order()).await;
    let mut retry = order();
    let token = http::HeaderValue::from_static("Bearer raw-token-refreshed");
    retry.headers_mut().insert("authorization", token);
    assert!(!send(&app, retry).await.is_replay());
    effects.count()
}

async fn without_principal(principal: Principal, code: &str) -> u64 {
    let (app, effects) =
        answering(layer_on(&FaultInjector::new(MemoryStore::new())).with_principal(principal));
    let mut req = order();
    let twice = http::HeaderValue::from_static("sid=raw-cookie; sid=raw-cookie-2");
    req.headers_mut().insert("cookie", twice);
    assert_eq!(send(&app, req).await.code(), code);
    effects.count()
}

async fn passed_through() -> u64 {
    let (app, effects) =
        answering(layer_on(&FaultInjector::new(MemoryStore::new())).with_skip(|_| true));
    send(&app, order()).await;
    effects.count()
}

/// Returns a service whose handler takes a second.
fn slow(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |_, _| {
        sleep(Duration::from_secs(1)).await;
        ANSWER.into_response()
    })
}

async fn in_progress() -> u64 {
    let (app, effects) = slow(layer_on(&FaultInjector::new(MemoryStore::new())));
    let duplicate = async {
        sleep(Duration::from_millis(500)).await;
        send(&app, order()).await
    };
    let (first, duplicate) = tokio::join!(send(&app, order()), duplicate);
    assert_eq!(first.status, StatusCode::OK);
    assert_eq!(duplicate.code(), "in-progress");
    effects.count()
}

async fn waited() -> u64 {
    let wait = ConcurrentRequests::Wait(Duration::from_secs(10));
    let (app, effects) =
        slow(layer_on(&FaultInjector::new(MemoryStore::new())).with_concurrent_requests(wait));
    let duplicate = async {
        sleep(Duration::from_millis(500)).await;
        send(&app, order()).await
    };
    let (_, duplicate) = tokio::join!(send(&app, order()), duplicate);
    assert!(duplicate.is_replay());
    effects.count()
}

async fn orphan(policy: OrphanPolicy) -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = layer_on(&store).with_orphan_policy(policy);
    // The layer is dropped in the middle of its work, as if its process had died.
    store.set_fault(Operation::Renew, Fault::HangCall);
    let (dying, died) = app(layer.clone(), async |_, _| {
        std::future::pending::<()>().await;
        ANSWER.into_response()
    });
    let dying = tokio::spawn(async move { send(&dying, order()).await });
    sleep(Duration::from_secs(1)).await;
    let (app, effects) = answering(layer);
    sleep(Duration::from_secs(20)).await;
    let response = send(&app, order()).await;
    match policy {
        OrphanPolicy::Refuse | OrphanPolicy::Never => {
            assert_eq!(response.code(), "outcome-unknown");
        }
        OrphanPolicy::TakeOver => assert_eq!(response.text(), ANSWER),
    }
    drop(dying);
    effects.count() + died.count()
}

/// The time at which the store renews leases again, relative to the end of the handler.
#[derive(Clone, Copy)]
enum Recovery {
    /// The renewer notices the lost lease.
    Early,
    AtEnd,
    Late,
}

async fn lose_lease(recovery: Recovery) -> u64 {
    lose_lease_with_response(recovery, || "the late one".into_response()).await
}

async fn lose_lease_with_response(recovery: Recovery, late: fn() -> Response) -> u64 {
    let (response, effects) = send_and_lose_lease(recovery, late).await;
    assert_eq!(response.text(), ANSWER);
    effects
}

/// A handler without a record must not hide that another execution had the lease.
async fn lose_lease_and_fail(recovery: Recovery) -> u64 {
    let late = || StatusCode::BAD_GATEWAY.into_response();
    let (response, effects) = send_and_lose_lease(recovery, late).await;
    assert_eq!(response.status, StatusCode::BAD_GATEWAY);
    effects
}

/// Sends a request whose lease is lost to another layer, which responds first.
async fn send_and_lose_lease(recovery: Recovery, late: fn() -> Response) -> (TestResponse, u64) {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let (rival, rival_effects) = answering(layer_on(&store));
    let at_handler = store.clone();
    let (app, effects) = app(layer_on(&store), move |_, req: Request<Body>| {
        let (store, rival) = (at_handler.clone(), rival.clone());
        async move {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            sleep(Duration::from_secs(16)).await;
            assert_eq!(send(&rival, order()).await.text(), ANSWER);
            match recovery {
                Recovery::Early => {
                    store.clear_faults();
                    sleep(Duration::from_secs(5)).await;
                }
                Recovery::AtEnd => store.clear_faults(),
                Recovery::Late => {}
            }
            assert!(!lease.is_held());
            late()
        }
    });
    let response = send(&app, order()).await;
    store.clear_faults();
    sleep(Duration::from_secs(5)).await;
    (response, effects.count() + rival_effects.count())
}

async fn renewed() -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        async |_, _| {
            sleep(Duration::from_secs(12)).await;
            ANSWER.into_response()
        },
    );
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    effects.count()
}

/// The thread is blocked for two thirds of the lease after the renewal was due.
async fn renewed_late() -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        async |_, _| {
            tokio::time::advance(Duration::from_secs(11)).await;
            sleep(Duration::from_secs(1)).await;
            ANSWER.into_response()
        },
    );
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    effects.count()
}

async fn failing(operation: Operation, fault: Fault) -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(operation, fault);
    let (app, effects) = app(layer_on(&store), move |_, _| async move {
        match operation {
            Operation::Renew => sleep(Duration::from_secs(6)).await,
            Operation::Release => return StatusCode::BAD_GATEWAY.into_response(),
            _ => {}
        }
        ANSWER.into_response()
    });
    send(&app, order()).await;
    store.clear_faults();
    sleep(Duration::from_secs(20)).await;
    effects.count()
}

async fn never_recorded() -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let (app, effects) = answering(layer_on(&store));
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    sleep(Duration::from_secs(20)).await;
    effects.count()
}

async fn unprotected() -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::CallLost);
    let open = layer_on(&store).with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = answering(open);
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    effects.count()
}

async fn too_large(unrecordable: Unrecordable) -> u64 {
    let layer = layer_on(&FaultInjector::new(MemoryStore::new()))
        .with_response_limit(5)
        .with_unrecordable(unrecordable);
    let (app, effects) = answering(layer);
    send(&app, order()).await;
    send(&app, order()).await;
    effects.count()
}

async fn streamed() -> u64 {
    ending(|| {
        let events = [("content-type", "text/event-stream")];
        (events, Body::new(Scripted::new([ANSWER]))).into_response()
    })
    .await
}

async fn ending(response: fn() -> Response) -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        move |_, _| std::future::ready(response()),
    );
    send(&app, order()).await;
    effects.count()
}

async fn broken_body() -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        async |_, _| Response::new(Body::new(Scripted::new([Step::from(ANSWER), Step::Fail]))),
    );
    let res = tower::ServiceExt::oneshot(app, order()).await;
    assert_eq!(res.expect("infallible").status(), StatusCode::OK);
    effects.count()
}

const GAVE_UP: NeedsAttention = NeedsAttention::new("gave-up");

async fn needs_attention() -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        async |_, _| {
            let attention = GAVE_UP.with_reason(ANSWER);
            (StatusCode::BAD_GATEWAY, Extension(attention)).into_response()
        },
    );
    send(&app, order()).await;
    for _ in 0..2 {
        assert_eq!(send(&app, order()).await.code(), "outcome-unknown");
    }
    effects.count()
}

/// Reports that the entry needs attention after it has committed its response.
async fn too_late() -> u64 {
    let ledger = Ledger::default();
    let (app, effects) = app(new_layer(ledger.clone()), move |_, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let tx = ledger.begin();
        async move {
            let committed = tx.commit(&lease, ANSWER.into_response()).await;
            let mut res = committed.expect("committed").into_response();
            res.extensions_mut().insert(GAVE_UP.with_reason(ANSWER));
            res
        }
    });
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    effects.count()
}

/// The event after a dropped commit.
#[derive(Clone, Copy)]
enum Cut {
    TimedOut,
    Failed,
    Answered,
    Panicked,
}

/// Commits a record that needs attention, and drops the commit before its acknowledgement.
async fn cut_off(cut: Cut) -> u64 {
    let ledger = Ledger::default();
    ledger.next(CommitFault::HangReply);
    let effects = Effects::default();
    let (database, counting) = (ledger.clone(), effects.clone());
    let service = tower::service_fn(move |req: Request<tower_idempotency::Body<Body>>| {
        let (tx, counting) = (database.begin(), counting.clone());
        async move {
            counting.happen();
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let commit = tx.commit(&lease, attention_response());
            let cut_off = tokio::time::timeout(Duration::from_secs(1), commit).await;
            assert!(cut_off.is_err());
            match cut {
                Cut::TimedOut => Ok(StatusCode::GATEWAY_TIMEOUT.into_response()),
                Cut::Failed => Err("the intended error"),
                Cut::Answered => Ok(ANSWER.into_response()),
                Cut::Panicked => panic!("the intended panic"),
            }
        }
    });
    let layer = new_layer(ledger);
    let service = tower::Layer::layer(&layer, service);
    let res = tokio::spawn(tower::ServiceExt::oneshot(service, order())).await;
    if let Ok(res) = res {
        let res = res.expect("the handler responds");
        assert_eq!(res.status(), StatusCode::CONFLICT);
        assert!(!res.headers().contains_key("idempotent-replayed"));
    }
    effects.count()
}

fn attention_response() -> Response {
    let attention = GAVE_UP.with_reason(ANSWER);
    (StatusCode::BAD_GATEWAY, Extension(attention)).into_response()
}

/// The service fails after its response was committed.
async fn committed_then_failed() -> u64 {
    let ledger = Ledger::default();
    let effects = Effects::default();
    let (database, counting) = (ledger.clone(), effects.clone());
    let service = tower::service_fn(move |req: Request<tower_idempotency::Body<Body>>| {
        let (tx, counting) = (database.begin(), counting.clone());
        async move {
            counting.happen();
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let committed = tx.commit(&lease, ANSWER.into_response()).await;
            committed.expect("committed");
            Err::<Response, _>("the intended error")
        }
    });
    let service = tower::Layer::layer(&new_layer(ledger), service);
    let res = tower::ServiceExt::oneshot(service, order()).await;
    let res = res.expect("the handler responds");
    assert_eq!(res.status(), StatusCode::OK);
    assert!(!res.headers().contains_key("idempotent-replayed"));
    effects.count()
}

/// Reports that the entry needs attention after an unacknowledged commit. The first queries for that commit fail, and
/// so do `completions` completions.
async fn attention_after_unknown_commit(fault: CommitFault, completions: usize) -> u64 {
    let ledger = Ledger::default();
    ledger.next(fault);
    let store = ledger.store.clone();
    let (app, effects) = app(new_layer(ledger.clone()), move |_, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (tx, store) = (ledger.begin(), store.clone());
        async move {
            let commit = tx.commit(&lease, ANSWER.into_response());
            let cut_off = tokio::time::timeout(Duration::from_secs(1), commit).await;
            assert!(cut_off.is_err());
            if completions == 0 {
                store.enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
            }
            store.enqueue(Operation::Complete, vec![Fault::CallLost; completions]);
            attention_response()
        }
    });
    assert_eq!(send(&app, order()).await.code(), "outcome-unknown");
    sleep(Duration::from_secs(20)).await;
    effects.count()
}

/// The client of a request that lost its lease does not receive the handler's response, and the store never accepts its
/// record.
async fn neither_recorded_nor_reported() -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = app(layer_on(&store), move |_, _| {
        let store = store.clone();
        async move {
            store.set_fault(Operation::Renew, Fault::LeaseLost);
            sleep(Duration::from_secs(6)).await;
            store.set_fault(Operation::Complete, Fault::CallLost);
            ANSWER.into_response()
        }
    });
    assert_eq!(send(&app, order()).await.code(), "outcome-unknown");
    sleep(Duration::from_secs(60)).await;
    effects.count()
}

async fn unprotected_attention() -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::CallLost);
    let open = layer_on(&store).with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = app(open, async |_, _| {
        Extension(GAVE_UP.with_reason(ANSWER)).into_response()
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::OK);
    effects.count()
}

async fn panicking() -> u64 {
    let (app, effects) = app(
        layer_on(&FaultInjector::new(MemoryStore::new())),
        async |n, _| {
            assert!(n == 0, "it panics");
            ANSWER.into_response()
        },
    );
    let app = app.layer(tower_http::catch_panic::CatchPanicLayer::new());
    assert_eq!(send(&app, order()).await.status, 500);
    effects.count()
}

async fn bad_record() -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = answering(layer_on(&store));
    send(&app, order()).await;
    store.rewrite_records(|record| record.slice(1..));
    assert_eq!(send(&app, order()).await.code(), "store-unavailable");
    effects.count()
}

async fn caller_disconnects() -> u64 {
    let layer = layer_on(&FaultInjector::new(MemoryStore::new()));
    let (app, effects) = slow(layer.clone());
    let left = tokio::time::timeout(Duration::from_millis(100), send(&app, order())).await;
    assert!(left.is_err());
    while layer.in_flight() > 0 {
        sleep(Duration::from_millis(100)).await;
    }
    effects.count()
}

async fn refused() -> u64 {
    let layer = layer_on(&FaultInjector::new(MemoryStore::new()));
    let (app, effects) = answering(layer.clone().with_missing_key(MissingKey::Reject));
    let malformed = format!("{KEY}, {KEY}");
    assert_eq!(
        send(&app, keyed(&malformed, BODY)).await.code(),
        "malformed-key"
    );
    let long = KEY.repeat(100);
    assert_eq!(send(&app, keyed(&long, BODY)).await.code(), "key-too-long");
    let mut keyless = order();
    keyless.headers_mut().remove("idempotency-key");
    assert_eq!(send(&app, keyless).await.code(), "missing-key");
    let (small, _) = answering(layer.with_request_limit(1));
    assert_eq!(send(&small, order()).await.code(), "body-too-large");
    effects.count()
}

// ---- Metrics ----

/// A request, its retry with another response, and a mismatch, all observed.
async fn observing(store: impl Store) -> u64 {
    let layer = new_layer(store).with_enforcement(Enforcement::Observe);
    let (app, effects) = app(layer, async |n, req: Request<Body>| {
        drop(axum::body::to_bytes(req.into_body(), 999).await);
        format!("{ANSWER} {n}")
    });
    for body in [BODY, BODY, "another"] {
        send(&app, keyed(KEY, body)).await;
        sleep(Duration::from_secs(10)).await;
    }
    effects.count()
}

/// Runs a flow under its own recorder and a paused clock.
pub(crate) fn counted(flow: fn() -> Flow) -> Metrics {
    observed::counted(async { _ = flow().await })
}

fn flow(name: &str) -> fn() -> Flow {
    let (_, flow) = FLOWS
        .into_iter()
        .find(|(found, _)| *found == name)
        .expect("a flow of this name");
    flow
}

/// Asserts that a flow changes exactly these counters.
fn assert_counts(name: &str, expected: &[(&str, f64)]) {
    let mut found = counted(flow(name));
    // Each unsafe request is counted by its coverage too: see the tests of coverage.
    found.retain(|name, _| name.contains("_total") && !name.contains("unsafe_requests"));
    let expected: Metrics = expected
        .iter()
        .map(|(name, count)| (format!("idempotency_{name}"), *count))
        .collect();
    assert_eq!(found, expected, "{name}");
}

// S-305
#[test]
fn execution_and_replay_are_counted_once() {
    assert_counts("executed", &[("granted_total", 1.0)]);
    assert_counts(
        "replayed",
        &[("granted_total", 1.0), ("replayed_total", 1.0)],
    );
}

// S-306
#[test]
fn duplicate_and_key_reuse_are_counted_once() {
    assert_counts(
        "in progress",
        &[
            ("granted_total", 1.0),
            ("in_progress_total", 1.0),
            ("refused_total{code=in-progress}", 1.0),
        ],
    );
    assert_counts(
        "mismatch",
        &[
            ("granted_total", 1.0),
            ("mismatch_total", 1.0),
            ("refused_total{code=key-reused}", 1.0),
        ],
    );
    assert_counts(
        "waited",
        &[
            ("granted_total", 1.0),
            ("waiting_total", 1.0),
            ("replayed_total", 1.0),
        ],
    );
}

// F-186, S-307
#[test]
fn orphan_and_takeover_are_counted_once() {
    let found = counted(flow("orphan refused"));
    assert_eq!(found["idempotency_orphaned_total"], 1.0);
    assert_eq!(
        found["idempotency_refused_total{code=outcome-unknown}"],
        1.0
    );
    assert_eq!(found["idempotency_granted_total"], 1.0);
    let found = counted(flow("takeover"));
    assert_eq!(found["idempotency_takeover_total"], 1.0);
    assert_eq!(found["idempotency_granted_total"], 2.0);
    assert!(!found.contains_key("idempotency_orphaned_total"));
}

// F-186, S-311
#[test]
fn lost_lease_is_counted_once() {
    for name in [
        "lease lost at the end",
        "lease lost meanwhile",
        "lease lost at the end, then an error",
        "lease lost meanwhile, then an error",
        "lease lost in an outage, then an error",
    ] {
        let found = counted(flow(name));
        assert_eq!(found["idempotency_lease_lost_total"], 1.0, "{name}");
        assert_eq!(total(&found, "idempotency_released_total"), 0.0, "{name}");
        assert_eq!(found["idempotency_granted_total"], 2.0, "{name}");
        assert_eq!(found["idempotency_takeover_total"], 1.0, "{name}");
    }
}

// F-187, S-322
#[test]
fn late_renewal_is_counted() {
    for (name, flow) in FLOWS {
        let found = counted(flow);
        let expected = (name == "renewed late").then_some(&1.0);
        let name = format!("{name} {found:?}");
        assert_eq!(
            found.get("idempotency_renew_late_total"),
            expected,
            "{name}"
        );
    }
}

// F-187, S-322
// The test runs in real time, on one thread.
#[test]
fn blocked_runtime_shows_late_renewal() {
    let recorder = DebuggingRecorder::new();
    let store = FaultInjector::new(MemoryStore::new());
    let layer = layer_on(&store).with_lease_ttl(Ttl::from_millis(300));
    let (app, effects) = app(layer, move |_, _| {
        let store = store.clone();
        async move {
            let before = store.calls(Operation::Renew);
            std::thread::sleep(Duration::from_millis(250));
            // The renewal was due for at least 150 ms, half of the lease.
            eventually("the lease is renewed", || {
                store.calls(Operation::Renew) > before
            })
            .await;
            ANSWER.into_response()
        }
    });
    metrics::with_local_recorder(&recorder, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(send(&app, order()))
    });
    let found = read(&recorder);
    assert!(found["idempotency_renew_late_total"] >= 1.0, "{found:?}");
    assert_eq!(effects.count(), 1);
}

// F-186, S-312
#[test]
fn unstored_record_is_counted_once() {
    for (name, _) in FLOWS {
        let found = counted(flow(name));
        let expected = (name == "never recorded").then_some(&1.0);
        let name = format!("{name} {found:?}");
        assert_eq!(
            found.get("idempotency_unrecorded_total"),
            expected,
            "{name}"
        );
    }
}

// F-188, S-314
#[test]
fn each_failed_store_call_is_counted_by_its_operation() {
    for (name, operation, least) in [
        ("acquire failing", "acquire", 3.0),
        ("acquire hanging", "acquire", 2.0),
        ("complete failing", "complete", 3.0),
        ("complete hanging", "complete", 2.0),
        ("renew failing", "renew", 1.0),
        ("release failing", "release", 3.0),
    ] {
        let found = counted(flow(name));
        let label = format!("idempotency_store_error_total{{operation={operation}}}");
        assert!(found[&label] >= least, "{name} {found:?}");
        let others = found
            .keys()
            .filter(|key| key.starts_with("idempotency_store_error_total"))
            .count();
        assert_eq!(others, 1, "{name} {found:?}");
    }
    assert_counts(
        "acquire failing",
        &[
            ("refused_total{code=store-unavailable}", 1.0),
            ("store_error_total{operation=acquire}", 3.0),
        ],
    );
    assert_counts(
        "unprotected",
        &[
            ("unprotected_total", 1.0),
            ("store_error_total{operation=acquire}", 3.0),
        ],
    );
}

// S-315
#[test]
fn tombstone_is_counted_by_reason() {
    assert_counts(
        "too large",
        &[
            ("granted_total", 1.0),
            ("tombstones_total{reason=too_large}", 1.0),
            ("tombstone_replays_total", 1.0),
            ("refused_total{code=response-not-retained}", 1.0),
        ],
    );
    assert_counts(
        "streamed",
        &[
            ("granted_total", 1.0),
            ("tombstones_total{reason=streamed}", 1.0),
        ],
    );
}

// S-316
#[test]
fn attention_is_counted_by_code() {
    assert_counts(
        "needs attention",
        &[
            ("granted_total", 1.0),
            ("needs_attention_total{reason=gave-up}", 1.0),
            ("unresolved_total{reason=gave-up}", 2.0),
            ("refused_total{code=outcome-unknown}", 2.0),
        ],
    );
    assert_counts("needs attention too late", &[("granted_total", 1.0)]);
    let log = logged(flow("needs attention"));
    let errors: Vec<_> = log
        .lines()
        .filter(|line| line.contains(" ERROR "))
        .collect();
    assert_eq!(errors.len(), 1, "{log}");
    assert!(errors[0].contains("code=\"gave-up\""), "{log}");
}

// S-317
/// The count is independent of the acknowledgement of the commit, and of events after it.
#[test]
fn committed_attention_is_counted_once() {
    for name in [
        "commit cut off",
        "commit cut off, then an error",
        "commit cut off, then an answer",
    ] {
        assert_counts(
            name,
            &[
                ("granted_total", 1.0),
                ("needs_attention_total{reason=gave-up}", 1.0),
                ("refused_total{code=outcome-unknown}", 1.0),
            ],
        );
    }
    // No query has found the outcome of this commit: its retries are counted as unresolved.
    assert_counts("commit cut off by a panic", &[("granted_total", 1.0)]);
    assert_counts("committed, then an error", &[("granted_total", 1.0)]);
}

// S-318
#[test]
fn attention_after_unknown_commit_is_counted() {
    let found = counted(flow("needs attention, commit in doubt"));
    assert_eq!(
        found.get("idempotency_needs_attention_total{reason=gave-up}"),
        Some(&1.0),
        "{found:?}"
    );
}

// S-319
#[test]
fn unstored_attention_is_not_counted_later() {
    assert_counts(
        "needs attention beside a commit, later",
        &[
            ("granted_total", 1.0),
            ("store_error_total{operation=complete}", 3.0),
            ("refused_total{code=outcome-unknown}", 1.0),
        ],
    );
}

// S-313
#[test]
fn undelivered_response_is_not_counted() {
    let found = counted(flow("never recorded, and no reply"));
    assert!(
        found["idempotency_store_error_total{operation=complete}"] > 3.0,
        "the layer tried to store it"
    );
    assert_eq!(found.get("idempotency_unrecorded_total"), None);
}

// S-229
#[test]
fn attention_without_lease_is_logged_only() {
    assert_counts(
        "needs attention unprotected",
        &[
            ("unprotected_total", 1.0),
            ("store_error_total{operation=acquire}", 3.0),
        ],
    );
    let log = logged(flow("needs attention unprotected"));
    let is_warning = |line: &str| line.contains("WARN") && line.contains("code=\"gave-up\"");
    assert_eq!(
        log.lines().filter(|line| is_warning(line)).count(),
        1,
        "{log}"
    );
}

// S-231
#[test]
fn discarded_attention_is_logged() {
    let log = logged(flow("needs attention, lease lost"));
    let is_warning = |line: &str| line.contains("WARN") && line.contains("code=\"gave-up\"");
    assert_eq!(
        log.lines().filter(|line| is_warning(line)).count(),
        1,
        "{log}"
    );
}

// S-320
#[test]
fn released_key_is_counted_by_reason() {
    for (name, reason, times) in [
        ("status", "status", 1.0),
        ("no-store", "no_store", 1.0),
        ("broken body", "broken_body", 1.0),
        ("panic", "panic", 1.0),
        ("too large, released", "unrecordable", 2.0),
    ] {
        let released = format!("released_total{{reason={reason}}}");
        assert_counts(name, &[("granted_total", times), (&released, times)]);
    }
}

// F-188, S-321
#[test]
fn bad_record_and_disconnect_are_counted_once() {
    assert_counts(
        "bad record",
        &[
            ("granted_total", 1.0),
            ("bad_record_total", 1.0),
            ("refused_total{code=store-unavailable}", 1.0),
        ],
    );
    assert_counts(
        "caller left",
        &[("granted_total", 1.0), ("detached_total", 1.0)],
    );
    assert_counts(
        "refused",
        &[
            ("refused_total{code=malformed-key}", 1.0),
            ("refused_total{code=key-too-long}", 1.0),
            ("refused_total{code=missing-key}", 1.0),
            ("refused_total{code=body-too-large}", 1.0),
        ],
    );
}

// S-323
#[test]
fn in_flight_gauge_returns_to_zero() {
    for (name, flow) in FLOWS {
        let found = counted(flow);
        let gauge = found.get("idempotency_in_flight").copied();
        assert_eq!(gauge.unwrap_or(0.0), 0.0, "{name}");
    }
    assert!(counted(flow("executed")).contains_key("idempotency_in_flight"));
}

// S-323
#[test]
fn in_flight_gauge_counts_disconnected_clients() {
    let recorder = DebuggingRecorder::new();
    // Each read returns the changes since the previous one.
    let mut sum = 0.0;
    let mut in_flight = || {
        sum += read(&recorder)["idempotency_in_flight"];
        sum
    };
    let barrier = Barrier::closed();
    let (app, effects) = app(layer_on(&FaultInjector::new(MemoryStore::new())), {
        let barrier = barrier.clone();
        move |_, _| {
            let barrier = barrier.clone();
            async move { barrier.pass().await }
        }
    });
    metrics::with_local_recorder(&recorder, || {
        paused().block_on(async {
            let first = tokio::spawn(send_owned(app.clone(), keyed("first", BODY)));
            barrier.arrival().await;
            assert_eq!(in_flight(), 1.0);
            let second = tokio::spawn(send_owned(app, keyed("second", BODY)));
            barrier.arrival().await;
            assert_eq!(in_flight(), 2.0);
            second.abort();
            assert!(second.await.is_err(), "the client has disconnected");
            assert_eq!(in_flight(), 2.0);
            barrier.open_for_good();
            first.await.expect("an answer");
            sleep(Duration::from_secs(1)).await;
            assert_eq!(in_flight(), 0.0);
        });
    });
    assert_eq!(effects.count(), 2);
}

async fn send_owned(app: Router, req: Request<Body>) -> tests::TestResponse {
    send(&app, req).await
}

// S-324
#[test]
fn times_and_sizes_are_observed() {
    let found = counted(flow("replayed"));
    assert_eq!(found["idempotency_handler_seconds"], 1.0);
    assert_eq!(found["idempotency_record_bytes"], 1.0);
    assert_eq!(found["idempotency_store_seconds{operation=acquire}"], 2.0);
    assert_eq!(found["idempotency_store_seconds{operation=complete}"], 1.0);
    let found = counted(flow("renewed"));
    assert_eq!(found["idempotency_store_seconds{operation=renew}"], 2.0);
    let found = counted(flow("status"));
    assert_eq!(found["idempotency_store_seconds{operation=release}"], 1.0);
    assert_eq!(found["idempotency_handler_seconds"], 1.0);
    assert!(!found.contains_key("idempotency_record_bytes"));
    // The time of failed handlers counts as well.
    for name in ["panic", "committed, then an error"] {
        let found = counted(flow(name));
        assert_eq!(found["idempotency_handler_seconds"], 1.0, "{name}");
    }
}

#[test]
fn run_once_is_counted_like_requests() {
    let found = counted(|| {
        Box::pin(async {
            let layer = layer_on(&FaultInjector::new(MemoryStore::new()));
            let work = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(1);
            for _ in 0..2 {
                let _ = layer.run_once(KEY, BODY, work).await.expect("an outcome");
            }
            let _ = layer
                .run_once(KEY, "other", work)
                .await
                .expect("an outcome");
            let held = async |_lease: Lease| Err::<u8, _>(WorkError::Orphan(()));
            let _ = layer.run_once("held", "x", held).await.expect("an outcome");
            let failed = async |_lease: Lease| Err::<u8, _>(WorkError::Release(()));
            let _ = layer
                .run_once("failed", "x", failed)
                .await
                .expect("an outcome");
            1
        })
    });
    for (name, count) in [
        ("idempotency_granted_total", 3.0),
        ("idempotency_replayed_total", 1.0),
        ("idempotency_mismatch_total", 1.0),
        ("idempotency_held_total", 1.0),
        ("idempotency_released_total{reason=failed}", 1.0),
        ("idempotency_in_flight", 0.0),
    ] {
        assert_eq!(found.get(name).copied(), Some(count), "{name} {found:?}");
    }
}

/// Work that has committed its value itself counts as an execution, not as a replay.
#[test]
fn committed_value_is_not_counted_as_replay() {
    let found = counted(|| {
        Box::pin(async {
            let ledger = Ledger::default();
            let layer = IdempotencyLayer::new(ledger.clone());
            let work = async move |lease: Lease| {
                let prepared = lease.prepare_value(7);
                let committed = ledger.begin().commit_prepared(prepared).await;
                committed.map_err(|_| WorkError::Release(()))
            };
            let _ = layer.run_once(KEY, BODY, work).await.expect("an outcome");
            1
        })
    });
    assert_eq!(found["idempotency_granted_total"], 1.0);
    assert!(
        !found.contains_key("idempotency_replayed_total"),
        "{found:?}"
    );
}

// F-184, S-325
#[test]
fn labels_carry_no_request_data() {
    const LABELS: [&str; 6] = [
        "operation=",
        "reason=",
        "code=",
        "coverage=",
        "outcome=",
        "part=",
    ];
    for (name, flow) in FLOWS {
        for (metric, _) in counted(flow) {
            let labels = metric.split_once('{').map_or("", |(_, labels)| labels);
            let known = |label: &str| LABELS.iter().any(|known| label.starts_with(known));
            assert!(
                labels.is_empty() || labels.split(',').all(known),
                "{name} {metric}"
            );
            assert!(!metric.contains("raw"), "{name} {metric}");
            let digits = labels.bytes().filter(u8::is_ascii_digit).count();
            assert_eq!(digits, 0, "no digest either: {name} {metric}");
        }
    }
}

// ---- Events ----

/// Returns the log of a flow at all levels.
pub(crate) fn logged(flow: fn() -> Flow) -> String {
    observed::observed("trace", async { _ = flow().await }).1
}

#[test]
fn events_are_captured_from_first_callsite_use() {
    fn log_event() {
        tracing::info!("said");
    }
    let log = logged(|| {
        Box::pin(async {
            std::thread::spawn(log_event).join().expect("no panic");
            log_event();
            1
        })
    });
    assert_eq!(log.matches("said").count(), 1, "{log}");
}

// F-184, S-326
#[test]
fn events_show_no_secrets() {
    for (name, flow) in FLOWS {
        let log = logged(flow);
        assert!(
            log.contains("tower_idempotency"),
            "{name}: nothing was captured"
        );
        for secret in SECRETS {
            let line = log.lines().find(|line| line.contains(secret));
            assert_eq!(line, None, "{name}");
        }
    }
}

/// A value whose serialization error contains the value.
#[derive(serde::Deserialize)]
pub(crate) struct QuotingValue;

impl serde::Serialize for QuotingValue {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom(ANSWER))
    }
}

#[test]
fn run_once_events_show_no_key_or_value() {
    let log = logged(|| {
        Box::pin(async {
            let layer = layer_on(&FaultInjector::new(MemoryStore::new()));
            let text = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(ANSWER.to_owned());
            let number = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(7_u64);
            let talkative = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(QuotingValue);
            let first = layer.run_once(KEY, BODY, text).await;
            assert!(first.is_ok());
            assert!(layer.run_once(KEY, BODY, number).await.is_err());
            assert!(layer.run_once("other", BODY, talkative).await.is_ok());
            2
        })
    });
    assert!(log.contains("cannot be serialized"), "{log}");
    for secret in SECRETS {
        assert!(!log.contains(secret), "{secret}: {log}");
    }
}

// F-184, S-327
#[test]
fn entry_is_named_by_eight_hex_digits() {
    for (name, flow) in FLOWS {
        let log = logged(flow);
        for word in log.split(|c: char| !c.is_ascii_hexdigit()) {
            assert!(word.len() < 32, "{name}: a digest: {word}");
        }
        for (_, id) in log
            .match_indices("id=")
            .map(|(at, id)| log.split_at(at + id.len()))
        {
            let digits = id.bytes().take_while(u8::is_ascii_hexdigit).count();
            assert_eq!(digits, 8, "{name}: {id}");
        }
    }
    let log = logged(flow("replayed"));
    let named: Vec<_> = log
        .lines()
        .filter_map(|line| line.split_once("id=")?.1.get(..8))
        .collect();
    assert!(named.len() >= 3, "{log}");
    assert!(
        named.iter().all(|id| *id == named[0]),
        "one entry: {named:?}"
    );
}

// S-328
#[test]
fn usual_paths_log_no_errors() {
    for (name, flow) in FLOWS {
        let log = logged(flow);
        let loud = log
            .lines()
            .filter(|line| line.contains("tower_idempotency"))
            .any(|line| line.contains(" ERROR ") || line.contains(" WARN "));
        let expected = !matches!(
            name,
            "executed"
                | "replayed"
                | "mismatch"
                | "in progress"
                | "waited"
                | "renewed"
                | "too large"
                | "too large, released"
                | "streamed"
                | "status"
                | "no-store"
                | "broken body"
                | "commit cut off by a panic"
                | "committed, then an error"
                | "panic"
                | "caller left"
                | "refused"
                | "principal ambiguous"
                | "passed through"
        );
        assert_eq!(loud, expected, "{name}:\n{log}");
    }
}

/// A process that starts without enforcement shows it, although nothing has switched it.
#[test]
fn layer_without_enforcement_warns_once() {
    let share = Rollout::new(10, Enforcement::Enforce, Enforcement::Observe).expect("a share");
    for (rollout, warnings) in [
        (share, 1),
        (Enforcement::Observe.into(), 1),
        (Enforcement::Off.into(), 1),
        (Enforcement::Enforce.into(), 0),
    ] {
        let (_, log) = observed::observed("warn", async {
            let layer = new_layer(MemoryStore::new()).with_enforcement(rollout);
            let (app, _) = answering(layer);
            for key in [KEY, "another-key"] {
                send(&app, keyed(key, BODY)).await;
            }
        });
        let found = log.matches("layer does not enforce all requests");
        assert_eq!(found.count(), warnings, "{rollout}: {log}");
        let value = format!("enforcement={rollout}");
        assert_eq!(log.contains(&value), warnings > 0, "{rollout}: {log}");
    }
}

#[test]
fn every_flow_has_documented_effects() {
    for (name, flow) in FLOWS {
        let expected = match name {
            "acquire failing"
            | "acquire hanging"
            | "refused"
            | "principal missing"
            | "principal ambiguous" => 0,
            "observed" | "observed, store down" => 3,
            "takeover"
            | "refreshed token"
            | "lease lost at the end"
            | "lease lost meanwhile"
            | "lease lost at the end, then an error"
            | "lease lost meanwhile, then an error"
            | "lease lost in an outage, then an error"
            | "needs attention, lease lost"
            | "too large, released" => 2,
            _ => 1,
        };
        let effects = paused().block_on(async { flow().await });
        assert_eq!(effects, expected, "{name}");
    }
}

// ---- Debug output ----

// F-184, S-329
#[tokio::test(start_paused = true)]
async fn debug_output_shows_no_secret() {
    let layer = layer_on(&FaultInjector::new(MemoryStore::new()))
        .with_secret("raw-secret-0123456789")
        .expect("long enough");
    let shown = Arc::new(Mutex::new(String::new()));
    let keep = Arc::clone(&shown);
    let (app, effects) = app(layer.clone(), move |_, req: Request<Body>| {
        let extensions = req.extensions();
        let key = extensions.get::<tower_idempotency::IdempotencyKey>();
        let text = format!("{key:?} {:?} {:?}", extensions.get::<Lease>(), req.body());
        *keep.lock().expect("no panic") = text;
        std::future::ready(ANSWER.into_response())
    });
    let service = tower::Layer::layer(
        &layer,
        tower::service_fn(async |req: Request<tower_idempotency::Body<Body>>| {
            Ok::<_, Infallible>(http::Response::new(format!("{:?}", req.body())))
        }),
    );
    let mut calling = service.clone();
    let future = tower::Service::call(&mut calling, keyed("raw-key-2", BODY));
    let mut outputs = vec![
        format!("{layer:?} {layer:#?}"),
        format!("{future:?}"),
        format!("{:?}", tower::Layer::layer(&layer, ())),
    ];
    let res = future.await.expect("infallible");
    outputs.push(format!("{:?}", res.body()));
    let inner = http_body_util::BodyExt::collect(res.into_body()).await;
    outputs.push(format!("{:?}", inner.expect("a body").to_bytes()));
    assert_eq!(send(&app, order()).await.text(), ANSWER);
    let completed = Acquired::Completed {
        fingerprint: Fingerprint::from_bytes([7; 32]),
        record: ANSWER.into(),
        expires_in: Duration::from_secs(1),
        token: None,
    };
    outputs.push(format!("{completed:?}"));
    let resolution = tower_idempotency::inspect::Resolution::Complete {
        record: ANSWER.into(),
        retention: Ttl::from_secs(1),
    };
    outputs.push(format!("{resolution:?}"));
    outputs.push(shown.lock().expect("no panic").clone());
    for output in &outputs {
        assert!(!output.is_empty());
        for secret in SECRETS.into_iter().chain(["raw-secret"]) {
            assert!(!output.contains(secret), "{secret} in {output}");
        }
    }
    assert!(
        outputs
            .last()
            .is_some_and(|text| text.contains("IdempotencyKey(..)"))
    );
    assert!(
        outputs
            .last()
            .is_some_and(|text| text.contains("generation: 1"))
    );
    assert_eq!(effects.count(), 1);
}
