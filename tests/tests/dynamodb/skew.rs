//! Clocks that differ, and items that are collected late.

use std::time::{Duration, SystemTime};

use http::StatusCode;
use tests::{
    Effects, app, creating, post, send,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    IdempotencyLayer, Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, Store},
};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

const SKEW: Duration = Duration::from_secs(1);

/// Renewed after a third: a machine may be late by as long as the rest.
const LEASE: Duration = Duration::from_secs(6);

/// No call is given up here because a machine has too much to do.
const PATIENCE: Duration = Duration::from_secs(20);

/// Whose clock is ahead of the true time by so much, or behind it.
#[derive(Clone, Copy)]
enum Off {
    Ahead(Duration),
    Behind(Duration),
}

fn store(table: &str, off: Off) -> DynamoDbStore {
    let now = move || match off {
        Off::Ahead(by) => SystemTime::now() + by,
        Off::Behind(by) => SystemTime::now() - by,
    };
    let options = DynamoDbOptions::new().with_clock_skew(SKEW).with_clock(now);
    let options = options.with_timeout(PATIENCE);
    options.store(&client(shared(StandIn::Dynoxide).address()), table)
}

async fn table() -> String {
    let table = shared(StandIn::Dynoxide).new_table();
    let made = store(&table, TRUE).create_table().await;
    made.expect("the server runs");
    table
}

fn claim() -> Claim {
    let [id, fingerprint] = [[3; 32], [4; 32]];
    let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
    claim.expect("tests run where there is randomness")
}

/// How long after it was granted a lease that nobody renews is taken over by somebody else.
async fn taken_over_after(holder: Off, other: Off) -> Duration {
    let table = table().await;
    let (holder, other) = (store(&table, holder), store(&table, other));
    let mut first = claim();
    first.lease = Ttl::try_from(LEASE).expect("not zero");
    let start = Instant::now();
    let held = holder.acquire(&first).await.expect("the server runs");
    assert!(matches!(held, Acquired::Granted { generation: 1, .. }));
    loop {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "never taken over"
        );
        match other.acquire(&claim()).await.expect("the server runs") {
            Acquired::InProgress { .. } => sleep(Duration::from_millis(20)).await,
            Acquired::Granted { takeover, .. } => {
                assert!(takeover);
                return start.elapsed();
            }
            found => panic!("expected a lease or a takeover, found {found:?}"),
        }
    }
}

const TRUE: Off = Off::Ahead(Duration::ZERO);

#[tokio::test]
async fn within_the_allowance_nobody_takes_over_a_lease_before_its_end() {
    for (holder, other, latest) in [
        (Off::Behind(SKEW / 2), Off::Ahead(SKEW / 2), LEASE),
        (TRUE, TRUE, LEASE + SKEW),
        (
            Off::Ahead(SKEW / 2),
            Off::Behind(SKEW / 2),
            LEASE + 2 * SKEW,
        ),
    ] {
        let after = taken_over_after(holder, other).await;
        assert!(after >= LEASE, "after {after:?}");
        let slack = Duration::from_secs(30);
        assert!(after <= latest + slack, "only after {after:?}");
    }
}

/// What the allowance is for: without it, or with clocks further apart, the same goes wrong.
#[tokio::test]
async fn beyond_the_allowance_a_lease_is_taken_over_while_it_is_held() {
    let after = taken_over_after(TRUE, Off::Ahead(SKEW + LEASE)).await;
    assert!(after < LEASE, "after {after:?}");
}

/// Executes for two leases on one process, while another one asks again and again; how many executions there were.
async fn executions(holder: Off, other: Off) -> u64 {
    let table = table().await;
    let effects = Effects::default();
    let on = |off| {
        let counted = effects.clone();
        let lease = Ttl::try_from(LEASE).expect("not zero");
        let layer = IdempotencyLayer::new(store(&table, off))
            .with_lease_ttl(lease)
            .with_store_timeout(PATIENCE);
        app(layer, move |_, _| {
            let _ = counted.happen();
            async { sleep(2 * LEASE).await }
        })
        .0
    };
    let (holder, other) = (on(holder), on(other));
    let running = tokio::spawn(async move { send(&holder, post("/orders", "k", "tea")).await });
    let deadline = Instant::now() + Duration::from_secs(120);
    while effects.count() == 0 {
        assert!(Instant::now() < deadline, "nothing is executed");
        sleep(Duration::from_millis(5)).await;
    }
    loop {
        let answer = send(&other, post("/orders", "k", "tea")).await;
        if answer.status == StatusCode::OK {
            break;
        }
        assert_eq!(answer.status, StatusCode::CONFLICT);
        assert!(Instant::now() < deadline, "no answer");
        sleep(Duration::from_millis(30)).await;
    }
    running.await.expect("an answer");
    effects.count()
}

#[tokio::test]
async fn within_the_allowance_nothing_is_executed_twice() {
    for (holder, other) in [
        (Off::Behind(SKEW / 2), Off::Ahead(SKEW / 2)),
        (Off::Ahead(SKEW / 2), Off::Behind(SKEW / 2)),
    ] {
        assert_eq!(executions(holder, other).await, 1);
    }
}

#[tokio::test]
async fn beyond_the_allowance_a_request_is_executed_twice() {
    assert_eq!(executions(TRUE, Off::Ahead(SKEW + 2 * LEASE)).await, 2);
}

/// A record is remembered for its whole retention, whichever process asks.
#[tokio::test]
async fn within_the_allowance_no_record_is_forgotten_before_its_end() {
    let table = table().await;
    let retention = Duration::from_secs(2);
    let on = |off| {
        let layer = IdempotencyLayer::new(store(&table, off)).with_store_timeout(PATIENCE);
        creating(layer.with_retention(Ttl::try_from(retention).expect("not zero")))
    };
    let (writer, _) = on(Off::Behind(SKEW / 2));
    let (reader, executed) = on(Off::Ahead(SKEW / 2));
    let began = Instant::now();
    send(&writer, post("/orders", "k", "tea")).await;
    loop {
        let answer = send(&reader, post("/orders", "k", "tea")).await;
        if !answer.is_replay() {
            assert_eq!(executed.count(), 1);
            // Stored after we asked for it, and gone before we knew.
            let after = began.elapsed();
            assert!(after >= retention, "forgotten after {after:?}");
            return;
        }
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "never forgotten"
        );
        sleep(Duration::from_millis(20)).await;
    }
}

// fm 67
#[tokio::test]
async fn what_is_collected_days_late_yields_no_stale_replay_and_no_false_conflict() {
    let table = table().await;
    let direct = client(shared(StandIn::Dynoxide).address());
    let three_days = Duration::from_secs(3 * 24 * 3600);
    let then = store(&table, Off::Behind(three_days));
    let (before, executed_then) = creating(IdempotencyLayer::new(then.clone()));
    send(&before, post("/orders", "completed", "tea")).await;
    let left_behind = claim();
    then.acquire(&left_behind).await.expect("the server runs");

    let there = direct.scan().table_name(&table).send().await;
    assert_eq!(there.expect("the server runs").count(), 2, "not collected");
    let now = store(&table, TRUE);
    let (after, executed) = creating(IdempotencyLayer::new(now.clone()));
    // Another request under the old key is neither a replay nor a mismatch.
    let answer = send(&after, post("/orders", "completed", "coffee")).await;
    assert_eq!(
        (answer.status, answer.is_replay()),
        (StatusCode::CREATED, false)
    );
    assert!(
        send(&after, post("/orders", "completed", "coffee"))
            .await
            .is_replay()
    );
    assert_eq!((executed_then.count(), executed.count()), (1, 1));

    let mut other_request = claim();
    other_request.fingerprint = Fingerprint::from_bytes([9; 32]);
    let taken = now.acquire(&other_request).await.expect("the server runs");
    let first = Acquired::Granted {
        generation: 1,
        takeover: false,
    };
    assert_eq!(taken, first);
    // Nobody holds it of old.
    let late = then
        .renew(&left_behind.lease_ref(1), Ttl::from_secs(15))
        .await;
    assert!(late.is_err());
    assert_eq!(now.acquire(&other_request).await.expect("ours"), first);
}
