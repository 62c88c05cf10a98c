//! The list of the cases, and the macro that makes a test of each.

/// Makes a `#[test]` of every case, five times over: on the store itself (`direct`), and through [`FaultInjector`] under each
/// [`Plan`] (`calls_lost`, `replies_lost`, `slow`, `alternating`).
///
/// `store` is a closure that returns a future of a fresh store, or of one that shares a server: every key is random.
/// It runs once for each test, on that test's own runtime, so it can connect. The options come in this order, each with
/// its default:
///
/// - `start_paused = false`: whether tokio's clock is paused, for stores that live in the process and take their time
///   from it. The cases that race real threads run on the real clock all the same.
/// - `unit = Duration::from_millis(50)`: the [unit](crate::conformance::Subject::with_unit) of leases and pauses.
/// - `push = true`: whether the store [wakes its waiters](crate::conformance::Subject::with_push).
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
            #[allow(unused_imports, reason = "the closure may need them, or not")]
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

/// One module of tests; a part of [`conformance_tests!`].
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

/// Tests; a part of [`conformance_tests!`].
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

/// Hands the names of the cases to another macro: those that sleep, then those that race threads.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_cases {
    ([$($with:tt)*] $($arguments:tt)*) => {
        $($with)*! {
            { $($arguments)* }
            paced [
                a_call_dropped_at_any_await_leaves_the_store_usable
                a_large_record_comes_back_or_is_refused_for_its_size
                a_lease_is_not_forgotten_while_it_is_held
                a_lease_that_is_over_is_taken_over_by_the_same_request
                a_record_carries_the_fingerprint_of_its_request
                a_record_comes_back_byte_for_byte
                a_record_is_absent_after_its_retention
                a_record_of_the_longest_retention_is_kept
                a_record_outlives_its_lease
                a_refused_claim_does_not_free_the_holder
                a_refused_claim_learns_the_holders_fingerprint_and_the_time_left
                a_refusing_claim_does_not_take_an_orphan_over
                a_released_takeover_is_an_orphan_since_its_release
                a_released_takeover_is_completed_by_whoever_has_the_answer
                a_released_takeover_is_forgotten_after_keep
                a_released_takeover_is_remembered_for_keep
                a_released_takeover_is_taken_over_in_turn
                a_renewal_does_not_revive_a_released_takeover
                a_renewed_lease_is_remembered_for_keep_too
                a_replaced_token_neither_renews_nor_completes
                a_replaced_token_that_asks_again_is_a_stranger
                a_replay_does_not_extend_the_retention
                a_stale_release_does_not_free_the_next_holder
                a_stale_release_of_a_takeover_changes_nothing
                a_stranger_does_nothing_to_an_orphan
                a_takeover_is_still_one_when_its_token_asks_again
                a_takeover_that_is_released_late_is_an_orphan
                a_token_without_the_lease_completes_nothing
                a_waiter_waits_no_longer_than_it_asks
                acquiring_again_with_the_same_token_extends_the_lease
                an_orphan_is_forgotten_after_keep
                an_orphan_knows_since_when
                another_request_does_not_take_an_orphan_over
                another_token_does_not_overwrite_a_record
                completing_an_absent_key_stores_the_record
                completing_twice_changes_nothing
                completion_wakes_the_waiters
                each_takeover_raises_the_generation
                ids_that_differ_in_one_bit_do_not_meet
                ids_that_read_alike_as_text_do_not_meet
                nobody_waits_for_a_key_that_is_not_in_progress
                release_frees_the_key
                release_frees_the_key_for_another_request
                release_of_a_completed_key_keeps_its_record
                release_of_a_takeover_wakes_the_waiters
                release_twice_is_harmless
                release_wakes_the_waiters
                renew_can_bring_the_end_of_the_lease_nearer
                renew_extends_the_lease
                renew_of_a_completed_key_is_lost
                renew_of_an_absent_key_is_lost
                takeovers_that_are_released_raise_the_generation_each
                the_holder_completes_an_orphan_that_nobody_took_over
                the_holder_of_an_orphan_is_granted_again_as_it_was
                the_holder_releases_an_orphan_that_nobody_took_over
                the_holder_renews_an_orphan_that_nobody_took_over
                the_longest_of_everything_is_taken
                the_same_token_is_granted_again_with_the_same_generation
                who_released_a_takeover_takes_it_over_like_any_other
            ]
            threaded [
                a_completion_and_a_release_at_once_leave_the_record
                a_completion_and_a_release_of_a_takeover_at_once_leave_the_record
                a_completion_and_a_takeover_at_once_agree
                a_release_and_a_takeover_at_once_leave_the_next_holder
                a_renewal_and_a_release_at_once_leave_an_orphan
                a_renewal_and_a_takeover_at_once_agree
                no_increment_under_the_lease_is_lost
                one_of_32_claims_at_once_is_granted
                one_of_32_claims_at_once_replaces_a_forgotten_orphan
                one_of_32_claims_at_once_replaces_an_expired_record
                one_of_32_claims_at_once_takes_a_released_takeover_over
                one_of_32_claims_at_once_takes_an_orphan_over
            ]
        }
    };
}
