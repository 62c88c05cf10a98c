//! A queue that delivers at least once, and its consumers: the parcels are counted.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use consumers::{Queue, Shipments, Tally, Verdict};
use tests::{
    HANG_GUARD,
    dynamodb::{Endpoint, EndpointFault},
    few_or,
    proxy::{ConnectionEnd, Mode, Proxy},
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, Ttl,
    testing::{Fault, FaultInjector, Operation},
};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore, aws_sdk_dynamodb::Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standard_queue_sends_one_parcel_per_message() {
    let drained = drain(Queue::standard(VISIBILITY), PACKING, 1).await;
    // The queue loses at least every fifth deletion.
    assert!(drained.deliveries > MESSAGES, "{}", drained.deliveries);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifo_queue_sends_one_parcel_per_message() {
    // Packing takes several times as long as the queue waits. There are more consumers than groups, so a redelivered message
    // always finds a free consumer.
    let drained = drain(Queue::fifo(PACKING / 2), PACKING * 3, 2).await;
    let (mut handled, mut first) = (drained.handled, BTreeSet::new());
    handled.retain(|n| first.insert(*n));
    for group in 0..GROUPS {
        let in_group = handled.iter().filter(|n| **n % GROUPS == group);
        assert!(in_group.is_sorted(), "group {group}: {handled:?}");
    }
}

struct Drained {
    deliveries: u64,
    /// The messages in the order in which they were handled, including repeated deliveries.
    handled: Vec<u64>,
}

/// Drains the queue with three consumers, each a process of its own as far as the store knows. No message is deleted before
/// the queue has delivered it `at_least` times.
async fn drain(queue: Queue, packing: Duration, at_least: usize) -> Drained {
    let fixture = ShipmentFixture::new().await;
    for n in 0..MESSAGES {
        queue.send(format!("customer {}", n % GROUPS), order(n));
    }
    let (queue, handled) = (Arc::new(queue), Arc::<Mutex<Vec<u64>>>::default());
    let seen = Arc::<Mutex<BTreeMap<String, usize>>>::default();
    let mut consuming = JoinSet::new();
    for _ in 0..3 {
        let shipments = fixture.shipments(Duration::ZERO).with_packing(packing);
        let (queue, handled) = (Arc::clone(&queue), Arc::clone(&handled));
        let seen = Arc::clone(&seen);
        consuming.spawn(async move {
            while !queue.is_empty() {
                let Some(delivery) = queue.receive() else {
                    sleep(Duration::from_millis(5)).await;
                    continue;
                };
                let deliveries = |more| {
                    let mut seen = seen.lock().expect("no panic");
                    let deliveries = seen.entry(delivery.body.clone()).or_default();
                    *deliveries += more;
                    *deliveries
                };
                deliveries(1);
                match shipments.receive(&delivery.body).await {
                    Verdict::Delete => {
                        while deliveries(0) < at_least {
                            sleep(Duration::from_millis(5)).await;
                        }
                        let n = (0..MESSAGES).find(|n| order(*n) == delivery.body);
                        // This is recorded before the next message of the group can be delivered.
                        let mut handled = handled.lock().expect("no panic");
                        handled.push(n.expect("a message of this test"));
                        queue.delete(&delivery);
                    }
                    Verdict::Leave => {}
                    Verdict::DeadLetter(why) => panic!("a dead letter: {why}"),
                }
            }
        });
    }
    let drained = timeout(HANG_GUARD, consuming.join_all()).await;
    drained.expect("the queue becomes empty");
    for n in 0..MESSAGES {
        assert_eq!(fixture.parcels(&order(n)).await, 1, "message {n}");
    }
    let handled = handled.lock().expect("no panic").clone();
    Drained {
        deliveries: queue.deliveries(),
        handled,
    }
}

/// The consumers are killed with parcels sent and not recorded: a retry must not send those again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_killed_after_sending_send_once() {
    let consumers = Consumers::new();
    // After a parcel, its consumer waits for an hour before the layer records it.
    let stopped = consumers.args(&["--packing", "0s", "--work", "1h"]);
    crate::killed::kill_at(&stopped, async || consumers.any_is_sent().await).await;
    let before = consumers.parcels().await;

    let ended = consumers.run_to_end(&[]).await;
    ended.assert_each_is_sent_once_or_dead();
    for (sent, n) in before.iter().zip(0..) {
        let is_dead = ended.orphans.contains(&order(n));
        assert!(
            *sent == 0 || is_dead,
            "message {n} was sent and is no orphan"
        );
    }
}

/// The consumers are killed with leases acquired and nothing sent: nothing may be sent under those either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consumers_killed_before_sending_leave_dead_letters() {
    let consumers = Consumers::new();
    let stopped = consumers.args(&["--packing", "1h"]);
    crate::killed::kill_at(&stopped, async || consumers.leases().await > 0).await;
    let leases = consumers.leases().await;

    let ended = consumers.run_to_end(&[]).await;
    ended.assert_each_is_sent_once_or_dead();
    let unsent = ended.parcels.iter().filter(|it| **it == 0).count();
    assert!(unsent >= leases, "{unsent} of {leases} that were killed");
}

/// The kills may hit any moment, so this test checks the result and not the moments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn randomly_killed_consumers_send_no_parcel_twice() {
    let consumers = Consumers::new();
    let args = consumers.args(&["--packing", "5ms", "--work", "100ms"]);
    let (kills, output) = crate::killed::kill_at_random(&args, few_or(4, 8)).await;
    let ended = consumers.ended(&output).await;
    println!("{kills} kills, {} orphans", ended.orphans.len());
    ended.assert_each_is_sent_once_or_dead();
}

/// Shows that the tests above can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn careless_consumers_send_parcels_twice_when_killed() {
    let consumers = Consumers::new();
    let stopped = consumers.args(&["--packing", "0s", "--work", "1h", "--careless"]);
    crate::killed::kill_at(&stopped, async || consumers.any_is_sent().await).await;
    let before = consumers.parcels().await;

    let ended = consumers.run_to_end(&["--careless"]).await;
    for ((before, after), n) in before.iter().zip(&ended.parcels).zip(0..) {
        assert!(*after > *before, "message {n}: {before}, then {after}");
    }
}

/// Consumers in separate processes, on new tables.
///
/// The leases are short, so that the next process finds an orphan soon. A lease that expires earlier, because a process was
/// slow, makes an orphan as well, and the tests allow for those.
struct Consumers {
    endpoint: String,
    table: String,
    client: Client,
    tally: Tally,
}

/// The state when a process has handled all messages.
struct Ended {
    /// The number of parcels for each message.
    parcels: Vec<u64>,
    /// The messages in the dead letters because a consumer died at them.
    orphans: BTreeSet<String>,
}

impl Consumers {
    fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let (table, client) = (server.new_table(), client(server.address()));
        Self {
            endpoint: format!("http://{}", server.address()),
            tally: Tally::new(&client, format!("{table}-tally")).with_timeout(PATIENCE),
            table,
            client,
        }
    }

    fn args<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let tables = ["--endpoint", &self.endpoint, "--table", &self.table];
        let leases = ["--lease", "500ms", "--skew", "0s", "--patience", "1h"];
        // Equal messages after the window get another parcel.
        let messages = ["shipments", "--messages", "40", "--window", "1h"];
        [&tables[..], &leases, &messages, more].concat()
    }

    /// Handles all messages again in a process that is not killed.
    async fn run_to_end(&self, more: &[&str]) -> Ended {
        let output = crate::killed::run_to_end(&self.args(more)).await;
        self.ended(&output).await
    }

    async fn ended(&self, output: &str) -> Ended {
        let lines = output.lines();
        let orphans = lines.filter_map(|it| it.strip_prefix("dead letter, orphaned: "));
        Ended {
            parcels: self.parcels().await,
            orphans: orphans.map(str::to_owned).collect(),
        }
    }

    async fn parcels(&self) -> Vec<u64> {
        let mut parcels = Vec::new();
        for n in 0..MESSAGES {
            parcels.push(self.tally.amount(&order(n)).await.expect("the server runs"));
        }
        parcels
    }

    /// Returns `true` if a parcel is sent. Before the process has made the table there are none.
    async fn any_is_sent(&self) -> bool {
        for n in 0..MESSAGES {
            if self.tally.amount(&order(n)).await.unwrap_or(0) > 0 {
                return true;
            }
        }
        false
    }

    /// Returns the number of leases and records. Before the process has made the table there are none.
    async fn leases(&self) -> usize {
        let scan = self.client.scan().table_name(&self.table);
        let scanned = scan.consistent_read(true).send().await;
        scanned.map_or(0, |it| it.items().len())
    }
}

impl Ended {
    fn assert_each_is_sent_once_or_dead(&self) {
        for (parcels, n) in self.parcels.iter().zip(0..) {
            assert!(*parcels <= 1, "message {n} was sent {parcels} times");
            // An orphan may have been sent or not, which is the reason why it is refused.
            let is_dead = self.orphans.contains(&order(n));
            assert!(*parcels == 1 || is_dead, "message {n} is lost");
        }
    }
}

#[tokio::test]
async fn equal_messages_are_merged_for_five_minutes() {
    let fixture = ShipmentFixture::new().await;
    let sent_at = async |minutes: f64| {
        let shipments = fixture.shipments(Duration::from_secs_f64(minutes * 60.0));
        assert_eq!(shipments.receive(&order(7)).await, Verdict::Delete);
        fixture.parcels(&order(7)).await
    };
    assert_eq!(sent_at(0.0).await, 1);
    assert_eq!(sent_at(4.9).await, 1);
    // The clocks of consumers may differ: a record expires only after the allowance for that has passed too.
    assert_eq!(sent_at(5.1).await, 2);
    assert_eq!(sent_at(5.2).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn possibly_sent_parcel_becomes_dead_letter() {
    let fixture = ShipmentFixture::new().await;
    let proxy = Proxy::start(shared(StandIn::Dynoxide).address());
    let parcels = Tally::new(&client(proxy.address()), &*fixture.tally);
    let shipments = Shipments::new(fixture.layer(Duration::ZERO), parcels);
    // The parcel is sent, and the reply to the consumer is lost.
    proxy.set(Mode::LoseReplies(ConnectionEnd::Cut));
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Leave);
    proxy.set(Mode::Pass);
    assert_eq!(fixture.parcels(&order(7)).await, 1);
    for _ in 0..3 {
        let verdict = shipments.receive(&order(7)).await;
        assert_eq!(verdict, Verdict::DeadLetter("perhaps-sent".to_owned()));
    }
    assert_eq!(fixture.parcels(&order(7)).await, 1);
}

#[tokio::test]
async fn orphaned_message_is_refused_for_queue_retention() {
    let fixture = ShipmentFixture::new().await;
    // A dead process: its lease is not renewed, and its execution never finishes.
    let dead = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let endless = fixture.shipments(Duration::ZERO).with_work(Duration::MAX);
    dead.spawn(async move { endless.receive(&order(7)).await });
    let began = Instant::now();
    while fixture.parcels(&order(7)).await == 0 {
        assert!(began.elapsed() < HANG_GUARD, "no parcel is sent");
        sleep(Duration::from_millis(10)).await;
    }
    dead.shutdown_background();
    for days in [0.01, 1.0, 13.9] {
        let late = Duration::from_secs_f64(days * 24.0 * 60.0 * 60.0);
        let verdict = fixture.shipments(late).receive(&order(7)).await;
        assert_eq!(
            verdict,
            Verdict::DeadLetter("orphaned".to_owned()),
            "{days}"
        );
    }
    assert_eq!(fixture.parcels(&order(7)).await, 1);
}

/// A process was paused while it packed. Meanwhile an operator may have found the orphan, and sent the parcel.
#[tokio::test]
async fn consumer_that_lost_its_lease_sends_nothing() {
    let fixture = ShipmentFixture::new().await;
    let store = FaultInjector::new(fixture.store(Duration::ZERO));
    store.set_fault(Operation::Renew, Fault::LeaseLost);
    let layer = IdempotencyLayer::new(store)
        .with_store_timeout(PATIENCE)
        .with_lease_ttl(Ttl::from_secs(1));
    let parcels = Tally::new(&fixture.client, &*fixture.tally).with_timeout(PATIENCE);
    let paused = Shipments::new(layer, parcels).with_packing(Duration::from_secs(2));
    assert_eq!(paused.receive(&order(7)).await, Verdict::Leave);
    // The orphan stays, because an operator may have sent the parcel.
    let next = fixture.shipments(Duration::from_secs(60));
    let orphaned = Verdict::DeadLetter("orphaned".to_owned());
    assert_eq!(next.receive(&order(7)).await, orphaned);
    assert_eq!(fixture.parcels(&order(7)).await, 0);
}

#[tokio::test]
async fn unsent_parcel_is_sent_on_redelivery() {
    let fixture = ShipmentFixture::new().await;
    let endpoint = Endpoint::start(shared(StandIn::Dynoxide).address());
    let parcels = Tally::new(&client(endpoint.address()), &*fixture.tally);
    let shipments = Shipments::new(fixture.layer(Duration::ZERO), parcels);
    endpoint.set(EndpointFault::Throttle(1));
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Leave);
    assert_eq!(fixture.parcels(&order(7)).await, 0);
    assert_eq!(shipments.receive(&order(7)).await, Verdict::Delete);
    assert_eq!(fixture.parcels(&order(7)).await, 1);
}

struct ShipmentFixture {
    table: String,
    tally: String,
    client: Client,
}

impl ShipmentFixture {
    async fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let fixture = Self {
            table: server.new_table(),
            tally: server.new_table(),
            client: client(server.address()),
        };
        let made = fixture.store(Duration::ZERO).create_table().await;
        made.expect("the server runs");
        let tally = Tally::new(&fixture.client, &*fixture.tally);
        tally.create_table().await.expect("the server runs");
        fixture
    }

    /// Returns a store whose clock is ahead by `later`. Its timeouts are long, because a busy machine is not a fault.
    fn store(&self, later: Duration) -> DynamoDbStore {
        DynamoDbOptions::new()
            .with_clock(move || SystemTime::now() + later)
            .with_timeout(PATIENCE)
            .store(&self.client, &*self.table)
    }

    fn layer(&self, later: Duration) -> IdempotencyLayer {
        IdempotencyLayer::new(self.store(later))
            .with_store_timeout(PATIENCE)
            .with_lease_ttl(Ttl::from_secs(120))
    }

    fn shipments(&self, later: Duration) -> Shipments {
        let parcels = Tally::new(&self.client, &*self.tally).with_timeout(PATIENCE);
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
