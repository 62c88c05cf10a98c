//! Random calls on a full store. It loses only records, and only those that the call may evict.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::store::OrphanPolicy;

const MAX_ENTRIES: usize = 16;
const MAX_BYTES: usize = 16 * ENTRY_BYTES + 1000;
/// Leases and orphans from which a caller is no longer small.
const EIGHTH: usize = 2;

const CALLERS: u64 = 3;
/// Keys of all callers in turn.
const KEYS: u64 = 32;

/// Token of the operator.
const OPERATOR: Token = Token::from_bytes([9; 16]);

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn full_store_loses_only_records(steps in proptest::collection::vec(step(), 1..200)) {
        let mut full = FullStore::new();
        for step in &steps {
            full.apply(step);
            full.assert_counts();
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Acquire(u64),
    Complete {
        key: u64,
        len: usize,
        retention: Ttl,
    },
    Release(u64),
    Resolve {
        key: u64,
        decision: Decision,
    },
}

/// Decision of an operator.
#[derive(Clone, Debug)]
enum Decision {
    Delete,
    Orphan,
    Complete { len: usize, retention: Ttl },
}

fn step() -> impl Strategy<Value = Step> {
    let record = || {
        let retention = prop_oneof![3 => Just(HOUR), 1 => Just(Ttl::MAX)];
        (0..400_usize, retention)
    };
    let decision = prop_oneof![
        1 => Just(Decision::Delete),
        1 => Just(Decision::Orphan),
        2 => record().prop_map(|(len, retention)| Decision::Complete { len, retention }),
    ];
    prop_oneof![
        6 => (0..KEYS).prop_map(Step::Acquire),
        4 => (0..KEYS, record()).prop_map(|(key, (len, retention))| Step::Complete { key, len, retention }),
        1 => (0..KEYS).prop_map(Step::Release),
        2 => (0..KEYS, decision).prop_map(|(key, decision)| Step::Resolve { key, decision }),
    ]
}

/// A store at time 0, and the entries that it must have.
struct FullStore {
    store: MemoryStore,
    /// The claim that holds each lease. `None` for an orphan that the operator has left.
    leases: BTreeMap<u64, Option<Claim>>,
    /// All entries, with the length of the record, or `None` for a lease or an orphan.
    entries: BTreeMap<u64, Option<usize>>,
    /// The number of bytes that the store may have. Resolutions can exceed the limit.
    max_bytes: usize,
}

impl FullStore {
    fn new() -> Self {
        let store = loop {
            let store = MemoryStore {
                table: Arc::new(Table::new(2, MAX_ENTRIES, MAX_BYTES)),
                epoch: Instant::now(),
            };
            let group = |caller| store.table.shared.group(scope_of(caller).as_ref());
            let mut groups: Vec<_> = (0..CALLERS).map(group).collect();
            groups.sort_unstable();
            if groups.windows(2).all(|pair| pair[0] != pair[1]) {
                break store;
            }
        };
        Self {
            store,
            leases: BTreeMap::new(),
            entries: BTreeMap::new(),
            max_bytes: MAX_BYTES,
        }
    }

    fn apply(&mut self, step: &Step) {
        let before = self.entries.clone();
        match *step {
            Step::Acquire(key) => self.acquire(key, &before),
            Step::Complete {
                key,
                len,
                retention,
            } => {
                let Some(Some(claim)) = self.leases.get(&key) else {
                    return;
                };
                let (lease, table) = (claim.lease_ref(1), &self.store.table);
                let mut record = Bytes::from(vec![1; len]);
                let completed = table.complete(&lease, &mut record, retention, 0);
                self.read();
                match completed {
                    Ok(()) => {
                        assert_eq!(self.entries.get(&key), Some(&Some(len)));
                        self.leases.remove(&key);
                        self.max_bytes = MAX_BYTES;
                    }
                    Err(error) => self.assert_has_no_records(error),
                }
            }
            Step::Release(key) => {
                let Some(Some(claim)) = self.leases.get(&key) else {
                    return;
                };
                self.store.table.release(&claim.lease_ref(1), 0);
                self.leases.remove(&key);
                self.read();
                assert!(!self.entries.contains_key(&key));
            }
            Step::Resolve { key, ref decision } => self.resolve(key, decision, before),
        }
    }

    fn acquire(&mut self, key: u64, before: &BTreeMap<u64, Option<usize>>) {
        let claim = Claim {
            scope: scope_of(key),
            orphans: OrphanPolicy::Refuse,
            ..claim(key)
        };
        let is_own = |other: &u64| other % CALLERS == key % CALLERS;
        let is_small = self.leases.keys().filter(|other| is_own(other)).count() < EIGHTH;
        let acquired = self.store.table.acquire(&claim, 0);
        self.read();
        match acquired {
            Ok(Acquired::Granted { .. }) => {
                assert!(!before.contains_key(&key));
                self.leases.insert(key, Some(claim));
                self.max_bytes = MAX_BYTES;
            }
            Ok(_) => assert_eq!(self.entries, *before),
            Err(StoreError::CallerLimit) => assert!(!is_small),
            Err(error) => self.assert_has_no_records(error),
        }
        if !is_small {
            for (other, record) in before.iter().filter(|(other, _)| !is_own(other)) {
                assert_eq!(self.entries.get(other), Some(record));
            }
        }
    }

    /// A resolution changes its own entry only, and never fails.
    fn resolve(&mut self, key: u64, decision: &Decision, before: BTreeMap<u64, Option<usize>>) {
        let change = match *decision {
            Decision::Delete => Change::Delete,
            Decision::Orphan => Change::Orphan {
                token: OPERATOR,
                retention: HOUR,
            },
            Decision::Complete { len, retention } => Change::Complete {
                token: OPERATOR,
                record: vec![2; len].into(),
                retention,
            },
        };
        let changed = self.store.change(&id(key), |_| true, &change, 0);
        assert_eq!(changed.unwrap(), before.contains_key(&key));
        let mut expected = before;
        if let Some(entry) = expected.get_mut(&key) {
            self.leases.remove(&key);
            match *decision {
                Decision::Delete => {
                    expected.remove(&key);
                }
                Decision::Orphan => {
                    *entry = None;
                    self.leases.insert(key, None);
                }
                Decision::Complete { len, .. } => *entry = Some(len),
            }
        }
        self.read();
        assert_eq!(self.entries, expected);
        self.max_bytes = self.max_bytes.max(self.store.bytes());
    }

    fn read(&mut self) {
        let read = |key| {
            let snapshot = self.store.snapshot(&id(key), 0)?;
            Some((key, snapshot.record.map(|record| record.len())))
        };
        self.entries = (0..KEYS).filter_map(read).collect();
    }

    /// Asserts that a call failed because all entries are leases and orphans.
    fn assert_has_no_records(&self, error: StoreError) {
        assert_full(error);
        assert!(self.entries.values().all(Option::is_none));
    }

    fn assert_counts(&self) {
        for key in self.leases.keys() {
            assert_eq!(self.entries.get(key), Some(&None), "a lease was lost");
        }
        let lens: Vec<usize> = self.entries.values().copied().flatten().collect();
        let (records, bytes) = (lens.len(), lens.iter().sum::<usize>());
        let entries = self.entries.len();
        let store = &self.store;
        assert_eq!(store.len(), entries);
        assert_eq!(store.bytes(), entries * ENTRY_BYTES + bytes);
        assert!(entries <= MAX_ENTRIES && store.bytes() <= self.max_bytes);
        let counted = (records, records * ENTRY_BYTES + bytes, entries - records);
        assert_eq!(store.table.usage_sums(), counted);
    }
}

fn scope_of(key: u64) -> Option<ScopeDigest> {
    claim(key % CALLERS).scope
}
