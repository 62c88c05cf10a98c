//! Operations for operators on the store for a single process.
//!
//! Leases and records have separate orders, so a listing of leases or orphans reads no records. Records that need attention
//! are stored for [`Ttl::MAX`](crate::store::Ttl::MAX), so a listing of them begins at the end of the order of each shard.

use std::{
    collections::HashSet,
    time::{Duration, SystemTime},
};

use bytes::Bytes;

use super::{
    Abilities, Count, DEFAULT_ORPHAN_RETENTION, Entry, EntryDetails, Inspect, InspectError, Page,
    PageToken, Query, Resolution, ResolveOutcome, Seen, State, Summary,
};
use crate::{
    record::NeedsAttention,
    store::{
        KeyId, MemoryStore, RUN_ONCE_OPERATION, StoreError, Token,
        memory::{Change, FIRST_LONGEST_DEADLINE, ListKind, ListPosition, Snapshot},
    },
};

impl Inspect for MemoryStore {
    fn abilities(&self) -> Abilities {
        if self.has_details() {
            Abilities::all()
        } else {
            Abilities::all().without_details()
        }
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.abilities().check(query)?;
        let moment = Moment::of(self);
        // A position is valid only in this store of this process.
        let store = format!("memory {:x}", self.instance());
        let mut position = match query.page() {
            Some(page) => parse_position(page.position(&store, query)?)
                .ok_or_else(|| InspectError::new(super::InspectErrorKind::InvalidPage))?,
            None => FIRST,
        };
        // An entry that is changed meanwhile may move to a later position.
        let mut listed = HashSet::new();
        let mut entries = Vec::new();
        let (mut examined, mut turn) = (0, Turn::default());
        loop {
            let (snapshots, next) = self.walk(query.state(), position, &moment);
            turn.after_shard(snapshots.len()).await;
            for snapshot in snapshots {
                let entry = moment.entry(&snapshot);
                examined += 1;
                let is_full = entries.len() == usize::from(query.limit());
                if is_full || examined > MAX_EXAMINED {
                    let next = format_position(snapshot.position);
                    let next = PageToken::new(&store, query, &next);
                    return Ok(Page::new(entries, Some(next)));
                }
                if query.matches(&entry) && listed.insert(*entry.id()) {
                    entries.push(entry);
                }
            }
            match next {
                Some(next) => position = next,
                None => return Ok(Page::new(entries, None)),
            }
        }
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        let moment = Moment::of(self);
        let snapshot = self.snapshot(id, moment.now);
        Ok(snapshot.map(|snapshot| {
            let mut details = EntryDetails::new(moment.entry(&snapshot));
            details.fingerprint = Some(snapshot.fingerprint);
            details.record = snapshot.record;
            details
        }))
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        let mut summary = Summary::default();
        for &state in State::ALL {
            if state != State::Unreadable {
                summary.set(state, self.count(state, limit).await);
            }
        }
        Ok(summary)
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        resolution.check(seen)?;
        let change = change(seen.id(), resolution)?;
        let moment = Moment::of(self);
        let is_as_seen = |snapshot: &Snapshot| moment.seen(snapshot) == *seen;
        let applied = self.change(seen.id(), is_as_seen, &change, moment.now)?;
        let snapshot = self.snapshot(seen.id(), moment.now);
        let entry = snapshot.map(|snapshot| Box::new(moment.entry(&snapshot)));
        Ok(if applied {
            ResolveOutcome::Applied(entry)
        } else {
            ResolveOutcome::Changed(entry)
        })
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        let max = usize::try_from(batch).unwrap_or(usize::MAX);
        let (now, mut turn) = (self.now(), Turn::default());
        let (mut shard, mut deleted) = (0, 0);
        while deleted < max {
            let most = DELETED_PER_LOCK.min(max - deleted);
            let Some(found) = self.delete_expired(shard, most, now) else {
                break;
            };
            deleted += found.entries;
            if found.is_exhausted {
                shard += 1;
            }
            // A deletion takes longer than reading an entry, also without the pages that it frees.
            turn.after_shard(found.entries * 4 + found.bytes / PAGE_BYTES)
                .await;
        }
        Ok(deleted as u64)
    }
}

impl MemoryStore {
    /// Returns entries that may have this state, from the position on, and the position after them.
    fn walk(
        &self,
        state: State,
        from: ListPosition,
        moment: &Moment,
    ) -> (Vec<Snapshot>, Option<ListPosition>) {
        let (kind, first_deadline) = match state {
            State::InProgress | State::Orphaned => (ListKind::Leases, 0),
            State::NeedsAttention => (ListKind::Records, FIRST_LONGEST_DEADLINE),
            State::Completed | State::Unreadable => (ListKind::Records, 0),
        };
        let from = if from.deadline < first_deadline {
            ListPosition {
                deadline: first_deadline,
                slot: 0,
                ..from
            }
        } else {
            from
        };
        self.snapshots(kind, from, moment.now)
    }

    async fn count(&self, state: State, limit: u32) -> Count {
        let moment = Moment::of(self);
        let (mut value, mut examined, mut position) = (0, 0, FIRST);
        let mut turn = Turn::default();
        // An entry that is changed meanwhile may move to a later position.
        let mut counted = HashSet::new();
        loop {
            let (snapshots, next) = self.walk(state, position, &moment);
            turn.after_shard(snapshots.len()).await;
            for snapshot in snapshots {
                examined += 1;
                if moment.state(&snapshot) == state && counted.insert(snapshot.id) {
                    if value == u64::from(limit) {
                        return Count::new(value, false);
                    }
                    value += 1;
                }
            }
            match next {
                // An order contains entries of two states. So a count examines more entries than it returns, up to this
                // bound.
                Some(next) if examined <= u64::from(limit) * 4 + 1024 => position = next,
                Some(_) => return Count::new(value, false),
                None => return Count::new(value, true),
            }
        }
    }
}

/// The work of a call since other tasks could run, in entries. A large store has thousands of shards.
#[derive(Default)]
struct Turn(usize);

impl Turn {
    /// Lets other tasks run if the call has worked for long, with this many entries of another shard.
    async fn after_shard(&mut self, entries: usize) {
        self.0 += SHARD_AS_ENTRIES + entries;
        if self.0 >= ENTRIES_PER_TURN {
            self.0 = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// A moment on the clock of the store and on the wall clock.
struct Moment {
    now: u64,
    wall: SystemTime,
}

impl Moment {
    fn of(store: &MemoryStore) -> Self {
        Self {
            now: store.now(),
            wall: SystemTime::now(),
        }
    }

    /// Converts a time of the store.
    fn time(&self, at: u64) -> SystemTime {
        let moved = if at >= self.now {
            self.wall.checked_add(Duration::from_nanos(at - self.now))
        } else {
            self.wall.checked_sub(Duration::from_nanos(self.now - at))
        };
        moved.unwrap_or(self.wall)
    }

    fn state(&self, snapshot: &Snapshot) -> State {
        match (&snapshot.record, snapshot.lease_expires) {
            (Some(record), _) => State::of_record(record),
            (None, Some(expires)) if expires > self.now => State::InProgress,
            (None, _) => State::Orphaned,
        }
    }

    fn seen(&self, snapshot: &Snapshot) -> Seen {
        let state = self.state(snapshot);
        let lease_expires = snapshot.lease_expires.filter(|_| state == State::Orphaned);
        let version = Seen::version_of(snapshot.token.as_ref(), lease_expires);
        Seen::new(snapshot.id, state, snapshot.generation, version)
    }

    fn entry(&self, snapshot: &Snapshot) -> Entry {
        let mut entry = Entry::new(self.seen(snapshot));
        let since = match snapshot.lease_expires {
            Some(expires) if entry.state() == State::Orphaned => expires,
            _ => snapshot.since,
        };
        entry.owner = snapshot.owner.into();
        entry.operation = snapshot.operation.clone();
        if entry.operation.is_empty() && snapshot.is_of_run_once {
            entry.operation = RUN_ONCE_OPERATION.into();
        }
        entry.since = self.time(since);
        entry.age = Duration::from_nanos(self.now.saturating_sub(since));
        entry.lease_expires = snapshot.lease_expires.map(|expires| self.time(expires));
        entry.expires = Some(self.time(snapshot.expires));
        entry.retry_allowed = entry.state() == State::Orphaned
            && snapshot.token.is_some_and(|token| token.allows_retry());
        if let Some(record) = &snapshot.record {
            let attention = NeedsAttention::in_record(record);
            entry.attention_code = attention.map(|attention| attention.code().into());
            entry.record_bytes = Some(record.len() as u64);
        }
        if entry.state() == State::Unreadable {
            entry.problem = Some("the record is of another version, or damaged".into());
        }
        entry
    }
}

/// Returns the change that a resolution makes.
fn change(id: &KeyId, resolution: &Resolution) -> Result<Change, StoreError> {
    let orphan = |token| Change::Orphan {
        token,
        retention: DEFAULT_ORPHAN_RETENTION,
    };
    Ok(match (resolution.record(id), resolution) {
        (Some((record, retention)), _) => Change::Complete {
            token: Token::random()?,
            // The store counts a record by its length. The operator's `Bytes` may be a part of a larger buffer.
            record: Bytes::from(record.to_vec().into_boxed_slice()),
            retention,
        },
        (None, Resolution::Retry) => orphan(Token::retry_allowed()?),
        (None, Resolution::BreakLease) => orphan(Token::random()?),
        (None, Resolution::Free | Resolution::DeleteRecord) => Change::Delete,
        (None, Resolution::Complete { .. } | Resolution::NeedsAttention(_)) => {
            unreachable!("both store a record")
        }
    })
}

fn format_position(position: ListPosition) -> [u8; 14] {
    let mut bytes = [0; 14];
    bytes[..2].copy_from_slice(&position.shard.to_be_bytes());
    bytes[2..10].copy_from_slice(&position.deadline.to_be_bytes());
    bytes[10..].copy_from_slice(&position.slot.to_be_bytes());
    bytes
}

fn parse_position(bytes: &[u8]) -> Option<ListPosition> {
    let (shard, rest) = bytes.split_first_chunk()?;
    let (deadline, rest) = rest.split_first_chunk()?;
    Some(ListPosition {
        shard: u16::from_be_bytes(*shard),
        deadline: u64::from_be_bytes(*deadline),
        slot: u32::from_be_bytes(rest.try_into().ok()?),
    })
}

const FIRST: ListPosition = ListPosition {
    shard: 0,
    deadline: 0,
    slot: 0,
};

/// The maximum number of expired entries that a purge deletes under one lock.
const DELETED_PER_LOCK: usize = 64;

/// The number of entries after which other tasks can run.
const ENTRIES_PER_TURN: usize = 1024;
/// The size of a page of memory. To free one takes about as long as to read an entry.
const PAGE_BYTES: usize = 4096;
/// A shard without entries takes as long as this many entries.
const SHARD_AS_ENTRIES: usize = 8;

/// The maximum number of entries that are examined for a page.
const MAX_EXAMINED: usize = 16 * 1024;
