//! Background tasks that release leases. They retry failed releases, and repeat those that an acquire may overtake.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::{
    clock::jittered,
    config::Config,
    lease::state::{LeaseGuard, LeaseState},
    limits::InFlightPermit,
    retry::Backoff,
    store::Claim,
    store_client::{RenewOutcome, StoreClient},
};

/// Delay before an acknowledged release is repeated, in case it took effect before the acquire that it revokes. The delay
/// doubles each time: four repetitions in a lease of 15 s.
const FIRST_REPEAT_DELAY: Duration = Duration::from_secs(1);

/// Retries the release of the key in a background task, for one lease duration.
pub(super) fn spawn_release(lease: &LeaseState, permit: InFlightPermit) {
    let (store, reference) = (lease.store().clone(), lease.reference);
    let (deadline, timeout) = (lease.background_deadline(), lease.store_timeout());
    let warnings = Arc::clone(lease.config().warnings());
    tokio::spawn(async move {
        let _permit = permit;
        let released = store.release_until(&reference, deadline, timeout, &warnings);
        released.await;
    });
}

/// Reports the end of a lease that has no record. Calls `report` unless the lease is lost.
pub(super) fn report_end(lease: &LeaseState, report: impl FnOnce(&LeaseState)) {
    if lease.is_lost() {
        lease.mark_lost();
    } else {
        report(lease);
    }
}

/// Like [`spawn_release`], for a lease that has expired by the clock of this process. Another process may hold the key, so the
/// task renews the lease first. It reports the loss if it finds one. Otherwise it calls `report`, also if the store did not
/// reply until the deadline.
pub(super) fn spawn_release_of_expired(
    lease: &LeaseGuard,
    permit: InFlightPermit,
    report: impl FnOnce(&LeaseState) + Send + 'static,
) {
    let (lease, deadline) = (lease.handle(), lease.background_deadline());
    tokio::spawn(async move {
        let lease = &*lease.0;
        let mut backoff = Backoff::new();
        while backoff.wait_until(deadline).await {
            match lease.expire_now().await {
                RenewOutcome::Renewed => break,
                RenewOutcome::LeaseLost => {
                    lease.mark_lost();
                    break;
                }
                RenewOutcome::Failed => {}
            }
        }
        report_end(lease, report);
        let (store, timeout) = (lease.store(), lease.store_timeout());
        let released = store.release_until(&lease.reference, deadline, timeout, lease.warnings());
        released.await;
        release_late_acquire(lease, permit);
    });
}

/// Releases the key if an acquire under the token of this lease may still take effect. Without the release, that acquire could
/// block the key after another execution has released it.
///
/// A commit that the handler dropped may have sent such an acquire. Call this function only after the store has refused a
/// completion, or after a release. Called earlier, it would free a lease that is still held.
pub(super) fn release_late_acquire(lease: &LeaseState, permit: InFlightPermit) {
    if lease.has_unacknowledged_commit() || lease.may_acquire_late() {
        spawn_release_unacknowledged(lease.config(), lease.store(), lease.claim(), permit);
    }
}

/// Like [`spawn_release`], for an acquire whose outcome is unknown. The store may grant the lease after the caller has timed
/// out, even after a first release. Repeats the release with growing delays until the lease would have expired.
///
/// [`drain`](crate::IdempotencyLayer::drain) waits for the first release only. At most `max_in_flight` such tasks run at
/// once. Beyond that, the release is sent once, and the task holds the permit of the request.
pub(super) fn spawn_release_unacknowledged(
    config: &Config,
    store: &StoreClient,
    claim: &Claim,
    permit: InFlightPermit,
) {
    // The generation may be higher after a takeover. The store ignores it and uses its own.
    let lease = claim.lease_ref_unknown();
    let deadline = Instant::now() + claim.lease.as_duration();
    let timeout = config.execution.store_timeout;
    let permit = permit.into_background_release(config.limits.max_in_flight);
    let (store, warnings) = (store.clone(), Arc::clone(config.warnings()));
    tokio::spawn(async move {
        let mut permit = match permit {
            Ok(permit) => permit,
            Err(_in_flight) => {
                store.release(&lease, timeout, &warnings).await;
                return;
            }
        };
        let released = store.release_until(&lease, deadline, timeout, &warnings);
        released.await;
        permit.set_acknowledged();
        let mut delay = FIRST_REPEAT_DELAY;
        while Instant::now() < deadline {
            sleep_until(deadline.min(Instant::now() + jittered(delay))).await;
            delay *= 2;
            store.release(&lease, timeout, &warnings).await;
        }
    });
}
