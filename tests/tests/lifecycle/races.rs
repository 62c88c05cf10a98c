//! Many clients at once: each key is executed once, and all its clients receive the same response. No client receives
//! the response of another key.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Router, extract::Path, routing::post};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, header};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use tests::{
    Effects, TestResponse,
    barrier::within,
    few_or, send,
    wire::{H1, H2, Server, post_bytes},
};
use tokio::task::JoinSet;
use tower_idempotency::{ConcurrentRequests, IdempotencyLayer, MemoryStore};

/// A handler that has its effect and takes a moment, and its effects by key.
#[derive(Clone)]
struct Shop {
    executions: Arc<Vec<AtomicU64>>,
    app: Router,
}

impl Shop {
    fn new(keys: usize, in_flight: ConcurrentRequests) -> Self {
        let executions: Arc<Vec<AtomicU64>> =
            Arc::new((0..keys).map(|_| AtomicU64::new(0)).collect());
        let counted = Arc::clone(&executions);
        let handler = async move |Path(key): Path<usize>| {
            let n = counted[key].fetch_add(1, Ordering::SeqCst) + 1;
            for _ in 0..key % 5 {
                tokio::task::yield_now().await;
            }
            (StatusCode::CREATED, format!("execution {n} for {key}"))
        };
        let layer = IdempotencyLayer::new(MemoryStore::new())
            .with_concurrent_requests(in_flight)
            .with_max_waiters(64, 64 * 64);
        let app = Router::new()
            .route("/{key}", post(handler))
            .route_layer(layer);
        Self { executions, app }
    }

    fn assert_executed_once(&self) {
        for (key, executions) in self.executions.iter().enumerate() {
            assert_eq!(executions.load(Ordering::SeqCst), 1, "executions of {key}");
        }
    }
}

/// Asserts that one response is the first one, and that all clients with a response received the same. Returns the
/// number of these clients.
fn assert_same_response(responses: &[TestResponse]) -> usize {
    let (answered, refused): (Vec<_>, Vec<_>) = responses
        .iter()
        .partition(|response| response.status.is_success());
    for refused in refused {
        assert_eq!(refused.status, StatusCode::CONFLICT);
        assert_eq!(refused.code(), "in-progress");
    }
    let firsts = answered
        .iter()
        .filter(|response| !response.is_replay())
        .count();
    assert_eq!(firsts, 1, "first responses");
    for response in &answered {
        assert_eq!(response.status, answered[0].status);
        assert_eq!(response.body, answered[0].body);
    }
    answered.len()
}

async fn race(shop: &Shop, key: usize, clients: usize) -> Vec<TestResponse> {
    let mut racing = JoinSet::new();
    for _ in 0..clients {
        let app = shop.app.clone();
        racing.spawn(async move {
            let (path, key) = (format!("/{key}"), format!("k{key}"));
            send(&app, tests::post(&path, &key, "{}")).await
        });
    }
    racing.join_all().await
}

const CLIENTS: usize = 64;

fn key_count() -> usize {
    few_or(200, 1_000)
}

// F-050, S-133
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_64_clients_per_key_executes() {
    within(ENOUGH, async {
        // Repeated until some clients arrive during an execution.
        let (keys, mut refused) = (key_count(), 0);
        while refused == 0 {
            let shop = Shop::new(keys, ConcurrentRequests::Conflict);
            for key in 0..keys {
                refused += CLIENTS - assert_same_response(&race(&shop, key, CLIENTS).await);
            }
            shop.assert_executed_once();
        }
    })
    .await;
}

// S-134
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn all_64_waiting_clients_get_one_response() {
    within(ENOUGH, async {
        let keys = key_count();
        let shop = Shop::new(keys, ConcurrentRequests::Wait(Duration::from_secs(60)));
        for key in 0..keys {
            let responses = race(&shop, key, CLIENTS).await;
            assert_eq!(assert_same_response(&responses), CLIENTS);
        }
        shop.assert_executed_once();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_16_http1_connections_executes() {
    within(ENOUGH, async {
        // Repeated until some clients arrive during an execution.
        let mut refused = 0;
        while refused == 0 {
            let shop = Shop::new(50, ConcurrentRequests::Conflict);
            let server = Server::start(shop.app.clone()).await;
            let mut clients = Vec::new();
            for _ in 0..16 {
                clients.push(H1::connect(server.addr()).await);
            }
            for key in 0..50 {
                let request = post_bytes(&format!("/{key}"), &format!("k{key}"), "{}");
                let mut racing = JoinSet::new();
                for mut client in std::mem::take(&mut clients) {
                    let request = request.clone();
                    racing.spawn(async move {
                        client.send(request).await;
                        let response = client.response().await;
                        (client, response.expect("the connection is kept alive"))
                    });
                }
                let responses: Vec<_>;
                (clients, responses) = racing.join_all().await.into_iter().unzip();
                refused += 16 - assert_same_response(&responses);
            }
            shop.assert_executed_once();
        }
    })
    .await;
}

// F-050
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_32_http2_streams_executes() {
    within(ENOUGH, async {
        let waits = ConcurrentRequests::Wait(Duration::from_secs(60));
        assert_eq!(race_streams(waits).await, 0);
        // Repeated until some streams arrive during an execution.
        while race_streams(ConcurrentRequests::Conflict).await == 0 {}
    })
    .await;
}

/// Sends each of 30 keys on 32 streams of one connection, and asserts that each key is executed once. Returns the number of
/// refusals.
async fn race_streams(in_flight: ConcurrentRequests) -> usize {
    let shop = Shop::new(30, in_flight);
    let server = Server::start(shop.app.clone()).await;
    let client = Arc::new(H2::connect(server.addr()).await);
    let mut refused = 0;
    for key in 0..30 {
        let mut racing = JoinSet::new();
        for _ in 0..32 {
            let client = Arc::clone(&client);
            racing.spawn(async move {
                let (path, key) = (format!("/{key}"), format!("k{key}"));
                let response = client.post(&path, &key, "{}").await.response().await;
                response.expect("a stream that is not reset")
            });
        }
        refused += 32 - assert_same_response(&racing.join_all().await);
    }
    shop.assert_executed_once();
    refused
}

// F-071, F-072, S-064
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn principals_never_share_response() {
    within(ENOUGH, async {
        // All short strings of two letters: "a" with "bb" has the same bytes as "ab" with "b". The empty principal is
        // one of them.
        let mut words = vec![String::new()];
        for at in 0..31 {
            let longer = ["a", "b"].map(|letter| format!("{}{letter}", words[at]));
            words.extend(longer);
        }
        let mut runner = TestRunner::deterministic();
        let mut draw = |from: usize| {
            let at = (from..words.len()).new_tree(&mut runner);
            words[at.expect("an index").current()].clone()
        };
        let effects = Effects::default();
        let counted = effects.clone();
        let echo = async move |headers: HeaderMap| {
            counted.happen();
            let principal = headers.get(header::AUTHORIZATION);
            let key = &headers["idempotency-key"];
            format!("{principal:?} {key:?}")
        };
        let layer = IdempotencyLayer::new(MemoryStore::new())
            .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(60)));
        let app = Router::new().route("/", post(echo)).route_layer(layer);
        let mut racing = JoinSet::new();
        let mut pairs_seen = HashSet::new();
        let mut responses: HashMap<_, Bytes> = HashMap::new();
        // Draws each of the 3,906 pairs five times on average, or 25 times with `FULL=1`.
        for _ in 0..few_or(20_000, 100_000) {
            let (principal, key) = (draw(0), draw(1));
            pairs_seen.insert((principal.clone(), key.clone()));
            let app = app.clone();
            racing.spawn(async move {
                let mut req = Request::post("/").header("idempotency-key", &key);
                if !principal.is_empty() {
                    req = req.header(header::AUTHORIZATION, &principal);
                }
                let req = req.body(axum::body::Body::empty());
                let response = send(&app, req.expect("a valid request")).await;
                (principal, key, response)
            });
            while racing.len() >= 64 {
                if let Some(done) = racing.join_next().await {
                    check(done.expect("no panic"), &mut responses);
                }
            }
        }
        for done in racing.join_all().await {
            check(done, &mut responses);
        }
        assert_eq!(effects.count(), pairs_seen.len() as u64);
    })
    .await;
}

fn check(
    (principal, key, response): (String, String, TestResponse),
    responses: &mut HashMap<(String, String), Bytes>,
) {
    assert_eq!(response.status, StatusCode::OK);
    let expected = if principal.is_empty() {
        format!("None {key:?}")
    } else {
        format!("Some({principal:?}) {key:?}")
    };
    assert_eq!(response.text(), expected);
    let first = responses
        .entry((principal, key))
        .or_insert_with(|| response.body.clone());
    assert_eq!(*first, response.body);
}

/// A timeout for operations that take some seconds on two processors without other load.
const ENOUGH: Duration = Duration::from_secs(180);
