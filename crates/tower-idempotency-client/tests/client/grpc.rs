//! Responses of gRPC servers: the status of a call is in the headers or in the trailers.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, channel::Channel, combinators::BoxBody};
use tokio::time::Instant;
use tower::{Layer, ServiceBuilder, ServiceExt, util::BoxCloneService};
use tower_idempotency_client::{
    Budget, Operation, Outbox, OutboxLayer, Outcome, ResponseBody, RetryLayer,
};

use crate::{harness::post, outbox_memory::Memory};

type Body = BoxBody<Bytes, Infallible>;
type Client = BoxCloneService<Request<Full<Bytes>>, Response<Body>, Infallible>;

/// Headers or trailers.
type Lines = Vec<(&'static str, String)>;

/// Response of a gRPC server.
#[derive(Clone)]
pub(crate) enum Reply {
    /// Headers alone.
    Headers(Lines),
    /// Headers, a message, and trailers if there are any.
    Message(Lines, Option<Lines>),
}

pub(crate) fn status(code: u8) -> Lines {
    vec![("grpc-status", code.to_string())]
}

fn headers(lines: &Lines) -> HeaderMap {
    let lines = lines.iter().map(|(name, value)| {
        let value = HeaderValue::from_str(value).unwrap();
        (name.parse().unwrap(), value)
    });
    HeaderMap::from_iter(lines)
}

/// Returns a server that replies from a script, and the number of requests that it got. The last reply repeats.
pub(crate) fn server(script: impl IntoIterator<Item = Reply>) -> (Client, Arc<Mutex<u32>>) {
    let script: VecDeque<_> = script.into_iter().collect();
    let script = Arc::new(Mutex::new(script));
    let requests = Arc::new(Mutex::new(0));
    let count = requests.clone();
    let service = tower::service_fn(move |_: Request<Full<Bytes>>| {
        *count.lock().unwrap() += 1;
        let mut script = script.lock().unwrap();
        let reply = match script.len() {
            1 => script[0].clone(),
            _ => script.pop_front().unwrap(),
        };
        std::future::ready(Ok(respond(reply)))
    });
    (BoxCloneService::new(service), requests)
}

fn respond(reply: Reply) -> Response<Body> {
    let (lines, body) = match reply {
        Reply::Headers(lines) => (lines, Full::default().boxed()),
        Reply::Message(lines, trailers) => {
            let message = Full::new(Bytes::from_static(MESSAGE));
            let trailers = trailers.map(|trailers| Ok(headers(&trailers)));
            let trailers = std::future::ready(trailers);
            (lines, message.with_trailers(trailers).boxed())
        }
    };
    let mut res = Response::new(body);
    *res.headers_mut() = headers(&lines);
    let media_type = HeaderValue::from_static("application/grpc+proto");
    res.headers_mut().insert("content-type", media_type);
    res
}

fn call(operation: &Operation) -> Request<Full<Bytes>> {
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    req
}

async fn send(layer: &RetryLayer, server: Client) -> (Operation, Response<ResponseBody<Body>>) {
    let operation = Operation::new();
    let res = layer.layer(server).oneshot(call(&operation)).await;
    (operation, res.unwrap())
}

/// Returns the lines of an error of the layer: a code, a reason, and a pushback.
fn problem(code: u8, reason: &str, pushback: Option<i32>) -> Lines {
    let field = |tag: u8, bytes: &[u8]| {
        let length = u8::try_from(bytes.len()).unwrap();
        [&[tag, length], bytes].concat()
    };
    let reason = field(0x0a, format!("IDEMPOTENCY_{reason}").as_bytes());
    let info = [reason, field(0x12, b"tower-idempotency")].concat();
    let url = field(0x0a, b"type.googleapis.com/google.rpc.ErrorInfo");
    let any = [url, field(0x12, &info)].concat();
    let details = [vec![0x08, code], field(0x12, b"m"), field(0x1a, &any)].concat();
    let details = tonic::metadata::MetadataValue::from_bytes(&details);
    let details = str::from_utf8(details.as_encoded_bytes()).unwrap();
    let mut lines = status(code);
    lines.push(("grpc-status-details-bin", details.to_owned()));
    if let Some(pushback) = pushback {
        lines.push(("grpc-retry-pushback-ms", pushback.to_string()));
    }
    lines
}

/// The tables of `docs/guide/grpc.md`, as a client sees them.
#[tokio::test(start_paused = true)]
async fn status_of_headers_decides() {
    use Outcome::{Definite, NotExecuted, Unknown};

    let pushback = |code, pushback: &str| {
        let line = ("grpc-retry-pushback-ms", pushback.to_owned());
        [status(code), vec![line]].concat()
    };
    let replayed = |lines| [lines, vec![("idempotent-replayed", "true".to_owned())]].concat();
    let mut rows = vec![
        (pushback(14, "-1"), 1, Unknown),
        (pushback(8, "soon"), 1, Unknown),
        (problem(9, "OUTCOME_UNKNOWN", Some(-1)), 1, Unknown),
        (problem(14, "OUTCOME_UNKNOWN", Some(1000)), 3, Unknown),
        (problem(9, "RESPONSE_NOT_RETAINED", Some(-1)), 1, Definite),
        (problem(3, "KEY_REUSED", Some(-1)), 1, NotExecuted),
        (problem(3, "MISSING_KEY", Some(-1)), 1, NotExecuted),
        (problem(3, "NOT_UNARY", Some(-1)), 1, NotExecuted),
        (problem(14, "DRAINING", Some(1000)), 3, NotExecuted),
        (problem(14, "STORE_UNAVAILABLE", Some(1000)), 3, NotExecuted),
        (problem(14, "STORE_UNAVAILABLE", None), 1, Unknown),
        (problem(14, "BODY_TIMEOUT", None), 3, NotExecuted),
        (problem(8, "OVERLOADED", Some(1000)), 3, NotExecuted),
        (problem(8, "BODY_TOO_LARGE", Some(-1)), 1, NotExecuted),
        (problem(13, "PRINCIPAL_MISSING", Some(-1)), 1, NotExecuted),
        (problem(13, "UNFINISHED_TRANSACTION", Some(-1)), 1, Unknown),
        (replayed(vec![]), 1, Definite),
        (replayed(status(5)), 1, Definite),
        // PERMISSION_DENIED is recorded, and an authentication in front of the server may send it too.
        (status(7), 1, Unknown),
        (replayed(status(7)), 1, Definite),
        (status(16), 1, NotExecuted),
        // A server that records failures.
        (replayed(status(13)), 1, Unknown),
        (
            replayed(problem(9, "OUTCOME_UNKNOWN", Some(-1))),
            1,
            Unknown,
        ),
    ];
    rows.extend([0, 3, 5, 6, 9, 11].map(|code| (status(code), 1, Definite)));
    rows.extend([1, 2, 4, 8, 10, 12, 13, 14, 15, 99].map(|code| (status(code), 3, Unknown)));
    for (lines, attempts, outcome) in rows {
        let (server, requests) = server([Reply::Headers(lines.clone())]);
        let (operation, _) = send(&RetryLayer::new(), server).await;
        assert_eq!(operation.outcome(), outcome, "{lines:?}");
        assert_eq!(*requests.lock().unwrap(), attempts, "{lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn pushback_delays_retry() {
    let busy = problem(14, "IN_PROGRESS", Some(7000));
    let done = Reply::Message(vec![], Some(status(0)));
    let (server, requests) = server([Reply::Headers(busy), done]);
    let layer = RetryLayer::new().with_backoff(Duration::ZERO, Duration::ZERO);
    let before = Instant::now();
    let (operation, res) = send(&layer, server).await;
    assert_eq!(before.elapsed(), Duration::from_secs(7));
    assert_eq!(*requests.lock().unwrap(), 2);
    res.into_body().collect().await.unwrap();
    assert_eq!(operation.outcome(), Outcome::Definite);
}

/// The caller reads the status with the message.
#[tokio::test(start_paused = true)]
async fn outcome_follows_status_of_trailers() {
    for (trailers, outcome) in [
        (Some(status(0)), Outcome::Definite),
        (Some(status(5)), Outcome::Definite),
        (Some(status(14)), Outcome::Unknown),
        (Some(status(7)), Outcome::Unknown),
        (Some(status(16)), Outcome::NotExecuted),
        (Some(vec![("x-sum", "7".to_owned())]), Outcome::Unknown),
        (None, Outcome::Unknown),
    ] {
        let reply = Reply::Message(vec![], trailers.clone());
        let (server, requests) = server([reply]);
        let (operation, res) = send(&RetryLayer::new(), server).await;
        assert_eq!(operation.outcome(), Outcome::Unknown);
        assert!(res.extensions().get::<Operation>().is_some());
        let body = res.into_body().collect().await.unwrap();
        assert_eq!(body.trailers(), trailers.as_ref().map(headers).as_ref());
        assert_eq!(body.to_bytes(), MESSAGE);
        assert_eq!(operation.outcome(), outcome, "{trailers:?}");
        assert_eq!(*requests.lock().unwrap(), 1);
    }
}

/// A layer that drops the extensions separates two series. The trailers show the status of the last inner attempt only.
#[tokio::test(start_paused = true)]
async fn rejection_in_trailers_of_inner_series_is_unknown() {
    let rejected = Reply::Message(vec![], Some(status(16)));
    for (script, outcome) in [
        (
            vec![Reply::Headers(status(14)), rejected.clone()],
            Outcome::Unknown,
        ),
        (vec![rejected], Outcome::NotExecuted),
    ] {
        let (server, _) = server(script);
        let client = ServiceBuilder::new()
            .layer(RetryLayer::new().with_max_attempts(1))
            .map_request(|mut req: Request<Full<Bytes>>| {
                req.extensions_mut().clear();
                req
            })
            .layer(RetryLayer::new())
            .service(server);
        let operation = Operation::new();
        let res = client.oneshot(call(&operation)).await.unwrap();
        res.into_body().collect().await.unwrap();
        assert_eq!(operation.outcome(), outcome);
    }
}

/// The layer reads the trailers before it removes the entry.
#[tokio::test(start_paused = true)]
async fn entry_of_failed_grpc_call_stays() {
    for (reply, left) in [
        (Reply::Message(vec![], Some(status(0))), 0),
        (Reply::Message(vec![], Some(status(9))), 0),
        (Reply::Message(vec![], Some(status(14))), 1),
        (Reply::Message(vec![], Some(status(7))), 1),
        (Reply::Message(vec![], Some(status(16))), 0),
        (Reply::Message(vec![], None), 1),
        (Reply::Headers(status(0)), 0),
        (Reply::Headers(status(14)), 1),
    ] {
        let outbox = Arc::new(Memory::default());
        let (server, _) = server([reply.clone()]);
        let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
        let operation = Operation::new();
        let res = client.oneshot(call(&operation)).await.unwrap();
        assert_eq!(outbox.keys().len(), left);
        let is_known = operation.outcome() != Outcome::Unknown;
        assert_eq!(is_known, left == 0, "{:?}", operation.outcome());
        let is_definite = operation.outcome() == Outcome::Definite;
        assert_eq!(res.extensions().get::<Operation>().is_none(), is_definite);
        let body = res.into_body().collect().await.unwrap();
        if let Reply::Message(_, trailers) = reply {
            assert_eq!(body.trailers(), trailers.as_ref().map(headers).as_ref());
            assert_eq!(body.to_bytes(), MESSAGE);
        }
    }
}

/// A stream of messages does not delay the call beyond its deadline.
#[tokio::test(start_paused = true)]
async fn endless_grpc_response_keeps_entry() {
    let server = tower::service_fn(|_: Request<Full<Bytes>>| {
        let (mut sender, body) = Channel::<Bytes, Infallible>::new(4);
        let message = Frame::data(Bytes::from_static(MESSAGE));
        sender.try_send(message).unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(100)).await;
            let _ = sender.send_trailers(headers(&status(0))).await;
        });
        let res = Response::builder().header("content-type", "application/grpc");
        std::future::ready(Ok::<_, Infallible>(res.body(body).unwrap()))
    });
    let outbox = Arc::new(Memory::default());
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
    let operation = Operation::new();
    let before = Instant::now();
    let res = client.oneshot(call(&operation)).await.unwrap();
    assert_eq!(before.elapsed(), Duration::from_secs(30));
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(outbox.keys(), [operation.key()]);
    // The application removes the entry when it has read the status.
    let body = res.into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), MESSAGE);
    assert_eq!(operation.outcome(), Outcome::Definite);
    outbox.remove(operation.key()).await.unwrap();
}

/// Without the tokens of the trailers, an outage would end all later retries.
#[tokio::test(start_paused = true)]
async fn status_of_trailers_returns_tokens() {
    let layer = RetryLayer::new().with_budget(Budget::new(14));
    for _ in 0..5 {
        let failed = Reply::Headers(status(14));
        let done = Reply::Message(vec![], Some(status(0)));
        let (server, requests) = server([failed, done]);
        let (_, res) = send(&layer, server).await;
        res.into_body().collect().await.unwrap();
        assert_eq!(*requests.lock().unwrap(), 2);
    }
}

const MESSAGE: &[u8] = b"\0\0\0\0\x02\x08\x07";
