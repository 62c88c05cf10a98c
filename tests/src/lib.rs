//! Shared helpers of the integration tests: a counted handler, requests and responses, misbehaving bodies and stores.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use tower::{Service, ServiceExt};
use tower_idempotency::IdempotencyLayer;

mod guarded_child;
mod scripted;

pub use self::{
    guarded_child::GuardedChild,
    scripted::{Broken, Scripted, Step},
};

pub mod attention;
pub mod barrier;
pub mod bodies;
pub mod conformance;
pub mod database;
pub mod dynamodb;
pub mod environment;
pub mod held_server;
pub mod layered;
pub mod ledger;
pub mod metrics_page;
pub mod observed;
pub mod proxy;
pub mod random;
pub mod round_trips;
pub mod scratch;
pub mod secrets;
pub mod server_process;
pub mod servers;
pub mod sql;
pub mod unreadable_store;
pub mod versions;
pub mod wire;

pub mod playground;

/// Longest time that a test waits for a process or for its effect. It only detects hangs: on a busy machine, a process that is
/// killed many times may need minutes.
pub const HANG_GUARD: Duration = Duration::from_secs(600);

/// Returns `few`, or `full` if the environment has `FULL`, because the full number takes minutes.
#[must_use]
pub fn few_or(few: usize, full: usize) -> usize {
    if std::env::var_os("FULL").is_some() {
        full
    } else {
        few
    }
}

/// Counts effects: executions of a handler, independent of the responses that clients received.
#[derive(Clone, Debug, Default)]
pub struct Effects(Arc<AtomicU64>);

impl Effects {
    /// Counts an effect and returns its number, starting at 1.
    #[expect(clippy::must_use_candidate, reason = "the effect is the point")]
    pub fn happen(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns the number of effects.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// A response, read to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl TestResponse {
    /// Returns the body as text.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body of text")
    }

    /// Returns the member `code` of a problem body.
    #[must_use]
    pub fn code(&self) -> String {
        let problem: serde_json::Value = serde_json::from_slice(&self.body).expect("a JSON body");
        problem["code"]
            .as_str()
            .expect("a problem's code")
            .to_owned()
    }

    /// Returns the member `retryable` of a problem body.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        let problem: serde_json::Value = serde_json::from_slice(&self.body).expect("a JSON body");
        problem["retryable"] == true
    }

    /// Returns `true` if the response is marked as a replay.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.headers
            .get("idempotent-replayed")
            .is_some_and(|marker| marker == "true")
    }

    /// Returns the value of a header as text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .get(name)
            .map(|value| value.to_str().expect("a header of text"))
    }
}

/// Serves every method on every path with `handler`, behind `layer`, and counts the executions. The handler receives the
/// number of its execution, starting at 1.
pub fn app<H, F, R>(layer: IdempotencyLayer, handler: H) -> (Router, Effects)
where
    H: Fn(u64, Request<Body>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = R> + Send + 'static,
    R: IntoResponse + 'static,
{
    let effects = Effects::default();
    let counted = effects.clone();
    let handler = move |req: Request<Body>| {
        let run = handler(counted.happen(), req);
        async move { run.await.into_response() }
    };
    (Router::new().fallback(handler).layer(layer), effects)
}

/// Like [`app`], with a handler that creates: 201, `Location: /orders/n` and `{"execution":n}`.
pub fn creating(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, _req| created(n))
}

/// Returns the response body of the handler of [`creating`].
#[must_use]
pub fn created(n: u64) -> Response {
    let headers = [
        ("content-type", "application/json".to_owned()),
        ("location", format!("/orders/{n}")),
    ];
    let body = format!("{{\"execution\":{n}}}");
    (StatusCode::CREATED, headers, body).into_response()
}

/// Returns this number of bytes that do not compress. Each call returns the same bytes.
#[must_use]
pub fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut noise = Vec::with_capacity(bytes + 8);
    while noise.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    noise.truncate(bytes);
    noise
}

/// Creates a POST under a key.
#[must_use]
pub fn post(path: &str, key: &str, body: impl Into<Body>) -> Request<Body> {
    let req = Request::post(path)
        .header("idempotency-key", key)
        .body(body.into());
    req.expect("a valid request")
}

/// Sends a request to an axum service, and reads the response to its end.
///
/// # Panics
///
/// Panics if the service fails or the body breaks off.
pub async fn send<S>(app: &S, req: Request<Body>) -> TestResponse
where
    S: Service<Request<Body>, Response = Response, Error = std::convert::Infallible> + Clone,
{
    let Ok(res) = app.clone().oneshot(req).await;
    read(res).await
}

/// Reads a response to its end.
///
/// # Panics
///
/// Panics if the body breaks off.
pub async fn read(res: Response) -> TestResponse {
    let (head, body) = res.into_parts();
    let body = body.collect().await.expect("a whole body").to_bytes();
    TestResponse {
        status: head.status,
        headers: head.headers,
        body,
    }
}

/// The examples of the guide to descriptions, which run as this crate's doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/describing-the-api.md")]
pub struct DescribingTheApi;

/// The examples of the guide, which run as this crate's doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/placement.md")]
pub struct Deploying;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/your-stack.md")]
pub struct YourStack;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/grpc.md")]
pub struct Grpc;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/testing.md")]
pub struct TestingHandlers;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/batches.md")]
pub struct Batches;

#[cfg(doctest)]
#[doc = include_str!("../../docs/guide/recipes.md")]
pub struct Recipes;

/// The READMEs of the crates that have examples, as registries show them.
#[cfg(doctest)]
#[doc = include_str!("../../crates/tower-idempotency/README.md")]
pub struct ReadmeOfLayer;

#[cfg(doctest)]
#[doc = include_str!("../../crates/tower-idempotency-redis/README.md")]
pub struct ReadmeOfRedis;

#[cfg(doctest)]
#[doc = include_str!("../../crates/tower-idempotency-sqlx/README.md")]
pub struct ReadmeOfSqlx;

#[cfg(doctest)]
#[doc = include_str!("../../crates/tower-idempotency-dynamodb/README.md")]
pub struct ReadmeOfDynamoDb;
