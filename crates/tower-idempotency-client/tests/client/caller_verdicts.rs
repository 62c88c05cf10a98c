//! Functions of the caller that judge attempts.

use std::time::Duration;

use tokio::time::Instant;
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{
    Attempt, Cause, IdempotencyKeyLayer,
    Outcome::{Definite, NotExecuted, Unknown},
    RetryLayer, Verdict,
};

use crate::{
    harness::{Reply, Server, post, send, status},
    verdicts::json,
};

#[tokio::test(start_paused = true)]
async fn function_of_caller_decides_first() {
    let layer = RetryLayer::new().with_verdict(|attempt: &Attempt<'_>| {
        let (status, _) = attempt.response()?;
        match (status.as_u16(), attempt.code()) {
            (200, _) => Some(Verdict::Retry {
                after: None,
                cause: Cause::Transient,
            }),
            (404, Some("idempotency_gone")) => Some(Verdict::Unknown),
            _ => None,
        }
    });
    let server = Server::new([status(200), status(500), status(201)]);
    assert_eq!(send(&layer, &server).await.status(), Some(201));
    let server = Server::new([json(404, &[], r#"{"code":"idempotency_gone"}"#)]);
    assert_eq!(send(&layer, &server).await.outcome(), Unknown);
    let server = Server::new([Reply::Refused, status(404)]);
    assert_eq!(send(&layer, &server).await.outcome(), Definite);
}

/// Returns a layer whose function judges each error with this cause.
fn with_cause_of_errors(cause: Cause) -> RetryLayer {
    RetryLayer::new().with_verdict(move |attempt: &Attempt<'_>| {
        attempt.error()?;
        Some(Verdict::Retry { after: None, cause })
    })
}

/// No server has reported that it limits requests. The client knows that no byte was sent, or the function does.
#[tokio::test(start_paused = true)]
async fn throttled_error_may_have_been_executed() {
    for (cause, reply, outcome) in [
        (Cause::Throttled, Reply::Broken, Unknown),
        (Cause::Throttled, Reply::Refused, NotExecuted),
        (Cause::Transient, Reply::Broken, Unknown),
        (Cause::InProgress, Reply::Broken, Unknown),
        (Cause::NotSent, Reply::Broken, NotExecuted),
        (Cause::NotSent, Reply::Refused, NotExecuted),
    ] {
        let layer = with_cause_of_errors(cause).with_deadline(Duration::from_secs(5));
        let call = send(&layer, &Server::new([reply])).await;
        assert_eq!(call.outcome(), outcome, "{cause:?}");
        let error = call.result.unwrap_err();
        assert_eq!(error.outcome(), outcome, "{cause:?}");
    }
    // The delay is that of the cause.
    let layer = with_cause_of_errors(Cause::Throttled)
        .with_backoff(Duration::ZERO, Duration::from_secs(20))
        .with_max_attempts(2);
    let before = Instant::now();
    send(&layer, &Server::new([Reply::Broken])).await;
    assert!(before.elapsed() > Duration::ZERO);
}

/// Without a key, only a cause that nothing was sent permits a retry.
#[tokio::test(start_paused = true)]
async fn throttled_error_without_key_is_not_retried() {
    for (cause, attempts) in [(Cause::Throttled, 1), (Cause::NotSent, 3)] {
        let server = Server::new([Reply::Broken]);
        let keys = IdempotencyKeyLayer::new().with_methods_where(|_| false);
        let layer = with_cause_of_errors(cause).with_keys(keys);
        let client = layer.layer(server.clone());
        client.oneshot(post("one espresso")).await.unwrap_err();
        assert_eq!(server.take_log().len(), attempts, "{cause:?}");
    }
}
