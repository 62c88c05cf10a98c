//! The header of the key, and its syntax.

use http::{HeaderName, HeaderValue, Request, StatusCode};
use tests::{Effects, TestResponse, app, created, creating, post, send};
use tower_idempotency::{
    IdempotencyLayer, KeyScope, KeySyntax, MemoryStore, MissingKey, Ttl,
    conformance::{Fault, FaultInjector},
};

use axum::{Router, body::Body};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn keyless(body: &'static str) -> Request<Body> {
    Request::post("/orders")
        .body(Body::from(body))
        .expect("a valid request")
}

fn with_header(name: &'static str, value: impl AsRef<[u8]>) -> Request<Body> {
    let value = HeaderValue::from_bytes(value.as_ref()).expect("a header value");
    Request::post("/orders")
        .header(name, value)
        .body(Body::from("order"))
        .expect("a valid request")
}

fn keyed(key: impl AsRef<[u8]>) -> Request<Body> {
    with_header("idempotency-key", key)
}

fn assert_refused(response: &TestResponse, code: &str, what: &str) {
    assert_eq!(response.status, StatusCode::BAD_REQUEST, "{what}");
    assert_eq!(
        response.header("content-type"),
        Some("application/problem+json"),
        "{what}"
    );
    assert_eq!(response.code(), code, "{what}");
    assert!(!response.is_replay(), "{what}");
}

/// Returns `true` if two requests with these keys are treated as one.
async fn are_one(app: &(Router, Effects), first: Request<Body>, second: Request<Body>) -> bool {
    let (app, effects) = app;
    let before = effects.count();
    let first = send(app, first).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    let second = send(app, second).await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    let executed = effects.count() - before;
    assert_eq!(second.is_replay(), executed == 1);
    assert_eq!(first.body == second.body, executed == 1);
    executed == 1
}

// F-060, S-002
#[tokio::test(start_paused = true)]
async fn missing_required_key_is_refused() {
    let (app, effects) = creating(layer().with_missing_key(MissingKey::Reject));
    let response = send(&app, keyless("order")).await;
    assert_refused(&response, "missing-key", "no header");
    assert_eq!(effects.count(), 0);
}

// S-002
#[tokio::test(start_paused = true)]
async fn missing_key_error_names_header() {
    let layer = layer().with_missing_key(MissingKey::Reject);
    let other = layer
        .clone()
        .with_header(HeaderName::from_static("x-payment"));
    for (layer, name) in [(layer, "idempotency-key"), (other, "x-payment")] {
        let (app, _) = creating(layer);
        let response = send(&app, keyless("order")).await;
        assert_refused(&response, "missing-key", name);
        assert!(response.text().contains(name), "{}", response.text());
    }
}

// S-001
#[tokio::test(start_paused = true)]
async fn optional_key_passes_without_store() {
    let store = MemoryStore::new();
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    for n in 1..=3 {
        let response = send(&app, keyless("order")).await;
        assert_eq!(response.status, StatusCode::CREATED);
        assert_eq!(response.text(), format!("{{\"execution\":{n}}}"));
        assert!(!response.is_replay());
    }
    assert_eq!(effects.count(), 3);
    assert!(store.is_empty());
}

// F-061, S-004
#[tokio::test(start_paused = true)]
async fn empty_key_is_malformed_if_optional() {
    for missing in [
        MissingKey::PassThrough,
        MissingKey::Reject,
        MissingKey::Derive,
    ] {
        let (app, effects) = creating(layer().with_missing_key(missing));
        for value in ["", " \t ", "\"\"", " \"\" "] {
            let response = send(&app, keyed(value)).await;
            assert_refused(
                &response,
                "malformed-key",
                &format!("{missing:?} {value:?}"),
            );
        }
        assert_eq!(effects.count(), 0);
    }
}

// F-063, S-013
#[tokio::test(start_paused = true)]
async fn quoted_and_unquoted_key_are_equal() {
    for (first, second) in [
        ("\"abc\"", "abc"),
        ("abc", "\"abc\""),
        ("abc", " abc\t"),
        ("\"abc\";v=1", "abc"),
    ] {
        let app = creating(layer());
        assert!(
            are_one(&app, keyed(first), keyed(second)).await,
            "{first} {second}"
        );
    }
    let app = creating(layer());
    assert!(
        !are_one(&app, keyed("abc"), keyed("ABC")).await,
        "letter case"
    );
}

// F-061, S-006
#[tokio::test(start_paused = true)]
async fn key_over_255_bytes_is_too_long() {
    let (app, effects) = creating(layer());
    for quote in ["", "\""] {
        let longest = format!("{quote}{}{quote}", "k".repeat(255));
        let response = send(&app, keyed(longest)).await;
        assert_eq!(response.status, StatusCode::CREATED, "{quote}");
        let too_long = format!("{quote}{}{quote}", "k".repeat(256));
        let response = send(&app, keyed(too_long)).await;
        assert_refused(&response, "key-too-long", quote);
    }
    assert_eq!(effects.count(), 1, "the quoted one is a replay");
    let response = send(&app, keyed("k".repeat(10_000))).await;
    assert_refused(&response, "key-too-long", "far too long");
}

// S-007
#[tokio::test(start_paused = true)]
async fn key_length_counts_bytes() {
    let from_head = layer().with_key_from(KeyScope::EachCaller, |head| {
        let repeat = head.headers.get("x-repeat")?.to_str().ok()?;
        Some("é".repeat(repeat.parse().ok()?))
    });
    let (app, effects) = creating(from_head);
    let response = send(&app, with_header("x-repeat", "128")).await;
    assert_refused(&response, "key-too-long", "128 characters of two bytes");
    assert_eq!(effects.count(), 0);
    let response = send(&app, with_header("x-repeat", "127")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-008
#[tokio::test(start_paused = true)]
async fn key_below_minimum_is_refused() {
    let (app, effects) = creating(layer().with_key_length(21..=255));
    let response = send(&app, keyed("k".repeat(20))).await;
    assert_refused(&response, "malformed-key", "20 bytes");
    assert_eq!(effects.count(), 0);
    let response = send(&app, keyed("k".repeat(21))).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// F-061, S-005
#[tokio::test(start_paused = true)]
async fn invalid_key_is_refused() {
    let (app, effects) = creating(layer());
    for value in [
        &b"a,b"[..],
        b"\"a\",\"b\"",
        b"a;b",
        b"a\"b",
        b"a\\b",
        b"a b",
        b"a\tb",
        b"\"abc",
        b"\"a\\x\"",
        b"caf\xc3\xa9",
        b"\"caf\xc3\xa9\"",
        b"\xff\xfe",
    ] {
        let response = send(&app, keyed(value)).await;
        assert_refused(
            &response,
            "malformed-key",
            &value.escape_ascii().to_string(),
        );
    }
    assert_eq!(effects.count(), 0);
}

// F-062
// Some libraries reject these characters, and therefore fail for some random keys in base64.
#[tokio::test(start_paused = true)]
async fn keys_with_punctuation_are_distinct() {
    let app = creating(layer());
    let keys = [
        "a/b",
        "a:b",
        "a+b",
        "a%2Fb",
        "a",
        "b",
        "AbC/dE+f0w==",
        "urn:uuid:8e03978e-40d5-43dd-bc93-6894a57f9324",
        "https://example.com/orders/7?retry=1#x",
        "../../etc/passwd",
        "a//b",
        "a::b",
    ];
    for key in keys {
        assert!(are_one(&app, keyed(key), keyed(key)).await, "{key}");
    }
    assert_eq!(app.1.count(), keys.len() as u64, "no two keys are the same");
}

// S-010
#[tokio::test(start_paused = true)]
async fn key_check_restricts_characters() {
    let (app, effects) = creating(layer().with_key_check(|key| {
        key.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte))
    }));
    for value in ["a/b", "\"a b\"", "a\tb", "a+b="] {
        let response = send(&app, keyed(value)).await;
        assert_refused(&response, "malformed-key", value);
    }
    assert_eq!(effects.count(), 0);
    let response = send(&app, keyed("Order_7.a:b-c")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-011
#[tokio::test(start_paused = true)]
async fn key_check_can_require_uuid() {
    let is_uuid = |key: &str| {
        key.len() == 36
            && key.bytes().enumerate().all(|(at, byte)| match at {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            })
    };
    let (app, effects) = creating(layer().with_key_check(is_uuid));
    let response = send(&app, keyed("order-7")).await;
    assert_refused(&response, "malformed-key", "not a UUID");
    assert_eq!(effects.count(), 0);
    let response = send(&app, keyed("\"8e03978e-40d5-43dd-bc93-6894a57f9324\"")).await;
    assert_eq!(
        response.status,
        StatusCode::CREATED,
        "checked without its quotes"
    );
    assert_eq!(effects.count(), 1);
}

// S-016
#[tokio::test(start_paused = true)]
async fn custom_header_replaces_default() {
    let name = HeaderName::from_static("x-request-key");
    let layer = layer().with_header(name);
    let (app, effects) = creating(layer.clone());
    for _ in 0..2 {
        let response = send(&app, keyed("abc")).await;
        assert_eq!(response.status, StatusCode::CREATED);
    }
    assert_eq!(effects.count(), 2);
    let key = || with_header("x-request-key", "abc");
    let app = creating(layer.clone());
    assert!(are_one(&app, key(), key()).await);
    let (app, effects) = creating(layer.with_missing_key(MissingKey::Reject));
    let response = send(&app, keyed("abc")).await;
    assert_refused(&response, "missing-key", "the other name");
    assert_eq!(effects.count(), 0);
}

// S-017
#[tokio::test(start_paused = true)]
async fn alias_header_carries_same_key() {
    let alias = HeaderName::from_static("x-idempotency-key");
    let app = creating(layer().with_header_alias(alias));
    let aliased = || with_header("x-idempotency-key", "k");
    assert!(are_one(&app, aliased(), keyed("k")).await);
    let (app, effects) = app;
    let response = send(&app, aliased()).await;
    assert!(response.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-018
#[tokio::test(start_paused = true)]
async fn header_takes_precedence_over_alias() {
    let alias = HeaderName::from_static("x-idempotency-key");
    let (app, effects) = creating(layer().with_header_alias(alias));
    let mut both = keyed("first");
    both.headers_mut()
        .insert("x-idempotency-key", HeaderValue::from_static("second"));
    let response = send(&app, both).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert!(send(&app, keyed("first")).await.is_replay());
    assert!(!send(&app, keyed("second")).await.is_replay());
    assert_eq!(effects.count(), 2);
}

// S-012
#[tokio::test(start_paused = true)]
async fn rejected_key_uses_service_renderer() {
    let layer = layer()
        .with_key_check(|key| key.starts_with("order-"))
        .with_error_response(|error| {
            let mut res = http::Response::new(format!("no: {}", error.kind().code()).into());
            *res.status_mut() = StatusCode::IM_A_TEAPOT;
            res
        });
    let (app, effects) = creating(layer);
    let response = send(&app, keyed("refund-7")).await;
    assert_eq!(response.status, StatusCode::IM_A_TEAPOT);
    assert_eq!(response.text(), "no: malformed-key");
    assert_eq!(effects.count(), 0);
}

// F-061, S-009
#[tokio::test(start_paused = true)]
async fn repeated_key_lines_are_refused() {
    let alias = HeaderName::from_static("x-idempotency-key");
    let (app, effects) = creating(layer().with_header_alias(alias));
    for name in ["idempotency-key", "x-idempotency-key"] {
        for (first, second) in [("a", "b"), ("a", "a"), ("a", "")] {
            let mut req = with_header(name, first);
            req.headers_mut()
                .append(name, HeaderValue::from_static(second));
            let response = send(&app, req).await;
            assert_refused(
                &response,
                "malformed-key",
                &format!("{name} {first} {second}"),
            );
        }
    }
    assert_eq!(effects.count(), 0);
}

// S-019
// The key is taken from the head only: the body is not read for a key.
#[tokio::test(start_paused = true)]
async fn key_from_head_names_entity() {
    let by_order = || {
        layer().with_key_from(KeyScope::EachCaller, |head| {
            let id = head
                .uri
                .path()
                .strip_prefix("/orders/")?
                .strip_suffix("/refund")?;
            Some(format!("payment {id} refund"))
        })
    };
    let refund = |id: u64| {
        Request::post(format!("/orders/{id}/refund"))
            .body(Body::empty())
            .expect("a valid request")
    };
    let app = creating(by_order());
    assert!(are_one(&app, refund(7), refund(7)).await);
    assert!(!are_one(&app, refund(8), refund(9)).await);

    let (app, effects) = creating(by_order());
    let response = send(&app, keyed("abc")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert!(
        !send(&app, keyed("abc")).await.is_replay(),
        "the header is ignored"
    );
    assert_eq!(effects.count(), 2);
}

// S-020
#[tokio::test(start_paused = true)]
async fn head_without_key_follows_setting() {
    let from_head = layer().with_key_from(KeyScope::EachCaller, |_| None);
    let (app, effects) = creating(from_head.clone());
    for _ in 0..2 {
        assert_eq!(
            send(&app, keyless("order")).await.status,
            StatusCode::CREATED
        );
    }
    assert_eq!(effects.count(), 2);
    let (app, effects) = creating(from_head.with_missing_key(MissingKey::Reject));
    let response = send(&app, keyless("order")).await;
    assert_refused(&response, "missing-key", "the closure found none");
    assert_eq!(effects.count(), 0);
}

// S-021
#[tokio::test(start_paused = true)]
async fn service_key_is_limited_without_syntax() {
    let (app, effects) = creating(layer().with_key_from(KeyScope::EachCaller, |head| {
        head.headers
            .get("x-event")
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
    }));
    for value in ["", "tab\there"] {
        let response = send(&app, with_header("x-event", value)).await;
        assert_refused(&response, "malformed-key", value);
    }
    assert_eq!(effects.count(), 0);
    let event = || with_header("x-event", "invoice, 7; \"paid\"");
    assert_eq!(send(&app, event()).await.status, StatusCode::CREATED);
    assert!(send(&app, event()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-015
#[tokio::test(start_paused = true)]
async fn header_name_ignores_case() {
    let app = creating(layer());
    let shouted = || {
        let name = HeaderName::from_bytes(b"IDEMPOTENCY-KEY").expect("a header name");
        let mut req = keyless("order");
        req.headers_mut()
            .insert(name, HeaderValue::from_static("k"));
        req
    };
    assert!(are_one(&app, shouted(), keyed("k")).await);
}

// S-014
#[tokio::test(start_paused = true)]
async fn each_syntax_decides_about_quotes() {
    for (syntax, bare_is_quoted) in [
        (KeySyntax::Lenient, Some(true)),
        (KeySyntax::Unquoted, Some(true)),
        (KeySyntax::Verbatim, Some(false)),
        (KeySyntax::Strict, None),
    ] {
        let app = creating(layer().with_key_syntax(syntax));
        match bare_is_quoted {
            Some(one) => {
                let found = are_one(&app, keyed("abc"), keyed("\"abc\"")).await;
                assert_eq!(found, one, "{syntax:?}");
            }
            None => {
                let response = send(&app.0, keyed("abc")).await;
                assert_refused(&response, "malformed-key", "strict and unquoted");
                assert_eq!(app.1.count(), 0);
                assert!(are_one(&app, keyed("\"abc\""), keyed(" \"abc\";p ")).await);
            }
        }
    }
}

// S-003
#[tokio::test(start_paused = true)]
async fn equal_content_can_be_key() {
    let derive = layer()
        .with_missing_key(MissingKey::Derive)
        .with_retention(Ttl::from_secs(300));
    let app = creating(derive);
    assert!(are_one(&app, keyless("order 7"), keyless("order 7")).await);
    assert!(!are_one(&app, keyless("order 8"), keyless("order 9")).await);
    let (app, effects) = app;
    assert!(
        !send(&app, keyed("k")).await.is_replay(),
        "a key from the client has precedence"
    );
    tokio::time::advance(std::time::Duration::from_secs(301)).await;
    let before = effects.count();
    assert!(!send(&app, keyless("order 7")).await.is_replay());
    assert_eq!(
        effects.count(),
        before + 1,
        "the key is free after its record expired"
    );
}

// S-022
#[tokio::test(start_paused = true)]
async fn handler_sees_decoded_key() {
    let (app, effects) = app(layer(), async |n, req: Request<Body>| {
        let key = req
            .extensions()
            .get::<tower_idempotency::IdempotencyKey>()
            .map(|key| key.as_str().to_owned());
        assert_eq!(key.as_deref(), Some(r#"a"b\c"#));
        created(n)
    });
    let response = send(&app, post("/orders", r#""a\"b\\c""#, "order")).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-961
#[tokio::test(start_paused = true)]
async fn claim_carries_digest_of_scope() {
    let store = FaultInjector::new(MemoryStore::new()).with_script(|_, _| Fault::None);
    let layer = IdempotencyLayer::new(store.clone());
    let (app, _) = creating(layer.clone());
    let (other_namespace, _) = creating(layer.clone().with_namespace("other"));
    let from = |caller: &'static str, key: &'static str| {
        let mut req = keyed(key);
        let caller = HeaderValue::from_static(caller);
        req.headers_mut().insert("authorization", caller);
        req
    };
    for (app, req) in [
        (&app, from("Bearer a", "1")),
        (&app, from("Bearer a", "2")),
        (&app, from("Bearer b", "1")),
        (&app, keyed("1")),
        (&app, keyed("2")),
        (&other_namespace, from("Bearer a", "1")),
    ] {
        assert_eq!(send(app, req).await.status, StatusCode::CREATED);
    }
    let jobs = ["job-1", "job-2"].map(|key| {
        layer.run_once(key, "", async |_| {
            Ok::<_, tower_idempotency::run_once::WorkError<()>>(())
        })
    });
    for job in jobs {
        let _executed = job.await.expect("in memory");
    }
    let claims = store.claims();
    let scopes: Vec<_> = claims.iter().map(|claim| claim.scope).collect();
    let [a1, a2, b, anonymous, anonymous_2, elsewhere, job_1, job_2] = scopes[..] else {
        panic!("{scopes:?}");
    };
    assert_eq!((a1, anonymous, job_1), (a2, anonymous_2, job_2));
    let distinct = [a1, b, anonymous, elsewhere, job_1];
    for (n, scope) in distinct.iter().enumerate() {
        assert!(scope.is_some() && !distinct[..n].contains(scope));
    }
    for claim in &claims {
        let scope = claim.scope.expect("all have the same key");
        assert!(!claim.id.as_bytes().starts_with(scope.as_bytes()));
    }
}
