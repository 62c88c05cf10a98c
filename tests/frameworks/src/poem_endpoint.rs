//! Poem: a function for `around` puts the layer between poem's requests and an endpoint.
//!
//! Poem's own `TowerLayerCompatExt` accepts only layers of poem's request type, and `TowerCompatExt` only services without
//! an endpoint inside.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http_body_util::{BodyExt, combinators::BoxBody};
use poem::{
    Body, Endpoint, EndpointExt, Request, Response, Route, Server,
    http::{StatusCode, header},
    listener::TcpAcceptor,
    post,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{IdempotencyLayer, Lease};

use crate::{Framework, Shop, listener};

/// Calls the endpoint behind the layer.
async fn idempotent<E: Endpoint + 'static>(
    layer: IdempotencyLayer,
    endpoint: Arc<E>,
    req: Request,
) -> poem::Result<Response> {
    // The path below `nest` would be the same for several routes.
    let uri = req.original_uri().clone();
    let (parts, body) = req.into_parts();
    let mut request = http::Request::new(BoxBody::from(body));
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = uri;
    *request.headers_mut() = parts.headers.clone();
    *request.extensions_mut() = parts.extensions.clone();
    // The layer calls the service at most once.
    let parts = Arc::new(Mutex::new(Some(parts)));
    let service = service_fn(move |req: http::Request<tower_idempotency::Body<_>>| {
        let (endpoint, parts) = (
            Arc::clone(&endpoint),
            parts.lock().expect("no panic").take(),
        );
        async move {
            let mut parts = parts.expect("one call");
            let (head, body) = req.into_parts();
            parts.extensions = head.extensions;
            let req = Request::from_parts(parts, Body::from(BodyExt::boxed(body)));
            let res = endpoint.get_response(req).await;
            Ok::<_, Infallible>(http::Response::<BoxBody<Bytes, _>>::from(res))
        }
    });
    let Ok(res) = layer.layer(service).oneshot(request).await;
    Ok(res.into())
}

/// Poem 3.
#[derive(Debug)]
pub struct Poem;

impl Framework for Poem {
    const DROPS_HANDLERS: bool = false;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        let acceptor = TcpAcceptor::from_tokio(listener).expect("a bound socket");
        tokio::spawn(Server::new_with_acceptor(acceptor).run(route(&shop)));
        addr
    }
}

fn route(shop: &Shop) -> Route {
    let orders = || {
        let layer = shop.layer.clone();
        let orders = post(Orders(shop.clone()));
        orders.around(move |endpoint, req| idempotent(layer.clone(), endpoint, req))
    };
    let layer = shop.layer.clone();
    let events = post(Events(shop.clone()));
    Route::new()
        .at("/orders", orders())
        .nest("/eu", Route::new().at("/orders", orders()))
        .nest("/us", Route::new().at("/orders", orders()))
        .at(
            "/events",
            events.around(move |endpoint, req| idempotent(layer.clone(), endpoint, req)),
        )
}

struct Orders(Shop);

impl Endpoint for Orders {
    type Output = Response;

    async fn call(&self, mut req: Request) -> poem::Result<Response> {
        let lease = req.extensions().get::<Lease>().cloned();
        let body = req.take_body().into_bytes().await?;
        let reply = self.0.order(lease, body).await;
        let mut res = Response::builder()
            .status(StatusCode::from_u16(reply.status).expect("a status"))
            .header(header::LOCATION, reply.location)
            .body(reply.body);
        if let Some(attention) = reply.attention {
            res.extensions_mut().insert(attention);
        }
        Ok(res)
    }
}

struct Events(Shop);

impl Endpoint for Events {
    type Output = Response;

    async fn call(&self, _: Request) -> poem::Result<Response> {
        let res = Response::builder().content_type("text/event-stream");
        Ok(res.body(Body::from_bytes_stream(self.0.events())))
    }
}
