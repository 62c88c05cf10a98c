//! Promises of the Ruby gem idempo to its users, tested on the preset of the same name.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Method, Request, StatusCode};
use serde_json::{Value, json};
use tests::{Effects, app, post, send};
use tokio::{sync::Semaphore, time::advance};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Preset, conformance::FaultInjector};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Idempo)
}

/// Returns a service that responds with the result of `response` for the number of the execution.
fn answering<R: IntoResponse + 'static>(
    response: impl Fn(u64) -> R + Clone + Send + Sync + 'static,
) -> (Router, Effects) {
    app(layer(), move |n, _req| {
        std::future::ready(response(n).into_response())
    })
}

fn numbered() -> (Router, Effects) {
    answering(|n| format!("execution {n}"))
}

fn order() -> Request<Body> {
    post("/orders", "idem", "order")
}

/// Sends the requests in order. Returns the execution in the response to each.
async fn executions(app: &Router, requests: impl IntoIterator<Item = Request<Body>>) -> Vec<u64> {
    let mut executions = Vec::new();
    for req in requests {
        let response = send(app, req).await;
        let number = response.text().strip_prefix("execution ");
        let number = number.expect("a response of the handler");
        executions.push(number.parse().expect("a number"));
    }
    executions
}

#[tokio::test(start_paused = true)]
async fn request_without_key_passes_through() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::with_preset(store.clone(), Preset::Idempo);
    let (app, effects) = app(layer, async |n, _| format!("execution {n}"));
    let keyless = || Request::post("/").body(Body::empty()).expect("a request");
    assert_eq!(executions(&app, [keyless(), keyless()]).await, [1, 2]);
    assert_eq!((effects.count(), store.all_calls()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn safe_methods_pass_through_with_key() {
    for method in [Method::GET, Method::HEAD, Method::OPTIONS] {
        let (app, effects) = numbered();
        for _ in 0..2 {
            let mut req = order();
            *req.method_mut() = method.clone();
            assert_eq!(send(&app, req).await.status, StatusCode::OK);
        }
        assert_eq!(effects.count(), 2, "{method}");
    }
}

#[tokio::test(start_paused = true)]
async fn unsafe_request_is_executed_once() {
    for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
        let (app, effects) = answering(|n| {
            let headers = [("x-foo", "bar"), ("x-other", "")];
            (StatusCode::CREATED, headers, format!("execution {n}"))
        });
        let req = || {
            let mut req = order();
            *req.method_mut() = method.clone();
            req
        };
        let first = send(&app, req()).await;
        let again = send(&app, req()).await;
        assert_eq!(again, first, "{method}: the requests are equal");
        assert_eq!(effects.count(), 1, "{method}");
    }
}

// S-915
/// The gem compares the whole URL.
#[tokio::test(start_paused = true)]
async fn other_host_is_another_request() {
    let (app, effects) = numbered();
    let at = |host| {
        let mut req = order();
        let host = HeaderValue::from_static(host);
        req.headers_mut().insert("host", host);
        req
    };
    let requests = [at("a.example"), at("b.example"), at("a.example")];
    assert_eq!(executions(&app, requests).await, [1, 2, 1]);
    assert_eq!(effects.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn x_idempotency_key_is_accepted() {
    let (app, effects) = numbered();
    let aliased = || {
        let mut req = order();
        let key = req.headers_mut().remove("idempotency-key");
        req.headers_mut()
            .insert("x-idempotency-key", key.expect("a key"));
        req
    };
    assert_eq!(
        executions(&app, [aliased(), aliased(), order()]).await,
        [1, 1, 1]
    );
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn quoted_key_equals_unquoted() {
    let (app, effects) = numbered();
    let key = |key| post("/orders", key, "order");
    assert_eq!(
        executions(&app, [key("\"idem\""), key("idem")]).await,
        [1, 1]
    );
    assert_eq!(executions(&app, [key("other")]).await, [2]);
    assert_eq!(effects.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn empty_key_gets_json_400() {
    let (app, effects) = numbered();
    for key in ["", "\"\"", "  "] {
        let response = send(&app, post("/orders", key, "order")).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{key}");
        assert_eq!(response.header("content-type"), Some("application/json"));
        let body: Value = serde_json::from_slice(&response.body).expect("JSON");
        let message = body["error"]["message"].as_str().expect("a message");
        assert_eq!(body, json!({"ok": false, "error": {"message": message}}));
        assert!(!message.is_empty());
    }
    assert_eq!(effects.count(), 0);
}

// S-044
#[tokio::test(start_paused = true)]
async fn any_difference_is_separate_request() {
    let (app, effects) = numbered();
    let changed = |change: fn(&mut Request<Body>)| {
        let mut req = order();
        change(&mut req);
        req
    };
    let requests = || {
        [
            order(),
            changed(|req| *req.method_mut() = Method::PUT),
            changed(|req| *req.uri_mut() = "/other".parse().expect("a URI")),
            changed(|req| *req.uri_mut() = "/orders?a=1".parse().expect("a URI")),
            changed(|req| *req.uri_mut() = "/orders?a=2".parse().expect("a URI")),
            changed(|req| *req.body_mut() = Body::from("another order")),
            changed(|req| {
                let token = HeaderValue::from_static("Bearer abc");
                req.headers_mut().insert("authorization", token);
            }),
        ]
    };
    let each: Vec<u64> = (1..=7).collect();
    assert_eq!(executions(&app, requests()).await, each);
    assert_eq!(
        executions(&app, requests()).await,
        each,
        "and each has its own response"
    );
    assert_eq!(effects.count(), 7);
}

#[tokio::test(start_paused = true)]
async fn other_headers_do_not_make_another_request() {
    let (app, effects) = numbered();
    let mut other = order();
    other
        .headers_mut()
        .insert("user-agent", HeaderValue::from_static("retry/2"));
    assert_eq!(executions(&app, [order(), other]).await, [1, 1]);
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn server_errors_and_refusals_run_again() {
    for code in [500, 502, 503, 504, 425, 429] {
        let (app, effects) = answering(move |n| {
            let status = StatusCode::from_u16(code).expect("a status");
            (status, format!("execution {n}"))
        });
        assert_eq!(executions(&app, [order(), order()]).await, [1, 2], "{code}");
        assert_eq!(effects.count(), 2, "{code}");
    }
    for code in [200, 201, 204, 302, 400, 401, 403, 404, 408, 409, 422] {
        let status = StatusCode::from_u16(code).expect("a status");
        let (app, effects) = answering(move |_| status);
        for _ in 0..2 {
            assert_eq!(send(&app, order()).await.status, status);
        }
        assert_eq!(effects.count(), 1, "{code}");
    }
}

// S-337
#[tokio::test(start_paused = true)]
async fn response_over_4_mib_is_not_stored() {
    let large = |n: u64| {
        let mut body = vec![b'x'; 4 * 1024 * 1024];
        body.extend_from_slice(n.to_string().as_bytes());
        body
    };
    let (app, effects) = answering(large);
    for n in 1..=2_u64 {
        let response = send(&app, order()).await;
        assert!(response.body == large(n), "execution {n}, whole");
    }
    assert_eq!(effects.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn chunked_response_is_stored() {
    let (app, effects) = answering(|n| {
        let number: &'static str = n.to_string().leak();
        let body = tests::Scripted::new(["exec", "ution ", number]);
        Response::new(Body::new(body))
    });
    assert_eq!(executions(&app, [order(), order()]).await, [1, 1]);
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn no_store_policy_ignores_case() {
    for (name, value) in [
        ("X-Idempo-Policy", "no-store"),
        ("x-idempo-policy", "no-store"),
        ("x-iDeMpO-pOlIcY", "No-Store"),
    ] {
        let (app, effects) = answering(move |n| ([(name, value)], format!("execution {n}")));
        let response = send(&app, order()).await;
        assert!(!response.headers.contains_key("x-idempo-policy"), "{name}");
        assert_eq!(executions(&app, [order(), order()]).await, [2, 3], "{name}");
        assert_eq!(effects.count(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn persist_for_seconds_ignores_case() {
    for name in [
        "X-Idempo-Persist-For-Seconds",
        "x-idempo-persist-for-seconds",
        "x-IdEmPo-PeRsIsT-fOr-SeCoNdS",
    ] {
        let (app, effects) = answering(move |n| ([(name, "2")], format!("execution {n}")));
        let response = send(&app, order()).await;
        assert!(
            !response
                .headers
                .contains_key("x-idempo-persist-for-seconds")
        );
        advance(Duration::from_millis(1999)).await;
        assert_eq!(executions(&app, [order()]).await, [1], "{name}");
        advance(Duration::from_millis(1)).await;
        assert_eq!(executions(&app, [order()]).await, [2], "{name}");
        assert_eq!(effects.count(), 2);
    }
}

// S-338
#[tokio::test(start_paused = true)]
async fn default_retention_is_30_seconds() {
    let (app, effects) = numbered();
    assert_eq!(executions(&app, [order()]).await, [1]);
    advance(Duration::from_millis(29_999)).await;
    assert_eq!(executions(&app, [order()]).await, [1]);
    advance(Duration::from_millis(1)).await;
    assert_eq!(executions(&app, [order()]).await, [2]);
    assert_eq!(effects.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn other_presets_retain_for_24_hours() {
    for preset in [Preset::Recommended, Preset::Ietf, Preset::Stripe] {
        let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
        let (app, effects) = app(layer, async |n, _| format!("execution {n}"));
        let quoted = || post("/orders", "\"idem\"", "order");
        assert_eq!(executions(&app, [quoted()]).await, [1]);
        advance(Duration::from_secs(24 * 60 * 60 - 1)).await;
        assert_eq!(executions(&app, [quoted()]).await, [1]);
        advance(Duration::from_secs(1)).await;
        assert_eq!(executions(&app, [quoted()]).await, [2]);
        assert_eq!(effects.count(), 2, "{preset:?}");
    }
}

// S-336
#[tokio::test(start_paused = true)]
async fn concurrent_duplicate_gets_429() {
    let barrier = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&barrier);
    let (app, effects) = app(layer(), move |n, _req| {
        let held = Arc::clone(&held);
        async move {
            held.acquire().await.expect("never closed").forget();
            format!("execution {n}")
        }
    });
    let first = {
        let app = app.clone();
        tokio::spawn(async move { send(&app, order()).await })
    };
    while effects.count() == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..3 {
        let double = send(&app, order()).await;
        assert_eq!(double.status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(double.header("retry-after"), Some("2"));
        assert_eq!(double.header("content-type"), Some("application/json"));
        let body: Value = serde_json::from_slice(&double.body).expect("JSON");
        let message = body["error"]["message"].as_str().expect("a message");
        assert_eq!(body, json!({"ok": false, "error": {"message": message}}));
    }
    barrier.add_permits(1);
    assert_eq!(first.await.expect("no panic").text(), "execution 1");
    assert_eq!(
        executions(&app, [order()]).await,
        [1],
        "a later retry is served"
    );
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn application_panic_releases_key() {
    let (app, effects) = answering(|n| {
        assert!(n > 1, "an exception");
        format!("execution {n}")
    });
    let panicking = app.clone();
    let raised = tokio::spawn(async move { send(&panicking, order()).await }).await;
    assert!(raised.expect_err("the panic reaches the caller").is_panic());
    assert_eq!(executions(&app, [order(), order()]).await, [2, 2]);
    assert_eq!(effects.count(), 2);
}
