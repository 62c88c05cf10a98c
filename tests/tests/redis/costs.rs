//! Costs of a request on Redis: round trips and bytes, counted by the server itself.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use axum::{Json, Router, routing::post as route};
use http::StatusCode;
use serde_json::{Value, json};
use tests::{
    app,
    barrier::Barrier,
    creating, noise, post, send,
    servers::redis::{
        ReceivedCommand, RedisServer,
        scripts::{ACQUIRE, IS_IN_PROGRESS, RENEW},
        until_connected,
    },
};
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, Ttl,
    conformance::{Case, Subject},
};
use tower_idempotency_redis::{RedisOptions, redis::Script};

use crate::events::eventually;

async fn layer(server: &RedisServer) -> IdempotencyLayer {
    IdempotencyLayer::new(server.store().await)
        .with_store_timeout(Duration::from_secs(20))
        .with_lease_ttl(Ttl::from_secs(600))
}

/// Returns the calls that clients made to the server while `work` ran. Calls made by scripts are not round trips and are
/// left out; the same calls made by a client are counted.
async fn count_calls(
    server: &RedisServer,
    work: impl Future<Output = ()>,
) -> BTreeMap<String, u64> {
    let monitor = server.monitor();
    work.await;
    let mut calls = BTreeMap::new();
    for command in monitor.into_commands() {
        *calls.entry(command.name).or_default() += 1;
    }
    calls
}

fn calls(n: u64) -> BTreeMap<String, u64> {
    BTreeMap::from([("evalsha".to_owned(), n)])
}

/// Acquire and complete run one command each on the index of leases. One acquire of 16 removes expired members.
#[tokio::test]
async fn fresh_request_runs_two_commands_on_index() {
    const COUNT: u64 = 64;
    let server = RedisServer::start(&[]);
    let (app, _) = creating(layer(&server).await);
    let on_index = || {
        let stats = server.commandstats();
        let sets = stats.into_iter().filter(|(name, _)| name.starts_with('z'));
        sets.collect::<BTreeMap<_, _>>()
    };
    send(&app, post("/orders", "before", "tea")).await;
    let before = on_index();
    for n in 0..COUNT {
        send(&app, post("/orders", &format!("k{n}"), "tea")).await;
    }
    let mut during = on_index();
    for (name, count) in before {
        during.entry(name).and_modify(|it| *it -= count);
    }
    let trims = during.remove("zremrangebyscore").unwrap_or_default();
    assert!(trims <= COUNT / 4, "{trims}");
    let expected = [("zadd".to_owned(), COUNT), ("zrem".to_owned(), COUNT)];
    assert_eq!(during, BTreeMap::from(expected));
    // No lease is left, and Redis deletes an empty set.
    assert_eq!(server.command(&["EXISTS", "idempotency:~leases"]), "0");
}

#[tokio::test]
async fn fresh_request_makes_two_calls_and_replay_one() {
    let server = RedisServer::start(&[]);
    let (app, effects) = creating(layer(&server).await);
    // The store opens the connection for completions with the first completion.
    send(&app, post("/orders", "before", "tea")).await;
    let fresh = count_calls(&server, async {
        let response = send(&app, post("/orders", "k", "tea")).await;
        assert_eq!(response.status, StatusCode::CREATED);
    });
    assert_eq!(fresh.await, calls(2));
    let replay = count_calls(&server, async {
        assert!(send(&app, post("/orders", "k", "tea")).await.is_replay());
    });
    assert_eq!(replay.await, calls(1));
    assert_eq!(effects.count(), 2);
}

#[tokio::test]
async fn duplicate_and_key_reuse_make_one_call() {
    let server = RedisServer::start(&[]);
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, effects) = app(layer(&server).await, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("/orders", "k", "tea")).await }
    });
    barrier.arrival().await;
    let duplicate = count_calls(&server, async {
        let response = send(&app, post("/orders", "k", "tea")).await;
        assert_eq!(response.status, StatusCode::CONFLICT);
    });
    assert_eq!(duplicate.await, calls(1));
    let another = count_calls(&server, async {
        let response = send(&app, post("/orders", "k", "coffee")).await;
        assert_eq!(response.status, StatusCode::UNPROCESSABLE_ENTITY);
    });
    assert_eq!(another.await, calls(1));
    barrier.open_for_good();
    first.await.expect("the first response");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn unrecorded_request_makes_two_calls() {
    let server = RedisServer::start(&[]);
    let (app, _) = app(layer(&server).await, async |_, _| {
        StatusCode::INTERNAL_SERVER_ERROR
    });
    send(&app, post("/orders", "before", "tea")).await;
    let counts = count_calls(&server, async {
        send(&app, post("/orders", "k", "tea")).await;
    });
    assert_eq!(counts.await, calls(2));
    assert_eq!(server.command(&["DBSIZE"]), "0", "the server is empty");
}

/// The store loads its scripts when it connects, so the first request on either connection costs no more.
#[tokio::test]
async fn no_script_is_sent_twice() {
    let server = RedisServer::start(&[]);
    let layer = layer(&server).await;
    let (app, _) = creating(layer.clone());
    let counts = count_calls(&server, async {
        for key in ["a", "b"] {
            send(&app, post("/orders", key, "tea")).await;
        }
    });
    assert_eq!(counts.await.get("eval"), None);
}

/// Returns the number of calls of a script.
fn called(commands: &[ReceivedCommand], script: &str) -> usize {
    let sha = Script::new(script).get_hash().to_owned();
    commands.iter().filter(|it| it.first == sha).count()
}

/// Returns the number of the store's calls. Leaves out the identification of a new connection, the subscriptions of a
/// listener, and the calls of the test itself.
fn calls_of_the_store(commands: &[ReceivedCommand]) -> usize {
    let calls = commands.iter().filter(|it| it.first != "commandstats");
    calls
        .map(|it| &*it.name)
        .filter(|name| !["client", "subscribe", "unsubscribe"].contains(name))
        .count()
}

#[tokio::test]
async fn renewal_is_one_call_per_third_of_lease() {
    // A third of the lease. If a stall delays a renewal, its call times out and is repeated before the lease expires.
    const THIRD: Duration = Duration::from_secs(2);
    let server = RedisServer::start(&[]);
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let layer = layer(&server).await.with_lease_ttl(Ttl::from_secs(6));
    let (app, _) = app(layer, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let (monitor, began) = (server.monitor(), Instant::now());
    let first = tokio::spawn(async move { send(&app, post("/orders", "k", "tea")).await });
    barrier.arrival().await;
    // The first call acquires the lease.
    let calls = || server.commandstats().get("evalsha").copied();
    eventually("the lease is renewed three times", || calls() >= Some(4)).await;
    barrier.open_for_good();
    first.await.expect("an answer");
    let thirds = began.elapsed().as_millis() / THIRD.as_millis();
    let commands = monitor.into_commands();
    let renewals = called(&commands, RENEW);
    println!("{renewals} renewals in {thirds} thirds of a lease");
    assert!(
        (3..=thirds).contains(&(renewals as u128)),
        "{renewals} in {thirds}"
    );
    // The only other calls are an acquire and a completion.
    assert_eq!(calls_of_the_store(&commands), renewals + 2, "{commands:?}");
}

#[tokio::test]
async fn waiter_makes_two_calls_with_backoff() {
    let server = RedisServer::start(&[]);
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let wait = ConcurrentRequests::Wait(Duration::from_secs(600));
    let (app, _) = app(layer(&server).await, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    // The waiter is in another process, because waiters in the same process share replies.
    let (waiting, _) = creating(layer(&server).await.with_concurrent_requests(wait));
    let first = tokio::spawn(async move { send(&app, post("/orders", "k", "tea")).await });
    barrier.arrival().await;

    let (monitor, began) = (server.monitor(), Instant::now());
    let waiter = tokio::spawn(async move { send(&waiting, post("/orders", "k", "tea")).await });
    let looked = || server.commandstats().get("evalsha").copied() >= Some(2 + 2 * 8);
    eventually("the waiter queries repeatedly", looked).await;
    barrier.open_for_good();
    first.await.expect("an answer");
    assert!(waiter.await.expect("an answer").is_replay());
    let (commands, took) = (monitor.into_commands(), began.elapsed());

    let (mut most, mut pause, mut next) = (1, 25.0, 25.0);
    while next < took.as_secs_f64() * 1000.0 {
        (most, pause) = (most + 1, f64::min(pause * 1.6, 1000.0));
        next += pause;
    }
    let (queries, acquires) = (
        called(&commands, IS_IN_PROGRESS),
        called(&commands, ACQUIRE),
    );
    println!("{queries} queries and {acquires} acquires in {took:?}, at most {most}");
    // One acquire precedes the first delay. If a delay ends before the waiter listens, the waiter does not query.
    assert!((9..=most + 1).contains(&acquires), "{acquires} in {took:?}");
    assert!((1..acquires).contains(&queries), "{queries}");
    // One more call completes the first request.
    assert_eq!(
        calls_of_the_store(&commands),
        queries + acquires + 1,
        "{commands:?}"
    );
}

// ---- Bytes ----

/// Returns the memory that the server reports for its only entry, in total.
fn only_entry(server: &RedisServer) -> usize {
    let keys = server.entries();
    let [key] = keys.as_slice() else {
        panic!("expected one entry, found {}", keys.len());
    };
    server
        .command(&["MEMORY", "USAGE", key, "SAMPLES", "0"])
        .parse()
        .expect("a number")
}

/// Returns 1,024 bytes of typical JSON.
fn order() -> Value {
    let line = |n: u32| {
        json!({
            "sku": format!("SKU-{n:06}-{:04}", n * 7919 % 10_000),
            "quantity": n % 9 + 1,
            "price": f64::from(n * 137 % 10_000) / 100.0,
            "note": format!("shelf {} of aisle {}, leave at the door", n * 31 % 97, n * 17 % 23),
        })
    };
    let mut order = json!({
        "id": 8_034_978,
        "customer": "6f1c2b0e-6a3d-4f55-9a53-3d1e5a1a7c11",
        "currency": "EUR",
        "lines": (1..8).map(line).collect::<Vec<_>>(),
        "padding": "",
    });
    let missing = 1024 - order.to_string().len();
    order["padding"] = "x1".repeat(missing)[..missing].into();
    order
}

#[tokio::test]
async fn record_of_1_kib_takes_similar_memory() {
    let server = RedisServer::start(&[]);
    assert_eq!(order().to_string().len(), 1024);
    let app = Router::new()
        .route(
            "/orders",
            route(async || (StatusCode::CREATED, Json(order()))),
        )
        .layer(layer(&server).await);
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(first.body.len(), 1024);
    let bytes = only_entry(&server);
    println!("{bytes} bytes for a record of 1 KiB of JSON");
    assert!(bytes <= 1265, "{bytes}");
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!((retry.is_replay(), &retry.body), (true, &first.body));
}

#[tokio::test]
async fn smallest_record_takes_few_hundred_bytes() {
    let server = RedisServer::start(&[]);
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, _) = app(layer(&server).await, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn(async move { send(&app, post("/orders", "k", "tea")).await });
    barrier.arrival().await;
    let lease = only_entry(&server);
    barrier.open_for_good();
    first.await.expect("an answer");
    let record = only_entry(&server);
    println!("{lease} bytes for a lease, {record} for an empty record");
    assert!(lease <= 308, "{lease}");
    assert!(record <= 792, "{record}");
}

/// A tombstone exceeds a limit of zero. The store raises it.
#[tokio::test]
async fn record_over_least_limit_is_tombstone() {
    let server = RedisServer::start(&[]);
    let (options, url) = (RedisOptions::new().with_record_limit(0), server.url());
    let store = until_connected(|| options.clone().connect(&url)).await;
    let (app, effects) = app(IdempotencyLayer::new(store), async |_, _| noise(10_000));
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 10_000));
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!(effects.count(), 1);
}

/// The record of the case exceeds the lowest limit. In the runs of the suite, no record exceeds the default limit.
#[test]
fn lowest_limit_rejects_large_record() {
    let server = RedisServer::start(&[]);
    let (options, url) = (RedisOptions::new().with_record_limit(0), server.url());
    let subject = async || Subject::new(until_connected(|| options.clone().connect(&url)).await);
    let case = Case::named("large_record_is_stored_or_rejected_for_size");
    case.run(false, subject, |_| None);
}

/// Every entry expires, even if the process ends.
#[tokio::test]
async fn every_entry_has_time_to_live() {
    let server = RedisServer::start(&[]);
    let (options, url) = (RedisOptions::new().with_prefix("shop:"), server.url());
    let store = until_connected(|| options.clone().connect(&url)).await;
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let layer = IdempotencyLayer::new(store)
        .with_lease_ttl(Ttl::from_secs(20))
        .with_retention(Ttl::from_secs(100));
    let (app, _) = app(layer, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn(async move { send(&app, post("/orders", "k", "tea")).await });
    barrier.arrival().await;
    let lives = || -> u64 {
        let key = server.entries().remove(0);
        assert!(key.starts_with("shop:") && key.len() == 5 + 64, "{key}");
        server.command(&["TTL", &key]).parse().expect("seconds")
    };
    // The entry lives for the lease and the orphan retention.
    let left = lives();
    assert!((105..=120).contains(&left), "{left}");
    barrier.open_for_good();
    first.await.expect("an answer");
    let left = lives();
    assert!((60..=100).contains(&left), "{left}");
}
