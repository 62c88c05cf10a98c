//! Writes that the service applies late, after later writes under the same lease.

use std::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, SystemTime},
};

use http::StatusCode;
use tests::{
    dynamodb::{Endpoint, EndpointFault, ManualClock},
    servers::dynamodb::{StandIn, client, shared},
    sql,
};
use tower_idempotency::{
    Ttl,
    store::{Acquired, Claim, OrphanPolicy, Store},
};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

/// The duration of a lease by the clock of the test.
const LEASE: Duration = Duration::from_secs(2);
/// A long timeout, so that no call fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

const GRANTED: Acquired = Acquired::Granted {
    generation: 1,
    takeover: false,
};

/// A table behind an endpoint that can hold a write, and the clock of all processes.
struct Table {
    endpoint: Endpoint,
    name: String,
    time: ManualClock,
}

impl Table {
    async fn new() -> Self {
        let server = shared(StandIn::Dynoxide);
        let table = Self {
            endpoint: Endpoint::start(server.address()),
            name: server.new_table(),
            time: ManualClock::new(),
        };
        let made = table.store().create_table().await;
        made.expect("the server runs");
        table.endpoint.calls();
        table
    }

    /// Returns the store of a process with the clock of the test.
    fn store(&self) -> DynamoDbStore {
        let time = self.time.clone();
        self.store_with_clock(move || time.now())
    }

    /// Returns the store of a process whose clock is 10 s behind.
    fn store_behind(&self) -> DynamoDbStore {
        let time = self.time.clone();
        self.store_with_clock(move || time.now() - 5 * LEASE)
    }

    fn store_with_clock(
        &self,
        clock: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> DynamoDbStore {
        let options = DynamoDbOptions::new()
            .with_clock(clock)
            .with_clock_skew(Duration::ZERO)
            .with_timeout(PATIENCE);
        options.store(&client(self.endpoint.address()), self.name.as_str())
    }

    /// Applies the write that was held, and advances the clock until the lease that it would set has expired. Checks that the
    /// lease is still held, because a later renewal has extended it by another half of a lease.
    async fn assert_held_after_late_write(&self, store: &DynamoDbStore, claim: &Claim) {
        let statuses = self.endpoint.deliver_held().await;
        assert_eq!(statuses, [StatusCode::BAD_REQUEST], "a refused write");
        self.time.advance(LEASE * 3 / 4);
        assert_in_progress(store, claim).await;
    }
}

fn ttl(duration: Duration) -> Ttl {
    Ttl::try_from(duration).expect("not zero")
}

fn new_claim(orphans: OrphanPolicy) -> Claim {
    let mut claim = sql::claim();
    claim.lease = ttl(LEASE);
    claim.orphans = orphans;
    claim
}

/// Checks that another execution of the same request takes no lease over.
async fn assert_in_progress(store: &DynamoDbStore, claim: &Claim) {
    let mut rival = sql::duplicate(claim);
    rival.orphans = OrphanPolicy::TakeOver;
    let found = store.acquire(&rival).await.expect("the server runs");
    assert!(matches!(found, Acquired::InProgress { .. }), "{found:?}");
}

async fn assert_granted(store: &DynamoDbStore, claim: &Claim) {
    let acquired = store.acquire(claim).await.expect("the server runs");
    assert_eq!(acquired, GRANTED);
}

async fn renew(store: &DynamoDbStore, claim: &Claim) {
    let renewed = store.renew(&claim.lease_ref(1), claim.lease).await;
    renewed.expect("the token holds the lease");
}

// F-994
#[tokio::test]
async fn late_acquire_does_not_shorten_lease() {
    for orphans in [
        OrphanPolicy::TakeOver,
        OrphanPolicy::Refuse,
        OrphanPolicy::Never,
    ] {
        let table = Table::new().await;
        let (store, claim) = (table.store(), new_claim(orphans));
        table.endpoint.set(EndpointFault::HoldUpdate(0));
        store.acquire(&claim).await.expect_err("no reply");
        assert_granted(&store, &claim).await;
        table.time.advance(LEASE / 2);
        renew(&store, &claim).await;
        table.assert_held_after_late_write(&store, &claim).await;
    }
}

// F-994
#[tokio::test]
async fn late_renewal_does_not_shorten_lease() {
    let table = Table::new().await;
    let (store, claim) = (table.store(), new_claim(OrphanPolicy::TakeOver));
    assert_granted(&store, &claim).await;
    // The SDK repeats the attempt that is held.
    table.endpoint.set(EndpointFault::HoldUpdate(0));
    renew(&store, &claim).await;
    table.time.advance(LEASE / 2);
    renew(&store, &claim).await;
    table.assert_held_after_late_write(&store, &claim).await;
}

// F-994
/// The clock went back, so the renewal is a second write that shortens the lease.
#[tokio::test]
async fn late_second_write_does_not_shorten_lease() {
    let table = Table::new().await;
    let (store, claim) = (table.store_behind(), new_claim(OrphanPolicy::TakeOver));
    assert_granted(&table.store(), &claim).await;
    table.endpoint.set(EndpointFault::HoldUpdate(1));
    renew(&store, &claim).await;
    table.time.advance(LEASE / 2);
    renew(&store, &claim).await;
    table.assert_held_after_late_write(&store, &claim).await;
}

/// While the first write of a renewal was under way, an acquire with the same token was applied. The next write counts from its
/// own time.
#[tokio::test]
async fn slow_renewal_does_not_shorten_lease() {
    let table = Table::new().await;
    let claim = new_claim(OrphanPolicy::TakeOver);
    let (time, is_read) = (table.time.clone(), AtomicBool::new(false));
    let slow = table.store_with_clock(move || match is_read.swap(true, SeqCst) {
        false => time.now() - LEASE / 2,
        true => time.now(),
    });
    assert_granted(&table.store(), &claim).await;
    renew(&slow, &claim).await;
    table.time.advance(LEASE * 3 / 4);
    assert_in_progress(&table.store(), &claim).await;
}

/// The holder keeps its lease. The lease counts from the time that the clock shows now.
#[tokio::test]
async fn clock_that_went_back_renews_lease() {
    let table = Table::new().await;
    let (store, claim) = (table.store_behind(), new_claim(OrphanPolicy::TakeOver));
    assert_granted(&table.store(), &claim).await;
    table.endpoint.calls();
    // A lease that lasts longer than requested needs no write.
    assert_granted(&store, &claim).await;
    assert_eq!(table.endpoint.operations(), ["UpdateItem"]);
    renew(&store, &claim).await;
    assert_eq!(table.endpoint.operations(), ["UpdateItem"; 2]);
    table.time.advance(LEASE / 2);
    renew(&store, &claim).await;
    assert_eq!(table.endpoint.operations(), ["UpdateItem"]);
    table.time.advance(LEASE * 3 / 4);
    assert_in_progress(&store, &claim).await;
    table.time.advance(LEASE / 4);
    let rival = sql::duplicate(&claim);
    let taken = store.acquire(&rival).await.expect("the server runs");
    let takeover = Acquired::Granted {
        generation: 2,
        takeover: true,
    };
    assert_eq!(taken, takeover);
}
