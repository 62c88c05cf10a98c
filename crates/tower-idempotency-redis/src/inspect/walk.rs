//! A walk through the members of the indexes.

use std::{collections::VecDeque, ops::Range, time::Duration};

use futures_util::future::{join_all, try_join_all};
use redis::Value;
use tower_idempotency::{
    inspect::{Entry, IdPrefix, State},
    store::{KeyId, StoreError},
};

use super::entry::RecordPart;
use crate::{
    index::Indexes,
    store::{Inner, run_by_hash, unexpected_reply},
};

/// A position in the indexes: after this member of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) index: u16,
    score: u64,
    id: [u8; 32],
}

/// A walk through the entries of one state, and of others in the same indexes.
pub(super) struct Walk<'a> {
    inner: &'a Inner,
    indexes: &'a Indexes,
    state: State,
    part: RecordPart,
    prefix: Option<IdPrefix>,
    /// Members that were read from the indexes and not yet returned.
    queue: VecDeque<Position>,
    /// After the members of the queue. `None` after the last member of the last index.
    rest: Option<Position>,
    /// Number of indexes that are examined at the same time.
    width: u16,
    examined: usize,
}

impl Position {
    pub(super) const FIRST: Self = Self {
        index: 0,
        score: 0,
        id: [0; 32],
    };

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.index.to_be_bytes().to_vec();
        bytes.extend(self.score.to_be_bytes());
        bytes.extend(self.id);
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (index, rest) = bytes.split_first_chunk()?;
        let (score, rest) = rest.split_first_chunk()?;
        Some(Self {
            index: u16::from_be_bytes(*index),
            score: u64::from_be_bytes(*score),
            id: rest.try_into().ok()?,
        })
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        inner: &'a Inner,
        indexes: &'a Indexes,
        state: State,
        part: RecordPart,
        start: Position,
    ) -> Self {
        Self {
            inner,
            indexes,
            state,
            part,
            prefix: None,
            queue: VecDeque::new(),
            rest: Some(start),
            width: MIN_WIDTH,
            examined: 0,
        }
    }

    /// Leaves out entries whose ID does not begin with these digits.
    pub(super) fn select(&mut self, prefix: IdPrefix) {
        self.prefix = Some(prefix);
        if let Some(id) = prefix.to_key_id() {
            // Its index is known, and so are the members before and after it.
            let index = self.indexes.number_of(&self.inner.key(&id));
            match self.rest {
                Some(rest) if rest.index > index => self.rest = None,
                Some(rest) if rest.index < index => {
                    self.rest = Some(Position {
                        index,
                        ..Position::FIRST
                    });
                }
                _ => {}
            }
        }
    }

    /// Returns the number of members that were read from the indexes.
    pub(super) fn examined(&self) -> usize {
        self.examined
    }

    pub(super) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn is_finished(&self) -> bool {
        self.queue.is_empty() && self.rest.is_none()
    }

    /// Returns the position after all members that were returned, if the queue is empty.
    pub(super) fn position(&self) -> Position {
        self.rest.unwrap_or(Position {
            index: self.indexes.len() - 1,
            score: u64::MAX,
            id: [0xff; 32],
        })
    }

    /// Returns at most `count` members with their entries. Removes a member from the index if its entry no longer belongs
    /// there. Returns no member if none in a batch matches.
    pub(super) async fn next(
        &mut self,
        count: usize,
    ) -> Result<Vec<(Position, Option<Entry>)>, StoreError> {
        if self.queue.is_empty() {
            self.fill(count).await?;
        }
        let members: Vec<_> = self.queue.drain(..count.min(self.queue.len())).collect();
        let (inner, state, part) = (self.inner, self.state, self.part);
        // The entries of an index are in one slot.
        let slots = members.chunk_by(|one, other| one.index == other.index);
        let read = slots.map(async |members| {
            let ids: Vec<_> = members.iter().map(|it| KeyId::from_bytes(it.id)).collect();
            inner.read_all(&ids, part).await
        });
        let entries = try_join_all(read).await?.into_iter().flatten();
        let pairs = members.iter().zip(entries).map(async |(member, raw)| {
            let id = KeyId::from_bytes(member.id);
            let raw = raw.filter(|raw| raw.is_in_index(state));
            if raw.is_none() {
                inner.reindex(&id).await;
            }
            (*member, raw.map(|raw| raw.entry(id)))
        });
        Ok(join_all(pairs).await)
    }

    /// Reads members of the next indexes.
    async fn fill(&mut self, count: usize) -> Result<(), StoreError> {
        let Some(rest) = self.rest else {
            return Ok(());
        };
        let is_whole_id = self.prefix.is_some_and(|it| it.to_key_id().is_some());
        let (width, end) = if is_whole_id {
            (1, rest.index + 1)
        } else {
            (self.width, self.indexes.len())
        };
        let batch = if self.examined == 0 { count } else { BATCH };
        let numbers = rest.index..rest.index.saturating_add(width).min(end);
        let (this, mut last) = (&*self, numbers.end);
        let mut present = this.present(numbers).await?;
        if let Some(&next) = present.get(MAX_READ) {
            present.truncate(MAX_READ);
            last = next;
        }
        let read = present.into_iter().map(async |index| {
            let after = if index == rest.index {
                rest
            } else {
                Position {
                    index,
                    ..Position::FIRST
                }
            };
            this.members(after, batch).await
        });
        let members = try_join_all(read).await?;
        self.rest = (last < end).then_some(Position {
            index: last,
            ..Position::FIRST
        });
        for (members, is_last) in members {
            self.examined += members.len();
            let end = members.last().copied();
            let matching = members.into_iter().filter(|member| {
                let id = KeyId::from_bytes(member.id);
                self.prefix.is_none_or(|prefix| prefix.matches(&id))
            });
            self.queue.extend(matching);
            // The rest of this index comes before the next index.
            if let (false, Some(end)) = (is_last, end) {
                self.rest = Some(end);
                break;
            }
        }
        self.width = self.width.saturating_mul(2).min(MAX_WIDTH);
        Ok(())
    }

    /// Returns the numbers of the indexes that have members of the state. Most slots of a cluster have none.
    async fn present(&self, numbers: Range<u16>) -> Result<Vec<u16>, StoreError> {
        if self.indexes.len() == 1 {
            return Ok(numbers.collect());
        }
        let keys: Vec<_> = numbers
            .map(|number| (number, self.key_of(number)))
            .collect();
        let chunks = keys.chunks(INDEXES_IN_CALL);
        let present = chunks.map(|chunk| self.present_of(chunk.iter().collect()));
        Ok(try_join_all(present).await?.concat())
    }

    /// Like [`present`](Self::present), for indexes that one script may examine. A script runs on the node of the first index,
    /// and examines the indexes of that node. The next script does the same for the rest. If a script can examine its first
    /// index only, each of the others gets an `EXISTS`. An index that exists counts, even if it only has members of other
    /// states.
    async fn present_of(&self, mut keys: Vec<&(u16, String)>) -> Result<Vec<u16>, StoreError> {
        let mut present = Vec::new();
        while !keys.is_empty() {
            let found = self.examine(&keys).await?;
            let is_first_alone = found.iter().filter(|it| it.is_some()).count() <= 1;
            let mut elsewhere = Vec::new();
            for (key, is_present) in keys.into_iter().zip(found) {
                match is_present {
                    Some(true) => present.push(key.0),
                    Some(false) => {}
                    None => elsewhere.push(key),
                }
            }
            keys = elsewhere;
            if is_first_alone {
                // The server refuses the keys of other slots, or a slot is being moved.
                let single = keys.drain(..).map(async |(number, key)| {
                    let is_present = self.is_present(key).await?;
                    Ok::<_, StoreError>(is_present.then_some(*number))
                });
                present.extend(try_join_all(single).await?.into_iter().flatten());
            }
        }
        present.sort_unstable();
        Ok(present)
    }

    /// Returns `true` for each index that has members of the state, and `None` for one that the node of the first index does not
    /// have.
    async fn examine(&self, keys: &[&(u16, String)]) -> Result<Vec<Option<bool>>, StoreError> {
        let keys: Vec<_> = keys.iter().map(|(_, key)| key.as_str()).collect();
        let script = &self.inner.scripts.operators.present;
        let (link, deadline) = (&self.inner.acquire_link, self.inner.deadline());
        let (kind, margin) = self.members_to_read();
        let arguments = (kind, margin, &keys);
        let reply = run_by_hash(link, deadline, script, &keys[..1], &arguments).await;
        match reply.map_err(StoreError::backend)? {
            Value::BulkString(found) if found.len() == keys.len() => {
                let exists = |digit: u8| match digit {
                    ABSENT => Some(false),
                    PRESENT => Some(true),
                    _ => None,
                };
                Ok(found.into_iter().map(exists).collect())
            }
            _ => Err(unexpected_reply("a digit for each index")),
        }
    }

    async fn is_present(&self, key: &str) -> Result<bool, StoreError> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(key);
        let (link, deadline) = (&self.inner.acquire_link, self.inner.deadline());
        let reply = link.send(deadline, &exists).await;
        Ok(reply.map_err(StoreError::backend)? == Value::Int(1))
    }

    /// Returns the key of an index of this number, for the state of the walk.
    fn key_of(&self, index: u16) -> String {
        let key = self.indexes.key(index, self.state);
        key.expect("the abilities of the store contain the state")
    }

    /// Returns the kind of members that the scripts read, and the tolerance of the present time in milliseconds.
    fn members_to_read(&self) -> (&'static str, u64) {
        let kind = match self.state {
            State::InProgress | State::Completed => "live",
            State::Orphaned => "expired",
            _ => "any",
        };
        // The clocks of the nodes of a cluster differ.
        let margin = if self.inner.acquire_link.is_cluster() {
            MAX_SKEW.as_millis() as u64
        } else {
            0
        };
        (kind, margin)
    }

    /// Reads members of an index after a position. The second value is `true` if there are no more.
    async fn members(
        &self,
        after: Position,
        batch: usize,
    ) -> Result<(Vec<Position>, bool), StoreError> {
        let (kind, margin) = self.members_to_read();
        let (key, script) = (self.key_of(after.index), &self.inner.scripts.operators.page);
        let (link, deadline) = (&self.inner.acquire_link, self.inner.deadline());
        let (mut id, mut score) = (after.id.to_vec(), after.score);
        loop {
            let arguments = (kind, margin, score, &*id, batch);
            let reply = run_by_hash(link, deadline, script, &[&key], &arguments).await;
            let found = parse_members(reply.map_err(StoreError::backend)?)?;
            let is_last = found.len() < batch;
            let members = found.iter().filter_map(|(id, score)| {
                let (id, index) = (id.as_slice().try_into().ok()?, after.index);
                Some(Position {
                    index,
                    score: *score,
                    id,
                })
            });
            let members: Vec<_> = members.collect();
            match found.last() {
                // No member of the batch is an ID: another program wrote them.
                Some(last) if members.is_empty() && !is_last => (id, score) = last.clone(),
                _ => return Ok((members, is_last)),
            }
        }
    }
}

/// Parses members with their scores, in the form of each protocol.
fn parse_members(reply: Value) -> Result<Vec<(Vec<u8>, u64)>, StoreError> {
    let members: Result<Vec<(Vec<u8>, f64)>, _> = redis::from_redis_value(reply);
    let members = members.map_err(|_| unexpected_reply("members with scores"))?;
    Ok(members
        .into_iter()
        .map(|(id, score)| (id, score.max(0.0) as u64))
        .collect())
}

/// Maximum difference between the clocks of two nodes.
const MAX_SKEW: Duration = Duration::from_secs(10);
/// Number of members that a call reads from an index, after the first call.
const BATCH: usize = 500;
/// Number of indexes of a cluster that the first batch examines. Each batch doubles it, up to `MAX_WIDTH`.
const MIN_WIDTH: u16 = 32;
const MAX_WIDTH: u16 = 2048;
/// Maximum number of indexes that are read at the same time.
const MAX_READ: usize = 512;
/// Number of indexes that a call examines: some hundred microseconds of the server's time.
const INDEXES_IN_CALL: usize = 256;
// The digits of the reply of `scripts/present.lua`. An array of numbers takes the client longer to parse.
const ABSENT: u8 = b'0';
const PRESENT: u8 = b'1';

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_survives_its_byte_form() {
        for index in [0, 16_383, u16::MAX] {
            let position = Position {
                index,
                score: u64::MAX - 1,
                id: [7; 32],
            };
            assert_eq!(Position::parse(&position.to_bytes()), Some(position));
        }
        for bytes in [&[][..], &[0; 41], &[0; 43]] {
            assert_eq!(Position::parse(bytes), None, "{} bytes", bytes.len());
        }
    }
}
