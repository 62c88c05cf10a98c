//! What can be taken away.

/// The rule that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    // Of the store: these can be seen in its answers.
    NoOwnToken,
    UnfencedComplete,
    ReleaseByAnyone,
    ReleaseFreesTakeovers,
    LeaseAsLongAsTheRetention,
    ExpiryBySweeperOnly,
    TakeoverIsNotTold,
    TakeoverOfAnotherRequest,
    RefuseIsIgnored,
    /// Neither does it mind whether the entry is still leased.
    UnfencedCommit,
    // Of those who ask it.
    OwnAnswerAfterALostLease,
    ReadThenOverwrite,
    DropReleases,
    WaiterRemoves,
    AnsweredBeforeItIsStored,
    AnotherRequestIsAnswered,
}
