//! Consumers that are killed before and after each statement of an attempt, or stopped.

use consumers::retry_queue::{RetryQueue, State};

use crate::{
    harness::Harness,
    on_each_database,
    points::{Moment, Point, Statement},
    process::wait_until,
};

const BEFORE: Moment = Moment::Before;
const AFTER: Moment = Moment::After;

/// The attempt would succeed. If the process died between the lease and its record, the message needs attention.
async fn killed_attempt_sends_at_most_one_parcel(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    let points: [(Point, State, u32); 8] = [
        ((Statement::Receive, BEFORE), State::Done, 1),
        ((Statement::Receive, AFTER), State::Done, 1),
        ((Statement::Acquire, BEFORE), State::Done, 1),
        ((Statement::Acquire, AFTER), State::NeedsAttention, 0),
        ((Statement::Complete, BEFORE), State::NeedsAttention, 1),
        ((Statement::Complete, AFTER), State::Done, 1),
        ((Statement::MoveTo(State::Done), BEFORE), State::Done, 1),
        ((Statement::MoveTo(State::Done), AFTER), State::Done, 1),
    ];
    for (n, (point, state, parcels)) in points.into_iter().enumerate() {
        let (id, order) = (n.to_string(), format!("order {n} to Vienna"));
        harness.send(&id, &order).await;
        harness.kill_consumer_at(point, &id, &[]).await;
        harness.consume().await;
        harness.assert_state(&id, state, point).await;
        assert_eq!(harness.parcels_of(&order), parcels, "killed at {point:?}");
    }
    // Further consumers change nothing. Then the operator queries the carrier.
    harness.consume().await;
    let (_, lines) = harness.operate(&["list"]).await;
    assert_eq!(lines.lines().count(), 2, "{lines}");
    for message in harness.list(State::NeedsAttention).await {
        let start = format!(
            "needs-attention {:?} delivery {}, ",
            message.id, message.delivery
        );
        assert!(lines.contains(&start), "{lines}");
        assert_eq!(message.reason, "orphaned");
        let (delivery, id) = (message.delivery.to_string(), &*message.id);
        let sent = ["not-sent", "sent"][harness.parcels_of(&message.body) as usize];
        assert!(harness.operate(&["resolve", id, &delivery, sent]).await.0);
    }
    harness.consume().await;
    assert_eq!(harness.list(State::Done).await.len(), points.len());
    let all = harness.parcels();
    assert_eq!(all.len(), points.len());
    assert!(all.values().all(|it| *it == 1), "{all:?}");
}

/// The attempt fails without a parcel. If the process died before its key was released, the message needs attention.
async fn killed_failure_is_retried(harness: Harness<impl RetryQueue>) {
    let points: [(Point, State); 4] = [
        ((Statement::Release, BEFORE), State::NeedsAttention),
        ((Statement::Release, AFTER), State::Done),
        ((Statement::MoveTo(State::Queued), BEFORE), State::Done),
        ((Statement::MoveTo(State::Queued), AFTER), State::Done),
    ];
    harness.open_carrier();
    for (n, (point, state)) in points.into_iter().enumerate() {
        let (id, order) = (n.to_string(), format!("order {n} to Vienna"));
        harness.send(&id, &order).await;
        harness.close_carrier();
        harness.kill_consumer_at(point, &id, &[]).await;
        harness.open_carrier();
        harness.consume().await;
        harness.assert_state(&id, state, point).await;
        let parcels = u32::from(state == State::Done);
        assert_eq!(harness.parcels_of(&order), parcels, "killed at {point:?}");
    }
}

/// The attempt is the last one, and fails without a parcel.
async fn killed_last_attempt_makes_one_dead_letter(harness: Harness<impl RetryQueue>) {
    let points: [(Point, State); 4] = [
        ((Statement::Release, BEFORE), State::NeedsAttention),
        ((Statement::Release, AFTER), State::DeadLetter),
        (
            (Statement::MoveTo(State::DeadLetter), BEFORE),
            State::DeadLetter,
        ),
        (
            (Statement::MoveTo(State::DeadLetter), AFTER),
            State::DeadLetter,
        ),
    ];
    for (n, (point, state)) in points.into_iter().enumerate() {
        let id = n.to_string();
        harness.send(&id, "tea to Vienna").await;
        harness
            .kill_consumer_at(point, &id, &["--attempts", "1"])
            .await;
        harness.consume_with(&["--attempts", "1"]).await;
        harness.assert_state(&id, state, point).await;
    }
    assert_eq!(harness.list(State::DeadLetter).await.len(), 3);
    harness.open_carrier();
    harness.consume().await;
    assert!(harness.parcels().is_empty(), "{:?}", harness.parcels());
}

async fn stopped_consumer_ends(harness: Harness<impl RetryQueue>) {
    harness.open_carrier();
    harness.send("7", "tea to Vienna").await;
    let process = harness.start_endless_consumer();
    wait_until(async || !harness.list(State::Done).await.is_empty()).await;
    let (is_done, output) = process.stop().await;
    assert!(is_done, "{output}");
}

on_each_database!(
    killed_attempt_sends_at_most_one_parcel,
    killed_failure_is_retried,
    killed_last_attempt_makes_one_dead_letter,
    stopped_consumer_ends,
);
