//! Many writers of one number, who retry, race, lose answers and are killed: the sum is exact.

use std::{
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use consumers::{Applied, Counter, Tally};
use tests::{
    proxy::{Fault, Proxy, Then},
    random::Random,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::{
    sync::Barrier,
    task::{JoinSet, spawn_blocking},
    time::sleep,
};
use tower_idempotency::{IdempotencyLayer, Ttl};
use tower_idempotency_dynamodb::{
    DynamoDbOptions,
    aws_sdk_dynamodb::{Client, types::AttributeValue},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_of_50_writers_who_all_retry_ends_at_the_exact_sum() {
    let place = Place::new().await;
    let counter = place.counter(&place.client).await;
    let start = Arc::new(Barrier::new(50 * 3));
    let mut writers = JoinSet::new();
    for update in 0..50 {
        for _again in 0..3 {
            let (counter, start) = (counter.clone(), Arc::clone(&start));
            writers.spawn(async move {
                start.wait().await;
                until_applied(&counter, &format!("update {update}")).await
            });
        }
    }
    let applied = writers.join_all().await;
    assert_eq!(place.sum().await, 500);
    let now = applied.iter().filter(|it| **it == Applied::Now).count();
    assert_eq!(now, 50, "one writer of each update has applied it");
}

/// An answer is lost, and the client of the SDK sends the addition again of its own accord.
#[tokio::test]
async fn what_the_sdk_sends_again_is_added_once() {
    let place = Place::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let counter = place.counter(&client(proxy.address())).await;
    proxy.once(Fault::reply_to("TransactWriteItems"), Then::Cut);
    until_applied(&counter, "update 1").await;
    assert_eq!(proxy.hits(), 1, "no answer was lost");
    assert_eq!(place.sum().await, 10);
}

/// Why an addition takes a token, or a client without retries.
#[tokio::test]
async fn what_has_no_token_is_added_twice_by_the_sdk() {
    let place = Place::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let (sdk, _) = (client(proxy.address()), place.counter(&place.client).await);
    proxy.once(Fault::reply_to("UpdateItem"), Then::Cut);
    let adding = sdk
        .update_item()
        .table_name(place.tally(&sdk).table())
        .key("name", AttributeValue::S("visits".into()))
        .update_expression("ADD amount :ten")
        .expression_attribute_values(":ten", AttributeValue::N("10".into()));
    adding.send().await.expect("an answer");
    assert_eq!(proxy.hits(), 1, "no answer was lost");
    assert_eq!(place.sum().await, 20);
}

#[tokio::test]
async fn an_update_that_comes_again_with_another_amount_is_refused() {
    let place = Place::new().await;
    let counter = place.counter(&place.client).await;
    until_applied(&counter, "update 1").await;
    assert!(counter.add("update 1", 11).await.is_err());
    assert_eq!(place.sum().await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_that_are_killed_at_any_moment_add_every_update_once() {
    let killed = Killed::play(&[]).await;
    assert_eq!(killed.sum, 500, "after {} kills", killed.kills);
}

/// The test can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_not_to_copy_is_found_out() {
    let killed = Killed::play(&["--careless"]).await;
    assert!(
        killed.sum > 500,
        "{} after {} kills",
        killed.sum,
        killed.kills
    );
}

struct Killed {
    kills: usize,
    sum: u64,
}

impl Killed {
    /// A process with many writers is killed again and again and started again, with the same updates each time.
    async fn play(args: &[&str]) -> Self {
        let place = Place::new().await;
        let (table, endpoint) = (place.table.clone(), place.endpoint());
        let mut all = vec!["--endpoint", &endpoint, "--table", &table];
        // Work after the addition, for kills to come between it and the record; leases that are over soon.
        all.extend([
            "--lease", "300ms", "--skew", "0s", "counter", "--work", "60ms",
        ]);
        all.extend(args);
        let all: Vec<_> = all.into_iter().map(str::to_owned).collect();
        let kills = spawn_blocking(move || {
            let (mut random, mut kills) = (Random(7), 0);
            while kills < KILLS {
                let mut process = start(&all);
                thread::sleep(random.around(Duration::from_millis(250)));
                process.kill().expect("a process of ours");
                // One that was done has nothing left to be killed at.
                if process.wait().expect("a process of ours").success() {
                    break;
                }
                kills += 1;
            }
            let mut process = start(&all);
            let began = Instant::now();
            while process.try_wait().expect("a process of ours").is_none() {
                if began.elapsed() > Duration::from_secs(60) {
                    process.kill().expect("a process of ours");
                    panic!("an update is stuck");
                }
                thread::sleep(Duration::from_millis(20));
            }
            assert!(process.wait().expect("a process of ours").success());
            kills
        });
        let kills = kills.await.expect("the writers come back");
        assert!(kills > 2, "killed only {kills} times");
        let tally = Tally::new(&place.client, format!("{table}-tally"));
        let sum = tally.amount("visits").await.expect("the server runs");
        println!("{kills} kills, sum {sum}");
        Self { kills, sum }
    }
}

fn start(args: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_consumers"))
        .args(args)
        .stdout(Stdio::null())
        .spawn()
        .expect("it is built")
}

async fn until_applied(counter: &Counter, update: &str) -> Applied {
    let began = Instant::now();
    loop {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{update} is stuck"
        );
        if let Some(applied) = counter.add(update, 10).await.expect("the same amount") {
            return applied;
        }
        sleep(Duration::from_millis(30)).await;
    }
}

struct Place {
    table: String,
    client: Client,
}

impl Place {
    async fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        Self {
            table: server.new_table(),
            client: client(server.address()),
        }
    }

    fn endpoint(&self) -> String {
        format!("http://{}", shared(StandIn::Dynoxide).address())
    }

    fn tally(&self, client: &Client) -> Tally {
        Tally::new(client, format!("{}-tally", self.table))
    }

    /// Whose additions take this way.
    async fn counter(&self, way: &Client) -> Counter {
        // A machine that is busy is no fault.
        let patience = Duration::from_secs(20);
        let options = DynamoDbOptions::new().with_timeout(patience);
        let store = options.store(&self.client, &*self.table);
        store.create_table().await.expect("the server runs");
        let made = self.tally(&self.client).create_table().await;
        made.expect("the server runs");
        let layer = IdempotencyLayer::new(store)
            .with_store_timeout(patience)
            .with_lease(Ttl::from_secs(120));
        Counter::new(layer, self.tally(way), "visits")
    }

    async fn sum(&self) -> u64 {
        let tally = self.tally(&self.client);
        tally.amount("visits").await.expect("the server runs")
    }
}

const KILLS: usize = 12;
