//! Delays that a correct store may have fail no case. They come from an overloaded machine, a temporary server failure,
//! or a call that takes effect after it was dropped.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tokio::{task::yield_now, time::Instant};
use tower_idempotency::{
    conformance::{Case, CaseRuntime, Fault, FaultInjector, Operation, Subject, run},
    store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
};

use super::mutant::{Flaw, Mutant};

const PAUSED: CaseRuntime = CaseRuntime::CurrentThread { start_paused: true };

/// A delay of more than 60 of the suite's default time units, longer than any duration in the cases below.
const HELD_UP: Fault = Fault::Slow(Duration::from_secs(4));

fn case(name: &str) -> Case {
    Case::named(name)
}

type Flawless = Arc<FaultInjector<Mutant>>;

fn flawless() -> (Flawless, Subject<Flawless>) {
    let store = Arc::new(FaultInjector::new(Mutant::new(Flaw::Nothing)));
    (Arc::clone(&store), Subject::new(store))
}

/// Makes two tests: the first delays one call of the case, after some calls that succeed. The second delays every call
/// of its operation.
///
/// The case repeats its trial with a longer unit, until the delay no longer matters.
macro_rules! held_up {
    ($($case:ident in $operation:ident after $before:literal, once $calls:literal, always $all:literal;)*) => { $(
        #[test]
        fn $case() {
            let (store, subject) = flawless();
            let through = vec![Fault::None; $before];
            store.enqueue(Operation::$operation, through.into_iter().chain([HELD_UP]));
            run(PAUSED, case(stringify!($case)).check(subject));
            assert_eq!(store.calls(Operation::$operation), $calls, "a trial, and another");

            let (store, subject) = flawless();
            store.set_fault(Operation::$operation, HELD_UP);
            run(PAUSED, case(stringify!($case)).check(subject));
            assert_eq!(store.calls(Operation::$operation), $all, "trials with longer units");
        }
    )* };
}

held_up! {
    released_takeover_lasts_for_orphan_retention in Release after 0, once 2, always 5;
    renewed_lease_restarts_orphan_retention in Renew after 0, once 2, always 4;
    second_complete_changes_nothing in Complete after 1, once 4, always 12;
    held_lease_outlives_orphan_retention in Acquire after 4, once 13, always 28;
    record_outlives_its_lease in Complete after 1, once 3, always 7;
    replay_does_not_extend_retention in Complete after 0, once 2, always 6;
}

/// Waiters that subscribe after the change return at once. Such a trial shows nothing about notifications.
#[test]
fn late_waiters_do_not_hide_missing_notifications() {
    for (flaw, fails) in [(Flaw::Nothing, false), (Flaw::WaitingSubscribesNever, true)] {
        let store = Arc::new(FaultInjector::new(Mutant::new(flaw)));
        store.enqueue(Operation::WaitForChange, vec![HELD_UP; 9]);
        let subject = Subject::new(Arc::clone(&store));
        let check = AssertUnwindSafe(|| run(PAUSED, case("release_wakes_waiters").check(subject)));
        assert_eq!(catch_unwind(check).is_err(), fails, "{flaw:?}");
        let calls = store.calls(Operation::WaitForChange);
        assert_eq!(calls, 18, "a trial, and another");
    }
}

/// A server that reports for this time that it is unavailable.
struct TemporarilyUnavailable {
    store: Mutant,
    until: Instant,
}

impl TemporarilyUnavailable {
    fn for_duration(time: Duration) -> Self {
        Self {
            store: Mutant::new(Flaw::Nothing),
            until: Instant::now() + time,
        }
    }

    fn check_availability(&self) -> Result<(), StoreError> {
        if Instant::now() < self.until {
            return Err(StoreError::backend(io::Error::other("no leader")));
        }
        Ok(())
    }
}

impl Store for TemporarilyUnavailable {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.check_availability()?;
        self.store.acquire(claim).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.check_availability()?;
        self.store.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.check_availability()?;
        self.store.complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.check_availability()?;
        self.store.release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        self.store.wait_for_change(id, within).await;
    }
}

#[test]
fn transient_server_failure_is_retried() {
    run(PAUSED, async {
        let subject = Subject::new(TemporarilyUnavailable::for_duration(Duration::from_secs(5)));
        case("release_frees_key").check(subject).await;
    });
    let for_long = AssertUnwindSafe(|| {
        run(PAUSED, async {
            let subject = Subject::new(TemporarilyUnavailable::for_duration(Duration::from_secs(
                60,
            )));
            case("release_frees_key").check(subject).await;
        });
    });
    let said = catch_unwind(for_long).unwrap_err();
    let said = said.downcast_ref::<String>().unwrap();
    assert!(said.starts_with("acquire failed 8 times"), "{said}");
    assert!(said.contains("no leader"), "{said}");
}

#[test]
fn injected_faults_take_no_time() {
    run(PAUSED, async {
        let store = Arc::new(FaultInjector::new(Mutant::new(Flaw::Nothing)));
        store.enqueue(Operation::Acquire, vec![Fault::CallLost; 7]);
        let began = Instant::now();
        case("release_frees_key")
            .check(Subject::new(Arc::clone(&store)))
            .await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert_eq!(store.calls(Operation::Acquire), 9);
    });
}

/// A server with independent connections. A call that was dropped on one connection may take effect after a later call
/// on another, here after a release.
struct Late {
    store: Mutant,
    dropped: Mutex<Vec<Claim>>,
}

/// A call in flight, which counts as dropped unless it is disarmed.
struct CallInFlight<'a>(&'a Late, Option<Claim>);

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        self.0.dropped.lock().unwrap().extend(self.1.take());
    }
}

impl Store for Late {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut call_in_flight = CallInFlight(self, Some(claim.clone()));
        yield_now().await;
        call_in_flight.1 = None;
        self.store.acquire(claim).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.store.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.store.complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        // No release that the case drops takes effect before the late acquire does.
        for _ in 0..20 {
            yield_now().await;
        }
        self.store.release(lease).await?;
        let dropped = std::mem::take(&mut *self.dropped.lock().unwrap());
        for claim in dropped {
            self.store.acquire(&claim).await?;
        }
        Ok(())
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        self.store.wait_for_change(id, within).await;
    }
}

#[test]
fn dropped_acquire_may_run_after_release() {
    run(PAUSED, async {
        let subject = Subject::new(Late {
            store: Mutant::new(Flaw::Nothing),
            dropped: Mutex::default(),
        });
        case("dropped_call_leaves_store_usable")
            .check(subject)
            .await;
    });
}
