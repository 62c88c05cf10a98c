//! Bugs that a simulation can be seeded with, to see that it finds them.

/// A rule that is broken, by the store, by what stands around the layer, or by its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A completion is stored whoever holds the lease.
    CompletionIsUnfenced,
    /// A completion replaces another one's record.
    CompletionOverwrites,
    /// A completion under a lost lease is said to be stored, so the layer answers its own answer.
    LostLeasesAreNotTold,
    /// Who asks again, because the reply was lost, is told that somebody has the lease.
    OwnTokenIsRefused,
    /// The entry is read as the call is sent and written as it arrives.
    ReadThenWritten,
    /// Anybody's release frees the key.
    AnybodyReleases,
    /// A late release takes the record away.
    ReleaseDropsRecords,
    /// A takeover that is released is forgotten, and the next execution not told.
    ReleasedTakeoversAreFree,
    /// A lease whose time is over still counts.
    LeasesNeverEnd,
    /// A lease is taken over in its second half.
    LeasesEndEarly,
    /// A record is replayed after its retention.
    RetentionIsNotJudged,
    /// A lease that is over leaves no orphan.
    OrphansAreForgotten,
    /// Anybody's renewal keeps the lease, and is told so.
    AnybodyRenews,
    /// Renewals are said to have come through, and do nothing.
    RenewalsDoNothing,
    /// Another request takes an orphan over.
    TakeoverOfAnotherRequest,
    /// An orphan is taken over though the layer says refuse.
    RefusalIsIgnored,
    /// A takeover is granted as if it were the first lease.
    TakeoversAreHidden,
    /// Whoever is told that a key is in progress removes the entry.
    WaitersRemove,
    /// A transaction commits without looking at the lease.
    CommitIsUnfenced,
    /// A transaction's effect stays though its record is refused.
    CommitIsTorn,
    /// The layer is told that its record is stored before it is.
    CompletionIsAssumed,
    /// When a client leaves, its lease is released.
    LeavingReleases,
    /// When a client leaves, its handler is cut off.
    LeavingCutsOff,
    /// Something around the layer answers what the handler said, whatever the layer says.
    HandlersAnswerGoesOut,
    /// The layer executes without a lease when the store fails.
    ExecutesUnprotected,
    /// The layer takes every request under a key for the same.
    FingerprintsAreAlike,
    /// The layer records what it should not, such as a status that passes.
    EverythingIsRecorded,
    /// Whoever is to be answered what is stored is told that nobody knows what came of it.
    ReplaysAreRefused,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 28] = [
        Self::CompletionIsUnfenced,
        Self::CompletionOverwrites,
        Self::LostLeasesAreNotTold,
        Self::OwnTokenIsRefused,
        Self::ReadThenWritten,
        Self::AnybodyReleases,
        Self::ReleaseDropsRecords,
        Self::ReleasedTakeoversAreFree,
        Self::LeasesNeverEnd,
        Self::LeasesEndEarly,
        Self::RetentionIsNotJudged,
        Self::OrphansAreForgotten,
        Self::AnybodyRenews,
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
        Self::HandlersAnswerGoesOut,
        Self::ExecutesUnprotected,
        Self::FingerprintsAreAlike,
        Self::EverythingIsRecorded,
        Self::ReplaysAreRefused,
    ];
}
