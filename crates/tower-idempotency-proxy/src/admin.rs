//! The admin port: health, readiness, metrics, policy, and a console of the program.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;
use tower_service::Service;

use crate::{body::BodyError, proxy::Shared, sockets, telemetry::WarningLimit};

const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest number of open connections. A further client waits until one of them is closed. Health checks need connections too,
/// so unresponsive clients must not use them all up.
const MAX_CONNECTIONS: usize = 5_000;
/// Time after which a connection accepts no further request.
const MAX_AGE: Duration = Duration::from_secs(600);
/// Longest time of the last response of a connection. An event stream takes five minutes.
const LAST_RESPONSE: Duration = Duration::from_secs(360);
/// Time that open requests have to end after the drain.
const GRACE: Duration = Duration::from_secs(5);
/// Path below which the console is.
const CONSOLE: &str = "/console";

type AdminResponse = Response<UnsyncBoxBody<Bytes, BodyError>>;
type AdminFuture = Pin<Box<dyn Future<Output = AdminResponse> + Send>>;

/// A console as a function of its requests.
pub(crate) type ConsoleService = Box<dyn Fn(Request<Incoming>) -> AdminFuture + Send + Sync>;

/// Converts a service into a function.
pub(crate) fn console<S, B>(service: S) -> ConsoleService
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BodyError>,
{
    Box::new(move |req| {
        let mut service = service.clone();
        Box::pin(async move {
            let ready = poll_fn(|cx| service.poll_ready(cx)).await;
            ready.unwrap_or_else(|never| match never {});
            let res = service.call(req).await;
            let res = res.unwrap_or_else(|never| match never {});
            res.map(|body| body.map_err(Into::<BodyError>::into).boxed_unsync())
        })
    })
}

/// Serves the admin port until the drain has ended. Open requests then have five seconds to end.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let connections = TaskTracker::new();
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let limit = WarningLimit::default();
    loop {
        let accepted = sockets::accept(&listener, &permits, &limit, |error, count| {
            tracing::warn!(%error, count, "connection to the admin port not accepted");
        });
        let (permit, stream, _) = tokio::select! {
            biased;
            () = shared.drained.cancelled() => break,
            accepted = accepted => accepted,
        };
        let connection = serve_connection(stream, Arc::clone(&shared));
        connections.spawn(async move {
            connection.await;
            drop(permit);
        });
    }
    drop(listener);
    connections.close();
    let _ = timeout(GRACE, connections.wait()).await;
}

async fn serve_connection(stream: TcpStream, shared: Arc<Shared>) {
    let drained = shared.drained.clone();
    let service = service_fn(move |req| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(respond(&shared, req).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        // The client closed the connection.
        _ = connection.as_mut() => return,
        () = drained.cancelled() => {}
        () = sleep(MAX_AGE) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(LAST_RESPONSE, connection).await;
}

async fn respond(shared: &Shared, req: Request<Incoming>) -> AdminResponse {
    if let Some(console) = &shared.console
        && is_of_console(req.uri().path())
    {
        return console(req).await;
    }
    let res = page(shared, &req);
    res.map(|body| body.map_err(|never| match never {}).boxed_unsync())
}

fn is_of_console(path: &str) -> bool {
    let below = path.strip_prefix(CONSOLE);
    below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
}

fn page(shared: &Shared, req: &Request<Incoming>) -> Response<Full<Bytes>> {
    const TEXT: &str = "text/plain; charset=utf-8";
    if req.method() != Method::GET && req.method() != Method::HEAD {
        return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET\n".into());
    }
    match req.uri().path() {
        "/healthz" => response(StatusCode::OK, TEXT, "alive\n".into()),
        "/readyz" if shared.is_draining.load(Ordering::Acquire) => {
            response(StatusCode::SERVICE_UNAVAILABLE, TEXT, "draining\n".into())
        }
        "/readyz" => response(StatusCode::OK, TEXT, "ready\n".into()),
        "/metrics" => {
            let format = "text/plain; version=0.0.4; charset=utf-8";
            response(StatusCode::OK, format, (shared.metrics)())
        }
        "/policy" => {
            let policy = shared.live.load().policy();
            response(StatusCode::OK, "application/json", policy.to_string())
        }
        _ => {
            let console = shared.console.as_ref().map_or("", |_| " /console/");
            let pages = format!("/healthz /readyz /metrics /policy{console}\n");
            response(StatusCode::NOT_FOUND, TEXT, pages)
        }
    }
}

fn response(status: StatusCode, media_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut res = Response::new(Full::new(Bytes::from(body)));
    *res.status_mut() = status;
    res.headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    res
}
