//! A scripted server, its log, and the events of a test.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, Mutex, Once},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_idempotency_client::{Error, Operation, Outcome, ResponseBody, RetryLayer};
use tracing_subscriber::{Registry, layer::SubscriberExt};

/// Reply of the scripted server to one attempt.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Response(StatusCode, Vec<(&'static str, String)>, Bytes),
    /// The connection is refused.
    Refused,
    /// The connection breaks after the request was sent.
    Broken,
}

/// Returns a reply without headers and body.
pub(crate) fn status(status: u16) -> Reply {
    reply(status, &[], "")
}

pub(crate) fn reply(status: u16, headers: &[(&'static str, &str)], body: &str) -> Reply {
    let headers = headers
        .iter()
        .map(|&(name, value)| (name, value.to_owned()));
    Reply::Response(
        StatusCode::from_u16(status).unwrap(),
        headers.collect(),
        Bytes::copy_from_slice(body.as_bytes()),
    )
}

/// Attempt as the server saw it.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) at: Instant,
}

impl Sent {
    pub(crate) fn key(&self) -> Option<&str> {
        Some(self.headers.get("idempotency-key")?.to_str().unwrap())
    }
}

/// Server that replies from a script. The last reply repeats.
#[derive(Clone)]
pub(crate) struct Server {
    script: Arc<Mutex<VecDeque<Reply>>>,
    log: Arc<Mutex<Vec<Sent>>>,
}

impl Server {
    pub(crate) fn new(script: impl IntoIterator<Item = Reply>) -> Self {
        Self {
            script: Arc::new(Mutex::new(script.into_iter().collect())),
            log: Arc::default(),
        }
    }

    /// Returns the attempts so far.
    pub(crate) fn take_log(&self) -> Vec<Sent> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<B> Service<Request<B>> for Server
where
    B: Body<Data = Bytes, Error: std::fmt::Debug> + Send + 'static,
{
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Response<Full<Bytes>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let server = self.clone();
        Box::pin(async move {
            let (head, body) = req.into_parts();
            let sent = Sent {
                uri: head.uri,
                headers: head.headers,
                body: body.collect().await.unwrap().to_bytes(),
                at: Instant::now(),
            };
            server.log.lock().unwrap().push(sent);
            let mut script = server.script.lock().unwrap();
            let reply = match script.len() {
                1 => script[0].clone(),
                _ => script.pop_front().expect("the script has a reply"),
            };
            match reply {
                Reply::Response(status, headers, body) => {
                    let mut res = Response::builder().status(status);
                    for (name, value) in headers {
                        res = res.header(name, value);
                    }
                    Ok(res.body(Full::new(body)).unwrap())
                }
                Reply::Refused => Err(io::ErrorKind::ConnectionRefused.into()),
                Reply::Broken => Err(io::ErrorKind::ConnectionReset.into()),
            }
        })
    }
}

pub(crate) fn post(body: &str) -> Request<Full<Bytes>> {
    Request::post("http://api.example.com/orders?x=1")
        .header("content-type", "text/plain")
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .unwrap()
}

/// Result of one call: the operation, and the response or the error.
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) result: Result<Response<ResponseBody<Full<Bytes>>>, Error>,
}

impl Call {
    pub(crate) fn outcome(&self) -> Outcome {
        self.operation.outcome()
    }

    pub(crate) fn status(&self) -> Option<u16> {
        Some(self.result.as_ref().ok()?.status().as_u16())
    }
}

/// Sends a POST with a new operation.
pub(crate) async fn send(layer: &RetryLayer, server: &Server) -> Call {
    send_as(Operation::new(), layer, server).await
}

pub(crate) async fn send_as(operation: Operation, layer: &RetryLayer, server: &Server) -> Call {
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let result = layer.layer(server.clone()).oneshot(req).await;
    Call { operation, result }
}

pub(crate) async fn text<B>(res: Response<B>) -> String
where
    B: Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let bytes = res.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Event of the client, with its fields as text.
pub(crate) type Event = Vec<(String, String)>;

thread_local! {
    static EVENTS: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
    static RECORDED: RefCell<Vec<(String, String)>> = const { RefCell::new(Vec::new()) };
}

/// Begins to record the events of this thread. A test that uses it runs on one thread.
pub(crate) fn record_events() {
    static GLOBAL: Once = Once::new();
    GLOBAL.call_once(|| {
        let subscriber = Registry::default().with(Recorder);
        tracing::subscriber::set_global_default(subscriber).unwrap();
    });
    take_events();
}

pub(crate) fn take_events() -> Vec<Event> {
    RECORDED.take();
    EVENTS.take()
}

/// Returns the fields that spans of this thread recorded after their creation.
pub(crate) fn take_recorded() -> Vec<(String, String)> {
    RECORDED.take()
}

struct Recorder;

struct Fields(Event);

impl tracing::field::Visit for Fields {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.push((field.name().to_owned(), format!("{value:?}")));
    }

    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        self.0.push((field.name().to_owned(), value.to_owned()));
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Recorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if event
            .metadata()
            .target()
            .starts_with("tower_idempotency_client")
        {
            let mut fields = Fields(Vec::new());
            event.record(&mut fields);
            EVENTS.with_borrow_mut(|events| events.push(fields.0));
        }
    }

    fn on_record(
        &self,
        _: &tracing::span::Id,
        values: &tracing::span::Record<'_>,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        let mut fields = Fields(Vec::new());
        values.record(&mut fields);
        RECORDED.with_borrow_mut(|recorded| recorded.extend(fields.0));
    }
}

/// Returns this field of each event that has it.
pub(crate) fn field(events: &[Event], name: &str) -> Vec<String> {
    let fields = events.iter().flatten().filter(|(field, _)| field == name);
    fields.map(|(_, value)| value.clone()).collect()
}
