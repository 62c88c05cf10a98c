//! Commands of the operator: repeated, killed, and raced.

use std::path::Path;

use consumers::{
    Carrier,
    retry_queue::{Message, RetryQueue, State},
};
use tests::servers::redis::RedisServer;
use tower_idempotency_sqlx::sqlx::{self, PgPool};

use crate::{
    on_each_database,
    points::{Moment, Statement},
    process::until,
    stage::{Database, Stage},
};

async fn list_shows_reason_and_delivery(stage: Stage<impl RetryQueue>) {
    let dead = dead_letter(&stage).await;
    let (is_listed, lines) = stage.operate(&["list"]).await;
    assert!(is_listed);
    let start = format!("dead-letter 7 delivery {}, 1 failures, for ", dead.delivery);
    assert!(lines.starts_with(&start), "{lines}");
    assert!(
        lines.contains(&dead.reason) && lines.contains(TEA),
        "{lines}"
    );
    assert_eq!(lines.lines().count(), 1);
    let (_, lines) = stage.operate(&["list", "needs-attention"]).await;
    assert_eq!(lines, "");
}

async fn redriven_dead_letter_sends_one_parcel(stage: Stage<impl RetryQueue>) {
    let dead = dead_letter(&stage).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &delivery];
    assert!(stage.operate(&redrive).await.0);
    stage.consume().await;
    assert!(!stage.operate(&redrive).await.0, "it is done");
    stage.consume().await;
    assert_eq!(stage.parcels_of(TEA), 1);
    assert!(!stage.operate(&["redrive", "8", "1"]).await.0, "unknown");
}

/// The operator saw a dead letter that has failed again since, perhaps for another reason.
async fn command_of_earlier_delivery_is_refused(stage: Stage<impl RetryQueue>) {
    let dead = dead_letter(&stage).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &delivery];
    assert!(stage.operate(&redrive).await.0);
    stage.close_carrier();
    stage.consume_with(&["--attempts", "1"]).await;
    stage.open_carrier();
    let (is_redriven, output) = stage.operate(&redrive).await;
    assert!(!is_redriven && output.contains("list it again"), "{output}");
    stage.only(State::DeadLetter).await;
}

async fn killed_redrive_is_repeated(stage: Stage<impl RetryQueue>) {
    for moment in [Moment::Before, Moment::After] {
        let dead = dead_letter(&stage).await;
        let delivery = dead.delivery.to_string();
        let redrive = ["redrive", "7", &delivery];
        let point = (Statement::MoveTo(State::Queued), moment);
        stage.kill_operator_at(point, "7", &redrive).await;
        let (is_redriven, _) = stage.operate(&redrive).await;
        assert_eq!(is_redriven, moment == Moment::Before);
        stage.consume().await;
        stage.operate(&redrive).await;
        stage.consume().await;
        stage.only(State::Done).await;
        assert_eq!(stage.parcels_of(TEA), 1);
        stage.clear().await;
    }
}

async fn concurrent_redrives_send_one_parcel(stage: Stage<impl RetryQueue>) {
    let dead = dead_letter(&stage).await;
    let delivery = dead.delivery.to_string();
    let redrive = ["redrive", "7", &*delivery];
    let redriven = race(&stage, &redrive, &redrive).await;
    assert_eq!(redriven.iter().filter(|it| **it).count(), 1);
    stage.consume().await;
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), 1);
}

async fn killed_resolution_is_repeated(stage: Stage<impl RetryQueue>) {
    for (resolution, state) in [("not-sent", State::Queued), ("sent", State::Done)] {
        for moment in [Moment::Before, Moment::After] {
            let unknown = unconfirmed(&stage).await;
            stage.open_carrier();
            let delivery = unknown.delivery.to_string();
            let resolve = ["resolve", "7", &delivery, resolution];
            let point = (Statement::MoveTo(state), moment);
            stage.kill_operator_at(point, "7", &resolve).await;
            let (is_resolved, _) = stage.operate(&resolve).await;
            assert_eq!(is_resolved, moment == Moment::Before);
            stage.consume().await;
            stage.operate(&resolve).await;
            stage.consume().await;
            stage.only(State::Done).await;
            // Of a parcel that was sent before, the carrier of this test knows nothing.
            let parcels = u32::from(resolution == "not-sent");
            assert_eq!(stage.parcels_of(TEA), parcels, "{resolution} {moment:?}");
            stage.clear().await;
        }
    }
}

async fn one_of_two_opposite_resolutions_counts(stage: Stage<impl RetryQueue>) {
    let unknown = unconfirmed(&stage).await;
    stage.open_carrier();
    let delivery = unknown.delivery.to_string();
    let sent = ["resolve", "7", &*delivery, "sent"];
    let not_sent = ["resolve", "7", &*delivery, "not-sent"];
    let [is_sent, is_not_sent] = race(&stage, &sent, &not_sent).await;
    assert_ne!(is_sent, is_not_sent);
    stage.consume().await;
    stage.only(State::Done).await;
    assert_eq!(stage.parcels_of(TEA), u32::from(is_not_sent));
}

on_each_database!(
    list_shows_reason_and_delivery,
    redriven_dead_letter_sends_one_parcel,
    command_of_earlier_delivery_is_refused,
    killed_redrive_is_repeated,
    concurrent_redrives_send_one_parcel,
    killed_resolution_is_repeated,
    one_of_two_opposite_resolutions_counts,
);

/// Makes a dead letter by an attempt at a closed carrier, which is open afterwards.
async fn dead_letter(stage: &Stage<impl RetryQueue>) -> Message {
    let consumer = stage.consumer().with_attempts(1);
    stage.send("7", TEA).await;
    stage.close_carrier();
    assert!(consumer.step(&stage.queue).await.expect("it runs"));
    stage.open_carrier();
    stage.only(State::DeadLetter).await
}

/// Makes a message that needs attention, by an attempt that the carrier does not confirm.
async fn unconfirmed(stage: &Stage<impl RetryQueue>) -> Message {
    let consumer = stage.consumer_of(Carrier::new(Path::new("/dev/full")));
    stage.send("7", TEA).await;
    for _ in 0..2 {
        assert!(consumer.step(&stage.queue).await.expect("it runs"));
    }
    stage.only(State::NeedsAttention).await
}

/// Starts two commands, and executes their statements when both have arrived. Returns `true` for each that succeeded.
async fn race(stage: &Stage<impl RetryQueue>, one: &[&str], two: &[&str]) -> [bool; 2] {
    let start = || [one, two].map(|args| stage.start_operator(args));
    let [one, two] = match &stage.database {
        Database::Postgres(pool) => {
            let mut lock = pool.begin().await.expect("the server runs");
            let select = sqlx::query("select from messages for update");
            select.execute(&mut *lock).await.expect("the server runs");
            let racing = start();
            until(async || waiting_in_postgres(pool).await == 2).await;
            lock.rollback().await.expect("the server runs");
            racing
        }
        Database::Redis(server) => {
            server.command(&["CLIENT", "PAUSE", "600000", "WRITE"]);
            let racing = start();
            until(async || waiting_in_redis(server) == 2).await;
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
