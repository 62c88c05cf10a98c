//! The list of cases, and the macro that defines a test for each.

/// Defines five `#[test]`s for every case: on the store itself (`direct`), and through [`FaultInjector`] under each
/// [`Plan`] (`calls_lost`, `replies_lost`, `slow`, `alternating`).
///
/// `store` is a closure that returns a future of a store. The store may be new or share a server, because every key is
/// random. The closure runs once for each test on that test's own runtime, so it can connect. For a store on a server, it
/// connects twice and returns [`Processes`]. With one client, a store passes that is atomic only within its process. The
/// options come in this order, each with its default:
///
/// - `start_paused = false`: `true` pauses tokio's clock, for stores that live in the process and use that clock. The cases
///   that race real threads always use the real clock.
/// - `unit = Duration::from_millis(50)`: the [unit](crate::conformance::Subject::with_unit) of leases and waits.
/// - `push = true`: `true` if the store [notifies waiters](crate::conformance::Subject::with_push).
///
/// ```
/// # mod store_tests {
/// tower_idempotency::conformance_tests! {
///     mod memory,
///     start_paused = true,
///     store = || async { tower_idempotency::store::MemoryStore::new() },
/// }
/// # }
/// ```
///
/// [`FaultInjector`]: crate::conformance::FaultInjector
/// [`Plan`]: crate::conformance::Plan
/// [`Processes`]: crate::conformance::Processes
#[macro_export]
macro_rules! conformance_tests {
    (
        mod $name:ident
        $(, start_paused = $paused:expr)?
        $(, unit = $unit:expr)?
        $(, push = $push:expr)?
        , store = $store:expr
        $(,)?
    ) => {
        mod $name {
            #[allow(unused_imports, reason = "not every closure needs them")]
            use super::*;

            const START_PAUSED: bool = false $(|| $paused)?;

            async fn subject() -> $crate::conformance::Subject<impl $crate::store::Store> {
                $crate::conformance::Subject::new(($store)().await)
                    $(.with_unit($unit))?
                    $(.with_push($push))?
            }

            $crate::__conformance_cases! { [$crate::__conformance_module] direct, |_| None }
            $crate::__conformance_cases! {
                [$crate::__conformance_module] calls_lost, |_| Some($crate::conformance::Plan::CallsLost)
            }
            $crate::__conformance_cases! {
                [$crate::__conformance_module] replies_lost, |_| Some($crate::conformance::Plan::RepliesLost)
            }
            $crate::__conformance_cases! {
                [$crate::__conformance_module] slow, |pause| Some($crate::conformance::Plan::Slow(pause))
            }
            $crate::__conformance_cases! {
                [$crate::__conformance_module] alternating, |pause| Some($crate::conformance::Plan::Alternating(pause))
            }
        }
    };
}

/// Defines one module of tests for [`conformance_tests!`].
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_module {
    ({ $name:ident, $plan:expr } paced [$($paced:ident)*] threaded [$($threaded:ident)*]) => {
        mod $name {
            fn plan(pause: ::std::time::Duration) -> Option<$crate::conformance::Plan> {
                let plan: fn(::std::time::Duration) -> Option<$crate::conformance::Plan> = $plan;
                plan(pause)
            }
            $crate::__conformance_test! { $($paced)* $($threaded)* }
        }
    };
}

/// Defines the tests of a module for [`conformance_tests!`].
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_test {
    ($($case:ident)*) => { $(
        #[test]
        fn $case() {
            let case = $crate::conformance::Case::named(stringify!($case));
            case.run(super::START_PAUSED, super::subject, plan);
        }
    )* };
}

/// Passes the names of the cases to another macro: first the cases that sleep, then those that race threads.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_cases {
    ([$($with:tt)*] $($arguments:tt)*) => {
        $($with)*! {
            { $($arguments)* }
            paced [
                dropped_call_leaves_store_usable
                dropped_call_leaves_no_part
                large_record_is_stored_or_rejected_for_size
                held_lease_outlives_orphan_retention
                expired_lease_is_taken_over_by_same_request
                record_carries_fingerprint_of_its_request
                record_is_returned_unchanged
                record_is_absent_after_retention
                record_with_longest_retention_is_stored
                record_outlives_its_lease
                record_reports_its_expiry_and_token
                rejected_claim_cannot_end_holders_lease
                rejected_claim_gets_holder_fingerprint_and_expiry
                refuse_policy_prevents_takeover
                released_takeover_is_orphan_since_release
                released_takeover_accepts_first_record
                released_takeover_expires_after_orphan_retention
                released_takeover_lasts_for_orphan_retention
                released_takeover_can_be_taken_over
                renewal_does_not_revive_released_takeover
                renewed_lease_restarts_orphan_retention
                replaced_token_cannot_renew_or_complete
                replaced_token_acquires_like_any_other
                replay_does_not_extend_retention
                stale_release_leaves_next_holder
                stale_takeover_release_changes_nothing
                other_token_cannot_change_orphan
                takeover_token_is_granted_same_takeover_again
                takeover_released_after_expiry_is_orphan
                token_without_lease_cannot_complete
                wait_ends_at_timeout
                acquire_with_same_token_extends_lease
                acquire_with_same_token_keeps_fingerprint
                orphan_expires_after_orphan_retention
                shortest_durations_end
                orphan_age_counts_from_lease_expiry
                other_request_cannot_take_over_orphan
                other_token_cannot_overwrite_record
                complete_of_absent_key_stores_record
                complete_of_expired_entry_stores_record
                second_complete_changes_nothing
                completion_wakes_waiters
                each_takeover_raises_generation
                ids_differing_in_one_bit_are_distinct
                ids_equal_as_text_are_distinct
                fingerprints_and_tokens_are_compared_as_bytes
                scope_changes_no_reply
                wait_returns_at_once_if_not_in_progress
                release_frees_key
                release_frees_key_for_other_request
                release_of_completed_key_leaves_record
                release_of_expired_takeover_leaves_no_orphan
                takeover_release_wakes_waiters
                release_twice_is_harmless
                release_wakes_waiters
                renew_can_shorten_lease
                renew_extends_lease
                renew_of_completed_key_is_lost
                renew_of_absent_key_is_lost
                each_released_takeover_raises_generation
                holder_completes_orphan_before_takeover
                holder_of_orphan_is_granted_same_lease_again
                holder_releases_orphan_before_takeover
                holder_renews_orphan_before_takeover
                longest_times_and_odd_texts_are_accepted
                same_token_is_granted_same_generation_again
                releasing_token_takes_over_like_any_other
            ]
            threaded [
                concurrent_complete_and_release_leave_record
                concurrent_takeover_complete_release_leave_record
                concurrent_complete_and_takeover_agree
                concurrent_claims_find_lease_or_record
                concurrent_complete_and_extension_leave_record
                concurrent_own_claim_and_takeover_agree
                concurrent_late_record_and_claim_agree
                concurrent_release_and_takeover_leave_next_holder
                concurrent_renew_and_release_leave_orphan
                concurrent_renew_and_takeover_agree
                lease_prevents_lost_increments
                one_of_32_concurrent_claims_is_granted
                one_of_32_claims_replaces_expired_orphan
                one_of_32_claims_replaces_expired_record
                one_of_32_claims_takes_over_released_takeover
                one_of_32_claims_takes_over_orphan
                one_of_32_late_records_is_stored
            ]
        }
    };
}
