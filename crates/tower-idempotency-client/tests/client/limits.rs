//! The limits of a call: attempts, deadline, cancellation and readiness.

use std::{
    convert::Infallible,
    future::{pending, ready},
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency_client::{Operation, Outcome, RetryLayer};

use crate::harness::{Reply, Server, post, send, status};

#[tokio::test(start_paused = true)]
async fn call_ends_after_last_attempt() {
    for (attempts, expected) in [(0, 1), (1, 1), (2, 2), (5, 5)] {
        let server = Server::new([status(500)]);
        let call = send(&RetryLayer::new().with_max_attempts(attempts), &server).await;
        assert_eq!(
            (call.status(), call.outcome()),
            (Some(500), Outcome::Unknown)
        );
        assert_eq!(server.take_log().len(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn refused_connections_are_not_executed() {
    let call = send(&RetryLayer::new(), &Server::new([Reply::Refused])).await;
    let error = call.result.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert!(!error.is_expired());
    let text = error.to_string();
    assert!(text.ends_with("the operation was not executed"), "{text}");
    assert!(
        !text.contains(call.operation.key())
            && !format!("{error:?}").contains(call.operation.key())
    );
}

/// A hanging attempt ends with the deadline, the first one as well as a later one.
#[tokio::test(start_paused = true)]
async fn deadline_cancels_attempt_in_flight() {
    for failures in [0, 1] {
        let mut left = failures;
        let server = service_fn(move |_: Request<Full<Bytes>>| {
            let hangs = left == 0;
            left -= i32::from(!hangs);
            async move {
                if hangs {
                    pending::<()>().await;
                }
                let mut res = Response::new(Full::<Bytes>::default());
                *res.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                Ok::<_, Infallible>(res)
            }
        });
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        let before = Instant::now();
        let error = RetryLayer::new()
            .layer(server)
            .oneshot(req)
            .await
            .unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown);
        assert_eq!(before.elapsed(), Duration::from_secs(30));
        assert!(error.to_string().starts_with("deadline"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn deadline_of_zero_sends_nothing() {
    let server = Server::new([status(201)]);
    let call = send(&RetryLayer::new().with_deadline(Duration::ZERO), &server).await;
    let error = call.result.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert!(error.to_string().starts_with("deadline"), "{error}");
    assert_eq!(call.operation.attempts(), 0);
    assert_eq!(server.take_log().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn cancelled_call_leaves_outcome_unknown() {
    let server = service_fn(|_: Request<Full<Bytes>>| {
        pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let call = RetryLayer::new().layer(server).oneshot(req);
    assert!(
        tokio::time::timeout(Duration::from_secs(1), call)
            .await
            .is_err()
    );
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert!(!operation.outcome().can_delete_key());
}

/// Service that accepts one request after each readiness. Its clones are not ready.
struct OneAtATime {
    is_ready: bool,
    polls: u32,
}

impl Clone for OneAtATime {
    fn clone(&self) -> Self {
        Self {
            is_ready: false,
            polls: 0,
        }
    }
}

impl Service<Request<Full<Bytes>>> for OneAtATime {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.polls += 1;
        if self.polls.is_multiple_of(2) {
            self.is_ready = true;
            Poll::Ready(Ok(()))
        } else {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.is_ready),
            "called without readiness"
        );
        let mut res = Response::new(Full::<Bytes>::default());
        *res.status_mut() = StatusCode::BAD_GATEWAY;
        ready(Ok(res))
    }
}

#[tokio::test(start_paused = true)]
async fn each_attempt_waits_for_readiness() {
    let service = OneAtATime {
        is_ready: false,
        polls: 0,
    };
    let mut client = RetryLayer::new().layer(service);
    for _ in 0..2 {
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        let res = client.ready().await.unwrap().call(req).await.unwrap();
        assert_eq!(res.status(), 502);
        assert_eq!(operation.attempts(), 3);
    }
}

/// Service that fails when it is polled for readiness a second time.
#[derive(Clone)]
struct ReadyOnce(bool);

impl Service<Request<Full<Bytes>>> for ReadyOnce {
    type Response = Response<Full<Bytes>>;
    type Error = std::io::Error;
    type Future = std::future::Ready<std::io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if std::mem::replace(&mut self.0, true) {
            return Poll::Ready(Err(std::io::ErrorKind::BrokenPipe.into()));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        ready(Err(std::io::ErrorKind::ConnectionReset.into()))
    }
}

#[tokio::test(start_paused = true)]
async fn failed_readiness_ends_call() {
    // Another process may have sent the operation. An outer series knows that this call sent nothing.
    let unready = RetryLayer::new().layer(ReadyOnce(true));
    let operation = Operation::new().with_first_sent(SystemTime::now());
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let error = unready.clone().oneshot(req).await.unwrap_err();
    assert_eq!(
        (error.outcome(), operation.outcome()),
        (Outcome::Unknown, Outcome::Unknown)
    );
    assert!(error.operation().is_none());
    let inner = service_fn(move |req: Request<Full<Bytes>>| unready.clone().oneshot(req));
    let client = RetryLayer::new().layer(inner);
    let error = client.oneshot(post("one espresso")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(error.operation().unwrap().attempts(), 3);
    let client = RetryLayer::new().layer(ReadyOnce(false));
    let error = client.oneshot(post("one espresso")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(error.operation().unwrap().attempts(), 1);
}
