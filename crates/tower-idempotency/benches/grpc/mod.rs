//! Unary gRPC calls that are not protected, through the layer and through one that does nothing.
//!
//! A call is a POST with one message of five bytes, and its status is in the trailers of the response. The axum handler returns
//! the message.

use std::future::ready;

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, HeaderValue, Request, Version, header},
    response::Response,
    routing::post,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use tokio::runtime::Runtime;
use tower::ServiceExt;
use tower_idempotency::{GrpcMethods, IdempotencyLayer, MemoryStore};

use super::{Key, Noop, Size, Variant, compare};

/// Compares the calls. The ratio is that to the first variant.
pub(crate) fn compare_calls(runtime: &Runtime, store: MemoryStore, size: Size) {
    let noop = routes().layer(tower::layer::layer_fn(Noop)).with_state(());
    let methods = GrpcMethods::only([PROTECTED]).expect("a path");
    let layer = IdempotencyLayer::new(store).with_grpc(methods);
    let with_layer = routes().layer(layer).with_state(());
    let mut variants = [
        variant("no-op layer", &noop, call_unprotected),
        variant(
            "a method that is not protected",
            &with_layer,
            call_unprotected,
        ),
        variant("a protected method, no key", &with_layer, call_protected),
    ];
    for variant in &variants {
        runtime.block_on(assert_served(variant));
    }
    compare(
        "gRPC calls that are not protected, one task, target 1.010 x",
        runtime,
        &mut variants,
        size,
    );
}

fn variant(
    name: &'static str,
    app: &Router,
    request: fn(&Bytes, Option<&str>) -> Request<Body>,
) -> Variant {
    Variant {
        request,
        ..Variant::new(name, app.clone(), Key::None)
    }
}

/// Returns the routes of both methods. The lengths of their paths are equal.
fn routes() -> Router {
    Router::new()
        .route(UNPROTECTED, post(handle))
        .route(PROTECTED, post(handle))
}

async fn handle(message: Bytes) -> Response {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let body = Full::new(message).with_trailers(ready(Some(Ok(trailers))));
    let mut res = Response::new(Body::new(body));
    let media_type = HeaderValue::from_static(MEDIA_TYPE);
    res.headers_mut().insert(header::CONTENT_TYPE, media_type);
    res
}

fn call_unprotected(_: &Bytes, _: Option<&str>) -> Request<Body> {
    call(UNPROTECTED)
}

fn call_protected(_: &Bytes, _: Option<&str>) -> Request<Body> {
    call(PROTECTED)
}

fn call(path: &str) -> Request<Body> {
    let req = Request::post(path)
        .version(Version::HTTP_2)
        .header(header::CONTENT_TYPE, MEDIA_TYPE)
        .header("te", "trailers")
        .header("user-agent", "grpc-go/1.60.0")
        .header("authorization", "Bearer 0123456789abcdef0123456789abcdef");
    let message = Bytes::from_static(MESSAGE);
    req.body(Body::from(message)).expect("a valid request")
}

/// Checks that the handler serves a call. The HTTP status does not show that, because it is also 200 for a rejected call.
async fn assert_served(variant: &Variant) {
    let req = (variant.request)(&Bytes::new(), None);
    let Ok(res) = variant.app.clone().oneshot(req).await;
    let body = res.into_body().collect().await.expect("a body");
    let trailers = body.trailers().expect("trailers");
    assert_eq!(trailers["grpc-status"], "0", "{}", variant.name);
    assert_eq!(body.to_bytes(), MESSAGE, "{}", variant.name);
}

const UNPROTECTED: &str = "/payments.v1.Payments/GetBalance";
const PROTECTED: &str = "/payments.v1.Payments/PayInvoice";
const MEDIA_TYPE: &str = "application/grpc";
/// The prefix of the message, which has its length, and the message.
const MESSAGE: &[u8] = b"\0\0\0\0\x05alice";
