//! Clocks that differ, and items that the service deletes late.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::Router;
use bytes::Bytes;
use http::StatusCode;
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, within},
    creating,
    dynamodb::ManualClock,
    post, send,
    servers::dynamodb::{StandIn, client, shared},
};
use tokio::task::JoinHandle;
use tower_idempotency::{
    IdempotencyLayer, Lease, NeedsAttention, Ttl,
    inspect::{Inspect, Resolution},
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store},
    transaction::LeaseExt,
};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

const SKEW: Duration = Duration::from_secs(1);

/// The lease duration by the test's clock, which all stores use.
const LEASE: Duration = Duration::from_secs(6);

/// Step by which the test advances the clock.
const STEP: Duration = Duration::from_millis(20);

/// A long timeout, so that no call fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The offset of a clock from the true time.
#[derive(Clone, Copy)]
enum ClockOffset {
    Ahead(Duration),
    Behind(Duration),
}

impl ClockOffset {
    fn from(self, time: SystemTime) -> SystemTime {
        match self {
            Self::Ahead(by) => time + by,
            Self::Behind(by) => time - by,
        }
    }
}

/// Returns a store on the table, in a process whose clock is off the true time.
fn store(address: SocketAddr, table: &str, time: &ManualClock, off: ClockOffset) -> DynamoDbStore {
    let time = time.clone();
    let options = DynamoDbOptions::new().with_clock_skew(SKEW);
    let options = options.with_clock(move || off.from(time.now()));
    let options = options.with_timeout(PATIENCE);
    options.store(&client(address), table)
}

/// Creates a table, and a clock with the true time.
async fn table() -> (SocketAddr, String, ManualClock) {
    let server = shared(StandIn::Dynoxide);
    let (address, table, time) = (server.address(), server.new_table(), ManualClock::new());
    let made = store(address, &table, &time, TRUE).create_table().await;
    made.expect("the server runs");
    (address, table, time)
}

fn claim() -> Claim {
    let [id, fingerprint] = [[3; 32], [4; 32]];
    let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
    claim.expect("the system has random numbers")
}

/// Returns the time from the grant of a lease that is never renewed until another process takes it over.
async fn taken_over_after(holder: ClockOffset, other: ClockOffset) -> Duration {
    let (address, table, time) = table().await;
    let on = |off| store(address, &table, &time, off);
    let (holder, other) = (on(holder), on(other));
    let mut first = claim();
    first.lease = Ttl::try_from(LEASE).expect("not zero");
    let held = holder.acquire(&first).await.expect("the server runs");
    assert!(matches!(held, Acquired::Granted { generation: 1, .. }));
    let mut passed = Duration::ZERO;
    loop {
        assert!(passed < LEASE * 10, "never taken over");
        match other.acquire(&claim()).await.expect("the server runs") {
            Acquired::InProgress { .. } => {}
            Acquired::Granted { takeover, .. } => {
                assert!(takeover);
                return passed;
            }
            found => panic!("expected a lease or a takeover, found {found:?}"),
        }
        time.advance(STEP);
        passed += STEP;
    }
}

const TRUE: ClockOffset = ClockOffset::Ahead(Duration::ZERO);

// F-173
#[tokio::test]
async fn skew_within_allowance_prevents_early_takeover() {
    for (holder, other, latest) in [
        (
            ClockOffset::Behind(SKEW / 2),
            ClockOffset::Ahead(SKEW / 2),
            LEASE,
        ),
        (TRUE, TRUE, LEASE + SKEW),
        (
            ClockOffset::Ahead(SKEW / 2),
            ClockOffset::Behind(SKEW / 2),
            LEASE + 2 * SKEW,
        ),
    ] {
        let after = taken_over_after(holder, other).await;
        assert!(after >= LEASE, "after {after:?}");
        assert!(after <= latest + STEP, "only after {after:?}");
    }
}

/// Without the allowance, or if clocks differ by more, the takeover happens too early.
#[tokio::test]
async fn skew_beyond_allowance_takes_over_held_lease() {
    let after = taken_over_after(TRUE, ClockOffset::Ahead(SKEW + LEASE)).await;
    assert!(after < LEASE, "after {after:?}");
}

/// A process whose handlers wait until the test lets them through.
struct Process {
    app: Router,
    barrier: Barrier,
    lease: Arc<Mutex<Option<LeaseRef>>>,
}

impl Process {
    fn new(store: DynamoDbStore, lease: Duration, effects: &Effects) -> Self {
        let layer = IdempotencyLayer::new(store)
            .with_lease_ttl(Ttl::try_from(lease).expect("not zero"))
            .with_store_timeout(PATIENCE);
        let (barrier, counted) = (Barrier::closed(), effects.clone());
        let lease = Arc::<Mutex<Option<LeaseRef>>>::default();
        let (held, taken) = (barrier.clone(), Arc::clone(&lease));
        let (app, _) = app(layer, move |_, req| {
            let _ = counted.happen();
            let lease = req.extensions().get::<Lease>().expect("a lease");
            *taken.lock().expect("no panic") = Some(lease.lease_ref());
            let held = held.clone();
            async move { held.pass().await }
        });
        Self {
            app,
            barrier,
            lease,
        }
    }

    fn spawn_request(&self) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        tokio::spawn(async move { send(&app, post("/orders", "k", "tea")).await })
    }
}

/// The test renews the lease of the holder and advances the time that both processes know by most of a lease, in turns. The
/// other process sends a request each time.
async fn assert_executed_once(holder: ClockOffset, other: ClockOffset) {
    let (address, table, time) = table().await;
    let effects = Effects::default();
    let on = |off| store(address, &table, &time, off);
    // The layer does not renew before the test has ended.
    let process = |off| Process::new(on(off), Duration::from_secs(3_600), &effects);
    let (keeper, holder, other) = (on(holder), process(holder), process(other));
    let running = holder.spawn_request();
    within(LONGEST, holder.barrier.arrival()).await;
    let lease = holder.lease.lock().expect("no panic").expect("a lease");
    for _ in 0..8 {
        let renewed = keeper.renew(&lease, Ttl::try_from(LEASE).expect("not zero"));
        renewed.await.expect("held");
        time.advance(LEASE - STEP);
        let response = within(LONGEST, async {
            tokio::select! {
                response = other.spawn_request() => response.expect("no panic"),
                () = other.barrier.arrival() => panic!("executed twice"),
            }
        });
        assert_eq!(response.await.status, StatusCode::CONFLICT);
    }
    holder.barrier.open_for_good();
    let first = within(LONGEST, running).await.expect("no panic");
    assert_eq!(first.status, StatusCode::OK);
    let response = within(LONGEST, other.spawn_request())
        .await
        .expect("no panic");
    assert!(response.is_replay(), "{response:?}");
    assert_eq!(effects.count(), 1);
}

// F-173
#[tokio::test]
async fn skew_within_allowance_executes_once() {
    for (holder, other) in [
        (ClockOffset::Behind(SKEW / 2), ClockOffset::Ahead(SKEW / 2)),
        (ClockOffset::Ahead(SKEW / 2), ClockOffset::Behind(SKEW / 2)),
    ] {
        assert_executed_once(holder, other).await;
    }
}

// F-174
#[tokio::test]
async fn skew_beyond_allowance_executes_twice() {
    let (address, table, time) = table().await;
    let effects = Effects::default();
    let on = |off| Process::new(store(address, &table, &time, off), LEASE, &effects);
    let (holder, other) = (on(TRUE), on(ClockOffset::Ahead(SKEW + 2 * LEASE)));
    let running = holder.spawn_request();
    within(LONGEST, holder.barrier.arrival()).await;
    let again = other.spawn_request();
    within(LONGEST, other.barrier.arrival()).await;
    assert_eq!(effects.count(), 2);
    for barrier in [&holder.barrier, &other.barrier] {
        barrier.open_for_good();
    }
    for response in [running, again] {
        within(LONGEST, response).await.expect("no panic");
    }
}

// F-173
/// A record is stored for its whole retention, for the requests of every process.
#[tokio::test]
async fn skew_within_allowance_keeps_records() {
    let (address, table, time) = table().await;
    let retention = Duration::from_secs(2);
    let on = |off| {
        let store = store(address, &table, &time, off);
        let layer = IdempotencyLayer::new(store).with_store_timeout(PATIENCE);
        creating(layer.with_retention(Ttl::try_from(retention).expect("not zero")))
    };
    let (writer, _) = on(ClockOffset::Behind(SKEW / 2));
    let (reader, executed) = on(ClockOffset::Ahead(SKEW / 2));
    send(&writer, post("/orders", "k", "tea")).await;
    let mut passed = Duration::ZERO;
    loop {
        let response = send(&reader, post("/orders", "k", "tea")).await;
        if !response.is_replay() {
            assert_eq!(executed.count(), 1);
            assert!(passed >= retention, "expired after {passed:?}");
            return;
        }
        assert!(passed < retention * 10, "never forgotten");
        time.advance(STEP);
        passed += STEP;
    }
}

/// The time limit of a test.
const LONGEST: Duration = Duration::from_secs(120);

// F-173
/// The clock of the process is behind that of the service, which deletes items by `ttl`.
#[tokio::test]
async fn skew_within_allowance_deletes_nothing_early() {
    const HOUR: Ttl = Ttl::from_secs(3_600);
    let (address, table, time) = table().await;
    let (direct, id) = (client(address), claim().id);
    let store = store(address, &table, &time, ClockOffset::Behind(SKEW));
    let assert_stored_for = async |hours: u32, state: &str| {
        let items = direct.scan().table_name(&table).send().await;
        let items = items.expect("the server runs");
        let ttl = items.items()[0]["ttl"].as_n().expect("a number");
        let deleted = UNIX_EPOCH + Duration::from_secs(ttl.parse().expect("seconds"));
        let expected = time.now() + HOUR.as_duration() * hours;
        assert!(deleted >= expected, "{state}: {deleted:?} < {expected:?}");
    };
    let acquire = async |state: &str| {
        let mut claim = claim();
        (claim.lease, claim.orphan_retention) = (HOUR, HOUR);
        let acquired = store.acquire(&claim).await.expect("the server runs");
        let Acquired::Granted { generation, .. } = acquired else {
            panic!("expected a lease, found {acquired:?}")
        };
        assert_stored_for(2, state).await;
        claim.lease_ref(generation)
    };
    let resolve = async |resolution: Resolution| {
        let entry = store.get(&id).await.expect("the server runs");
        let entry = entry.expect("an entry").entry;
        let resolved = store.resolve(entry.seen(), &resolution).await;
        assert!(resolved.expect("the server runs").is_applied());
        assert_stored_for(1, &format!("{resolution:?}")).await;
    };

    let first = acquire("leased").await;
    let renewed = store.renew(&first, Ttl::from_secs(3 * 3_600)).await;
    renewed.expect("held");
    assert_stored_for(4, "renewed").await;
    time.advance(3 * HOUR.as_duration() + 2 * SKEW);
    let second = acquire("taken over").await;
    assert_eq!(second.generation, 2);
    store.release(&second).await.expect("the server runs");
    assert_stored_for(1, "released").await;
    let third = acquire("taken over again").await;
    let record = Bytes::from_static(b"\x01\0\0\0\0\0");
    let completed = store.complete(&third, record.clone(), HOUR).await;
    completed.expect("held");
    assert_stored_for(1, "completed").await;

    time.advance(HOUR.as_duration() + 2 * SKEW);
    let fourth = acquire("replaced").await;
    assert_eq!(fourth.generation, 1);
    let failed = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    let (attention, retention) = failed.record(&id).expect("it stores a record");
    let completed = store.complete(&fourth, attention, retention).await;
    completed.expect("held");
    resolve(Resolution::Retry).await;
    let retention = HOUR;
    resolve(Resolution::Complete { record, retention }).await;
}

// F-175
#[tokio::test]
async fn late_garbage_collection_is_harmless() {
    let (address, table, time) = table().await;
    let direct = client(address);
    let layer = |store| IdempotencyLayer::new(store).with_store_timeout(PATIENCE);
    let three_days = Duration::from_secs(3 * 24 * 3600);
    let then = store(address, &table, &time, ClockOffset::Behind(three_days));
    let (before, executed_then) = creating(layer(then.clone()));
    send(&before, post("/orders", "completed", "tea")).await;
    let left_behind = claim();
    then.acquire(&left_behind).await.expect("the server runs");

    let there = direct.scan().table_name(&table).send().await;
    assert_eq!(there.expect("the server runs").count(), 2, "not collected");
    let now = store(address, &table, &time, TRUE);
    let (after, executed) = creating(layer(now.clone()));
    // Another request under the old key is neither a replay nor a mismatch.
    let response = send(&after, post("/orders", "completed", "coffee")).await;
    assert_eq!(
        (response.status, response.is_replay()),
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
    // The former lease is no longer held.
    let late = then
        .renew(&left_behind.lease_ref(1), Ttl::from_secs(15))
        .await;
    assert!(late.is_err());
    assert_eq!(now.acquire(&other_request).await.expect("a reply"), first);
}
