//! The store under test, called the way the layer calls it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use super::{Faulty, Plan};
use crate::store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// How often a call that failed at the backend is made again before the case fails.
const ATTEMPTS: usize = 8;

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
        let mut failure = None;
        for _ in 0..ATTEMPTS {
            match self.store.acquire(claim).await {
                Ok(acquired) => return acquired,
                Err(StoreError::Backend(source)) => failure = Some(source),
                Err(error) => panic!("acquire answers nothing but a backend error, found {error}"),
            }
        }
        panic!("acquire failed {ATTEMPTS} times: {failure:?}")
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
        for _ in 0..ATTEMPTS {
            if let Some(outcome) = outcome(&self.store.renew(lease, ttl).await) {
                return outcome;
            }
        }
        panic!("renew failed {ATTEMPTS} times")
    }

    pub(super) async fn complete(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
    ) -> Outcome {
        for _ in 0..ATTEMPTS {
            let completed = self.store.complete(lease, record.clone(), retention).await;
            if let Some(outcome) = outcome(&completed) {
                return outcome;
            }
        }
        panic!("complete failed {ATTEMPTS} times")
    }

    pub(super) async fn release(&self, lease: &LeaseRef) {
        for _ in 0..ATTEMPTS {
            match outcome(&self.store.release(lease).await) {
                Some(Outcome::Done) => return,
                Some(refused) => panic!("release is Ok or a backend error, found {refused:?}"),
                None => {}
            }
        }
        panic!("release failed {ATTEMPTS} times")
    }
}

/// None when the backend failed.
fn outcome(result: &Result<(), StoreError>) -> Option<Outcome> {
    match result {
        Ok(()) => Some(Outcome::Done),
        Err(StoreError::LeaseLost) => Some(Outcome::Lost),
        Err(StoreError::RecordTooLarge { limit }) => Some(Outcome::TooLarge { limit: *limit }),
        Err(StoreError::Backend(_)) => None,
    }
}

pub(super) fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect(RANDOM);
    bytes
}

const RANDOM: &str = "tests run where there is randomness";
