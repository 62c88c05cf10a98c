//! Conditions and updates, each written once. `#name` stands for the attribute of that name, whatever words the service
//! reserves; but for `#mine`, which stands for the token, as it is named within `#granted`.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use tower_idempotency::store::Token;

use crate::item::n;

/// Absent; or a record that is over; or ours; or an orphan of the same request.
///
/// An orphan that is over is left to [`FORGOTTEN`]: its generations do not go on.
pub(crate) const FREE_OWN_OR_ORPHANED: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :over) \
    OR (#status = :in_progress AND #expires > :over \
        AND (#token = :token OR (#fingerprint = :fingerprint AND #lease_ends <= :over)))";

/// As above, under a policy that refuses orphans.
pub(crate) const FREE_OR_OWN: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :over) \
    OR (#status = :in_progress AND #expires > :over AND #token = :token)";

/// Takes the lease.
///
/// The generation goes up by one, unless this token was counted last: then `granted` has something of its name, which
/// counts as nothing. An update sees attributes as they were before it, and cannot say "if" in any other way.
/// `granted` is replaced as a whole, so that a token that was replaced is counted again, should it come back.
/// `grants` and `since` end with the record, so a later life of the key begins anew.
pub(crate) const TAKE: &str = "SET #status = :in_progress, #token = :token, #fingerprint = :fingerprint, \
    #lease_ends = :lease_ends, #expires = :expires, #ttl = :ttl, #keep = :keep, #keep_seconds = :keep_seconds, \
    #owner = :owner, #operation = :operation, \
    #created = if_not_exists(#since, :now), #since = if_not_exists(#since, :now), \
    #generation = if_not_exists(#granted.#mine, :one) + if_not_exists(#grants, :zero), \
    #grants = if_not_exists(#granted.#mine, :one) + if_not_exists(#grants, :zero), \
    #granted = :granted";

/// What an earlier life of the key left behind.
pub(crate) const WITHOUT_RECORD: &str = " REMOVE #record, #completed, #reason";

/// So that operators find it.
pub(crate) const LISTED: &str = ", #listed = :listed";

/// What is there counts no more, or nothing is there.
pub(crate) const FORGOTTEN: &str = "attribute_not_exists(#id) OR #expires <= :over";

pub(crate) const HELD: &str = "#status = :in_progress AND #token = :token AND #expires > :over";

pub(crate) const HELD_FIRST: &str =
    "#status = :in_progress AND #token = :token AND #generation = :one";

pub(crate) const RENEW: &str = "SET #lease_ends = :lease_ends, #expires = :lease_ends + #keep, \
    #ttl = :ttl + #keep_seconds";

/// Leaves an orphan that nobody holds, since now: a second token of the same holder would be another grant.
pub(crate) const GIVE_BACK: &str = "SET #lease_ends = :over, #expires = :now + #keep, #ttl = :ttl + #keep_seconds \
    REMOVE #token, #granted";

/// Ours, or nobody's.
pub(crate) const MAY_COMPLETE: &str = "attribute_not_exists(#id) OR #expires <= :over \
    OR (#status = :in_progress AND (#token = :token OR attribute_not_exists(#token)))";

pub(crate) const COMPLETE: &str = "SET #status = :completed, #token = :token, #fingerprint = :fingerprint, \
    #generation = if_not_exists(#grants, :generation), #created = if_not_exists(#since, :now), #completed = :now, \
    #expires = :expires, #ttl = :ttl, #record = :record \
    REMOVE #listed, #since, #grants, #granted, #keep, #keep_seconds";

/// As [`COMPLETE`], of what somebody has to look at: the index goes on to show it, since now. What an operator's decision
/// needs stays.
pub(crate) const GIVE_UP: &str = "SET #status = :needs_attention, #token = :token, #fingerprint = :fingerprint, \
    #generation = if_not_exists(#grants, :generation), #created = if_not_exists(#since, :now), #completed = :now, \
    #since = :now, #lease_ends = if_not_exists(#lease_ends, :now), \
    #owner = if_not_exists(#owner, :nobody), #operation = if_not_exists(#operation, :nobody), \
    #reason = :reason, #expires = :expires, #ttl = :ttl, #record = :record";

/// The lease of [`GIVE_UP`] is over.
pub(crate) const WITHOUT_LEASE: &str = " REMOVE #grants, #granted";

/// Needs attention, and is what the operator has looked at.
pub(crate) const UNRESOLVED: &str =
    "#status = :needs_attention AND #generation = :generation AND #since = :since";

/// Leaves an orphan that nobody holds, since now, of the generation it had.
pub(crate) const RETRY: &str = "SET #status = :in_progress, #lease_ends = :over, \
    #expires = :now + if_not_exists(#keep, :keep), #ttl = :ttl + if_not_exists(#keep_seconds, :keep_seconds), \
    #grants = #generation, #since = #created, #listed = :listed \
    REMOVE #token, #record, #completed, #reason";

/// Puts an answer in place of what needed attention.
pub(crate) const ANSWER: &str = "SET #status = :completed, #completed = :now, #expires = :expires, #ttl = :ttl, \
    #record = :record REMOVE #listed, #since, #reason, #keep, #keep_seconds";

/// The attributes that expressions name: the service refuses names that none of them uses.
pub(crate) fn names(token: &Token, expressions: &[&str]) -> HashMap<String, String> {
    let words = expressions.iter().flat_map(|it| {
        it.split(|c: char| !(c.is_ascii_lowercase() || c == '_' || c == '#'))
            .filter(|word| word.starts_with('#'))
    });
    words
        .map(|word| {
            let name = match &word[1..] {
                "mine" => mine(token),
                name => name.to_owned(),
            };
            (word.to_owned(), name)
        })
        .collect()
}

/// Says that this token, and no other, has been counted.
pub(crate) fn granted(token: &Token) -> AttributeValue {
    AttributeValue::M(HashMap::from([(mine(token), n(0))]))
}

fn mine(token: &Token) -> String {
    let mut name = String::new();
    for byte in token.as_bytes() {
        for digit in [byte >> 4, byte & 15] {
            name.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_in_an_expression_is_told_and_no_other() {
        const TAKEN: &str = "if_not_exists(#granted.#mine, :one)";
        let token = Token::from_bytes([0xa5; 16]);
        let mut told: Vec<_> = names(&token, &[HELD, GIVE_BACK, TAKEN])
            .into_iter()
            .collect();
        told.sort();
        let mine = "a5".repeat(16);
        let expected = [
            ("#expires", "expires"),
            ("#granted", "granted"),
            ("#keep", "keep"),
            ("#keep_seconds", "keep_seconds"),
            ("#lease_ends", "lease_ends"),
            ("#mine", mine.as_str()),
            ("#status", "status"),
            ("#token", "token"),
            ("#ttl", "ttl"),
        ];
        assert_eq!(told, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }
}
