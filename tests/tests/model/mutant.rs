//! Rules that a mutant omits.

/// The rule that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    // Of the store: these can be seen in its answers.
    // F-095
    NoOwnToken,
    UnfencedComplete,
    ReleaseByAnyone,
    ReleaseFreesTakeovers,
    LeaseAsLongAsTheRetention,
    // F-103
    ExpiryBySweeperOnly,
    TakeoverIsNotTold,
    TakeoverOfAnotherRequest,
    RefuseIsIgnored,
    /// Neither does it mind whether the entry is still leased.
    UnfencedCommit,
    // Of those who ask it.
    // F-038
    OwnAnswerAfterALostLease,
    // F-053
    ReadThenOverwrite,
    // F-003
    DropReleases,
    // F-059
    WaiterRemoves,
    // F-034
    AnsweredBeforeItIsStored,
    AnotherRequestIsAnswered,
}
