//! Equality of requests, and the principals that they belong to.

use std::sync::{Arc, Mutex, atomic::Ordering};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tests::{Effects, Scripted, Step, TestResponse, app, created, creating, post, send};
use tower_idempotency::{FingerprintBy, IdempotencyLayer, KeyReuse, MemoryStore, Principal};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn json(body: &str) -> Request<Body> {
    let mut req = post("/orders", "k", body.to_owned());
    req.headers_mut()
        .insert("content-type", HeaderValue::from_static("application/json"));
    req
}

fn request_with(name: &'static str, value: &'static str) -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    req.headers_mut()
        .insert(name, HeaderValue::from_static(value));
    req
}

/// The outcome of a second request under the key of the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Second {
    Replayed,
    Refused,
    Executed,
}
use Second::{Executed, Refused, Replayed};

fn judge(first: &TestResponse, second: &TestResponse, effects: u64) -> Second {
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    match (second.status, second.is_replay()) {
        (StatusCode::CREATED, true) => {
            assert_eq!((effects, &second.body), (1, &first.body));
            Replayed
        }
        (StatusCode::CREATED, false) => {
            assert_eq!(effects, 2);
            Executed
        }
        (StatusCode::UNPROCESSABLE_ENTITY, false) => {
            assert_eq!((effects, second.code().as_str()), (1, "key-reused"));
            Refused
        }
        _ => panic!("{second:?}"),
    }
}

async fn second(layer: IdempotencyLayer, one: Request<Body>, two: Request<Body>) -> Second {
    let (app, effects) = creating(layer);
    let first = send(&app, one).await;
    let second = send(&app, two).await;
    judge(&first, &second, effects.count())
}

/// Like [`second`], but the two requests go through two layers.
async fn across(layers: [IdempotencyLayer; 2], requests: [Request<Body>; 2]) -> Second {
    let [one, two] = layers;
    let effects = Effects::default();
    let app = |layer| {
        let effects = effects.clone();
        Router::new()
            .fallback(async move || created(effects.happen()))
            .layer(layer)
    };
    let [first, second] = requests;
    let first = send(&app(one), first).await;
    let second = send(&app(two), second).await;
    judge(&first, &second, effects.count())
}

// ---- The body ----

// F-065, F-069, S-038
#[tokio::test(start_paused = true)]
async fn other_body_is_key_reuse() {
    let (app, effects) = creating(layer());
    let first = send(&app, json(r#"{"a":1}"#)).await;
    let other = send(&app, json(r#"{"a":2}"#)).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(
        other.header("content-type"),
        Some("application/problem+json")
    );
    let problem: Value = serde_json::from_slice(&other.body).expect("JSON");
    assert_eq!(problem["code"], "key-reused");
    assert_eq!(problem["retryable"], false);
    assert_eq!(other.header("retry-after"), None);
    assert_eq!(effects.count(), 1);
    let again = send(&app, json(r#"{"a":1}"#)).await;
    assert!(again.is_replay(), "the record is untouched");
    assert_eq!(again.body, first.body);
    assert_eq!(effects.count(), 1);
}

// S-045
#[tokio::test(start_paused = true)]
async fn same_body_with_other_key_executes() {
    let found = second(
        layer(),
        post("/orders", "k", "a"),
        post("/orders", "k2", "a"),
    )
    .await;
    assert_eq!(found, Executed);
}

// F-067, S-046
#[tokio::test(start_paused = true)]
async fn canonical_json_ignores_member_order() {
    let canonical = || layer().with_fingerprint(FingerprintBy::canonical_json());
    for (one, two, expected) in [
        (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#, Replayed),
        (r#"{"a":1,"b":2}"#, "{ \"a\": 1,\n \"b\": 2 }", Replayed),
        (
            r#"{"o":{"x":[1,{"p":1,"q":2}],"y":2}}"#,
            r#"{"o":{"y":2,"x":[1,{"q":2,"p":1}]}}"#,
            Replayed,
        ),
        (r#"{"a":"é"}"#, r#"{"a":"\u00e9"}"#, Replayed),
        (r#"{"a":[1,2]}"#, r#"{"a":[2,1]}"#, Refused),
        (r#"{"a":1}"#, r#"{"a":"1"}"#, Refused),
        (r#"{"a":1,"a":2}"#, r#"{"a":2,"a":1}"#, Refused),
    ] {
        let found = second(canonical(), json(one), json(two)).await;
        assert_eq!(found, expected, "{one} {two}");
        let raw = second(layer(), json(one), json(two)).await;
        assert_eq!(raw, Refused, "byte for byte: {one} {two}");
    }
    let text = second(
        canonical(),
        post("/orders", "k", r#"{"a":1,"b":2}"#),
        post("/orders", "k", r#"{"b":2,"a":1}"#),
    )
    .await;
    assert_eq!(text, Refused, "not JSON by its media type");
}

// F-068, S-047
#[tokio::test(start_paused = true)]
async fn numbers_keep_their_spelling() {
    for by in [FingerprintBy::raw_body(), FingerprintBy::canonical_json()] {
        let layer = layer().with_fingerprint(by.clone());
        let found = second(layer, json(r#"{"a":1}"#), json(r#"{"a":1.0}"#)).await;
        assert_eq!(found, Refused, "{by:?}");
    }
}

/// Returns a layer whose fingerprint covers a JSON body after `keep` has changed it.
fn over_json(keep: fn(&mut Value)) -> IdempotencyLayer {
    layer().with_fingerprint(FingerprintBy::custom(move |head, body| {
        let mut value: Value = serde_json::from_slice(body).unwrap_or_default();
        keep(&mut value);
        format!("{} {value}", head.uri.path()).into_bytes()
    }))
}

// F-067, S-048
#[tokio::test(start_paused = true)]
async fn custom_fingerprint_can_omit_fields() {
    let without_times = || {
        over_json(|value| {
            value["timestamp"].take();
            value["meta"]["ts"].take();
        })
    };
    let one = r#"{"a":1,"timestamp":1,"meta":{"ts":1,"v":1}}"#;
    let later = r#"{"a":1,"timestamp":2,"meta":{"ts":2,"v":1}}"#;
    let other = r#"{"a":1,"timestamp":2,"meta":{"ts":2,"v":2}}"#;
    assert_eq!(
        second(without_times(), json(one), json(later)).await,
        Replayed
    );
    assert_eq!(
        second(without_times(), json(one), json(other)).await,
        Refused
    );
}

// S-049
#[tokio::test(start_paused = true)]
async fn custom_fingerprint_can_use_subset() {
    let amount = || over_json(|value| *value = value["amount"].take());
    let one = r#"{"amount":1,"note":"x"}"#;
    assert_eq!(
        second(amount(), json(one), json(r#"{"amount":1,"note":"y"}"#)).await,
        Replayed
    );
    assert_eq!(
        second(amount(), json(one), json(r#"{"amount":2,"note":"x"}"#)).await,
        Refused
    );
}

// S-050
#[tokio::test(start_paused = true)]
async fn equal_custom_fingerprints_are_same_request() {
    let anything = layer().with_fingerprint(FingerprintBy::custom(|_, _| b"same".to_vec()));
    let one = post("/a", "k", "one");
    let mut two = post("/b?c=d", "k", "two");
    *two.method_mut() = http::Method::PUT;
    assert_eq!(second(anything, one, two).await, Replayed);
}

// S-051
#[tokio::test(start_paused = true)]
async fn head_fingerprint_streams_unlimited_body() {
    let head_only = layer()
        .with_fingerprint(FingerprintBy::head_only())
        .with_request_limit(4);
    let (app, effects) = app(head_only, async |n, req: Request<Body>| {
        let body = req.into_body().collect().await.expect("a body").to_bytes();
        assert_eq!(body.len(), 10);
        created(n)
    });
    let upload = |data: &'static str| post("/upload", "k", data);
    assert!(!send(&app, upload("0123456789")).await.is_replay());
    assert!(send(&app, upload("another body")).await.is_replay());
    assert_eq!(effects.count(), 1);
    let other = send(&app, post("/other", "k", "")).await;
    assert_eq!(other.code(), "key-reused");
    assert_eq!(effects.count(), 1);
}

// ---- The head ----

// F-065, F-066, S-039
// Another request under the same key is a client error, and is rejected.
#[tokio::test(start_paused = true)]
async fn other_path_or_query_is_key_reuse() {
    for (one, two) in [
        ("/a", "/b"),
        ("/u/1", "/u/2"),
        ("/a?a=1", "/a?a=2"),
        ("/a?a=1&b=2", "/a?b=2&a=1"),
        ("/a", "/a?"),
        ("/a", "/a/"),
        ("/a%2Fb", "/a/b"),
        ("/A", "/a"),
    ] {
        let found = second(layer(), post(one, "k", "x"), post(two, "k", "x")).await;
        assert_eq!(found, Refused, "{one} {two}");
        let separate = layer()
            .with_key_reuse(KeyReuse::Separate)
            .expect("no status");
        let found = second(separate, post(one, "k", "x"), post(two, "k", "x")).await;
        assert_eq!(found, Executed, "{one} {two}");
    }
}

// F-065, S-040
#[tokio::test(start_paused = true)]
async fn other_method_is_key_reuse() {
    let put = || {
        let mut req = post("/orders", "k", "order");
        *req.method_mut() = http::Method::PUT;
        req
    };
    let one = post("/orders", "k", "order");
    assert_eq!(second(layer(), one, put()).await, Refused);
    let one = post("/orders", "k", "order");
    let separate = layer()
        .with_key_reuse(KeyReuse::Separate)
        .expect("no status");
    assert_eq!(second(separate, one, put()).await, Executed);
}

// S-042
#[tokio::test(start_paused = true)]
async fn media_type_counts_without_parameters() {
    let type_of = |value| request_with("content-type", value);
    for (one, two, expected) in [
        (type_of("text/plain"), type_of("text/html"), Refused),
        (
            type_of("text/plain"),
            post("/orders", "k", "order"),
            Refused,
        ),
        (
            type_of("text/plain"),
            type_of("Text/PLAIN; charset=utf-8"),
            Replayed,
        ),
        (
            request_with("accept", "a/b"),
            request_with("accept", "c/d"),
            Replayed,
        ),
        (
            request_with("user-agent", "1"),
            request_with("traceparent", "2"),
            Replayed,
        ),
    ] {
        assert_eq!(second(layer(), one, two).await, expected);
    }
}

// F-072, S-043
#[tokio::test(start_paused = true)]
async fn fingerprint_parts_are_unambiguous() {
    // The text may contain the separator of the parts.
    for ((path, body), (other_path, other_body)) in [
        (("/a", "bc"), ("/ab", "c")),
        (("/a", "rawb"), ("/araw", "b")),
    ] {
        let one = post(path, "k", body);
        let other = post(other_path, "k", other_body);
        assert_eq!(second(layer(), one, other).await, Refused, "{path} {body}");
    }
    let scoped = |authorization: &'static str, key| {
        let mut req = post("/orders", key, "order");
        let value = HeaderValue::from_static(authorization);
        req.headers_mut().insert("authorization", value);
        req
    };
    for ((token, key), (other_token, other_key)) in
        [(("a", "bc"), ("ab", "c")), (("a", "sentb"), ("asent", "b"))]
    {
        let (one, other) = (scoped(token, key), scoped(other_token, other_key));
        assert_eq!(second(layer(), one, other).await, Executed, "{token} {key}");
    }
}

// ---- The principal ----

// F-071, F-073, S-053
#[tokio::test(start_paused = true)]
async fn other_authorization_never_gets_record() {
    let order_by = |token| request_with("authorization", token);
    let found = second(layer(), order_by("Bearer a"), order_by("Bearer b")).await;
    assert_eq!(found, Executed);
    let found = second(layer(), order_by("Bearer a"), order_by("Bearer a")).await;
    assert_eq!(found, Replayed);
    let found = second(layer(), order_by("Bearer a"), post("/orders", "k", "order")).await;
    assert_eq!(found, Executed, "an anonymous caller");
}

// S-054
#[tokio::test(start_paused = true)]
async fn session_cookie_can_be_principal() {
    let by_cookie =
        || layer().with_principal(Principal::authorization().or(Principal::cookie("sid")));
    let cookies = |value| request_with("cookie", value);
    for (one, two, expected) in [
        ("sid=a", "sid=b", Executed),
        ("sid=a; theme=dark", "theme=light; sid=a", Replayed),
        ("theme=dark", "theme=light", Replayed),
        ("xsid=a", "xsid=b", Replayed),
        ("sid=a", "theme=dark", Executed),
    ] {
        let found = second(by_cookie(), cookies(one), cookies(two)).await;
        assert_eq!(found, expected, "{one} {two}");
    }
    let found = second(
        by_cookie(),
        request_with("authorization", "a"),
        request_with("cookie", "sid=a"),
    )
    .await;
    assert_eq!(
        found, Executed,
        "a cookie differs from a header with the same value"
    );
}

#[derive(Clone)]
struct Account(u64);

fn by_account(account: u64) -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    req.extensions_mut().insert(Account(account));
    req
}

// F-073, F-074, S-055
#[tokio::test(start_paused = true)]
async fn authenticated_principal_survives_token_refresh() {
    let principal = Principal::extension(|account: &Account| account.0.to_be_bytes());
    let layer = || layer().with_principal(principal.clone());
    let with_token = |account, token: &'static str| {
        let mut req = by_account(account);
        req.headers_mut()
            .insert("authorization", HeaderValue::from_static(token));
        req
    };
    let found = second(layer(), with_token(1, "a"), with_token(1, "b")).await;
    assert_eq!(found, Replayed);
    let found = second(layer(), with_token(1, "a"), with_token(2, "a")).await;
    assert_eq!(found, Executed);
}

// F-024, S-060
#[tokio::test(start_paused = true)]
async fn refusing_principal_sends_its_own_response() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone()).with_principal(Principal::from_fn(|_| {
        let mut res = http::Response::new(Bytes::from("who are you?"));
        *res.status_mut() = StatusCode::UNAUTHORIZED;
        Err(res.into())
    }));
    let (app, effects) = creating(layer);
    let response = send(&app, post("/orders", "k", "order")).await;
    assert_eq!(response.status, StatusCode::UNAUTHORIZED);
    assert_eq!(response.text(), "who are you?");
    assert_eq!(effects.count(), 0);
    assert!(store.is_empty());
}

// F-024, S-061
#[tokio::test(start_paused = true)]
async fn missing_principal_extension_is_500() {
    let by_account = || Principal::extension(|account: &Account| account.0.to_be_bytes());
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let (app, effects) = creating(layer.clone().with_principal(by_account()));
    let response = send(&app, post("/orders", "k", "order")).await;
    assert_eq!(response.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(response.code(), "principal-missing");
    assert_eq!(effects.count(), 0);
    assert!(store.is_empty());

    let or_token = layer.with_principal(by_account().or(Principal::authorization()));
    let (app, effects) = creating(or_token);
    let response = send(&app, request_with("authorization", "a")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// F-074, S-056
#[tokio::test(start_paused = true)]
async fn principal_sources_are_tried_in_order() {
    let principal = Principal::header(http::HeaderName::from_static("x-tenant"))
        .or(Principal::from_fn(|head| {
            Ok(head.uri.query().map(|query| query.as_bytes().to_vec()))
        }))
        .or(Principal::authorization());
    let layer = || layer().with_principal(principal.clone());
    let tenant = |tenant: &'static str, token: &'static str| {
        let mut req = request_with("authorization", token);
        req.headers_mut()
            .insert("x-tenant", HeaderValue::from_static(tenant));
        req
    };
    assert_eq!(
        second(layer(), tenant("t", "a"), tenant("t", "b")).await,
        Replayed
    );
    assert_eq!(
        second(layer(), tenant("t", "a"), tenant("u", "a")).await,
        Executed
    );
    let found = second(
        layer(),
        request_with("authorization", "a"),
        request_with("authorization", "b"),
    )
    .await;
    assert_eq!(found, Executed, "the last source");
}

// S-057
#[tokio::test(start_paused = true)]
async fn combined_sources_distinguish_callers_by_both() {
    let tenant = || Principal::header(http::HeaderName::from_static("x-tenant"));
    let by_both = tenant().and(Principal::authorization());
    assert_eq!(
        format!("{by_both:?}"),
        r#"[(["x-tenant"], ["authorization"])]"#
    );
    let of = |tenant: Option<&'static str>, token: Option<&'static str>| {
        let mut req = post("/orders", "k", "order");
        for (name, value) in [("x-tenant", tenant), ("authorization", token)] {
            if let Some(value) = value {
                req.headers_mut()
                    .insert(name, HeaderValue::from_static(value));
            }
        }
        req
    };
    for (tenant, token, expected) in [
        ("t", "a", Replayed),
        ("u", "a", Executed),
        ("t", "b", Executed),
        ("a", "t", Executed),
    ] {
        let layer = layer().with_principal(by_both.clone());
        let other = of(Some(tenant), Some(token));
        let found = second(layer, of(Some("t"), Some("a")), other).await;
        assert_eq!(found, expected, "{tenant} {token}");
    }
    // A principal with a missing part does not count.
    let half = [(None, None), (Some("t"), None), (None, Some("a"))];
    for (tenant, token) in half {
        let (app, effects) = creating(layer().with_principal(by_both.clone()));
        let response = send(&app, of(tenant, token)).await;
        assert_eq!(response.code(), "principal-missing", "{tenant:?} {token:?}");
        assert_eq!(effects.count(), 0);
    }
    // If another source finds a principal, the parts of the first source are not used.
    let token = Principal::authorization;
    let layer = layer();
    let found = across(
        [token().and(tenant()).or(token()), token()]
            .map(|principal| layer.clone().with_principal(principal)),
        [of(None, Some("a")), of(None, Some("a"))],
    );
    assert_eq!(found.await, Replayed);
}

// F-074, S-058
#[tokio::test(start_paused = true)]
async fn equal_bytes_from_two_sources_are_two_principals() {
    #[derive(Clone)]
    struct Service(u64);

    let by_service = |service: u64| {
        let mut req = post("/orders", "k", "order");
        req.extensions_mut().insert(Service(service));
        req
    };
    let extensions = || {
        Principal::extension(|account: &Account| account.0.to_be_bytes()).or(Principal::extension(
            |service: &Service| service.0.to_be_bytes(),
        ))
    };
    let layer_of = |principal| layer().with_principal(principal);
    let found = second(layer_of(extensions()), by_account(5), by_service(5)).await;
    assert_eq!(found, Executed, "account 5 is not service 5");
    let found = second(layer_of(extensions()), by_service(5), by_service(5)).await;
    assert_eq!(found, Replayed);

    let from = |name: &'static str| {
        Principal::from_fn(move |head| {
            let value = head.headers.get(name);
            Ok(value.map(|value| value.as_bytes().to_vec()))
        })
    };
    let closures = from("x-account").or(from("x-service"));
    let found = second(
        layer_of(closures),
        request_with("x-account", "5"),
        request_with("x-service", "5"),
    )
    .await;
    assert_eq!(found, Executed);
}

// S-059
#[tokio::test(start_paused = true)]
async fn unscoped_callers_share_their_keys() {
    let unscoped = layer().with_principal(Principal::unscoped());
    let order_by = |token| request_with("authorization", token);
    assert_eq!(
        second(unscoped, order_by("a"), order_by("b")).await,
        Replayed
    );
}

// F-072, S-062
#[tokio::test(start_paused = true)]
async fn namespace_and_key_are_unambiguous() {
    let one = layer();
    let named = |name: &str| one.clone().with_namespace(name);
    let found = across(
        [named("a:"), named("a")],
        [post("/orders", "b", "x"), post("/orders", ":b", "x")],
    )
    .await;
    assert_eq!(found, Executed);
    let same = || post("/orders", "k", "x");
    assert_eq!(
        across([named("a"), named("b")], [same(), same()]).await,
        Executed
    );
    assert_eq!(
        across([named("c"), named("c")], [same(), same()]).await,
        Replayed
    );
}

// F-185, S-063
#[tokio::test(start_paused = true)]
async fn other_secret_is_other_entry() {
    let one = layer();
    let keyed = |secret: &str| {
        let layer = one.clone().with_secret(secret);
        layer.expect("a secret that is long enough")
    };
    let same = |key| [post("/orders", key, "x"), post("/orders", key, "x")];
    let (long, other) = ("0123456789abcdef", "0123456789abcdeX");
    for (key, layers, expected) in [
        ("a", [keyed(long), keyed(other)], Executed),
        ("b", [keyed(long), one.clone()], Executed),
        ("c", [keyed(long), keyed(long)], Replayed),
    ] {
        assert_eq!(across(layers, same(key)).await, expected, "{key}");
    }
    for short in ["", "0123456789abcde"] {
        assert!(one.clone().with_secret(short).is_err(), "{short}");
    }
}

// ---- The request of the handler ----

type Received = Arc<Mutex<Vec<(Bytes, Option<HeaderMap>)>>>;

/// Returns a service whose handler stores the request that it received.
fn receiving(layer: IdempotencyLayer) -> (Router, Effects, Received) {
    let received = Received::default();
    let keep = Arc::clone(&received);
    let (app, effects) = app(layer, move |n, req: Request<Body>| {
        let keep = Arc::clone(&keep);
        async move {
            let body = req.into_body().collect().await.expect("a whole body");
            let trailers = body.trailers().cloned();
            keep.lock()
                .expect("no panic")
                .push((body.to_bytes(), trailers));
            created(n)
        }
    });
    (app, effects, received)
}

// F-070, S-069
#[tokio::test(start_paused = true)]
async fn handler_receives_all_frames_and_trailers() {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", HeaderValue::from_static("42"));
    let (app, effects, received) = receiving(layer());
    for (chunks, replay) in [(&["a", "b", "cd"][..], false), (&["abcd"], true)] {
        let steps = chunks.iter().copied().map(Step::from);
        let body = Scripted::new(steps.chain([Step::Trailers(trailers.clone())]));
        let response = send(&app, post("/orders", "k", Body::new(body))).await;
        assert_eq!(response.is_replay(), replay, "however it was cut");
    }
    let received = received.lock().expect("no panic").clone();
    assert_eq!(received, [(Bytes::from("abcd"), Some(trailers))]);
    assert_eq!(effects.count(), 1);
}

// F-070, S-070
#[tokio::test(start_paused = true)]
async fn binary_body_reaches_handler_unchanged() {
    let bytes: Vec<u8> = (0..=255).chain([0xc3, 0x28, 0xff]).collect();
    let (app, effects, received) = receiving(layer());
    assert!(
        !send(&app, post("/orders", "k", bytes.clone()))
            .await
            .is_replay()
    );
    assert!(
        send(&app, post("/orders", "k", bytes.clone()))
            .await
            .is_replay()
    );
    let mut other = bytes.clone();
    other[200] ^= 1;
    assert_eq!(
        send(&app, post("/orders", "k", other)).await.code(),
        "key-reused"
    );
    assert_eq!(effects.count(), 1);
    assert_eq!(received.lock().expect("no panic")[0].0, bytes);
}

// S-052
#[tokio::test(start_paused = true)]
async fn handler_changes_do_not_affect_fingerprint() {
    let (app, effects) = app(layer(), async |n, mut req: Request<Body>| {
        *req.uri_mut() = "/elsewhere".parse().expect("a URI");
        req.headers_mut().clear();
        drop(req.into_body());
        created(n)
    });
    assert!(!send(&app, json("{}")).await.is_replay());
    assert!(send(&app, json("{}")).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-071
#[tokio::test(start_paused = true)]
async fn body_over_limit_is_refused_unread() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone()).with_request_limit(4);
    let (app, effects) = creating(layer);
    let declared = |bytes: &'static str| {
        let body = Scripted::new([bytes]);
        let taken = body.taken();
        let mut req = post("/orders", bytes, Body::new(body));
        let length = HeaderValue::from(bytes.len());
        req.headers_mut().insert("content-length", length);
        (req, taken)
    };
    let (larger, taken) = declared("12345");
    let response = send(&app, larger).await;
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(response.code(), "body-too-large");
    assert_eq!(taken.load(Ordering::SeqCst), 0, "refused unread");
    assert_eq!(effects.count(), 0);
    assert!(store.is_empty());
    let (fits, _) = declared("1234");
    assert_eq!(send(&app, fits).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// F-013, S-072
#[tokio::test(start_paused = true)]
async fn limit_ignores_length_header_while_reading() {
    for length in [None, Some("-1"), Some("many"), Some("2"), Some("")] {
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(store.clone()).with_request_limit(4);
        let (app, effects) = creating(layer);
        let body = Scripted::new(["123", "45", "678"]);
        let taken = body.taken();
        let mut req = post("/orders", "k", Body::new(body));
        if let Some(length) = length {
            let length = HeaderValue::from_static(length);
            req.headers_mut().insert("content-length", length);
        }
        let response = send(&app, req).await;
        assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE, "{length:?}");
        assert_eq!(taken.load(Ordering::SeqCst), 2, "no more than needed");
        assert_eq!(effects.count(), 0, "{length:?}");
        assert!(store.is_empty());
    }
}

// S-074
#[tokio::test(start_paused = true)]
async fn default_request_limit_is_2_mib() {
    let (app, effects) = creating(layer());
    let fits = vec![7; 2 * 1024 * 1024];
    let mut larger = fits.clone();
    larger.push(7);
    let response = send(&app, post("/orders", "a", fits)).await;
    assert_eq!(response.status, StatusCode::CREATED);
    let response = send(&app, post("/orders", "b", larger)).await;
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(effects.count(), 1);
}

// F-010, S-075
#[tokio::test(start_paused = true)]
async fn aborted_body_leaves_key_untouched() {
    let store = MemoryStore::new();
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let broken = Body::new(Scripted::new([Step::from("half"), Step::Fail]));
    let response = send(&app, post("/orders", "k", broken)).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST);
    assert_eq!(response.code(), "body-unreadable");
    assert!(store.is_empty());
    assert_eq!(effects.count(), 0);
    let whole = send(&app, post("/orders", "k", "half and half")).await;
    assert_eq!(whole.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-078
#[tokio::test(start_paused = true)]
async fn slow_body_is_refused_before_lease() {
    let store = MemoryStore::new();
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let drip = |secs: u64| {
        let wait = Step::Wait(std::time::Duration::from_secs(secs));
        Body::new(Scripted::new([Step::from("a"), wait, Step::from("b")]))
    };
    let response = send(&app, post("/orders", "k", drip(31))).await;
    assert_eq!(response.status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(response.code(), "body-timeout");
    assert!(store.is_empty());
    assert_eq!(effects.count(), 0);
    let response = send(&app, post("/orders", "k", drip(29))).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}
