//! Bodies of requests and responses.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, channel::Channel};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency_client::{
    IdempotencyKeyLayer, Operation, Outcome, Protocol, ResponseBody, RetryLayer,
};

use crate::harness::{Reply, Server, post, reply, send, status, text};

type Frames = Vec<Result<Frame<Bytes>, io::Error>>;

/// Stream of frames. It cannot be sent twice.
struct Stream {
    frames: std::vec::IntoIter<Result<Frame<Bytes>, io::Error>>,
    /// Length that the head announces.
    announced: u64,
    /// `true` if the head is the end, such as that of the response to HEAD.
    is_empty: bool,
}

impl Stream {
    fn new(frames: Frames) -> Self {
        Self {
            frames: frames.into_iter(),
            announced: 0,
            is_empty: false,
        }
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(self.frames.next())
    }

    fn is_end_stream(&self) -> bool {
        self.is_empty
    }

    /// Some clients do not subtract the bytes that the caller has read.
    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::default();
        hint.set_lower(self.announced);
        hint
    }
}

fn data(text: &'static str) -> Result<Frame<Bytes>, io::Error> {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

#[tokio::test(start_paused = true)]
async fn stream_is_sent_once_and_its_failure_is_unknown() {
    for failure in [Reply::Broken, status(500)] {
        let server = Server::new([failure, status(200)]);
        let operation = Operation::new();
        let req = Request::post("/orders")
            .extension(operation.clone())
            .body(Stream::new(vec![data("one "), data("espresso")]))
            .unwrap();
        let _ = RetryLayer::new().layer(server.clone()).oneshot(req).await;
        let log = server.take_log();
        assert_eq!(log.len(), 1);
        assert_eq!(log[0].body, "one espresso");
        assert_eq!(operation.outcome(), Outcome::Unknown);
    }
}

#[tokio::test(start_paused = true)]
async fn function_of_caller_copies_body() {
    let server = Server::new([Reply::Broken, status(200)]);
    let layer = RetryLayer::new().with_body_clone(|body: &Stream| {
        let _ = body;
        Some(Stream::new(vec![data("again")]))
    });
    let req = Request::post("/orders")
        .body(Stream::new(vec![data("first")]))
        .unwrap();
    layer.layer(server.clone()).oneshot(req).await.unwrap();
    let bodies: Vec<_> = server
        .take_log()
        .into_iter()
        .map(|sent| sent.body)
        .collect();
    assert_eq!(bodies, ["first", "again"]);
}

/// A function that opens a file again fails if the process has no free descriptor.
#[tokio::test(start_paused = true)]
async fn last_copy_of_body_is_sent() {
    for last in [201, 503] {
        let server = Server::new([status(429), status(last)]);
        let copies = AtomicU32::new(0);
        let layer = RetryLayer::new().with_body_clone(move |body: &Stream| {
            let _ = body;
            let is_first = copies.fetch_add(1, Ordering::Relaxed) == 0;
            is_first.then(|| Stream::new(vec![data("again")]))
        });
        let operation = Operation::new();
        let req = Request::post("/orders")
            .extension(operation.clone())
            .body(Stream::new(vec![data("first")]))
            .unwrap();
        let res = layer.layer(server.clone()).oneshot(req).await.unwrap();
        assert_eq!(res.status(), last);
        let log = server.take_log().into_iter();
        let bodies: Vec<_> = log.map(|sent| sent.body).collect();
        assert_eq!(bodies, ["first", "again"]);
        assert_eq!(operation.attempts(), 2);
    }
}

/// Sends one operation to a server whose responses have these bodies.
async fn respond(
    layer: RetryLayer,
    status: u16,
    media_type: &'static str,
    frames: impl Fn() -> Frames + Clone + Send + 'static,
) -> (Operation, Response<ResponseBody<Stream>>) {
    respond_with(layer, status, media_type, move || Stream::new(frames())).await
}

async fn respond_with<B>(
    layer: RetryLayer,
    status: u16,
    media_type: &'static str,
    body: impl Fn() -> B + Clone + Send + 'static,
) -> (Operation, Response<ResponseBody<B>>)
where
    B: Body<Data = Bytes, Error: Send> + Send + 'static,
{
    let server = service_fn(move |_: Request<Full<Bytes>>| {
        let mut res = Response::new(body());
        *res.status_mut() = StatusCode::from_u16(status).unwrap();
        res.headers_mut()
            .insert("content-type", media_type.parse().unwrap());
        std::future::ready(Ok::<_, Infallible>(res))
    });
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let res = layer.layer(server).oneshot(req).await.unwrap();
    (operation, res)
}

fn broken() -> Result<Frame<Bytes>, io::Error> {
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// The effect has happened, and the same request under the same key gets the response.
#[tokio::test(start_paused = true)]
async fn broken_body_of_response_is_response_lost() {
    let frames = || vec![data("{\"id\""), broken()];
    let (operation, res) = respond(RetryLayer::new(), 201, "application/json", frames).await;
    assert_eq!(operation.outcome(), Outcome::Definite);
    assert!(res.into_body().collect().await.is_err());
    assert_eq!(operation.outcome(), Outcome::ResponseLost);
    assert!(!operation.outcome().can_delete_key());

    let server = Server::new([reply(201, &[("idempotent-replayed", "true")], "{\"id\":7}")]);
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let res = RetryLayer::new().layer(server).oneshot(req).await.unwrap();
    assert_eq!(text(res).await, "{\"id\":7}");
    assert_eq!(operation.outcome(), Outcome::Definite);
}

/// hyper reports an HTTP/2 stream that the server has reset with `NO_ERROR` as complete.
#[tokio::test(start_paused = true)]
async fn body_shorter_than_announced_is_lost() {
    for (announced, is_empty, outcome) in [
        (3, false, Outcome::Definite),
        (4, false, Outcome::Definite),
        (5, false, Outcome::ResponseLost),
        (5, true, Outcome::Definite),
    ] {
        let body = move || Stream {
            announced,
            is_empty,
            ..Stream::new(vec![data("{\"id")])
        };
        let (operation, res) = respond_with(RetryLayer::new(), 201, "text/plain", body).await;
        assert_eq!(operation.outcome(), Outcome::Definite);
        assert_eq!(text(res).await, "{\"id");
        assert_eq!(operation.outcome(), outcome, "{announced} {is_empty}");
    }
    // The code is in the part that is missing.
    for (announced, outcome) in [(0, Outcome::Definite), (40, Outcome::Unknown)] {
        let body = move || Stream {
            announced,
            ..Stream::new(vec![])
        };
        let problem = "application/problem+json";
        let (operation, _) = respond_with(RetryLayer::new(), 409, problem, body).await;
        assert_eq!(operation.outcome(), outcome, "{announced}");
    }
}

/// A failure leaves the outcome unknown, also if its body breaks.
#[tokio::test(start_paused = true)]
async fn broken_body_of_failure_stays_unknown() {
    let frames = || vec![data("{\"code\""), broken()];
    let (operation, res) = respond(RetryLayer::new(), 500, "application/json", frames).await;
    assert_eq!(operation.attempts(), 3);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    let mut body = res.into_body();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "{\"code\""
    );
    assert!(body.frame().await.unwrap().is_err());
    assert_eq!(operation.outcome(), Outcome::Unknown);
}

/// The code of a 409 may mean that the server executes the first request. If it cannot be read, nothing is definite.
#[tokio::test(start_paused = true)]
async fn unreadable_code_leaves_outcome_unknown() {
    let problem = "application/problem+json";
    for media_type in [problem, "application/json"] {
        for status in [400, 409, 422, 429] {
            let frames = || vec![data("{\"code\""), broken()];
            let (operation, res) = respond(RetryLayer::new(), status, media_type, frames).await;
            assert_eq!(operation.attempts(), 3, "{status}");
            assert_eq!(operation.outcome(), Outcome::Unknown, "{status}");
            assert!(res.extensions().get::<Operation>().is_some());
        }
    }
    for protocol in [Protocol::Ietf, Protocol::Stripe, Protocol::Acp] {
        let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
        let frames = || vec![broken()];
        let layer = RetryLayer::new().with_keys(keys);
        let (operation, _) = respond(layer, 409, problem, frames).await;
        assert_eq!(operation.outcome(), Outcome::Unknown, "{protocol:?}");
    }
    // A body that no client decoded.
    for (encoding, outcome) in [("gzip", Outcome::Unknown), ("identity", Outcome::Definite)] {
        let headers = [("content-type", problem), ("content-encoding", encoding)];
        let server = Server::new([reply(409, &headers, "\u{1f}\u{8b}")]);
        let call = send(&RetryLayer::new(), &server).await;
        assert_eq!(call.outcome(), outcome, "{encoding}");
    }
    // A replay may be a recorded `outcome-unknown`.
    for (encoding, outcome) in [("gzip", Outcome::Unknown), ("identity", Outcome::Definite)] {
        let headers = [
            ("content-type", problem),
            ("content-encoding", encoding),
            ("idempotent-replayed", "true"),
        ];
        let server = Server::new([reply(409, &headers, "\u{1f}\u{8b}")]);
        let call = send(&RetryLayer::new(), &server).await;
        assert_eq!(call.outcome(), outcome, "replay, {encoding}");
        assert_eq!(server.take_log().len(), 1);
    }
    // A body without a length ends with its connection.
    let whole = r#"{"code":"response-not-retained"}"#;
    for length in 1..=whole.len() {
        let frames = move || vec![data(&whole[..length])];
        let (operation, _) = respond(RetryLayer::new(), 409, problem, frames).await;
        let is_whole = length == whole.len();
        let is_definite = operation.outcome() == Outcome::Definite;
        assert_eq!(is_definite, is_whole, "cut at {length}");
    }
    // The head of a conflict of the application is definite.
    let frames = || vec![data("taken"), broken()];
    let (operation, _) = respond(RetryLayer::new(), 409, "text/plain", frames).await;
    assert_eq!(operation.outcome(), Outcome::Definite);
}

#[tokio::test(start_paused = true)]
async fn searched_body_reaches_caller_whole() {
    let trailers = || {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", "7".parse().unwrap());
        Ok(Frame::trailers(trailers))
    };
    let problem = "application/problem+json";
    let frames = move || vec![data("{\"code\":"), data("\"key-reused\"}"), trailers()];
    let (operation, res) = respond(RetryLayer::new(), 422, problem, frames).await;
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    let body = res.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["x-sum"], "7");
    assert_eq!(body.to_bytes(), "{\"code\":\"key-reused\"}");

    // A code behind the first 64 KiB is not found.
    let large: &'static str = format!("{{\"x\":\"{}\"", "x".repeat(70_000)).leak();
    let frames = move || vec![data(large), data(",\"code\":\"in-progress\"}")];
    let (operation, res) = respond(RetryLayer::new(), 409, problem, frames).await;
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(text(res).await.len(), large.len() + 22);
}

/// Body whose frames are always ready, and have no data. It counts those that were read.
struct Flood {
    left: u32,
    read: Arc<AtomicU32>,
}

impl Body for Flood {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(left) = self.left.checked_sub(1) else {
            return Poll::Ready(None);
        };
        self.left = left;
        self.read.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(Bytes::new()))))
    }
}

/// Each frame takes memory, and a body without bytes reaches no other limit.
#[tokio::test(start_paused = true)]
async fn few_frames_are_read_ahead() {
    let read = Arc::new(AtomicU32::new(0));
    let body = {
        let read = read.clone();
        move || Flood {
            left: 100_000,
            read: read.clone(),
        }
    };
    let layer = RetryLayer::new().with_max_attempts(1);
    let (operation, res) = respond_with(layer, 409, "application/json", body).await;
    assert_eq!(read.load(Ordering::Relaxed), 16 * 1024);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(text(res).await, "");
    assert_eq!(read.load(Ordering::Relaxed), 100_000);
}

/// An error body that never ends does not delay the call beyond its deadline.
#[tokio::test(start_paused = true)]
async fn late_error_body_is_not_awaited() {
    let server = service_fn(|_: Request<Full<Bytes>>| {
        let (mut sender, body) = Channel::<Bytes, Infallible>::new(4);
        sender.try_send(Frame::data(Bytes::from("{"))).unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(100)).await;
            let _ = sender.send_data(Bytes::from("}")).await;
        });
        let mut res = Response::new(body);
        *res.status_mut() = StatusCode::CONFLICT;
        res.headers_mut()
            .insert("content-type", "application/json".parse().unwrap());
        std::future::ready(Ok::<_, Infallible>(res))
    });
    let before = Instant::now();
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let res = RetryLayer::new().layer(server).oneshot(req).await.unwrap();
    assert_eq!(before.elapsed(), Duration::from_secs(30));
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(text(res).await, "{}");
}

#[tokio::test(start_paused = true)]
async fn last_response_has_its_body() {
    let body = r#"{"type":"urn:tower-idempotency:problem:overloaded","code":"overloaded"}"#;
    let headers = [("content-type", "application/problem+json")];
    let call = send(
        &RetryLayer::new(),
        &Server::new([reply(503, &headers, body)]),
    )
    .await;
    assert_eq!(call.operation.attempts(), 3);
    assert_eq!(text(call.result.unwrap()).await, body);
}
