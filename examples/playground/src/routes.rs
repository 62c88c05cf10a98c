//! The routes behind the layer. Their handlers do not read keys.

use std::{
    hash::{BuildHasher, RandomState},
    io,
    sync::Arc,
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{Path, Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{AppendHeaders, IntoResponse, Response},
    routing::{any, get},
};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, NeedsAttention};

use crate::effects::{Effects, Executions};

/// Builds the app: the routes that `layer` protects, and two routes outside it that have no effect.
pub(crate) fn app(layer: IdempotencyLayer, effects: Arc<Effects>) -> Router {
    let protected = Router::new()
        .route("/orders", any(orders))
        .route("/slow/{ms}", any(slow))
        .route("/status/{code}", any(status))
        .route("/no-store", any(no_store))
        .route("/persist/{seconds}", any(persist))
        .route("/attention", any(attention))
        .route("/bytes/{n}", any(bytes))
        .route("/stream/{chunks}/{ms}", any(stream))
        .route("/events/{count}/{ms}", any(events))
        .route("/headers", any(headers))
        .route("/echo", any(echo))
        .route("/panic", any(panic))
        .route("/truncated", any(truncated))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&effects), count))
        .route_layer(layer);
    Router::new()
        .route("/executions", get(executions))
        .route("/healthz", get(async || "ok\n"))
        .with_state(effects)
        .merge(protected)
}

/// The number of an execution.
#[derive(Clone, Copy, Debug)]
struct Execution(u64);

/// Counts executions. This middleware is inside the layer, so replays and refused requests do not reach it.
async fn count(
    State(effects): State<Arc<Effects>>,
    key: Option<IdempotencyKey>,
    mut req: Request,
    next: Next,
) -> Response {
    let n = match effects.begin(req.method(), req.uri().path(), key.as_ref()) {
        Ok(n) => n,
        Err(error) => {
            let error = format!("the effects file cannot be written: {error}\n");
            return (StatusCode::INTERNAL_SERVER_ERROR, error).into_response();
        }
    };
    req.extensions_mut().insert(Execution(n));
    let mut res = next.run(req).await;
    res.headers_mut()
        .insert("x-execution", HeaderValue::from(n));
    res
}

async fn orders(Extension(Execution(n)): Extension<Execution>, body: Body) -> Response {
    let mut received = 0;
    let mut body = body.into_data_stream();
    while let Some(data) = body.next().await {
        match data {
            Ok(data) => received += data.len(),
            Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        }
    }
    (
        StatusCode::CREATED,
        [(header::LOCATION, format!("/orders/{n}"))],
        Json(json!({ "execution": n, "received": received })),
    )
        .into_response()
}

async fn slow(Path(ms): Path<u64>, execution: Extension<Execution>, body: Body) -> Response {
    sleep(Duration::from_millis(ms)).await;
    orders(execution, body).await
}

async fn status(Path(code): Path<u16>, Extension(Execution(n)): Extension<Execution>) -> Response {
    match StatusCode::from_u16(code) {
        Ok(status) if status.is_informational() => (
            StatusCode::BAD_REQUEST,
            "a status of 1xx is not a final response\n",
        )
            .into_response(),
        Ok(
            status
            @ (StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED),
        ) => status.into_response(),
        Ok(status) => (status, numbered(n)).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn no_store(Extension(Execution(n)): Extension<Execution>) -> impl IntoResponse {
    ([("x-idempo-policy", "no-store")], numbered(n))
}

async fn persist(
    Path(seconds): Path<u64>,
    Extension(Execution(n)): Extension<Execution>,
) -> impl IntoResponse {
    let seconds = HeaderValue::from(seconds);
    ([("x-idempo-persist-for-seconds", seconds)], numbered(n))
}

async fn attention(Extension(Execution(n)): Extension<Execution>) -> impl IntoResponse {
    const HALF_DONE: NeedsAttention = NeedsAttention::new("half-done");
    let attention = HALF_DONE.with_reason(format!("execution {n} of /attention"));
    (StatusCode::BAD_GATEWAY, Extension(attention), numbered(n))
}

async fn bytes(Path(n): Path<usize>) -> Response {
    if n > MOST_BYTES {
        let error = format!("expected at most {MOST_BYTES} bytes, found {n}\n");
        return (StatusCode::BAD_REQUEST, error).into_response();
    }
    // Each `RandomState` has new keys, so its hashes are practically random.
    let random = RandomState::new();
    let words = (0..n.div_ceil(8)).flat_map(|i| random.hash_one(i).to_le_bytes());
    words.take(n).collect::<Vec<_>>().into_response()
}

async fn stream(
    Path((chunks, ms)): Path<(u64, u64)>,
    Extension(Execution(n)): Extension<Execution>,
) -> impl IntoResponse {
    let line = move |i| format!("chunk {i} of execution {n}\n");
    let text = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    (text, one_per(ms, chunks, line))
}

async fn events(
    Path((count, ms)): Path<(u64, u64)>,
    Extension(Execution(n)): Extension<Execution>,
) -> impl IntoResponse {
    let event = move |i| format!("data: chunk {i} of execution {n}\n\n");
    let events = [(header::CONTENT_TYPE, "text/event-stream")];
    (events, one_per(ms, count, event))
}

async fn headers(Extension(Execution(n)): Extension<Execution>) -> impl IntoResponse {
    let latin1 = HeaderValue::from_bytes(b"caf\xe9").expect("bytes from 0x80 on are allowed");
    (
        AppendHeaders([
            (header::SET_COOKIE, "a=1"),
            (header::SET_COOKIE, "b=2; HttpOnly"),
            (header::LINK, "</orders>; rel=\"next\""),
            (header::LINK, "</healthz>; rel=\"help\""),
            (header::CONNECTION, "x-hop"),
        ]),
        [
            ("etag", format!("\"{n}\"")),
            ("x-request-id", format!("request-{n}")),
            ("x-hop", "to the next hop only".to_owned()),
        ],
        [("x-latin1", latin1)],
        numbered(n),
    )
}

async fn echo(req: Request) -> Response {
    let (mut head, body) = req.into_parts();
    let mut res = Response::new(body);
    if let Some(media_type) = head.headers.remove(header::CONTENT_TYPE) {
        res.headers_mut().insert(header::CONTENT_TYPE, media_type);
    }
    res
}

async fn panic() {
    panic!("the requested panic");
}

async fn truncated(Extension(Execution(n)): Extension<Execution>) -> Body {
    let start = stream::once(async move { Ok(format!("the start of execution {n}\n").into()) });
    let failure = stream::once(async {
        // The first chunk must be sent before the failure, or the client receives no response at all.
        sleep(Duration::from_millis(50)).await;
        Err::<Bytes, _>(io::Error::other("the requested failure"))
    });
    Body::from_stream(start.chain(failure))
}

async fn executions(State(effects): State<Arc<Effects>>) -> Json<Executions> {
    Json(effects.executions())
}

fn numbered(n: u64) -> Json<Value> {
    Json(json!({ "execution": n }))
}

/// Creates a body of unknown length: `piece(1)` to `piece(count)`, with a delay of `ms` before each.
fn one_per(ms: u64, count: u64, piece: impl Fn(u64) -> String + Send + 'static) -> Body {
    Body::from_stream(stream::iter(1..=count).then(move |i| {
        let piece = piece(i);
        async move {
            sleep(Duration::from_millis(ms)).await;
            Ok::<_, io::Error>(piece)
        }
    }))
}

const MOST_BYTES: usize = 64 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use axum::http::Method;
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    use tower_idempotency::MemoryStore;

    use super::*;

    fn playground() -> Router {
        app(IdempotencyLayer::new(MemoryStore::new()), Arc::default())
    }

    async fn send(app: &Router, method: Method, path: &str, key: Option<&str>) -> Response {
        let mut req = Request::builder().method(method).uri(path);
        if let Some(key) = key {
            req = req.header("idempotency-key", key);
        }
        let req = req.header(header::CONTENT_TYPE, "text/plain");
        app.clone()
            .oneshot(req.body(Body::from("tea")).unwrap())
            .await
            .unwrap()
    }

    async fn text(res: Response) -> String {
        let body = res.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn routes_accept_any_method_and_count_executions() {
        let app = playground();
        for (path, status, body) in [
            ("/orders", 201, r#"{"execution":N,"received":3}"#),
            ("/slow/60000", 201, r#"{"execution":N,"received":3}"#),
            ("/status/418", 418, r#"{"execution":N}"#),
            ("/status/599", 599, r#"{"execution":N}"#),
            ("/status/204", 204, ""),
            ("/status/205", 205, ""),
            ("/status/304", 304, ""),
            ("/no-store", 200, r#"{"execution":N}"#),
            ("/persist/9", 200, r#"{"execution":N}"#),
            ("/attention", 502, r#"{"execution":N}"#),
            ("/bytes/0", 200, ""),
            (
                "/stream/2/1000",
                200,
                "chunk 1 of execution N\nchunk 2 of execution N\n",
            ),
            ("/events/1/1000", 200, "data: chunk 1 of execution N\n\n"),
            ("/headers", 200, r#"{"execution":N}"#),
            ("/echo", 200, "tea"),
        ] {
            for method in [
                Method::GET,
                Method::POST,
                Method::from_bytes(b"BREW").unwrap(),
            ] {
                let res = send(&app, method, path, None).await;
                let n = res.headers()["x-execution"].to_str().unwrap().to_owned();
                assert_eq!(res.status(), status, "{path}");
                assert_eq!(text(res).await, body.replace('N', &n), "{path}");
            }
        }
        let total = r#"{"total":45,"#;
        for _ in 0..2 {
            let executions = send(&app, Method::GET, "/executions", None).await;
            assert!(
                text(executions).await.starts_with(total),
                "the query was counted"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn retry_executes_only_unrecorded_responses() {
        let app = playground();
        for (path, recorded) in [
            ("/orders", true),
            ("/slow/20", true),
            ("/status/404", true),
            ("/status/500", false),
            ("/no-store", false),
            ("/persist/9", true),
            ("/bytes/100", true),
            ("/stream/2/1", true),
            ("/headers", true),
            ("/echo", true),
            ("/truncated", false),
        ] {
            let first = send(&app, Method::POST, path, Some(path)).await;
            let retry = send(&app, Method::POST, path, Some(path)).await;
            let same = first.headers()["x-execution"] == retry.headers()["x-execution"];
            assert_eq!(same, recorded, "{path}");
            assert_eq!(
                retry.headers().contains_key("idempotent-replayed"),
                recorded,
                "{path}"
            );
            assert!(
                !first
                    .headers()
                    .keys()
                    .any(|name| name.as_str().starts_with("x-idempo-"))
            );
        }
    }

    #[tokio::test]
    async fn needs_attention_is_refused_on_retry() {
        let app = playground();
        let first = send(&app, Method::POST, "/attention", Some("a")).await;
        assert_eq!(first.status(), StatusCode::BAD_GATEWAY);
        for _ in 0..2 {
            let retry = send(&app, Method::POST, "/attention", Some("a")).await;
            assert_eq!(retry.status(), StatusCode::CONFLICT);
            let problem: Value = serde_json::from_str(&text(retry).await).unwrap();
            assert_eq!(problem["code"], "outcome-unknown");
            assert_eq!(problem["reason"], "half-done");
        }
        let executions = text(send(&app, Method::GET, "/executions", None).await).await;
        assert_eq!(executions, r#"{"total":1,"paths":{"/attention":1}}"#);
    }

    #[tokio::test]
    async fn repeated_and_non_ascii_headers_are_replayed() {
        let res = send(&playground(), Method::GET, "/headers", None).await;
        assert_eq!(res.headers().get_all(header::SET_COOKIE).iter().count(), 2);
        assert_eq!(res.headers().get_all(header::LINK).iter().count(), 2);
        assert_eq!(res.headers()[header::CONNECTION], "x-hop");
        assert_eq!(res.headers()["x-latin1"].as_bytes(), b"caf\xe9");
    }

    #[tokio::test]
    async fn bytes_have_requested_length_and_differ() {
        let app = playground();
        let mut seen = Vec::new();
        for _ in 0..2 {
            let res = send(&app, Method::GET, "/bytes/1001", None).await;
            assert_eq!(res.headers()[header::CONTENT_LENGTH], "1001");
            let body = res.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body.len(), 1001);
            seen.push(body);
        }
        assert_ne!(seen[0], seen[1]);
        let too_many = send(&app, Method::GET, "/bytes/100000000000", None).await;
        assert_eq!(too_many.status(), StatusCode::BAD_REQUEST);
    }

    #[tokio::test(start_paused = true)]
    async fn truncated_body_fails_after_first_chunk() {
        let res = send(&playground(), Method::GET, "/truncated", None).await;
        let mut body = res.into_body().into_data_stream();
        assert_eq!(
            body.next().await.unwrap().unwrap(),
            "the start of execution 1\n"
        );
        assert!(body.next().await.unwrap().is_err());
    }

    #[tokio::test]
    async fn panic_reaches_caller_and_releases_key() {
        let app = playground();
        for _ in 0..2 {
            let app = app.clone();
            let task = async move { send(&app, Method::POST, "/panic", Some("p")).await };
            assert!(tokio::spawn(task).await.unwrap_err().is_panic());
        }
        let executions = text(send(&app, Method::GET, "/executions", None).await).await;
        assert_eq!(executions, r#"{"total":2,"paths":{"/panic":2}}"#);
    }
}
