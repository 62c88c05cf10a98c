//! Allocations of a call without a retry, compared with the same call of the inner service.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, Service};
use tower_idempotency_client::{IdempotencyKeyLayer, Operation, RetryLayer};

/// Service that responds at once, and allocates nothing.
#[derive(Clone)]
struct Server;

impl Service<Request<Full<Bytes>>> for Server {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        ready(Ok(Response::new(Full::default())))
    }
}

/// Returns a request as an application builds it: some headers, and a body that was serialized into a buffer.
fn request(operation: Option<&Operation>) -> Request<Full<Bytes>> {
    let mut body = Vec::with_capacity(2048);
    body.extend_from_slice(&[b'x'; 1024]);
    let req = Request::post("https://api.example.com/orders?x=1")
        .header("content-type", "application/json")
        .header("accept", "application/json")
        .header("authorization", "Bearer 0123456789abcdef0123456789abcdef")
        .header("user-agent", String::from("application/1.0"))
        .header("x-tenant", String::from("tenant-17"))
        .body(Full::new(Bytes::from(body)));
    let mut req = req.unwrap();
    if let Some(operation) = operation {
        req.extensions_mut().insert(operation.clone());
    }
    req
}

/// Returns the allocations of one call.
fn allocations<S>(mut service: S, req: Request<Full<Bytes>>) -> u64
where
    S: Service<Request<Full<Bytes>>, Error: std::fmt::Debug>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let counted = allocation_counter::measure(|| {
        assert!(service.poll_ready(&mut cx).is_ready());
        let mut call = pin!(service.call(req));
        assert!(matches!(call.as_mut().poll(&mut cx), Poll::Ready(Ok(_))));
    });
    counted.count_total
}

/// Returns a service whose first call has registered its counters.
fn retries() -> impl Service<Request<Full<Bytes>>, Error: std::fmt::Debug> + Clone {
    let service = RetryLayer::new().layer(Server);
    allocations(service.clone(), request(None));
    service
}

#[test]
fn call_with_operation_allocates_once() {
    let service = retries();
    for _ in 0..3 {
        let operation = Operation::new();
        assert_eq!(allocations(Server, request(Some(&operation))), 0);
        assert_eq!(allocations(service.clone(), request(Some(&operation))), 1);
        assert_eq!(operation.attempts(), 1);
        let keys = IdempotencyKeyLayer::new().layer(Server);
        assert_eq!(allocations(keys, request(Some(&operation))), 0);
    }
}

/// The operation, its key, and three allocations of `http` for the extensions of a request that had none.
#[test]
fn operation_of_layer_adds_five_allocations() {
    assert_eq!(allocations(retries(), request(None)), 6);
    let keys = IdempotencyKeyLayer::new().layer(Server);
    assert_eq!(allocations(keys, request(None)), 5);
}
