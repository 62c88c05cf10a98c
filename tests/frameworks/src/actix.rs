//! Actix Web: a function for `from_fn` puts the layer between actix's requests and the rest of the service.
//!
//! Requests and handlers of actix are not `Send`, so they stay in a task of their worker. The function reads each request
//! and each response into memory.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use actix_web::{
    App, Error, HttpMessage, HttpRequest, HttpResponse, HttpServer,
    body::{MessageBody, to_bytes},
    dev::{Payload, ServiceRequest, ServiceResponse},
    error::{ErrorBadRequest, ErrorInternalServerError, InternalError},
    http::{StatusCode, header},
    middleware::{Next, from_fn},
    rt,
    web::{self, Data},
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use tokio::sync::oneshot;
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{Body, IdempotencyLayer, Lease, NeedsAttention, Retention};

use crate::{Framework, Shop};

/// Calls the rest of the service behind the layer.
async fn idempotent(
    layer: Data<IdempotencyLayer>,
    mut req: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse, Error> {
    let body = req.extract::<Bytes>().await?;
    let uri = req.uri().to_string();
    let mut head = http::Request::builder()
        .method(req.method().as_str())
        .uri(uri);
    for (name, value) in req.headers() {
        head = head.header(name.as_str(), value.as_bytes());
    }
    let request = head
        .body(Full::new(body.clone()))
        .map_err(ErrorBadRequest)?;
    let (call, called) = oneshot::channel::<(Option<Lease>, oneshot::Sender<_>)>();
    let (end, ended) = oneshot::channel();
    rt::spawn(async move {
        let Ok((lease, reply)) = called.await else {
            return end.send(req.into_parts().0).ok();
        };
        req.set_payload(Payload::from(body));
        req.extensions_mut().insert(lease);
        let res = match next.call(req).await.map(ServiceResponse::into_parts) {
            Ok((req, res)) => {
                let _ = end.send(req);
                res.map_into_boxed_body()
            }
            Err(error) => error.error_response(),
        };
        let mut head = http::Response::builder().status(res.status().as_u16());
        for (name, value) in res.headers() {
            head = head.header(name.as_str(), value.as_bytes());
        }
        // The layer reads these extensions of a response.
        if let Some(attention) = res.extensions().get::<NeedsAttention>() {
            head = head.extension(attention.clone());
        }
        if let Some(retention) = res.extensions().get::<Retention>() {
            head = head.extension(*retention);
        }
        let body = to_bytes(res.into_body()).await.ok()?;
        reply.send(head.body(Full::new(body)).ok()?).ok()
    });
    // The layer calls the service at most once.
    let call = Arc::new(Mutex::new(Some(call)));
    let service = service_fn(move |req: http::Request<Body<_>>| {
        let (reply, replied) = oneshot::channel();
        let lease = req.extensions().get::<Lease>().cloned();
        let call = call.lock().expect("no panic").take();
        let _ = call.map(|call| call.send((lease, reply)));
        replied
    });
    let called = layer.layer(service).oneshot(request).await;
    let (head, body) = called.map_err(ErrorInternalServerError)?.into_parts();
    let status = StatusCode::from_u16(head.status.as_u16()).map_err(ErrorInternalServerError)?;
    let mut res = HttpResponse::build(status);
    for (name, value) in &head.headers {
        res.append_header((name.as_str(), value.as_bytes()));
    }
    let Ok(body) = body.collect().await;
    let res = res.body(body.to_bytes());
    match ended.await {
        Ok(req) => Ok(ServiceResponse::new(req, res)),
        Err(_) => Err(InternalError::from_response("a middleware failed", res).into()),
    }
}

/// Actix Web 4.
#[derive(Debug)]
pub struct Actix;

impl Framework for Actix {
    // The function runs each handler in a task.
    const DROPS_HANDLERS: bool = false;
    const STREAMS: bool = false;

    async fn start(shop: Shop) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        // A server of actix has its own threads. It ends with the process of the tests.
        std::thread::spawn(move || {
            let server = HttpServer::new(move || {
                let (layer, shop) = (Data::new(shop.layer.clone()), Data::new(shop.clone()));
                App::new()
                    .app_data(layer)
                    .app_data(shop)
                    .wrap(from_fn(idempotent))
                    .route("/orders", web::post().to(order))
                    .route("/events", web::post().to(events))
                    .service(web::scope("/eu").route("/orders", web::post().to(order)))
                    .service(web::scope("/us").route("/orders", web::post().to(order)))
            });
            // Each worker is a runtime of its own. The layer needs one that runs as long as there are leases.
            let server = server.workers(1).disable_signals().listen(listener);
            rt::System::new().block_on(server.expect("a bound socket").run())
        });
        addr
    }
}

async fn order(req: HttpRequest, shop: Data<Shop>, body: Bytes) -> HttpResponse {
    let lease = req.extensions().get::<Option<Lease>>().cloned().flatten();
    let reply = shop.order(lease, body).await;
    let mut res = HttpResponse::build(StatusCode::from_u16(reply.status).expect("a status"));
    if let Some(attention) = reply.attention {
        res.extensions_mut().insert(attention);
    }
    res.insert_header((header::LOCATION, reply.location))
        .body(reply.body)
}

async fn events(shop: Data<Shop>) -> HttpResponse {
    let mut res = HttpResponse::Ok();
    res.content_type("text/event-stream")
        .streaming(shop.events())
}
