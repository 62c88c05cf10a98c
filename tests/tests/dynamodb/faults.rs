//! Requests while DynamoDB throttles, fails, does not reply, or sends incomplete replies.

use std::{
    future::{Future, poll_fn},
    io,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime},
};

use aws_credential_types::credential_fn::provide_credentials_fn;
use axum::Router;
use http::StatusCode;
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, within},
    creating,
    dynamodb::{Endpoint, EndpointFault},
    post, send,
    servers::dynamodb::{DynamoDbServer, StandIn, client, shared},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::{JoinHandle, JoinSet},
};
use tower_idempotency::{
    IdempotencyLayer, StoreFailure, Ttl,
    store::{Claim, Fingerprint, KeyId, Store},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{
        Client,
        config::{Credentials, IdentityCache, SharedIdentityCache},
        primitives::Blob,
        types::AttributeValue,
    },
};

/// Calls fail because of the endpoint's faults, and not because the machine is overloaded. Tests of calls without a
/// reply use the default timeouts.
const PATIENCE: Duration = Duration::from_secs(20);

struct HeldServer {
    endpoint: Endpoint,
    table: String,
    store: DynamoDbStore,
}

async fn held() -> HeldServer {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let table = server.new_table();
    let options = DynamoDbOptions::new().with_timeout(PATIENCE);
    let store = options.store(&client(endpoint.address()), table.as_str());
    store.create_table().await.expect("the server runs");
    endpoint.calls();
    HeldServer {
        endpoint,
        table,
        store,
    }
}

impl HeldServer {
    fn creating(&self) -> (Router, Effects) {
        creating(self.layer())
    }

    /// Returns a layer whose leases need no renewal during a test.
    fn layer(&self) -> IdempotencyLayer {
        IdempotencyLayer::new(self.store.clone())
            .with_store_timeout(PATIENCE)
            .with_lease_ttl(Ttl::from_secs(600))
    }
}

async fn order(app: &Router, key: &str) -> TestResponse {
    send(app, post("/orders", key, "tea")).await
}

fn assert_unavailable(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.code(), "store-unavailable");
}

// F-179
#[tokio::test]
async fn throttling_that_passes_is_not_noticed() {
    let held = held().await;
    let (app, effects) = held.creating();
    for (n, meddling) in [2, 4].map(EndpointFault::Throttle).into_iter().enumerate() {
        held.endpoint.set(meddling);
        let key = format!("key-{n}");
        assert_eq!(order(&app, &key).await.status, StatusCode::CREATED);
        assert!(order(&app, &key).await.is_replay());
        assert_eq!(effects.count(), n as u64 + 1);
    }
    let calls = held.endpoint.calls();
    let throttled = calls.iter().filter(|it| {
        let named = it.response["__type"].as_str().unwrap_or_default();
        named.ends_with("ProvisionedThroughputExceededException")
    });
    assert_eq!(throttled.count(), 6);
}

// F-179
#[tokio::test]
async fn lasting_throttling_gets_503() {
    let held = held().await;
    let (app, effects) = held.creating();
    held.endpoint.set(EndpointFault::Throttle(usize::MAX));
    let began = Instant::now();
    assert_unavailable(&order(&app, "k").await);
    // The response comes at once, except for backoff between retries and delays of a busy machine.
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(effects.count(), 0);
    let calls = held.endpoint.calls().len();
    assert!((2..=9).contains(&calls), "{calls} calls");
    held.endpoint.set(EndpointFault::None);
    assert_eq!(order(&app, "k").await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// F-179
#[tokio::test]
async fn throttled_completion_is_stored_later() {
    let held = held().await;
    let barrier = Barrier::closed();
    let passed = barrier.clone();
    let (app, effects) = app(held.layer(), move |n, _| {
        let passed = passed.clone();
        async move {
            passed.pass().await;
            format!("execution {n}")
        }
    });
    let running = tokio::spawn({
        let app = app.clone();
        async move { order(&app, "k").await }
    });
    barrier.arrival().await;
    held.endpoint.set(EndpointFault::Throttle(usize::MAX));
    barrier.open_for_good();
    let response = running.await.expect("an answer");
    assert_eq!(
        (response.status, response.text()),
        (StatusCode::OK, "execution 1")
    );
    held.endpoint.set(EndpointFault::None);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let retry = order(&app, "k").await;
        if retry.is_replay() {
            assert_eq!(retry.text(), "execution 1");
            break;
        }
        assert_eq!(retry.status, StatusCode::CONFLICT);
        assert!(Instant::now() < deadline, "never stored");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(effects.count(), 1);
}

// F-176
#[tokio::test]
async fn sdk_retry_meeting_own_write_is_harmless() {
    let held = held().await;
    let (created, effects) = held.creating();
    // The acquire takes effect, its reply is lost, and the call is repeated.
    held.endpoint.set(EndpointFault::LoseReplies(1));
    let first = order(&created, "k").await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(held.endpoint.operations(), ["UpdateItem"; 3]);
    assert!(order(&created, "k").await.is_replay());
    assert_eq!(effects.count(), 1);

    // The same for the completion and the release.
    for (status, retried) in [(StatusCode::OK, false), (StatusCode::BAD_GATEWAY, true)] {
        let barrier = Barrier::closed();
        let passed = barrier.clone();
        let layer = held.layer();
        let (app, effects) = app(layer, move |_, _| {
            let passed = passed.clone();
            async move {
                passed.pass().await;
                status
            }
        });
        let key = status.as_str().to_owned();
        let running = tokio::spawn({
            let (app, key) = (app.clone(), key.clone());
            async move { order(&app, &key).await }
        });
        barrier.arrival().await;
        held.endpoint.set(EndpointFault::LoseReplies(1));
        barrier.open_for_good();
        assert_eq!(running.await.expect("an answer").status, status);
        assert_eq!(order(&app, &key).await.is_replay(), !retried);
        assert_eq!(effects.count(), 1 + u64::from(retried));
    }
}

/// Starts a proxy that closes the connection of the first update. The update reaches the server when the barrier opens. The
/// task ends when the server has replied to it.
async fn delaying_first_update(barrier: &Barrier) -> (SocketAddr, JoinHandle<()>) {
    let server = shared(StandIn::Dynoxide).address();
    let listener = TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    let (delay, delayed) = oneshot::channel();
    tokio::spawn(async move {
        let mut delay = Some(delay);
        loop {
            let (mut client, _) = listener.accept().await.expect("a connection");
            let request = read_request(&mut client).await.expect("a request");
            let is_update = request.windows(10).any(|it| it == b"UpdateItem");
            if let Some(delay) = delay.take_if(|_| is_update) {
                delay.send(request).expect("the test runs");
                continue;
            }
            tokio::spawn(async move {
                let mut server = TcpStream::connect(server).await?;
                server.write_all(&request).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    let barrier = barrier.clone();
    let delivered = tokio::spawn(async move {
        let request = delayed.await.expect("an update");
        barrier.pass().await;
        let mut server = TcpStream::connect(server).await.expect("it runs");
        server.write_all(&request).await.expect("it runs");
        let mut reply = [0; 12];
        server.read_exact(&mut reply).await.expect("a reply");
        assert_eq!(reply, *b"HTTP/1.1 200");
    });
    (address, delivered)
}

/// Reads the first request of a connection.
async fn read_request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    loop {
        let head = request.windows(4).position(|it| it == b"\r\n\r\n");
        if let Some(head) = head {
            let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
            let length = text.split_once("content-length: ").expect("its length").1;
            let length = length.lines().next().expect("a number").trim();
            if request.len() == head + 4 + length.parse::<usize>().expect("a number") {
                return Ok(request);
            }
        }
        if client.read_buf(&mut request).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

// F-991
/// The first attempt of an acquire is applied after the execution has released the key. No request has that lease, and the
/// layer releases it again.
#[tokio::test]
async fn late_acquire_does_not_hold_key() {
    let held = held().await;
    let barrier = Barrier::closed();
    let (address, delivered) = delaying_first_update(&barrier).await;
    let options = DynamoDbOptions::new().with_timeout(PATIENCE);
    let store = options.store(&client(address), held.table.as_str());
    let layer = IdempotencyLayer::new(store).with_store_timeout(PATIENCE);
    // Longer than the test.
    let layer = layer.with_lease_ttl(Ttl::from_secs(3_600));
    let (app, effects) = app(layer, async |n, _| match n {
        1 => StatusCode::BAD_GATEWAY,
        _ => StatusCode::CREATED,
    });
    assert_eq!(order(&app, "k").await.status, StatusCode::BAD_GATEWAY);
    barrier.open_for_good();
    delivered.await.expect("it is applied");
    let deadline = Instant::now() + Duration::from_secs(120);
    while order(&app, "k").await.status != StatusCode::CREATED {
        assert!(Instant::now() < deadline, "the key is held");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(effects.count(), 2);
}

/// The SDK repeats no acquire that the service may have received. The service rejects a throttled one.
#[tokio::test]
async fn sdk_repeats_only_throttled_acquires() {
    let held = held().await;
    for (n, (fault, attempts)) in [
        (EndpointFault::LoseReplies(1), 1),
        (EndpointFault::Throttle(2), 3),
    ]
    .into_iter()
    .enumerate()
    {
        held.endpoint.set(fault);
        let acquired = held.store.acquire(&claim(n as u8)).await;
        assert_eq!(acquired.is_ok(), attempts == 3, "{acquired:?}");
        assert_eq!(held.endpoint.operations().len(), attempts);
    }
}

// F-177
#[tokio::test]
async fn refusal_without_item_triggers_read() {
    let held = held().await;
    let (app, effects) = held.creating();
    order(&app, "k").await;
    held.endpoint.set(EndpointFault::LeaveOutItems);
    held.endpoint.calls();
    assert!(order(&app, "k").await.is_replay());
    let calls = held.endpoint.calls();
    let operations: Vec<_> = calls.iter().map(|it| it.operation.as_str()).collect();
    assert_eq!(operations, ["UpdateItem", "GetItem"]);
    // A copy that lags behind would show a lease or a record that no longer exists.
    assert_eq!(calls[1].request["ConsistentRead"], true);
    let other = send(&app, post("/orders", "k", "coffee")).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(effects.count(), 1);
}

// F-181
#[tokio::test]
async fn response_over_record_limit_executes_once() {
    let held = held().await;
    let layer = held.layer();
    // These bytes do not compress.
    let noise: Vec<u8> = (0..600_000_u64)
        .map(|n| {
            (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u8 ^ (n.wrapping_mul(n) >> 11) as u8
        })
        .collect();
    let body = noise.clone();
    let (app, effects) = app(layer, move |_, _| {
        let body = body.clone();
        async move { body }
    });
    let first = order(&app, "k").await;
    assert_eq!(
        (first.status, first.body.len()),
        (StatusCode::OK, noise.len())
    );
    assert!(first.body == noise);
    let retry = order(&app, "k").await;
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!(effects.count(), 1);
}

#[tokio::test]
async fn store_recovers_after_unresponsive_service() {
    let server = DynamoDbServer::start(StandIn::Dynoxide);
    let store = server.store(DynamoDbOptions::new()).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    order(&app, "before").await;
    server.pause();
    let began = Instant::now();
    assert_unavailable(&order(&app, "fresh").await);
    assert_unavailable(&order(&app, "before").await);
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(effects.count(), 1);
    server.resume();
    let deadline = Instant::now() + Duration::from_secs(120);
    while order(&app, "fresh").await.status != StatusCode::CREATED {
        assert!(Instant::now() < deadline, "the store does not recover");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(order(&app, "fresh").await.is_replay());
    assert!(order(&app, "before").await.is_replay());
    assert_eq!(effects.count(), 2);
}

// F-180, F-999
#[tokio::test]
async fn item_of_later_version_is_preserved() {
    let held = held().await;
    // The service works, so the policy for its outages does not apply.
    let policy = StoreFailure::DangerouslyExecuteUnprotected;
    let (app, effects) = creating(held.layer().with_store_failure(policy));
    order(&app, "k").await;
    let direct = client(shared(StandIn::Dynoxide).address());
    let scan = || direct.scan().table_name(&held.table).send();
    let items = scan().await.expect("the server runs").items.expect("items");
    for (name, value) in [
        ("status", Some("of a later version")),
        ("fingerprint", Some("short")),
        ("expires", None),
        ("record", None),
    ] {
        let mut item = items[0].clone();
        item.remove(name);
        item.extend(value.map(|value| (name.to_owned(), AttributeValue::S(value.to_owned()))));
        let put = direct.put_item().table_name(&held.table);
        let put = put.set_item(Some(item));
        put.send().await.expect("the server runs");
        let before = scan().await.expect("the server runs").items;
        held.endpoint.calls();
        let refused = order(&app, "k").await;
        assert_unavailable(&refused);
        assert_eq!(refused.header("retry-after"), None, "{name}");
        assert_eq!(effects.count(), 1, "{name}");
        let updates = held.endpoint.operations().into_iter();
        let updates = updates.filter(|it| it == "UpdateItem").count();
        assert_eq!(updates, 1, "{name}");
        assert_eq!(scan().await.expect("the server runs").items, before);
    }
}

// F-183
// The service replies as it does right after it has created a table, and while another client deletes one.
#[tokio::test]
async fn table_created_despite_delayed_visibility() {
    let held = held().await;
    held.endpoint.set(EndpointFault::HideTables(2));
    held.store.create_table().await.expect("the table exists");
    let operations = held.endpoint.operations();
    let times = |name: &str| operations.iter().filter(|it| *it == name).count();
    // If the table was deleted meanwhile, the store does not wait for it.
    assert_eq!((times("DescribeTable"), times("CreateTable")), (3, 3));
}

// F-183
#[tokio::test]
async fn updating_table_is_usable() {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let store = DynamoDbStore::new(&client(endpoint.address()), server.new_table());
    endpoint.set(EndpointFault::UpdateTables(2));
    let began = Instant::now();
    store.create_table().await.expect("usable");
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    // Setting the TTL is retried while the table is in use.
    let collected = endpoint.operations().into_iter();
    assert_eq!(collected.filter(|it| it == "UpdateTimeToLive").count(), 3);
}

// F-183
// The service rejects queries of an index that is being created.
#[tokio::test]
async fn listing_waits_for_index_creation() {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    for (shards, expected) in [(1, 4), (0, 1)] {
        let options = DynamoDbOptions::new().with_index_shards(shards);
        let store = options.store(&client(endpoint.address()), server.new_table());
        endpoint.calls();
        endpoint.set(EndpointFault::MakeIndexes(3));
        store.create_table().await.expect("usable");
        let described = endpoint.operations().into_iter();
        let described = described.filter(|it| it == "DescribeTable").count();
        assert_eq!(described, expected, "{shards} shards");
    }
}

/// Counts the loads of credentials. The test holds each load until it lets one through.
#[derive(Clone, Debug)]
struct Loads {
    barrier: Barrier,
    begun: Arc<AtomicU64>,
    ended: Arc<AtomicU64>,
}

impl Loads {
    fn held() -> Self {
        Self {
            barrier: Barrier::closed(),
            begun: Arc::default(),
            ended: Arc::default(),
        }
    }

    fn begun(&self) -> u64 {
        self.begun.load(SeqCst)
    }
}

/// Returns a store with this timeout, whose credentials expire this long after they were loaded. `None` is in the past.
async fn with_credentials(
    cache: SharedIdentityCache,
    limit: Duration,
    loads: &Loads,
    valid: impl Fn(u64) -> Option<Duration> + Send + Sync + 'static,
) -> DynamoDbStore {
    let loads = loads.clone();
    let source = provide_credentials_fn(move || {
        let (loads, valid) = (loads.clone(), valid(loads.begun.fetch_add(1, SeqCst)));
        async move {
            loads.barrier.pass().await;
            let now = SystemTime::now();
            let end = valid.map_or(now - HOUR, |valid| now + valid);
            loads.ended.fetch_add(1, SeqCst);
            Ok(Credentials::new("a", "a", None, Some(end), "tests"))
        }
    });
    let server = shared(StandIn::Dynoxide);
    let (direct, table) = (client(server.address()), server.new_table());
    let made = DynamoDbStore::new(&direct, &table).create_table().await;
    made.expect("the server runs");
    let config = direct.config().to_builder();
    let config = config.credentials_provider(source).identity_cache(cache);
    let options = DynamoDbOptions::new().with_timeout(limit);
    options.store(&Client::from_conf(config.build()), table)
}

// F-182
#[tokio::test]
async fn slow_credentials_are_loaded() {
    let (loads, cache) = (Loads::held(), IdentityCache::lazy().build());
    let store = with_credentials(cache, HALF_A_SECOND, &loads, |_| Some(HOUR)).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    assert_unavailable(&order(&app, "k").await);
    assert_eq!(loads.begun(), 1);
    loads.barrier.open_for_good();
    let deadline = Instant::now() + Duration::from_secs(60);
    while order(&app, "k").await.status != StatusCode::CREATED {
        assert!(Instant::now() < deadline, "never loaded");
    }
    assert_eq!(effects.count(), 1);
    assert_eq!(loads.begun(), 1);
}

// F-182
#[tokio::test]
async fn expired_credentials_are_reloaded() {
    let (loads, cache) = (Loads::held(), IdentityCache::lazy().build());
    let valid = |n| (n > 0).then_some(HOUR);
    let store = with_credentials(cache, HALF_A_SECOND, &loads, valid).await;
    let claim = claim(1);
    store.acquire(&claim).await.expect_err("not loaded yet");
    // The store does not wait for the credentials; they are loaded later and have expired by then.
    loads.barrier.open_for_good();
    let ended = async {
        while loads.ended.load(SeqCst) < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(Duration::from_secs(60), ended).await;
    let deadline = Instant::now() + Duration::from_secs(60);
    // On a busy machine, half a second may be too short to connect.
    while let Err(error) = store.acquire(&claim).await {
        assert!(Instant::now() < deadline, "never loaded: {error:?}");
    }
    assert_eq!(loads.begun(), 2);
}

// F-182
#[tokio::test]
async fn hanging_credential_load_is_abandoned() {
    let (loads, cache) = (Loads::held(), IdentityCache::lazy().build());
    let store = with_credentials(cache, HALF_A_SECOND, &loads, |_| Some(HOUR)).await;
    let (claim, began) = (claim(1), Instant::now());
    while let Err(error) = store.acquire(&claim).await {
        // The second load ends at once.
        if loads.begun() > 1 {
            loads.barrier.open_for_good();
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{error:?}");
    }
    assert!(began.elapsed() > Duration::from_secs(9), "too soon");
    assert_eq!(loads.begun(), 2);
}

// F-182
#[tokio::test]
async fn concurrent_calls_share_credential_load() {
    let (loads, cache) = (Loads::held(), IdentityCache::no_cache());
    let store = with_credentials(cache, PATIENCE, &loads, |_| Some(HOUR)).await;
    let (mut calls, waiting) = (JoinSet::new(), Arc::<AtomicU64>::default());
    for n in 0..8 {
        let (store, claim, waiting) = (store.clone(), claim(n), Arc::clone(&waiting));
        calls.spawn(async move {
            let mut acquiring = pin!(store.acquire(&claim));
            let mut waits = false;
            poll_fn(|cx| {
                let acquired = acquiring.as_mut().poll(cx);
                // After its first poll, a call waits for the credentials.
                if !std::mem::replace(&mut waits, true) {
                    waiting.fetch_add(1, SeqCst);
                }
                acquired
            })
            .await
        });
    }
    let all_wait = async {
        while waiting.load(SeqCst) < 8 || loads.begun() < 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within(Duration::from_secs(60), all_wait).await;
    assert_eq!(loads.begun(), 1);
    loads.barrier.open_for_good();
    for acquired in calls.join_all().await {
        acquired.expect("within its time");
    }
    assert_eq!(loads.begun(), 1);
    store.acquire(&claim(9)).await.expect("loaded again");
    assert_eq!(loads.begun(), 2);
}

fn claim(n: u8) -> Claim {
    let claim = Claim::new(KeyId::from_bytes([n; 32]), Fingerprint::from_bytes([n; 32]));
    claim.expect("the system has random numbers")
}

const HALF_A_SECOND: Duration = Duration::from_millis(500);
const HOUR: Duration = Duration::from_secs(3_600);

/// No error message contains stored data, in any of its formats.
#[tokio::test]
async fn errors_contain_no_keys_or_records() {
    let held = held().await;
    let server = shared(StandIn::Dynoxide);
    let missing = DynamoDbOptions::new().with_timeout(PATIENCE);
    let missing = missing.store(&client(server.address()), "no-such-table");
    let claim = || {
        let hush = b"hushhushhushhushhushhushhushhush";
        let claim = Claim::new(KeyId::from_bytes(*hush), Fingerprint::from_bytes(*hush));
        claim.expect("the system has random numbers")
    };
    let mut errors = vec![missing.acquire(&claim()).await.expect_err("no table")];
    let lease = claim().lease_ref(1);
    let record = || "hush".into();
    let retention = Ttl::from_secs(60);
    errors.push(
        missing
            .complete(&lease, record(), retention)
            .await
            .expect_err("no table"),
    );
    for meddling in [EndpointFault::Throttle(99), EndpointFault::LoseReplies(99)] {
        held.endpoint.set(meddling);
        errors.push(held.store.acquire(&claim()).await.expect_err("refused"));
        errors.push(
            held.store
                .complete(&lease, record(), retention)
                .await
                .expect_err("refused"),
        );
    }
    let hidden = format!("{:?}", Blob::new(*b"hush"));
    for error in errors {
        let message = format!("{error} {error:?}");
        for secret in ["hush", "68757368", "aHVza", &hidden] {
            assert!(!message.contains(secret), "{message}");
        }
        assert!(
            message.contains("Exception") || message.contains("Error"),
            "{message}"
        );
    }
}
