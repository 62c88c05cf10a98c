//! Decisions of operators: one read, and one write under the condition that nothing has changed since.

use aws_sdk_dynamodb::types::AttributeValue;
use tower_idempotency::{
    NeedsAttention,
    inspect::{
        DEFAULT_ORPHAN_RETENTION, Entry, InspectError, InspectErrorKind, Resolution,
        ResolveOutcome, Seen, State,
    },
    store::{KeyId, Token},
};

use super::entry::{VERSIONED, entry_from_item};
use crate::{
    clock::{Moment, ceil_seconds},
    expression,
    item::{
        COMPLETED, IN_PROGRESS, Item, NEEDS_ATTENTION, beginning, binary, index_partition, n, s,
    },
    table_client::TableClient,
    writes::{Attempts, RETURN_ALL_NEW, WriteOutcome},
};

type Values = Vec<(&'static str, AttributeValue)>;

impl TableClient {
    pub(super) async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        let id = seen.id();
        let changed = |entry: Option<Entry>| Ok(ResolveOutcome::Changed(entry.map(Box::new)));
        // A clock that is ahead sees live leases as orphans, and one that is behind stores records that have expired.
        let Some(item) = self.read_and_compare_clocks(id).await? else {
            return changed(None);
        };
        let moment = self.options.clock.read();
        match entry_from_item(*id, &item, moment) {
            Some(entry) if entry.seen() == seen => {}
            entry => return changed(entry),
        }
        let (condition, mut values) = unchanged_condition(&item, seen.state(), moment);
        // A repeated attempt of the SDK recognizes the update of an earlier one by this token.
        let token = match resolution {
            Resolution::Retry => Token::retry_allowed()?,
            _ => Token::random()?,
        };
        let is_deletion = matches!(resolution, Resolution::Free | Resolution::DeleteRecord);
        let written = if is_deletion {
            // Sent once. After a lost reply, a second attempt would find no item. It could not distinguish the deletion by
            // the first attempt from another one.
            self.delete(id, &token, &condition, values, Attempts::One)
                .await?
        } else {
            let update =
                self.resolution_update(id, &item, resolution, &token, moment, &mut values)?;
            let all_new = RETURN_ALL_NEW;
            self.update(id, &token, &condition, &update, all_new, values)
                .await?
        };
        let present = |item: &Item| entry_from_item(*id, item, moment).map(Box::new);
        Ok(match written {
            WriteOutcome::Applied(_) if is_deletion => ResolveOutcome::Applied(None),
            WriteOutcome::Applied(item) => ResolveOutcome::Applied(present(&item)),
            WriteOutcome::ConditionFailed(item) => match self.conflicting_item(item, id).await? {
                Some(item) if item.get("token") == Some(&binary(*token.as_bytes())) => {
                    ResolveOutcome::Applied(present(&item))
                }
                item => ResolveOutcome::Changed(item.and_then(|item| present(&item))),
            },
        })
    }

    /// Returns the update expression of a resolution that does not delete the item, and adds its values.
    fn resolution_update(
        &self,
        id: &KeyId,
        item: &Item,
        resolution: &Resolution,
        token: &Token,
        moment: Moment,
        values: &mut Values,
    ) -> Result<String, InspectError> {
        values.extend([
            (":new_token", binary(*token.as_bytes())),
            (":now", n(moment.now)),
        ]);
        let Some((record, retention)) = resolution.record(id) else {
            let orphan_retention = DEFAULT_ORPHAN_RETENTION.as_millis();
            values.extend([
                (":in_progress", s(IN_PROGRESS)),
                (":ttl", n(moment.ttl(moment.now))),
                (":orphan_retention", n(orphan_retention)),
                (
                    ":orphan_retention_seconds",
                    n(ceil_seconds(orphan_retention)),
                ),
            ]);
            let listed = self.add_listing(IN_PROGRESS, id, item, values);
            return Ok([
                expression::RESOLVE_AS_ORPHAN,
                listed,
                expression::REMOVE_OUTCOME,
            ]
            .concat());
        };
        let limit = self.options.record_limit;
        if record.len() > limit {
            return Err(InspectError::new(InspectErrorKind::RecordTooLarge {
                limit,
            }));
        }
        let expires = moment.now.saturating_add(retention.as_millis());
        let attention = NeedsAttention::in_record(&record);
        let beginning = beginning(&record);
        values.extend([
            (":expires", n(expires)),
            (":ttl", n(moment.ttl(expires))),
            (":record", binary(record)),
        ]);
        Ok(match attention {
            Some(attention) => {
                values.extend([
                    (":needs_attention", s(NEEDS_ATTENTION)),
                    (":reason", s(attention.code())),
                ]);
                let listed = self.add_listing(NEEDS_ATTENTION, id, item, values);
                let update = expression::RESOLVE_AS_NEEDS_ATTENTION;
                [update, listed, expression::REMOVE_LEASE].concat()
            }
            None => {
                values.push((":completed", s(COMPLETED)));
                let listed = match self.options.has_completed_index {
                    true => self.partition_of(COMPLETED, id, item),
                    false => None,
                };
                let index = match listed {
                    Some(listed) => {
                        values.extend([(":listed", s(listed)), (":beginning", beginning)]);
                        expression::LIST_COMPLETED
                    }
                    None => expression::LEAVE_INDEX,
                };
                [expression::RESOLVE_AS_COMPLETED, index].concat()
            }
        })
    }

    /// Adds the value of the index partition for this status, and returns the expression that lists the item there. Returns an
    /// empty expression if there is no index.
    fn add_listing(
        &self,
        status: &str,
        id: &KeyId,
        item: &Item,
        values: &mut Values,
    ) -> &'static str {
        let Some(listed) = self.partition_of(status, id, item) else {
            return "";
        };
        values.push((":listed", s(listed)));
        expression::SET_LISTED
    }

    /// Returns the index partition for this status, with the same number as the present partition of the item. Returns `None`
    /// if there is no index.
    fn partition_of(&self, status: &str, id: &KeyId, item: &Item) -> Option<String> {
        let shard = match item.get("listed") {
            Some(AttributeValue::S(listed)) => {
                listed.split_once('#').and_then(|it| it.1.parse().ok())
            }
            _ => None,
        };
        match shard {
            Some(shard) => Some(index_partition(status, shard)),
            None => self.index_partition(status, id),
        }
    }
}

/// Returns the condition that the item has not changed since it was read, and its values.
///
/// Renewals may change the expiry of a lease. All other attributes from which the version is computed must be the same.
fn unchanged_condition(item: &Item, state: State, moment: Moment) -> (String, Values) {
    let mut condition = String::new();
    let mut values = Values::new();
    let mut add = |name: &'static str, placeholder: &'static str| {
        if !condition.is_empty() {
            condition.push_str(" AND ");
        }
        match item.get(name) {
            Some(value) => {
                condition.push_str(&format!("#{name} = {placeholder}"));
                values.push((placeholder, value.clone()));
            }
            None => condition.push_str(&format!("attribute_not_exists(#{name})")),
        }
    };
    if state == State::Unreadable {
        const PLACEHOLDERS: [&str; 9] = [":a", ":b", ":c", ":d", ":e", ":f", ":g", ":h", ":i"];
        for (name, placeholder) in VERSIONED.into_iter().zip(PLACEHOLDERS) {
            add(name, placeholder);
        }
        add("status", ":was_status");
        condition.push_str(" AND attribute_exists(#id)");
        return (condition, values);
    }
    add("status", ":was_status");
    add("generation", ":was_generation");
    add("token", ":was_token");
    match state {
        State::InProgress => condition.push_str(" AND #lease_ends > :passed"),
        State::Orphaned => {
            add("lease_ends", ":was_lease_ends");
            condition.push_str(" AND #expires > :passed");
        }
        _ => {
            add("completed", ":was_completed");
            condition.push_str(" AND #expires > :passed");
        }
    }
    values.push((":passed", n(moment.passed)));
    (condition, values)
}
