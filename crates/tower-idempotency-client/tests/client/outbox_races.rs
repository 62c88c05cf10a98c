//! Calls whose entry a recovery sends and removes meanwhile.

use std::{
    convert::Infallible,
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
use tower::{Layer, ServiceExt, service_fn, util::option_layer};
use tower_idempotency_client::{
    Entry, IdempotencyKeyLayer, Operation, Outbox, OutboxLayer, Outcome, RetryLayer,
};

use crate::{
    harness::{Reply, Server, post, reply, status},
    outbox_memory::Memory,
};

const SECOND: Duration = Duration::from_secs(1);

fn order(operation: &Operation) -> Request<Full<Bytes>> {
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    req
}

/// The server rejects the first attempt and deletes its record after 15 s. A recovery executes the request, and the call then
/// wakes late.
#[tokio::test(start_paused = true)]
async fn executed_request_is_not_sent_after_lifetime() {
    for (asleep, outcome) in [(20_u32, Outcome::Unknown), (8, Outcome::Definite)] {
        let attempts = AtomicU32::new(0);
        let record = Mutex::new(None::<Instant>);
        let effects = AtomicU32::new(0);
        let rejected = Notify::new();
        let state = Arc::new((attempts, record, effects, rejected));
        let shared = state.clone();
        let server = service_fn(move |_: Request<Full<Bytes>>| {
            let (attempts, record, effects, rejected) = &*shared;
            let mut res = Response::new(Full::<Bytes>::default());
            if attempts.fetch_add(1, Ordering::Relaxed) == 0 {
                *res.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                res.headers_mut()
                    .insert("retry-after", http::HeaderValue::from_static("5"));
                rejected.notify_one();
            } else {
                let mut record = record.lock().unwrap();
                if record.is_none_or(|at| at.elapsed() > 15 * SECOND) {
                    effects.fetch_add(1, Ordering::Relaxed);
                    *record = Some(Instant::now());
                }
            }
            std::future::ready(Ok::<_, Infallible>(res))
        });
        let outbox = Arc::new(Memory::default());
        let retries = RetryLayer::new()
            .with_lifetime(10 * SECOND)
            .with_deadline(60 * SECOND);
        let client = OutboxLayer::new(outbox.clone(), retries).layer(server);
        let operation = Operation::new();
        let call = tokio::spawn(client.clone().oneshot(order(&operation)));
        state.3.notified().await;
        let mut recovery = client.recover();
        let recovered = recovery.next(|_: &mut Request<Full<Bytes>>| {}).await;
        let recovered = recovered.unwrap().unwrap();
        assert_eq!(recovered.result.unwrap().status(), 200);
        assert_eq!(outbox.keys(), [""; 0]);
        advance(asleep * SECOND).await;
        let result = call.await.unwrap();
        assert_eq!(state.2.load(Ordering::Relaxed), 1, "{asleep}");
        assert_eq!(operation.outcome(), outcome, "{asleep}");
        let is_expired = result.is_err_and(|error| {
            assert_eq!(error.outcome(), outcome);
            error.is_expired()
        });
        assert_eq!(is_expired, outcome == Outcome::Unknown, "{asleep}");
    }
}

/// The call does not wait for an attempt that its lifetime does not permit. With a lifetime of zero, it makes one attempt.
#[tokio::test(start_paused = true)]
async fn no_delay_goes_beyond_lifetime_of_entry() {
    for (lifetime, after, attempts) in [(10_u32, "20", 1), (0, "0", 1), (10, "1", 2)] {
        let server = Server::new([reply(429, &[("retry-after", after)], ""), status(201)]);
        let outbox = Arc::new(Memory::default());
        let retries = RetryLayer::new().with_lifetime(lifetime * SECOND);
        let client = OutboxLayer::new(outbox.clone(), retries).layer(server.clone());
        let operation = Operation::new();
        let before = Instant::now();
        let res = client.oneshot(order(&operation)).await.unwrap();
        assert_eq!(server.take_log().len(), attempts, "{lifetime} {after}");
        let (code, outcome) = match attempts {
            1 => (429, Outcome::NotExecuted),
            _ => (201, Outcome::Definite),
        };
        assert_eq!(
            (res.status().as_u16(), operation.outcome()),
            (code, outcome)
        );
        assert_eq!(before.elapsed() == Duration::ZERO, attempts == 1);
        assert_eq!(outbox.keys(), [""; 0]);
    }
}

/// A recovery has removed the entry of the call, and a later call has stored its own under the key.
#[tokio::test(start_paused = true)]
async fn rejected_call_keeps_entry_of_later_call() {
    let outbox = Arc::new(Memory::default());
    let other = outbox.clone();
    let server = service_fn(move |_: Request<Full<Bytes>>| {
        let other = other.clone();
        async move {
            other.remove("order-7").await?;
            let operation = Operation::with_key("order-7").unwrap();
            let req = post("one espresso").map(|_| "one espresso".into());
            let later = SystemTime::now() + 5 * SECOND;
            let entry = Entry::new(&operation, &req).or_first_sent(later);
            assert_eq!(other.store(&entry).await?, None);
            let res = Response::builder().status(401);
            let res = res.body(Full::<Bytes>::default()).unwrap();
            Ok::<_, tower_idempotency_client::OutboxError>(res)
        }
    });
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(server);
    let operation = Operation::with_key("order-7").unwrap();
    let res = client.oneshot(order(&operation)).await.unwrap();
    assert_eq!(res.status(), 401);
    assert_eq!(operation.outcome(), Outcome::Unknown);
    assert_eq!(outbox.keys(), ["order-7"]);
}

/// The entries of two calls of one operation differ. The lifetime of the second one begins later, also if a key layer outside has
/// counted its attempt.
#[tokio::test(start_paused = true)]
async fn entry_after_rejection_has_its_own_time() {
    for has_key_layer in [false, true] {
        let server = Server::new([status(401), Reply::Broken]);
        let outbox = Arc::new(Memory::default());
        let retries = RetryLayer::new().with_max_attempts(1);
        let client = OutboxLayer::new(outbox.clone(), retries).layer(server);
        let keys = has_key_layer.then(IdempotencyKeyLayer::new);
        let client = option_layer(keys).layer(client);
        let operation = Operation::new();
        let res = client.clone().oneshot(order(&operation)).await.unwrap();
        assert_eq!(res.status(), 401);
        assert_eq!(operation.outcome(), Outcome::NotExecuted);
        let first_sent = operation.first_sent().unwrap();
        // The wall clock of the entries does not follow that of the test.
        std::thread::sleep(Duration::from_millis(3));
        assert!(client.oneshot(order(&operation)).await.is_err());
        assert_eq!(operation.attempts(), 2);
        let (_, entry) = outbox.pending(0, 1).await.unwrap().remove(0);
        assert!(entry.first_sent().unwrap() > first_sent, "{has_key_layer}");
    }
}

/// The attempt that the key layer outside has counted never begins.
#[tokio::test(start_paused = true)]
async fn request_that_is_not_stored_is_not_executed() {
    let server = Server::new([status(201)]);
    let client = OutboxLayer::new(Arc::new(Memory::default()), RetryLayer::new());
    let client = IdempotencyKeyLayer::new().layer(client.layer(server.clone()));
    let (_sender, stream) = http_body_util::channel::Channel::<Bytes>::new(1);
    let operation = Operation::new();
    let mut req = post("one espresso").map(|_| stream);
    req.extensions_mut().insert(operation.clone());
    let error = client.oneshot(req).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotExecuted);
    assert_eq!(
        (operation.outcome(), operation.attempts()),
        (Outcome::NotExecuted, 0)
    );
    assert_eq!(server.take_log().len(), 0);
}
