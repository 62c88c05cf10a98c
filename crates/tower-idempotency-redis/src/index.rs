//! Keys of the indexes: sorted sets from which operators list entries.
//!
//! A script changes an entry together with its indexes, so all keys of a script must be in one slot of a cluster. In a
//! cluster each slot therefore has indexes of its own: a hash tag moves their keys to the slot.

use std::sync::LazyLock;

use tower_idempotency::inspect::State;

/// The keys of a script: an entry and its indexes.
pub(crate) struct Keys {
    pub(crate) entry: String,
    pub(crate) indexes: Option<IndexKeys>,
}

/// The keys of the indexes of an entry.
#[derive(Clone, Debug)]
pub(crate) struct IndexKeys {
    pub(crate) leases: String,
    /// Index of records that need attention.
    pub(crate) attention: String,
    /// Index of other records, if the options add it.
    pub(crate) completed: Option<String>,
}

/// The keys of all indexes.
#[derive(Clone, Debug)]
pub(crate) enum Indexes {
    /// A single index of each kind.
    One(IndexKeys),
    /// An index of each kind for each slot of a cluster.
    OfSlots { prefix: String, has_completed: bool },
}

impl Keys {
    /// Returns the keys in the order in which the scripts expect them.
    pub(crate) fn all(&self) -> Vec<&str> {
        let indexes = self.indexes.iter().flat_map(IndexKeys::iter);
        std::iter::once(self.entry.as_str())
            .chain(indexes)
            .collect()
    }
}

impl IndexKeys {
    fn new(has_completed: bool, key: impl Fn(&str) -> String) -> Self {
        Self {
            leases: key(LEASES),
            attention: key(ATTENTION),
            completed: has_completed.then(|| key(COMPLETED)),
        }
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let keys = [&self.leases, &self.attention].into_iter();
        keys.chain(&self.completed).map(String::as_str)
    }
}

impl Indexes {
    pub(crate) fn new(prefix: &str, is_cluster: bool, has_completed: bool) -> Self {
        // A prefix with a hash tag moves all keys to one slot.
        if is_cluster && hash_tag(prefix).is_none() {
            Self::OfSlots {
                prefix: prefix.to_owned(),
                has_completed,
            }
        } else {
            let key = |suffix: &str| format!("{prefix}{suffix}");
            Self::One(IndexKeys::new(has_completed, key))
        }
    }

    /// Returns `true` if there is an index of completed entries.
    pub(crate) fn has_completed(&self) -> bool {
        match self {
            Self::One(keys) => keys.completed.is_some(),
            Self::OfSlots { has_completed, .. } => *has_completed,
        }
    }

    /// Returns `false` if the prefix contains `{` and no hash tag. The server reads only the first `{` of a key, so the indexes
    /// of a cluster would be in other slots than their entries.
    #[cfg(any(feature = "cluster", test))]
    pub(crate) fn are_possible(prefix: &str) -> bool {
        hash_tag(prefix).is_some() || !prefix.contains('{')
    }

    /// Returns how many indexes of each kind there are.
    pub(crate) fn len(&self) -> u16 {
        match self {
            Self::One(_) => 1,
            Self::OfSlots { .. } => SLOTS,
        }
    }

    /// Returns the keys of the indexes with this number, which is below [`len`](Self::len).
    pub(crate) fn at(&self, n: u16) -> IndexKeys {
        match self {
            Self::One(keys) => keys.clone(),
            Self::OfSlots {
                prefix,
                has_completed,
            } => IndexKeys::new(*has_completed, |suffix| key_in_slot(prefix, n, suffix)),
        }
    }

    /// Returns the key of the index of a state with this number, without the keys of the other states. Returns `None` if there
    /// is no index of completed entries.
    pub(crate) fn key(&self, n: u16, state: State) -> Option<String> {
        match self {
            Self::One(keys) => match state {
                State::NeedsAttention => Some(keys.attention.clone()),
                State::Completed => keys.completed.clone(),
                _ => Some(keys.leases.clone()),
            },
            Self::OfSlots {
                prefix,
                has_completed,
            } => {
                let suffix = match state {
                    State::NeedsAttention => ATTENTION,
                    State::Completed if !has_completed => return None,
                    State::Completed => COMPLETED,
                    _ => LEASES,
                };
                Some(key_in_slot(prefix, n, suffix))
            }
        }
    }

    /// Returns the number of the index with this key.
    pub(crate) fn find(&self, key: &str) -> Option<u16> {
        let number = match self {
            Self::One(_) => 0,
            Self::OfSlots { .. } => slot(key),
        };
        self.at(number).iter().any(|it| it == key).then_some(number)
    }

    /// Returns the number of the indexes that have this entry.
    pub(crate) fn number_of(&self, entry: &str) -> u16 {
        match self {
            Self::One(_) => 0,
            Self::OfSlots { .. } => slot(entry),
        }
    }

    /// Returns the keys of the indexes that have this entry.
    pub(crate) fn of(&self, entry: &str) -> IndexKeys {
        self.at(self.number_of(entry))
    }
}

/// Returns the key of an index in a slot.
fn key_in_slot(prefix: &str, slot: u16, suffix: &str) -> String {
    format!("{prefix}{{{}}}{suffix}", TAGS[usize::from(slot)])
}

/// Returns the slot of a key in a cluster.
fn slot(key: &str) -> u16 {
    crc16(hash_tag(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// Returns the text between the first `{` and the next `}`, unless it is empty.
fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// Returns the checksum CRC-16/XMODEM, from which a cluster computes the slot.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| extend_crc16(crc, *byte))
}

/// Returns the checksum of bytes that have the checksum `crc`, followed by `byte`.
fn extend_crc16(crc: u16, byte: u8) -> u16 {
    let [high, low] = crc.to_be_bytes();
    CHECKSUMS[usize::from(high ^ byte)] ^ (u16::from(low) << 8)
}

/// The checksum of each byte.
const CHECKSUMS: [u16; 256] = {
    let mut checksums = [0; 256];
    let mut byte: u16 = 0;
    while byte < 256 {
        let mut crc = byte << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc << 1) ^ ((crc >> 15) * 0x1021);
            bit += 1;
        }
        checksums[byte as usize] = crc;
        byte += 1;
    }
    checksums
};

/// A hash tag for each slot: the lowest number whose hexadecimal digits are in the slot.
///
/// The tags are part of stored keys, so they never change. A process computes all of them at its first call to a cluster.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut tags = vec![String::new(); usize::from(SLOTS)];
    let mut missing = tags.len();
    // The checksum of each number. It extends that of the number without its last digit.
    let mut checksums = Vec::<u16>::new();
    while missing > 0 {
        let n = checksums.len();
        let without_last_digit = if n < 16 { 0 } else { checksums[n / 16] };
        let checksum = extend_crc16(without_last_digit, b"0123456789abcdef"[n % 16]);
        checksums.push(checksum);
        let tag = &mut tags[usize::from(checksum % SLOTS)];
        if tag.is_empty() {
            *tag = format!("{n:x}");
            missing -= 1;
        }
    }
    tags
});

const SLOTS: u16 = 16_384;
// Suffixes of the keys. The key of an entry ends with hexadecimal digits, so no entry has such a key.
const LEASES: &str = "~leases";
const ATTENTION: &str = "~attention";
const COMPLETED: &str = "~completed";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12182);
        assert_eq!(slot("{foo}bar"), slot("foo"));
        assert_eq!(slot("foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
    }

    /// Other tags would hide the indexes that an earlier version has stored.
    #[test]
    fn tags_of_slots_never_change() {
        for (number, tag) in [
            (0, "265b"),
            (1, "12dd9"),
            (8_191, "42163"),
            // The tag of the highest number.
            (10_780, "4cd70"),
            (16_383, "3d43"),
        ] {
            assert_eq!(TAGS[number], tag, "{number}");
        }
        let all = TAGS.join(" ");
        assert_eq!((all.len(), crc16(all.as_bytes())), (81_077, 0x4e13));
    }

    #[test]
    fn indexes_are_in_slot_of_their_entries() {
        let indexes = Indexes::new("idempotency:", true, true);
        assert_eq!(indexes.len(), SLOTS);
        for n in 0..SLOTS {
            let keys = indexes.at(n);
            assert_eq!(keys.iter().count(), 3);
            for key in keys.iter() {
                assert_eq!(slot(key), n, "{key}");
                assert!(key.len() < 40, "{key}");
                assert_eq!(indexes.find(key), Some(n));
            }
        }
        let entry = format!("idempotency:{}", "6f".repeat(32));
        for key in indexes.of(&entry).iter() {
            assert_eq!(slot(key), slot(&entry));
        }
        for other in [
            "idempotency:~leases",
            "idempotency:{0}~orphans",
            "other:{0}~leases",
            &entry,
        ] {
            assert_eq!(indexes.find(other), None, "{other}");
        }
    }

    #[test]
    fn key_of_state_is_among_keys_of_number() {
        for is_cluster in [false, true] {
            for has_completed in [false, true] {
                let indexes = Indexes::new("idempotency:", is_cluster, has_completed);
                let number = indexes.len() - 1;
                let keys = indexes.at(number);
                for (state, expected) in [
                    (State::InProgress, Some(keys.leases.clone())),
                    (State::Orphaned, Some(keys.leases)),
                    (State::NeedsAttention, Some(keys.attention)),
                    (State::Completed, keys.completed),
                ] {
                    assert_eq!(indexes.key(number, state), expected, "{state}");
                }
            }
        }
    }

    #[test]
    fn brace_without_hash_tag_permits_no_indexes() {
        for (prefix, is_possible) in [
            ("payments:", true),
            ("{payments}:", true),
            ("a}b:", true),
            ("svc{}:", false),
            ("a{", false),
        ] {
            assert_eq!(Indexes::are_possible(prefix), is_possible, "{prefix}");
        }
    }

    #[test]
    fn prefix_with_hash_tag_has_one_index() {
        for (prefix, is_cluster) in [("{payments}:", true), ("payments:", false)] {
            let indexes = Indexes::new(prefix, is_cluster, true);
            assert_eq!(indexes.len(), 1);
            let keys = indexes.of("any");
            let expected = ["leases", "attention", "completed"];
            let expected = expected.map(|it| format!("{prefix}~{it}"));
            assert!(keys.iter().eq(&expected), "{keys:?}");
        }
    }

    #[test]
    fn index_of_completed_entries_is_optional() {
        for (has_completed, count) in [(false, 3), (true, 4)] {
            for is_cluster in [false, true] {
                let indexes = Indexes::new("idempotency:", is_cluster, has_completed);
                assert_eq!(indexes.has_completed(), has_completed);
                let keys = Keys {
                    entry: "idempotency:6f".to_owned(),
                    indexes: Some(indexes.of("idempotency:6f")),
                };
                assert_eq!(keys.all().len(), count);
                let found = indexes.find("idempotency:{0}~completed").is_some();
                assert_eq!(found, is_cluster && has_completed);
            }
        }
    }
}
