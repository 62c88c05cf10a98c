//! The conformance suite can fail: a plain store passes it, and every way to break that store is caught by the case
//! that is named for the rule.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod held_up;
mod mutant;

use std::panic::{AssertUnwindSafe, catch_unwind};

use tower_idempotency::{
    conformance::{Case, Plan, Subject, Threads, run},
    store::Store,
};

use self::mutant::{Flaw, Mutant};

tower_idempotency::conformance_tests! {
    mod flawless,
    start_paused = true,
    store = || async { Mutant::new(Flaw::Nothing) },
}

/// Returns `true` if the case fails on the subject. All cases run on one thread with a paused clock, races too.
fn is_caught<S: Store>(subject: Subject<S>, case: &str) -> bool {
    let case = Case::named(case);
    let run = || run(Threads::One { start_paused: true }, case.check(subject));
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

macro_rules! caught {
    ($($flaw:ident by $($case:ident)+;)*) => { $(
        #[test]
        #[allow(non_snake_case, reason = "named for the flaw")]
        fn $flaw() {
            $(
                assert!(is_caught(Subject::new(Mutant::new(Flaw::$flaw)), stringify!($case)), "{} passes", stringify!($case));
            )+
        }
    )* };
}

caught! {
    ClaimIsReadThenWritten by one_of_32_claims_at_once_is_granted no_increment_under_the_lease_is_lost
        one_of_32_claims_at_once_takes_an_orphan_over one_of_32_claims_at_once_replaces_an_expired_record
        one_of_32_claims_at_once_replaces_a_forgotten_orphan one_of_32_claims_at_once_takes_a_released_takeover_over
        a_completion_and_a_takeover_at_once_agree a_renewal_and_a_takeover_at_once_agree;
    IdIsCut by ids_that_differ_in_one_bit_do_not_meet;
    IdIsText by ids_that_read_alike_as_text_do_not_meet;
    OwnTokenIsRefused by the_same_token_is_granted_again_with_the_same_generation
        a_call_dropped_at_any_await_leaves_the_store_usable;
    OwnTokenCountsAsTakeover by the_same_token_is_granted_again_with_the_same_generation;
    OwnTokenDoesNotExtend by acquiring_again_with_the_same_token_extends_the_lease;
    OwnTokenOfAnOrphanIsATakeover by the_holder_of_an_orphan_is_granted_again_as_it_was;
    OwnTokenForgetsItWasATakeover by a_takeover_is_still_one_when_its_token_asks_again;
    OwnTokenForgetsSooner by a_lease_is_not_forgotten_while_it_is_held;
    OwnOrphanIsRefused by the_holder_of_an_orphan_is_granted_again_as_it_was;
    OldTokenIsGrantedAgain by a_replaced_token_that_asks_again_is_a_stranger;
    OldTokenIsNotCounted by a_replaced_token_that_asks_again_is_a_stranger;
    AskersFingerprintInProgress by a_refused_claim_learns_the_holders_fingerprint_and_the_time_left;
    AskersFingerprintCompleted by a_record_carries_the_fingerprint_of_its_request;
    NoTimeLeft by a_refused_claim_learns_the_holders_fingerprint_and_the_time_left;
    NoTakeover by a_lease_that_is_over_is_taken_over_by_the_same_request;
    TakeoverOfAnotherRequest by another_request_does_not_take_an_orphan_over;
    TakeoverAgainstThePolicy by a_refusing_claim_does_not_take_an_orphan_over;
    TakeoverKeepsTheGeneration by each_takeover_raises_the_generation;
    TakeoverIsHidden by a_lease_that_is_over_is_taken_over_by_the_same_request;
    TakeoverKeepsTheToken by a_replaced_token_neither_renews_nor_completes;
    TakeoverForgetsSooner by a_lease_is_not_forgotten_while_it_is_held;
    RefusalOfTheHolderCounts by a_lease_that_is_over_is_taken_over_by_the_same_request;
    LeaseForgetsSooner by a_lease_is_not_forgotten_while_it_is_held;
    KeepOverflows by the_longest_of_everything_is_taken;
    LeaseNeverEnds by a_lease_that_is_over_is_taken_over_by_the_same_request;
    OrphanIsForgottenAtOnce by a_refusing_claim_does_not_take_an_orphan_over;
    OrphanIsNeverForgotten by an_orphan_is_forgotten_after_keep;
    OrphanHasNoAge by an_orphan_knows_since_when;
    AgeCountsFromTheGrant by an_orphan_knows_since_when;
    GenerationOutlivesTheEntry by an_orphan_is_forgotten_after_keep;
    ForgottenIsTakenOver by an_orphan_is_forgotten_after_keep a_released_takeover_is_forgotten_after_keep;
    AnotherLifeKeepsTheFingerprint by a_record_is_absent_after_its_retention an_orphan_is_forgotten_after_keep
        a_released_takeover_is_forgotten_after_keep;
    RenewIsReadThenWritten by a_renewal_and_a_takeover_at_once_agree;
    RenewIsUnfenced by a_replaced_token_neither_renews_nor_completes a_refused_claim_does_not_free_the_holder;
    RenewDoesNothing by renew_extends_the_lease the_holder_renews_an_orphan_that_nobody_took_over;
    RenewOnlyExtends by renew_can_bring_the_end_of_the_lease_nearer;
    RenewRefusesOrphans by the_holder_renews_an_orphan_that_nobody_took_over;
    RenewForgetsSooner by a_renewed_lease_is_remembered_for_keep_too;
    RenewTakesAnyHeldOrphan by a_stranger_does_nothing_to_an_orphan;
    RenewKnowsOldTokens by a_replaced_token_that_asks_again_is_a_stranger;
    RenewTakesAbsentKeys by renew_of_an_absent_key_is_lost;
    RenewTakesCompletedKeys by renew_of_a_completed_key_is_lost;
    CompleteIsUnfenced by a_replaced_token_neither_renews_nor_completes a_token_without_the_lease_completes_nothing;
    CompleteOverwrites by another_token_does_not_overwrite_a_record completing_an_absent_key_stores_the_record;
    CompleteRefusesOrphans by the_holder_completes_an_orphan_that_nobody_took_over;
    CompleteTakesAnyOrphan by a_stranger_does_nothing_to_an_orphan;
    CompleteRefusesAbsentKeys by completing_an_absent_key_stores_the_record;
    CompleteTwiceIsLost by completing_twice_changes_nothing;
    CompleteTwiceReplaces by completing_twice_changes_nothing;
    CompleteTwiceExtends by completing_twice_changes_nothing;
    RecordIsText by a_record_comes_back_byte_for_byte;
    RecordIsCut by a_large_record_comes_back_or_is_refused_for_its_size;
    RecordExpiresWithTheLease by a_record_outlives_its_lease;
    RecordNeverExpires by a_record_is_absent_after_its_retention;
    RetentionOverflows by a_record_of_the_longest_retention_is_kept;
    RetentionCountsFromTheGrant by a_record_outlives_its_lease;
    ReplayExtends by a_replay_does_not_extend_the_retention;
    LimitIsNotTrue by a_large_record_comes_back_or_is_refused_for_its_size;
    ReleaseIsUnfenced by a_stale_release_does_not_free_the_next_holder a_refused_claim_does_not_free_the_holder
        a_stale_release_of_a_takeover_changes_nothing;
    ReleaseIsReadThenWritten by a_release_and_a_takeover_at_once_leave_the_next_holder;
    ReleaseFreesAnyOrphan by a_stranger_does_nothing_to_an_orphan;
    ReleaseDoesNothing by release_frees_the_key release_frees_the_key_for_another_request;
    ReleaseDropsRecords by release_of_a_completed_key_keeps_its_record
        a_completion_and_a_release_at_once_leave_the_record;
    ReleaseRefusesOrphans by the_holder_releases_an_orphan_that_nobody_took_over;
    ReleaseTwiceFails by release_twice_is_harmless;
    ReleaseFreesTakeovers by a_released_takeover_is_taken_over_in_turn
        takeovers_that_are_released_raise_the_generation_each a_released_takeover_is_an_orphan_since_its_release
        a_renewal_and_a_release_at_once_leave_an_orphan;
    ReleaseBelievesTheGeneration by a_released_takeover_is_taken_over_in_turn;
    ReleaseRaisesTheGeneration by takeovers_that_are_released_raise_the_generation_each;
    ReleaseFreesLateTakeovers by a_takeover_that_is_released_late_is_an_orphan;
    ReleaseKeepsTheToken by a_renewal_does_not_revive_a_released_takeover
        who_released_a_takeover_takes_it_over_like_any_other
        a_released_takeover_is_completed_by_whoever_has_the_answer a_renewal_and_a_release_at_once_leave_an_orphan;
    ReleaseKeepsTheLease by a_released_takeover_is_taken_over_in_turn release_of_a_takeover_wakes_the_waiters;
    ReleaseForgetsSooner by a_released_takeover_is_remembered_for_keep;
    ReleaseForgetsLater by a_released_takeover_is_forgotten_after_keep;
    ReleaseTwiceExtends by a_released_takeover_is_forgotten_after_keep;
    ReleasedIsHeldByAll by a_renewal_does_not_revive_a_released_takeover
        a_takeover_that_is_released_late_is_an_orphan;
    ReleasedRefusesAnswers by a_released_takeover_is_completed_by_whoever_has_the_answer
        a_completion_and_a_release_of_a_takeover_at_once_leave_the_record;
    ReleasedWakesNobody by release_of_a_takeover_wakes_the_waiters;
    NobodyIsWoken by completion_wakes_the_waiters release_wakes_the_waiters
        nobody_waits_for_a_key_that_is_not_in_progress;
    WaitingNeverEnds by a_waiter_waits_no_longer_than_it_asks;
    WaitingIsBlind by nobody_waits_for_a_key_that_is_not_in_progress;
}

/// A reply that is lost finds what a careful client never would: the same flaw passes without faults.
#[test]
fn lost_replies_reveal_refused_own_token() {
    let case = "release_frees_the_key";
    let refusing = || Subject::new(Mutant::new(Flaw::OwnTokenIsRefused));
    assert!(!is_caught(refusing(), case));
    assert!(is_caught(refusing().through(Plan::RepliesLost), case));
    let flawless = Subject::new(Mutant::new(Flaw::Nothing));
    assert!(!is_caught(flawless.through(Plan::RepliesLost), case));
}
