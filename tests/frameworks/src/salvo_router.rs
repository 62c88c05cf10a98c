//! Salvo: the layer is a hoop by `compat`, after one line that returns salvo's own body to the handlers.

use std::net::SocketAddr;

use http::header;
use http_body_util::BodyExt;
use salvo::{
    Depot, FlowCtrl, Request, Response, Router, Server, conn::tcp::TcpAcceptor, handler,
    http::ReqBody, prelude::TowerLayerCompat,
};
use tower::ServiceBuilder;
use tower_idempotency::{Body, Lease};

use crate::{Framework, Shop, listener};

/// Salvo 1.
#[derive(Debug)]
pub struct Salvo;

impl Framework for Salvo {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        let acceptor = TcpAcceptor::try_from(listener).expect("a bound socket");
        tokio::spawn(Server::new(acceptor).serve(router(&shop)));
        addr
    }
}

/// Salvo with a hoop outside of the layer, which reports if its `Depot` came back.
#[derive(Debug)]
pub struct SalvoOuterHoop;

impl Framework for SalvoOuterHoop {
    const DROPS_HANDLERS: bool = true;
    const STREAMS: bool = true;

    async fn start(shop: Shop) -> SocketAddr {
        let (listener, addr) = listener().await;
        let acceptor = TcpAcceptor::try_from(listener).expect("a bound socket");
        let router = Router::new().hoop(Outer).push(router(&shop));
        tokio::spawn(Server::new(acceptor).serve(router));
        addr
    }
}

struct Outer;

#[handler]
impl Outer {
    async fn handle(
        &self,
        req: &mut Request,
        depot: &mut Depot,
        res: &mut Response,
        ctrl: &mut FlowCtrl,
    ) {
        depot.insert("caller", "one");
        ctrl.call_next(req, depot, res).await;
        let value = match depot.get::<&str>("caller") {
            Ok(_) => "kept",
            Err(_) => "lost",
        };
        let value = http::HeaderValue::from_static(value);
        res.headers_mut().insert("x-depot", value);
    }
}

fn router(shop: &Shop) -> Router {
    let layer = ServiceBuilder::new()
        .layer(shop.layer.clone())
        .map_request(|req: http::Request<Body<ReqBody>>| req.map(boxed));
    let orders = || Router::with_path("orders").post(Orders(shop.clone()));
    Router::new()
        .hoop(layer.compat())
        .push(orders())
        .push(Router::with_path("eu").push(orders()))
        .push(Router::with_path("us").push(orders()))
        .push(Router::with_path("events").post(Events(shop.clone())))
}

fn boxed(body: Body<ReqBody>) -> ReqBody {
    ReqBody::Boxed {
        inner: Box::pin(body.map_err(Into::into)),
        fuse_config: None,
    }
}

struct Orders(Shop);

#[handler]
impl Orders {
    async fn handle(&self, req: &mut Request, res: &mut Response) {
        let lease = req.extensions().get::<Lease>().cloned();
        let Ok(body) = req.payload().await else {
            res.status_code(http::StatusCode::BAD_REQUEST);
            return;
        };
        let reply = self.0.order(lease, body.clone()).await;
        res.status_code(http::StatusCode::from_u16(reply.status).expect("a status"));
        let location = reply.location.parse().expect("a header value");
        res.headers_mut().insert(header::LOCATION, location);
        if let Some(attention) = reply.attention {
            res.extensions.insert(attention);
        }
        res.render(reply.body);
    }
}

struct Events(Shop);

#[handler]
impl Events {
    async fn handle(&self, res: &mut Response) {
        let value = http::HeaderValue::from_static("text/event-stream");
        res.headers_mut().insert(header::CONTENT_TYPE, value);
        res.stream(self.0.events());
    }
}
