//! The store under test, called the way the layer calls it.

use std::{error::Error, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Faulty, InjectedFault, Plan};
use crate::store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// How often a call that fails at the backend is made before the case fails.
const ATTEMPTS: u32 = 8;

/// After the first failure of a server; twice as long after each that follows, 6 s in all. A cluster that is busy electing,
/// or a server with too much to do, is no breach of the contract.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// How often a case may be held up for longer than its periods last.
const TRIALS: u32 = 5;

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
    push: bool,
}

/// What came of a renew or a complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Lost,
    TooLarge { limit: usize },
}

/// Counts the trials of a case that were held up for so long that they say nothing.
#[derive(Debug, Default)]
pub(super) struct Trials(u32);

impl Trials {
    /// This one was, and the next may be in time.
    ///
    /// # Panics
    ///
    /// When it was the last of five.
    pub(super) fn was_late(&mut self) {
        self.0 += 1;
        println!("trial {} was late, and says nothing", self.0);
        assert!(
            self.0 < TRIALS,
            "five trials were late: the unit is too short"
        );
    }
}

impl<S> Clone for Subject<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            ..*self
        }
    }
}

impl<S: Store> Subject<S> {
    /// A store that wakes its waiters, tested in units of 50 ms.
    pub fn new(store: S) -> Self {
        Self {
            store: Arc::new(store),
            unit: Duration::from_millis(50),
            push: true,
        }
    }

    /// The time that leases and pauses are made of; 50 ms by default.
    ///
    /// Short leases last 4 units and are waited for for 7, so a unit must be a few times what a call takes, and more
    /// than the skew that the store allows.
    #[must_use]
    pub fn with_unit(self, unit: Duration) -> Self {
        Self { unit, ..self }
    }

    /// Whether [`Store::changed`] resolves when the entry changes, not only after `within`; `true` by default.
    #[must_use]
    pub fn with_push(self, push: bool) -> Self {
        Self { push, ..self }
    }

    /// The same store, its calls failing as `plan` says.
    #[must_use]
    pub fn through(self, plan: Plan) -> Subject<Faulty<Arc<S>>> {
        Subject {
            store: Arc::new(Faulty::new(self.store).with_plan(plan)),
            unit: self.unit,
            push: self.push,
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
        Ttl::try_from(self.unit * units).expect("a unit is not zero")
    }

    pub(super) async fn sleep(&self, units: u32) {
        tokio::time::sleep(self.unit * units).await;
    }

    /// Whether so many units have passed since an instant: what began after it and lasts as long may be over.
    ///
    /// Asked after a look at the store, of an instant from before the call that began the period, it excuses nothing that
    /// ended early. A paused clock is never late.
    pub(super) fn is_late(&self, since: Instant, units: u32) -> bool {
        since.elapsed() >= self.unit * units
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
