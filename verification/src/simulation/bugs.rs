//! Bugs that can be seeded into a simulation, to show that it finds them.

/// A broken rule of the store, of the code around the layer, or of the layer's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A completion is stored even if another process holds the lease.
    CompletionIsUnfenced,
    /// A completion replaces the record of another execution.
    CompletionOverwrites,
    /// A completion under a lost lease is acknowledged, so the layer sends its own response.
    LostLeasesAreHidden,
    /// A repeated call after a lost reply is refused as if another process held the lease.
    OwnTokenIsRefused,
    /// The entry is read when the call is sent, and written when it arrives.
    ReadThenWritten,
    /// A release by any process frees the key.
    ReleaseWithoutToken,
    /// A late release deletes the record.
    ReleaseDropsRecords,
    /// A released takeover deletes the entry, so the next execution is not marked as a takeover.
    ReleasedTakeoversAreFree,
    /// A lease never expires.
    LeasesNeverEnd,
    /// A lease is taken over after half of its duration.
    LeasesEndEarly,
    /// A record is replayed after its retention.
    RetentionIsNotJudged,
    /// An expired lease leaves no orphan.
    OrphansAreForgotten,
    /// A renewal by any process extends the lease and is acknowledged.
    RenewalWithoutToken,
    /// Renewals are acknowledged and have no effect.
    RenewalsDoNothing,
    /// Another request takes an orphan over.
    TakeoverOfAnotherRequest,
    /// An orphan is taken over although the layer refuses takeovers.
    RefusalIsIgnored,
    /// A takeover is granted as if it were the first lease.
    TakeoversAreHidden,
    /// A process that receives the reply that a key is in progress removes the entry.
    WaitersRemove,
    /// A transaction commits without a check of the lease.
    CommitIsUnfenced,
    /// A transaction's effect persists although its record is refused.
    CommitIsTorn,
    /// The completion is acknowledged to the layer before the record is stored.
    CompletionIsAssumed,
    /// The lease is released if the client leaves.
    LeavingReleases,
    /// The handler is dropped if the client leaves.
    LeavingCutsOff,
    /// Code around the layer returns the handler's response instead of the layer's response.
    HandlerResponseIsSent,
    /// The layer executes without a lease if the store fails.
    ExecutesUnprotected,
    /// The layer treats all requests under a key as equal.
    FingerprintsAreAlike,
    /// The layer records responses that it should not record, such as a transient status.
    EverythingIsRecorded,
    /// A failed execution frees its key, although the settings keep it.
    FailuresFreeTheKey,
    /// A client that should receive the stored response receives an unknown outcome instead.
    ReplaysAreRefused,
    /// A resolution is applied although the entry has changed since the operator saw it.
    ChangedEntriesAreResolved,
    /// A lease that an operator broke completes the entry, even after a takeover or another record.
    BrokenLeasesComplete,
    /// A retry that an operator allowed is not used up by its takeover.
    AllowedRetriesStay,
}

impl Bug {
    /// All bugs.
    pub const ALL: [Self; 32] = [
        Self::CompletionIsUnfenced,
        Self::CompletionOverwrites,
        Self::LostLeasesAreHidden,
        Self::OwnTokenIsRefused,
        Self::ReadThenWritten,
        Self::ReleaseWithoutToken,
        Self::ReleaseDropsRecords,
        Self::ReleasedTakeoversAreFree,
        Self::LeasesNeverEnd,
        Self::LeasesEndEarly,
        Self::RetentionIsNotJudged,
        Self::OrphansAreForgotten,
        Self::RenewalWithoutToken,
        Self::RenewalsDoNothing,
        Self::TakeoverOfAnotherRequest,
        Self::RefusalIsIgnored,
        Self::TakeoversAreHidden,
        Self::WaitersRemove,
        Self::CommitIsUnfenced,
        Self::CommitIsTorn,
        Self::CompletionIsAssumed,
        Self::LeavingReleases,
        Self::LeavingCutsOff,
        Self::HandlerResponseIsSent,
        Self::ExecutesUnprotected,
        Self::FingerprintsAreAlike,
        Self::EverythingIsRecorded,
        Self::FailuresFreeTheKey,
        Self::ReplaysAreRefused,
        Self::ChangedEntriesAreResolved,
        Self::BrokenLeasesComplete,
        Self::AllowedRetriesStay,
    ];
}
