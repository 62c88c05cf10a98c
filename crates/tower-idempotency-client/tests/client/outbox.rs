//! The outbox layer: requests are stored before they are sent, and sent again by a recovery.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, atomic::Ordering},
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, header::AUTHORIZATION};
use http_body::{Body, Frame};
use http_body_util::Full;
use tests::scratch::Scratch;
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{
    Entry, FileOutbox, IdempotencyKeyLayer, Operation, Outbox, OutboxLayer, OutboxService, Outcome,
    Protocol, ProviderChoice, RetryLayer,
};

use crate::{
    harness::{Reply, Sent, Server, post, reply, status},
    outbox_contract::{check_recovery_ends, long_uri},
    outbox_memory::Memory,
};

const HOUR: Duration = Duration::from_secs(3600);

type Client<O = Memory> = OutboxService<Server, O>;

fn client(server: &Server) -> (Client, Arc<Memory>) {
    let outbox = Arc::new(Memory::default());
    (with(&outbox, RetryLayer::new(), server), outbox)
}

fn with<O: Outbox>(outbox: &Arc<O>, retries: RetryLayer, server: &Server) -> Client<O> {
    OutboxLayer::new(outbox.clone(), retries).layer(server.clone())
}

fn order(operation: &Operation) -> Request<Full<Bytes>> {
    let mut req = post("one espresso");
    req.headers_mut()
        .insert(AUTHORIZATION, HeaderValue::from_static("Bearer secret"));
    req.extensions_mut().insert(operation.clone());
    req
}

/// Sends an operation. Returns the status of the response, or `None` after an error, and the outcome.
async fn send<O: Outbox>(client: &Client<O>, operation: &Operation) -> (Option<u16>, Outcome) {
    let result = client.clone().oneshot(order(operation)).await;
    if let Err(error) = &result {
        assert_eq!(error.outcome(), operation.outcome(), "{error}");
    }
    let status = result.ok().map(|res| res.status().as_u16());
    (status, operation.outcome())
}

/// Recovers all entries. Returns the status and the outcome of each.
async fn recover<O: Outbox>(client: &Client<O>) -> Vec<(Option<u16>, Outcome)> {
    let mut recovery = client.recover();
    let mut all = Vec::new();
    while let Some(recovered) = recovery
        .next(|req: &mut Request<Full<Bytes>>| {
            let token = HeaderValue::from_static("Bearer new");
            req.headers_mut().insert(AUTHORIZATION, token);
        })
        .await
        .unwrap()
    {
        assert_eq!(recovered.entry.key(), recovered.operation.key());
        let outcome = recovered.operation.outcome();
        let result = recovered.result;
        if let Err(error) = &result {
            assert_eq!(error.outcome(), outcome);
        }
        all.push((result.ok().map(|res| res.status().as_u16()), outcome));
    }
    all
}

/// The server finds the entry in the outbox when the request arrives.
#[tokio::test]
async fn entry_is_stored_before_request_is_sent() {
    let outbox = Arc::new(Memory::default());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let server = {
        let (outbox, seen) = (outbox.clone(), seen.clone());
        tower::service_fn(move |_: Request<Full<Bytes>>| {
            seen.lock().unwrap().push(outbox.keys());
            std::future::ready(Ok::<_, std::io::Error>(http::Response::new(
                Full::<Bytes>::default(),
            )))
        })
    };
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
    let operation = Operation::new();
    client.oneshot(order(&operation)).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [[operation.key()]]);
    assert_eq!(outbox.keys(), [""; 0]);
    assert_eq!(operation.outcome(), Outcome::Definite);
}

/// The entry stays unless the outcome is definite, or no attempt was executed.
#[tokio::test(start_paused = true)]
async fn entry_follows_outcome() {
    let problem = [("content-type", "application/problem+json")];
    let unfinished =
        r#"{"type":"urn:tower-idempotency:problem:x","code":"unfinished-transaction"}"#;
    let unfinished = reply(500, &problem, unfinished);
    let replies: [(Reply, Outcome, usize); 9] = [
        (status(201), Outcome::Definite, 0),
        (status(402), Outcome::Definite, 0),
        (status(429), Outcome::NotExecuted, 0),
        (status(401), Outcome::NotExecuted, 0),
        (status(308), Outcome::NotExecuted, 0),
        (Reply::Refused, Outcome::NotExecuted, 0),
        (status(500), Outcome::Unknown, 1),
        (unfinished, Outcome::Unknown, 1),
        (Reply::Broken, Outcome::Unknown, 1),
    ];
    for (reply, outcome, left) in replies {
        let (client, outbox) = client(&Server::new([reply.clone()]));
        let operation = Operation::new();
        assert_eq!(send(&client, &operation).await.1, outcome, "{reply:?}");
        assert_eq!(outbox.keys().len(), left, "{reply:?}");
    }
}

/// The first attempt is executed, and the code of the 409 to the second one cannot be read.
#[tokio::test(start_paused = true)]
async fn unreadable_code_keeps_entry() {
    let headers = [
        ("content-type", "application/problem+json"),
        ("content-encoding", "gzip"),
    ];
    let server = Server::new([Reply::Broken, reply(409, &headers, "\u{1f}\u{8b}")]);
    let (client, outbox) = client(&server);
    let operation = Operation::new();
    assert_eq!(
        send(&client, &operation).await,
        (Some(409), Outcome::Unknown)
    );
    assert_eq!(outbox.keys(), [operation.key()]);
}

#[tokio::test(start_paused = true)]
async fn recovery_sends_same_request_under_same_key() {
    let layer = RetryLayer::new().with_max_attempts(1);
    let server = Server::new([Reply::Broken, status(201)]);
    let outbox = Arc::new(Memory::default());
    let operation = Operation::new().with_provider(7);
    let lost = with(&outbox, layer.clone(), &server);
    assert_eq!(send(&lost, &operation).await, (None, Outcome::Unknown));
    // Another process.
    let client = with(&outbox, layer, &server);
    let mut recovery = client.recover();
    let recovered = recovery
        .next(|req: &mut Request<Full<Bytes>>| {
            assert!(!req.headers().contains_key(AUTHORIZATION));
            let token = HeaderValue::from_static("Bearer new");
            req.headers_mut().insert(AUTHORIZATION, token);
        })
        .await
        .unwrap()
        .unwrap();
    assert_eq!(recovered.result.unwrap().status(), 201);
    assert_eq!(recovered.operation.provider(), Some(7));
    assert_eq!(recovered.operation.outcome(), Outcome::Definite);
    assert_eq!(outbox.keys(), [""; 0]);
    let next = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert!(next.unwrap().is_none());
    let log = server.take_log();
    assert_eq!(log.len(), 2);
    assert_eq!(log[0].key(), Some(operation.key()));
    assert_eq!(log[1].key(), Some(operation.key()));
    assert_eq!(log[0].uri, log[1].uri);
    assert_eq!(log[0].body, log[1].body);
    assert_eq!(log[0].headers[AUTHORIZATION], "Bearer secret");
    assert_eq!(log[1].headers[AUTHORIZATION], "Bearer new");
    let without_token = |at: usize| {
        let mut headers = log[at].headers.clone();
        headers.remove(AUTHORIZATION);
        headers
    };
    assert_eq!(without_token(0), without_token(1));
}

/// An operation that no attempt executed now stays, and its outcome is unknown: a later recovery sends it.
#[tokio::test(start_paused = true)]
async fn recovery_continues_after_failure() {
    let layer = RetryLayer::new().with_max_attempts(1);
    let server = Server::new([
        Reply::Broken,
        Reply::Broken,
        status(429),
        status(201),
        status(201),
    ]);
    let outbox = Arc::new(Memory::default());
    let client = with(&outbox, layer, &server);
    for _ in 0..2 {
        send(&client, &Operation::new()).await;
    }
    let results = recover(&client).await;
    let expected = [
        (Some(429), Outcome::Unknown),
        (Some(201), Outcome::Definite),
    ];
    assert_eq!(results, expected);
    assert_eq!(outbox.keys().len(), 1);
    assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite)]);
    assert_eq!(outbox.keys(), [""; 0]);
    assert_eq!(server.take_log().len(), 5);
}

/// A server deletes its record after 24 h. An older operation is reported, and nothing is sent.
#[tokio::test(start_paused = true)]
async fn expired_entry_is_reported_and_not_sent() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    for (age, sent) in [(25 * HOUR, 0), (22 * HOUR, 1)] {
        let at = SystemTime::now() - age;
        let operation = Operation::new().with_first_sent(at);
        let req = Request::post("http://api.example.com/orders").body(Bytes::new());
        let entry = Entry::new(&operation, &req.unwrap());
        outbox.store(&entry).await.unwrap();
        let mut recovery = client.recover();
        let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
        let recovered = recovered.unwrap().unwrap();
        assert_eq!(server.take_log().len(), sent);
        if sent == 0 {
            assert!(recovered.result.unwrap_err().is_expired());
            assert_eq!(recovered.operation.outcome(), Outcome::Unknown);
            assert_eq!(outbox.keys(), [operation.key()]);
            outbox.remove(operation.key()).await.unwrap();
        }
    }
}

/// The lifetime counts from the attempt of the process that died, also if the application sends the operation again itself.
#[tokio::test(start_paused = true)]
async fn stored_time_counts_for_new_call() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    let stored = Operation::with_key("order-7").unwrap();
    let stored = stored.with_first_sent(SystemTime::now() - 25 * HOUR);
    let entry = Entry::new(
        &stored,
        &post("one espresso").map(|_| "one espresso".into()),
    );
    outbox.store(&entry).await.unwrap();
    let again = Operation::with_key("order-7").unwrap();
    let error = client.clone().oneshot(order(&again)).await.unwrap_err();
    assert!(error.is_expired());
    assert_eq!(error.outcome(), Outcome::Unknown);
    // The key layer outside has counted an attempt that begins now.
    let keyed = IdempotencyKeyLayer::new().layer(client);
    let again = Operation::with_key("order-7").unwrap();
    let error = keyed.oneshot(order(&again)).await.unwrap_err();
    assert!(error.is_expired());
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(server.take_log().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn other_request_under_stored_key_is_not_sent() {
    let server = Server::new([Reply::Broken]);
    let (client, outbox) = client(&server);
    send(&client, &Operation::with_key("order-7").unwrap()).await;
    server.take_log();
    let operation = Operation::with_key("order-7").unwrap();
    let mut req = post("two espressos");
    req.extensions_mut().insert(operation.clone());
    let error = client.oneshot(req).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(source, "the outbox has another request under this key");
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), ["order-7"]);
}

/// The entry has the key that is on the wire, also if the caller has set it.
#[tokio::test(start_paused = true)]
async fn recovery_sends_key_of_first_request() {
    for (protocol, key) in [
        (Protocol::TowerIdempotency, "\"a,b\""),
        (Protocol::Ietf, "\"a,b\""),
        (Protocol::Stripe, "\"a,b\""),
        (Protocol::Acp, "\"a,b\""),
        // Forms that the client would not choose. A server may compare the bytes of the header.
        (Protocol::TowerIdempotency, "\"order-7\""),
        (Protocol::Ietf, "order-7"),
    ] {
        let server = Server::new([Reply::Broken, Reply::Broken, status(201)]);
        let outbox = Arc::new(Memory::default());
        let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
        let retries = RetryLayer::new().with_max_attempts(1).with_keys(keys);
        let client = with(&outbox, retries, &server);
        let mut req = post("one espresso");
        req.headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
        assert!(client.clone().oneshot(req).await.is_err());
        // The application sends the operation again without the header.
        let (_, entry) = outbox.pending(0, 1).await.unwrap().remove(0);
        let operation = Operation::with_key(entry.key()).unwrap();
        assert!(client.clone().oneshot(order(&operation)).await.is_err());
        assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite)]);
        let log = server.take_log();
        let keys: Vec<_> = log.iter().map(Sent::key).collect();
        assert_eq!(keys, [Some(key); 3], "{protocol:?}");
    }
}

/// Returns a client whose calls make this number of attempts, with these keys.
fn with_keys(
    outbox: &Arc<Memory>,
    attempts: u32,
    keys: IdempotencyKeyLayer,
    server: &Server,
) -> Client {
    let retries = RetryLayer::new().with_max_attempts(attempts);
    with(outbox, retries.with_keys(keys), server)
}

/// The next process has another protocol. A server that compares the bytes of the header would execute another key again.
#[tokio::test(start_paused = true)]
async fn stored_key_header_outlives_protocol() {
    let (quoted, comma) = (Some("\"order-7\""), "a,b");
    for (line, key, protocols) in [
        (None, "order-7", [Protocol::Ietf, Protocol::Stripe]),
        (None, "order-7", [Protocol::Stripe, Protocol::Ietf]),
        (None, comma, [Protocol::TowerIdempotency, Protocol::Stripe]),
        (None, comma, [Protocol::Acp, Protocol::TowerIdempotency]),
        // The second protocol reads the line of the caller as another key.
        (
            quoted,
            "order-7",
            [Protocol::TowerIdempotency, Protocol::Stripe],
        ),
        (
            quoted,
            "\"order-7\"",
            [Protocol::Stripe, Protocol::TowerIdempotency],
        ),
    ] {
        for is_called in [false, true] {
            let server = Server::new([Reply::Broken, status(503), status(201)]);
            let outbox = Arc::new(Memory::default());
            let [first, second] = protocols.map(|protocol| {
                let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
                let attempts = if protocol == protocols[0] { 1 } else { 2 };
                with_keys(&outbox, attempts, keys, &server)
            });
            let operation = Operation::with_key(key).unwrap();
            let mut req = order(&operation);
            if let Some(line) = line {
                req.headers_mut()
                    .insert("idempotency-key", line.parse().unwrap());
            }
            assert!(first.oneshot(req).await.is_err());
            let results = match is_called {
                true => vec![send(&second, &Operation::with_key(key).unwrap()).await],
                false => recover(&second).await,
            };
            let log = server.take_log();
            let keys: Vec<_> = log.iter().map(Sent::key).collect();
            assert_eq!(keys, [log[0].key(); 3], "{protocols:?} {is_called}");
            assert_eq!(results, [(Some(201), Outcome::Definite)]);
        }
    }
}

/// The next process has another key header, also in an inner layer. A server that reads both would find two keys.
#[tokio::test(start_paused = true)]
async fn stored_key_header_outlives_name() {
    for is_called in [false, true] {
        let server = Server::new([Reply::Broken, status(503), status(201)]);
        let outbox = Arc::new(Memory::default());
        let operation = || Operation::with_key("order-7").unwrap();
        let first = with_keys(&outbox, 1, IdempotencyKeyLayer::new(), &server);
        send(&first, &operation()).await;
        let keys = IdempotencyKeyLayer::new().with_header(HeaderName::from_static("x-key"));
        let retries = RetryLayer::new().with_keys(keys.clone());
        let second = OutboxLayer::new(outbox.clone(), retries).layer(keys.layer(server.clone()));
        let result = if is_called {
            second.oneshot(order(&operation())).await
        } else {
            let mut recovery = second.recover();
            let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
            recovered.unwrap().unwrap().result
        };
        assert_eq!(result.unwrap().status(), 201);
        let log = server.take_log();
        assert_eq!(log.len(), 3);
        for sent in log {
            assert_eq!(sent.key(), Some("order-7"));
            assert!(!sent.headers.contains_key("x-key"), "{is_called}");
        }
    }
}

/// An inner layer sets a second header. The outbox stores that of its own layer.
#[tokio::test(start_paused = true)]
async fn stored_key_header_replaces_no_other_header() {
    let server = Server::new([Reply::Broken, status(201)]);
    let outbox = Arc::new(Memory::default());
    let inner = IdempotencyKeyLayer::new().with_header(HeaderName::from_static("x-key"));
    let retries = RetryLayer::new().with_max_attempts(1);
    let client = OutboxLayer::new(outbox, retries).layer(inner.layer(server.clone()));
    let operation = Operation::with_key("order-7").unwrap();
    client.clone().oneshot(order(&operation)).await.unwrap_err();
    let mut recovery = client.recover();
    let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert_eq!(recovered.unwrap().unwrap().result.unwrap().status(), 201);
    let log = server.take_log();
    assert_eq!(log.len(), 2);
    for sent in log {
        assert_eq!(sent.key(), Some("order-7"));
        assert_eq!(sent.headers["x-key"], "order-7");
    }
}

/// A recovery that changes the key header sends nothing, because the server may have executed the stored key.
#[tokio::test(start_paused = true)]
async fn recovery_with_other_key_is_not_sent() {
    let server = Server::new([Reply::Broken]);
    let (client, outbox) = client(&server);
    send(&client, &Operation::with_key("order-7").unwrap()).await;
    server.take_log();
    let mut recovery = client.recover();
    let recovered = recovery.next(|req: &mut Request<Full<Bytes>>| {
        req.headers_mut()
            .insert("idempotency-key", "sdk-1".parse().unwrap());
    });
    let error = recovered.await.unwrap().unwrap().result.unwrap_err();
    assert!(error.to_string().contains("different keys"), "{error}");
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), ["order-7"]);
}

/// The next process has another key header. A change of the key or of its operation must not reach the server.
#[tokio::test(start_paused = true)]
async fn recovery_with_renamed_key_keeps_key() {
    fn set(req: &mut Request<Full<Bytes>>, name: &'static str, key: &'static str) {
        req.headers_mut()
            .insert(name, HeaderValue::from_static(key));
    }
    let changes: [fn(&mut Request<Full<Bytes>>); 4] = [
        |req| set(req, "idempotency-key", "sdk-1"),
        |req| drop(req.headers_mut().remove("idempotency-key")),
        |req| set(req, "x-key", "order-7"),
        |req| {
            let other = Operation::with_key("sdk-1").unwrap();
            req.extensions_mut().insert(other);
        },
    ];
    for change in changes {
        let server = Server::new([Reply::Broken]);
        let outbox = Arc::new(Memory::default());
        let first = with_keys(&outbox, 1, IdempotencyKeyLayer::new(), &server);
        send(&first, &Operation::with_key("order-7").unwrap()).await;
        server.take_log();
        let keys = IdempotencyKeyLayer::new().with_header(HeaderName::from_static("x-key"));
        let mut recovery = with_keys(&outbox, 1, keys, &server).recover();
        let recovered = recovery.next(change).await.unwrap().unwrap();
        let error = recovered.result.unwrap_err();
        assert!(error.to_string().contains("different keys"), "{error}");
        assert_eq!(server.take_log().len(), 0);
        assert_eq!(outbox.keys(), ["order-7"]);
    }
}

/// The server may execute each request with a key that the client cannot read, so a recovery has to know it.
#[tokio::test(start_paused = true)]
async fn request_with_unreadable_key_is_not_sent() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    let mut req = post("one espresso");
    let key = "x".repeat(300);
    req.headers_mut()
        .insert("idempotency-key", key.parse().unwrap());
    let error = client.clone().oneshot(req.clone()).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        source,
        "a request whose key the client cannot read cannot be stored"
    );
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [""; 0]);
    // A safe request has no effect.
    *req.method_mut() = http::Method::GET;
    assert_eq!(client.oneshot(req).await.unwrap().status(), 201);
}

/// A recovery could not read the entry.
#[tokio::test(start_paused = true)]
async fn request_with_long_url_is_not_sent() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    let operation = Operation::new();
    let mut req = order(&operation);
    *req.uri_mut() = long_uri();
    let error = client.oneshot(req).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        source,
        "an outbox cannot read this request once it is stored, for example because its URL is too long"
    );
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [""; 0]);
}

/// The body of the second attempt differs from that of the first one, which may have been executed.
#[tokio::test(start_paused = true)]
async fn reused_key_keeps_resumed_entry() {
    let headers = [("content-type", "application/problem+json")];
    let reused = reply(422, &headers, r#"{"code":"key-reused"}"#);
    let server = Server::new([Reply::Broken, reused]);
    let outbox = Arc::new(Memory::default());
    let client = with(&outbox, RetryLayer::new().with_max_attempts(1), &server);
    let operation = Operation::new();
    assert_eq!(send(&client, &operation).await, (None, Outcome::Unknown));
    assert_eq!(recover(&client).await, [(Some(422), Outcome::Unknown)]);
    assert_eq!(outbox.keys(), [operation.key()]);
}

/// A server may compare these headers with those of the first attempt.
#[tokio::test(start_paused = true)]
async fn recovered_request_has_compared_headers() {
    let names = [
        "host",
        "content-range",
        "if-match",
        "content-digest",
        "destination",
        "x-http-method",
        "x-http-method-override",
        "paypal-auth-assertion",
        "x-amz-target",
        "soapaction",
        // A server may read it as `X-Tenant-Id`.
        "x_tenant_id",
        // Those with which a server of gRPC reads the message and encodes its response.
        "grpc-accept-encoding",
        "grpc-encoding",
        "te",
    ];
    let server = Server::new([Reply::Broken, status(201)]);
    let outbox = Arc::new(Memory::default());
    let client = with(&outbox, RetryLayer::new().with_max_attempts(1), &server);
    let mut req = order(&Operation::new());
    for name in names {
        let value = HeaderValue::from_str(&format!("value of {name}")).unwrap();
        req.headers_mut()
            .insert(HeaderName::from_static(name), value);
    }
    assert!(client.clone().oneshot(req).await.is_err());
    assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite)]);
    let log = server.take_log();
    for name in names {
        assert_eq!(log[0].headers.get(name), log[1].headers.get(name), "{name}");
        assert!(log[1].headers.contains_key(name), "{name}");
    }
}

/// Entries have their bodies.
#[tokio::test(start_paused = true)]
async fn recovery_reads_at_most_eight_entries() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    for _ in 0..30 {
        let entry = Entry::new(
            &Operation::new(),
            &post("one espresso").map(|_| "one espresso".into()),
        );
        outbox.store(&entry).await.unwrap();
    }
    assert_eq!(recover(&client).await.len(), 30);
    let read = outbox.read.load(Ordering::Relaxed);
    assert!(read <= 8, "{read}");
}

/// A key that an SDK sets by default is not that of the operation. A recovery would send another key.
#[tokio::test(start_paused = true)]
async fn key_header_of_other_operation_fails_call() {
    let server = Server::new([Reply::Broken]);
    let (client, outbox) = client(&server);
    let operation = Operation::with_key("order-7").unwrap();
    let mut req = order(&operation);
    req.headers_mut()
        .insert("idempotency-key", "sdk-1".parse().unwrap());
    let error = client.oneshot(req).await.unwrap_err();
    assert!(error.to_string().contains("different keys"), "{error}");
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [""; 0]);
}

/// A request that the outbox did not store is not sent, and may be stored nevertheless.
#[tokio::test(start_paused = true)]
async fn failed_outbox_sends_nothing() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    outbox.fail(Some("store"));
    let operation = Operation::new();
    assert_eq!(send(&client, &operation).await, (None, Outcome::Unknown));
    outbox.fail(None);
    outbox.hangs.store(1, Ordering::Relaxed);
    let operation = Operation::new();
    let error = client.oneshot(order(&operation)).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        source,
        "the outbox did not reply before the deadline of the call"
    );
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(server.take_log().len(), 0);
}

/// The deadline counts for the whole call: storage, attempts and removal.
#[tokio::test(start_paused = true)]
async fn deadline_includes_calls_of_outbox() {
    let seconds = Duration::from_secs;
    for (delays, status, expected, entries, end) in [
        (
            [("store", 20), ("remove", 0)],
            201,
            Outcome::Definite,
            0,
            25,
        ),
        (
            [("store", 20), ("remove", 90)],
            201,
            Outcome::Definite,
            1,
            30,
        ),
        (
            [("store", 20), ("discard", 90)],
            401,
            Outcome::Unknown,
            1,
            30,
        ),
        ([("store", 27), ("remove", 0)], 201, Outcome::Unknown, 1, 30),
        // The request was stored at the deadline, and not sent. It is too late for a discard.
        ([("store", 30), ("remove", 0)], 201, Outcome::Unknown, 1, 30),
        ([("store", 90), ("remove", 0)], 201, Outcome::Unknown, 0, 30),
    ] {
        let outbox = Arc::new(Memory::default());
        for (method, delay) in delays {
            outbox.delay(method, seconds(delay));
        }
        let server = tower::service_fn(move |_: Request<Full<Bytes>>| async move {
            tokio::time::sleep(seconds(5)).await;
            let res = http::Response::builder().status(status);
            Ok::<_, std::io::Error>(res.body(Full::<Bytes>::default()).unwrap())
        });
        let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
        let operation = Operation::new();
        let before = tokio::time::Instant::now();
        let _ = client.oneshot(order(&operation)).await;
        let elapsed = before.elapsed();
        assert_eq!(elapsed, seconds(end), "{delays:?}");
        assert_eq!(operation.outcome(), expected, "{delays:?}");
        assert_eq!(outbox.keys().len(), entries, "{delays:?}");
        let attempts = u32::from(delays[0].1 < 30);
        assert_eq!(operation.attempts(), attempts, "{delays:?}");
    }
}

/// The copy of a body that is a stream may never end. Nothing was stored, and nothing was sent.
#[tokio::test(start_paused = true)]
async fn deadline_includes_copy_of_body() {
    let server = Server::new([status(201)]);
    let outbox = Arc::new(Memory::default());
    let retries = RetryLayer::new().with_body_clone(|_: &Stalled| Some(Stalled));
    let operation = Operation::new();
    let req = Request::post("http://api.example.com/orders")
        .extension(operation.clone())
        .body(Stalled)
        .unwrap();
    let before = tokio::time::Instant::now();
    let call = with(&outbox, retries, &server).oneshot(req);
    let error = tokio::time::timeout(HOUR, call).await.unwrap().unwrap_err();
    assert_eq!(before.elapsed(), Duration::from_secs(30));
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(
        source,
        "the body did not end before the deadline of the call"
    );
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [""; 0]);
}

/// A body that never has data and never ends.
struct Stalled;

impl Body for Stalled {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Pending
    }
}

/// An entry that could not be removed is sent again, and its outcome is never "not executed".
#[tokio::test(start_paused = true)]
async fn failed_removal_leaves_entry() {
    let server = Server::new([status(201), status(401), status(201), status(201)]);
    let (client, outbox) = client(&server);
    outbox.fail(Some("remove"));
    let operation = Operation::new();
    assert_eq!(
        send(&client, &operation).await,
        (Some(201), Outcome::Definite)
    );
    outbox.fail(Some("discard"));
    let operation = Operation::new();
    assert_eq!(
        send(&client, &operation).await,
        (Some(401), Outcome::Unknown)
    );
    outbox.fail(None);
    assert_eq!(outbox.keys().len(), 2);
    assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite); 2]);
    assert_eq!(outbox.keys(), [""; 0]);
}

/// Two calls of one operation: the first one may not discard the entry that the second one needs.
#[tokio::test(start_paused = true)]
async fn rejected_call_keeps_entry_of_other_call() {
    let server = Server::new([status(401), Reply::Broken]);
    let (client, outbox) = client(&server);
    let [first, second] = ["order-7"; 2].map(|key| Operation::with_key(key).unwrap());
    // The second call stores its request while the first one waits for its response.
    let resumed = outbox.clone();
    let slow = server.clone();
    let inner = tower::service_fn(move |req: Request<Full<Bytes>>| {
        let (resumed, slow) = (resumed.clone(), slow.clone());
        async move {
            let res = slow.oneshot(req).await;
            let now = SystemTime::now();
            resumed.resume("order-7", now, None).await.unwrap();
            res
        }
    });
    let late = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(inner);
    let res = late.oneshot(order(&first)).await.unwrap();
    assert_eq!(res.status(), 401);
    assert_eq!(first.outcome(), Outcome::Unknown);
    assert_eq!(outbox.keys(), ["order-7"]);
    assert_eq!(send(&client, &second).await, (None, Outcome::Unknown));
    assert_eq!(outbox.keys(), ["order-7"]);
}

/// A call that is dropped at any point leaves an unknown outcome once its entry may be stored.
#[tokio::test(start_paused = true)]
async fn dropped_call_leaves_entry_and_unknown_outcome() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    outbox.hangs.store(1, Ordering::Relaxed);
    let operation = Operation::new();
    let mut call = Box::pin(client.clone().oneshot(order(&operation)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(call.as_mut().poll(&mut cx), Poll::Pending));
    drop(call);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    // A call that waits to retry after a rejection.
    outbox.hangs.store(0, Ordering::Relaxed);
    let server = Server::new([reply(429, &[("retry-after", "5")], "")]);
    let client = with(&outbox, RetryLayer::new(), &server);
    let operation = Operation::new();
    let call = client.oneshot(order(&operation));
    assert!(
        tokio::time::timeout(Duration::from_millis(1), call)
            .await
            .is_err()
    );
    assert_eq!(server.take_log().len(), 1);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(outbox.keys(), [operation.key()]);
}

/// The caller of a call that is dropped during the removal has no response. A retry gets it.
#[tokio::test(start_paused = true)]
async fn call_dropped_during_removal_loses_response() {
    for (reply, method, outcome) in [
        (status(201), "remove", Outcome::ResponseLost),
        (status(401), "discard", Outcome::Unknown),
    ] {
        let (client, outbox) = client(&Server::new([reply]));
        outbox.delay(method, Duration::from_secs(90));
        let operation = Operation::new();
        let call = client.oneshot(order(&operation));
        let timeout = tokio::time::timeout(Duration::from_secs(1), call);
        assert!(timeout.await.is_err());
        assert_eq!(operation.outcome(), outcome, "{method}");
        assert!(!operation.outcome().can_delete_key());
    }
    // The other call of the operation has its response.
    let (client, outbox) = client(&Server::new([status(201)]));
    let operation = Operation::new();
    outbox.hangs.store(1, Ordering::Relaxed);
    let mut hanging = Box::pin(client.clone().oneshot(order(&operation)));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(hanging.as_mut().poll(&mut cx).is_pending());
    outbox.hangs.store(0, Ordering::Relaxed);
    client.oneshot(order(&operation)).await.unwrap();
    drop(hanging);
    assert_eq!(operation.outcome(), Outcome::Definite);
}

#[tokio::test(start_paused = true)]
async fn manual_removal_keeps_entry() {
    let server = Server::new([status(201), status(201), status(401)]);
    let outbox = Arc::new(Memory::default());
    let layer = OutboxLayer::new(outbox.clone(), RetryLayer::new()).with_manual_removal();
    let client = layer.layer(server.clone());
    let operation = Operation::new();
    assert_eq!(
        send(&client, &operation).await,
        (Some(201), Outcome::Definite)
    );
    assert_eq!(outbox.keys(), [operation.key()]);
    // The process died before it stored the response: it gets the replay.
    assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite)]);
    outbox.remove(operation.key()).await.unwrap();
    let rejected = Operation::new();
    assert_eq!(
        send(&client, &rejected).await,
        (Some(401), Outcome::NotExecuted)
    );
    assert_eq!(outbox.keys(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn stream_and_stacked_layer_are_errors() {
    let server = Server::new([status(201)]);
    let (client, outbox) = client(&server);
    let operation = Operation::new();
    let (_sender, stream) = http_body_util::channel::Channel::<Bytes>::new(1);
    let req = Request::post("http://api.example.com/orders")
        .extension(operation.clone())
        .body(stream)
        .unwrap();
    let error = client.clone().oneshot(req).await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    let text = "a body that cannot be copied cannot be stored: \
        set `with_body_clone`, or use a body such as `Full<Bytes>`";
    assert_eq!(source, text);
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    let stacked = RetryLayer::new().layer(client);
    let operation = Operation::new();
    let error = stacked.oneshot(order(&operation)).await.unwrap_err();
    let text =
        "a RetryLayer outside of an OutboxLayer would store each attempt: remove the RetryLayer";
    assert!(format!("{error:?}").contains(text));
    assert_eq!(operation.outcome(), Outcome::NotExecuted);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [""; 0]);
}

/// A request without a key, and one with a safe method, are not stored.
#[tokio::test(start_paused = true)]
async fn request_without_key_is_sent_and_not_stored() {
    let server = Server::new([status(200)]);
    let (client, outbox) = client(&server);
    outbox.fail(Some("store"));
    let req = Request::get("http://api.example.com/orders/7").body(Full::<Bytes>::default());
    let res = client.clone().oneshot(req.unwrap()).await.unwrap();
    assert_eq!(res.status(), 200);
    let mut req = Request::get("http://api.example.com/orders/7")
        .body(Full::<Bytes>::default())
        .unwrap();
    req.extensions_mut().insert(Operation::new());
    assert_eq!(client.oneshot(req).await.unwrap().status(), 200);
    assert_eq!(server.take_log().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn headers_are_stored_by_name() {
    let server = Server::new([Reply::Broken]);
    let outbox = Arc::new(Memory::default());
    let layer = OutboxLayer::new(outbox.clone(), RetryLayer::new().with_max_attempts(1))
        .with_headers([HeaderName::from_static("x-shard")]);
    let mut req = order(&Operation::new());
    for name in ["x-shard", "x-tenant-id", "x-trace", "cookie"] {
        let value = HeaderValue::from_static("7");
        req.headers_mut()
            .insert(HeaderName::from_static(name), value);
    }
    assert!(layer.layer(server).oneshot(req).await.is_err());
    let (_, entry) = outbox.pending(0, 1).await.unwrap().remove(0);
    let mut names: Vec<_> = entry.headers().keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let expected = ["content-type", "idempotency-key", "x-shard", "x-tenant-id"];
    assert_eq!(names, expected);
}

/// The process dies after one of two providers has executed the request. The recovery sends nothing to the other one.
#[tokio::test(start_paused = true)]
async fn recovery_goes_to_provider_of_first_attempt() {
    let providers = Providers::default();
    let operation = Operation::new();
    let dead = providers.process(3, false).oneshot(order(&operation)).await;
    assert!(dead.is_err());
    assert_eq!(operation.provider(), Some(3));
    let mut recovery = providers.process(8, true).recover();
    let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert!(recovered.unwrap().unwrap().result.is_ok());
    assert_eq!(providers.take_effects(), [3, 3]);
}

/// The same if the application of the next process sends the operation itself. It may not choose a provider of its own.
#[tokio::test(start_paused = true)]
async fn new_call_goes_to_provider_of_first_attempt() {
    let providers = Providers::default();
    let again = || Operation::with_key("order-7").unwrap();
    let dead = providers.process(3, false).oneshot(order(&again())).await;
    assert!(dead.is_err());
    let other = again().with_provider(8);
    let error = providers.process(8, true).oneshot(order(&other)).await;
    let error = format!("{:?}", error.unwrap_err());
    let text = "the outbox has another provider for this operation";
    assert!(error.contains(text), "{error}");
    assert_eq!(other.outcome(), Outcome::Unknown);
    let operation = again();
    let res = providers.process(8, true).oneshot(order(&operation)).await;
    assert!(res.is_ok());
    assert_eq!(operation.provider(), Some(3));
    assert_eq!(providers.take_effects(), [3, 3]);
}

/// The application stored the entry in a transaction, before a provider was chosen. A call or a recovery sends it first.
#[tokio::test(start_paused = true)]
async fn entry_stored_in_advance_keeps_first_provider() {
    for is_recovered in [false, true] {
        let providers = Providers::default();
        let operation = Operation::new();
        let req = post("one espresso").map(|_| "one espresso".into());
        let entry = Entry::new(&operation, &req);
        providers.outbox.store(&entry).await.unwrap();
        let dead = providers.process(3, false);
        if is_recovered {
            let mut recovery = dead.recover();
            let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
            assert!(recovered.unwrap().unwrap().result.is_err());
        } else {
            assert!(dead.oneshot(order(&operation)).await.is_err());
        }
        let mut recovery = providers.process(8, true).recover();
        let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
        assert!(recovered.unwrap().unwrap().result.is_ok());
        assert_eq!(providers.take_effects(), [3, 3], "{is_recovered}");
    }
}

/// Processes with one outbox, and the providers that executed their requests.
#[derive(Default)]
struct Providers {
    outbox: Arc<Memory>,
    effects: Arc<Mutex<Vec<u64>>>,
}

impl Providers {
    fn take_effects(&self) -> Vec<u64> {
        std::mem::take(&mut self.effects.lock().unwrap())
    }

    /// Returns the client of a process that sees one healthy provider. If it does not work, each response is lost.
    fn process(&self, healthy: u64, works: bool) -> OutboxService<Picker, Memory> {
        let effects = self.effects.clone();
        let picker = tower::service_fn(move |req: Request<Full<Bytes>>| {
            let provider = ProviderChoice::of(&req).choose(|| healthy);
            effects.lock().unwrap().push(provider);
            std::future::ready(match works {
                true => Ok(http::Response::new(Full::<Bytes>::default())),
                false => Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)),
            })
        });
        let retries = RetryLayer::new().with_max_attempts(1);
        OutboxLayer::new(self.outbox.clone(), retries)
            .with_providers(move || healthy)
            .layer(Picker::new(picker))
    }
}

type Picker =
    tower::util::BoxCloneService<Request<Full<Bytes>>, http::Response<Full<Bytes>>, std::io::Error>;

#[tokio::test(start_paused = true)]
async fn recovery_ends_while_entries_are_stored() {
    check_recovery_ends(Memory::default()).await;
}

/// A failure of the outbox ends one step of a recovery. The next step continues.
#[tokio::test(start_paused = true)]
async fn recovery_reports_failed_outbox() {
    let server = Server::new([Reply::Broken, Reply::Broken, status(201)]);
    let outbox = Arc::new(Memory::default());
    let client = with(&outbox, RetryLayer::new().with_max_attempts(1), &server);
    for _ in 0..2 {
        send(&client, &Operation::new()).await;
    }
    let mut recovery = client.recover();
    outbox.fail(Some("resume"));
    let failed = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    let text = failed.unwrap_err().to_string();
    assert_eq!(text, "the storage of the outbox failed: disk full");
    outbox.fail(None);
    let next = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert_eq!(next.unwrap().unwrap().result.unwrap().status(), 201);
    assert_eq!(outbox.keys().len(), 1);
}

/// The same with a file: a process that dies after its request was sent.
#[tokio::test]
async fn file_outbox_recovers_operation() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let layer = RetryLayer::new().with_max_attempts(1);
    let server = Server::new([Reply::Broken, reply(201, &[], "order 7")]);
    let operation = Operation::new();
    let outbox = Arc::new(FileOutbox::open(&path).unwrap());
    let lost = with(&outbox, layer.clone(), &server);
    assert_eq!(send(&lost, &operation).await, (None, Outcome::Unknown));
    // The file as a process finds it that starts after a kill.
    let copy = scratch.file("copy.outbox");
    std::fs::copy(&path, &copy).unwrap();
    let outbox = Arc::new(FileOutbox::open(&copy).unwrap());
    let client = with(&outbox, layer, &server);
    assert_eq!(recover(&client).await, [(Some(201), Outcome::Definite)]);
    assert_eq!(recover(&client).await, []);
    let keys: Vec<_> = server.take_log();
    assert_eq!(keys[0].key(), keys[1].key());
}
