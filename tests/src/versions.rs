//! Two versions of a store on one table at the same time.
//!
//! A test has a frozen copy of the calls of an earlier version. Both versions then make the steps in the life of entries: any
//! three steps are made in all combinations of versions.

use std::future::Future;

use bytes::Bytes;
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, Store, StoreError, Token, Ttl,
};

/// The fingerprint of each claim.
pub const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([b'\xff'; 32]);
/// The record of each completion.
pub const RECORD: &[u8] = b"\0record of \xff\r\n";

/// Reply to an acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The lease, with its generation.
    Granted(u64),
    /// Another token holds the lease.
    InProgress,
    /// The entry has [`RECORD`].
    Completed,
}

/// An earlier version of a store, with a connection of its own. A call panics if it fails.
pub trait EarlierVersion {
    /// Acquires the lease, or takes an orphan over.
    fn acquire(&mut self, claim: &Claim) -> impl Future<Output = Reply>;

    /// Renews the lease. Returns `false` if the token does not hold it.
    fn renew(&mut self, claim: &Claim) -> impl Future<Output = bool>;

    /// Stores [`RECORD`] for a minute. Returns `false` if another token holds or completed the entry.
    fn complete(&mut self, claim: &Claim) -> impl Future<Output = bool>;

    /// Releases the lease.
    fn release(&mut self, claim: &Claim) -> impl Future<Output = ()>;
}

/// Returns two claims of one request.
///
/// # Panics
///
/// Panics if the system has no random numbers.
#[must_use]
pub fn claims(id: u8) -> (Claim, Claim) {
    let claim = Claim::new(KeyId::from_bytes([id; 32]), FINGERPRINT).expect(RANDOM);
    let mut rival = claim.clone();
    rival.token = Token::random().expect(RANDOM);
    (claim, rival)
}

/// Returns `true` if the current version makes a step in a combination of versions, and `false` if the earlier one makes it.
///
/// Any three of the steps 0 to 10 are made in all combinations of versions if `combination` takes each value below 32. For the
/// steps 0 to 7 each value below 16 suffices.
///
/// # Panics
///
/// Panics if the step is greater than 10.
#[must_use]
pub fn is_current(combination: u8, step: u8) -> bool {
    // The parity of some bits of the combination chooses the version. The parities of three steps are independent, because each
    // number has an odd count of bits.
    const BITS: [u8; 11] = [1, 2, 4, 7, 8, 11, 13, 14, 16, 19, 21];
    (combination & BITS[usize::from(step)]).count_ones() & 1 == 0
}

/// Asserts that both versions can make each step in the life of an entry. Any three steps are made in all combinations.
///
/// # Panics
///
/// Panics if a reply is wrong, or a call fails.
pub async fn share_entries(store: &impl Store, earlier: &mut impl EarlierVersion) {
    for combination in 0..32 {
        let mut by = Deployments {
            store,
            earlier: &mut *earlier,
            combination,
        };
        let (claim, rival) = claims(combination);
        let granted = by.acquire(0, &claim).await;
        assert_eq!(granted, Reply::Granted(1), "combination {combination}");
        assert_eq!(by.acquire(1, &rival).await, Reply::InProgress);
        assert!(by.renew(2, &claim).await);
        assert!(!by.renew(3, &rival).await);
        by.release(4, &claim).await;
        let free = by.acquire(5, &rival).await;
        assert_eq!(free, Reply::Granted(1), "the key is free");
        assert!(!by.complete(6, &claim).await, "the key is leased");
        assert!(by.complete(7, &rival).await);
        assert!(by.complete(8, &rival).await, "once more");
        assert_eq!(by.acquire(9, &claim).await, Reply::Completed);
        assert!(!by.renew(10, &rival).await);
    }
}

/// Like [`share_entries`], with an expired lease and a released takeover. `expire` waits until a lease of 1 ms has expired.
///
/// # Panics
///
/// Panics if a reply is wrong, or a call fails.
pub async fn take_over(
    store: &impl Store,
    earlier: &mut impl EarlierVersion,
    expire: impl AsyncFn(),
) {
    for combination in 0..16 {
        let mut by = Deployments {
            store,
            earlier: &mut *earlier,
            combination,
        };
        let (mut claim, rival) = claims(100 + combination);
        claim.lease = Ttl::MIN;
        let granted = by.acquire(0, &claim).await;
        assert_eq!(granted, Reply::Granted(1), "combination {combination}");
        expire().await;
        assert_eq!(by.acquire(1, &rival).await, Reply::Granted(2));
        assert!(!by.renew(2, &claim).await);
        by.release(3, &rival).await;
        let orphan = by.acquire(4, &claim).await;
        assert_eq!(orphan, Reply::Granted(3), "still an orphan");
        assert!(!by.complete(5, &rival).await);
        assert!(by.complete(6, &claim).await);
        assert_eq!(by.acquire(7, &rival).await, Reply::Completed);
    }
}

/// Two deployments on one table. `combination` chooses the version that makes a step.
struct Deployments<'a, S, E> {
    store: &'a S,
    earlier: &'a mut E,
    combination: u8,
}

impl<S: Store, E: EarlierVersion> Deployments<'_, S, E> {
    /// Returns `true` if the current version makes the step.
    fn is_current(&self, step: u8) -> bool {
        is_current(self.combination, step)
    }

    async fn acquire(&mut self, step: u8, claim: &Claim) -> Reply {
        if !self.is_current(step) {
            return self.earlier.acquire(claim).await;
        }
        match self.store.acquire(claim).await.expect(WORKS) {
            Acquired::Granted { generation, .. } => Reply::Granted(generation),
            Acquired::InProgress { fingerprint, .. } => {
                assert_eq!(fingerprint, FINGERPRINT);
                Reply::InProgress
            }
            Acquired::Completed {
                fingerprint,
                record,
                ..
            } => {
                assert_eq!((fingerprint, &record[..]), (FINGERPRINT, RECORD));
                Reply::Completed
            }
            Acquired::Orphaned { .. } => panic!("the claim takes orphans over"),
        }
    }

    async fn renew(&mut self, step: u8, claim: &Claim) -> bool {
        if !self.is_current(step) {
            return self.earlier.renew(claim).await;
        }
        let lease = claim.lease_ref(1);
        is_held(self.store.renew(&lease, claim.lease).await)
    }

    async fn complete(&mut self, step: u8, claim: &Claim) -> bool {
        if !self.is_current(step) {
            return self.earlier.complete(claim).await;
        }
        let (lease, record) = (claim.lease_ref(1), Bytes::from_static(RECORD));
        let completed = self.store.complete(&lease, record, Ttl::from_secs(60));
        is_held(completed.await)
    }

    async fn release(&mut self, step: u8, claim: &Claim) {
        if !self.is_current(step) {
            return self.earlier.release(claim).await;
        }
        let lease = claim.lease_ref(1);
        self.store.release(&lease).await.expect(WORKS);
    }
}

fn is_held(result: Result<(), StoreError>) -> bool {
    match result {
        Ok(()) => true,
        Err(StoreError::LeaseLost) => false,
        Err(error) => panic!("{error}"),
    }
}

const RANDOM: &str = "the system has random numbers";
const WORKS: &str = "the store works";
