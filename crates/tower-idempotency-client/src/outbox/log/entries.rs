//! The entries of the file that are not removed.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use super::format::{HEADER, Header, PROVIDER, REMOVED, SENT, STORED, synced_before};
use crate::outbox::entry::Entry;

/// Entries that are not removed.
#[derive(Default)]
pub(super) struct Entries {
    pub(super) by_position: BTreeMap<u64, Slot>,
    pub(super) by_key: HashMap<String, u64>,
    pub(super) last_position: u64,
    pub(super) bytes: u64,
    /// `true` if the file has records of removed entries.
    pub(super) has_removed: bool,
}

pub(super) struct Slot {
    pub(super) entry: Entry,
    /// Bytes of its record.
    size: u64,
    /// `true` if another call or a recovery may also send the request.
    pub(super) is_resumed: bool,
}

impl Entries {
    /// Reads the records up to the first incomplete one. Returns the entries, and the length of these records.
    pub(super) fn read(header: Header, bytes: &[u8]) -> io::Result<(Self, usize)> {
        let error = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        let mut rest = bytes.get(HEADER..).unwrap_or_default();
        let mut entries = Self::default();
        while let Some((payload, following)) = header.next_record(rest) {
            let applied = entries.apply(payload, rest.len() - following.len());
            // The checksum is correct. Such a record may be of an operation that was acknowledged.
            applied.ok_or_else(|| error("a record of the outbox is of another version"))?;
            rest = following;
        }
        // A later record may show that this part was on the disk. Then no crash has damaged it.
        let length = bytes.len() - rest.len();
        let was_synced = (1..rest.len())
            .filter_map(|at| header.next_record(&rest[at..]))
            .any(|(payload, _)| {
                synced_before(payload).is_some_and(|synced| synced > length as u64)
            });
        if was_synced {
            return Err(error("a synced record of the outbox is damaged"));
        }
        Ok((entries, length))
    }

    /// Applies a record. Returns `None` if this version cannot read its content.
    fn apply(&mut self, payload: &[u8], size: usize) -> Option<()> {
        let (&kind, rest) = payload.split_first()?;
        let (position, rest) = rest.split_first_chunk()?;
        let position = u64::from_be_bytes(*position);
        let (_synced, content) = rest.split_first_chunk::<8>()?;
        match kind {
            STORED => {
                self.insert(position, Entry::decode(content).ok()?, size as u64);
            }
            SENT => {
                let millis = u64::from_be_bytes(content.try_into().ok()?);
                if let Some(slot) = self.by_position.get_mut(&position) {
                    slot.entry.first_sent.get_or_insert(millis);
                }
            }
            PROVIDER => {
                let provider = u64::from_be_bytes(content.try_into().ok()?);
                if let Some(slot) = self.by_position.get_mut(&position) {
                    slot.entry.provider.get_or_insert(provider);
                }
            }
            REMOVED => {
                let slot = self.by_position.get(&position);
                if let Some(key) = slot.map(|slot| slot.entry.key.clone()) {
                    self.remove(&key);
                }
            }
            _ => return None,
        }
        Some(())
    }

    pub(super) fn insert(&mut self, position: u64, entry: Entry, size: u64) {
        self.last_position = self.last_position.max(position);
        self.bytes += size;
        self.by_key.insert(entry.key.clone(), position);
        let slot = Slot {
            entry,
            size,
            is_resumed: false,
        };
        self.by_position.insert(position, slot);
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<(u64, Slot)> {
        let position = self.by_key.remove(key)?;
        let slot = self.by_position.remove(&position)?;
        self.bytes -= slot.size;
        self.has_removed = true;
        Some((position, slot))
    }

    /// Returns the keys of the resumed entries.
    pub(super) fn resumed(&self) -> Vec<String> {
        let slots = self.by_position.values().filter(|slot| slot.is_resumed);
        slots.map(|slot| slot.entry.key.clone()).collect()
    }

    pub(super) fn mark_resumed(&mut self, keys: &[String]) {
        for key in keys {
            let position = self.by_key.get(key);
            if let Some(slot) = position.and_then(|position| self.by_position.get_mut(position)) {
                slot.is_resumed = true;
            }
        }
    }
}
