//! Commands of the operator: repeated, killed, and raced.

use std::path::Path;

use consumers::{
    Carrier,
    retry_queue::{Message, RetryQueue, State},
};
use tests::servers::redis::RedisServer;
use tower_idempotency_sqlx::sqlx::{self, PgPool};

use crate::{
    harness::{Database, Harness},
    on_each_database,
    points::{Moment, Statement},
    process::wait_until,
};

async fn list_shows_reason_and_delivery(harness: Harness<impl RetryQueue>) {
    let dead = dead_letter(&harness).await;
    let (is_listed, lines) = harness.operate(&["list"]).await;
    assert!(is_listed);
    let start = format!(
        "dead-letter \"7\" delivery {}, 1 failures, for ",
        dead.delivery
    );
    assert!(lines.starts_with(&start), "{lines}");
    let end = format!(": {:?} ({TEA:?})\n", dead.reason);
    assert!(lines.ends_with(&end), "{lines}");
    assert_eq!(lines.lines().count(), 1);
    let (_, lines) = harness.operate(&["list", "needs-attention"]).await;
    assert_eq!(lines, "");
}

/// The text of a message must not forge another line, or control the terminal of the operator.
async fn list_shows_one_line_for_each_message(harness: Harness<impl RetryQueue>) {
    harness
        .send("8\nx", "tea\nneeds-attention 7 delivery 3")
        .await;
    harness.send("9", "tea\r\u{1b}[2J").await;
    let (is_listed, lines) = harness.operate(&["list", "queued"]).await;
    assert!(is_listed);
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(!lines.contains(['\r', '\u{1b}']), "{lines}");
}

async fn redriven_dead_letter_sends_one_parcel(harness: Harness<impl RetryQueue>) {
    let dead = dead_letter(&harness).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &delivery];
    assert!(harness.operate(&redrive).await.0);
    harness.consume().await;
    assert!(!harness.operate(&redrive).await.0, "it is done");
    harness.consume().await;
    assert_eq!(harness.parcels_of(TEA), 1);
    assert!(!harness.operate(&["redrive", "8", "1"]).await.0, "unknown");
}

/// The operator saw a dead letter that has failed again since, perhaps for another reason.
async fn command_of_earlier_delivery_is_refused(harness: Harness<impl RetryQueue>) {
    let dead = dead_letter(&harness).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &delivery];
    assert!(harness.operate(&redrive).await.0);
    harness.close_carrier();
    harness.consume_with(&["--attempts", "1"]).await;
    harness.open_carrier();
    let (is_redriven, output) = harness.operate(&redrive).await;
    assert!(!is_redriven && output.contains("list it again"), "{output}");
    harness.only(State::DeadLetter).await;
}

async fn killed_redrive_is_repeated(harness: Harness<impl RetryQueue>) {
    for moment in [Moment::Before, Moment::After] {
        let dead = dead_letter(&harness).await;
        let delivery = dead.delivery.to_string();
        let redrive = ["redrive", "7", &delivery];
        let point = (Statement::MoveTo(State::Queued), moment);
        harness.kill_operator_at(point, "7", &redrive).await;
        let (is_redriven, _) = harness.operate(&redrive).await;
        assert_eq!(is_redriven, moment == Moment::Before);
        harness.consume().await;
        harness.operate(&redrive).await;
        harness.consume().await;
        harness.only(State::Done).await;
        assert_eq!(harness.parcels_of(TEA), 1);
        harness.clear().await;
    }
}

async fn concurrent_redrives_send_one_parcel(harness: Harness<impl RetryQueue>) {
    let dead = dead_letter(&harness).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &*delivery];
    let redriven = race(&harness, &redrive, &redrive).await;
    assert_eq!(redriven.iter().filter(|it| **it).count(), 1);
    harness.consume().await;
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), 1);
}

async fn killed_resolution_is_repeated(harness: Harness<impl RetryQueue>) {
    for (resolution, state) in [("not-sent", State::Queued), ("sent", State::Done)] {
        for moment in [Moment::Before, Moment::After] {
            let unknown = unconfirmed(&harness).await;
            harness.open_carrier();
            let delivery = unknown.delivery.to_string();
            let resolve = ["resolve", "7", &delivery, resolution];
            let point = (Statement::MoveTo(state), moment);
            harness.kill_operator_at(point, "7", &resolve).await;
            let (is_resolved, _) = harness.operate(&resolve).await;
            assert_eq!(is_resolved, moment == Moment::Before);
            harness.consume().await;
            harness.operate(&resolve).await;
            harness.consume().await;
            harness.only(State::Done).await;
            // The carrier of this test has no earlier parcels.
            let parcels = u32::from(resolution == "not-sent");
            assert_eq!(harness.parcels_of(TEA), parcels, "{resolution} {moment:?}");
            harness.clear().await;
        }
    }
}

async fn one_of_two_opposite_resolutions_counts(harness: Harness<impl RetryQueue>) {
    let unknown = unconfirmed(&harness).await;
    harness.open_carrier();
    let delivery = unknown.delivery.to_string();
    let sent = ["resolve", "7", &*delivery, "sent"];
    let not_sent = ["resolve", "7", &*delivery, "not-sent"];
    let [is_sent, is_not_sent] = race(&harness, &sent, &not_sent).await;
    assert_ne!(is_sent, is_not_sent);
    harness.consume().await;
    harness.only(State::Done).await;
    assert_eq!(harness.parcels_of(TEA), u32::from(is_not_sent));
}

on_each_database!(
    list_shows_reason_and_delivery,
    list_shows_one_line_for_each_message,
    redriven_dead_letter_sends_one_parcel,
    command_of_earlier_delivery_is_refused,
    killed_redrive_is_repeated,
    concurrent_redrives_send_one_parcel,
    killed_resolution_is_repeated,
    one_of_two_opposite_resolutions_counts,
);

/// Makes a dead letter by an attempt at a closed carrier, which is open afterwards.
async fn dead_letter(harness: &Harness<impl RetryQueue>) -> Message {
    let consumer = harness.consumer().with_attempts(1);
    harness.send("7", TEA).await;
    harness.close_carrier();
    assert!(consumer.step(&harness.queue).await.expect("it runs"));
    harness.open_carrier();
    harness.only(State::DeadLetter).await
}

/// Makes a message that needs attention, by an attempt that the carrier does not confirm.
async fn unconfirmed(harness: &Harness<impl RetryQueue>) -> Message {
    let consumer = harness.consumer_of(Carrier::new(Path::new("/dev/full")));
    harness.send("7", TEA).await;
    for _ in 0..2 {
        assert!(consumer.step(&harness.queue).await.expect("it runs"));
    }
    harness.only(State::NeedsAttention).await
}

/// Starts two commands, and executes their statements when both have arrived. Returns `true` for each that succeeded.
async fn race(harness: &Harness<impl RetryQueue>, one: &[&str], two: &[&str]) -> [bool; 2] {
    let start = || [one, two].map(|args| harness.start_operator(args));
    let [one, two] = match &harness.database {
        Database::Postgres(pool) => {
            let mut lock = pool.begin().await.expect("the server runs");
            let select = sqlx::query("select from messages for update");
            select.execute(&mut *lock).await.expect("the server runs");
            let racing = start();
            wait_until(async || waiting_in_postgres(pool).await == 2).await;
            lock.rollback().await.expect("the server runs");
            racing
        }
        Database::Redis(server) => {
            server.command(&["CLIENT", "PAUSE", "600000", "WRITE"]);
            let racing = start();
            wait_until(async || waiting_in_redis(server) == 2).await;
            server.command(&["CLIENT", "UNPAUSE"]);
            racing
        }
    };
    [one.end().await.0, two.end().await.0]
}

async fn waiting_in_postgres(pool: &PgPool) -> i64 {
    let select = "select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock' and query like '%update messages%'";
    let waiting = sqlx::query_scalar(select).fetch_one(pool).await;
    waiting.expect("the server runs")
}

fn waiting_in_redis(server: &RedisServer) -> usize {
    let clients = server.command(&["CLIENT", "LIST"]);
    clients
        .lines()
        .filter(|it| it.contains(" cmd=evalsha ") && it.contains(" flags=b "))
        .count()
}

/// An order with characters that have a meaning in JSON.
const TEA: &str = r#"thé "vert" \ to Vienna"#;
