//! Many writers of one number, which retry, race, lose replies and are killed: the sum is exact.

use std::{
    io::Read,
    net::SocketAddr,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use consumers::{Applied, Counter, Tally, Unadded};
use tests::{
    GuardedChild, few_or,
    proxy::{ConnectionEnd, Fault, Mode, Proxy},
    servers::{
        dynamodb::{StandIn, client, shared},
        free_port,
    },
};
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, Lease, NeedsAttention, Ttl,
    run_once::{Outcome, WorkError},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions,
    aws_sdk_dynamodb::{Client, types::AttributeValue},
};

/// Each writer has a separate layer, store and client, like a process: the writers share only the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sum_is_exact_after_50_retrying_writers() {
    let fixture = CounterFixture::new().await;
    let start = Arc::new(Barrier::new(50 * 3));
    let mut writers = JoinSet::new();
    for update in 0..50 {
        for _again in 0..3 {
            let own = client(shared(StandIn::Dynoxide).address());
            let counter = fixture.counter(&own, Duration::ZERO);
            let start = Arc::clone(&start);
            writers.spawn(async move {
                start.wait().await;
                until_applied(&counter, &format!("update {update}")).await
            });
        }
    }
    let applied = writers.join_all().await;
    assert_eq!(fixture.sum().await, 500);
    let now = applied.iter().filter(|it| **it == Applied::Now).count();
    assert_eq!(now, 50, "one writer of each update has applied it");

    let late = fixture.counter(&fixture.client, Duration::ZERO);
    for update in 0..50 {
        let again = late.add(&format!("update {update}"), 10).await;
        assert_eq!(again.expect("the same amount"), Applied::Before);
    }
    assert_eq!(fixture.sum().await, 500);
}

/// The SDK gives each of the two calls another token: only the table can recognise the second addition.
#[tokio::test]
async fn two_calls_with_same_token_add_once() {
    let fixture = CounterFixture::new().await;
    let tally = fixture.tally(&fixture.client);
    assert!(tally.add("visits", 10, "one").await.expect("it runs"));
    assert!(!tally.add("visits", 10, "one").await.expect("it runs"));
    assert_eq!(fixture.sum().await, 10);
    assert!(tally.add("visits", 10, "another").await.expect("it runs"));
    assert_eq!(fixture.sum().await, 20);
}

#[tokio::test]
async fn update_is_not_added_again_after_record_expiry() {
    let fixture = CounterFixture::new().await;
    let today = fixture.counter(&fixture.client, Duration::ZERO);
    assert_eq!(until_applied(&today, "update 1").await, Applied::Now);
    let days = Duration::from_secs(3 * 24 * 60 * 60);
    let later = fixture.counter(&fixture.client, days);
    assert_eq!(until_applied(&later, "update 1").await, Applied::Before);
    assert_eq!(fixture.sum().await, 10);
}

/// Shows that an addition needs a token, or a client without retries.
#[tokio::test]
async fn sdk_adds_twice_without_token() {
    let fixture = CounterFixture::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let sdk = client(proxy.address());
    proxy.once(Fault::reply_to("UpdateItem"), ConnectionEnd::Cut);
    let adding = sdk
        .update_item()
        .table_name(fixture.tally_table())
        .key("name", AttributeValue::S("visits".into()))
        .update_expression("ADD amount :ten")
        .expression_attribute_values(":ten", AttributeValue::N("10".into()));
    adding.send().await.expect("a reply");
    assert_eq!(proxy.injected_faults(), 1, "no reply was lost");
    assert_eq!(fixture.sum().await, 20);
}

#[tokio::test]
async fn repeated_update_with_other_amount_is_refused() {
    let fixture = CounterFixture::new().await;
    let counter = fixture.counter(&fixture.client, Duration::ZERO);
    until_applied(&counter, "update 1").await;
    assert!(counter.add("update 1", 11).await.is_err());
    assert_eq!(fixture.sum().await, 10);
}

#[tokio::test]
async fn permanent_failure_is_error() {
    let fixture = CounterFixture::new().await;
    let nowhere = Tally::new(&fixture.client, "no-such-table");
    let counter = Counter::new(fixture.layer(Duration::ZERO), nowhere, "visits");
    let error = counter.add("update 1", 10).await.expect_err("no table");
    assert!(error.to_string().contains("ResourceNotFound"), "{error}");

    let stuck = NeedsAttention::new("refund-failed");
    let gives_up = async move |_: Lease| Err::<bool, _>(WorkError::NeedsAttention(stuck, "why"));
    let updates = fixture.layer(Duration::ZERO).with_namespace("updates");
    let given_up = updates
        .run_once("update 2", 10_u32.to_be_bytes(), gives_up)
        .await;
    assert_eq!(given_up.expect("it runs"), Outcome::Failed("why"));
    let counter = fixture.counter(&fixture.client, Duration::ZERO);
    let error = counter.add("update 2", 10).await.expect_err("unresolved");
    assert!(error.to_string().contains("refund-failed"), "{error}");
}

/// The lease is renewed while the addition runs: without a timeout it would run indefinitely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addition_ends_in_time_if_server_is_unresponsive() {
    let fixture = CounterFixture::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    proxy.set(Mode::Hold);
    let tally = Tally::new(&client(proxy.address()), &*fixture.tally_table());
    let tally = tally.with_timeout(Duration::from_millis(500));
    let all = async move {
        let unchecked = tally.add_unchecked("visits", 10).await;
        assert!(matches!(unchecked, Err(Unadded::Perhaps(_))));
        let checked = tally.add("visits", 10, "token").await;
        assert!(matches!(checked, Err(Unadded::Perhaps(_))));
        let counter = Counter::new(fixture.layer(Duration::ZERO), tally, "visits");
        let applied = counter.add("update 1", 10).await;
        assert_eq!(applied.expect("no error"), Applied::Later);
    };
    let ended = timeout(Duration::from_secs(120), all).await;
    ended.expect("each addition ends at its timeout of half a second");
}

#[tokio::test]
async fn unsent_or_rejected_addition_is_certain() {
    // The port has no listener.
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let unreachable = Tally::new(&client(address), "visits");
    let unadded = unreachable.add_unchecked("visits", 10).await;
    assert!(matches!(unadded, Err(Unadded::Not(_))), "{unadded:?}");

    let fixture = CounterFixture::new().await;
    let nowhere = Tally::new(&fixture.client, "no-such-table");
    let unadded = nowhere.add_unchecked("visits", 10).await;
    assert!(matches!(unadded, Err(Unadded::Never(_))), "{unadded:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_writers_add_each_update_once() {
    let fixture = CounterFixture::new().await;
    let added = fixture.kill_writers_after_adding(&[]).await;
    let output = crate::killed::run_to_end(&fixture.writers(&["--work", "0s"])).await;
    assert_eq!(fixture.sum().await, 500, "{added} when killed; {output}");
}

/// Shows that the test above can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn careless_writers_add_updates_twice_when_killed() {
    let fixture = CounterFixture::new().await;
    let added = fixture.kill_writers_after_adding(&["--careless"]).await;
    crate::killed::run_to_end(&fixture.writers(&["--work", "0s", "--careless"])).await;
    // Each addition from before the kill is executed once more.
    let sum = fixture.sum().await;
    assert!(sum >= 500 + added, "{added} when killed, {sum} in the end");
}

/// The kills may hit any moment, so this test checks only the sum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn randomly_killed_writers_add_each_update_once() {
    let fixture = CounterFixture::new().await;
    let (kills, _) =
        crate::killed::kill_at_random(&fixture.writers(&["--work", "60ms"]), few_or(6, 12)).await;
    let sum = fixture.sum().await;
    println!("{kills} kills, sum {sum}");
    assert_eq!(sum, 500, "after {kills} kills");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_fail_without_database() {
    let fixture = CounterFixture::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let endpoint = format!("http://{}", proxy.address());
    let mut command = Command::new(env!("CARGO_BIN_EXE_consumers"));
    command
        .args(["--endpoint", &endpoint, "--table", &fixture.table])
        .args(["--patience", "3s", "counter", "--updates", "5"])
        // No update is recorded before the test has seen the first addition and cut the connections.
        .args(["--work", "5s"]);
    let mut process = GuardedChild::spawn(&command, Stdio::inherit(), Stdio::piped());
    let mut stderr = process.stderr();
    let said = thread::spawn(move || {
        let mut said = String::new();
        stderr.read_to_string(&mut said).map(|_| said)
    });
    let began = Instant::now();
    while fixture.sum().await == 0 {
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "nothing is added"
        );
        sleep(Duration::from_millis(10)).await;
    }
    proxy.set(Mode::Cut);
    let ended = loop {
        if let Some(ended) = process.try_wait() {
            break ended;
        }
        assert!(began.elapsed() < Duration::from_secs(240), "it goes on");
        sleep(Duration::from_millis(20)).await;
    };
    assert!(!ended.success());
    let said = said.join().expect("no panic").expect("text");
    assert!(said.contains("WARN"), "{said}");
    assert!(
        said.contains("not all messages were processed in time"),
        "{said}"
    );
}

async fn until_applied(counter: &Counter, update: &str) -> Applied {
    let began = Instant::now();
    loop {
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "{update} is stuck"
        );
        let applied = counter.add(update, 10).await.expect("the same amount");
        if applied != Applied::Later {
            return applied;
        }
        sleep(Duration::from_millis(30)).await;
    }
}

struct CounterFixture {
    endpoint: String,
    table: String,
    client: Client,
}

impl CounterFixture {
    async fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let fixture = Self {
            endpoint: format!("http://{}", server.address()),
            table: server.new_table(),
            client: client(server.address()),
        };
        let store = DynamoDbOptions::new().store(&fixture.client, &*fixture.table);
        store.create_table().await.expect("the server runs");
        let made = fixture.tally(&fixture.client).create_table().await;
        made.expect("the server runs");
        fixture
    }

    /// Returns the arguments of a process with writers of 50 updates by 10, and leases that expire soon after a kill.
    fn writers<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let tables = ["--endpoint", &self.endpoint, "--table", &self.table];
        let leases = ["--lease", "500ms", "--skew", "0s", "--patience", "1h"];
        let writers = ["counter", "--writers", "2"];
        [&tables[..], &leases, &writers, more].concat()
    }

    /// Starts writers that wait for an hour between an addition and its record, and kills them when an addition has been
    /// made. Returns the sum then.
    async fn kill_writers_after_adding(&self, more: &[&str]) -> u64 {
        let args = self.writers(&[&["--work", "1h"], more].concat());
        crate::killed::kill_at(&args, async || self.sum_or_zero().await > 0).await;
        self.sum().await
    }

    /// Returns 0 if the server does not reply in time.
    async fn sum_or_zero(&self) -> u64 {
        let tally = self.tally(&self.client);
        tally.amount("visits").await.unwrap_or(0)
    }

    fn tally_table(&self) -> String {
        format!("{}-tally", self.table)
    }

    /// Uses a long timeout, because a busy machine is not a fault.
    fn tally(&self, client: &Client) -> Tally {
        Tally::new(client, self.tally_table()).with_timeout(PATIENCE)
    }

    /// Returns a layer whose clock is ahead by `later`.
    fn layer(&self, later: Duration) -> IdempotencyLayer {
        self.layer_by(&self.client, later)
    }

    fn layer_by(&self, client: &Client, later: Duration) -> IdempotencyLayer {
        let options = DynamoDbOptions::new()
            .with_clock(move || SystemTime::now() + later)
            .with_timeout(PATIENCE);
        IdempotencyLayer::new(options.store(client, &*self.table))
            .with_store_timeout(PATIENCE)
            .with_lease_ttl(Ttl::from_secs(120))
    }

    fn counter(&self, client: &Client, later: Duration) -> Counter {
        Counter::new(self.layer_by(client, later), self.tally(client), "visits")
    }

    async fn sum(&self) -> u64 {
        let tally = self.tally(&self.client);
        tally.amount("visits").await.expect("the server runs")
    }
}

const PATIENCE: Duration = Duration::from_secs(20);
