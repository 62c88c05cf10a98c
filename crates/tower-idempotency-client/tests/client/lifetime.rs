//! The lifetime of a key, with a server that deletes its record.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::{
    sync::Notify,
    time::{Instant, advance},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency_client::{Entry, Operation, Outbox, OutboxLayer, Outcome, RetryLayer};

use crate::{
    harness::{Server, post, reply, send, send_as, status},
    outbox_memory::Memory,
};

const HOUR: Duration = Duration::from_secs(3600);

/// Sends an operation to a server that executes it, breaks the connection, and deletes the record after 24 h. The client sleeps
/// for `asleep` between its attempts. Returns the number of effects and the result.
async fn effects_after_sleep(lifetime: Duration, asleep: Duration) -> (u32, Outcome, bool) {
    let effects = Arc::new(AtomicU32::new(0));
    let failed = Arc::new(Notify::new());
    let record = Arc::new(Mutex::new(None::<Instant>));
    let server = {
        let (effects, failed) = (effects.clone(), failed.clone());
        service_fn(move |_: Request<Full<Bytes>>| {
            let mut record = record.lock().unwrap();
            let is_known = record.is_some_and(|at| at.elapsed() < 24 * HOUR);
            let is_first = record.is_none();
            if !is_known {
                effects.fetch_add(1, Ordering::Relaxed);
                *record = Some(Instant::now());
            }
            failed.notify_one();
            let result = if is_first {
                Err(io::Error::from(io::ErrorKind::ConnectionReset))
            } else {
                Ok(Response::new(Full::<Bytes>::default()))
            };
            std::future::ready(result)
        })
    };
    let layer = RetryLayer::new()
        .with_deadline(100 * HOUR)
        .with_lifetime(lifetime);
    let operation = Operation::new();
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let client = layer.layer(server);
    let call = tokio::spawn(client.oneshot(req));
    failed.notified().await;
    advance(asleep).await;
    let result = call.await.unwrap();
    let is_expired = result.is_err_and(|error| error.is_expired());
    (
        effects.load(Ordering::Relaxed),
        operation.outcome(),
        is_expired,
    )
}

#[tokio::test(start_paused = true)]
async fn client_that_slept_too_long_has_no_second_effect() {
    assert_eq!(
        effects_after_sleep(23 * HOUR, 25 * HOUR).await,
        (1, Outcome::Unknown, true)
    );
    assert_eq!(
        effects_after_sleep(23 * HOUR, 22 * HOUR).await,
        (1, Outcome::Definite, false)
    );
    // A lifetime that is longer than the retention of the server shows what it prevents.
    assert_eq!(
        effects_after_sleep(48 * HOUR, 25 * HOUR).await,
        (2, Outcome::Definite, false)
    );
}

#[tokio::test(start_paused = true)]
async fn no_delay_goes_beyond_lifetime() {
    let layer = RetryLayer::new()
        .with_deadline(100 * HOUR)
        .with_max_retry_after(100 * HOUR);
    let server = Server::new([reply(500, &[("retry-after", "86400")], ""), status(201)]);
    let before = Instant::now();
    let call = send(&layer, &server).await;
    assert_eq!(
        (call.status(), call.outcome()),
        (Some(500), Outcome::Unknown)
    );
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(server.take_log().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn lifetime_of_zero_retries_only_rejections() {
    let layer = RetryLayer::new().with_lifetime(Duration::ZERO);
    for (first, attempts, outcome) in [
        (status(500), 1, Outcome::Unknown),
        (status(429), 2, Outcome::Definite),
    ] {
        let server = Server::new([first, status(201)]);
        assert_eq!(send(&layer, &server).await.outcome(), outcome);
        assert_eq!(server.take_log().len(), attempts);
    }
}

#[tokio::test(start_paused = true)]
async fn restored_operation_expires_by_wall_clock() {
    let now = SystemTime::now();
    for (first_sent, sent, is_expired) in [
        (now - 25 * HOUR, 0, true),
        (now - 22 * HOUR, 1, false),
        // A clock that is a minute ahead is no error, one that is an hour ahead is.
        (now + Duration::from_secs(50), 1, false),
        (now + HOUR, 0, false),
    ] {
        let server = Server::new([status(201)]);
        let operation = Operation::new().with_first_sent(first_sent);
        let call = send_as(operation, &RetryLayer::new(), &server).await;
        assert_eq!(server.take_log().len(), sent);
        if let Err(error) = call.result {
            assert_eq!(error.is_expired(), is_expired, "{error}");
            assert_eq!(error.outcome(), Outcome::Unknown);
            assert_eq!(error.operation().unwrap().key(), call.operation.key());
        }
    }
}

/// After a start without network, the clock may be behind. The server has the record of the entry.
#[tokio::test(start_paused = true)]
async fn entry_from_future_is_not_expired() {
    let server = Server::new([status(201)]);
    let outbox = Arc::new(Memory::default());
    let operation = Operation::new().with_first_sent(SystemTime::now() + HOUR);
    let entry = Entry::new(&operation, &post("").map(|_| "one espresso".into()));
    outbox.store(&entry).await.unwrap();
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server.clone());
    let mut recovery = client.recover();
    let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
    let error = recovered.unwrap().unwrap().result.unwrap_err();
    assert!(!error.is_expired());
    assert!(error.to_string().contains("clock is wrong"), "{error}");
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(server.take_log().len(), 0);
    assert_eq!(outbox.keys(), [operation.key()]);
}

/// The wall clock of the test does not advance, as if it was set back.
#[tokio::test(start_paused = true)]
async fn restored_operation_expires_by_monotonic_clock() {
    let operation = Operation::new().with_first_sent(SystemTime::now() - 20 * HOUR);
    advance(4 * HOUR).await;
    let server = Server::new([status(201)]);
    let call = send_as(operation, &RetryLayer::new(), &server).await;
    assert!(call.result.unwrap_err().is_expired());
}

/// Another process has sent the operation later than this one, and its response is unknown.
#[tokio::test(start_paused = true)]
async fn later_restored_time_opens_operation() {
    let layer = RetryLayer::new();
    let server = Server::new([status(401), status(201)]);
    let call = send(&layer, &server).await;
    assert_eq!(call.outcome(), Outcome::NotExecuted);
    let later = call.operation.first_sent().unwrap() + Duration::from_secs(10);
    let operation = call.operation.with_first_sent(later);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    advance(25 * HOUR).await;
    let call = send_as(operation, &layer, &server).await;
    assert!(call.result.unwrap_err().is_expired());
    assert_eq!(server.take_log().len(), 1);
}

/// The server rejected every attempt before it executed it, so it has no record to lose.
#[tokio::test(start_paused = true)]
async fn rejected_operation_does_not_expire() {
    let layer = RetryLayer::new();
    let server = Server::new([status(401), status(201)]);
    let call = send(&layer, &server).await;
    assert_eq!(call.outcome(), Outcome::NotExecuted);
    advance(25 * HOUR).await;
    let call = send_as(call.operation, &layer, &server).await;
    assert_eq!(call.status(), Some(201));
    // Its response may be deleted by now.
    advance(25 * HOUR).await;
    let call = send_as(call.operation, &layer, &server).await;
    assert!(call.result.unwrap_err().is_expired());
    assert_eq!(server.take_log().len(), 2);
}
