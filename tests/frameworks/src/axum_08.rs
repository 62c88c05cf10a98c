//! Axum 0.8: the layer is a layer of the router.

use std::net::SocketAddr;

use axum::{
    Extension, Router,
    body::Body,
    extract::State,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use tower::ServiceBuilder;
use tower_idempotency::Lease;

use crate::{Framework, Reply, Shop, listener};

/// Axum 0.8.
#[derive(Debug)]
pub struct Axum08;

impl Framework for Axum08 {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        tokio::spawn(async move { axum::serve(listener, router(shop)).await });
        addr
    }
}

fn router(shop: Shop) -> Router {
    let layer = shop.layer.clone();
    let orders = || Router::new().route("/orders", post(order));
    orders()
        .route("/events", post(events))
        .nest("/eu", orders().route_layer(layer.clone()))
        .nest("/us", orders().route_layer(layer.clone()))
        .route_layer(layer)
        .with_state(shop)
}

async fn order(State(shop): State<Shop>, lease: Option<Lease>, body: Bytes) -> Response {
    shop.order(lease, body).await.into_response()
}

async fn events(State(shop): State<Shop>) -> impl IntoResponse {
    let headers = [(header::CONTENT_TYPE, "text/event-stream")];
    (headers, Body::from_stream(shop.events()))
}

impl IntoResponse for Reply {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).expect("a status");
        let headers = [(header::LOCATION, self.location)];
        let attention = self.attention.map(Extension);
        (status, headers, attention, self.body).into_response()
    }
}

/// Axum 0.8, with a middleware of axum inside the layer, in one `ServiceBuilder`.
#[derive(Debug)]
pub struct Axum08Builder;

impl Framework for Axum08Builder {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        let router = built(shop);
        tokio::spawn(async move { axum::serve(listener, router).await });
        addr
    }
}

fn built(shop: Shop) -> Router {
    let stack = ServiceBuilder::new()
        .layer(shop.layer.clone())
        // `from_fn` accepts no body but axum's own.
        .map_request(|req: Request<tower_idempotency::Body<Body>>| req.map(Body::new))
        .layer(from_fn(stamp));
    let orders = || Router::new().route("/orders", post(order));
    orders()
        .route("/events", post(events))
        .nest("/eu", orders())
        .nest("/us", orders())
        .layer(stack)
        .with_state(shop)
}

async fn stamp(req: Request<Body>, next: Next) -> Response {
    let mut res = next.run(req).await;
    let stamp = HeaderValue::from_static("inside");
    res.headers_mut().insert("x-stamp", stamp);
    res
}
