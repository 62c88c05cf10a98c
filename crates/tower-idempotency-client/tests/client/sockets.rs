//! Clients over sockets: the layer of this project in an axum server, and connections that break.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{Router, extract::State, routing::post};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection, HttpConnector},
    },
    rt::{TokioExecutor, TokioIo},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, Semaphore},
};
use tower::{Layer, ServiceBuilder, ServiceExt, util::MapResponseLayer};
use tower_idempotency::{IdempotencyLayer, MemoryStore};
use tower_idempotency_client::{IdempotencyKeyLayer, Operation, Outcome, Retry, RetryLayer};

/// State of a handler that counts its effects.
#[derive(Clone)]
struct Handler {
    effects: Arc<AtomicU32>,
    /// Notified when the handler begins.
    begun: Arc<Notify>,
    /// A permit lets the handler end.
    barrier: Arc<Semaphore>,
}

impl Handler {
    /// Returns a handler whose barrier is open or closed.
    fn new(is_open: bool) -> Self {
        Self {
            effects: Arc::default(),
            begun: Arc::default(),
            barrier: Arc::new(Semaphore::new(if is_open { 1000 } else { 0 })),
        }
    }

    fn effects(&self) -> u32 {
        self.effects.load(Ordering::Relaxed)
    }
}

async fn order(State(handler): State<Handler>) -> (StatusCode, String) {
    let effect = handler.effects.fetch_add(1, Ordering::Relaxed) + 1;
    handler.begun.notify_one();
    handler.barrier.acquire().await.unwrap().forget();
    (
        StatusCode::CREATED,
        format!("order {effect}: {}", "x".repeat(2000)),
    )
}

pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

/// Serves the handler behind the layer. A 409 opens the barrier.
async fn serve_orders(handler: &Handler) -> SocketAddr {
    let barrier = handler.barrier.clone();
    let open_gate = MapResponseLayer::new(move |res: axum::response::Response| {
        if res.status() == StatusCode::CONFLICT {
            barrier.add_permits(1);
        }
        res
    });
    let app = Router::new()
        .route("/orders", post(order))
        .route_layer(IdempotencyLayer::new(MemoryStore::new()))
        .layer(open_gate)
        .with_state(handler.clone());
    serve(app).await
}

/// Point at which a relay cuts its first connection.
#[derive(Clone)]
pub(crate) enum CutPoint {
    /// The server has sent this number of bytes of the response. With 0, it has sent one byte, which does not reach the client.
    Response(usize),
    /// The handler has begun.
    Executing(Arc<Notify>),
}

/// Relays connections to the server. Returns the address of the relay.
pub(crate) async fn relay(server: SocketAddr, cut: CutPoint) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut cut = Some(cut);
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(server).await.unwrap();
            let cut = cut.take();
            tokio::spawn(async move {
                match cut {
                    None => drop(tokio::io::copy_bidirectional(&mut client, &mut server).await),
                    Some(CutPoint::Executing(begun)) => tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        () = begun.notified() => {}
                    },
                    Some(CutPoint::Response(count)) => cut_response(client, server, count).await,
                }
            });
        }
    });
    addr
}

/// Relays a request, and this number of bytes of its response. The first byte of a response shows that it is recorded.
async fn cut_response(client: TcpStream, server: TcpStream, count: usize) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let upload = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let mut response = vec![0; count.max(1)];
    from_server.read_exact(&mut response).await.unwrap();
    to_client.write_all(&response[..count]).await.unwrap();
    upload.abort();
    let _ = upload.await;
}

type HyperClient = Retry<Client<HttpConnector, Full<Bytes>>>;

fn hyper_client() -> HyperClient {
    RetryLayer::new().layer(Client::builder(TokioExecutor::new()).build_http())
}

async fn order_from(addr: SocketAddr, operation: &Operation) -> Response<String> {
    let req = Request::post(format!("http://{addr}/orders"))
        .extension(operation.clone())
        .body(Full::from("one espresso"))
        .unwrap();
    let res = hyper_client().oneshot(req).await.unwrap();
    let (head, body) = res.into_parts();
    let text = match body.collect().await {
        Ok(body) => String::from_utf8(body.to_bytes().to_vec()).unwrap(),
        Err(_) => "broken".to_owned(),
    };
    Response::from_parts(head, text)
}

fn assert_replay(res: &Response<String>) {
    assert_eq!(res.status(), 201);
    assert_eq!(res.headers()["idempotent-replayed"], "true");
    assert!(res.body().starts_with("order 1: "), "{}", res.body());
    assert_eq!(res.body().len(), 2009);
}

#[tokio::test]
async fn connection_cut_after_effect_gets_replay() {
    let handler = Handler::new(true);
    let relay = relay(serve_orders(&handler).await, CutPoint::Response(0)).await;
    let operation = Operation::new();
    assert_replay(&order_from(relay, &operation).await);
    assert_eq!(
        (operation.attempts(), operation.outcome()),
        (2, Outcome::Definite)
    );
    assert_eq!(handler.effects(), 1);
}

/// The retry arrives while the first request is executed, gets 409, and waits.
#[tokio::test]
async fn connection_cut_while_executing_gets_replay() {
    let handler = Handler::new(false);
    let cut = CutPoint::Executing(handler.begun.clone());
    let relay = relay(serve_orders(&handler).await, cut).await;
    let operation = Operation::new();
    assert_replay(&order_from(relay, &operation).await);
    assert!(operation.attempts() >= 3);
    assert_eq!(operation.outcome(), Outcome::Definite);
    assert_eq!(handler.effects(), 1);
}

/// The head of the response arrives, and its body does not.
#[tokio::test]
async fn connection_cut_in_body_is_response_lost() {
    let handler = Handler::new(true);
    let relay = relay(serve_orders(&handler).await, CutPoint::Response(1000)).await;
    let operation = Operation::new();
    let res = order_from(relay, &operation).await;
    assert_eq!(
        (res.status(), res.body().as_str()),
        (StatusCode::CREATED, "broken")
    );
    assert_eq!(operation.outcome(), Outcome::ResponseLost);
    assert_replay(&order_from(relay, &operation).await);
    assert_eq!(operation.outcome(), Outcome::Definite);
    assert_eq!(handler.effects(), 1);
}

/// Without the key that both attempts share, the server executes twice.
#[tokio::test]
async fn retry_under_new_key_executes_twice() {
    let handler = Handler::new(true);
    let relay = relay(serve_orders(&handler).await, CutPoint::Response(0)).await;
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    for key in ["first", "second"] {
        let req = Request::post(format!("http://{relay}/orders"))
            .header("idempotency-key", key)
            .body(Full::from("one espresso"))
            .unwrap();
        let _ = client.request(req).await;
    }
    assert_eq!(handler.effects(), 2);
}

#[cfg(feature = "hyper-util")]
#[tokio::test(start_paused = true)]
async fn failed_connector_of_hyper_has_sent_nothing() {
    let connector = tower::service_fn(|_: http::Uri| {
        std::future::ready(Err::<TokioIo<TcpStream>, _>("no such host"))
    });
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let req = Request::post("http://127.0.0.1:1/orders")
        .body(Full::<Bytes>::default())
        .unwrap();
    let error = RetryLayer::new()
        .layer(client)
        .oneshot(req)
        .await
        .unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(error.operation().unwrap().attempts(), 3);
}

/// Stream that takes a request, and then fails with the error of a refused connection, like a tunnel.
struct Tunnel {
    requests: Arc<AtomicU32>,
    is_sent: bool,
    reader: Option<Waker>,
}

impl AsyncRead for Tunnel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_sent {
            return Poll::Ready(Err(io::ErrorKind::ConnectionRefused.into()));
        }
        self.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !std::mem::replace(&mut self.is_sent, true) {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Connection for Tunnel {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

/// The request was sent before the error.
#[tokio::test(start_paused = true)]
async fn refusal_on_open_connection_is_unknown() {
    let requests = Arc::new(AtomicU32::new(0));
    let connector = {
        let requests = requests.clone();
        tower::service_fn(move |_: http::Uri| {
            std::future::ready(Ok::<_, io::Error>(TokioIo::new(Tunnel {
                requests: requests.clone(),
                is_sent: false,
                reader: None,
            })))
        })
    };
    let client = Client::builder(TokioExecutor::new()).build(connector);
    for (has_key, sent) in [(true, 3), (false, 1)] {
        let keys = IdempotencyKeyLayer::new().with_methods_where(move |_| has_key);
        let layer = RetryLayer::new().with_keys(keys);
        let req = Request::post("http://127.0.0.1:1/orders").body(Full::<Bytes>::default());
        let error = layer.layer(client.clone()).oneshot(req.unwrap()).await;
        assert_eq!(error.unwrap_err().outcome(), Outcome::Unknown, "{has_key}");
        assert_eq!(requests.swap(0, Ordering::Relaxed), sent, "{has_key}");
    }
}

/// Returns a server that fails once, and the keys that it got.
async fn flaky() -> (SocketAddr, Arc<std::sync::Mutex<Vec<String>>>) {
    let keys = Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = keys.clone();
    let handler = async move |headers: http::HeaderMap| {
        let mut keys = log.lock().unwrap();
        keys.push(headers["idempotency-key"].to_str().unwrap().to_owned());
        if keys.len() == 1 {
            StatusCode::BAD_GATEWAY
        } else {
            StatusCode::CREATED
        }
    };
    (
        serve(Router::new().route("/orders", post(handler))).await,
        keys,
    )
}

fn channel(addr: SocketAddr) -> tonic::transport::Channel {
    tonic::transport::Endpoint::from_shared(format!("http://{addr}"))
        .unwrap()
        .connect_lazy()
}

/// A body of tonic is a stream, so its request is sent once.
#[tokio::test]
async fn tonic_channel_sends_stream_once() {
    let (addr, keys) = flaky().await;
    let req = Request::post(format!("http://{addr}/orders"))
        .body(tonic::body::Body::new(Full::<Bytes>::from("one espresso")))
        .unwrap();
    let res = RetryLayer::new()
        .layer(channel(addr))
        .oneshot(req)
        .await
        .unwrap();
    assert_eq!(res.status(), 502);
    assert_eq!(keys.lock().unwrap().len(), 1);
}

/// A body that is converted inside the layer can be sent again.
#[tokio::test]
async fn tonic_channel_retries_whole_body() {
    let (addr, keys) = flaky().await;
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new())
        .map_request(|req: Request<Full<Bytes>>| req.map(tonic::body::Body::new))
        .service(channel(addr));
    let req = Request::post(format!("http://{addr}/orders"))
        .body(Full::from("one espresso"))
        .unwrap();
    let res = tokio::time::timeout(Duration::from_secs(60), client.oneshot(req))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(res.status(), 201);
    let keys = keys.lock().unwrap();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
}
