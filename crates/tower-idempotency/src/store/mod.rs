//! The store contract: where leases and records live, and the rules every backend keeps.
//!
//! This module imports nothing else of the crate. A store moves opaque bytes: it never parses a record, never sees a
//! key in the clear and decides no policy.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;

pub(crate) mod erased;
mod memory;

pub use self::memory::{MemoryFull, MemoryStore};

/// Where leases and records live.
///
/// # Contract
///
/// An entry is *absent*, *in progress* (leased), *orphaned* (its lease over without an outcome) or *completed*. A lease
/// and an orphan are held under a token; an orphan that was released is held by nobody.
///
/// Implementors keep these rules; the `conformance` feature tests each that shows in what a store answers:
///
/// 1. Each method is one atomic step at the backend: one conditional write, never a read followed by a write.
/// 2. Among concurrent acquires of one id exactly one is granted. Only the holder of the token renews, completes and
///    releases.
/// 3. `acquire` with the token that already holds the entry is granted again, with the same generation and takeover
///    flag, and extends the lease: the first reply may have been lost. `complete` with the token that completed the
///    entry is `Ok` and changes nothing.
/// 4. Nobody overwrites a completed entry whose retention is not over. `complete` with a replaced token is
///    [`StoreError::LeaseLost`]. On an entry that nobody holds it stores the record: the entry is absent because the
///    store lost its data and nobody took the key since, so a restart costs no second run; or it is an orphan that its
///    takeover released, and this is the first outcome. A late `release` is `Ok` and changes nothing.
/// 5. Expiry is judged at every access by the backend's clock, never left to a sweeper alone. At the very instant of
///    expiry an entry is expired.
/// 6. Fingerprints are compared in one place only: a takeover needs [`OrphanPolicy::TakeOver`] *and* the same
///    fingerprint. Anything else under an orphaned key is answered with [`Acquired::Orphaned`].
/// 7. A takeover raises the generation, and only a record or time ends what it took over: to release a lease of
///    generation 1 frees the key, to release a later one makes the entry an orphan again. An orphan is absent once
///    `keep` has passed after its lease; a record is absent once its retention has passed.
/// 8. No connection is held between calls.
/// 9. A store that cannot keep a record of some size says so with [`StoreError::RecordTooLarge`] and leaves the entry
///    in progress; the layer then stores a tombstone.
///
/// Callers (the layer) give every attempt its own random token, put a timeout around every call, and treat a timeout
/// of `acquire` or `complete` as an unknown outcome that is retried with the same token.
///
/// # Cancellation
///
/// A dropped future may or may not have had its effect at the backend; it must leave nothing half done.
///
/// # Implementing
///
/// Write plain `async fn`s; the `+ Send` is checked by the trait. `docs/writing-a-store.md` walks through one.
pub trait Store: Send + Sync + 'static {
    /// From what size on, in bytes, deflating a record is worth its time here, unless
    /// [the layer is told otherwise](crate::IdempotencyLayer::with_compression_above). Default: 8 KiB. A store behind a
    /// network, which pays for each byte on the wire and again where it keeps it, says 1 KiB or less.
    const COMPRESS_ABOVE: usize = 8 * 1024;

    /// Takes a lease, or says why not.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] when the backend failed; the lease may then be held all the same.
    fn acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired, StoreError>> + Send;

    /// Moves the end of the lease to `ttl` from now.
    ///
    /// The holder of an orphaned entry that nobody took over renews it too: a process that was paused gets its lease
    /// back.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] when the token does not hold the entry, be it completed, absent or released.
    fn renew(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Stores the record and ends the lease, in one step; stores it as well when nobody holds the entry.
    ///
    /// The caller gives a record that has its buffer to itself, without room to spare: a store may keep it as it is,
    /// and count it by its length.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] when another token holds or completed the entry, [`StoreError::RecordTooLarge`] when
    /// the backend could never keep a record of this size, [`StoreError::Backend`] otherwise; the record may then be
    /// stored all the same.
    fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends the lease, or the orphan, of the token that holds it; `Ok` and without effect when it does not.
    ///
    /// An entry of generation 1 is then absent. One of a later generation is an orphan, as what was taken over may have
    /// had its effect: its lease is over now, it is remembered for `keep` from now, its fingerprint and generation stay,
    /// and nobody holds it, so that a renewal under way does not revive it. The generation is the stored one:
    /// `lease.generation` is a guess when the reply to the acquire was lost.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] when the backend failed.
    fn release(&self, lease: &LeaseRef) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Resolves when the entry may no longer be in progress, and at the latest after `within`.
    ///
    /// A hint for waiters, who look again whatever it says: a store without push may simply sleep. One with push
    /// resolves at once when the entry is not in progress as it is called, so that no wake-up falls between a look
    /// and this call.
    fn wait_for_change(&self, id: &KeyId, within: Duration) -> impl Future<Output = ()> + Send;
}

impl<S: Store> Store for Arc<S> {
    const COMPRESS_ABOVE: usize = S::COMPRESS_ABOVE;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        (**self).acquire(claim).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        (**self).renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        (**self).complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        (**self).release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        (**self).wait_for_change(id, within).await;
    }
}

/// What a request asks of the store: a lease on a key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// The entry.
    pub id: KeyId,
    /// What the request says.
    pub fingerprint: Fingerprint,
    /// The right to execute is held under this; drawn anew for every request.
    pub token: Token,
    /// How long the lease lasts unless renewed.
    pub lease: Ttl,
    /// What becomes of a key whose lease is over without an outcome.
    pub orphans: OrphanPolicy,
    /// How long an orphan is remembered after its lease.
    pub orphan_retention: Ttl,
    /// Who asks, for operators: host and process.
    pub owner: &'static str,
    /// What is asked, for operators: method and path without the query, at most 128 bytes.
    pub operation: Box<str>,
}

impl Claim {
    /// A claim under a fresh random token: lease 15 s, takeover allowed, orphans kept 24 h, no owner and no operation.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] when the operating system has no randomness to give.
    pub fn new(id: KeyId, fingerprint: Fingerprint) -> Result<Self, StoreError> {
        Ok(Self {
            id,
            fingerprint,
            token: Token::random()?,
            lease: Ttl::from_secs(15),
            orphans: OrphanPolicy::TakeOver,
            orphan_retention: Ttl::from_secs(24 * 60 * 60),
            owner: "",
            operation: Box::from(""),
        })
    }

    /// The lease this claim holds once it is granted at `generation`.
    #[must_use]
    pub fn lease_ref(&self, generation: u64) -> LeaseRef {
        LeaseRef {
            id: self.id,
            fingerprint: self.fingerprint,
            token: self.token,
            generation,
        }
    }
}

/// A lease as the store knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseRef {
    /// The entry.
    pub id: KeyId,
    /// What the request says; stored by a complete that finds the entry held by nobody.
    pub fingerprint: Fingerprint,
    /// The token that holds the lease.
    pub token: Token,
    /// The generation it was granted at; stored by a complete that finds the entry held by nobody.
    pub generation: u64,
}

/// What the store answers to a [`Claim`]. Its `Debug` shows no bytes of a record.
#[derive(Clone, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "the layer must decide every answer; a new one is a breaking change"
)]
pub enum Acquired {
    /// The lease is held.
    Granted {
        /// 1 for the first lease of an entry, higher after each takeover.
        generation: u64,
        /// An earlier lease ended without an outcome: its effect may or may not have happened.
        takeover: bool,
    },
    /// Another token holds the lease.
    InProgress {
        /// Of the request that holds it.
        fingerprint: Fingerprint,
        /// Until its lease ends, unless it is renewed.
        expires_in: Duration,
    },
    /// The lease is over without an outcome and was not taken over: the policy refuses, or the request is another one.
    Orphaned {
        /// Of the request that held it.
        fingerprint: Fingerprint,
        /// How long ago its lease ended.
        since: Duration,
    },
    /// There is a record.
    Completed {
        /// Of the request that produced it.
        fingerprint: Fingerprint,
        /// The bytes given to [`Store::complete`].
        record: Bytes,
    },
}

impl fmt::Debug for Acquired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted {
                generation,
                takeover,
            } => f
                .debug_struct("Granted")
                .field("generation", generation)
                .field("takeover", takeover)
                .finish(),
            Self::InProgress {
                fingerprint,
                expires_in,
            } => f
                .debug_struct("InProgress")
                .field("fingerprint", fingerprint)
                .field("expires_in", expires_in)
                .finish(),
            Self::Orphaned { fingerprint, since } => f
                .debug_struct("Orphaned")
                .field("fingerprint", fingerprint)
                .field("since", since)
                .finish(),
            Self::Completed {
                fingerprint,
                record,
            } => f
                .debug_struct("Completed")
                .field("fingerprint", fingerprint)
                .field("bytes", &record.len())
                .finish(),
        }
    }
}

/// What becomes of a key whose lease is over without an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::exhaustive_enums,
    reason = "stores must know every policy; a new one is a breaking change"
)]
pub enum OrphanPolicy {
    /// The same request may take the lease over and run again: at-least-once.
    #[default]
    TakeOver,
    /// Nobody may: at-most-once, until the orphan is forgotten.
    Refuse,
}

/// Why a store did not do what it was asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The token does not hold the entry.
    LeaseLost,
    /// No record of this size can be kept, now or later; the entry is unchanged.
    RecordTooLarge {
        /// The largest record in bytes.
        limit: usize,
    },
    /// The backend failed or could not be reached; what was asked may have happened all the same.
    Backend(Box<dyn std::error::Error + Send + Sync>),
}

impl StoreError {
    /// A failure of the backend.
    #[must_use]
    pub fn backend(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Backend(source.into())
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseLost => f.write_str("the lease is no longer held"),
            Self::RecordTooLarge { limit } => {
                write!(f, "the store keeps records of at most {limit} bytes")
            }
            Self::Backend(_) => f.write_str("the store failed"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::LeaseLost | Self::RecordTooLarge { .. } => None,
            Self::Backend(source) => Some(&**source),
        }
    }
}

/// Names an entry: a digest of the key in its scope, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 32]);

/// What a request says, as a digest: 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

/// The right to execute is held under a token: 128 bits from the operating system's generator.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl KeyId {
    /// An id of these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, as a store keeps them.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Fingerprint {
    /// A fingerprint of these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, as a store keeps them.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Token {
    /// Draws a token.
    ///
    /// Straight from the operating system, not from a generator seeded in the process: a process that was forked, or
    /// a machine resumed twice from one snapshot, must not draw the same token again.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] when the operating system has no randomness to give.
    pub fn random() -> Result<Self, StoreError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(StoreError::backend)?;
        Ok(Self(bytes))
    }

    /// A token of these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, as a store keeps them.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// The first four bytes in hexadecimal: enough to follow an entry through a log, too little to be one.
impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}")
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "Fingerprint({a:02x}{b:02x}{c:02x}{d:02x})")
    }
}

/// Shows nothing: whoever knows the token holds the lease.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A length of time that is not zero: whole milliseconds, at least 1, at most 100 years.
///
/// A lease or a retention of zero would be over before it began, so there is none. Fractions of a millisecond round up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(u64);

impl Ttl {
    /// The shortest: 1 ms.
    pub const MIN: Self = Self(1);
    /// The longest: 100 years of 365 days, so that sums of two still fit every backend's clock.
    pub const MAX: Self = Self(100 * 365 * 24 * 60 * 60 * 1000);

    /// `millis` milliseconds.
    ///
    /// # Panics
    ///
    /// When `millis` is zero or above [`Ttl::MAX`]; at compile time in a constant. Use `Ttl::try_from(Duration)` for
    /// values that are not known beforehand.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        assert!(
            millis > 0 && millis <= Self::MAX.0,
            "a Ttl is at least 1 ms and at most 100 years"
        );
        Self(millis)
    }

    /// `secs` seconds.
    ///
    /// # Panics
    ///
    /// As [`Ttl::from_millis`].
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_millis(secs.saturating_mul(1000))
    }

    /// In milliseconds: never 0.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// As a duration.
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = TtlError;

    fn try_from(duration: Duration) -> Result<Self, TtlError> {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        match u64::try_from(millis) {
            Ok(millis @ 1..) if millis <= Self::MAX.0 => Ok(Self(millis)),
            Ok(_) | Err(_) => Err(TtlError { found: duration }),
        }
    }
}

impl From<Ttl> for Duration {
    fn from(ttl: Ttl) -> Self {
        ttl.as_duration()
    }
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ttl({:?})", self.as_duration())
    }
}

/// The duration is zero or longer than 100 years.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlError {
    found: Duration,
}

impl fmt::Display for TtlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected a duration above zero and at most 100 years, found {:?}",
            self.found
        )
    }
}

impl std::error::Error for TtlError {}
