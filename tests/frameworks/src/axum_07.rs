//! Axum 0.7: the layer is a layer of the router, outside of `nest`, and handlers get the lease as an extension.

use std::net::SocketAddr;

use axum_07::{
    Extension, Router, body::Body, extract::State, response::IntoResponse, routing::post,
};
use bytes::Bytes;
use http::{StatusCode, header};
use tower_idempotency::Lease;

use crate::{Framework, Shop, listener};

/// Axum 0.7.
#[derive(Debug)]
pub struct Axum07;

impl Framework for Axum07 {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        tokio::spawn(async move { axum_07::serve(listener, router(shop)).await });
        addr
    }
}

fn router(shop: Shop) -> Router {
    let layer = shop.layer.clone();
    let orders = || Router::new().route("/orders", post(order));
    orders()
        .route("/events", post(events))
        .nest("/eu", orders())
        .nest("/us", orders())
        // Inside of `nest` the layer would see `/orders` in both, and one key would be the same key.
        .layer(layer)
        .with_state(shop)
}

/// Axum 0.7 with the layer inside of `nest`: not to be copied.
#[derive(Debug)]
pub struct Axum07InsideNest;

impl Framework for Axum07InsideNest {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        let orders = || {
            let routes = Router::new().route("/orders", post(order));
            routes.route_layer(shop.layer.clone())
        };
        let router = Router::new().nest("/eu", orders()).nest("/us", orders());
        let router = router.with_state(shop);
        tokio::spawn(async move { axum_07::serve(listener, router).await });
        addr
    }
}

async fn order(
    State(shop): State<Shop>,
    lease: Option<Extension<Lease>>,
    body: Bytes,
) -> impl IntoResponse {
    let reply = shop.order(lease.map(|lease| lease.0), body).await;
    let status = StatusCode::from_u16(reply.status).expect("a status");
    let headers = [(header::LOCATION, reply.location)];
    let attention = reply.attention.map(Extension);
    (status, headers, attention, reply.body)
}

async fn events(State(shop): State<Shop>) -> impl IntoResponse {
    let headers = [(header::CONTENT_TYPE, "text/event-stream")];
    (headers, Body::from_stream(shop.events()))
}
