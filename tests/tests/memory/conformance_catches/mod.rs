//! The conformance suite detects flaws. A simple store passes it, and the case of each rule detects a store that breaks
//! the rule.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod held_up;
mod mutant;
mod operators;
mod processes;
mod wrapped;

use std::panic::{AssertUnwindSafe, catch_unwind};

use tower_idempotency::{
    conformance::{Case, CaseRuntime, Plan, Subject, run},
    store::Store,
};

use self::mutant::{Flaw, Mutant};

tower_idempotency::conformance_tests! {
    mod flawless,
    start_paused = true,
    store = || async { Mutant::new(Flaw::Nothing) },
}

/// Returns `true` if the case fails on the subject. All cases run on one thread with a paused clock, races too.
fn fails_case<S: Store>(subject: Subject<S>, case: &str) -> bool {
    let case = Case::named(case);
    let run = || {
        run(
            CaseRuntime::CurrentThread { start_paused: true },
            case.check(subject),
        );
    };
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

macro_rules! caught {
    ($($flaw:ident by $($case:ident)+;)*) => { $(
        #[test]
        #[allow(non_snake_case, reason = "named for the flaw")]
        fn $flaw() {
            $(
                assert!(fails_case(Subject::new(Mutant::new(Flaw::$flaw)), stringify!($case)), "{} passes", stringify!($case));
            )+
        }
    )* };
}

caught! {
    ClaimIsReadThenWritten by one_of_32_concurrent_claims_is_granted lease_prevents_lost_increments
        one_of_32_claims_takes_over_orphan one_of_32_claims_replaces_expired_record
        one_of_32_claims_replaces_expired_orphan one_of_32_claims_takes_over_released_takeover
        concurrent_complete_and_takeover_agree concurrent_renew_and_takeover_agree
        concurrent_late_record_and_claim_agree;
    IdIsCut by ids_differing_in_one_bit_are_distinct;
    IdIsText by ids_equal_as_text_are_distinct;
    FingerprintIsCut by fingerprints_and_tokens_are_compared_as_bytes;
    TokenIsText by fingerprints_and_tokens_are_compared_as_bytes;
    OwnTokenIsRefused by same_token_is_granted_same_generation_again
        dropped_call_leaves_store_usable;
    OwnTokenCountsAsTakeover by same_token_is_granted_same_generation_again;
    OwnTokenDoesNotExtend by acquire_with_same_token_extends_lease;
    OwnTokenReplacesTheFingerprint by acquire_with_same_token_keeps_fingerprint;
    OwnTokenOfAnOrphanIsATakeover by holder_of_orphan_is_granted_same_lease_again;
    OwnTokenForgetsItWasATakeover by takeover_token_is_granted_same_takeover_again;
    OwnTokenForgetsSooner by held_lease_outlives_orphan_retention;
    OwnTokenIsReadThenWritten by concurrent_complete_and_extension_leave_record
        concurrent_own_claim_and_takeover_agree;
    OwnOrphanIsRefused by holder_of_orphan_is_granted_same_lease_again;
    OldTokenIsGrantedAgain by replaced_token_acquires_like_any_other;
    OldTokenIsNotCounted by replaced_token_acquires_like_any_other;
    AskersFingerprintInProgress by rejected_claim_gets_holder_fingerprint_and_expiry;
    AskersFingerprintCompleted by record_carries_fingerprint_of_its_request;
    AskersTokenCompleted by record_reports_its_expiry_and_token;
    NoTokenCompleted by record_reports_its_expiry_and_token;
    RetentionIsNotCounted by record_reports_its_expiry_and_token;
    NoTimeLeft by rejected_claim_gets_holder_fingerprint_and_expiry;
    NoTakeover by expired_lease_is_taken_over_by_same_request;
    TakeoverOfAnotherRequest by other_request_cannot_take_over_orphan;
    TakeoverAgainstThePolicy by refuse_policy_prevents_takeover;
    TakeoverUnderNever by refuse_policy_prevents_takeover;
    TakeoverKeepsTheGeneration by each_takeover_raises_generation;
    TakeoverIsHidden by expired_lease_is_taken_over_by_same_request;
    TakeoverKeepsTheToken by replaced_token_cannot_renew_or_complete;
    TakeoverForgetsSooner by held_lease_outlives_orphan_retention;
    TakeoverFreesFirst by dropped_call_leaves_no_part;
    RefusalOfTheHolderCounts by expired_lease_is_taken_over_by_same_request;
    LeaseForgetsSooner by held_lease_outlives_orphan_retention;
    KeepOverflows by longest_times_and_odd_texts_are_accepted;
    LeaseNeverEnds by expired_lease_is_taken_over_by_same_request;
    OrphanIsForgottenAtOnce by refuse_policy_prevents_takeover;
    OrphanIsNeverForgotten by orphan_expires_after_orphan_retention;
    OrphanHasNoAge by orphan_age_counts_from_lease_expiry;
    AgeCountsFromTheGrant by orphan_age_counts_from_lease_expiry;
    GenerationOutlivesTheEntry by orphan_expires_after_orphan_retention;
    ForgottenIsTakenOver by orphan_expires_after_orphan_retention released_takeover_expires_after_orphan_retention;
    AnotherLifeKeepsTheFingerprint by record_is_absent_after_retention orphan_expires_after_orphan_retention
        released_takeover_expires_after_orphan_retention;
    RenewIsReadThenWritten by concurrent_renew_and_takeover_agree;
    RenewWritesByToken by concurrent_complete_and_extension_leave_record;
    RenewFreesFirst by concurrent_claims_find_lease_or_record;
    RenewIsUnfenced by replaced_token_cannot_renew_or_complete rejected_claim_cannot_end_holders_lease;
    RenewDoesNothing by renew_extends_lease holder_renews_orphan_before_takeover;
    RenewOnlyExtends by renew_can_shorten_lease;
    RenewRefusesOrphans by holder_renews_orphan_before_takeover;
    RenewForgetsSooner by renewed_lease_restarts_orphan_retention;
    RenewForgetsNever by orphan_expires_after_orphan_retention;
    RenewTakesAnyHeldOrphan by other_token_cannot_change_orphan;
    RenewKnowsOldTokens by replaced_token_acquires_like_any_other;
    RenewTakesAbsentKeys by renew_of_absent_key_is_lost;
    RenewTakesCompletedKeys by renew_of_completed_key_is_lost;
    CompleteIsReadThenWritten by one_of_32_late_records_is_stored
        concurrent_late_record_and_claim_agree;
    CompleteFreesFirst by concurrent_claims_find_lease_or_record dropped_call_leaves_no_part;
    CompleteIsUnfenced by replaced_token_cannot_renew_or_complete token_without_lease_cannot_complete;
    CompleteOverwrites by other_token_cannot_overwrite_record complete_of_absent_key_stores_record;
    CompleteRefusesOrphans by holder_completes_orphan_before_takeover;
    CompleteTakesAnyOrphan by other_token_cannot_change_orphan;
    CompleteRefusesAbsentKeys by complete_of_absent_key_stores_record;
    CompleteTwiceIsLost by second_complete_changes_nothing;
    CompleteTwiceReplaces by second_complete_changes_nothing;
    CompleteTwiceExtends by second_complete_changes_nothing;
    CompleteIgnoresExpiry by complete_of_expired_entry_stores_record;
    CompleteKeepsTheFingerprint by released_takeover_accepts_first_record;
    RecordIsText by record_is_returned_unchanged;
    RecordIsCut by large_record_is_stored_or_rejected_for_size;
    RecordExpiresWithTheLease by record_outlives_its_lease;
    RecordNeverExpires by record_is_absent_after_retention;
    RetentionOverflows by record_with_longest_retention_is_stored;
    RetentionCountsFromTheGrant by record_outlives_its_lease;
    ReplayExtends by replay_does_not_extend_retention;
    LimitIsNotTrue by large_record_is_stored_or_rejected_for_size;
    LimitIsTooLow by large_record_is_stored_or_rejected_for_size;
    RejectionFreesTheKey by large_record_is_stored_or_rejected_for_size;
    FindsExpiredRecords by record_is_absent_after_retention replay_does_not_extend_retention;
    FindsRecordsWithoutToken by record_reports_its_expiry_and_token;
    ReleaseIsUnfenced by stale_release_leaves_next_holder rejected_claim_cannot_end_holders_lease
        stale_takeover_release_changes_nothing;
    ReleaseIsReadThenWritten by concurrent_release_and_takeover_leave_next_holder;
    ReleaseFreesFirst by dropped_call_leaves_no_part;
    ReleaseFreesAnyOrphan by other_token_cannot_change_orphan;
    ReleaseDoesNothing by release_frees_key release_frees_key_for_other_request;
    ReleaseDropsRecords by release_of_completed_key_leaves_record
        concurrent_complete_and_release_leave_record;
    ReleaseRefusesOrphans by holder_releases_orphan_before_takeover;
    ReleaseTwiceFails by release_twice_is_harmless;
    ReleaseFreesTakeovers by released_takeover_can_be_taken_over
        each_released_takeover_raises_generation released_takeover_is_orphan_since_release
        concurrent_renew_and_release_leave_orphan;
    ReleaseBelievesTheGeneration by released_takeover_can_be_taken_over;
    ReleaseRaisesTheGeneration by each_released_takeover_raises_generation;
    ReleaseFreesLateTakeovers by takeover_released_after_expiry_is_orphan;
    ReleaseKeepsTheToken by renewal_does_not_revive_released_takeover
        releasing_token_takes_over_like_any_other
        released_takeover_accepts_first_record concurrent_renew_and_release_leave_orphan;
    ReleaseKeepsTheLease by released_takeover_can_be_taken_over takeover_release_wakes_waiters;
    ReleaseForgetsSooner by released_takeover_lasts_for_orphan_retention;
    ReleaseForgetsLater by released_takeover_expires_after_orphan_retention;
    ReleaseTwiceExtends by released_takeover_expires_after_orphan_retention;
    ReleaseIgnoresExpiry by release_of_expired_takeover_leaves_no_orphan;
    ReleasedIsHeldByAll by renewal_does_not_revive_released_takeover
        takeover_released_after_expiry_is_orphan;
    ReleasedRefusesAnswers by released_takeover_accepts_first_record
        concurrent_takeover_complete_release_leave_record;
    ReleasedWakesNobody by takeover_release_wakes_waiters;
    NobodyIsWoken by completion_wakes_waiters release_wakes_waiters
        wait_returns_at_once_if_not_in_progress;
    WaitingSubscribesNever by completion_wakes_waiters release_wakes_waiters takeover_release_wakes_waiters;
    WaitingSubscribesLate by completion_wakes_waiters release_wakes_waiters takeover_release_wakes_waiters;
    WaitingNeverEnds by wait_ends_at_timeout;
    WaitingEndsLate by wait_ends_at_timeout;
    WaitingIsBlind by wait_returns_at_once_if_not_in_progress;
}

/// Lost replies reveal this flaw, which passes without faults.
#[test]
fn lost_replies_reveal_refused_own_token() {
    let case = "release_frees_key";
    let refusing = || Subject::new(Mutant::new(Flaw::OwnTokenIsRefused));
    assert!(!fails_case(refusing(), case));
    assert!(fails_case(refusing().through(Plan::RepliesLost), case));
    let flawless = Subject::new(Mutant::new(Flaw::Nothing));
    assert!(!fails_case(flawless.through(Plan::RepliesLost), case));
}
