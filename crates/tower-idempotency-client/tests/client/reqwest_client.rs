//! The adapter for reqwest, over sockets: redirects, retries and other middleware.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use axum::{Router, extract::Request, response::Response, routing::any};
use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::{BodyExt, Full, channel::Channel};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Middleware, Next};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::Notify,
};
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{
    Error, FileOutbox, Operation, Outbox, OutboxLayer, Outcome, RetryLayer,
};

use crate::sockets::serve;

/// Request as a server saw it.
#[derive(Clone, Debug)]
struct Seen {
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Seen {
    fn key(&self) -> Option<&str> {
        Some(self.headers.get("idempotency-key")?.to_str().unwrap())
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn status(status: u16) -> Response {
    let mut res = Response::default();
    *res.status_mut() = StatusCode::from_u16(status).unwrap();
    res
}

fn redirect(code: u16, location: &str) -> Response {
    let mut res = status(code);
    res.headers_mut()
        .insert(header::LOCATION, location.parse().unwrap());
    res
}

/// Serves a function of the requests so far. Returns the address and the log.
async fn server(
    respond: impl Fn(&[Seen]) -> Response + Clone + Send + Sync + 'static,
) -> (SocketAddr, Log) {
    let log = Log::default();
    let handler = {
        let log = log.clone();
        async move |req: Request| {
            let (head, body) = req.into_parts();
            let seen = Seen {
                method: head.method,
                path: head.uri.path().to_owned(),
                headers: head.headers,
                body: body.collect().await.unwrap().to_bytes(),
            };
            let mut log = log.0.lock().unwrap();
            log.push(seen);
            respond(&log)
        }
    };
    (serve(Router::new().fallback(any(handler))).await, log)
}

fn builder() -> ClientBuilder {
    // A policy of the caller is replaced.
    let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::limited(5));
    RetryLayer::new().into_reqwest(builder).unwrap()
}

fn client() -> ClientWithMiddleware {
    builder().build()
}

fn error(error: &reqwest_middleware::Error) -> &Error {
    match error {
        reqwest_middleware::Error::Middleware(error) => error.downcast_ref().unwrap(),
        reqwest_middleware::Error::Reqwest(error) => panic!("{error}"),
    }
}

/// The client would add its default credentials to the request at the other origin.
#[tokio::test]
async fn redirect_to_other_origin_is_returned() {
    let credential = HeaderValue::from_static("Bearer secret");
    let defaults = HeaderMap::from_iter([(header::AUTHORIZATION, credential)]);
    let client = reqwest::Client::builder().default_headers(defaults);
    let client = RetryLayer::new().into_reqwest(client).unwrap().build();
    for (code, outcome) in [
        (302, Outcome::Definite),
        (303, Outcome::Definite),
        (307, Outcome::NotExecuted),
        (308, Outcome::NotExecuted),
    ] {
        let (other, other_log) = server(|_| status(201)).await;
        let to = format!("http://{other}/moved");
        let (origin, log) = server(move |_| redirect(code, &to)).await;
        let operation = Operation::new();
        let res = client
            .post(format!("http://{origin}/orders"))
            .body("one espresso")
            .with_extension(operation.clone())
            .send()
            .await
            .unwrap();
        assert_eq!(res.status(), code);
        let log = log.take();
        assert_eq!(log.len(), 1, "{code}");
        assert_eq!(log[0].key(), Some(operation.key()));
        assert_eq!(log[0].headers["authorization"], "Bearer secret");
        assert_eq!(other_log.take().len(), 0, "{code}");
        assert_eq!(operation.outcome(), outcome, "{code}");
    }
}

#[tokio::test]
async fn key_stays_when_path_changes() {
    let (origin, log) = server(|seen| match seen.len() {
        1 => redirect(307, "/moved"),
        2 => status(503),
        3 => redirect(308, "moved"),
        _ => status(201),
    })
    .await;
    let res = client()
        .post(format!("http://{origin}/orders"))
        .body("one espresso")
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 201);
    let log = log.take();
    let paths: Vec<_> = log.iter().map(|seen| seen.path.as_str()).collect();
    assert_eq!(paths, ["/orders", "/moved", "/orders", "/moved"]);
    assert!(log[0].key().is_some() && log.iter().all(|seen| seen.key() == log[0].key()));
}

/// A 303 leads to the result. Its request is safe, so all of it is sent again.
#[tokio::test]
async fn failure_after_see_other_is_retried() {
    let (origin, log) = server(|seen| match seen.len() {
        1 | 3 => redirect(303, "/orders/7"),
        2 => status(503),
        _ => status(200),
    })
    .await;
    let res = client()
        .post(format!("http://{origin}/orders"))
        .body("one espresso")
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 200);
    let log = log.take();
    assert_eq!(log.len(), 4);
    assert!(log[0].key().is_some() && log[0].key() == log[2].key());
    for seen in [&log[1], &log[3]] {
        assert_eq!(
            (seen.method.as_str(), seen.key(), seen.body.len()),
            ("GET", None, 0)
        );
    }
}

#[tokio::test]
async fn redirects_end_after_ten() {
    let (origin, log) = server(|_| redirect(302, "/again")).await;
    let res = client()
        .get(format!("http://{origin}/"))
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 302);
    assert_eq!(log.take().len(), 11);
    for location in ["ftp://127.0.0.1/", "http://["] {
        let (origin, log) = server(move |_| redirect(307, location)).await;
        let res = client()
            .post(format!("http://{origin}/"))
            .send()
            .await
            .unwrap();
        assert_eq!(
            (res.status().as_u16(), log.take().len()),
            (307, 1),
            "{location}"
        );
    }
}

#[tokio::test]
async fn refused_connection_is_not_executed() {
    // A port that is bound, so that no other test gets it, and that refuses connections.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = socket.local_addr().unwrap();
    let operation = Operation::new();
    let res = client()
        .post(format!("http://{closed}/"))
        .with_extension(operation.clone())
        .send()
        .await;
    assert_eq!(error(&res.unwrap_err()).outcome(), Outcome::NotExecuted);
    assert_eq!(operation.attempts(), 3);

    // After a redirect the server may have executed the request. This one accepts no second connection, and its port stays
    // free.
    let origin = SocketAddr::from(([127, 0, 0, 1], tests::servers::free_port()));
    let server = TcpListener::bind(origin).await.unwrap();
    let served = tokio::spawn(async move {
        let (mut connection, _) = server.accept().await.unwrap();
        drop(server);
        let mut head = [0; 1024];
        assert!(connection.read(&mut head).await.unwrap() > 0);
        let res = "HTTP/1.1 303 See Other\r\nlocation: /\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        connection.write_all(res.as_bytes()).await.unwrap();
    });
    let operation = Operation::new();
    let res = client()
        .post(format!("http://{origin}/"))
        .with_extension(operation.clone())
        .send()
        .await;
    served.await.unwrap();
    res.unwrap_err();
    assert_eq!(operation.outcome(), Outcome::Unknown);
}

#[tokio::test]
async fn stream_is_sent_once() {
    let (origin, log) = server(|_| status(503)).await;
    let (mut sender, body) = Channel::<Bytes>::new(1);
    sender.send_data(Bytes::from("one espresso")).await.unwrap();
    drop(sender);
    let operation = Operation::new();
    let res = client()
        .post(format!("http://{origin}/orders"))
        .body(reqwest::Body::wrap(body))
        .with_extension(operation.clone())
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 503);
    assert!(res.extensions().get::<Operation>().is_some());
    let log = log.take();
    assert_eq!((log.len(), log[0].body.as_ref()), (1, &b"one espresso"[..]));
    assert_eq!(operation.outcome(), Outcome::Unknown);
}

/// Middleware that numbers its requests in a header.
#[derive(Clone, Default)]
struct Counter(Arc<AtomicU32>);

#[async_trait::async_trait]
impl Middleware for Counter {
    async fn handle(
        &self,
        mut req: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        assert!(extensions.get::<Operation>().is_some());
        let number = self.0.fetch_add(1, Ordering::Relaxed);
        req.headers_mut().insert("x-number", number.into());
        next.run(req, extensions).await
    }
}

#[tokio::test]
async fn other_middleware_sees_each_attempt() {
    let (origin, log) = server(|seen| status(if seen.len() < 3 { 500 } else { 201 })).await;
    let counter = Counter::default();
    let client = builder().with(counter.clone()).build();
    let res = client
        .post(format!("http://{origin}/orders"))
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 201);
    let numbers: Vec<_> = log
        .take()
        .iter()
        .map(|seen| seen.headers["x-number"].clone())
        .collect();
    assert_eq!(numbers, ["0", "1", "2"]);
}

/// Middleware whose connections are refused. The first one may break after the request was sent.
#[derive(Default)]
struct Refusing {
    breaks_first: AtomicBool,
}

#[async_trait::async_trait]
impl Middleware for Refusing {
    async fn handle(
        &self,
        _: reqwest::Request,
        _: &mut Extensions,
        _: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let kind = match self.breaks_first.swap(false, Ordering::Relaxed) {
            true => std::io::ErrorKind::ConnectionReset,
            false => std::io::ErrorKind::ConnectionRefused,
        };
        Err(reqwest_middleware::Error::middleware(ConnectionFailed(
            kind.into(),
        )))
    }
}

/// Error with a source, like those of reqwest.
#[derive(Debug)]
struct ConnectionFailed(std::io::Error);

impl std::fmt::Display for ConnectionFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("connection failed")
    }
}

impl std::error::Error for ConnectionFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The type of the error of a middleware decides on the outcome.
#[tokio::test(start_paused = true)]
async fn error_of_other_middleware_keeps_type() {
    let client = builder().with(Refusing::default()).build();
    let res = client.post("http://api.example.com/orders").send().await;
    let failed = res.unwrap_err();
    let source = std::error::Error::source(error(&failed)).unwrap();
    assert!(source.is::<ConnectionFailed>(), "{source:?}");
    assert_eq!(error(&failed).outcome(), Outcome::NotExecuted);
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Error of an application whose source is that of the error inside it.
#[derive(Debug)]
struct Transparent(reqwest_middleware::Error);

impl std::fmt::Display for Transparent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Transparent {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0)
    }
}

fn unchanged(error: reqwest_middleware::Error) -> BoxError {
    error.into()
}

fn transparent(error: reqwest_middleware::Error) -> BoxError {
    Transparent(error).into()
}

/// Returns the private type of a conversion of `anyhow`.
fn converted(error: reqwest_middleware::Error) -> BoxError {
    match error {
        reqwest_middleware::Error::Middleware(error) => error.into(),
        reqwest_middleware::Error::Reqwest(error) => error.into(),
    }
}

/// Sends an operation through an outer series and the adapter, which knows the operation by its key only. Returns the outcome.
async fn outcome_of_outer_series(
    http: ClientWithMiddleware,
    hide: fn(reqwest_middleware::Error) -> BoxError,
) -> Outcome {
    let service = tower::service_fn(move |req: http::Request<Full<Bytes>>| {
        let http = http.clone();
        async move {
            let (mut head, body) = req.into_parts();
            head.extensions.clear();
            // The inner series would send a stream only once.
            let body = body.collect().await.unwrap().to_bytes();
            let req = reqwest::Request::try_from(http::Request::from_parts(head, body))?;
            let res = http.execute(req).await.map_err(hide)?;
            Ok::<_, BoxError>(http::Response::<reqwest::Body>::from(res))
        }
    });
    let client = RetryLayer::new().with_max_attempts(1).layer(service);
    let operation = Operation::new();
    let req = http::Request::post("http://api.example.com/orders")
        .extension(operation.clone())
        .body(Full::from("one espresso"))
        .unwrap();
    let error = client.oneshot(req).await.unwrap_err();
    assert_eq!(error.outcome(), operation.outcome());
    operation.outcome()
}

/// The error of reqwest-middleware contains that of the inner series, whose last attempt was refused.
#[tokio::test(start_paused = true)]
async fn refused_last_attempt_of_inner_adapter_is_unknown() {
    let forms: [fn(reqwest_middleware::Error) -> BoxError; 3] = [unchanged, transparent, converted];
    for hide in forms {
        for (breaks_first, outcome) in [(true, Outcome::Unknown), (false, Outcome::NotExecuted)] {
            let refusing = Refusing {
                breaks_first: breaks_first.into(),
            };
            let http = builder().with(refusing).build();
            assert_eq!(outcome_of_outer_series(http, hide).await, outcome);
        }
    }
}

/// The inner series sent nothing, and its error has no source.
#[tokio::test(start_paused = true)]
async fn request_unsent_by_inner_adapter_is_not_executed() {
    let layer = RetryLayer::new().with_deadline(std::time::Duration::ZERO);
    let http = layer.into_reqwest(reqwest::Client::builder()).unwrap();
    let outcome = outcome_of_outer_series(http.build(), unchanged).await;
    assert_eq!(outcome, Outcome::NotExecuted);
}

/// A retry of reqwest would return only its last error, of a connection that was refused.
#[tokio::test]
async fn retry_policy_of_builder_is_replaced() {
    let origin = SocketAddr::from(([127, 0, 0, 1], tests::servers::free_port()));
    let server = TcpListener::bind(origin).await.unwrap();
    let served = tokio::spawn(async move {
        let (mut connection, _) = server.accept().await.unwrap();
        drop(server);
        let mut head = [0; 1024];
        assert!(connection.read(&mut head).await.unwrap() > 0);
    });
    let policy = reqwest::retry::for_host("127.0.0.1")
        .no_budget()
        .classify_fn(|attempt| attempt.retryable());
    let builder = reqwest::Client::builder().retry(policy);
    let client = RetryLayer::new().into_reqwest(builder).unwrap().build();
    let operation = Operation::new();
    let res = client
        .post(format!("http://{origin}/orders"))
        .with_extension(operation.clone())
        .send()
        .await;
    served.await.unwrap();
    assert_eq!(error(&res.unwrap_err()).outcome(), Outcome::Unknown);
    assert_eq!(operation.attempts(), 3);
}

/// The extensions belong to the caller, who may use them for the next request.
#[tokio::test]
async fn reused_extensions_get_new_key() {
    let (origin, log) = server(|seen| status(if seen.len() == 2 { 500 } else { 201 })).await;
    let client = client();
    let mut extensions = Extensions::new();
    for _ in 0..2 {
        let url = format!("http://{origin}/orders").parse().unwrap();
        let req = reqwest::Request::new(Method::POST, url);
        client
            .execute_with_extensions(req, &mut extensions)
            .await
            .unwrap();
    }
    let log = log.take();
    assert_eq!(log.len(), 3);
    assert_ne!(log[0].key(), log[1].key());
    assert_eq!(log[1].key(), log[2].key());
}

/// The caller of a cancelled call sends the request again with the same extensions. It has the same key, and has one effect.
#[tokio::test]
async fn cancelled_call_leaves_extensions_usable() {
    let (origin, log) = server(|_| status(201)).await;
    let hanging = Hanging::default();
    let client = builder().with(hanging.clone()).build();
    let operation = Operation::new();
    let mut extensions = Extensions::new();
    extensions.insert(operation.clone());
    let url: reqwest::Url = format!("http://{origin}/orders").parse().unwrap();
    let request = || reqwest::Request::new(Method::POST, url.clone());
    {
        let call = client.execute_with_extensions(request(), &mut extensions);
        tokio::select! {
            _ = call => panic!("the reply hangs"),
            () = hanging.replied.notified() => {}
        }
    }
    assert_eq!(operation.outcome(), Outcome::Unknown);
    let call = client.execute_with_extensions(request(), &mut extensions);
    assert_eq!(call.await.unwrap().status(), 201);
    assert_eq!(operation.outcome(), Outcome::Definite);
    let log = log.take();
    assert_eq!(log.len(), 2);
    assert!(log.iter().all(|seen| seen.key() == Some(operation.key())));

    // An operation of the layer does not stay either.
    let mut extensions = Extensions::new();
    hanging.is_over.store(false, Ordering::Relaxed);
    {
        let call = client.execute_with_extensions(request(), &mut extensions);
        tokio::select! {
            _ = call => panic!("the reply hangs"),
            () = hanging.replied.notified() => {}
        }
    }
    assert!(extensions.is_empty());
}

/// Middleware whose first reply hangs after the server has sent it.
#[derive(Clone, Default)]
struct Hanging {
    is_over: Arc<AtomicBool>,
    replied: Arc<Notify>,
}

#[async_trait::async_trait]
impl Middleware for Hanging {
    async fn handle(
        &self,
        req: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        let result = next.run(req, extensions).await;
        if !self.is_over.swap(true, Ordering::Relaxed) {
            self.replied.notify_one();
            std::future::pending::<()>().await;
        }
        result
    }
}

/// The server has executed the request. A rejection of the request for its result does not change that.
#[tokio::test]
async fn rejection_after_see_other_is_not_final() {
    let (origin, _) = server(|seen| match seen.len() {
        1 => redirect(303, "/orders/7"),
        _ => status(401),
    })
    .await;
    let operation = Operation::new();
    let res = client()
        .post(format!("http://{origin}/orders"))
        .with_extension(operation.clone())
        .send()
        .await
        .unwrap();
    assert_eq!(res.status(), 401);
    assert_eq!(operation.outcome(), Outcome::Unknown);
}

/// These methods do not become GET. At the other URL they would be other operations, under the same key.
#[tokio::test]
async fn redirect_of_delete_is_returned() {
    for method in [Method::PUT, Method::PATCH, Method::DELETE, Method::POST] {
        for code in [301, 302] {
            let (origin, log) = server(move |seen| match seen.len() {
                1 => redirect(code, "/orders"),
                _ => status(401),
            })
            .await;
            let operation = Operation::new();
            let res = client()
                .request(method.clone(), format!("http://{origin}/orders/7"))
                .with_extension(operation.clone())
                .send()
                .await
                .unwrap();
            let sent: Vec<_> = log.take().into_iter().map(|seen| seen.method).collect();
            let (expected, outcome) = if method == Method::POST {
                ((401, vec![Method::POST, Method::GET]), Outcome::Unknown)
            } else {
                ((code, vec![method.clone()]), Outcome::Definite)
            };
            assert_eq!((res.status().as_u16(), sent), expected, "{method} {code}");
            assert_eq!(operation.outcome(), outcome, "{method} {code}");
        }
    }
}

/// With tower, `FollowRedirect` outside of the layer drops the operation when the origin changes.
#[tokio::test(start_paused = true)]
async fn follow_redirect_outside_drops_operation() {
    use crate::harness::{Server, post, reply, status};
    use tower::{ServiceBuilder, ServiceExt};
    use tower_http::follow_redirect::{
        FollowRedirectLayer,
        policy::{PolicyExt, Standard, clone_body_fn},
    };

    let server = Server::new([
        reply(307, &[("location", "/moved")], ""),
        reply(307, &[("location", "http://other.example.com/")], ""),
        status(201),
    ]);
    let policy = Standard::default()
        .and::<_, Full<Bytes>, Error>(clone_body_fn(|body: &Full<Bytes>| Some(body.clone())));
    let client = ServiceBuilder::new()
        .layer(FollowRedirectLayer::with_policy(policy))
        .layer(RetryLayer::new())
        .service(server.clone());
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let req: http::Request<Full<Bytes>> = req;
    assert_eq!(client.oneshot(req).await.unwrap().status(), 201);
    let log = server.take_log();
    assert_eq!(log[0].key(), Some(operation.key()));
    assert_eq!(log[1].key(), Some(operation.key()));
    assert_ne!(log[2].key(), Some(operation.key()));
    assert_eq!(log[2].uri, "http://other.example.com/");
}

/// A client of reqwest without redirects is a service for the outbox.
#[tokio::test]
async fn outbox_sends_by_reqwest() {
    let scratch = tests::scratch::Scratch::new();
    let (addr, log) = server(|seen| match seen.len() {
        1 => status(502),
        _ => status(201),
    })
    .await;
    let policy = reqwest::redirect::Policy::none();
    let builder = reqwest::Client::builder().redirect(policy);
    let http = builder.retry(reqwest::retry::never()).build().unwrap();
    let service = tower::service_fn(move |req: http::Request<Full<Bytes>>| {
        let http = http.clone();
        async move {
            let req = reqwest::Request::try_from(req.map(reqwest::Body::wrap))?;
            let res = http.execute(req).await?;
            Ok::<_, reqwest::Error>(http::Response::<reqwest::Body>::from(res))
        }
    });
    let outbox = Arc::new(FileOutbox::open(scratch.file("orders.outbox")).unwrap());
    let layer = OutboxLayer::new(outbox.clone(), RetryLayer::new());
    let operation = Operation::new();
    let req = http::Request::post(format!("http://{addr}/orders"))
        .extension(operation.clone())
        .body(Full::from("one espresso"))
        .unwrap();
    let res = layer.layer(service).oneshot(req).await.unwrap();
    assert_eq!(res.status(), 201);
    assert_eq!(outbox.pending(0, 10).await.unwrap(), []);
    let seen = log.take();
    assert_eq!(seen.len(), 2);
    for attempt in seen {
        assert_eq!(attempt.key(), Some(operation.key()));
        assert_eq!(attempt.body, "one espresso");
    }
}
