//! The other two programs of `scripts/bench-proxy`: proxy-bench upstream ADDRESS, and proxy-bench plain ADDRESS UPSTREAM
//!
//! The upstream responds to POST with 201 and a number, and to GET with the number of POSTs. The plain proxy passes requests
//! on and does nothing else: hyper, and the client of hyper-util with its pool of connections.

use std::{
    convert::Infallible,
    env,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{CONNECTION, CONTENT_TYPE, HOST, HeaderValue},
    service::service_fn,
};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::net::TcpListener;

type Error = Box<dyn std::error::Error + Send + Sync>;

// As in the proxy under test.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["upstream", address] => upstream(address.parse()?).await,
        ["plain", address, upstream] => plain(address.parse()?, upstream.to_owned()).await,
        _ => Err("usage: proxy-bench upstream ADDRESS | plain ADDRESS UPSTREAM".into()),
    }
}

async fn upstream(address: SocketAddr) -> Result<(), Error> {
    let count = Arc::new(AtomicU64::new(0));
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let count = Arc::clone(&count);
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let count = Arc::clone(&count);
                async move { Ok::<_, Infallible>(order(request, &count).await) }
            });
            let builder = auto::Builder::new(TokioExecutor::new());
            // The client closed the connection.
            let _ = builder
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn order(request: Request<Incoming>, count: &AtomicU64) -> Response<Full<Bytes>> {
    let is_post = request.method() == Method::POST;
    let _ = request.into_body().collect().await;
    let body = if is_post {
        let number = count.fetch_add(1, Ordering::Relaxed) + 1;
        format!("{{\"order\":{number},\"note\":\"{}\"}}", "x".repeat(200))
    } else {
        count.load(Ordering::Relaxed).to_string()
    };
    let mut response = Response::new(Full::from(body));
    if is_post {
        *response.status_mut() = StatusCode::CREATED;
    }
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

async fn plain(address: SocketAddr, upstream: String) -> Result<(), Error> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<HttpConnector, Incoming> =
        Client::builder(TokioExecutor::new()).build(connector);
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (client, upstream) = (client.clone(), upstream.clone());
        tokio::spawn(async move {
            let service = service_fn(move |mut request: Request<Incoming>| {
                let path = request
                    .uri()
                    .path_and_query()
                    .map_or("/", |path| path.as_str());
                // A target that is no URI fails in the client.
                let target = format!("http://{upstream}{path}").parse::<Uri>();
                *request.uri_mut() = target.unwrap_or_default();
                request.headers_mut().remove(CONNECTION);
                request.headers_mut().remove(HOST);
                client.request(request)
            });
            let builder = auto::Builder::new(TokioExecutor::new());
            let _ = builder
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}
