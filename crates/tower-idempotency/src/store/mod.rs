//! The store contract: the storage of leases and records, and the rules of every backend.
//!
//! This module imports nothing else from the crate. A store handles opaque bytes. It never parses a record, never sees
//! a key in clear text and decides no policy.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;

mod check;
pub(crate) mod erased;
mod ids;
pub(crate) mod memory;
mod ttl;

pub use self::{
    check::{CheckError, CheckErrorKind},
    ids::{Fingerprint, KeyId, KeyIdError, ScopeDigest, Token},
    memory::{MemoryFull, MemoryStore},
    ttl::{Ttl, TtlError},
};

/// The smallest limit for the size of a record, in bytes.
///
/// The layer's own records fit in it: a tombstone, and a failure that needs attention, with its reason. If a store rejected
/// these too, the request would execute again once its lease has expired. A setter for the limit raises smaller values to
/// this one.
pub const MIN_RECORD_LIMIT: usize = 4 * 1024;

/// The storage of leases and records.
///
/// # Contract
///
/// An entry is *absent*, *in progress* (leased), *orphaned* (its lease expired without an outcome) or *completed*. A
/// token holds a lease or an orphan. No token holds an orphan that was released.
///
/// An implementor follows these rules. The `conformance` feature tests the rules that affect the replies of a store, except
/// rule 10, which is optional. It shows rule 1 as far as races of a few seconds can, and tests neither transactions nor
/// checkpoints:
///
/// 1. Each method is one atomic step at the backend: one conditional write, never a read followed by a write.
/// 2. Among concurrent acquires of one id, the store grants exactly one. Only the holder of the token renews,
///    completes and releases.
/// 3. The first reply of `acquire` may have been lost. `acquire` with the token that already holds the entry is
///    therefore granted again, with the same generation and takeover flag, and extends the lease. The entry keeps its
///    fingerprint, even if that of the claim differs. `complete` with the token that completed the entry is `Ok` and
///    changes nothing.
/// 4. No call overwrites a completed entry before its retention has passed. [`Acquired::Completed`] reports the
///    remaining retention, and the token that completed the entry. `complete` with a replaced token is
///    [`StoreError::LeaseLost`]. On an entry without a holder, `complete` stores the record. The entry may be absent
///    because the store lost its data and no other request acquired the key; a restart then costs no second execution.
///    The entry may also be an orphan that its takeover released; the record is then its first outcome. A late
///    `release` is `Ok` and changes nothing.
/// 5. The store checks expiry at every access by the backend's clock, and never relies only on a sweeper. At the instant of
///    its expiry an entry is expired. A backend may round an expiry up to the next millisecond.
/// 6. The store compares fingerprints for one purpose only: a takeover needs [`OrphanPolicy::TakeOver`] *and* the same
///    fingerprint. Any other claim on an orphaned key gets [`Acquired::Orphaned`]. There is one exception: under
///    [`OrphanPolicy::Refuse`], the same request takes over an orphan whose token [allows a retry](Token::allows_retry).
///    Only [`Inspect::resolve`](crate::inspect::Inspect::resolve) stores such a token; a store without it needs no such
///    rule.
/// 7. A takeover raises the generation. A release at generation 1 frees the key. A release at a later generation makes the
///    entry an orphan again. Only a record or the expiry ends an entry that was taken over. An orphan is absent after its
///    orphan retention, which starts at the expiry of its lease. A record is absent after its retention.
/// 8. The store holds no connection between calls.
/// 9. If a store cannot store a record of some size, it returns [`StoreError::RecordTooLarge`] and leaves the entry in
///    progress. The layer then stores a tombstone. A setting of the largest record excludes no record of at most
///    [`MIN_RECORD_LIMIT`] bytes.
/// 10. A store may limit the leases and orphans of one [scope](Claim::scope). An `acquire` beyond the limit is
///     [`StoreError::CallerLimit`], and stores nothing. The store never refuses the token that holds the entry.
///
/// One more rule has no case in the suite, because each backend has another form of damaged entries. If the store finds an
/// entry that it cannot read, `acquire` returns [`StoreError::Unreadable`] and changes nothing. So do `renew` and `complete`, and
/// `release` never deletes such an entry. The entry may be damaged, or of a later version of the store. After a
/// [`StoreError::Backend`] the layer may execute the request again: see [`StoreFailure`](crate::StoreFailure).
///
/// The layer, as the caller, gives every attempt a random token of its own and sets a timeout on every call. It treats
/// a timeout of `acquire` or `complete` as an unknown outcome and retries with the same token.
///
/// # Cancellation
///
/// A dropped future may or may not have taken effect at the backend. It must not leave a partial effect.
///
/// # Implementing
///
/// Write plain `async fn`s; the trait checks that their futures are `Send`. `docs/stores/writing-a-store.md` explains an
/// implementation step by step.
pub trait Store: Send + Sync + 'static {
    /// Acquires a lease, or returns the state that prevents it.
    ///
    /// # Errors
    ///
    /// [`StoreError::CallerLimit`] if the leases and orphans of the claim's scope use up its share of the store. No lease is
    /// held. [`StoreError::Unreadable`] if an entry exists and the store cannot read it. No lease is held.
    /// [`StoreError::Backend`] if the backend failed. The lease may be held nevertheless.
    fn acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired, StoreError>> + Send;

    /// Sets the expiry of the lease to `ttl` from now. The layer ends a lease by [`Ttl::MIN`].
    ///
    /// The holder of an orphan can also renew it unless another execution took it over. A process that was paused thus
    /// gets its lease back.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] if the token does not hold the entry: it is completed, absent, released or held by
    /// another token. [`StoreError::Unreadable`] if an entry exists and the store cannot read it.
    /// [`StoreError::Backend`] if the backend failed. The lease may be renewed nevertheless.
    fn renew(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Stores the record and ends the lease in one step. Also stores the record if no token holds the entry.
    ///
    /// The record owns its buffer without spare capacity. A store may therefore retain the buffer and count it by its
    /// length.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] if another token holds or completed the entry. [`StoreError::RecordTooLarge`] if the
    /// backend can never store a record of this size. [`StoreError::Unreadable`] if an entry exists and the store cannot
    /// read it. [`StoreError::Backend`] otherwise; the record may be stored nevertheless.
    fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends the lease or the orphan that the token holds. Returns `Ok` without effect if the token does not hold the
    /// entry.
    ///
    /// An entry of generation 1 is then absent. An entry of a later generation becomes an orphan, because the
    /// execution that it replaced may have had its effect. Its lease expires now, and its orphan retention starts now.
    /// Its fingerprint and generation stay. No token holds it, so a concurrent renewal does not revive it. The stored
    /// generation decides: `lease.generation` is a guess if the reply to the acquire was lost.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unreadable`] if an entry exists and the store cannot read it; a store may also return `Ok`. Nothing is
    /// changed. [`StoreError::Backend`] if the backend failed.
    fn release(&self, lease: &LeaseRef) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Waits until the entry may no longer be in progress, for at most `timeout`.
    ///
    /// The result is only a hint: a waiter always queries the entry again. A store without push may simply sleep. A store
    /// with push returns at once if the entry is not in progress at the call. Otherwise a waiter could miss a change
    /// between its query and this call.
    fn wait_for_change(&self, id: &KeyId, timeout: Duration) -> impl Future<Output = ()> + Send;

    /// Returns the [`Acquired::Completed`] of an entry whose record this process has in memory, without a call to the
    /// backend. Default: `None`.
    ///
    /// The layer calls it before [`acquire`](Self::acquire): a replay then needs no token and no round trip. A store
    /// returns the result that `acquire` would return, or `None`. `None` is always correct. The call must not block. A store
    /// that wraps another one forwards the call.
    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        let _ = id;
        None
    }

    /// Returns the record size in bytes above which compression saves time, unless [a setting of the
    /// layer](crate::IdempotencyLayer::with_compression_above) overrides it. Default: 8 KiB. A store behind a network
    /// pays for each byte in transfer and in storage, so it returns 1 KiB or less.
    ///
    /// The layer calls it once, when it is created. A store that wraps another one forwards the call.
    fn compress_above(&self) -> usize {
        8 * 1024
    }

    /// Checks that the backend has all that the store needs: table, indexes, rights and settings. Default: `Ok`.
    ///
    /// A service calls it once, at its start. The layer never does. A store without a check of its own returns `Ok`. A store
    /// that wraps another one forwards the call: the default would report no problem of the inner store.
    ///
    /// # Errors
    ///
    /// [`CheckError`]: the first problem in one sentence, with its remedy.
    ///
    /// # Cancellation
    ///
    /// A store may acquire and release the lease of a random key. If the future is dropped, that entry expires.
    fn check(&self) -> impl Future<Output = Result<(), CheckError>> + Send {
        std::future::ready(Ok(()))
    }
}

impl<S: Store> Store for Arc<S> {
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

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        (**self).wait_for_change(id, timeout).await;
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        (**self).find_completed(id)
    }

    fn compress_above(&self) -> usize {
        (**self).compress_above()
    }

    async fn check(&self) -> Result<(), CheckError> {
        (**self).check().await
    }
}

/// A request for a lease on a key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// The entry.
    pub id: KeyId,
    /// The fingerprint of the request.
    pub fingerprint: Fingerprint,
    /// The token that will hold the lease; random and new for every request.
    pub token: Token,
    /// The duration of the lease unless it is renewed.
    pub lease: Ttl,
    /// The treatment of a key whose lease expired without an outcome.
    pub orphans: OrphanPolicy,
    /// The orphan retention: the time from the expiry of the lease to the expiry of the orphan.
    pub orphan_retention: Ttl,
    /// The host and process of the request, for operators.
    pub owner: &'static str,
    /// The operation, for operators: method and route, at most 128 bytes. Without a route, the path without the query. If it
    /// is empty, an entry that has not expired keeps the stored operation.
    pub operation: Box<str>,
    /// The digest of the scope of the key, or `None` if the caller has none.
    ///
    /// A store may use it to account for its memory by principal, as [`MemoryStore`] does. No decision about the entry
    /// depends on it.
    pub scope: Option<ScopeDigest>,
}

/// Operation of the work of `run_once`.
pub(crate) const RUN_ONCE_OPERATION: &str = "run_once";
/// Beginning of the operation of an item of a batch. No method of a client contains a colon.
pub(crate) const ITEM_OPERATION: &str = "item: ";
/// Beginning of the operation of an observed request. No method of a client contains a colon.
pub(crate) const OBSERVED_OPERATION: &str = "observed: ";

/// Returns `true` if the record of an entry with this operation is a value, and not a response.
pub(crate) fn is_operation_of_run_once(operation: &str) -> bool {
    operation == RUN_ONCE_OPERATION || operation.starts_with(ITEM_OPERATION)
}

/// Returns `true` if an entry with this operation belongs to a request that was only observed.
pub(crate) fn is_operation_of_observation(operation: &str) -> bool {
    operation.starts_with(OBSERVED_OPERATION)
}

impl Claim {
    /// Creates a claim under a new random token. Defaults: lease 15 s, takeover allowed, orphan retention 24 h, no
    /// owner, no operation and no scope.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] if the operating system provides no randomness.
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
            scope: None,
        })
    }

    /// Returns the lease of this claim if the reply with its generation was lost.
    ///
    /// The store uses its own generation. Only [`Store::complete`] on an entry without a holder stores 1.
    pub(crate) fn lease_ref_unknown(&self) -> LeaseRef {
        self.lease_ref(1)
    }

    /// Returns the lease that this claim holds once it is granted at `generation`.
    #[must_use]
    pub fn lease_ref(&self, generation: u64) -> LeaseRef {
        LeaseRef {
            id: self.id,
            fingerprint: self.fingerprint,
            token: self.token,
            generation,
            scope: self.scope,
            is_first_completion: false,
        }
    }
}

/// Identification of a lease in calls to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseRef {
    /// The entry.
    pub id: KeyId,
    /// The fingerprint of the request. `complete` stores it.
    pub fingerprint: Fingerprint,
    /// The token that holds the lease.
    pub token: Token,
    /// The generation of the lease. `complete` stores it unless the token holds the entry, which then keeps its generation.
    pub generation: u64,
    /// The digest of the scope of the key, as in the claim. No decision about the entry depends on it.
    pub scope: Option<ScopeDigest>,
    /// `true` if no earlier call and no commit of the handler can have completed the entry under this token. Default:
    /// `false`.
    ///
    /// If it is `true` and [`Store::complete`] returns `Ok`, the entry has the record of this call, and its retention
    /// counts from this call. Otherwise the entry may have another record of the same token. The layer sets it in the first
    /// attempt to complete an entry. A backend ignores it. A wrapper that repeats a call must set it to `false` in the
    /// repeated call.
    pub is_first_completion: bool,
}

/// Reply of the store to a [`Claim`]. Its `Debug` output shows no bytes of a record.
#[derive(Clone, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "the layer must decide every reply; a new one is a breaking change"
)]
pub enum Acquired {
    /// The claim holds the lease.
    Granted {
        /// The generation: 1 for the first lease of an entry, higher after each takeover.
        generation: u64,
        /// `true` if an earlier lease ended without an outcome. Its effect may or may not have happened.
        takeover: bool,
    },
    /// Another token holds the lease.
    InProgress {
        /// The fingerprint of the request that holds the lease.
        fingerprint: Fingerprint,
        /// The time until the lease expires, unless it is renewed.
        expires_in: Duration,
    },
    /// The lease expired without an outcome and was not taken over, because the policy refuses or the request differs.
    Orphaned {
        /// The fingerprint of the request that held the lease.
        fingerprint: Fingerprint,
        /// The time since the lease expired.
        since: Duration,
    },
    /// The entry is completed.
    Completed {
        /// The fingerprint of the request that produced the record.
        fingerprint: Fingerprint,
        /// The bytes that [`Store::complete`] stored.
        record: Bytes,
        /// The time until the record expires, by the backend's clock: more than zero, in whole milliseconds or finer.
        ///
        /// A store whose backend has no clock uses that of its process. Once that clock has passed the expiry, it returns the
        /// rest of the clock skew that it allows. [`Ttl::MAX`] if the entry does not expire.
        expires_in: Duration,
        /// The token that completed the entry: that of an execution, or a new one of a resolution. `None` if the entry has
        /// none.
        token: Option<Token>,
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
                expires_in,
                token,
            } => f
                .debug_struct("Completed")
                .field("fingerprint", fingerprint)
                .field("bytes", &record.len())
                .field("expires_in", expires_in)
                .field("token", token)
                .finish(),
        }
    }
}

/// The treatment of a key whose lease expired without an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[expect(
    clippy::exhaustive_enums,
    reason = "stores must know every policy; a new one is a breaking change"
)]
pub enum OrphanPolicy {
    /// The same request may take the lease over and execute again: at-least-once.
    #[default]
    TakeOver,
    /// No request may take it over: at-most-once, until the orphan expires or an operator
    /// [allows a retry](crate::inspect::Resolution::Retry).
    Refuse,
    /// No request may take it over, not even if an operator allows a retry. The layer uses it to query an entry.
    Never,
}

/// The error of a store call.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The token does not hold the entry.
    LeaseLost,
    /// The store cannot store a record of this size, now or later. The entry is unchanged.
    RecordTooLarge {
        /// The size of the largest accepted record, in bytes.
        limit: usize,
    },
    /// The leases and orphans of the claim's scope use up its share of the store. Nothing was stored. The layer rejects the
    /// request with 429 `caller-limit`, and does not call the store again for it.
    CallerLimit,
    /// An entry exists, and the store cannot read it: a later version of the store wrote it, or it is damaged. Nothing was
    /// changed. If `acquire` returns it, the layer rejects the request with 503 under every setting, and does not repeat the
    /// call.
    Unreadable(Box<dyn std::error::Error + Send + Sync>),
    /// The backend failed or was unreachable. The call may have taken effect nevertheless.
    Backend(Box<dyn std::error::Error + Send + Sync>),
}

impl StoreError {
    /// Creates a [`StoreError::Unreadable`] from its source. The text of the source must contain nothing of the entry.
    #[must_use]
    pub fn unreadable(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Unreadable(source.into())
    }

    /// Creates a [`StoreError::Backend`] from its source.
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
                write!(f, "the store accepts records of at most {limit} bytes")
            }
            Self::CallerLimit => f.write_str("the caller uses up its share of the store"),
            Self::Unreadable(_) => f.write_str("the store cannot read the entry"),
            Self::Backend(_) => f.write_str("the store failed"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::LeaseLost | Self::RecordTooLarge { .. } | Self::CallerLimit => None,
            Self::Unreadable(source) | Self::Backend(source) => Some(&**source),
        }
    }
}
