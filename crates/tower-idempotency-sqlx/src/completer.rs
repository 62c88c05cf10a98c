//! Finding orphans.

use std::time::Duration;

use tower_idempotency::store::{Fingerprint, KeyId};

/// Which orphans are looked for.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "hidden")]
pub struct Page {
    /// For how long the lease is over at least; twice as long for each takeover, up to a limit.
    pub older_than: Duration,
    /// The last of the page before.
    pub after: Option<(i64, KeyId)>,
    /// How many at most.
    pub limit: u32,
}

/// An orphan as it was found.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "hidden")]
pub struct Found {
    pub id: KeyId,
    pub fingerprint: Fingerprint,
    pub generation: i64,
    pub lease_ends: i64,
    pub operation: String,
}

/// An orphan that was taken over ever so often is taken over again after 64 times as long.
pub(crate) const MOST_DOUBLINGS: u32 = 6;
