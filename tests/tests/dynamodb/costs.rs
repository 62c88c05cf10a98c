//! Costs of a request on DynamoDB: calls, and units of capacity as counted by the stand-in.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{Extension, Json, Router, response::IntoResponse, routing::post as route};
use http::StatusCode;
use serde_json::{Value, json};
use tests::{
    app,
    barrier::{Barrier, within},
    creating,
    dynamodb::{Call, Endpoint, ManualClock},
    noise, post, send,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    IdempotencyLayer, NeedsAttention, Tiered,
    inspect::{Inspect, Query, Resolution, State},
    store::{Acquired, Claim, Fingerprint, KeyId, Store, Token, Ttl},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{Client, types::AttributeValue},
};

/// A long timeout: a call that times out on a busy machine would be counted twice.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns a store on a new table, behind an endpoint that counts calls.
async fn counted(options: DynamoDbOptions) -> (Endpoint, Client, String, DynamoDbStore) {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let (direct, table) = (client(server.address()), server.new_table());
    let options = options.with_timeout(PATIENCE);
    let store = options.store(&client(endpoint.address()), table.as_str());
    store.create_table().await.expect("the server runs");
    endpoint.calls();
    (endpoint, direct, table, store)
}

async fn layer() -> (Endpoint, Client, String, IdempotencyLayer) {
    let (endpoint, direct, table, store) = counted(DynamoDbOptions::new()).await;
    (endpoint, direct, table, layer_on(store))
}

fn layer_on(store: DynamoDbStore) -> IdempotencyLayer {
    // The lease is long, so that no renewal is counted.
    IdempotencyLayer::new(store)
        .with_store_timeout(PATIENCE)
        .with_lease_ttl(Ttl::from_secs(600))
}

/// Returns the sums of the units of the table and of its index.
fn units(calls: &[Call]) -> (f64, f64) {
    let units = calls.iter().map(Call::consumed);
    units.fold((0.0, 0.0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
}

fn names(calls: &[Call]) -> Vec<&str> {
    calls.iter().map(|call| &*call.operation).collect()
}

/// Returns the only item and its size in bytes as the service counts it: names and values.
async fn only_item(client: &Client, table: &str) -> (HashMap<String, AttributeValue>, usize) {
    let scanned = client.scan().table_name(table).send().await;
    let mut items = scanned.expect("the server runs").items.unwrap_or_default();
    assert_eq!(items.len(), 1);
    let item = items.remove(0);
    let size = |(name, value): (&String, &AttributeValue)| {
        name.len()
            + match value {
                AttributeValue::B(blob) => blob.as_ref().len(),
                AttributeValue::S(text) => text.len(),
                AttributeValue::N(digits) => digits.len().div_ceil(2) + 1,
                other => panic!("expected bytes, a text or a number, found {other:?}"),
            }
    };
    let bytes = item.iter().map(size).sum();
    (item, bytes)
}

#[tokio::test]
async fn fresh_request_makes_two_calls_and_replay_one() {
    let (endpoint, direct, table, layer) = layer().await;
    let (app, effects) = creating(layer);
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    let fresh = endpoint.calls();
    assert_eq!(names(&fresh), ["UpdateItem", "UpdateItem"]);
    let (_, bytes) = only_item(&direct, &table).await;
    println!(
        "fresh: {:?} units for an item of {bytes} bytes",
        units(&fresh)
    );
    assert_eq!(units(&fresh), (2.0, 2.0));

    assert!(send(&app, post("/orders", "k", "tea")).await.is_replay());
    let replay = endpoint.calls();
    assert_eq!(names(&replay), ["UpdateItem"]);
    assert_eq!(replay[0].status, StatusCode::BAD_REQUEST, "a refused write");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn fresh_request_without_index_costs_half() {
    let options = DynamoDbOptions::new().with_index_shards(0);
    let (endpoint, _, _, store) = counted(options).await;
    let (app, _) = creating(layer_on(store));
    send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(units(&endpoint.calls()), (2.0, 0.0));
}

#[tokio::test]
async fn completed_index_costs_one_more_unit() {
    let options = DynamoDbOptions::new().with_completed_index(true);
    let (endpoint, direct, table, store) = counted(options).await;
    let (app, effects) = creating(layer_on(store));
    send(&app, post("/orders", "k", "tea")).await;
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem", "UpdateItem"]);
    let (item, bytes) = only_item(&direct, &table).await;
    println!(
        "completed index: {:?} units for an item of {bytes} bytes",
        units(&calls)
    );
    // One unit removes the item from its partition of the index, and one adds it to another.
    assert_eq!(units(&calls), (2.0, 3.0));
    let listed = item["listed"].as_s().expect("a text");
    assert!(listed.starts_with("completed#"), "{listed}");
    let replay = send(&app, post("/orders", "k", "tea")).await;
    assert!(replay.is_replay());
    assert_eq!(endpoint.operations(), ["UpdateItem"]);
    assert_eq!(effects.count(), 1);
}

/// The service has not deleted the expired record of the key yet.
#[tokio::test]
async fn reused_key_with_completed_index_costs_more() {
    let clock = ManualClock::new();
    let options = DynamoDbOptions::new().with_completed_index(true);
    let options = options.with_clock({
        let clock = clock.clone();
        move || clock.now()
    });
    let (endpoint, _, _, store) = counted(options).await;
    let (app, effects) = creating(layer_on(store));
    send(&app, post("/orders", "k", "tea")).await;
    endpoint.calls();
    clock.advance(Duration::from_secs(30 * 24 * 3600));
    send(&app, post("/orders", "k", "tea")).await;
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem", "PutItem", "UpdateItem"]);
    assert_eq!(calls[0].status, StatusCode::BAD_REQUEST, "a refused write");
    // The write that replaces the item, and the completion, move it to another partition of the index.
    assert_eq!(units(&calls[1..2]), (1.0, 2.0));
    assert_eq!(units(&calls[1..]), (2.0, 4.0));
    assert_eq!(effects.count(), 2);
}

#[tokio::test]
async fn duplicates_make_one_call() {
    let (endpoint, _, _, layer) = layer().await;
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, effects) = app(layer, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("/orders", "k", "tea")).await }
    });
    barrier.arrival().await;
    endpoint.calls();
    let duplicate = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT);
    let another = send(&app, post("/orders", "k", "coffee")).await;
    assert_eq!(another.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(endpoint.operations(), ["UpdateItem", "UpdateItem"]);
    barrier.open_for_good();
    first.await.expect("the first response");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn unrecorded_request_makes_two_calls() {
    let (endpoint, direct, table, layer) = layer().await;
    let (app, _) = app(layer, async |_, _| StatusCode::INTERNAL_SERVER_ERROR);
    send(&app, post("/orders", "k", "tea")).await;
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem", "DeleteItem"]);
    assert_eq!(units(&calls), (2.0, 2.0));
    let scanned = direct.scan().table_name(table).send().await;
    assert_eq!(scanned.expect("the server runs").count(), 0);
}

/// The item stays in the index, in another partition. It has no TTL, so the service does not delete it.
#[tokio::test]
async fn attention_makes_two_calls_and_moves_in_index() {
    let (endpoint, direct, table, store) = counted(DynamoDbOptions::new()).await;
    let (app, _) = app(layer_on(store.clone()), async |_, _| {
        let attention = NeedsAttention::new("refund-failed").with_reason("x".repeat(4096));
        (StatusCode::BAD_GATEWAY, Extension(attention))
    });
    send(&app, post("/orders", "k", "tea")).await;
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem", "UpdateItem"]);
    let (item, bytes) = only_item(&direct, &table).await;
    println!(
        "needs attention: {:?} units for an item of {bytes} bytes",
        units(&calls)
    );
    // In the table, the longest reason takes a second KB. In the index, one unit removes the item from its partition
    // and one adds it to another.
    assert_eq!(units(&calls), (3.0, 3.0));
    assert_eq!(item["status"].as_s().expect("a text"), "needs-attention");
    assert_eq!(item["reason"].as_s().expect("a text"), "refund-failed");
    for gone in ["grants", "granted"] {
        assert!(!item.contains_key(gone), "{gone}");
    }
    let left = |item: &HashMap<String, AttributeValue>| {
        let ttl = item["ttl"].as_n().expect("a number").parse::<u64>();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after");
        ttl.expect("seconds").saturating_sub(now.as_secs())
    };
    const DAY: u64 = 24 * 60 * 60;
    assert!(left(&item) > 99 * 365 * DAY, "{}", left(&item));

    let page = store.list(&Query::new(State::NeedsAttention)).await;
    let [entry] = <[_; 1]>::try_from(page.expect("it runs").entries).expect("an entry");
    endpoint.calls();
    let resolved = store.resolve(entry.seen(), &Resolution::Retry).await;
    assert!(resolved.expect("the server runs").is_applied());
    let mut resolving = endpoint.calls();
    assert_eq!(names(&resolving), ["GetItem", "UpdateItem"]);
    resolving.remove(0);
    println!("resolved: {:?} units", units(&resolving));
    // The table charges the size of the old item, which is over 1 KB. The index again removes the item from one
    // partition and adds it to another.
    assert_eq!(units(&resolving), (bytes.div_ceil(1024) as f64, 2.0));
    let (item, _) = only_item(&direct, &table).await;
    // The allowed skew is 2 s, and seconds are rounded up.
    assert!(
        (DAY - 60..=DAY + 3).contains(&left(&item)),
        "{}",
        left(&item)
    );
    for gone in ["record", "completed", "reason", "granted"] {
        assert!(!item.contains_key(gone), "{gone}");
    }
}

#[tokio::test]
async fn resolution_is_one_read_and_one_write() {
    let (endpoint, _, _, store) = counted(DynamoDbOptions::new()).await;
    let layer = layer_on(store.clone());
    let (app, _) = app(layer.clone(), async |_, _| {
        Extension(NeedsAttention::new("refund-failed"))
    });
    for call in ["DeleteItem", "UpdateItem"] {
        send(&app, post("/orders", call, "tea")).await;
        // The reason is short.
        assert_eq!(units(&endpoint.calls()), (2.0, 3.0));
        let page = store.list(&Query::new(State::NeedsAttention)).await;
        let [entry] = <[_; 1]>::try_from(page.expect("it runs").entries).expect("an entry");
        let resolution = match call {
            "DeleteItem" => Resolution::Free,
            _ => Resolution::Complete {
                record: layer
                    .encode_response_record(entry.id(), &http::Response::new("refunded".into())),
                retention: Ttl::from_secs(60),
            },
        };
        endpoint.calls();
        let resolved = store.resolve(entry.seen(), &resolution).await;
        assert!(resolved.expect("the server runs").is_applied());
        let mut calls = endpoint.calls();
        assert_eq!(names(&calls), ["GetItem", call]);
        calls.remove(0);
        println!("{call}: {:?} units", units(&calls));
        assert_eq!(units(&calls), (1.0, 1.0));
    }
}

#[tokio::test]
async fn renewal_is_one_call() {
    let (endpoint, _, _, layer) = layer().await;
    let every = Duration::from_secs(1);
    let layer = layer.with_lease_ttl(Ttl::from_secs(3));
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, _) = app(layer, move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let began = Instant::now();
    let running = tokio::spawn(async move { send(&app, post("/slow", "k", "tea")).await });
    let mut calls = Vec::new();
    // Waits for one acquire and three more.
    let four_calls = async {
        while calls.len() < 4 {
            calls.extend(endpoint.calls());
            sleep(Duration::from_millis(20)).await;
        }
    };
    within(Duration::from_secs(60), four_calls).await;
    barrier.open_for_good();
    assert_eq!(running.await.expect("an answer").status, StatusCode::OK);
    calls.extend(endpoint.calls());
    let renewals = &calls[1..calls.len() - 1];
    println!("{} renewals, {:?} units", renewals.len(), units(renewals));
    // There is at most one renewal in each third of the lease.
    let most = 1 + (began.elapsed().as_millis() / every.as_millis()) as usize;
    assert!((3..=most).contains(&renewals.len()), "{}", renewals.len());
    assert!(renewals.iter().all(|it| it.consumed() == (1.0, 1.0)));
}

/// Returns 1,024 bytes of JSON.
fn order() -> Value {
    let line = |n: u32| json!({"sku": format!("SKU-{n:06}"), "quantity": n % 9 + 1, "note": format!("shelf {}", n * 31 % 97)});
    let mut order =
        json!({"id": 8_034_978, "lines": (1..16).map(line).collect::<Vec<_>>(), "padding": ""});
    let missing = 1024 - order.to_string().len();
    order["padding"] = "x1".repeat(missing)[..missing].into();
    order
}

#[tokio::test]
async fn record_of_1_kib_costs_one_unit() {
    let (endpoint, direct, table, layer) = layer().await;
    let app = Router::new()
        .route("/orders", route(async || Json(order())))
        .layer(layer);
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(first.body.len(), 1024);
    let (item, bytes) = only_item(&direct, &table).await;
    println!("1 KiB of JSON: an item of {bytes} bytes");
    assert!(bytes <= 1024, "{bytes}");
    assert_eq!(units(&endpoint.calls()), (2.0, 2.0));
    for gone in [
        "listed",
        "since",
        "grants",
        "granted",
        "orphan_retention",
        "orphan_retention_seconds",
    ] {
        assert!(!item.contains_key(gone), "{gone}");
    }
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!((retry.is_replay(), &retry.body), (true, &first.body));
}

#[tokio::test]
async fn larger_record_costs_unit_per_kb() {
    let (endpoint, direct, table, layer) = layer().await;
    let (app, _) = app(layer, async |_, _| noise(10_000).into_response());
    send(&app, post("/orders", "k", "tea")).await;
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem", "UpdateItem"]);
    let (_, bytes) = only_item(&direct, &table).await;
    println!("{:?} units for an item of {bytes} bytes", units(&calls));
    assert!(bytes > 10_000, "{bytes}");
    // The lease takes one unit.
    assert_eq!(units(&calls), (1.0 + bytes.div_ceil(1024) as f64, 2.0));
}

/// Without a tier, each of these requests costs a write unit for each KB, and a partition has 1,000 a second.
#[tokio::test]
async fn repeated_large_record_costs_nothing_behind_tier() {
    let (endpoint, _, _, store) = counted(DynamoDbOptions::new()).await;
    let layer = IdempotencyLayer::new(Tiered::new(store))
        .with_store_timeout(PATIENCE)
        .with_lease_ttl(Ttl::from_secs(600));
    let (app, effects) = app(layer, async |_, _| noise(300_000).into_response());
    send(&app, post("/orders", "k", "tea")).await;
    endpoint.calls();
    for _ in 0..50 {
        assert!(send(&app, post("/orders", "k", "tea")).await.is_replay());
        let another = send(&app, post("/orders", "k", "coffee")).await;
        assert_eq!(another.status, StatusCode::UNPROCESSABLE_ENTITY);
    }
    assert!(endpoint.calls().is_empty());
    assert_eq!(effects.count(), 1);
}

/// A tombstone exceeds a limit of zero. The store raises it.
#[tokio::test]
async fn record_over_least_limit_is_tombstone() {
    let options = DynamoDbOptions::new().with_record_limit(0);
    let (_endpoint, _, _, store) = counted(options).await;
    let (app, effects) = app(layer_on(store), async |_, _| noise(10_000).into_response());
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 10_000));
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn takeover_costs_one_table_and_one_index_unit() {
    let clock = ManualClock::new();
    let now = clock.clone();
    let options = DynamoDbOptions::new().with_clock_skew(Duration::ZERO);
    let options = options.with_clock(move || now.now());
    let (endpoint, _, _, store) = counted(options).await;
    let mut claim = Claim::new(KeyId::from_bytes([7; 32]), Fingerprint::from_bytes([1; 32]))
        .expect("the system has random numbers");
    claim.lease = Ttl::from_millis(50);
    let first = store.acquire(&claim).await.expect("the server runs");
    assert!(matches!(
        first,
        Acquired::Granted {
            takeover: false,
            ..
        }
    ));
    clock.advance(Duration::from_millis(100));
    let mut another = claim.clone();
    another.token = Token::random().expect("the system has random numbers");
    endpoint.calls();
    let taken = store.acquire(&another).await.expect("the server runs");
    assert!(
        matches!(taken, Acquired::Granted { takeover: true, .. }),
        "{taken:?}"
    );
    let calls = endpoint.calls();
    assert_eq!(names(&calls), ["UpdateItem"]);
    println!("a takeover: {:?} units", units(&calls));
    assert_eq!(units(&calls), (1.0, 1.0));
}
