//! The store under test, with calls like those of the layer.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{AnyStore, FaultInjector, InjectedFault, ManualClock, Plan};
use crate::inspect::{Inspect, Inspector};
use crate::store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// The maximum number of attempts of a call before the case fails.
const ATTEMPTS: u32 = 8;

/// Delay after the first failure of a server. Each later delay is twice as long, 6 s in all. A cluster during an election
/// and an overloaded server do not violate the contract.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);

/// Limit of the factor by which late trials lengthen the unit.
const MAX_SCALE: u32 = 64;

/// Longer than any case takes.
pub(super) const LONG: Ttl = Ttl::from_secs(600);

/// Store under test, with the speed of its cases.
///
/// A call that fails at the backend is retried with the same token, as the layer does. If a case passes with a fault
/// injector that loses replies, a lost reply is harmless.
#[derive(Debug)]
pub struct Subject<S> {
    store: Arc<S>,
    unit: Duration,
    /// Factor of the unit. Clones share it.
    scale: Arc<AtomicU32>,
    push: bool,
    clock: Option<ManualClock>,
    start: Instant,
    inspector: Option<Inspector>,
}

/// Result of a renew or a complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    Done,
    Lost,
    TooLarge { limit: usize },
}

impl<S> Clone for Subject<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            scale: Arc::clone(&self.scale),
            clock: self.clock.clone(),
            inspector: self.inspector.clone(),
            ..*self
        }
    }
}

impl<S: Store> Subject<S> {
    /// Returns a subject with units of 50 ms, for a store that wakes its waiters.
    pub fn new(store: S) -> Self {
        Self {
            store: Arc::new(store),
            unit: Duration::from_millis(50),
            scale: Arc::new(AtomicU32::new(1)),
            push: true,
            clock: None,
            start: Instant::now(),
            inspector: None,
        }
    }

    /// Sets the unit of leases and waits. Default: 50 ms.
    ///
    /// A short lease lasts 4 units, and a case waits 7 units for its expiry. Set the unit to a few times the duration of a
    /// call, and to more than the clock skew that the store allows. If a trial takes longer than the lease that it examines,
    /// the case doubles the unit and starts again.
    #[must_use]
    pub fn with_unit(self, unit: Duration) -> Self {
        Self { unit, ..self }
    }

    /// Sets whether [`Store::wait_for_change`] returns when the entry changes, not only after its timeout. Default:
    /// `true`.
    ///
    /// With `false`, the cases about notifications only check that every wait ends.
    #[must_use]
    pub fn with_push(self, push: bool) -> Self {
        Self { push, ..self }
    }

    /// Sets the clock from which the store takes its time. Default: none, the cases wait in real time.
    ///
    /// The cases advance the clock instead of waiting. If the store does not use this clock, cases about expiry fail.
    #[must_use]
    pub fn with_clock(self, clock: ManualClock) -> Self {
        Self {
            clock: Some(clock),
            ..self
        }
    }

    /// Adds access for operators, which the [cases about it](super::inspect_cases) need.
    #[must_use]
    pub fn with_inspector(self) -> Self
    where
        S: Inspect,
    {
        let inspector = Some(Inspector::new(Arc::clone(&self.store)));
        Self { inspector, ..self }
    }

    /// Returns the same store behind a fault injector that follows `plan`.
    #[must_use]
    pub fn through(self, plan: Plan) -> Subject<FaultInjector<Arc<S>>> {
        self.map_store(|store| FaultInjector::new(store).with_plan(plan))
    }

    /// Returns the same subject with the type of its store erased.
    #[must_use]
    pub fn erased(self) -> Subject<AnyStore> {
        self.map_store(AnyStore::new)
    }

    fn map_store<T>(self, map: impl FnOnce(Arc<S>) -> T) -> Subject<T> {
        Subject {
            store: Arc::new(map(self.store)),
            unit: self.unit,
            scale: self.scale,
            push: self.push,
            clock: self.clock,
            start: self.start,
            inspector: self.inspector,
        }
    }

    /// Returns the store itself.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Returns the delay for a plan, which is short compared with a unit.
    #[must_use]
    pub fn pause(&self) -> Duration {
        self.unit / 5
    }

    pub(super) fn inspector(&self) -> &Inspector {
        self.inspector.as_ref().expect("with_inspector was called")
    }

    pub(super) const fn has_push(&self) -> bool {
        self.push
    }

    pub(super) fn units(&self, units: u32) -> Ttl {
        Ttl::try_from(self.duration(units)).expect("a unit is not zero")
    }

    /// Lets this many units pass: advances the clock of the test, or waits.
    pub(super) async fn sleep(&self, units: u32) {
        match &self.clock {
            Some(clock) => clock.advance(self.duration(units)),
            None => tokio::time::sleep(self.duration(units)).await,
        }
    }

    /// Waits this many units in real time, even with a clock of the test.
    pub(super) async fn wait(&self, units: u32) {
        tokio::time::sleep(self.duration(units)).await;
    }

    /// Returns the time since the subject was created, on the clock of the test if there is one.
    pub(super) fn elapsed(&self) -> Duration {
        match &self.clock {
            Some(clock) => clock.elapsed(),
            None => self.start.elapsed(),
        }
    }

    /// Returns `true` if at least this many units have passed since a moment of [`elapsed`](Self::elapsed).
    ///
    /// A period of that length that began after the moment may then have ended, so the reply of the store proves nothing
    /// about expiry. Read the moment before the call that begins the period, and call this function after the reply under
    /// test. Otherwise the case could excuse a premature expiry. A paused clock and a clock of the test are never late.
    pub(super) fn is_late(&self, since: Duration, units: u32) -> bool {
        self.elapsed() - since >= self.duration(units)
    }

    /// Doubles the unit after a late trial, so that the next trial tolerates a longer stall.
    ///
    /// The number of trials is not limited. The runner ends a case after ten minutes.
    pub(super) fn retry_slower(&self) {
        let scale = self.scale.load(Relaxed);
        self.scale.store((scale * 2).min(MAX_SCALE), Relaxed);
        println!("trial was late, unit is now {:?}", self.duration(1));
    }

    fn duration(&self, units: u32) -> Duration {
        self.unit * units * self.scale.load(Relaxed)
    }

    /// Waits until a lease of [`short_lease`](Self::short_lease) has expired, including any rounding of the backend.
    pub(super) async fn outlive_short_lease(&self) {
        self.sleep(7).await;
    }

    pub(super) fn short_lease(&self) -> Ttl {
        self.units(4)
    }

    /// Returns a claim on an unused key, with a lease that does not expire within the case.
    pub(super) fn claim(&self) -> Claim {
        let [id, fingerprint] = [random(), random()];
        let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
        Claim {
            lease: LONG,
            owner: "conformance",
            operation: Box::from("POST /conformance"),
            ..claim.expect(RANDOM)
        }
    }

    pub(super) fn short_claim(&self) -> Claim {
        Claim {
            lease: self.short_lease(),
            ..self.claim()
        }
    }

    /// Returns a claim of the same request under a new token.
    pub(super) fn duplicate(&self, claim: &Claim) -> Claim {
        Claim {
            token: Token::random().expect(RANDOM),
            lease: LONG,
            ..claim.clone()
        }
    }

    /// Returns a claim of another request with the same key.
    pub(super) fn other_request(&self, claim: &Claim) -> Claim {
        Claim {
            fingerprint: Fingerprint::from_bytes(random()),
            ..self.duplicate(claim)
        }
    }

    pub(super) async fn acquire(&self, claim: &Claim) -> Acquired {
        let mut failures = FailedAttempts::default();
        loop {
            match self.store.acquire(claim).await {
                Ok(acquired) => return acquired,
                Err(StoreError::Backend(source)) => {
                    failures.wait_before_retry("acquire", &*source).await;
                }
                Err(error) => {
                    panic!("expected acquire to fail with a backend error only, found {error}")
                }
            }
        }
    }

    /// Acquires a key that must be free, or an orphan that must allow a takeover.
    pub(super) async fn hold(&self, claim: &Claim) -> LeaseRef {
        match self.acquire(claim).await {
            Acquired::Granted { generation, .. } => claim.lease_ref(generation),
            refused @ (Acquired::InProgress { .. }
            | Acquired::Orphaned { .. }
            | Acquired::Completed { .. }) => panic!("expected a lease, found {refused:?}"),
        }
    }

    /// Returns an expired lease.
    pub(super) async fn orphan(&self) -> (Claim, LeaseRef) {
        let claim = self.short_claim();
        let lease = self.hold(&claim).await;
        self.outlive_short_lease().await;
        (claim, lease)
    }

    pub(super) async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> CallOutcome {
        let mut failures = FailedAttempts::default();
        loop {
            match outcome(self.store.renew(lease, ttl).await) {
                Ok(outcome) => return outcome,
                Err(source) => failures.wait_before_retry("renew", &*source).await,
            }
        }
    }

    pub(super) async fn complete(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
    ) -> CallOutcome {
        let mut failures = FailedAttempts::default();
        loop {
            let completed = self.store.complete(lease, record.clone(), retention).await;
            match outcome(completed) {
                Ok(outcome) => return outcome,
                Err(source) => failures.wait_before_retry("complete", &*source).await,
            }
        }
    }

    pub(super) async fn release(&self, lease: &LeaseRef) {
        let mut failures = FailedAttempts::default();
        loop {
            match outcome(self.store.release(lease).await) {
                Ok(CallOutcome::Done) => return,
                Ok(refused) => {
                    panic!("expected release to return Ok or a backend error, found {refused:?}")
                }
                Err(source) => failures.wait_before_retry("release", &*source).await,
            }
        }
    }
}

/// The number of failed attempts of one call.
#[derive(Debug, Default)]
struct FailedAttempts(u32);

impl FailedAttempts {
    /// Counts a failure. Waits with backoff before the next attempt, unless a fault was injected.
    async fn wait_before_retry(&mut self, call: &str, source: &BackendSource) {
        self.0 += 1;
        assert!(
            self.0 < ATTEMPTS,
            "{call} failed {ATTEMPTS} times: {source:?}"
        );
        if !source.is::<InjectedFault>() {
            tokio::time::sleep(FIRST_BACKOFF * (1 << (self.0 - 1))).await;
        }
    }
}

type BackendSource = dyn Error + Send + Sync;

/// Converts the result of a call. Returns the source of the error if the backend failed.
fn outcome(result: Result<(), StoreError>) -> Result<CallOutcome, Box<BackendSource>> {
    match result {
        Ok(()) => Ok(CallOutcome::Done),
        Err(StoreError::LeaseLost) => Ok(CallOutcome::Lost),
        Err(StoreError::RecordTooLarge { limit }) => Ok(CallOutcome::TooLarge { limit }),
        Err(error @ (StoreError::CallerLimit | StoreError::Unreadable(_))) => Err(error.into()),
        Err(StoreError::Backend(source)) => Err(source),
    }
}

/// Returns a record of 1 MiB. Its bytes have no short period, so a store that joins chunks in a wrong order changes it.
pub(super) fn large_record() -> Bytes {
    let bytes = (0..1u32 << 20).map(|n| (n.wrapping_mul(0x9E37_79B9) >> 24) as u8);
    bytes.collect()
}

pub(super) fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect(RANDOM);
    bytes
}

const RANDOM: &str = "the operating system provides randomness";
