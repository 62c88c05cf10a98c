//! The time limit of a recovery before it sends a request.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_idempotency_client::{Operation, OutboxLayer, Outcome, RetryLayer};

use crate::{
    harness::{Reply, Server, post, status},
    outbox_memory::Memory,
};

/// Returns an outbox with a request whose response was lost, and its operation.
async fn outbox_with_lost_request() -> (Arc<Memory>, Operation) {
    let outbox = Arc::new(Memory::default());
    let retries = RetryLayer::new().with_max_attempts(1);
    let client = OutboxLayer::new(outbox.clone(), retries).layer(Server::new([Reply::Broken]));
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    assert!(client.oneshot(req).await.is_err());
    (outbox, operation)
}

#[tokio::test(start_paused = true)]
async fn recovery_fails_if_outbox_does_not_reply() {
    // A first step that is complete reads the outbox, and sends the request.
    for (method, has_first_step) in [("pending", false), ("pending", true), ("resume", false)] {
        let (outbox, _) = outbox_with_lost_request().await;
        let server = Server::new([status(201)]);
        let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server.clone());
        let mut recovery = client.recover();
        if has_first_step {
            let first = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
            assert!(first.unwrap().is_some());
        }
        outbox.delay(method, Duration::from_secs(3600));
        let before = Instant::now();
        let failed = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("did not reply before the deadline"), "{text}");
        assert_eq!(before.elapsed(), Duration::from_secs(30), "{method}");
        assert_eq!(server.take_log().len(), usize::from(has_first_step));
        outbox.delay(method, Duration::ZERO);
        let mut recovered = 0;
        let mut recovery = client.recover();
        while let Some(next) = recovery
            .next(|_: &mut Request<Full<Bytes>>| {})
            .await
            .unwrap()
        {
            assert_eq!(next.operation.outcome(), Outcome::Definite);
            recovered += 1;
        }
        assert_eq!(recovered, usize::from(!has_first_step), "{method}");
    }
}

/// The attempts have a full deadline, however long the outbox took.
#[tokio::test(start_paused = true)]
async fn slow_outbox_shortens_no_recovered_attempt() {
    let (outbox, _) = outbox_with_lost_request().await;
    let seconds = Duration::from_secs;
    let server = tower::service_fn(|_: Request<Full<Bytes>>| async {
        tokio::time::sleep(Duration::from_secs(25)).await;
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    outbox.delay("resume", seconds(25));
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
    let before = Instant::now();
    let recovered = client
        .recover()
        .next(|_: &mut Request<Full<Bytes>>| {})
        .await;
    assert_eq!(recovered.unwrap().unwrap().result.unwrap().status(), 200);
    assert_eq!(before.elapsed(), seconds(50));
    assert_eq!(outbox.keys(), [""; 0]);
}

/// Service that is never ready.
#[derive(Clone)]
struct Unready;

impl Service<Request<Full<Bytes>>> for Unready {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Full<Bytes>>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Pending
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        ready(Ok(Response::default()))
    }
}

#[tokio::test(start_paused = true)]
async fn recovery_ends_if_service_is_not_ready() {
    let (outbox, operation) = outbox_with_lost_request().await;
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(Unready);
    let before = Instant::now();
    let mut recovery = client.recover();
    let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert_eq!(before.elapsed(), Duration::from_secs(30));
    let recovered = recovered.unwrap().unwrap();
    assert_eq!(recovered.operation.attempts(), 0);
    let error = recovered.result.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(!error.is_expired());
    assert_eq!(error.operation().unwrap().key(), operation.key());
    assert_eq!(outbox.keys(), [operation.key()]);
    let next = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    assert!(next.unwrap().is_none());
}
