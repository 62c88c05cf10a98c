//! Listings, read page by page from the index.

use std::collections::HashSet;

use aws_sdk_dynamodb::types::{AttributeValue, Select};
use tower_idempotency::{
    inspect::{Count, InspectError, InspectErrorKind, Page, PageToken, Query, State},
    store::KeyId,
};

use super::{entry, status_of};
use crate::{
    error::DynamoDbError,
    item::{INDEX, Item, binary, index_partition, n, s},
    table_client::TableClient,
};

/// Position in the index: after this item of a partition, or at the beginning of the partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    shard: u16,
    after: Option<(u64, [u8; 32])>,
}

/// The maximum number of calls for a page, in addition to one for each partition.
const EXTRA_CALLS: u16 = 8;

/// The maximum number of items that a call examines for a filter.
const MAX_EXAMINED: u16 = 250;

impl TableClient {
    pub(super) async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        let store = format!("dynamodb {}", self.table);
        let mut position = match query.page() {
            None => Position {
                shard: 0,
                after: None,
            },
            // A store with more partitions may have created the token.
            Some(page) => Position::parse(page.position(&store, query)?)
                .filter(|position| position.shard < self.options.shards)
                .ok_or_else(|| InspectError::new(InspectErrorKind::InvalidPage))?,
        };
        let status = status_of(query.state());
        let limit = usize::from(query.limit());
        // An entry that changes between two calls may move to a later position.
        let mut listed = HashSet::new();
        let mut entries = Vec::new();
        let (mut calls, max_calls) = (0, EXTRA_CALLS.saturating_add(self.options.shards));
        while position.shard < self.options.shards {
            let is_full = entries.len() >= limit;
            if is_full || calls >= max_calls {
                let next = PageToken::new(&store, query, &position.to_bytes());
                return Ok(Page::new(entries, Some(next)));
            }
            calls += 1;
            let (items, next) = self.query_index(position, query).await?;
            let moment = self.options.clock.read();
            let mut rest = None;
            for (at, item) in items.iter().enumerate() {
                let id = key_id(item);
                let Some(entry) = entry::entry_with_status(id, item, status, moment) else {
                    continue;
                };
                if !query.matches(&entry) || !listed.insert(id) {
                    continue;
                }
                entries.push(entry);
                if entries.len() == limit && at + 1 < items.len() {
                    rest = Some(Position::after(position.shard, item));
                    break;
                }
            }
            position = rest.or(next).unwrap_or(Position {
                shard: position.shard + 1,
                after: None,
            });
        }
        Ok(Page::new(entries, None))
    }

    /// Returns items of a partition, and the position after them if there may be more.
    ///
    /// The range key of completed items is their expiry. Expired items are not read, although the service deletes them up to days
    /// late.
    async fn query_index(
        &self,
        position: Position,
        query: &Query,
    ) -> Result<(Vec<Item>, Option<Position>), InspectError> {
        let partition = index_partition(status_of(query.state()), position.shard);
        let earliest = self.earliest_expiry(position, query.state());
        // Examines more items than fit in the page only if the filter may reject some.
        let is_filtered = query.state() == State::Orphaned
            || query.older_than().is_some()
            || query.operation().is_some()
            || query.owner().is_some()
            || query.id_prefix().is_some();
        let examined = if is_filtered {
            query.limit().max(MAX_EXAMINED)
        } else {
            query.limit()
        };
        let mut request = self
            .admin_client
            .query()
            .table_name(&self.table)
            .index_name(INDEX)
            .key_condition_expression(match earliest {
                Some(_) => "#listed = :listed AND #since >= :earliest",
                None => "#listed = :listed",
            })
            .expression_attribute_names("#listed", "listed")
            .expression_attribute_values(":listed", s(&partition))
            .limit(i32::from(examined))
            .set_exclusive_start_key(position.start_key(&partition));
        if let Some(earliest) = earliest {
            request = request
                .expression_attribute_names("#since", "since")
                .expression_attribute_values(":earliest", n(earliest));
        }
        let page = Box::pin(request.send()).await;
        let page = page.map_err(|error| {
            let error = DynamoDbError::from_item_call(&error);
            match position.after {
                // The service rejects a position that no item can have.
                Some(_) if error.is_refused_value() => {
                    InspectError::new(InspectErrorKind::InvalidPage)
                }
                _ => error.into(),
            }
        })?;
        let last = page.last_evaluated_key.filter(|key| !key.is_empty());
        let next = last.map(|key| Position::after(position.shard, &key));
        Ok((page.items.unwrap_or_default(), next))
    }

    /// Returns the earliest expiry of the items to read, or `None` unless they are completed.
    fn earliest_expiry(&self, position: Position, state: State) -> Option<u64> {
        if state != State::Completed {
            return None;
        }
        let earliest = self.options.clock.read().passed.saturating_add(1);
        // The service rejects a position before this time. Its entry may have expired since.
        let after = position.after.map_or(earliest, |(since, _)| since);
        Some(after.min(earliest))
    }

    /// Counts the entries in a state, up to `limit`. The service returns numbers, and no items.
    ///
    /// Reads each partition from its newest item on. Expired orphans are among the oldest items, because the service deletes
    /// them up to days late. Examines an equal share of the items in each partition.
    pub(super) async fn count(&self, state: State, limit: u32) -> Result<Count, InspectError> {
        let (mut value, mut is_exact) = (0, true);
        let (limit, moment) = (u64::from(limit), self.options.clock.read());
        let filter = match state {
            State::InProgress => "#expires > :passed AND #lease_ends > :passed",
            State::Orphaned => "#expires > :passed AND #lease_ends <= :passed",
            _ => "#expires > :passed",
        };
        let key_condition = match state {
            State::Completed => "#listed = :listed AND #since > :passed",
            _ => "#listed = :listed",
        };
        for shard in 0..self.options.shards {
            let partition = index_partition(status_of(state), shard);
            let share = limit.saturating_mul(4) / u64::from(self.options.shards);
            let max_examined = share.saturating_add(MAX_EXAMINED.into());
            let (mut start_key, mut examined) = (None, 0);
            loop {
                if examined > max_examined {
                    is_exact = false;
                    break;
                }
                // One item above the limit shows that the count is incomplete. Requests more than that, because items may not
                // match the filter.
                let rest = (limit - value)
                    .max(MAX_EXAMINED.into())
                    .min(max_examined - examined)
                    + 1;
                let rest = i32::try_from(rest).unwrap_or(i32::MAX);
                let mut request = self
                    .admin_client
                    .query()
                    .table_name(&self.table)
                    .index_name(INDEX)
                    .select(Select::Count)
                    .scan_index_forward(false)
                    .key_condition_expression(key_condition)
                    .filter_expression(filter)
                    .expression_attribute_names("#listed", "listed")
                    .expression_attribute_names("#expires", "expires")
                    .expression_attribute_values(":listed", s(&partition))
                    .expression_attribute_values(":passed", n(moment.passed))
                    .limit(rest)
                    .set_exclusive_start_key(start_key);
                for name in ["lease_ends", "since"] {
                    let placeholder = format!("#{name}");
                    if filter.contains(&placeholder) || key_condition.contains(&placeholder) {
                        request = request.expression_attribute_names(placeholder, name);
                    }
                }
                let page = Box::pin(request.send()).await;
                let page = page.map_err(|error| DynamoDbError::from_item_call(&error))?;
                value += u64::try_from(page.count).unwrap_or_default();
                examined += u64::try_from(page.scanned_count).unwrap_or_default();
                if value > limit {
                    return Ok(Count::new(limit, false));
                }
                start_key = page.last_evaluated_key.filter(|key| !key.is_empty());
                if start_key.is_none() {
                    break;
                }
            }
        }
        Ok(Count::new(value, is_exact))
    }
}

impl Position {
    fn after(shard: u16, item: &Item) -> Self {
        let since = match item.get("since") {
            Some(AttributeValue::N(digits)) => digits.parse().unwrap_or_default(),
            _ => 0,
        };
        Self {
            shard,
            after: Some((since, *key_id(item).as_bytes())),
        }
    }

    fn start_key(self, partition: &str) -> Option<Item> {
        let (since, id) = self.after?;
        Some(Item::from([
            ("id".to_owned(), binary(id)),
            ("listed".to_owned(), s(partition)),
            ("since".to_owned(), n(since)),
        ]))
    }

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.shard.to_be_bytes().to_vec();
        if let Some((since, id)) = self.after {
            bytes.extend(since.to_be_bytes());
            bytes.extend(id);
        }
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (shard, rest) = bytes.split_first_chunk()?;
        let after = match rest {
            [] => None,
            _ => {
                let (since, id) = rest.split_first_chunk()?;
                Some((u64::from_be_bytes(*since), id.try_into().ok()?))
            }
        };
        Some(Self {
            shard: u16::from_be_bytes(*shard),
            after,
        })
    }
}

/// Returns the ID of an item. An ID of another length, which this store never writes, is cut or padded.
fn key_id(item: &Item) -> KeyId {
    let mut id = [0; 32];
    if let Some(AttributeValue::B(bytes)) = item.get("id") {
        let length = bytes.as_ref().len().min(id.len());
        id[..length].copy_from_slice(&bytes.as_ref()[..length]);
    }
    KeyId::from_bytes(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_survives_its_byte_form() {
        for after in [None, Some((u64::MAX, [7; 32])), Some((0, [0; 32]))] {
            let position = Position { shard: 300, after };
            assert_eq!(Position::parse(&position.to_bytes()), Some(position));
        }
        for bytes in [&b""[..], b"1", b"123", &[0; 41], &[0; 43]] {
            assert_eq!(Position::parse(bytes), None, "{} bytes", bytes.len());
        }
    }
}
