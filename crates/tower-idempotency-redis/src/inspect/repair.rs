//! The repair of the indexes: a walk through all keys.

use futures_util::future::try_join_all;
use redis::{Cmd, Value};
use tower_idempotency::{
    inspect::{InspectError, InspectErrorKind},
    store::{KeyId, StoreError},
};

use crate::{
    connection::Node,
    index::Indexes,
    store::{Inner, RedisStore, unexpected_reply},
};

/// Progress and result of [`RedisStore::repair_indexes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexRepair {
    /// Number of keys with the prefix of the store that were examined. A server may return a key more than once.
    pub examined: u64,
    /// Number of entries that were added to their index, because it lacked them.
    pub added: u64,
    /// Number of members that were removed from an index, because their entry does not exist or has another state.
    pub removed: u64,
    /// Number of entries that were left out, because their slot was being moved to another node.
    pub skipped: u64,
}

impl RedisStore {
    /// Repairs the indexes from which [`Inspect::list`](tower_idempotency::inspect::Inspect::list) reads: adds entries that
    /// they do not have, and removes members without an entry.
    ///
    /// Entries are missing if they were written without rights on the indexes, with
    /// [`with_indexes(false)`](crate::RedisOptions::with_indexes), while their slot was moved, or before an index was lost.
    /// Completed entries are also missing if they were written without
    /// [`with_completed_index`](crate::RedisOptions::with_completed_index). A store without this setting does not change
    /// their index.
    ///
    /// This reads **all keys of all masters** with `SCAN`: seconds for a million of them, during which the servers serve
    /// other clients more slowly. No other method of the store does so. Entries are not changed. Calls `progress` after each
    /// group of keys.
    ///
    /// Repeat it if [`skipped`](IndexRepair::skipped) is not 0, or if slots have moved or a master was replaced meanwhile.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](InspectErrorKind::Unsupported) if the store has no indexes, and
    /// [`Backend`](InspectErrorKind::Backend) if a server failed or the user lacks a right. The indexes are repaired in
    /// part.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the indexes are repaired in part.
    pub async fn repair_indexes(
        &self,
        progress: impl FnMut(&IndexRepair) + Send,
    ) -> Result<IndexRepair, InspectError> {
        let indexes = self.inner.indexes.as_ref();
        let indexes = indexes.ok_or_else(|| InspectError::new(InspectErrorKind::Unsupported))?;
        Ok(Box::pin(self.inner.repair(indexes, progress)).await?)
    }
}

impl Inner {
    async fn repair(
        &self,
        indexes: &Indexes,
        mut progress: impl FnMut(&IndexRepair) + Send,
    ) -> Result<IndexRepair, StoreError> {
        let mut repair = IndexRepair::default();
        let masters = self.acquire_link.masters(self.deadline()).await;
        let masters = masters.map_err(StoreError::backend)?;
        for node in &masters {
            let mut cursor = START.to_vec();
            loop {
                let mut scan = redis::cmd("SCAN");
                scan.arg(&cursor).arg("MATCH").arg(self.pattern());
                scan.arg("COUNT").arg(SCAN_COUNT);
                let (next, keys) = parse_scan(self.send_to(node, &scan).await?)?;
                repair.examined += keys.len() as u64;
                let ids: Vec<_> = keys.iter().filter_map(|key| self.id_of(key)).collect();
                self.reindex_all(&ids, &mut repair).await?;
                for key in &keys {
                    let text = std::str::from_utf8(key).ok();
                    if let Some(number) = text.and_then(|key| indexes.find(key)) {
                        self.repair_members(node, number, key, &mut repair).await?;
                    }
                }
                progress(&repair);
                cursor = next;
                if cursor == START {
                    break;
                }
            }
        }
        Ok(repair)
    }

    /// Examines the members of an index, which has this number.
    async fn repair_members(
        &self,
        node: &Node,
        number: u16,
        index: &[u8],
        repair: &mut IndexRepair,
    ) -> Result<(), StoreError> {
        let mut cursor = START.to_vec();
        loop {
            let mut scan = redis::cmd("ZSCAN");
            scan.arg(index).arg(&cursor).arg("COUNT").arg(SCAN_COUNT);
            let (next, members) = parse_scan(self.send_to(node, &scan).await?)?;
            let mut ids = Vec::new();
            // Members and scores alternate.
            for member in members.iter().step_by(2).filter(|it| !it.is_empty()) {
                let id = <[u8; 32]>::try_from(member.as_slice())
                    .map(KeyId::from_bytes)
                    .ok();
                let id = id.filter(|id| {
                    let indexes = self.indexes.as_ref();
                    indexes.is_some_and(|it| it.number_of(&self.key(id)) == number)
                });
                match id {
                    Some(id) => ids.push(id),
                    None => {
                        let mut remove = redis::cmd("ZREM");
                        remove.arg(index).arg(member);
                        self.send_to(node, &remove).await?;
                        repair.removed += 1;
                    }
                }
            }
            self.reindex_all(&ids, repair).await?;
            cursor = next;
            if cursor == START {
                return Ok(());
            }
        }
    }

    async fn reindex_all(&self, ids: &[KeyId], repair: &mut IndexRepair) -> Result<(), StoreError> {
        for group in ids.chunks(GROUP) {
            let replies = group.iter().map(async |id| {
                let (keys, script) = (self.keys(id), &self.scripts.operators.reindex);
                let (link, deadline) = (&self.acquire_link, self.deadline());
                self.run_script(link, deadline, script, &keys, &id.as_bytes())
                    .await
            });
            for reply in try_join_all(replies).await? {
                let counts: Result<(u64, u64, u64), _> = redis::from_redis_value(reply);
                let counts = counts.map_err(|_| unexpected_reply("three numbers"))?;
                repair.added += counts.0;
                repair.removed += counts.1;
                repair.skipped += counts.2;
            }
        }
        Ok(())
    }

    async fn send_to(&self, node: &Node, command: &Cmd) -> Result<Value, StoreError> {
        let reply = self
            .acquire_link
            .send_to(node, self.deadline(), command)
            .await;
        reply.map_err(StoreError::backend)
    }

    /// Returns the ID in the key of an entry.
    fn id_of(&self, key: &[u8]) -> Option<KeyId> {
        let digits = key.strip_prefix(self.options.prefix.as_bytes())?;
        // The prefix of another store may begin with that of this one.
        let id: KeyId = std::str::from_utf8(digits).ok()?.parse().ok()?;
        (self.key(&id).as_bytes() == key).then_some(id)
    }

    /// Returns the pattern of keys with the prefix.
    fn pattern(&self) -> String {
        let mut pattern = String::new();
        for letter in self.options.prefix.chars() {
            if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(letter);
        }
        pattern + "*"
    }
}

/// Parses the reply to `SCAN` and similar commands: the next cursor, and the elements.
fn parse_scan(reply: Value) -> Result<(Vec<u8>, Vec<Vec<u8>>), StoreError> {
    redis::from_redis_value(reply).map_err(|_| unexpected_reply("a cursor and elements"))
}

const START: &[u8] = b"0";
/// Number of keys that a server examines for a call.
const SCAN_COUNT: usize = 500;
/// Number of entries that are examined at the same time.
const GROUP: usize = 64;
