//! A queue that delivers at least once, and its consumers: the parcels are counted.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use consumers::{Queue, Shipments, Tally, Verdict};
use tests::{
    dynamodb::{Endpoint, Meddling},
    proxy::{Mode, Proxy, Then},
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_idempotency::{IdempotencyLayer, Ttl};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore, aws_sdk_dynamodb::Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standard_queue_has_one_parcel_sent_for_each_message() {
    let drained = drain(Queue::standard(VISIBILITY), PACKING).await;
    // Every fifth deletion is forgotten, at least.
    assert!(drained.deliveries > MESSAGES, "{}", drained.deliveries);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fifo_queue_has_one_parcel_sent_for_each_message() {
    // Packing takes several times as long as the queue waits, and there are more consumers than groups: one of them has
    // nothing to do but what is delivered again.
    let drained = drain(Queue::fifo(PACKING / 2), PACKING * 3).await;
    let (deliveries, mut first) = (drained.deliveries, BTreeSet::new());
    assert!(deliveries >= 2 * MESSAGES, "{deliveries}");
    let mut handled = drained.handled;
    handled.retain(|n| first.insert(*n));
    for group in 0..GROUPS {
        let in_group = handled.iter().filter(|n| **n % GROUPS == group);
        assert!(in_group.is_sorted(), "group {group}: {handled:?}");
    }
}

struct Drained {
    deliveries: u64,
    /// The messages in the order in which they were handled, again and again where they were delivered again.
    handled: Vec<u64>,
}

/// Three consumers, each a process of its own as far as the store knows.
async fn drain(queue: Queue, packing: Duration) -> Drained {
    let place = Place::new().await;
    for n in 0..MESSAGES {
        queue.send(format!("customer {}", n % GROUPS), order(n));
    }
    let (queue, handled) = (Arc::new(queue), Arc::<Mutex<Vec<u64>>>::default());
    let mut consuming = JoinSet::new();
    for _ in 0..3 {
        let shipments = place.shipments(Duration::ZERO).with_packing(packing);
        let (queue, handled) = (Arc::clone(&queue), Arc::clone(&handled));
        consuming.spawn(async move {
            while !queue.is_empty() {
                let Some(delivery) = queue.receive() else {
                    sleep(Duration::from_millis(5)).await;
                    continue;
                };
                match shipments.receive(&delivery.body).await {
                    Verdict::Delete => {
                        let n = (0..MESSAGES).find(|n| order(*n) == delivery.body);
                        // Before the next of its group can be delivered.
                        let mut handled = handled.lock().expect("no panic");
                        handled.push(n.expect("one of ours"));
                        queue.delete(&delivery);
                    }
                    Verdict::Leave => {}
                    Verdict::DeadLetter(why) => panic!("a dead letter: {why}"),
                }
            }
        });
    }
    consuming.join_all().await;
    for n in 0..MESSAGES {
        assert_eq!(place.parcels(&order(n)).await, 1, "message {n}");
    }
    let handled = handled.lock().expect("no panic").clone();
    Drained {
        deliveries: queue.deliveries(),
        handled,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_that_are_killed_at_any_moment_send_no_parcel_twice() {
    let killed = killed_consumers(&[]).await;
    let parcels = &killed.parcels;
    assert!(parcels.iter().all(|it| *it <= 1), "{parcels:?}");
    assert!(!killed.orphans.is_empty(), "no consumer was killed at it");
    // What is refused may have been sent or not; that is why it is refused.
    let mut sent = 0;
    for (parcels, n) in parcels.iter().zip(0..) {
        let is_dead = killed.orphans.contains(&order(n));
        assert!(*parcels == 1 || is_dead, "message {n} is forgotten");
        sent += u64::from(*parcels == 1 && is_dead);
    }
    println!("{} orphans, {sent} of them sent", killed.orphans.len());
    assert!(sent > 0, "no consumer was killed between effect and record");
}

/// The test can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_that_take_over_from_the_killed_are_found_out() {
    let killed = killed_consumers(&["--careless"]).await;
    println!("{:?}", killed.parcels);
    assert!(killed.parcels.iter().any(|it| *it > 1));
}

struct Killed {
    /// For each message.
    parcels: Vec<u64>,
    /// The messages that were refused in the end because somebody had died at them.
    orphans: BTreeSet<String>,
}

/// A message is known for five minutes, which all of this has to be over in; leases are short, for the next life to find
/// orphans and not what is in progress.
async fn killed_consumers(args: &[&str]) -> Killed {
    let server = shared(StandIn::Dynoxide);
    let (table, endpoint) = (server.new_table(), format!("http://{}", server.address()));
    let mut all = vec!["--endpoint", &endpoint, "--table", &table];
    // Work after a parcel, for kills to come between it and its record.
    all.extend(["--lease", "500ms", "--skew", "0s", "shipments"]);
    all.extend(["--messages", "40", "--packing", "5ms", "--work", "100ms"]);
    all.extend(args);
    let began = Instant::now();
    let (kills, said) = crate::killed::killed(&all, 8).await;
    assert!(began.elapsed() < Duration::from_secs(4 * 60), "too slow");
    assert!(kills > 1, "killed only {kills} times");
    let tally = Tally::new(&client(server.address()), format!("{table}-tally"));
    let mut parcels = Vec::new();
    for n in 0..MESSAGES {
        parcels.push(tally.amount(&order(n)).await.expect("the server runs"));
    }
    let lines = said.lines();
    let orphans = lines.filter_map(|it| it.strip_prefix("dead letter, orphaned: "));
    Killed {
        parcels,
        orphans: orphans.map(str::to_owned).collect(),
    }
}

#[tokio::test]
async fn equal_messages_are_one_within_five_minutes_and_two_after() {
    let place = Place::new().await;
    let sent_at = async |minutes: f64| {
        let shipments = place.shipments(Duration::from_secs_f64(minutes * 60.0));
        assert_eq!(shipments.receive(&order(7)).await, Verdict::Delete);
        place.parcels(&order(7)).await
    };
    assert_eq!(sent_at(0.0).await, 1);
    assert_eq!(sent_at(4.9).await, 1);
    // The clocks of consumers may differ: nothing is forgotten before the allowance for that has passed too.
    assert_eq!(sent_at(5.1).await, 2);
    assert_eq!(sent_at(5.2).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parcel_that_was_perhaps_sent_is_a_dead_letter_and_not_sent_again() {
    let place = Place::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let parcels = Tally::new(&client(proxy.address()), &*place.tally);
    let shipments = Shipments::new(place.layer(Duration::ZERO), parcels);
    // The parcel is sent, and nobody is told.
    proxy.set(Mode::LoseReplies(Then::Cut));
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Leave);
    proxy.set(Mode::Pass);
    assert_eq!(place.parcels(&order(7)).await, 1);
    for _ in 0..3 {
        let verdict = shipments.receive(&order(7)).await;
        assert_eq!(verdict, Verdict::DeadLetter("perhaps-sent".to_owned()));
    }
    assert_eq!(place.parcels(&order(7)).await, 1);
}

#[tokio::test]
async fn what_somebody_died_at_is_refused_for_as_long_as_a_queue_keeps_it() {
    let place = Place::new().await;
    // A process that is gone: its lease is not renewed, and no outcome comes.
    let dead = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let endless = place.shipments(Duration::ZERO).with_work(Duration::MAX);
    dead.spawn(async move { endless.receive(&order(7)).await });
    while place.parcels(&order(7)).await == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    dead.shutdown_background();
    for days in [0.01, 1.0, 13.9] {
        let late = Duration::from_secs_f64(days * 24.0 * 60.0 * 60.0);
        let verdict = place.shipments(late).receive(&order(7)).await;
        assert_eq!(
            verdict,
            Verdict::DeadLetter("orphaned".to_owned()),
            "{days}"
        );
    }
    assert_eq!(place.parcels(&order(7)).await, 1);
}

#[tokio::test]
async fn a_parcel_that_was_certainly_not_sent_is_sent_when_the_message_comes_again() {
    let place = Place::new().await;
    let endpoint = Endpoint::start(shared(StandIn::Dynoxide).address());
    let parcels = Tally::new(&client(endpoint.address()), &*place.tally);
    let shipments = Shipments::new(place.layer(Duration::ZERO), parcels);
    endpoint.set(Meddling::Throttle(1));
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Leave);
    assert_eq!(place.parcels(&order(7)).await, 0);
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Delete);
    assert_eq!(place.parcels(&order(7)).await, 1);
}

struct Place {
    table: String,
    tally: String,
    client: Client,
}

impl Place {
    async fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let place = Self {
            table: server.new_table(),
            tally: server.new_table(),
            client: client(server.address()),
        };
        let made = place.store(Duration::ZERO).create_table().await;
        made.expect("the server runs");
        let tally = Tally::new(&place.client, &*place.tally);
        tally.create_table().await.expect("the server runs");
        place
    }

    /// So much later. A machine that is busy is no fault.
    fn store(&self, later: Duration) -> DynamoDbStore {
        DynamoDbOptions::new()
            .with_clock(move || SystemTime::now() + later)
            .with_timeout(PATIENCE)
            .store(&self.client, &*self.table)
    }

    fn layer(&self, later: Duration) -> IdempotencyLayer {
        IdempotencyLayer::new(self.store(later))
            .with_store_timeout(PATIENCE)
            .with_lease(Ttl::from_secs(120))
    }

    fn shipments(&self, later: Duration) -> Shipments {
        let parcels = Tally::new(&self.client, &*self.tally);
        Shipments::new(self.layer(later), parcels)
    }

    async fn parcels(&self, order: &str) -> u64 {
        let tally = Tally::new(&self.client, &*self.tally);
        tally.amount(order).await.expect("the server runs")
    }
}

fn order(n: u64) -> String {
    format!(r#"{{"order":{n},"items":["tea"]}}"#)
}

const MESSAGES: u64 = 40;
const GROUPS: u64 = 2;
const VISIBILITY: Duration = Duration::from_millis(100);
const PACKING: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(20);
