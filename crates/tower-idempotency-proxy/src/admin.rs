//! The admin port: health, readiness, metrics and policy.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpListener, time::sleep};

use crate::proxy::Shared;

const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves the admin port until the task is aborted.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection to the admin port not accepted");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(move |req| {
                let res = respond(&shared, &req);
                async move { Ok::<_, Infallible>(res) }
            });
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT);
            // The client closed the connection.
            let _ = builder
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn respond(shared: &Shared, req: &Request<Incoming>) -> Response<Full<Bytes>> {
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
            let pages = "/healthz /readyz /metrics /policy\n";
            response(StatusCode::NOT_FOUND, TEXT, pages.into())
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
