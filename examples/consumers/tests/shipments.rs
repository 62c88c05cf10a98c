//! A queue that delivers at least once, and its consumers: the parcels are counted.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use consumers::{Queue, Shipments, Tally, Verdict};
use tests::{
    proxy::{Mode, Proxy, Then},
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{IdempotencyLayer, Ttl};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore, aws_sdk_dynamodb::Client};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standard_queue_has_one_parcel_sent_for_each_message() {
    let deliveries = drain(Queue::standard(VISIBILITY)).await;
    // Every fifth deletion is forgotten, at least.
    assert!(deliveries > MESSAGES, "{deliveries}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fifo_queue_has_one_parcel_sent_for_each_message() {
    // Packing takes longer than the queue waits: every message is delivered again.
    let deliveries = drain(Queue::fifo(PACKING / 2)).await;
    assert!(deliveries > MESSAGES, "{deliveries}");
}

/// Three consumers, each a process of its own as far as the store knows. How many deliveries it took.
async fn drain(queue: Queue) -> u64 {
    let place = Place::new().await;
    for n in 0..MESSAGES {
        queue.send(format!("customer {}", n % 5), order(n));
    }
    let queue = Arc::new(queue);
    let mut consuming = JoinSet::new();
    for _ in 0..3 {
        let shipments = place.shipments(Duration::ZERO).with_packing(PACKING);
        let queue = Arc::clone(&queue);
        consuming.spawn(async move {
            while !queue.is_empty() {
                let Some(delivery) = queue.receive() else {
                    sleep(Duration::from_millis(5)).await;
                    continue;
                };
                match shipments.receive(&delivery.body).await {
                    Verdict::Delete => queue.delete(&delivery),
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
    queue.deliveries()
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
const VISIBILITY: Duration = Duration::from_millis(100);
const PACKING: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(20);
