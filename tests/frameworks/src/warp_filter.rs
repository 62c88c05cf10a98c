//! Warp: the layer wraps `warp::service`, which hyper serves. `warp::serve` accepts filters only.

use std::net::SocketAddr;

use bytes::Bytes;
use tower::Layer;
use tower_idempotency::Lease;
use warp::{
    Filter, Rejection,
    http::{StatusCode, header},
    reply::{Reply as _, Response},
};

use crate::{Framework, Shop, hyper_service::serve};

/// Warp 0.4.
#[derive(Debug)]
pub struct Warp;

impl Framework for Warp {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let routes = warp::path!("orders")
            .or(warp::path!("eu" / "orders"))
            .unify()
            .or(warp::path!("us" / "orders"))
            .unify()
            .and(order(shop.clone()))
            .or(warp::path!("events").and(events(shop.clone())));
        serve(shop.layer.layer(warp::service(routes))).await
    }
}

fn order(shop: Shop) -> impl Filter<Extract = (Response,), Error = Rejection> + Clone {
    warp::post()
        .and(warp::ext::optional::<Lease>())
        .and(warp::body::bytes())
        .then(move |lease, body: Bytes| {
            let shop = shop.clone();
            async move {
                let reply = shop.order(lease, body).await;
                let status = StatusCode::from_u16(reply.status).expect("a status");
                let res = warp::reply::with_header(reply.body, header::LOCATION, reply.location);
                let mut res = warp::reply::with_status(res, status).into_response();
                if let Some(attention) = reply.attention {
                    res.extensions_mut().insert(attention);
                }
                res
            }
        })
}

fn events(shop: Shop) -> impl Filter<Extract = (Response,), Error = Rejection> + Clone {
    warp::post().map(move || {
        let stream = warp::reply::stream(shop.events());
        warp::reply::with_header(stream, header::CONTENT_TYPE, "text/event-stream").into_response()
    })
}
