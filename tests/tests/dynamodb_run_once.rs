//! `run_once` on DynamoDB: a queue's consumers, whose deliveries are at least once, and a counter of many writers.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tests::{
    Effects,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    IdempotencyLayer, Ttl,
    run_once::{Failed, Outcome},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{
        primitives::Blob,
        types::{AttributeValue, ReturnValue},
    },
};

/// As long as FIFO queues know a message again.
const WINDOW: Ttl = Ttl::from_secs(5 * 60);

/// A machine that is busy is no fault: what is shown here is a queue's deliveries, not a lost lease.
const PATIENCE: Duration = Duration::from_secs(20);
const LEASE: Ttl = Ttl::from_secs(120);

/// Consumers of a queue, each a process of its own as far as the store knows.
struct Consumers {
    table: String,
    /// What was shipped, and how often: the effect.
    shipped: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Consumers {
    async fn start() -> Self {
        let table = shared(StandIn::Dynoxide).new_table();
        let consumers = Self {
            table,
            shipped: Arc::default(),
        };
        let made = consumers.store(Duration::ZERO).create_table().await;
        made.expect("the server runs");
        consumers
    }

    /// So much later.
    fn store(&self, later: Duration) -> DynamoDbStore {
        let options = DynamoDbOptions::new()
            .with_clock(move || SystemTime::now() + later)
            .with_timeout(PATIENCE);
        options.store(&client(shared(StandIn::Dynoxide).address()), &*self.table)
    }

    fn consumer(&self, later: Duration) -> IdempotencyLayer {
        IdempotencyLayer::new(self.store(later))
            .with_namespace("shipments")
            .with_retention(WINDOW)
            .with_store_timeout(PATIENCE)
            .with_lease(LEASE)
    }

    /// One delivery; whether the message may be deleted from the queue. Whatever a standard queue calls a message, its
    /// content is its key, as in a FIFO queue with content-based deduplication.
    async fn receive(&self, consumer: &IdempotencyLayer, body: &str, fails: bool) -> bool {
        let (shipped, order) = (Arc::clone(&self.shipped), body.to_owned());
        let ship = async move |_lease| {
            // Long enough to be delivered again meanwhile.
            sleep(Duration::from_millis(20)).await;
            if fails {
                // Before anything was shipped: the next delivery may.
                return Err(Failed::Release("no packer is free"));
            }
            let mut shipped = shipped.lock().unwrap_or_else(PoisonError::into_inner);
            *shipped.entry(order).or_default() += 1;
            Ok("shipped".to_owned())
        };
        match consumer.run_once(body, body, ship).await {
            Ok(Outcome::Executed(it) | Outcome::Replayed(it)) => it == "shipped",
            // Is being shipped, or was not: the queue delivers it again.
            Ok(Outcome::InProgress { .. } | Outcome::Failed(_)) | Err(_) => false,
            Ok(other) => panic!("expected a delivery or another one of it, found {other:?}"),
        }
    }

    fn shipped(&self) -> BTreeMap<String, u64> {
        let shipped = self.shipped.lock();
        shipped.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_delivers_at_least_once_has_one_effect_for_each_message() {
    let consumers = Arc::new(Consumers::start().await);
    let messages = 40;
    let mut deliveries = JoinSet::new();
    let three = [0, 1, 2].map(|_| consumers.consumer(Duration::ZERO));
    // Three deliveries of each at once, to three consumers; the first one fails for every fourth message.
    for n in 0..messages {
        for (delivery, consumer) in three.iter().enumerate() {
            let (consumers, consumer) = (Arc::clone(&consumers), consumer.clone());
            deliveries.spawn(async move {
                let body = format!(r#"{{"order":{n},"items":["tea"]}}"#);
                let mut fails = n % 4 == 0 && delivery == 0;
                while !consumers.receive(&consumer, &body, fails).await {
                    fails = false;
                    // The visibility timeout.
                    sleep(Duration::from_millis(50)).await;
                }
            });
        }
    }
    deliveries.join_all().await;
    let shipped = consumers.shipped();
    assert_eq!(shipped.len(), messages);
    assert!(shipped.values().all(|&times| times == 1), "{shipped:?}");
}

#[tokio::test]
async fn equal_messages_are_one_within_five_minutes_and_two_after() {
    let consumers = Consumers::start().await;
    let body = r#"{"order":7,"items":["tea"]}"#;
    let times = |minutes: f64| {
        let consumer = consumers.consumer(Duration::from_secs_f64(minutes * 60.0));
        let consumers = &consumers;
        async move {
            assert!(consumers.receive(&consumer, body, false).await);
            consumers.shipped()[body]
        }
    };
    assert_eq!(times(0.0).await, 1);
    assert_eq!(times(4.9).await, 1);
    // The clocks of consumers may differ: nothing is forgotten before the allowance for that has passed too.
    assert_eq!(times(5.1).await, 2);
    assert_eq!(times(5.2).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_of_50_writers_who_all_retry_ends_at_the_exact_sum() {
    const WRITERS: u64 = 50;
    let server = shared(StandIn::Dynoxide);
    let (sdk, table) = (client(server.address()), server.new_table());
    let options = DynamoDbOptions::new().with_timeout(PATIENCE);
    let store = options.store(&sdk, table.as_str());
    store.create_table().await.expect("the server runs");
    let once = IdempotencyLayer::new(store)
        .with_namespace("balances")
        .with_store_timeout(PATIENCE)
        .with_lease(LEASE);
    // The counter is an item like any other; here it has no table of its own.
    let entity = AttributeValue::B(Blob::new(*b"account 7"));

    let additions = Effects::default();
    let mut writers = JoinSet::new();
    for update in 0..WRITERS {
        for _retry in 0..3 {
            let (once, sdk, table, entity) =
                (once.clone(), sdk.clone(), table.clone(), entity.clone());
            let additions = additions.clone();
            writers.spawn(async move {
                loop {
                    let (sdk, table, entity) = (sdk.clone(), table.clone(), entity.clone());
                    let additions = additions.clone();
                    let add = async move |_lease| {
                        additions.happen();
                        let added = sdk
                            .update_item()
                            .table_name(table)
                            .key("id", entity)
                            .update_expression("ADD balance :ten")
                            .expression_attribute_values(":ten", AttributeValue::N("10".into()))
                            .return_values(ReturnValue::UpdatedNew);
                        let added = added.send().await.expect("the server runs");
                        let balance = added.attributes.expect("a balance");
                        let balance = balance["balance"].as_n().expect("a number");
                        Ok::<_, Failed<Infallible>>(balance.parse::<u64>().expect("a number"))
                    };
                    let outcome = once.run_once(format!("update-{update}"), "+10", add).await;
                    match outcome {
                        Ok(Outcome::Executed(balance) | Outcome::Replayed(balance)) => {
                            return (update, balance);
                        }
                        Ok(Outcome::InProgress { .. }) | Err(_) => {
                            sleep(Duration::from_millis(30)).await;
                        }
                        Ok(other) => panic!("expected one addition, found {other:?}"),
                    }
                }
            });
        }
    }
    let told = writers.join_all().await;
    assert_eq!(additions.count(), WRITERS);
    let get = sdk.get_item().table_name(&table).key("id", entity);
    let item = get
        .send()
        .await
        .expect("the server runs")
        .item
        .expect("a counter");
    assert_eq!(
        item["balance"],
        AttributeValue::N((WRITERS * 10).to_string())
    );
    // All who asked for one update were told the same balance, and no two updates the same.
    let balances: BTreeMap<u64, u64> = told.iter().copied().collect();
    assert!(
        told.iter()
            .all(|(update, balance)| balances[update] == *balance)
    );
    let mut distinct: Vec<_> = balances.into_values().collect();
    distinct.sort_unstable();
    assert_eq!(distinct, (1..=WRITERS).map(|n| n * 10).collect::<Vec<_>>());
}
