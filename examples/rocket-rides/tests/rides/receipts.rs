//! The worker that delivers receipts.

use std::{
    fs,
    time::{Duration, Instant},
};

use rocket_rides::{Mailbox, connect, deliver, deliver_one};
use tests::{
    barrier::eventually,
    proxy::{ConnectionEnd, Fault, Proxy},
    servers::postgres,
};
use tower_idempotency_sqlx::sqlx;

use crate::harness::Harness;

#[tokio::test]
async fn receipts_are_delivered_by_one_worker_each() {
    let harness = Harness::new("receipts").await;
    harness.ride("k", "card-1").await;
    harness.ride("l", "card-2").await;
    let mailbox = Mailbox::new(&harness.file("mailbox"));
    let delivered = || fs::read_to_string(harness.file("mailbox")).unwrap_or_default();

    // Another worker holds the first receipt.
    let mut other = harness.pool.begin().await.expect("a transaction");
    let first = "select id from receipts order by id limit 1 for update";
    let first: i64 = sqlx::query_scalar(first)
        .fetch_one(&mut *other)
        .await
        .expect("a receipt");
    assert!(
        deliver_one(&harness.pool, &mailbox)
            .await
            .expect("delivered")
    );
    assert!(!deliver_one(&harness.pool, &mailbox).await.expect("nothing"));
    assert_eq!(delivered().lines().count(), 1);

    // The other worker dies.
    other.rollback().await.expect("rolled back");
    assert!(
        deliver_one(&harness.pool, &mailbox)
            .await
            .expect("delivered")
    );
    assert!(!deliver_one(&harness.pool, &mailbox).await.expect("nothing"));
    let delivered = delivered();
    let last = delivered.lines().last().expect("a line");
    assert!(last.starts_with(&format!("{first} ")), "{delivered}");
    assert!(last.ends_with(" ann@example.com 2000"), "{delivered}");
}

#[tokio::test]
async fn undeliverable_receipt_stays_queued() {
    let harness = Harness::new("undelivered").await;
    harness.ride("k", "card-1").await;
    fs::create_dir(harness.file("full")).expect("a directory");
    let full = Mailbox::new(&harness.file("full"));
    assert!(deliver_one(&harness.pool, &full).await.is_err());
    let mailbox = Mailbox::new(&harness.file("mailbox"));
    // The failed transaction may not have ended yet.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !deliver_one(&harness.pool, &mailbox)
        .await
        .expect("delivered")
    {
        assert!(Instant::now() < deadline, "the receipt is gone");
    }
}

/// A receipt with a wrong address fails each time.
#[tokio::test]
async fn failed_receipt_comes_after_others() {
    let harness = Harness::new("failed_receipt").await;
    harness.ride("k", "card-1").await;
    harness.ride("l", "card-2").await;
    fs::create_dir(harness.file("full")).expect("a directory");
    let full = Mailbox::new(&harness.file("full"));
    assert!(deliver_one(&harness.pool, &full).await.is_err());
    let deadline = Instant::now() + Duration::from_secs(60);
    // The failed transaction may not have ended yet.
    let free = || {
        let select = "select id from receipts order by id for update skip locked";
        sqlx::query_scalar::<_, i64>(select).fetch_all(&harness.pool)
    };
    while free().await.expect("receipts").len() < 2 {
        assert!(Instant::now() < deadline, "the receipt stays locked");
    }
    let receipts = free().await.expect("receipts");

    let mailbox = Mailbox::new(&harness.file("mailbox"));
    for _ in 0..2 {
        let delivered = deliver_one(&harness.pool, &mailbox).await;
        assert!(delivered.expect("delivered"));
    }
    let delivered = fs::read_to_string(harness.file("mailbox")).expect("a file");
    let order = delivered
        .lines()
        .map(|it| it.split(' ').next().expect("an ID"));
    let order: Vec<_> = order.map(|it| it.parse::<i64>().expect("an ID")).collect();
    assert_eq!(order, [receipts[1], receipts[0]]);
}

#[tokio::test]
async fn worker_recovers_after_unresponsive_database() {
    let proxy = Proxy::start(postgres::shared().address());
    let harness = Harness::new("worker").await;
    harness.ride("k", "card-1").await;
    let limit = Duration::from_secs(2);
    let url = format!("postgres://app@{}/worker", proxy.address());
    let pool = connect(&url, limit).await.expect("the server runs");
    // The server has locked the receipt, and the worker gets no reply.
    proxy.once(
        Fault::reply_to("select ride, recipient"),
        ConnectionEnd::Hang,
    );
    let mailbox = Mailbox::new(&harness.file("mailbox"));
    let worker = tokio::spawn(deliver(pool, mailbox, Duration::from_millis(10), limit));
    let is_delivered =
        || fs::read_to_string(harness.file("mailbox")).is_ok_and(|it| !it.is_empty());
    eventually("a delivered receipt", is_delivered).await;
    assert_eq!(proxy.injected_faults(), 1);
    worker.abort();
}
