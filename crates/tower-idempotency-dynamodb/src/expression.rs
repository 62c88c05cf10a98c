//! Condition and update expressions.
//!
//! `#name` is a placeholder for the attribute of that name, so that names reserved by the service work. The exception is
//! `#this_token`, an attribute within `#granted` whose name is the token in hexadecimal.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use tower_idempotency::store::Token;

use crate::item::n;

/// The entry is absent, has an expired record, is held by this token for the same request, or is an orphan of the same
/// request.
///
/// Expired orphans are covered by [`ABSENT_OR_EXPIRED`], because their generation starts again at 1. So are expired records in
/// the index: [`ACQUIRE`] would take their `since` as the beginning of the execution. An entry that this token holds for
/// another request is covered by [`CAN_EXTEND`], because it keeps its fingerprint.
///
/// A lease of this token that expires later than the claim requests is not written. The service may apply an acquire after a
/// renewal, and would shorten the lease.
pub(crate) const CAN_ACQUIRE: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :passed AND attribute_not_exists(#since)) \
    OR (#status = :in_progress AND #expires > :passed AND #fingerprint = :fingerprint \
        AND ((#token = :token AND #lease_ends <= :lease_ends) OR #lease_ends <= :passed))";

/// Like [`CAN_ACQUIRE`], but without orphans.
pub(crate) const CAN_ACQUIRE_EXCEPT_ORPHANS: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :passed AND attribute_not_exists(#since)) \
    OR (#status = :in_progress AND #expires > :passed AND #fingerprint = :fingerprint \
        AND #token = :token AND #lease_ends <= :lease_ends)";

/// Like [`CAN_ACQUIRE_EXCEPT_ORPHANS`], but includes orphans of the same request whose retry an operator has allowed.
pub(crate) const CAN_ACQUIRE_ALLOWED_RETRIES: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :passed AND attribute_not_exists(#since)) \
    OR (#status = :in_progress AND #expires > :passed AND #fingerprint = :fingerprint \
        AND ((#token = :token AND #lease_ends <= :lease_ends) OR (begins_with(#token, :retry) AND #lease_ends <= :passed)))";

/// Acquires the lease. [`SET_OPERATION`] or [`KEEP_OPERATION`] follows.
///
/// `grants` is the number of grants. `granted` is a map with one attribute: its name is the token of the last grant, and its
/// value is 0. The generation is `if_not_exists(granted.<this token>, 1) + if_not_exists(grants, 0)`. If this token has the
/// last grant, the first summand is 0; otherwise it is 1.
///
/// The update reads the item in its earlier state, and replaces the map. If a superseded token returns, it counts as a new
/// grant. A completion removes `grants`, so the next life of the key begins at generation 1.
pub(crate) const ACQUIRE: &str = "SET #status = :in_progress, #token = :token, \
    #lease_ends = :lease_ends, #expires = :expires, #ttl = :ttl, #orphan_retention = :orphan_retention, #orphan_retention_seconds = :orphan_retention_seconds, \
    #owner = :owner, \
    #created = if_not_exists(#since, :now), #since = if_not_exists(#since, :now), \
    #generation = if_not_exists(#granted.#this_token, :one) + if_not_exists(#grants, :zero), \
    #grants = if_not_exists(#granted.#this_token, :one) + if_not_exists(#grants, :zero), \
    #granted = :granted";

/// Sets the operation. Follows [`ACQUIRE`].
pub(crate) const SET_OPERATION: &str = ", #operation = :operation";

/// Keeps the operation of the item, if it has one. Follows [`ACQUIRE`] if the claim has no operation.
pub(crate) const KEEP_OPERATION: &str = ", #operation = if_not_exists(#operation, :operation)";

/// Sets the fingerprint. Follows [`ACQUIRE`].
pub(crate) const SET_FINGERPRINT: &str = ", #fingerprint = :fingerprint";

/// Removes attributes that an earlier use of the key left. Follows [`ACQUIRE`].
pub(crate) const REMOVE_RECORD: &str = " REMOVE #record, #completed, #reason";

/// Adds the entry to the index for operators.
pub(crate) const SET_LISTED: &str = ", #listed = :listed";

/// The entry is absent or has expired.
pub(crate) const ABSENT_OR_EXPIRED: &str = "attribute_not_exists(#id) OR #expires <= :passed";

/// This token holds the entry, which has not expired.
pub(crate) const IS_HOLDER: &str =
    "#status = :in_progress AND #token = :token AND #expires > :passed";

/// This token holds the entry, and the write does not shorten its lease.
///
/// The service may apply a write after a later renewal. Such a write fails this condition.
pub(crate) const CAN_EXTEND: &str = "#status = :in_progress AND #token = :token AND #expires > :passed \
    AND #lease_ends <= :lease_ends";

/// This token holds the entry, and its lease expires at the time that the caller has seen.
///
/// Only such a write may shorten a lease. If the service applies it after a later renewal, the time is another one.
pub(crate) const CAN_SHORTEN: &str = "#status = :in_progress AND #token = :token AND #expires > :passed \
    AND #lease_ends = :seen_lease_ends";

/// This token holds the first generation of the entry.
pub(crate) const IS_FIRST_HOLDER: &str =
    "#status = :in_progress AND #token = :token AND #generation = :one";

/// Extends the lease.
pub(crate) const RENEW: &str = "SET #lease_ends = :lease_ends, #expires = :lease_ends + #orphan_retention, \
    #ttl = :ttl + #orphan_retention_seconds";

/// Turns the lease of a takeover into an orphan without a holder, which begins now.
///
/// Removes `granted`, so that a later acquire counts as another grant.
pub(crate) const RELEASE_AS_ORPHAN: &str = "SET #lease_ends = :passed, #expires = :now + #orphan_retention, #ttl = :ttl + #orphan_retention_seconds \
    REMOVE #token, #granted";

/// The entry is absent, has expired, is held by this token, or has no holder.
pub(crate) const CAN_COMPLETE: &str = "attribute_not_exists(#id) OR #expires <= :passed \
    OR (#status = :in_progress AND (#token = :token OR attribute_not_exists(#token)))";

/// Stores the record and ends the lease. [`LIST_COMPLETED`] or [`LEAVE_INDEX`] follows.
pub(crate) const COMPLETE: &str = "SET #status = :completed, #token = :token, #fingerprint = :fingerprint, \
    #generation = if_not_exists(#grants, :generation), #created = if_not_exists(#since, :now), #completed = :now, \
    #expires = :expires, #ttl = :ttl, #record = :record";

/// Lists a completed entry by its expiry, and removes the attributes of the lease. Follows [`COMPLETE`] and
/// [`RESOLVE_AS_COMPLETED`].
///
/// The index has neither the record nor `completed`. The beginning of the record shows if a version can read it.
pub(crate) const LIST_COMPLETED: &str = ", #listed = :listed, #since = :expires, #lease_ends = :now, #reason = :beginning \
    REMOVE #grants, #granted, #orphan_retention, #orphan_retention_seconds";

/// Removes a completed entry from the index, and the attributes of the lease. Follows [`COMPLETE`] and
/// [`RESOLVE_AS_COMPLETED`].
pub(crate) const LEAVE_INDEX: &str = " REMOVE #listed, #since, #reason, #grants, #granted, \
    #orphan_retention, #orphan_retention_seconds";

/// Like [`COMPLETE`], but for a record that needs an operator's attention.
///
/// The index lists the entry as of now, and the attributes that an operator needs for a decision remain.
pub(crate) const COMPLETE_NEEDS_ATTENTION: &str = "SET #status = :needs_attention, #token = :token, #fingerprint = :fingerprint, \
    #generation = if_not_exists(#grants, :generation), #created = if_not_exists(#since, :now), #completed = :now, \
    #since = :now, #lease_ends = if_not_exists(#lease_ends, :now), \
    #owner = if_not_exists(#owner, :unknown), #operation = if_not_exists(#operation, :unknown), \
    #reason = :reason, #expires = :expires, #ttl = :ttl, #record = :record";

/// Removes the attributes of the lease. Follows [`COMPLETE_NEEDS_ATTENTION`] and [`RESOLVE_AS_NEEDS_ATTENTION`].
pub(crate) const REMOVE_LEASE: &str = " REMOVE #grants, #granted";

/// Like [`REMOVE_LEASE`], for a process without an index. Also removes the entry from the index of the process that acquired
/// the lease, which would list the entry as an orphan.
pub(crate) const REMOVE_LEASE_AND_LISTING: &str = " REMOVE #grants, #granted, #listed";

/// Turns an entry into an orphan that begins now, with the same generation, under a token that no execution has.
///
/// [`REMOVE_OUTCOME`] follows, and removes `granted`, so that the next acquire counts as another grant.
pub(crate) const RESOLVE_AS_ORPHAN: &str = "SET #status = :in_progress, #token = :new_token, #lease_ends = :passed, \
    #expires = :now + if_not_exists(#orphan_retention, :orphan_retention), #ttl = :ttl + if_not_exists(#orphan_retention_seconds, :orphan_retention_seconds), \
    #grants = #generation, #since = #created";

/// Removes the record and the last grant. Follows [`RESOLVE_AS_ORPHAN`].
pub(crate) const REMOVE_OUTCOME: &str = " REMOVE #record, #completed, #reason, #granted";

/// Stores the record of an operator. [`LIST_COMPLETED`] or [`LEAVE_INDEX`] follows.
pub(crate) const RESOLVE_AS_COMPLETED: &str = "SET #status = :completed, #token = :new_token, #completed = :now, \
    #expires = :expires, #ttl = :ttl, #record = :record";

/// Stores a record that needs attention, and retains the attributes that an operator needs for the next decision.
pub(crate) const RESOLVE_AS_NEEDS_ATTENTION: &str = "SET #status = :needs_attention, #token = :new_token, #completed = :now, \
    #since = :now, #reason = :reason, #expires = :expires, #ttl = :ttl, #record = :record";

/// Returns the attribute names for the placeholders in the expressions. The service rejects names that no expression uses.
pub(crate) fn attribute_names(token: &Token, expressions: &[&str]) -> HashMap<String, String> {
    let words = expressions.iter().flat_map(|it| {
        it.split(|c: char| !(c.is_ascii_lowercase() || c == '_' || c == '#'))
            .filter(|word| word.starts_with('#'))
    });
    words
        .map(|word| {
            let name = match &word[1..] {
                "this_token" => token_attribute(token),
                name => name.to_owned(),
            };
            (word.to_owned(), name)
        })
        .collect()
}

/// Returns the value of `granted` that marks this token as the one counted last.
pub(crate) fn granted_value(token: &Token) -> AttributeValue {
    AttributeValue::M(HashMap::from([(token_attribute(token), n(0))]))
}

/// Returns the name of the token's attribute within `granted`: the token in hexadecimal.
fn token_attribute(token: &Token) -> String {
    format!("{:032x}", u128::from_be_bytes(*token.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // F-178
    #[test]
    fn attribute_names_match_placeholders() {
        const TAKEN: &str = "if_not_exists(#granted.#this_token, :one)";
        let token = Token::from_bytes([0xa5; 16]);
        let names = attribute_names(&token, &[IS_HOLDER, RELEASE_AS_ORPHAN, TAKEN]);
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort();
        let token_name = "a5".repeat(16);
        let expected = [
            ("#expires", "expires"),
            ("#granted", "granted"),
            ("#lease_ends", "lease_ends"),
            ("#orphan_retention", "orphan_retention"),
            ("#orphan_retention_seconds", "orphan_retention_seconds"),
            ("#status", "status"),
            ("#this_token", token_name.as_str()),
            ("#token", "token"),
            ("#ttl", "ttl"),
        ];
        assert_eq!(names, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
        let token = Token::from_bytes([0x05; 16]);
        assert_eq!(token_attribute(&token), "05".repeat(16));
    }
}
