//! Attempts, their delays, and the states after them.

use std::{collections::BTreeSet, path::Path, sync::Arc, time::Duration};

use consumers::{
    Carrier,
    retry_queue::{Move, Resolution, RetryQueue, State},
};
use tests::proxy::Mode;
use tokio::{sync::Barrier, task::JoinSet};

use crate::{
    on_each_database,
    stage::{HOUR, Stage},
};

async fn third_attempt_succeeds_after_growing_delays(stage: Stage<impl RetryQueue>) {
    let consumer = stage.consumer();
    stage.send("7", TEA).await;
    for failures in [1, 2] {
        assert!(consumer.step(&stage.queue).await.expect("it runs"));
        let message = stage.only(State::Queued).await;
        assert_eq!(message.failures, failures);
        let delay = message.due - message.since;
        assert_eq!(delay, i64::from(failures) * HOUR.as_millis() as i64);
        let is_early = !consumer.step(&stage.queue).await.expect("it runs");
        assert!(is_early, "an attempt before its time");
        stage.make_due(State::Queued, "7").await;
    }
    stage.open_carrier();
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    let message = stage.only(State::Done).await;
    assert_eq!((message.delivery, message.failures), (3, 2));
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn last_attempt_makes_dead_letter(stage: Stage<impl RetryQueue>) {
    let consumer = stage.consumer().with_attempts(3);
    stage.send("7", TEA).await;
    for _ in 0..3 {
        stage.only(State::Queued).await;
        assert!(consumer.step(&stage.queue).await.expect("it runs"));
        stage.make_due(State::Queued, "7").await;
    }
    let message = stage.only(State::DeadLetter).await;
    assert_eq!((message.delivery, message.failures), (3, 3));
    assert!(!consumer.step(&stage.queue).await.expect("it runs"));

    // With all its attempts again.
    assert!(stage.apply(&Move::redrive("7", 3)).await);
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    assert_eq!(stage.only(State::Queued).await.failures, 1);
    stage.open_carrier();
    stage.make_due(State::Queued, "7").await;
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn refused_order_is_dead_letter_at_once(stage: Stage<impl RetryQueue>) {
    stage.open_carrier();
    stage.send("7", "tea").await;
    assert!(stage.consumer().step(&stage.queue).await.expect("it runs"));
    let message = stage.only(State::DeadLetter).await;
    assert_eq!(message.reason, "the order has no address");
    assert!(stage.parcels().is_empty());
}

async fn unconfirmed_parcel_needs_attention(stage: Stage<impl RetryQueue>) {
    // The file opens, and each write fails.
    let consumer = stage.consumer_of(Carrier::new(Path::new("/dev/full")));
    stage.send("7", TEA).await;
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    // The queue follows the record of the layer.
    assert_eq!(stage.only(State::Queued).await.failures, 0);
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    let message = stage.only(State::NeedsAttention).await;
    assert_eq!(message.reason, "perhaps-sent");
    assert!(!consumer.step(&stage.queue).await.expect("it runs"));
}

async fn store_outage_counts_no_failure(stage: Stage<impl RetryQueue>) {
    stage.open_carrier();
    stage.send("7", TEA).await;
    let unreachable = stage.consumer_behind_proxy().await;
    stage.proxy.set(Mode::Cut);
    assert!(unreachable.step(&stage.queue).await.expect("it runs"));
    let message = stage.only(State::Queued).await;
    assert_eq!((message.delivery, message.failures), (1, 0));
    stage.make_due(State::Queued, "7").await;
    assert!(stage.consumer().step(&stage.queue).await.expect("it runs"));
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn late_consumer_of_redriven_message_sends_nothing(stage: Stage<impl RetryQueue>) {
    let consumer = stage.consumer().with_attempts(1);
    stage.send("7", TEA).await;
    let late = stage.receive().await;
    stage.make_due(State::Queued, "7").await;
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    stage.only(State::DeadLetter).await;
    stage.open_carrier();
    assert!(stage.apply(&Move::redrive("7", 2)).await);
    assert!(consumer.step(&stage.queue).await.expect("it runs"));

    let next = consumer.handle(&late).await;
    assert!(!stage.apply(&next).await, "a move of the first delivery");
    assert_eq!(stage.only(State::Done).await.delivery, 3);
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn late_consumer_of_resolved_message_sends_nothing(stage: Stage<impl RetryQueue>) {
    let unconfirmed = stage.consumer_of(Carrier::new(Path::new("/dev/full")));
    stage.send("7", TEA).await;
    let late = stage.receive().await;
    stage.make_due(State::Queued, "7").await;
    for _ in 0..2 {
        assert!(unconfirmed.step(&stage.queue).await.expect("it runs"));
    }
    let message = stage.only(State::NeedsAttention).await;
    stage.open_carrier();
    let resolve = Move::resolve("7", message.delivery, Resolution::NotSent);
    assert!(stage.apply(&resolve).await);

    let consumer = stage.consumer();
    let next = consumer.handle(&late).await;
    assert_eq!(stage.parcels_of(TEA), 0);
    assert!(!stage.apply(&next).await, "a move of the first delivery");
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), 1);
    consumer.handle(&late).await;
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn repeated_message_sends_one_parcel(stage: Stage<impl RetryQueue>) {
    stage.open_carrier();
    let consumer = stage.consumer();
    stage.send("7", TEA).await;
    assert!(!stage.queue.send("7", TEA).await.expect("it runs"));
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    assert!(!stage.queue.send("7", TEA).await.expect("it runs"));
    assert!(!consumer.step(&stage.queue).await.expect("it runs"));

    assert_eq!(stage.queue.purge().await.expect("it runs"), 0);
    stage.make_due(State::Done, "7").await;
    assert_eq!(stage.queue.purge().await.expect("it runs"), 1);
    // The layer still has the record.
    stage.send("7", TEA).await;
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn concurrent_consumers_receive_message_once(stage: Stage<impl RetryQueue>) {
    for n in 0..32 {
        stage.send(&n.to_string(), TEA).await;
    }
    let (start, mut receiving) = (Arc::new(Barrier::new(32)), JoinSet::new());
    for _ in 0..32 {
        let (queue, start) = (stage.queue.clone(), Arc::clone(&start));
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
    let none = stage.queue.receive(Duration::ZERO).await;
    assert_eq!(none.expect("it runs"), None);
}

async fn several_processes_send_each_parcel_once(stage: Stage<impl RetryQueue>) {
    stage.open_carrier();
    for n in 0..60 {
        stage
            .send(&n.to_string(), &format!("order {n} to Vienna"))
            .await;
    }
    stage.consume_by(3).await;
    assert_eq!(stage.list(State::Done).await.len(), 60);
    let parcels = stage.parcels();
    assert_eq!(parcels.len(), 60);
    assert!(parcels.values().all(|it| *it == 1), "{parcels:?}");
}

on_each_database!(
    third_attempt_succeeds_after_growing_delays,
    last_attempt_makes_dead_letter,
    refused_order_is_dead_letter_at_once,
    unconfirmed_parcel_needs_attention,
    store_outage_counts_no_failure,
    late_consumer_of_redriven_message_sends_nothing,
    late_consumer_of_resolved_message_sends_nothing,
    repeated_message_sends_one_parcel,
    concurrent_consumers_receive_message_once,
    several_processes_send_each_parcel_once,
);

/// An order with characters that have a meaning in JSON.
const TEA: &str = r#"thé "vert" \ to Vienna"#;
