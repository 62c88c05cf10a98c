//! The routes: ordinary handlers that know nothing of keys, behind the layer.

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
use tower_idempotency::{IdempotencyKey, IdempotencyLayer};

use crate::effects::{Effects, Executions};

/// The whole playground: what `layer` protects, and two routes that only look.
pub(crate) fn app(layer: IdempotencyLayer, effects: Arc<Effects>) -> Router {
    let protected = Router::new()
        .route("/orders", any(orders))
        .route("/slow/{ms}", any(slow))
        .route("/status/{code}", any(status))
        .route("/no-store", any(no_store))
        .route("/persist/{seconds}", any(persist))
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

/// Stands inside the layer: what gets here is executed, and everything else was answered from a record or refused.
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
            "a status of 1xx announces an answer and is none\n",
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

async fn bytes(Path(n): Path<usize>) -> Response {
    if n > MOST_BYTES {
        let error = format!("expected at most {MOST_BYTES} bytes, found {n}\n");
        return (StatusCode::BAD_REQUEST, error).into_response();
    }
    // Keyed anew each time, its hashes are as good as random.
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
    panic!("as asked");
}

async fn truncated(Extension(Execution(n)): Extension<Execution>) -> Body {
    let start = stream::once(async move { Ok(format!("the start of execution {n}\n").into()) });
    let failure = stream::once(async {
        // What came before must have left, or the client sees no answer at all.
        sleep(Duration::from_millis(50)).await;
        Err::<Bytes, _>(io::Error::other("as asked"))
    });
    Body::from_stream(start.chain(failure))
}

async fn executions(State(effects): State<Arc<Effects>>) -> Json<Executions> {
    Json(effects.executions())
}

fn numbered(n: u64) -> Json<Value> {
    Json(json!({ "execution": n }))
}

/// A body of unknown length: `piece(1)` to `piece(count)`, a pause of `ms` before each.
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
