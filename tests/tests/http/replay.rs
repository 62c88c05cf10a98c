//! Responses to retries.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
    routing,
};
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, StatusCode,
    header::{self, AUTHORIZATION, CONTENT_TYPE, LOCATION, RETRY_AFTER},
};
use http_body::Body as _;
use http_body_util::BodyExt;
use tests::{Effects, Scripted, Step, TestResponse, app, creating, post, send};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_http::{
    compression::CompressionLayer,
    cors::{AllowOrigin, CorsLayer},
    timeout::TimeoutLayer,
    trace::TraceLayer,
};
use tower_idempotency::{
    IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, IdempotencyLayer, MemoryStore,
    conformance::FaultInjector, replayed_by_default,
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

/// Returns the first response of a handler, and its replay.
async fn twice(
    layer: IdempotencyLayer,
    response: fn() -> Response,
) -> (TestResponse, TestResponse) {
    let (app, effects) = app(layer, move |_, _| std::future::ready(response()));
    let first = send(&app, order()).await;
    let replay = send(&app, order()).await;
    assert_eq!(effects.count(), 1);
    (first, replay)
}

fn lines(response: &TestResponse) -> Vec<(String, Vec<u8>)> {
    let line =
        |(name, value): (&HeaderName, &HeaderValue)| (name.to_string(), value.as_bytes().to_vec());
    response.headers.iter().map(line).collect()
}

// F-024, S-101
#[tokio::test(start_paused = true)]
async fn five_retries_get_equal_responses() {
    let (app, effects) = creating(layer());
    let first = send(&app, order()).await;
    assert_eq!(first.header("idempotent-replayed"), None);
    for _ in 0..5 {
        let replay = send(&app, order()).await;
        assert_eq!(replay.header("idempotent-replayed"), Some("true"));
        assert_eq!((replay.status, &replay.body), (first.status, &first.body));
        let mut headers = replay.headers.clone();
        headers.remove("idempotent-replayed");
        assert_eq!(headers, first.headers);
    }
    assert_eq!(effects.count(), 1);
}

// S-102
#[tokio::test(start_paused = true)]
async fn replay_marker_is_configurable() {
    let marker = (
        HeaderName::from_static("idempotency-replayed"),
        HeaderValue::from_static("yes"),
    );
    let (first, replay) = twice(layer().with_replay_marker(Some(marker)), || {
        "answer".into_response()
    })
    .await;
    assert_eq!(first.header("idempotency-replayed"), None);
    assert_eq!(replay.header("idempotency-replayed"), Some("yes"));
    assert_eq!(replay.header("idempotent-replayed"), None);
    let (first, replay) = twice(layer().with_replay_marker(None), || {
        "answer".into_response()
    })
    .await;
    assert_eq!(replay, first);
}

// S-103
#[tokio::test(start_paused = true)]
async fn replay_marker_of_handler_is_removed() {
    let (_, replay) = twice(layer(), || {
        [("idempotent-replayed", "false")].into_response()
    })
    .await;
    assert_eq!(replay.header("idempotent-replayed"), Some("true"));
    assert_eq!(
        replay.headers.get_all("idempotent-replayed").iter().count(),
        1
    );
}

// F-085, S-104
#[tokio::test(start_paused = true)]
async fn replay_keeps_status_location_and_etag() {
    let (first, replay) = twice(layer(), || {
        let headers = [("location", "/orders/7"), ("etag", "\"7\"")];
        (StatusCode::CREATED, headers, "made").into_response()
    })
    .await;
    assert_eq!(replay.status, StatusCode::CREATED);
    assert_eq!(replay.header("location"), first.header("location"));
    assert_eq!(replay.header("etag"), Some("\"7\""));
}

// F-084, S-105
#[tokio::test(start_paused = true)]
async fn repeated_headers_keep_order() {
    let (first, replay) = twice(layer(), || {
        let mut res = "answer".into_response();
        for (name, value) in [
            (header::LINK, "</1>; rel=next"),
            (header::SET_COOKIE, "session=1"),
            (header::LINK, "</2>; rel=prev"),
            (header::SET_COOKIE, "theme=dark"),
            (header::VARY, "accept"),
        ] {
            res.headers_mut()
                .append(name, HeaderValue::from_static(value));
        }
        res
    })
    .await;
    let links: Vec<_> = replay.headers.get_all(header::LINK).iter().collect();
    assert_eq!(links, ["</1>; rel=next", "</2>; rel=prev"]);
    assert_eq!(first.headers.get_all(header::SET_COOKIE).iter().count(), 2);
    assert!(!replay.headers.contains_key(header::SET_COOKIE));
    assert_eq!(replay.header("vary"), Some("accept"));
}

// F-085, S-106
#[tokio::test(start_paused = true)]
async fn header_values_are_kept_byte_for_byte() {
    let (first, replay) = twice(layer(), || {
        let mut res = "answer".into_response();
        let latin1 = HeaderValue::from_bytes(b"caf\xe9").expect("a value");
        res.headers_mut().insert("x-latin1", latin1);
        res.headers_mut()
            .insert("x-empty", HeaderValue::from_static(""));
        res
    })
    .await;
    for name in ["x-latin1", "x-empty"] {
        assert_eq!(replay.headers.get(name), first.headers.get(name), "{name}");
        assert!(replay.headers.contains_key(name), "{name}");
    }
}

// S-107
/// A trace shows no more of a replay than of the first response, and HTTP/2 never indexes a sensitive header in its
/// tables.
#[tokio::test(start_paused = true)]
async fn replay_keeps_sensitive_mark() {
    let secret = || {
        let mut value = HeaderValue::from_static("hunter2");
        value.set_sensitive(true);
        value
    };
    let shown = |(_, value): (&HeaderName, &HeaderValue)| format!("{value:?}");
    for compressed in [0, usize::MAX] {
        let (app, _) = app(layer().with_compression_above(compressed), move |_, _| {
            let mut trailers = HeaderMap::new();
            trailers.append("x-sum", HeaderValue::from_static("42"));
            trailers.append("x-signature", secret());
            let body = Scripted::new([Step::from("data"), Step::Trailers(trailers)]);
            let mut res = Response::new(Body::new(body));
            let headers = res.headers_mut();
            headers.append("etag", HeaderValue::from_static("1"));
            headers.append("date", secret());
            headers.append("x-token", HeaderValue::from_static("public"));
            headers.append("x-token", secret());
            std::future::ready(res)
        });
        for attempt in ["first", "replay"] {
            let res = app.clone().oneshot(order()).await.expect("infallible");
            let lines: Vec<_> = res
                .headers()
                .get_all("x-token")
                .iter()
                .map(|v| format!("{v:?}"))
                .collect();
            assert_eq!(lines, ["\"public\"", "Sensitive"], "{attempt}");
            assert_eq!(format!("{:?}", res.headers()["etag"]), "\"1\"");
            let body = res.into_body().collect().await.expect("a whole body");
            let trailers: Vec<_> = body
                .trailers()
                .expect("trailers")
                .iter()
                .map(shown)
                .collect();
            assert_eq!(trailers, ["\"42\"", "Sensitive"], "{attempt}");
        }
    }
}

// F-084, S-109
#[tokio::test(start_paused = true)]
async fn per_exchange_headers_are_not_replayed() {
    const ONCE: [&str; 24] = [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "date",
        "age",
        "via",
        "set-cookie",
        "server-timing",
        "traceparent",
        "tracestate",
        "x-request-id",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-remaining",
        "x-ratelimit-limit",
        "x-rate-limit-reset",
        "x-hop",
    ];
    let (_, replay) = twice(layer(), || {
        let mut headers = HeaderMap::new();
        for name in ONCE {
            headers.insert(name, HeaderValue::from_static("x"));
        }
        headers.insert("connection", HeaderValue::from_static("close, X-Hop"));
        headers.insert("x-kept", HeaderValue::from_static("x"));
        headers.insert("www-authenticate", HeaderValue::from_static("Basic"));
        (headers, "answer").into_response()
    })
    .await;
    for name in ONCE {
        assert!(!replay.headers.contains_key(name), "{name}");
    }
    assert_eq!(replay.header("x-kept"), Some("x"));
    assert_eq!(replay.header("www-authenticate"), Some("Basic"));
    assert_eq!(replay.header("content-length"), Some("6"));
}

/// A service without a router, which would compute a `Content-Length` itself.
pub(crate) fn bare(
    layer: &IdempotencyLayer,
    response: impl Fn() -> Response + Clone + Send + Sync + 'static,
) -> (
    BoxCloneSyncService<Request<Body>, Response, Infallible>,
    Effects,
) {
    let effects = Effects::default();
    let counted = effects.clone();
    let service = layer.layer(service_fn(
        move |_req: Request<tower_idempotency::Body<Body>>| {
            let _ = counted.happen();
            std::future::ready(Ok(response()))
        },
    ));
    let service = service.map_response(|res: http::Response<_>| res.map(Body::new));
    (BoxCloneSyncService::new(service), effects)
}

// F-081, S-110
#[tokio::test(start_paused = true)]
async fn replay_has_correct_content_length() {
    let (service, effects) = bare(&layer(), || {
        Response::new(Body::new(Scripted::new(["two ", "chunks"])))
    });
    let first = send(&service, order()).await;
    assert_eq!(first.header("content-length"), None);
    let replay = service.oneshot(order()).await.expect("infallible");
    assert_eq!(replay.headers()["content-length"], "10");
    assert_eq!(replay.body().size_hint().exact(), Some(10));
    let body = replay.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), first.body);
    assert_eq!(effects.count(), 1);
}

// S-934, F-922
#[tokio::test(start_paused = true)]
async fn headers_of_one_exchange_are_not_replayed() {
    const ONCE: [(&str, &str); 12] = [
        ("authentication-info", "nextnonce=\"1\""),
        ("proxy-authentication-info", "nextnonce=\"1\""),
        ("dpop-nonce", "1"),
        ("replay-nonce", "1"),
        ("set-cookie2", "a=1"),
        ("clear-site-data", "\"storage\""),
        ("access-control-allow-origin", "https://one.example"),
        ("access-control-allow-credentials", "true"),
        ("x-correlation-id", "1"),
        ("x-amzn-trace-id", "Root=1"),
        ("x-b3-traceid", "1"),
        ("x-datadog-trace-id", "1"),
    ];
    let (first, replay) = twice(layer(), || {
        let mut res = ([("x-transaction-id", "7")], "answer").into_response();
        for (name, value) in ONCE {
            let value = HeaderValue::from_static(value);
            res.headers_mut().insert(name, value);
        }
        res
    })
    .await;
    assert_eq!(replay.header("x-transaction-id"), Some("7"));
    for (name, value) in ONCE {
        assert_eq!(first.header(name), Some(value));
        assert_eq!(replay.header(name), None, "{name}");
    }
    let kept = layer().with_replayed_headers(|_| true);
    let (_, replay) = twice(kept, || ([ONCE[0], ONCE[6]], "answer").into_response()).await;
    for (name, value) in [ONCE[0], ONCE[6]] {
        assert_eq!(replay.header(name), Some(value));
    }
}

// S-111
#[tokio::test(start_paused = true)]
async fn allow_list_limits_replayed_headers() {
    let allowed = layer().with_replayed_headers(|name| name == "content-type" || name == "etag");
    let (_, replay) = twice(allowed, || {
        let headers = [("ETag", "\"7\""), ("location", "/7"), ("x-other", "x")];
        (headers, "answer").into_response()
    })
    .await;
    let mut names: Vec<_> = replay.headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let expected = [
        "content-length",
        "content-type",
        "etag",
        "idempotent-replayed",
    ];
    assert_eq!(names, expected);
}

// F-084, S-112
#[tokio::test(start_paused = true)]
async fn cookies_can_be_allowed_and_framing_never() {
    let allowed = layer().with_replayed_headers(|name| {
        name == header::SET_COOKIE
            || name == header::CONNECTION
            || name == header::TRANSFER_ENCODING
            || replayed_by_default(name)
    });
    let (_, replay) = twice(allowed, || {
        let headers = [
            ("set-cookie", "a=1"),
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
        ];
        (headers, "answer").into_response()
    })
    .await;
    assert_eq!(replay.header("set-cookie"), Some("a=1"));
    assert_eq!(replay.header("connection"), None);
    assert_eq!(replay.header("transfer-encoding"), None);
}

// F-083, S-113
#[tokio::test(start_paused = true)]
async fn empty_response_is_replayed_empty() {
    for status in [204, 304, 200, 205] {
        let (service, effects) = bare(&layer(), move || {
            let mut res = Response::new(Body::empty());
            *res.status_mut() = StatusCode::from_u16(status).expect("a status");
            res
        });
        let first = send(&service, order()).await;
        let replay = send(&service, order()).await;
        assert_eq!(effects.count(), 1, "{status}");
        assert_eq!(replay.status, status);
        assert!(replay.body.is_empty());
        assert_eq!(replay.header("content-type"), None, "{status}");
        let length = (![204, 304].contains(&status)).then_some("0");
        assert_eq!(replay.header("content-length"), length, "{status}");
        assert!(first.body.is_empty());
    }
}

// F-087, S-115
#[tokio::test(start_paused = true)]
async fn binary_chunked_response_is_replayed_exactly() {
    let (first, replay) = twice(layer(), || {
        let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let bytes = Bytes::from(bytes);
        let chunks = (0..100).map(|at| Step::Data(bytes.slice(at * 1000..(at + 1) * 1000)));
        Response::new(Body::new(Scripted::new(chunks)))
    })
    .await;
    assert_eq!(first.body.len(), 100_000);
    assert_eq!(replay.body, first.body);
}

// F-086, S-116
#[tokio::test(start_paused = true)]
async fn trailers_are_replayed() {
    let (app, effects) = app(layer(), async |_, _| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-checksum", HeaderValue::from_static("42"));
        let steps = [Step::from("data"), Step::Trailers(trailers)];
        Response::new(Body::new(Scripted::new(steps)))
    });
    for replay in [false, true] {
        let res = app.clone().oneshot(order()).await.expect("infallible");
        assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
        if replay {
            assert_eq!(res.headers()["trailer"], "x-checksum");
            assert!(!res.headers().contains_key("content-length"));
        }
        let body = res.into_body().collect().await.expect("a body");
        let trailers = body.trailers().expect("trailers");
        assert_eq!(trailers["x-checksum"], "42");
        assert_eq!(body.to_bytes(), "data");
    }
    assert_eq!(effects.count(), 1);
}

// S-116
#[tokio::test(start_paused = true)]
async fn trailers_obey_replayed_headers_setting() {
    type Allowed = fn(&HeaderName) -> bool;
    let one: Allowed = |name| name == "x-checksum";
    let none: Allowed = |_| false;
    for (allowed, kept) in [(one, Some("x-checksum")), (none, None)] {
        let (app, _) = app(layer().with_replayed_headers(allowed), async |_, _| {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-checksum", HeaderValue::from_static("42"));
            trailers.insert("set-cookie", HeaderValue::from_static("a=1"));
            let steps = [Step::from("data"), Step::Trailers(trailers)];
            Response::new(Body::new(Scripted::new(steps)))
        });
        let first = app.clone().oneshot(order()).await.expect("infallible");
        let first = first.into_body().collect().await.expect("a body");
        assert_eq!(first.trailers().map(HeaderMap::len), Some(2));
        let replay = app.clone().oneshot(order()).await.expect("infallible");
        let length = replay.headers().contains_key("content-length");
        assert_eq!(length, kept.is_none());
        let replay = replay.into_body().collect().await.expect("a body");
        let names: Option<Vec<_>> = replay
            .trailers()
            .map(|trailers| trailers.keys().map(HeaderName::as_str).collect());
        assert_eq!(names, kept.map(|name| vec![name]));
    }
}

// S-117
#[tokio::test(start_paused = true)]
async fn compressed_and_plain_records_replay_alike() {
    for above in [0, usize::MAX] {
        let (first, replay) = twice(layer().with_compression_above(above), || {
            "again and again ".repeat(1000).into_response()
        })
        .await;
        assert_eq!(first.body.len(), 16_000);
        assert_eq!(replay.body, first.body);
    }
}

// F-027, S-118
#[tokio::test(start_paused = true)]
async fn encoded_response_keeps_encoding() {
    let (first, replay) = twice(layer(), || {
        ([("content-encoding", "gzip")], &b"\x1f\x8b..."[..]).into_response()
    })
    .await;
    assert_eq!(replay.header("content-encoding"), Some("gzip"));
    assert_eq!(replay.body, first.body);
}

// F-026, S-120
#[tokio::test(start_paused = true)]
async fn compression_outside_layer_encodes_per_client() {
    let effects = Effects::default();
    let counted = effects.clone();
    let app = Router::new()
        .fallback(async move || {
            let _ = counted.happen();
            "again and again ".repeat(100)
        })
        .layer(layer())
        .layer(CompressionLayer::new());
    let mut gzip = order();
    gzip.headers_mut()
        .insert("accept-encoding", HeaderValue::from_static("gzip"));
    let first = send(&app, gzip).await;
    assert_eq!(first.header("content-encoding"), Some("gzip"));
    let replay = send(&app, order()).await;
    assert!(replay.is_replay());
    assert_eq!(replay.header("content-encoding"), None);
    assert_eq!(replay.text(), "again and again ".repeat(100));
    assert_eq!(effects.count(), 1);
}

// S-119
#[tokio::test(start_paused = true)]
async fn documented_layer_order_shows_replay_to_browser() {
    let app = Router::new()
        .route("/orders", routing::post(async || "ordered"))
        .route_layer(TimeoutLayer::with_status_code(
            StatusCode::SERVICE_UNAVAILABLE,
            Duration::from_secs(10),
        ))
        .route_layer(layer())
        .layer(CompressionLayer::new())
        .layer(TraceLayer::new_for_http())
        .layer(
            CorsLayer::new()
                .allow_origin(AllowOrigin::mirror_request())
                .allow_headers([AUTHORIZATION, CONTENT_TYPE, IDEMPOTENCY_KEY])
                .expose_headers([IDEMPOTENT_REPLAYED, LOCATION, RETRY_AFTER]),
        );
    let preflight = Request::options("/orders")
        .header("origin", "https://example.com")
        .header("access-control-request-method", "POST")
        .header(
            "access-control-request-headers",
            "authorization, content-type, idempotency-key",
        )
        .body(Body::empty())
        .expect("a request");
    let allowed = send(&app, preflight).await;
    let allowed = allowed.header("access-control-allow-headers");
    let allowed = allowed.expect("a list");
    for name in ["authorization", "content-type", "idempotency-key"] {
        assert!(allowed.contains(name), "{name}: {allowed}");
    }
    for replay in [false, true] {
        let mut req = order();
        let origin = HeaderValue::from_static("https://example.com");
        req.headers_mut().insert("origin", origin);
        let response = send(&app, req).await;
        assert_eq!(response.is_replay(), replay);
        let exposed = response.header("access-control-expose-headers");
        let exposed = exposed.expect("a list");
        for name in ["idempotent-replayed", "location", "retry-after"] {
            assert!(exposed.contains(name), "{name}: {exposed}");
        }
    }
}

// F-028
#[tokio::test(start_paused = true)]
async fn cors_outside_layer_serves_each_origin() {
    for inside in [true, false] {
        let cors = CorsLayer::new().allow_origin(AllowOrigin::mirror_request());
        let effects = Effects::default();
        let counted = effects.clone();
        let app = Router::new().fallback(async move || counted.happen().to_string());
        let app = match inside {
            true => app.layer(layer()).layer(cors),
            false => app.layer(cors).layer(layer()),
        };
        let from = |origin| {
            let mut req = order();
            let origin = HeaderValue::from_static(origin);
            req.headers_mut().insert("origin", origin);
            req
        };
        send(&app, from("https://one.example")).await;
        let replay = send(&app, from("https://two.example")).await;
        assert!(replay.is_replay());
        let allowed = replay.headers.get_all("access-control-allow-origin");
        let allowed: Vec<_> = allowed.iter().collect();
        // CORS inside the layer allows only the origin of the first request, and a replay does not carry that header.
        let expected: &[_] = if inside {
            &["https://two.example"]
        } else {
            &[]
        };
        assert_eq!(allowed, expected);
        assert_eq!(effects.count(), 1);
    }
}

// F-108, F-110, S-122
#[tokio::test(start_paused = true)]
async fn unreadable_record_gets_503_without_execution() {
    let garbles: [(&str, fn(Bytes) -> Bytes); 5] = [
        ("empty", |_| Bytes::new()),
        ("of another kind", |_| {
            Bytes::from_static(b"{\"status\":200}")
        }),
        ("of an unknown version", |record| changed(&record, 0, 9)),
        ("cut short", |record| record.slice(..record.len() - 1)),
        ("damaged", |record| {
            let at = record.len() / 2;
            changed(&record, at, record[at] ^ 1)
        }),
    ];
    for (what, garble) in garbles {
        let store = FaultInjector::new(MemoryStore::new());
        let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        store.rewrite_records(garble);
        for _ in 0..2 {
            let response = send(&app, order()).await;
            assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{what}");
            assert_eq!(response.code(), "store-unavailable", "{what}");
            assert!(!response.is_replay() && !response.is_retryable(), "{what}");
            assert_eq!(response.header("retry-after"), None, "{what}");
            // A client that reads this must not repeat the operation under another key.
            assert!(response.text().contains("was executed before"), "{what}");
        }
        assert_eq!(effects.count(), 1, "{what}");
    }
}

fn changed(record: &Bytes, at: usize, to: u8) -> Bytes {
    let mut record = record.to_vec();
    record[at] = to;
    record.into()
}

// S-121
#[tokio::test(start_paused = true)]
async fn replay_does_not_extend_retention() {
    let (app, effects) = creating(layer());
    send(&app, order()).await;
    for _ in 0..23 {
        tokio::time::advance(Duration::from_secs(60 * 60)).await;
        assert!(send(&app, order()).await.is_replay());
    }
    tokio::time::advance(Duration::from_secs(60 * 60)).await;
    assert!(!send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 2);
}

// F-085, S-108
#[tokio::test(start_paused = true)]
async fn replay_keeps_header_order() {
    let (first, replay) = twice(layer(), || {
        let headers = [("x-c", "1"), ("x-a", "2"), ("x-b", "3")];
        (headers, "answer").into_response()
    })
    .await;
    let replayed_headers = |response: &TestResponse| {
        let mut lines = lines(response);
        lines.retain(|(name, _)| name.starts_with("x-"));
        lines
    };
    assert_eq!(replayed_headers(&replay), replayed_headers(&first));
}
