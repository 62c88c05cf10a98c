//! The store under test, called the way the layer calls it.

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
use crate::store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// How often a call that fails at the backend is made before the case fails.
const ATTEMPTS: u32 = 8;

/// After the first failure of a server; twice as long after each that follows, 6 s in all. A cluster that is busy electing,
/// or a server with too much to do, is no breach of the contract.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Limit of the factor by which late trials lengthen the unit.
const MAX_SCALE: u32 = 64;

/// Longer than any case takes.
pub(super) const LONG: Ttl = Ttl::from_secs(600);

/// A store under test, and how fast to test it.
///
/// Calls that fail at the backend are made again, with the same token, as the layer does: a case that passes through a
/// store that loses replies shows that a lost reply does no harm.
#[derive(Debug)]
pub struct Subject<S> {
    store: Arc<S>,
    unit: Duration,
    /// Factor of the unit. Clones share it.
    scale: Arc<AtomicU32>,
    push: bool,
    clock: Option<ManualClock>,
    start: Instant,
}

/// What came of a renew or a complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
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
        }
    }

    /// Sets the unit of leases and pauses. Default: 50 ms.
    ///
    /// A short lease lasts 4 units, and a case waits 7 units for its expiry. Set the unit to a few times the duration of a
    /// call, and to more than the clock skew that the store allows. If a trial takes longer than the lease that it examines,
    /// the case doubles the unit and starts again.
    #[must_use]
    pub fn with_unit(self, unit: Duration) -> Self {
        Self { unit, ..self }
    }

    /// Whether [`Store::wait_for_change`] resolves when the entry changes, not only after `within`; `true` by default.
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

    /// Returns the same store behind a fault injector that follows `plan`.
    #[must_use]
    pub fn through(self, plan: Plan) -> Subject<FaultInjector<Arc<S>>> {
        Subject {
            store: Arc::new(FaultInjector::new(self.store).with_plan(plan)),
            unit: self.unit,
            scale: self.scale,
            push: self.push,
            clock: self.clock,
            start: self.start,
        }
    }

    /// Returns the same subject with the type of its store erased.
    #[must_use]
    pub fn erased(self) -> Subject<AnyStore> {
        Subject {
            store: Arc::new(AnyStore::new(self.store)),
            unit: self.unit,
            scale: self.scale,
            push: self.push,
            clock: self.clock,
            start: self.start,
        }
    }

    /// The store itself.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.store
    }

    /// How long a plan's pauses are: short beside a unit.
    #[must_use]
    pub fn pause(&self) -> Duration {
        self.unit / 5
    }

    pub(super) const fn has_push(&self) -> bool {
        self.push
    }

    pub(super) fn units(&self, units: u32) -> Ttl {
        Ttl::try_from(self.duration(units)).expect("a unit is not zero")
    }

    /// Lets so many units pass: advances the clock of the test, or waits.
    pub(super) async fn sleep(&self, units: u32) {
        match &self.clock {
            Some(clock) => clock.advance(self.duration(units)),
            None => tokio::time::sleep(self.duration(units)).await,
        }
    }

    /// Waits so many units in real time, also on a clock of the test.
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

    /// Returns `true` if at least so many units have passed since a moment of [`elapsed`](Self::elapsed).
    ///
    /// A period of that length that began after the moment may then have ended, and what the store returned proves nothing.
    /// Read the moment before the call that begins the period, and ask after the reply that is judged. An entry that expires
    /// early is then never excused. A paused clock and a clock of the test are never late.
    pub(super) fn is_late(&self, since: Duration, units: u32) -> bool {
        self.elapsed() - since >= self.duration(units)
    }

    /// Doubles the unit after a trial that was late, so that the next one bears a longer stall.
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

    /// Until a lease of [`short_lease`](Self::short_lease) is over, whatever the backend rounds.
    pub(super) async fn outlive_short_lease(&self) {
        self.sleep(7).await;
    }

    pub(super) fn short_lease(&self) -> Ttl {
        self.units(4)
    }

    /// A claim on a key that nobody ever used, with a lease that does not end within the case.
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

    /// The same request again, under its own token.
    pub(super) fn duplicate(&self, claim: &Claim) -> Claim {
        Claim {
            token: Token::random().expect(RANDOM),
            lease: LONG,
            ..claim.clone()
        }
    }

    /// Another request with the same key.
    pub(super) fn other_request(&self, claim: &Claim) -> Claim {
        Claim {
            fingerprint: Fingerprint::from_bytes(random()),
            ..self.duplicate(claim)
        }
    }

    pub(super) async fn acquire(&self, claim: &Claim) -> Acquired {
        let mut failed = Failed::default();
        loop {
            match self.store.acquire(claim).await {
                Ok(acquired) => return acquired,
                Err(StoreError::Backend(source)) => failed.again("acquire", &*source).await,
                Err(error) => panic!("acquire answers nothing but a backend error, found {error}"),
            }
        }
    }

    /// Acquires what must be free, or an orphan that must be takeable.
    pub(super) async fn hold(&self, claim: &Claim) -> LeaseRef {
        match self.acquire(claim).await {
            Acquired::Granted { generation, .. } => claim.lease_ref(generation),
            refused @ (Acquired::InProgress { .. }
            | Acquired::Orphaned { .. }
            | Acquired::Completed { .. }) => panic!("expected a lease, found {refused:?}"),
        }
    }

    /// A lease that is over.
    pub(super) async fn orphan(&self) -> (Claim, LeaseRef) {
        let claim = self.short_claim();
        let lease = self.hold(&claim).await;
        self.outlive_short_lease().await;
        (claim, lease)
    }

    pub(super) async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Outcome {
        let mut failed = Failed::default();
        loop {
            match outcome(self.store.renew(lease, ttl).await) {
                Ok(outcome) => return outcome,
                Err(source) => failed.again("renew", &*source).await,
            }
        }
    }

    pub(super) async fn complete(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
    ) -> Outcome {
        let mut failed = Failed::default();
        loop {
            let completed = self.store.complete(lease, record.clone(), retention).await;
            match outcome(completed) {
                Ok(outcome) => return outcome,
                Err(source) => failed.again("complete", &*source).await,
            }
        }
    }

    pub(super) async fn release(&self, lease: &LeaseRef) {
        let mut failed = Failed::default();
        loop {
            match outcome(self.store.release(lease).await) {
                Ok(Outcome::Done) => return,
                Ok(refused) => panic!("release is Ok or a backend error, found {refused:?}"),
                Err(source) => failed.again("release", &*source).await,
            }
        }
    }
}

/// How often one call has failed at the backend.
#[derive(Debug, Default)]
struct Failed(u32);

impl Failed {
    /// It has, and is to be made again: at once where we made the failure up, and after a while where a server did.
    async fn again(&mut self, call: &str, source: &Source) {
        self.0 += 1;
        assert!(
            self.0 < ATTEMPTS,
            "{call} failed {ATTEMPTS} times: {source:?}"
        );
        if !source.is::<InjectedFault>() {
            tokio::time::sleep(FIRST_PAUSE * (1 << (self.0 - 1))).await;
        }
    }
}

type Source = dyn Error + Send + Sync;

/// The source of the error where the backend failed.
fn outcome(result: Result<(), StoreError>) -> Result<Outcome, Box<Source>> {
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(StoreError::LeaseLost) => Ok(Outcome::Lost),
        Err(StoreError::RecordTooLarge { limit }) => Ok(Outcome::TooLarge { limit }),
        Err(StoreError::Backend(source)) => Err(source),
    }
}

pub(super) fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect(RANDOM);
    bytes
}

const RANDOM: &str = "tests run where there is randomness";
