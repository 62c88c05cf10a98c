//! The list of cases about operators, and the macro that defines a test for each.

/// Defines a `#[test]` for every case of [`Inspect`](crate::inspect::Inspect).
///
/// `store` is a closure like that of [`conformance_tests!`](crate::conformance_tests), and the options are the same. Run
/// the cases on a store with all details. For a store that lists few states, or stores no owner and operation, the suite
/// skips the other cases. Start no background purger: it could delete the expired entries of the case about purges first.
///
/// ```
/// # mod store_tests {
/// tower_idempotency::inspect_conformance_tests! {
///     mod memory,
///     start_paused = true,
///     store = || async { tower_idempotency::store::MemoryStore::new().with_details() },
/// }
/// # }
/// ```
#[macro_export]
macro_rules! inspect_conformance_tests {
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
                    .with_inspector()
                    $(.with_unit($unit))?
                    $(.with_push($push))?
            }

            $crate::__inspect_cases! { [$crate::__conformance_module] operators, |_| None }
        }
    };
}

/// Passes the names of the cases to another macro: first the cases that sleep, then those that race threads.
#[doc(hidden)]
#[macro_export]
macro_rules! __inspect_cases {
    ([$($with:tt)*] $($arguments:tt)*) => {
        $($with)*! {
            { $($arguments)* }
            paced [
                dropped_resolution_leaves_entry_whole
                dropped_reads_leave_store_usable
                broken_lease_cannot_complete
                broken_lease_stays_broken
                broken_lease_stays_broken_after_resolution
                broken_lease_follows_orphan_policy
                renewed_lease_can_be_broken
                takeover_can_be_broken
                freed_broken_lease_leaves_next_holder
                allowed_retry_is_used_once
                allowed_retry_waits_for_its_request
                broken_lease_expires
                entry_is_listed_in_its_state_alone
                listing_without_index_is_rejected
                list_and_get_agree
                released_takeover_is_listed_as_orphan
                moved_entry_is_listed_in_new_state_alone
                absent_entries_are_in_no_listing
                overdue_listing_omits_young_entries
                age_filter_applies_to_every_state
                operation_filter_selects_by_prefix
                owner_filter_selects_whole_name
                id_prefix_finds_entry
                details_outlive_takeover_and_completion
                takeover_keeps_operation_if_it_has_none
                details_outlive_resolutions
                age_counts_from_beginning_of_state
                entry_reports_expiry
                unreadable_record_is_listed_and_deleted
                summary_counts_up_to_limit
                purge_deletes_expired_entries_alone
                listed_entry_can_be_resolved
                pages_of_one_list_each_entry_once
                renewed_entries_are_listed
                entries_that_leave_make_no_gap
                new_entries_hide_no_others
                page_token_continues_as_text
                page_token_of_other_listing_is_rejected
                edited_page_token_is_harmless
                get_returns_record_and_fingerprint
                get_of_absent_entry_is_none
                attention_reports_code_and_reason
                state_follows_lease_expiry
                freed_key_is_absent
                released_takeover_can_be_resolved
                retried_entry_is_taken_over
                retried_entry_has_no_former_holder
                completed_entry_is_replayed
                record_of_operator_expires
                attention_of_operator_is_stored
                deleted_record_frees_key
                resolution_of_wrong_state_is_rejected
                outcome_contains_resolved_entry
                resolution_keeps_generation
                oversized_resolution_changes_nothing
                broken_lease_wakes_waiters
                taken_over_orphan_is_not_resolved
                later_orphan_is_not_resolved
                renewed_orphan_is_not_resolved
                completed_lease_is_not_broken
                expired_lease_is_not_broken
                reacquired_key_is_not_resolved
                resolved_attention_is_not_resolved_again
                resolved_orphan_is_not_resolved_again
                later_record_is_not_deleted
                replaced_record_is_not_deleted
                absent_entry_is_not_resolved
                invented_version_changes_nothing
            ]
            threaded [
                one_of_32_resolutions_is_applied
                one_of_32_different_resolutions_is_applied
                concurrent_break_and_complete_agree
                concurrent_break_and_renew_leave_orphan
                concurrent_free_and_takeover_agree
                concurrent_free_and_holder_agree
                concurrent_completion_and_takeover_agree
                concurrent_purge_leaves_new_entries
                one_of_32_claims_uses_allowed_retry
            ]
        }
    };
}
