//! Layers that do less than any idempotency layer has to, for comparison.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use sha2::{Digest, Sha256};
use tower::Service;

type Running = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// Does nothing.
#[derive(Clone)]
pub struct Noop<S>(pub S);

impl<S: Service<R>, R> Service<R> for Noop<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, req: R) -> Self::Future {
        self.0.call(req)
    }
}

/// Buffers both bodies and does nothing else.
#[derive(Clone)]
pub struct Buffered<S>(pub S);

impl<S> Service<Request> for Buffered<S>
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Running;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, req: Request) -> Running {
        let clone = self.0.clone();
        let mut inner = std::mem::replace(&mut self.0, clone);
        Box::pin(async move {
            let (head, body) = req.into_parts();
            let body = collect(body).await;
            let res = inner
                .call(Request::from_parts(head, Body::from(body)))
                .await?;
            let (head, body) = res.into_parts();
            let body = collect(body).await;
            Ok(Response::from_parts(head, Body::from(body)))
        })
    }
}

/// The least that replays responses: buffers both bodies, digests key and request, and keeps the response in one map. It has
/// no leases, no limits and no expiry, and two concurrent requests with one key both execute.
#[derive(Clone)]
pub struct Floor<S> {
    pub inner: S,
    pub responses: Responses,
}

pub type Responses = Arc<Mutex<HashMap<[u8; 32], Stored>>>;

pub struct Stored {
    request: [u8; 32],
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl<S> Service<Request> for Floor<S>
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Running;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request) -> Running {
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let responses = Arc::clone(&self.responses);
        Box::pin(async move {
            let (head, body) = req.into_parts();
            let body = collect(body).await;
            let Some(key) = head.headers.get("idempotency-key") else {
                let res = inner.call(Request::from_parts(head, Body::from(body)));
                let (head, body) = res.await?.into_parts();
                let body = collect(body).await;
                return Ok(Response::from_parts(head, Body::from(body)));
            };
            let id: [u8; 32] = Sha256::digest(key.as_bytes()).into();
            let mut hash = Sha256::new();
            hash.update(head.method.as_str());
            hash.update(head.uri.path());
            hash.update(&body);
            let request: [u8; 32] = hash.finalize().into();
            if let Some(stored) = lock(&responses).get(&id) {
                let mut res = Response::new(Body::from(stored.body.clone()));
                *res.status_mut() = match stored.request == request {
                    true => stored.status,
                    false => StatusCode::UNPROCESSABLE_ENTITY,
                };
                res.headers_mut().clone_from(&stored.headers);
                return Ok(res);
            }
            let res = inner
                .call(Request::from_parts(head, Body::from(body)))
                .await?;
            let (head, body) = res.into_parts();
            let body = collect(body).await;
            let stored = Stored {
                request,
                status: head.status,
                headers: head.headers.clone(),
                body: body.clone(),
            };
            lock(&responses).insert(id, stored);
            Ok(Response::from_parts(head, Body::from(body)))
        })
    }
}

fn lock(responses: &Responses) -> std::sync::MutexGuard<'_, HashMap<[u8; 32], Stored>> {
    responses.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn collect(body: Body) -> Bytes {
    body.collect().await.expect("a body of bytes").to_bytes()
}
