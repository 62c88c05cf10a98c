//! The protocol less one of its rules: each mutant breaks the property that the rule is there for.

/// The rule that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    // Of the store.
    NoOwnToken,
    UnfencedComplete,
    UnfencedCommit,
    ReleaseByAnyone,
    ReleaseFreesTakeovers,
    LeaseAsLongAsTheRetention,
    ExpiryBySweeperOnly,
    TakeoverIsNotTold,
    TakeoverOfAnotherRequest,
    RefuseIsIgnored,
    // Of those who ask it.
    OwnAnswerAfterALostLease,
    ReadThenOverwrite,
    DropReleases,
    WaiterRemoves,
    AnsweredBeforeItIsStored,
    AnotherRequestIsAnswered,
}
