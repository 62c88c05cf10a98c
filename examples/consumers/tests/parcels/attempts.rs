//! Attempts, their delays, and the states after them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use consumers::{
    Carrier,
    retry_queue::{Move, Resolution, RetryQueue, State},
};
use tests::{
    HANG_GUARD,
    barrier::within,
    proxy::{ConnectionEnd, Fault, Mode},
    scratch::Scratch,
};
use tokio::{sync::Barrier, task::JoinSet};

use crate::{
    harness::{HOUR, Harness},
    on_each_database,
};

async fn third_attempt_succeeds_after_growing_delays(harness: Harness<impl RetryQueue>) {
    let consumer = harness.consumer();
    harness.send("7", TEA).await;
    for failures in [1, 2] {
        assert!(consumer.step(&harness.queue).await.expect("it runs"));
        let message = harness.only(State::Queued).await;
        assert_eq!(message.failures, failures);
        let delay = message.due - message.since;
        assert_eq!(delay, i64::from(failures) * HOUR.as_millis() as i64);
        let is_early = !consumer.step(&harness.queue).await.expect("it runs");
        assert!(is_early, "an attempt before its time");
        harness.make_due(State::Queued, "7").await;
    }
    harness.open_carrier();
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    let message = harness.only(State::Done).await;
    assert_eq!((message.delivery, message.failures), (3, 2));
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn last_attempt_makes_dead_letter(harness: Harness<impl RetryQueue>) {
    let consumer = harness.consumer().with_attempts(3);
    harness.send("7", TEA).await;
    for _ in 0..3 {
        harness.only(State::Queued).await;
        assert!(consumer.step(&harness.queue).await.expect("it runs"));
        harness.make_due(State::Queued, "7").await;
    }
    let message = harness.only(State::DeadLetter).await;
    assert_eq!((message.delivery, message.failures), (3, 3));
    assert!(!consumer.step(&harness.queue).await.expect("it runs"));

    // With all its attempts again.
    assert!(harness.apply(&Move::redrive("7", 3)).await);
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    assert_eq!(harness.only(State::Queued).await.failures, 1);
    harness.open_carrier();
    harness.make_due(State::Queued, "7").await;
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn refused_order_is_dead_letter_at_once(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    let consumer = harness.consumer();
    // A line break at the end would be a second parcel.
    for order in ["tea", "tea to Vienna\n"] {
        harness.send("7", order).await;
        assert!(consumer.step(&harness.queue).await.expect("it runs"));
        let message = harness.only(State::DeadLetter).await;
        assert_eq!(message.reason, "the order has no address");
        assert!(harness.parcels().is_empty());
        harness.clear().await;
    }
}

async fn unconfirmed_parcel_needs_attention(harness: Harness<impl RetryQueue>) {
    // The file opens, and each write fails.
    let consumer = harness.consumer_of(Carrier::new(Path::new("/dev/full")));
    harness.send("7", TEA).await;
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    // The queue follows the record of the layer.
    assert_eq!(harness.only(State::Queued).await.failures, 0);
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    let message = harness.only(State::NeedsAttention).await;
    assert_eq!(message.reason, "perhaps-sent");
    assert!(!consumer.step(&harness.queue).await.expect("it runs"));
}

/// A named pipe without a reader. Until this is dropped, each writer waits for one.
struct Pipe(Scratch);

impl Pipe {
    fn new() -> Self {
        let pipe = Self(Scratch::new());
        let made = Command::new("mkfifo").arg(pipe.path()).status();
        assert!(made.expect("mkfifo is started").success());
        pipe
    }

    fn path(&self) -> PathBuf {
        self.0.file("pipe")
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // On Linux this does not wait. The runtime of the test ends after its blocking calls.
        let reader = fs::File::options().read(true).write(true).open(self.path());
        drop(reader);
    }
}

async fn unresponsive_carrier_needs_attention(harness: Harness<impl RetryQueue>) {
    let pipe = Pipe::new();
    let consumer = harness
        .consumer_of(Carrier::new(&pipe.path()))
        .with_limit(Duration::from_millis(20));
    harness.send("7", TEA).await;
    // The queue follows the record of the layer.
    for state in [State::Queued, State::NeedsAttention] {
        let stepped = within(HANG_GUARD, consumer.step(&harness.queue)).await;
        assert!(stepped.expect("it runs"));
        harness.only(state).await;
    }
    let message = harness.only(State::NeedsAttention).await;
    assert_eq!(message.reason, "perhaps-sent");
}

async fn store_outage_counts_no_failure(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    harness.send("7", TEA).await;
    let unreachable = harness.consumer_behind_proxy().await;
    harness.proxy.set(Mode::Cut);
    assert!(unreachable.step(&harness.queue).await.expect("it runs"));
    let message = harness.only(State::Queued).await;
    assert_eq!((message.delivery, message.failures), (1, 0));
    harness.make_due(State::Queued, "7").await;
    assert!(
        harness
            .consumer()
            .step(&harness.queue)
            .await
            .expect("it runs")
    );
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), 1);
}

/// The driver itself would wait for the reply indefinitely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_to_unresponsive_postgres_ends() {
    let harness = Harness::postgres("parcels_unresponsive").await;
    harness.send("7", TEA).await;
    let queue = harness.queue_behind_proxy().await;
    harness
        .proxy
        .once(Fault::request("with next as ("), ConnectionEnd::Hang);
    let received = within(HANG_GUARD, queue.receive(HOUR)).await;
    assert!(received.is_err(), "{received:?}");
    let received = within(HANG_GUARD, queue.receive(HOUR)).await;
    assert!(received.expect("it runs").is_some());
}

async fn late_consumer_of_redriven_message_sends_nothing(harness: Harness<impl RetryQueue>) {
    let consumer = harness.consumer().with_attempts(1);
    harness.send("7", TEA).await;
    let late = harness.receive().await;
    harness.make_due(State::Queued, "7").await;
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    harness.only(State::DeadLetter).await;
    harness.open_carrier();
    assert!(harness.apply(&Move::redrive("7", 2)).await);
    assert!(consumer.step(&harness.queue).await.expect("it runs"));

    let next = consumer.handle(&late).await;
    assert!(!harness.apply(&next).await, "a move of the first delivery");
    assert_eq!(harness.only(State::Done).await.delivery, 3);
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn late_consumer_of_resolved_message_sends_nothing(harness: Harness<impl RetryQueue>) {
    let unconfirmed = harness.consumer_of(Carrier::new(Path::new("/dev/full")));
    harness.send("7", TEA).await;
    let late = harness.receive().await;
    harness.make_due(State::Queued, "7").await;
    for _ in 0..2 {
        assert!(unconfirmed.step(&harness.queue).await.expect("it runs"));
    }
    let message = harness.only(State::NeedsAttention).await;
    harness.open_carrier();
    let resolve = Move::resolve("7", message.delivery, Resolution::NotSent);
    assert!(harness.apply(&resolve).await);

    let consumer = harness.consumer();
    let next = consumer.handle(&late).await;
    assert_eq!(harness.parcels_of(TEA), 0);
    assert!(!harness.apply(&next).await, "a move of the first delivery");
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), 1);
    consumer.handle(&late).await;
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn repeated_message_sends_one_parcel(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    let consumer = harness.consumer();
    harness.send("7", TEA).await;
    assert!(!harness.queue.send("7", TEA).await.expect("it runs"));
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    assert!(!harness.queue.send("7", TEA).await.expect("it runs"));
    assert!(!consumer.step(&harness.queue).await.expect("it runs"));

    assert_eq!(harness.queue.purge().await.expect("it runs"), 0);
    harness.make_due(State::Done, "7").await;
    assert_eq!(harness.queue.purge().await.expect("it runs"), 1);
    // The layer still has the record.
    harness.send("7", TEA).await;
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn concurrent_consumers_receive_message_once(harness: Harness<impl RetryQueue>) {
    for n in 0..32 {
        harness.send(&n.to_string(), TEA).await;
    }
    let (start, mut receiving) = (Arc::new(Barrier::new(32)), JoinSet::new());
    for _ in 0..32 {
        let (queue, start) = (harness.queue.clone(), Arc::clone(&start));
        receiving.spawn(async move {
            start.wait().await;
            loop {
                // PostgreSQL may skip messages that another consumer has locked.
                if let Some(message) = queue.receive(HOUR).await.expect("it runs") {
                    return message.id;
                }
                tokio::task::yield_now().await;
            }
        });
    }
    let received: BTreeSet<_> = receiving.join_all().await.into_iter().collect();
    assert_eq!(received.len(), 32);
    let none = harness.queue.receive(Duration::ZERO).await;
    assert_eq!(none.expect("it runs"), None);
}

async fn several_processes_send_each_parcel_once(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    for n in 0..60 {
        harness
            .send(&n.to_string(), &format!("order {n} to Vienna"))
            .await;
    }
    harness.consume_by(3).await;
    assert_eq!(harness.list(State::Done).await.len(), 60);
    let parcels = harness.parcels();
    assert_eq!(parcels.len(), 60);
    assert!(parcels.values().all(|it| *it == 1), "{parcels:?}");
}

on_each_database!(
    third_attempt_succeeds_after_growing_delays,
    last_attempt_makes_dead_letter,
    refused_order_is_dead_letter_at_once,
    unconfirmed_parcel_needs_attention,
    unresponsive_carrier_needs_attention,
    store_outage_counts_no_failure,
    late_consumer_of_redriven_message_sends_nothing,
    late_consumer_of_resolved_message_sends_nothing,
    repeated_message_sends_one_parcel,
    concurrent_consumers_receive_message_once,
    several_processes_send_each_parcel_once,
);

/// An order with characters that have a meaning in JSON.
const TEA: &str = r#"thé "vert" \ to Vienna"#;
