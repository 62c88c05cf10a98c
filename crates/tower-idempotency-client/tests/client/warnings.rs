//! Warnings that repeat for each request of an outage: at most one a second, with the number of occurrences.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::advance;
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{Operation, OutboxLayer, OutboxService, Outcome, RetryLayer};

use crate::{
    harness::{Server, field, post, record_events, send_as, status, take_events},
    outbox_memory::Memory,
};

/// Returns the messages and the counts of the events since the last call. Each event has both.
fn take_counts() -> Vec<(String, String)> {
    let events = take_events();
    let (messages, counts) = (field(&events, "message"), field(&events, "count"));
    assert_eq!(messages.len(), counts.len(), "{events:?}");
    messages.into_iter().zip(counts).collect()
}

fn counted(message: &str, count: u32) -> [(String, String); 1] {
    [(message.to_owned(), count.to_string())]
}

/// Sends a number of operations, whose responses have this outcome.
async fn send(client: &OutboxService<Server, Memory>, calls: usize, outcome: Outcome) {
    for _ in 0..calls {
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        client.clone().oneshot(req).await.unwrap();
        assert_eq!(operation.outcome(), outcome);
    }
}

/// The services of a layer share the limit. Those of another layer have their own.
#[tokio::test(start_paused = true)]
async fn failed_removals_warn_once_per_second() {
    record_events();
    let outbox = Arc::new(Memory::default());
    let layer = OutboxLayer::new(outbox.clone(), RetryLayer::new());
    let [first, second] = [201, 201].map(|code| layer.layer(Server::new([status(code)])));
    let rejected = layer.clone().layer(Server::new([status(401)]));
    let event = "entry may still be in the outbox";
    outbox.fail(Some("remove"));
    send(&first, 3, Outcome::Definite).await;
    assert_eq!(take_counts(), counted(event, 1));
    send(&second, 2, Outcome::Definite).await;
    // An entry that cannot be discarded stays, and a recovery sends it.
    outbox.fail(Some("discard"));
    send(&rejected, 2, Outcome::Unknown).await;
    advance(Duration::from_millis(999)).await;
    send(&rejected, 1, Outcome::Unknown).await;
    assert_eq!(take_counts(), []);
    advance(Duration::from_millis(1)).await;
    send(&rejected, 1, Outcome::Unknown).await;
    assert_eq!(take_counts(), counted(event, 8));
    let other = OutboxLayer::new(outbox, RetryLayer::new());
    let other = other.layer(Server::new([status(401)]));
    send(&other, 2, Outcome::Unknown).await;
    assert_eq!(take_counts(), counted(event, 1));
}

/// A recovery after a long outage may find many operations that have expired.
#[tokio::test(start_paused = true)]
async fn expired_operations_warn_once_per_second() {
    record_events();
    let layer = RetryLayer::new();
    let server = Server::new([status(201)]);
    let expire = async |layer: &RetryLayer, calls: usize| {
        for _ in 0..calls {
            let first_sent = SystemTime::now() - Duration::from_secs(25 * 60 * 60);
            let operation = Operation::new().with_first_sent(first_sent);
            let call = send_as(operation, layer, &server).await;
            assert!(call.result.unwrap_err().is_expired());
        }
    };
    let event =
        "lifetime of the key ended: if the outcome is unknown, resolve the operation by hand";
    expire(&layer, 3).await;
    assert_eq!(take_counts(), counted(event, 1));
    advance(Duration::from_millis(999)).await;
    expire(&layer.clone(), 1).await;
    assert_eq!(take_counts(), []);
    advance(Duration::from_millis(1)).await;
    expire(&layer, 1).await;
    assert_eq!(take_counts(), counted(event, 4));
}

/// Each row has its position, in a warning or at `debug`.
#[cfg(feature = "outbox-sqlite")]
#[tokio::test]
async fn damaged_rows_have_events_with_positions() {
    use tests::{database::pool_options, scratch::Scratch};
    use tower_idempotency_client::{
        Outbox, SqliteOutbox,
        sqlx::{self, Sqlite},
    };

    use crate::outbox_contract::entry;

    let scratch = Scratch::new();
    let url = format!("sqlite:{}?mode=rwc", scratch.file("outbox.db").display());
    let pool = pool_options::<Sqlite>().connect(&url).await.unwrap();
    let outbox = SqliteOutbox::new(pool.clone());
    outbox.migrate().await.unwrap();
    for n in 0..4 {
        outbox.store(&entry(&format!("key-{n}"))).await.unwrap();
    }
    let damage = "update idempotency_outbox set method = '('";
    sqlx::raw_sql(damage).execute(&pool).await.unwrap();
    record_events();
    assert_eq!(outbox.pending(0, 2).await.unwrap(), []);
    let events = take_events();
    assert_eq!(field(&events, "message"), ["row of the outbox skipped"; 4]);
    assert_eq!(field(&events, "position"), ["1", "2", "3", "4"]);
    // On a slow machine there may be further ones.
    assert_eq!(field(&events, "count")[0], "1");
}
