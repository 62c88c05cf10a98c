//! Waiting for events, with limits that only a hang exceeds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tests::servers::redis::RedisServer;
use tokio::time::sleep;
use tower_idempotency::Lease;

/// Waits until `condition` holds.
///
/// # Panics
///
/// Panics if it does not hold within [`HANG`].
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < HANG, "timed out: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until each lease that a server stores now has a later expiry, and checks meanwhile that the holders have `leases`.
///
/// # Panics
///
/// Panics if a lease is lost, or is not renewed within [`HANG`].
pub(crate) async fn until_renewed(server: &RedisServer, leases: &[Lease]) {
    let before = expiries(server);
    assert!(!before.is_empty(), "expected a lease on the server");
    let began = Instant::now();
    loop {
        let held = leases.iter().all(Lease::is_held);
        assert!(held, "lost after {:?}", began.elapsed());
        let now = expiries(server);
        // A lease that was released meanwhile needs no renewal.
        let left = before.iter().filter(|(key, _)| now.contains_key(*key));
        let left: Vec<_> = left.map(|(key, expiry)| now[key] > *expiry).collect();
        if !left.is_empty() && left.iter().all(|is_later| *is_later) {
            return;
        }
        assert!(began.elapsed() < HANG, "no renewal: {before:?}, {now:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Returns when each lease on a server expires, in milliseconds of its clock, by the key of the entry.
pub(crate) fn expiries(server: &RedisServer) -> BTreeMap<String, u64> {
    let keys = server.entries();
    let expiries = keys.iter().filter_map(|key| {
        // Another key than an entry's may be no hash.
        let expiry = server.try_command(&["HGET", key, "l"]).ok()?.ok()?;
        Some((key.to_owned(), expiry.parse().ok()?))
    });
    expiries.collect()
}

/// The time after which a test that still waits has failed. A test on a machine that stalls for seconds needs far less.
pub(crate) const HANG: Duration = Duration::from_secs(90);
