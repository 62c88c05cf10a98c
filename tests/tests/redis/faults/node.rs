//! A process with its own store and layer, on a server that it may share with other processes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{Router, body::Body, routing::post};
use http::{Request, StatusCode, Uri};
use tests::{
    TestResponse,
    barrier::{Barrier, within},
    send,
    servers::redis::UNHURRIED,
};
use tokio::{task::JoinHandle, time::Instant};
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, Lease, Ttl};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::events::HANG;

pub(crate) use tests::servers::redis::until_connected;

/// The effects of all processes of a test, by key. Clones share one state.
#[derive(Clone, Debug, Default)]
pub(crate) struct EffectsByKey(Arc<Mutex<BTreeMap<String, Effects>>>);

#[derive(Clone, Copy, Debug, Default)]
struct Effects {
    all: u64,
    of_takeovers: u64,
}

impl EffectsByKey {
    /// Returns the number of effects of a key.
    pub(crate) fn of(&self, key: &str) -> u64 {
        self.effects().get(key).copied().unwrap_or_default().all
    }

    /// Returns the number of effects of a key whose handlers were flagged as a takeover.
    pub(crate) fn of_takeovers(&self, key: &str) -> u64 {
        let effects = self.effects().get(key).copied();
        effects.unwrap_or_default().of_takeovers
    }

    /// Returns the number of all effects.
    pub(crate) fn total(&self) -> u64 {
        self.effects().values().map(|effects| effects.all).sum()
    }

    fn happen(&self, key: &str, lease: &Lease) -> u64 {
        let mut database = self.effects();
        let effects = database.entry(key.to_owned()).or_default();
        effects.all += 1;
        effects.of_takeovers += u64::from(lease.is_takeover());
        effects.all
    }

    fn effects(&self) -> MutexGuard<'_, BTreeMap<String, Effects>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A layer over a store, and a handler. The handler has its effect and responds with the number of the effect under its
/// key. The path of the request selects its behavior:
///
/// - `/held..`: the handler is held at the barrier after the effect.
/// - `..-large`: the response is large, and does not compress.
/// - `..-fails`: the response is a 502, which is not recorded.
/// - `/free`: another handler, which needs no key and has no effect.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) layer: IdempotencyLayer,
    pub(crate) app: Router,
    pub(crate) database: EffectsByKey,
    pub(crate) barrier: Barrier,
    leases: Arc<Mutex<Vec<Lease>>>,
}

impl Node {
    pub(crate) fn new(store: RedisStore) -> Self {
        Self::with(store, &EffectsByKey::default(), |layer| layer)
    }

    /// Creates a node that shares `database` with other nodes.
    pub(crate) fn with(
        store: RedisStore,
        database: &EffectsByKey,
        configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let layer = IdempotencyLayer::new(store)
            .with_store_timeout(STORE_TIMEOUT * 2)
            // The lease is longer than any test. Tests of renewals set another lease.
            .with_lease_ttl(Ttl::from_secs(600));
        let layer = configure(layer);
        let (database, barrier, leases) = (database.clone(), Barrier::closed(), Arc::default());
        let handler = {
            let (database, barrier, leases) =
                (database.clone(), barrier.clone(), Arc::clone(&leases));
            async move |uri: Uri, key: IdempotencyKey, lease: Lease| {
                let (path, n) = (uri.path(), database.happen(key.as_str(), &lease));
                if path.starts_with("/held") {
                    remember(&leases, lease);
                    barrier.pass().await;
                }
                response(path, n, key.as_str())
            }
        };
        let app = Router::new()
            .fallback(handler)
            .route("/free", post(async || "free"))
            .layer(layer.clone());
        Self {
            layer,
            app,
            database,
            barrier,
            leases,
        }
    }

    /// Sends a request and reads its response.
    pub(crate) async fn post(&self, path: &str, key: &str) -> TestResponse {
        let response = send(&self.app, tests::post(path, key, "{}"));
        within(HANG * 2, response).await
    }

    pub(crate) fn spawn(&self, path: &str, key: &str) -> JoinHandle<TestResponse> {
        let (node, path, key) = (self.clone(), path.to_owned(), key.to_owned());
        tokio::spawn(async move { node.post(&path, &key).await })
    }

    /// Sends a request whose handler has had its effect and is held afterwards. Returns the request and its lease.
    pub(crate) async fn running(&self, key: &str) -> (JoinHandle<TestResponse>, Lease) {
        self.running_on("/held", key).await
    }

    pub(crate) async fn running_on(
        &self,
        path: &str,
        key: &str,
    ) -> (JoinHandle<TestResponse>, Lease) {
        let began = Instant::now();
        loop {
            let mut request = self.spawn(path, key);
            tokio::select! {
                () = self.barrier.arrival() => {
                    let leases = self.leases.lock().expect("no poison");
                    return (request, leases.last().expect("a lease").clone());
                }
                response = &mut request => {
                    let response = response.expect("no panic");
                    assert!(is_refused(&response) && began.elapsed() < HANG, "{response:?}");
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the leases of all handlers that were held.
    pub(crate) fn leases(&self) -> Vec<Lease> {
        self.leases.lock().expect("no poison").clone()
    }

    /// Checks that several retries get a replay of `first`.
    pub(crate) async fn assert_replays(&self, path: &str, key: &str, first: &TestResponse) {
        for _ in 0..2 {
            let replay = self.post(path, key).await;
            assert!(replay.is_replay(), "{key}: {replay:?}");
            assert_eq!((replay.status, &replay.body), (first.status, &first.body));
        }
    }

    /// Sends a request that must get 503 within [`BOUND`] and without an effect.
    pub(crate) async fn assert_unavailable(&self, path: &str, key: &str) {
        let (began, before) = (Instant::now(), self.database.of(key));
        let response = self.post(path, key).await;
        assert_unavailable(&response);
        assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
        assert_eq!(self.database.of(key), before, "effects of {key}");
    }

    /// Repeats a request until it gets a success. Checks that it has no effect before that.
    pub(crate) async fn until_served(&self, path: &str, key: &str) -> TestResponse {
        let (began, before) = (Instant::now(), self.database.of(key));
        loop {
            let response = self.post(path, key).await;
            if response.status == StatusCode::CREATED {
                return response;
            }
            assert!(is_refused(&response), "{key}: {response:?}");
            assert_eq!(self.database.of(key), before, "effects of {key}");
            assert!(
                began.elapsed() < HANG,
                "{key} is still refused: {response:?}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Returns `true` if a retry may succeed.
fn is_refused(response: &TestResponse) -> bool {
    let code = response.code();
    ["store-unavailable", "in-progress"].contains(&&*code)
}

fn remember(leases: &Mutex<Vec<Lease>>, lease: Lease) {
    leases.lock().expect("no poison").push(lease);
}

fn response(path: &str, n: u64, key: &str) -> (StatusCode, Vec<u8>) {
    let mut body = format!("effect {n} of {key}").into_bytes();
    if path.ends_with("-large") {
        let mut random = 88_172_645_463_325_252_u64 ^ n;
        body.extend(
            std::iter::repeat_with(|| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random as u8
            })
            .take(200_000),
        );
    }
    let status = if path.ends_with("-fails") {
        StatusCode::BAD_GATEWAY
    } else {
        StatusCode::CREATED
    };
    (status, body)
}

pub(crate) fn assert_unavailable(response: &TestResponse) {
    assert_eq!(
        response.status,
        StatusCode::SERVICE_UNAVAILABLE,
        "{response:?}"
    );
    assert_eq!(response.code(), "store-unavailable");
    assert_eq!(response.header("retry-after"), Some("1"));
}

/// Returns a request without a key.
pub(crate) fn keyless() -> Request<Body> {
    let req = Request::post("/free").body(Body::empty());
    req.expect("a valid request")
}

/// Returns options with a timeout that is short enough for a test, and longer than a stall of two seconds.
pub(crate) fn options() -> RedisOptions {
    RedisOptions::new().with_timeout(STORE_TIMEOUT)
}

/// Returns options with a long timeout for a busy machine, for tests that do not test timeouts. The layer must be
/// [patient].
pub(crate) fn options_with_long_timeout() -> RedisOptions {
    RedisOptions::new().with_timeout(UNHURRIED)
}

/// Sets a store timeout on the layer that is long enough for [`options_with_long_timeout`] stores.
pub(crate) fn patient(layer: IdempotencyLayer) -> IdempotencyLayer {
    layer.with_store_timeout(UNHURRIED * 2)
}

/// Connects to a running server, with attempts until it succeeds.
pub(crate) async fn connect(url: &str) -> RedisStore {
    until_connected(|| options().connect(url)).await
}

/// Like [`connect`], with the options of [`options_with_long_timeout`].
pub(crate) async fn connect_with_long_timeout(url: &str) -> RedisStore {
    until_connected(|| options_with_long_timeout().connect(url)).await
}

/// The timeout of a store. The layer allows twice that for a call, and four times that for all attempts.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest time for a refusal: five times the 12 s (4 x [`STORE_TIMEOUT`]) of all attempts.
pub(crate) const BOUND: Duration = Duration::from_secs(60);
