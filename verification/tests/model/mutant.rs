//! Rules that a mutant omits.

/// The rule that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    // Rules of the store, which are visible in its replies. F-095
    NoOwnToken,
    UnfencedComplete,
    ReleaseByAnyone,
    ReleaseFreesTakeovers,
    LeaseAsLongAsTheRetention,
    // F-103
    ExpiryBySweeperOnly,
    TakeoverIsHidden,
    TakeoverOfAnotherRequest,
    RefuseIsIgnored,
    QueryTakesOver,
    /// The commit does not require that the entry is still leased.
    UnfencedCommit,
    // Rules of the clients.
    // F-038
    OwnResponseAfterLostLease,
    // F-053
    ReadThenOverwrite,
    // F-003
    DropReleases,
    // F-059
    WaiterRemoves,
    // F-034
    ResponseBeforeRecord,
    ResponseToAnotherRequest,
    // Rules of the tiers in front of the store.
    // F-981
    RefusedCompletionIsKept,
    // F-982
    RepeatedCompletionIsKept,
    // F-985
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
