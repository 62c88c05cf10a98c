//! Keys of the indexes: sorted sets from which operators list entries.
//!
//! A script changes an entry together with its indexes, so all keys of a script must be in one slot of a cluster. In a
//! cluster each slot therefore has indexes of its own: a hash tag moves their keys to the slot.

use std::sync::LazyLock;

/// The keys of a script: an entry and its indexes.
pub(crate) struct Keys {
    pub(crate) entry: String,
    /// Index of leases, and index of records that need attention.
    pub(crate) indexes: Option<[String; 2]>,
}

/// The keys of all indexes.
#[derive(Clone, Debug)]
pub(crate) enum Indexes {
    /// A single index of each kind.
    One([String; 2]),
    /// An index of each kind for each slot of a cluster, with this prefix.
    OfSlots(String),
}

impl Keys {
    pub(crate) fn all(&self) -> Vec<&str> {
        let indexes = self.indexes.iter().flatten();
        let indexes = indexes.map(String::as_str);
        std::iter::once(self.entry.as_str())
            .chain(indexes)
            .collect()
    }
}

impl Indexes {
    pub(crate) fn new(prefix: &str, is_cluster: bool) -> Self {
        // A prefix with a hash tag moves all keys to one slot.
        if is_cluster && hash_tag(prefix).is_none() {
            Self::OfSlots(prefix.to_owned())
        } else {
            Self::One([LEASES, ATTENTION].map(|suffix| format!("{prefix}{suffix}")))
        }
    }

    /// Returns `false` if the prefix contains `{` and no hash tag. The server reads only the first `{` of a key, so the indexes
    /// of a cluster would be in other slots than their entries.
    #[cfg(any(feature = "cluster", test))]
    pub(crate) fn are_possible(prefix: &str) -> bool {
        hash_tag(prefix).is_some() || !prefix.contains('{')
    }

    /// Returns the number of indexes of a kind.
    pub(crate) fn len(&self) -> u16 {
        match self {
            Self::One(_) => 1,
            Self::OfSlots(_) => SLOTS,
        }
    }

    /// Returns the keys of this number.
    pub(crate) fn at(&self, n: u16) -> [String; 2] {
        match self {
            Self::One(keys) => keys.clone(),
            Self::OfSlots(prefix) => {
                let tag = &TAGS[usize::from(n)];
                [LEASES, ATTENTION].map(|suffix| format!("{prefix}{{{tag}}}{suffix}"))
            }
        }
    }

    /// Returns the number of the index with this key.
    pub(crate) fn find(&self, key: &str) -> Option<u16> {
        let number = match self {
            Self::One(_) => 0,
            Self::OfSlots(_) => slot(key),
        };
        self.at(number).iter().any(|it| it == key).then_some(number)
    }

    /// Returns the number of the indexes that have this entry.
    pub(crate) fn number_of(&self, entry: &str) -> u16 {
        match self {
            Self::One(_) => 0,
            Self::OfSlots(_) => slot(entry),
        }
    }

    /// Returns the keys of the indexes that have this entry.
    pub(crate) fn of(&self, entry: &str) -> [String; 2] {
        self.at(self.number_of(entry))
    }
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
    bytes.iter().fold(0, |crc, byte| {
        let [high, low] = crc.to_be_bytes();
        CHECKSUMS[usize::from(high ^ byte)] ^ (u16::from(low) << 8)
    })
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

/// A short hash tag for each slot.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut tags = vec![String::new(); usize::from(SLOTS)];
    let mut missing = tags.len();
    for n in 0_u32.. {
        if missing == 0 {
            break;
        }
        let tag = format!("{n:x}");
        let entry = &mut tags[usize::from(slot(&tag))];
        if entry.is_empty() {
            *entry = tag;
            missing -= 1;
        }
    }
    tags
});

const SLOTS: u16 = 16_384;
/// No entry has such a key: the last part of its key is hexadecimal.
const LEASES: &str = "~leases";
const ATTENTION: &str = "~attention";

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

    #[test]
    fn indexes_are_in_slot_of_their_entries() {
        let indexes = Indexes::new("idempotency:", true);
        assert_eq!(indexes.len(), SLOTS);
        for n in 0..SLOTS {
            for key in indexes.at(n) {
                assert_eq!(slot(&key), n, "{key}");
                assert!(key.len() < 40, "{key}");
                assert_eq!(indexes.find(&key), Some(n));
            }
        }
        let entry = format!("idempotency:{}", "6f".repeat(32));
        for key in indexes.of(&entry) {
            assert_eq!(slot(&key), slot(&entry));
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
            let indexes = Indexes::new(prefix, is_cluster);
            assert_eq!(indexes.len(), 1);
            assert_eq!(indexes.of("any")[0], format!("{prefix}~leases"));
        }
    }
}
