//! Requests that this process saw recently, to detect a retry under another principal.

use std::{
    hash::BuildHasher,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use hashbrown::DefaultHashBuilder;

use crate::{
    request::key::IdempotencyKey,
    store::{Fingerprint, ScopeDigest},
};

/// Number of requests in the table: 32 KiB for each layer.
const SLOTS: usize = 4096;

/// Table of recent requests: for each key and fingerprint, the principal under which it was last seen.
///
/// A slot has 32 bits for the request and 32 bits for the principal. Both are hashes under a random key of the process, so
/// that they reveal nothing and no client can choose the slot of another one. If a client fills the table, the layer misses
/// changes, and nothing else happens. Two requests in one slot are confused with a probability of 1 in 2^32.
pub(crate) struct RecentRequests {
    hasher: DefaultHashBuilder,
    /// Hides the principals in the slots.
    mask: u64,
    slots: Box<[AtomicU64]>,
}

impl Default for RecentRequests {
    fn default() -> Self {
        let hasher = DefaultHashBuilder::default();
        Self {
            mask: hasher.hash_one("mask"),
            hasher,
            slots: std::iter::repeat_with(AtomicU64::default)
                .take(SLOTS)
                .collect(),
        }
    }
}

impl RecentRequests {
    /// Stores the request. Returns `true` if the same key and fingerprint were last seen under another principal.
    pub(crate) fn has_other_principal(
        &self,
        key: &IdempotencyKey,
        fingerprint: &Fingerprint,
        principal: &ScopeDigest,
    ) -> bool {
        const LOW: u64 = 0xffff_ffff;
        let request = self.hasher.hash_one((key, fingerprint));
        // The first bytes of a digest are as good as a hash of it.
        let [a, b, c, d, ..] = *principal.as_bytes();
        let principal = (u64::from(u32::from_le_bytes([a, b, c, d])) ^ self.mask) & LOW;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "only the low bits choose the slot"
        )]
        let slot = &self.slots[request as usize % SLOTS];
        // 0 marks an empty slot.
        let new = (request & !LOW) | principal.max(1);
        let old = slot.swap(new, Relaxed);
        old != 0 && old & !LOW == request & !LOW && old != new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::key::{KeyRules, KeySyntax};

    #[test]
    fn other_principal_is_change() {
        let rules = KeyRules {
            syntax: KeySyntax::Lenient,
            min: 1,
            max: 255,
        };
        let key = |name: &str| rules.parse(name.as_bytes()).unwrap();
        let principal = |byte| ScopeDigest::from_bytes([byte; 16]);
        let fingerprint = |byte| Fingerprint::from_bytes([byte; 32]);
        let recent = RecentRequests::default();
        assert!(!recent.has_other_principal(&key("a"), &fingerprint(1), &principal(1)));
        assert!(!recent.has_other_principal(&key("a"), &fingerprint(1), &principal(1)));
        assert!(recent.has_other_principal(&key("a"), &fingerprint(1), &principal(2)));
        assert!(!recent.has_other_principal(&key("a"), &fingerprint(1), &principal(2)));
        assert!(!recent.has_other_principal(&key("a"), &fingerprint(2), &principal(3)));
        assert!(!recent.has_other_principal(&key("b"), &fingerprint(1), &principal(4)));
    }

    #[test]
    fn table_stays_bounded() {
        let recent = RecentRequests::default();
        let rules = KeyRules {
            syntax: KeySyntax::Lenient,
            min: 1,
            max: 255,
        };
        for n in 0..3 * SLOTS {
            let key = rules.parse(n.to_string().as_bytes()).unwrap();
            let principal = ScopeDigest::from_bytes([1; 16]);
            let fingerprint = Fingerprint::from_bytes([1; 32]);
            assert!(!recent.has_other_principal(&key, &fingerprint, &principal));
        }
        assert_eq!(recent.slots.len(), SLOTS);
    }
}
