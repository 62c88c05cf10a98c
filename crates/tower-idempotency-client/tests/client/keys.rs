//! The key of each attempt.

use bytes::Bytes;
use http::{HeaderName, Method, Request};
use http_body_util::Full;
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_idempotency_client::{
    IdempotencyKeyLayer, Operation, Outcome, Protocol, Retry, RetryLayer,
};

use crate::harness::{Reply, Server, post, send, status};

fn keys(server: &Server) -> Vec<Option<String>> {
    let log = server.take_log();
    log.iter()
        .map(|sent| sent.key().map(str::to_owned))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn all_attempts_have_one_key() {
    let server = Server::new([status(500), Reply::Broken, status(201)]);
    let call = send(&RetryLayer::new(), &server).await;
    let key = Some(call.operation.key().to_owned());
    assert_eq!(keys(&server), [key.clone(), key.clone(), key]);
    assert_eq!(call.operation.attempts(), 3);
    assert!(call.operation.first_sent().is_some());
}

#[tokio::test(start_paused = true)]
async fn operations_of_layer_differ() {
    let server = Server::new([status(201)]);
    let client = RetryLayer::new().layer(server.clone());
    for _ in 0..2 {
        client.clone().oneshot(post("one espresso")).await.unwrap();
    }
    let keys = keys(&server);
    assert!(keys[0].is_some() && keys[1].is_some());
    assert_ne!(keys[0], keys[1]);
}

#[tokio::test(start_paused = true)]
async fn key_of_caller_stays() {
    for value in ["from-form-7", "\"quoted \\\" 7\""] {
        let server = Server::new([status(500), status(201)]);
        let mut req = post("one espresso");
        req.headers_mut()
            .insert("idempotency-key", value.parse().unwrap());
        let client = ServiceBuilder::new()
            .layer(RetryLayer::new())
            .layer(IdempotencyKeyLayer::new());
        client.service(server.clone()).oneshot(req).await.unwrap();
        assert_eq!(
            keys(&server),
            [Some(value.to_owned()), Some(value.to_owned())]
        );
    }
}

/// A server rejects several lines. Which of them counts elsewhere is unknown, so the request is not sent again.
#[tokio::test(start_paused = true)]
async fn several_key_lines_are_no_key() {
    let server = Server::new([status(500), status(201)]);
    let mut req = post("one espresso");
    req.headers_mut()
        .append("idempotency-key", "7".parse().unwrap());
    req.headers_mut()
        .append("idempotency-key", "8".parse().unwrap());
    let res = RetryLayer::new().layer(server.clone()).oneshot(req).await;
    assert_eq!(res.unwrap().status(), 500);
    assert_eq!(server.take_log().len(), 1);
}

/// The server may execute the request under another key than that of the operation.
#[tokio::test(start_paused = true)]
async fn unreadable_key_of_operation_is_not_sent() {
    let long = "x".repeat(300);
    for lines in [&["\"open", "8"][..], &["caf\u{e9}"], &[&long]] {
        let server = Server::new([status(201)]);
        let operation = Operation::new();
        let mut req = post("one espresso");
        for line in lines {
            req.headers_mut()
                .append("idempotency-key", line.parse().unwrap());
        }
        req.extensions_mut().insert(operation.clone());
        let error = RetryLayer::new().layer(server.clone()).oneshot(req).await;
        let error = error.unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
        assert_eq!(error.outcome(), Outcome::NotExecuted);
        assert_eq!(operation.attempts(), 0);
        assert_eq!(server.take_log().len(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_make_one_series() {
    let server = Server::new([status(500)]);
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new())
        .layer(IdempotencyKeyLayer::new())
        .layer(RetryLayer::new())
        .layer(RetryLayer::new())
        .service(server.clone());
    let res = client.oneshot(post("one espresso")).await.unwrap();
    assert_eq!(res.status(), 500);
    let keys = keys(&server);
    assert_eq!(keys.len(), 3);
    assert!(keys[0].is_some() && keys.iter().all(|key| *key == keys[0]));
}

#[tokio::test(start_paused = true)]
async fn stacked_layers_return_one_error() {
    let server = Server::new([Reply::Refused]);
    let client = RetryLayer::new().layer(RetryLayer::new().layer(server.clone()));
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let error = client.oneshot(req).await.unwrap_err();
    assert_eq!(server.take_log().len(), 3);
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(error.operation().unwrap().key(), operation.key());
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.is::<std::io::Error>(), "{source:?}");
}

#[tokio::test(start_paused = true)]
async fn safe_requests_are_retried_without_key() {
    for method in [
        "GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "REPORT", "SEARCH",
    ] {
        let server = Server::new([status(500), Reply::Broken, status(200)]);
        let mut req = post("");
        *req.method_mut() = Method::from_bytes(method.as_bytes()).unwrap();
        let res = RetryLayer::new().layer(server.clone()).oneshot(req).await;
        assert_eq!(res.unwrap().status(), 200, "{method}");
        assert_eq!(keys(&server), [None, None, None], "{method}");
    }
}

fn without_keys(server: &Server) -> Retry<Server> {
    let keys = IdempotencyKeyLayer::new().with_methods_where(|_| false);
    RetryLayer::new().with_keys(keys).layer(server.clone())
}

/// Without a key, only a request that was never sent is sent again.
#[tokio::test(start_paused = true)]
async fn unsafe_request_without_key_is_sent_once() {
    for failure in [
        Reply::Broken,
        status(500),
        status(503),
        status(429),
        status(408),
    ] {
        let server = Server::new([failure.clone(), status(200)]);
        let result = without_keys(&server).oneshot(post("one espresso")).await;
        assert_eq!(keys(&server), [None], "{failure:?}");
        if let Err(error) = result {
            assert_eq!(error.outcome(), Outcome::Unknown);
            assert!(error.operation().is_none());
        }
    }
    let server = Server::new([Reply::Refused, Reply::Refused, status(200)]);
    let res = without_keys(&server).oneshot(post("one espresso")).await;
    assert_eq!(res.unwrap().status(), 200);
    assert_eq!(keys(&server), [None, None, None]);
}

/// An operation of the caller requires a key, whatever the methods are.
#[tokio::test(start_paused = true)]
async fn operation_of_caller_sets_key() {
    let server = Server::new([status(201)]);
    let operation = Operation::with_key("order-7").unwrap();
    for method in [Method::PUT, Method::GET] {
        let mut req = post("one espresso");
        *req.method_mut() = method;
        req.extensions_mut().insert(operation.clone());
        without_keys(&server).oneshot(req).await.unwrap();
    }
    assert_eq!(keys(&server), [Some("order-7".to_owned()), None]);
}

#[tokio::test]
async fn protocol_decides_on_quotes() {
    let sent = async |protocol, key: &str| {
        let server = Server::new([status(201)]);
        let keys = IdempotencyKeyLayer::new()
            .with_protocol(protocol)
            .with_header(HeaderName::from_static("x-key"));
        let mut req = Request::post("/")
            .body(Full::<bytes::Bytes>::default())
            .unwrap();
        req.extensions_mut()
            .insert(Operation::with_key(key).unwrap());
        keys.layer(server.clone()).oneshot(req).await.unwrap();
        server.take_log()[0].headers["x-key"]
            .to_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!(sent(Protocol::Ietf, "7-a").await, "\"7-a\"");
    assert_eq!(sent(Protocol::Ietf, "a\"b").await, "\"a\\\"b\"");
    for protocol in [
        Protocol::TowerIdempotency,
        Protocol::Stripe,
        Protocol::Acp,
        Protocol::Idempo,
    ] {
        assert_eq!(sent(protocol, "7-a").await, "7-a");
    }
    for protocol in [Protocol::TowerIdempotency, Protocol::Idempo] {
        assert_eq!(sent(protocol, "a,b").await, "\"a,b\"");
    }
    assert_eq!(sent(Protocol::Stripe, "a,b").await, "a,b");
}

#[tokio::test]
async fn key_layer_alone_sets_key_of_each_request() {
    let server = Server::new([status(201)]);
    let layer = IdempotencyKeyLayer::new().with_operations(Operation::new_v7);
    let client = layer.layer(server.clone());
    client.clone().oneshot(post("one espresso")).await.unwrap();
    client
        .oneshot(
            Request::get("/")
                .body(Full::<bytes::Bytes>::default())
                .unwrap(),
        )
        .await
        .unwrap();
    let keys = keys(&server);
    assert_eq!(keys[0].as_ref().unwrap().as_bytes()[14], b'7');
    assert_eq!(keys[1], None);
}

/// The layer does not see the response, so it cannot report that nothing was executed.
#[tokio::test]
async fn key_layer_alone_leaves_outcome_unknown() {
    let operation = Operation::new();
    let client = IdempotencyKeyLayer::new().layer(Server::new([Reply::Refused]));
    for attempts in 1..=2 {
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        client.clone().oneshot(req).await.unwrap_err();
        assert_eq!(
            (operation.attempts(), operation.outcome()),
            (attempts, Outcome::Unknown)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn key_layer_outside_retries_counts_no_attempt() {
    let operation = Operation::new();
    let client = ServiceBuilder::new()
        .layer(IdempotencyKeyLayer::new())
        .layer(RetryLayer::new())
        .service(Server::new([Reply::Refused]));
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    client.oneshot(req).await.unwrap_err();
    assert_eq!(
        (operation.attempts(), operation.outcome()),
        (3, Outcome::NotExecuted)
    );
}

/// Policy that sends each request a second time after a failure, with its extensions.
#[derive(Clone)]
struct RetryOnce(bool);

impl<R, E> tower::retry::Policy<Request<Full<Bytes>>, http::Response<R>, E> for RetryOnce {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Full<Bytes>>,
        result: &mut Result<http::Response<R>, E>,
    ) -> Option<Self::Future> {
        let fails = !matches!(result, Ok(res) if res.status().is_success());
        (fails && std::mem::take(&mut self.0)).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, req: &Request<Full<Bytes>>) -> Option<Request<Full<Bytes>>> {
        Some(req.clone())
    }
}

/// Sends one operation through the key layer, a retrier that clones requests, and the layer.
async fn send_twice(server: Server, is_hanging_last: bool) -> Operation {
    let operation = Operation::new();
    let mut attempts = 0;
    let inner = tower::service_fn(move |req: Request<Full<Bytes>>| {
        attempts += 1;
        let hangs = is_hanging_last && attempts == 2;
        let server = server.clone();
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            server.oneshot(req).await
        }
    });
    let inner = std::sync::Arc::new(std::sync::Mutex::new(inner));
    let shared = tower::service_fn(move |req: Request<Full<Bytes>>| {
        tower::Service::call(&mut *inner.lock().unwrap(), req)
    });
    let client = ServiceBuilder::new()
        .layer(IdempotencyKeyLayer::new())
        .layer(tower::retry::RetryLayer::new(RetryOnce(true)))
        .layer(RetryLayer::new().with_max_attempts(1))
        .service(shared);
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let _ = client.oneshot(req).await;
    operation
}

/// Each clone of a request has the mark of the key layer, which counts once.
#[tokio::test(start_paused = true)]
async fn cloned_request_counts_each_attempt() {
    let rejected_last = Server::new([Reply::Broken, status(429)]);
    let operation = send_twice(rejected_last, false).await;
    assert_eq!(
        (operation.attempts(), operation.outcome()),
        (2, Outcome::Unknown)
    );
    let hanging_last = Server::new([Reply::Refused]);
    let operation = send_twice(hanging_last, true).await;
    assert_eq!(
        (operation.attempts(), operation.outcome()),
        (2, Outcome::Unknown)
    );
}

/// A layer that drops the extensions separates two series. The outer one trusts the outcome of the inner one, and not its
/// last response or error.
#[tokio::test(start_paused = true)]
async fn refused_last_attempt_of_inner_series_is_unknown() {
    for (script, outcome) in [
        (vec![Reply::Broken, Reply::Refused], Outcome::Unknown),
        (vec![Reply::Broken, status(401)], Outcome::Unknown),
        (vec![Reply::Broken, status(429)], Outcome::Unknown),
        (vec![Reply::Refused, Reply::Refused], Outcome::NotExecuted),
        (vec![Reply::Refused, status(401)], Outcome::NotExecuted),
        (vec![status(429), status(429)], Outcome::NotExecuted),
    ] {
        let server = Server::new(script);
        let client = ServiceBuilder::new()
            .layer(RetryLayer::new().with_max_attempts(1))
            .map_request(|mut req: Request<Full<Bytes>>| {
                req.extensions_mut().clear();
                req
            })
            .layer(RetryLayer::new().with_max_attempts(2))
            .service(server.clone());
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        let reported = match client.oneshot(req).await {
            Ok(res) => res.extensions().get::<Operation>().unwrap().outcome(),
            Err(error) => error.outcome(),
        };
        let attempts = keys(&server);
        assert_eq!(
            attempts,
            [
                Some(operation.key().to_owned()),
                Some(operation.key().to_owned())
            ]
        );
        assert_eq!((reported, operation.outcome()), (outcome, outcome));
    }
}

/// A third layer is between the two series, and sends each attempt of the outer one once.
#[tokio::test(start_paused = true)]
async fn stacked_layer_keeps_outcome_of_inner_series() {
    for (first, outcome) in [
        (Reply::Broken, Outcome::Unknown),
        (Reply::Refused, Outcome::NotExecuted),
    ] {
        let server = Server::new([first, Reply::Refused]);
        let client = ServiceBuilder::new()
            .layer(RetryLayer::new().with_max_attempts(1))
            .layer(RetryLayer::new())
            .map_request(|mut req: Request<Full<Bytes>>| {
                req.extensions_mut().clear();
                req
            })
            .layer(RetryLayer::new().with_max_attempts(2))
            .service(server.clone());
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        let error = client.oneshot(req).await.unwrap_err();
        assert_eq!(server.take_log().len(), 2);
        assert_eq!((error.outcome(), operation.outcome()), (outcome, outcome));
    }
}

#[tokio::test(start_paused = true)]
async fn header_and_operation_have_one_key() {
    let server = Server::new([status(201)]);
    for (protocol, value, is_same) in [
        (Protocol::TowerIdempotency, "order-7", true),
        (Protocol::TowerIdempotency, "\"order-7\"", true),
        (Protocol::TowerIdempotency, "order-8", false),
        (Protocol::Ietf, "\"order-7\"", true),
        (Protocol::Stripe, "order-7", true),
        (Protocol::Stripe, "\"order-7\"", false),
        (Protocol::Acp, "\"order-7\"", false),
        (Protocol::Idempo, "\"order-7\"", true),
    ] {
        let operation = Operation::with_key("order-7").unwrap();
        let mut req = post("one espresso");
        req.headers_mut()
            .insert("idempotency-key", value.parse().unwrap());
        req.extensions_mut().insert(operation.clone());
        let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
        let client = RetryLayer::new().with_keys(keys).layer(server.clone());
        let result = client.oneshot(req).await;
        assert_eq!(result.is_ok(), is_same, "{protocol:?} {value}");
        assert_eq!(server.take_log().len(), usize::from(is_same));
        if let Err(error) = result {
            assert!(error.to_string().contains("different keys"), "{error}");
            assert_eq!(error.outcome(), Outcome::NotExecuted);
        }
    }
}
