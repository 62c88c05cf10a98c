//! Keys that the service derives from an entity or from the content.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Extension, Router, body::Body, extract::Path, response::IntoResponse, routing};
use http::{HeaderValue, Request, StatusCode};
use tests::{Effects, app, created, creating, post, send};
use tokio::{spawn, sync::Notify, task::yield_now, time::advance};
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, KeyScope, Lease, MemoryStore, MissingKey, NeedsAttention,
    OrphanPolicy, Principal, Retention, StoreFailure, Ttl,
    conformance::{Fault, FaultInjector, Operation},
    original_path_and_query,
    transaction::LeaseExt,
};

const WINDOW: Ttl = Ttl::from_secs(300);

fn keyless(path: &str, token: &'static str, body: &'static str) -> Request<Body> {
    let req = Request::post(path).header("authorization", token);
    req.body(Body::from(body)).expect("a request")
}

fn refunds(scope: KeyScope) -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
        .with_key_from(scope, |head| Some(head.uri.path().to_owned()))
}

// F-905, S-917
#[tokio::test(start_paused = true)]
async fn key_scope_decides_if_callers_share_entity() {
    for (scope, executed) in [(KeyScope::AllCallers, 1), (KeyScope::EachCaller, 2)] {
        let (app, effects) = creating(refunds(scope));
        for operator in ["ann", "bob", "ann"] {
            let res = send(&app, keyless("/payments/7/refund", operator, "")).await;
            assert_eq!(res.status, StatusCode::CREATED);
        }
        assert_eq!(effects.count(), executed, "{scope:?}");
        send(&app, keyless("/payments/8/refund", "ann", "")).await;
        assert_eq!(effects.count(), executed + 1, "{scope:?}");
    }
}

// F-905, S-917
/// The client spells the path. The router decodes escapes, and a number may have zeros or a sign in front.
#[tokio::test(start_paused = true)]
async fn parsed_entity_has_one_key_in_each_spelling() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Reject)
        .with_key_from(KeyScope::AllCallers, |head| {
            let path = original_path_and_query(head).split('?').next()?;
            let id = path.strip_prefix("/payments/")?.strip_suffix("/refund")?;
            id.parse::<u64>().ok().map(|id| format!("refund {id}"))
        });
    let refunded = Arc::<Mutex<Vec<u64>>>::default();
    let refund = {
        let refunded = Arc::clone(&refunded);
        async move |Path(id): Path<u64>| {
            refunded.lock().expect("a lock").push(id);
            StatusCode::CREATED
        }
    };
    let refunds = Router::new().route("/{id}/refund", routing::post(refund));
    let app: Router = Router::new().nest("/payments", refunds.route_layer(layer));
    for (id, status) in [
        ("7", 201),
        ("%37", 400),
        ("07", 422),
        ("+7", 422),
        ("7", 201),
        ("8", 201),
    ] {
        let res = send(&app, keyless(&format!("/payments/{id}/refund"), "ann", "")).await;
        assert_eq!(res.status.as_u16(), status, "{id}");
    }
    assert_eq!(*refunded.lock().expect("a lock"), [7_u64, 8]);
}

// S-917
#[tokio::test(start_paused = true)]
async fn principal_still_rejects_if_callers_share_entity() {
    let principal = Principal::from_fn(|_| {
        let mut res = http::Response::new("who?".into());
        *res.status_mut() = StatusCode::UNAUTHORIZED;
        Err(res.into())
    });
    let (app, effects) = creating(refunds(KeyScope::AllCallers).with_principal(principal));
    let res = send(&app, keyless("/payments/7/refund", "ann", "")).await;
    assert_eq!((res.status, effects.count()), (StatusCode::UNAUTHORIZED, 0));
}

// S-918
#[tokio::test(start_paused = true)]
async fn client_error_frees_key_of_service() {
    for scope in [KeyScope::AllCallers, KeyScope::EachCaller] {
        let layer = refunds(scope).with_recorded_statuses(|_| true);
        let (app, effects) = app(
            layer,
            async |n, req: Request<Body>| match axum::body::to_bytes(req.into_body(), 9).await {
                Ok(body) if body == "good" => created(n),
                _ => StatusCode::UNPROCESSABLE_ENTITY.into_response(),
            },
        );
        let bad = send(&app, keyless("/payments/7/refund", "ann", "bad")).await;
        assert_eq!(bad.status, StatusCode::UNPROCESSABLE_ENTITY);
        for replay in [false, true] {
            let good = send(&app, keyless("/payments/7/refund", "ann", "good")).await;
            assert_eq!(
                (good.status, good.is_replay()),
                (StatusCode::CREATED, replay)
            );
        }
        assert_eq!(effects.count(), 2, "{scope:?}");
    }
}

// S-918
/// A key that the layer derives is no choice of the client either.
#[tokio::test(start_paused = true)]
async fn client_error_frees_derived_key() {
    let named = derived().with_key_from(KeyScope::EachCaller, |_| None);
    for layer in [derived(), named, derived().with_recorded_statuses(|_| true)] {
        let (app, effects) = app(layer, async |n, _req| match n {
            1 => StatusCode::CONFLICT.into_response(),
            _ => created(n),
        });
        for status in [
            StatusCode::CONFLICT,
            StatusCode::CREATED,
            StatusCode::CREATED,
        ] {
            let res = send(&app, keyless("/payments/7/refund", "ann", "")).await;
            assert_eq!(res.status, status);
        }
        assert_eq!(effects.count(), 2);
    }
    // A client that sends a key can correct the request with another key, so its 4xx is recorded.
    let (app, effects) = app(derived(), async |_, _| StatusCode::CONFLICT);
    for is_replay in [false, true] {
        let res = send(&app, post("/payments/7/refund", "k", "")).await;
        assert_eq!(res.is_replay(), is_replay);
    }
    assert_eq!(effects.count(), 1);
}

// S-959
/// A release would leave an orphan. With `OrphanPolicy::Refuse`, its retry would get 409.
#[tokio::test(start_paused = true)]
async fn client_error_with_downstream_key_is_recorded() {
    for policy in [OrphanPolicy::TakeOver, OrphanPolicy::Refuse] {
        let layer = || derived().with_orphan_policy(policy);
        for layer in [
            layer(),
            layer().with_key_from(KeyScope::EachCaller, |_| None),
        ] {
            let (app, effects, _) = charging(layer, &[402]);
            for is_replay in [false, true] {
                let res = send(&app, keyless("/", "a", "tea")).await;
                assert_eq!(res.status, StatusCode::PAYMENT_REQUIRED);
                assert_eq!(res.is_replay(), is_replay);
            }
            assert_eq!(effects.count(), 1, "{policy:?}");
        }
    }
}

// S-959
/// The first execution may have called another service. Its takeover derives no key.
#[tokio::test(start_paused = true)]
async fn client_error_after_takeover_is_recorded() {
    let (app, effects) = app(derived(), async |n, req: Request<Body>| {
        if n > 1 {
            return StatusCode::CONFLICT;
        }
        let lease = req.extensions().get::<Lease>().expect("a lease");
        drop(lease.derive("charge"));
        StatusCode::BAD_GATEWAY
    });
    for (status, is_replay) in [
        (StatusCode::BAD_GATEWAY, false),
        (StatusCode::CONFLICT, false),
        (StatusCode::CONFLICT, true),
    ] {
        let res = send(&app, keyless("/", "a", "tea")).await;
        assert_eq!((res.status, res.is_replay()), (status, is_replay));
        advance(Duration::from_secs(16)).await;
    }
    assert_eq!(effects.count(), 2);
}

// S-919
#[tokio::test(start_paused = true)]
async fn sent_key_never_equals_key_of_service() {
    let store = MemoryStore::new();
    let layer = || IdempotencyLayer::new(store.clone()).with_principal(Principal::unscoped());
    let (plain, sent) = creating(layer());
    let named = layer().with_key_from(KeyScope::EachCaller, |_| Some("refund-7".to_owned()));
    let (named, made) = creating(named);
    send(&plain, post("/refunds", "refund-7", "other")).await;
    let res = send(&named, post("/refunds", "x", "order")).await;
    assert_eq!(
        (res.status, sent.count(), made.count()),
        (StatusCode::CREATED, 1, 1)
    );
}

// ---- Derived keys ----

type Keys = Arc<Mutex<Vec<String>>>;

/// A handler that derives a key for a call to another service, and then responds with these statuses in order.
fn charging(layer: IdempotencyLayer, statuses: &'static [u16]) -> (Router, Effects, Keys) {
    let keys = Keys::default();
    let charged = Arc::clone(&keys);
    let (app, effects) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        charged.lock().expect("a lock").push(lease.derive("charge"));
        let status = statuses[usize::try_from(n).expect("few") - 1];
        async move {
            if status == 0 {
                panic!("after the charge");
            }
            StatusCode::from_u16(status).expect("a status")
        }
    });
    (app, effects, keys)
}

fn derived() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Derive)
        .with_retention(WINDOW)
}

// F-906, S-920
#[tokio::test(start_paused = true)]
async fn equal_order_after_window_has_other_downstream_key() {
    let (app, effects, keys) = charging(derived(), &[201, 201]);
    for replay in [false, true] {
        assert_eq!(
            send(&app, keyless("/", "a", "tea")).await.is_replay(),
            replay
        );
    }
    advance(WINDOW.as_duration()).await;
    assert!(!send(&app, keyless("/", "a", "tea")).await.is_replay());
    let keys = keys.lock().expect("a lock");
    assert_eq!((effects.count(), keys.len()), (2, 2));
    assert_ne!(keys[0], keys[1]);
}

// S-920
#[tokio::test(start_paused = true)]
async fn retry_after_error_keeps_downstream_key() {
    let (app, effects, keys) = charging(derived(), &[502, 502, 201]);
    assert_eq!(
        send(&app, keyless("/", "a", "tea")).await.status,
        StatusCode::BAD_GATEWAY
    );
    advance(Duration::from_secs(16)).await;
    for status in [StatusCode::BAD_GATEWAY, StatusCode::CREATED] {
        assert_eq!(send(&app, keyless("/", "a", "tea")).await.status, status);
    }
    assert!(send(&app, keyless("/", "a", "tea")).await.is_replay());
    let keys = keys.lock().expect("a lock");
    assert_eq!((effects.count(), keys.len()), (3, 3));
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

// S-920
#[tokio::test(start_paused = true)]
async fn panic_keeps_downstream_key() {
    let (app, _, keys) = charging(derived(), &[0, 201]);
    let panicking = app.clone();
    let panicked = tokio::spawn(async move { send(&panicking, keyless("/", "a", "tea")).await });
    assert!(panicked.await.expect_err("a panic").is_panic());
    advance(Duration::from_secs(16)).await;
    assert_eq!(
        send(&app, keyless("/", "a", "tea")).await.status,
        StatusCode::CREATED
    );
    let keys = keys.lock().expect("a lock");
    assert_eq!(keys[0], keys[1]);
}

// S-920
#[tokio::test(start_paused = true)]
async fn error_without_downstream_key_frees_key() {
    let (app, effects) = app(derived(), async |_, _| StatusCode::BAD_GATEWAY);
    for _ in 0..2 {
        assert_eq!(
            send(&app, keyless("/", "a", "tea")).await.status,
            StatusCode::BAD_GATEWAY
        );
    }
    assert_eq!(effects.count(), 2);
}

// S-920
#[tokio::test(start_paused = true)]
async fn refused_orphan_of_derived_key_stays() {
    let refuse = derived().with_orphan_policy(OrphanPolicy::Refuse);
    let (app, effects, _) = charging(refuse, &[502]);
    send(&app, keyless("/", "a", "tea")).await;
    advance(Duration::from_secs(16)).await;
    let retry = send(&app, keyless("/", "a", "tea")).await;
    assert_eq!((&*retry.code(), effects.count()), ("outcome-unknown", 1));
}

// S-803, F-091
/// The store reports an orphan, and fails when the request would take the orphan over.
#[tokio::test(start_paused = true)]
async fn derived_orphan_is_not_executed_unprotected() {
    for (policy, status, executed) in [
        (OrphanPolicy::Refuse, StatusCode::SERVICE_UNAVAILABLE, 1),
        (OrphanPolicy::TakeOver, StatusCode::CREATED, 2),
    ] {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = IdempotencyLayer::new(store.clone())
            .with_missing_key(MissingKey::Derive)
            .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
            .with_orphan_policy(policy);
        let (app, effects) = app(layer, async |n, req: Request<Body>| {
            // Without a lease there is no key to derive.
            let lease = req.extensions().get::<Lease>();
            drop(lease.map(|lease| lease.derive("charge")));
            if n == 1 {
                StatusCode::BAD_GATEWAY
            } else {
                StatusCode::CREATED
            }
        });
        let first = send(&app, keyless("/", "a", "tea")).await;
        assert_eq!(first.status, StatusCode::BAD_GATEWAY);
        advance(Duration::from_secs(1)).await;
        let mut faults = vec![Fault::CallLost; 4];
        faults[0] = Fault::None;
        store.enqueue(Operation::Acquire, faults);
        let retry = send(&app, keyless("/", "a", "tea")).await;
        assert_eq!(retry.status, status, "{policy:?}");
        assert_eq!(effects.count(), executed, "{policy:?}");
        assert_eq!(store.calls(Operation::Acquire), 5, "{policy:?}");
    }
}

// S-918
#[tokio::test(start_paused = true)]
async fn client_error_under_key_of_service_is_not_committed() {
    for layer in [refunds(KeyScope::AllCallers), derived()] {
        let (app, effects) = app(layer, async |n, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let wrong = (StatusCode::UNPROCESSABLE_ENTITY, "wrong").into_response();
            match lease.prepare(wrong).await {
                Ok(_) => created(n),
                Err(error) => error.into_output().map(Body::new),
            }
        });
        for _ in 0..2 {
            let res = send(&app, keyless("/payments/7/refund", "ann", "")).await;
            assert_eq!(res.status, StatusCode::UNPROCESSABLE_ENTITY);
        }
        assert_eq!(effects.count(), 2);
    }
}

// ---- A layer inside another ----

/// Returns an app whose outer layer reads the header, and the executions.
fn inside(inner: IdempotencyLayer, outer: IdempotencyLayer) -> (Router, Effects) {
    let (app, effects) = app(inner, async |n, req: Request<Body>| {
        assert!(req.extensions().get::<Lease>().is_some());
        created(n)
    });
    (app.layer(outer), effects)
}

// F-907, S-921
#[tokio::test(start_paused = true)]
async fn inner_layer_with_own_keys_stays_on() {
    let (inner, outer) = (MemoryStore::new(), || {
        IdempotencyLayer::new(MemoryStore::new())
    });
    let inner = || IdempotencyLayer::new(inner.clone());
    let entity = || {
        inner().with_key_from(KeyScope::AllCallers, |head| {
            Some(head.uri.path().to_owned())
        })
    };
    let other_header = || inner().with_header(http::HeaderName::from_static("x-event"));
    let with_event = |key: &str| {
        let mut req = post("/refund", key, "order");
        req.headers_mut()
            .insert("x-event", HeaderValue::from_static("e-1"));
        req
    };
    for inner in [entity(), other_header()] {
        let (app, effects) = inside(inner, outer());
        for key in ["one", "two", "one"] {
            assert_eq!(
                send(&app, with_event(key)).await.status,
                StatusCode::CREATED
            );
        }
        assert_eq!(effects.count(), 1);
    }
    // The outer layer has keys from the service, and the inner layer derives its keys from them.
    let outer = outer().with_key_from(KeyScope::EachCaller, |head| {
        head.headers
            .get("x-event")
            .map(|_| head.headers.len().to_string())
    });
    let store = FaultInjector::new(MemoryStore::new());
    let derive = IdempotencyLayer::new(store.clone()).with_missing_key(MissingKey::Derive);
    let (app, effects) = inside(derive, outer);
    for _ in 0..2 {
        let mut req = with_event("k");
        req.headers_mut().remove("idempotency-key");
        assert_eq!(send(&app, req).await.status, StatusCode::CREATED);
    }
    assert!(store.all_calls() > 0);
    assert_eq!(effects.count(), 1);
}

/// A rejection of the inner layer is no result of the request.
// F-907, S-921
#[tokio::test(start_paused = true)]
async fn outer_layer_records_no_rejection_of_inner() {
    let open = Arc::new(Notify::new());
    let opened = Arc::clone(&open);
    let (app, effects) = app(refunds(KeyScope::AllCallers), move |n, _: Request<Body>| {
        let opened = Arc::clone(&opened);
        async move {
            opened.notified().await;
            created(n)
        }
    });
    let app = app.layer(IdempotencyLayer::new(MemoryStore::new()));
    let first = app.clone();
    let first = spawn(async move { send(&first, post("/refund", "one", "order")).await });
    while effects.count() == 0 {
        yield_now().await;
    }
    let early = send(&app, post("/refund", "two", "order")).await;
    assert_eq!(early.status, StatusCode::CONFLICT);
    open.notify_one();
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    let retry = send(&app, post("/refund", "two", "order")).await;
    assert_eq!(retry.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-921
#[tokio::test(start_paused = true)]
async fn inner_layer_with_same_key_passes() {
    let store = FaultInjector::new(MemoryStore::new());
    let plain = || IdempotencyLayer::new(store.clone());
    let named = || plain().with_key_from(KeyScope::EachCaller, |_| Some("k".to_owned()));
    let derive = || plain().with_missing_key(MissingKey::Derive);
    let aliased = || plain().with_header_alias(http::HeaderName::from_static("x-event"));
    for (number, (inner, outer)) in [
        (plain(), plain()),
        (named(), named()),
        (derive(), derive()),
        (aliased(), plain()),
    ]
    .into_iter()
    .enumerate()
    {
        let (app, effects) = inside(inner, outer);
        for replay in [false, true] {
            let mut req = post(&format!("/{number}"), &format!("k{number}"), "order");
            if number == 2 {
                req.headers_mut().remove("idempotency-key");
            }
            assert_eq!(send(&app, req).await.is_replay(), replay, "{number}");
        }
        assert_eq!(effects.count(), 1, "{number}");
    }
}

// S-921
#[tokio::test(start_paused = true)]
async fn inner_derived_key_hides_outer_key() {
    let inner = IdempotencyLayer::new(MemoryStore::new())
        .with_header(http::HeaderName::from_static("x-none"))
        .with_missing_key(MissingKey::Derive);
    let (app, effects) = app(inner, async |n, req: Request<Body>| {
        assert!(req.extensions().get::<IdempotencyKey>().is_none());
        created(n)
    });
    let app = app.layer(IdempotencyLayer::new(MemoryStore::new()));
    assert_eq!(
        send(&app, post("/", "k", "order")).await.status,
        StatusCode::CREATED
    );
    assert_eq!(effects.count(), 1);
}

// S-921
#[tokio::test(start_paused = true)]
async fn outer_layer_follows_handler_too() {
    let quotes = |fault: &Fault| {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault_for_all(fault);
        let inner = IdempotencyLayer::new(store)
            .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
            .with_key_from(KeyScope::AllCallers, |head| {
                Some(head.uri.path().to_owned())
            });
        let effects = Effects::default();
        let counted = effects.clone();
        let handler = async move |req: Request<Body>| {
            let n = counted.happen();
            match req.uri().path() {
                "/header" => ([("x-idempo-policy", "no-store")], created(n)).into_response(),
                "/extension" => (Extension(Retention::NoStore), created(n)).into_response(),
                _ => (Extension(NeedsAttention::new("stuck")), created(n)).into_response(),
            }
        };
        let outer = IdempotencyLayer::new(MemoryStore::new());
        (
            Router::new().fallback(handler).layer(inner).layer(outer),
            effects,
        )
    };
    for fault in [Fault::None, Fault::CallLost] {
        for path in ["/header", "/extension"] {
            let (app, effects) = quotes(&fault);
            for _ in 0..2 {
                let quote = send(&app, post(path, "k", "order")).await;
                assert_eq!(quote.status, StatusCode::CREATED);
                assert_eq!(
                    (quote.is_replay(), quote.header("x-idempo-policy")),
                    (false, None)
                );
            }
            assert_eq!(effects.count(), 2, "{path} {fault:?}");
        }
        let (app, effects) = quotes(&fault);
        for status in [StatusCode::CREATED, StatusCode::CONFLICT] {
            assert_eq!(
                send(&app, post("/stuck", "k", "order")).await.status,
                status
            );
        }
        assert_eq!(effects.count(), 1, "{fault:?}");
    }
}
