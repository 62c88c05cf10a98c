//! Hyper: the layer wraps a service function, and `TowerToHyperService` serves it.

use std::{convert::Infallible, io, net::SocketAddr};

use bytes::Bytes;
use futures_util::TryStreamExt;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tower::{Layer, Service, service_fn};
use tower_idempotency::{Body, Lease};

use crate::{Framework, Reply, Shop, listener};

/// Hyper, without a framework.
#[derive(Debug)]
pub struct Hyper;

impl Framework for Hyper {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let service = shop
            .layer
            .clone()
            .layer(service_fn(move |req| respond(shop.clone(), req)));
        serve(service).await
    }
}

/// Serves a tower service on a free port of this machine.
pub(crate) async fn serve<S, B>(service: S) -> SocketAddr
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send,
    B: http_body_util::BodyExt<Data = Bytes, Error: std::error::Error + Send + Sync>
        + Send
        + 'static,
{
    let (listener, addr) = listener().await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                let builder = Builder::new(TokioExecutor::new());
                let served = builder.serve_connection(TokioIo::new(stream), service);
                // Clients that disconnect are errors of their connection.
                let _ = served.await;
            });
        }
    });
    addr
}

type Responded = Response<BoxBody<Bytes, io::Error>>;

async fn respond(shop: Shop, req: Request<Body<Incoming>>) -> Result<Responded, Infallible> {
    let lease = req.extensions().get::<Lease>().cloned();
    if req.uri().path() == "/events" {
        let body = StreamBody::new(shop.events().map_ok(Frame::data)).boxed();
        let res = Response::builder().header(header::CONTENT_TYPE, "text/event-stream");
        return Ok(res.body(body).expect("a valid response"));
    }
    let reply = match req.into_body().collect().await {
        Ok(body) => shop.order(lease, body.to_bytes()).await,
        // The request broke off.
        Err(_) => Reply {
            status: 400,
            location: "/".to_owned(),
            body: String::new(),
            attention: None,
        },
    };
    let res = Response::builder()
        .status(StatusCode::from_u16(reply.status).expect("a status"))
        .header(header::LOCATION, reply.location)
        .body(
            Full::from(reply.body)
                .map_err(|never| match never {})
                .boxed(),
        );
    let mut res = res.expect("a valid response");
    if let Some(attention) = reply.attention {
        res.extensions_mut().insert(attention);
    }
    Ok(res)
}
