//! Rules that a mutant omits.

/// The rule that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    // Rules of the store, which are visible in its replies.
    NoOwnToken,
    UnfencedComplete,
    ReleaseByAnyone,
    ReleaseFreesTakeovers,
    LeaseAsLongAsTheRetention,
    ExpiryBySweeperOnly,
    TakeoverIsHidden,
    TakeoverOfAnotherRequest,
    RefuseIsIgnored,
    QueryTakesOver,
    /// The commit does not require that the entry is still leased.
    UnfencedCommit,
    // Rules of the clients.
    OwnResponseAfterLostLease,
    ReadThenOverwrite,
    DropReleases,
    WaiterRemoves,
    ResponseBeforeRecord,
    ResponseToAnotherRequest,
    /// A handler commits again although the record of its first commit has expired.
    CommitAfterExpiry,
    // Rules of the tiers in front of the store.
    RefusedCompletionIsKept,
    RepeatedCompletionIsKept,
    AgeAloneCounts,
    LifeCountsFromReply,
    // Rules for decisions of an operator.
    /// A broken lease has no holder, so any token can complete it.
    BreakRemovesToken,
    /// A decision applies to an entry that is in progress.
    FreeOfLiveLease,
    /// The takeover of an allowed retry does not use it up.
    RetryStaysAllowed,
}
