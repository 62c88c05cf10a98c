//! Tests of the table under schedules that a model checker selects: `scripts/shuttle`.

use std::sync::Arc;

use bytes::Bytes;
use shuttle::{future::block_on, thread};
use tokio::time::Instant;

use super::{Change, MemoryStore, Snapshot, budget::ENTRY_BYTES, table::Table};
use crate::{
    inspect::{Inspect, Query, State},
    store::{
        Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, ScopeDigest, StoreError,
        Token, Ttl,
    },
};

const SCHEDULES: usize = 1500;
const LONG: Ttl = Ttl::from_secs(1000);
const SECOND: u64 = 1_000_000_000;

fn explore(test: fn()) {
    shuttle::check_random(test, SCHEDULES);
    shuttle::check_pct(test, SCHEDULES, 3);
}

fn claim(key: u8, token: u8) -> Claim {
    let id = KeyId::from_bytes([key; 32]);
    Claim {
        token: Token::from_bytes([token; 16]),
        lease: Ttl::from_secs(1),
        orphan_retention: LONG,
        ..Claim::new(id, Fingerprint::from_bytes([0; 32])).unwrap()
    }
}

fn is_granted(acquired: &Acquired) -> bool {
    matches!(acquired, Acquired::Granted { .. })
}

/// Returns the scopes of two callers of different groups.
fn scopes_of_two_callers(table: &Table) -> [Option<ScopeDigest>; 2] {
    let scope = |caller: u8| Some(ScopeDigest::from_bytes([caller; 16]));
    let group = |caller: u8| table.shared.group(scope(caller).as_ref());
    let other = (1..).find(|caller| group(*caller) != group(0));
    [0, other.expect("some caller has another group")].map(scope)
}

/// Lets all entries expire. If a counter of a group stayed above zero, the store would reject claims of its callers.
fn assert_counts_return_to_zero(table: &Table) {
    table.sweep(u64::MAX);
    assert_eq!((table.budget().entries(), table.budget().bytes()), (0, 0));
    assert_eq!(table.usage_sums(), (0, 0, 0));
}

// F-052
/// A rejected claim does not end the lease of the holder either.
#[test]
fn one_of_concurrent_claims_is_granted() {
    explore(|| {
        let table = Arc::new(Table::new(2, 100, 1 << 20));
        let claimants: Vec<_> = (0..4)
            .map(|token| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    let claim = claim(1, token);
                    let granted = is_granted(&table.acquire(&claim, 0).unwrap());
                    if !granted {
                        table.release(&claim.lease_ref(1), 0);
                    }
                    granted
                })
            })
            .collect();
        let granted = claimants.into_iter().map(|t| t.join().unwrap());
        assert_eq!(granted.filter(|granted| *granted).count(), 1);
        assert_eq!(table.budget().entries(), 1);
        assert_eq!(table.budget().bytes(), ENTRY_BYTES);
    });
}

#[test]
fn concurrent_complete_release_and_takeover_agree() {
    explore(|| {
        let table = Arc::new(Table::new(2, 100, 1 << 20));
        let (holder, rival) = (claim(1, 1), claim(1, 2));
        table.acquire(&holder, 0).unwrap();
        let lease = holder.lease_ref(1);
        let completing = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let record = Bytes::from_static(b"response");
                table.complete(&lease, &mut record.clone(), LONG, 2 * SECOND)
            })
        };
        let releasing = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.release(&lease, 2 * SECOND))
        };
        let taken = table.acquire(&rival, 2 * SECOND).unwrap();
        releasing.join().unwrap();
        match (completing.join().unwrap(), taken) {
            (Ok(()), Acquired::Completed { record, .. }) => assert_eq!(record, "response"),
            (Err(StoreError::LeaseLost), Acquired::Granted { .. }) => {
                assert!(table.renew(&rival.lease_ref(1), LONG, 2 * SECOND));
            }
            both => panic!("{both:?}"),
        }
        assert_eq!(table.budget().entries(), 1);
        assert_counts_return_to_zero(&table);
    });
}

#[test]
fn takeover_released_during_renewal_is_orphan() {
    explore(|| {
        let table = Arc::new(Table::new(2, 100, 1 << 20));
        let (first, second) = (claim(1, 1), claim(1, 2));
        table.acquire(&first, 0).unwrap();
        table.acquire(&second, 2 * SECOND).unwrap();
        let lease = second.lease_ref(2);
        let renewing = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.renew(&lease, LONG, 2 * SECOND);
            })
        };
        let waiting = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let watch = table.watch(&lease.id, 2 * SECOND);
                while watch.as_ref().is_some_and(|watch| !watch.is_changed()) {
                    thread::yield_now();
                }
            })
        };
        table.release(&lease, 2 * SECOND);
        renewing.join().unwrap();
        waiting.join().unwrap();
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..claim(1, 3)
        };
        let found = table.acquire(&refusing, 2 * SECOND).unwrap();
        assert!(matches!(found, Acquired::Orphaned { .. }), "{found:?}");
        assert_eq!(table.waiter_groups(), 0);
        assert_counts_return_to_zero(&table);
    });
}

#[test]
fn eviction_spares_leases_and_limits_hold() {
    const MAX_ENTRIES: usize = 4;
    const MAX_BYTES: usize = 4 * ENTRY_BYTES + 60;
    explore(|| {
        let table = Arc::new(Table::new(2, MAX_ENTRIES, MAX_BYTES));
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    let mut leases = Vec::new();
                    for n in 0..3 {
                        let claim = claim(worker * 10 + n, worker);
                        match table.acquire(&claim, 0) {
                            Ok(acquired) => assert!(is_granted(&acquired)),
                            Err(_full) => continue,
                        }
                        let lease = claim.lease_ref(1);
                        let record = Bytes::from(vec![worker; 40]);
                        match table.complete(&lease, &mut record.clone(), LONG, 0) {
                            Ok(()) => {}
                            Err(StoreError::Backend(_)) => leases.push(lease),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    assert!(table.budget().entries() <= MAX_ENTRIES);
                    assert!(table.budget().bytes() <= MAX_BYTES);
                    leases
                })
            })
            .collect();
        for worker in workers {
            for lease in worker.join().unwrap() {
                assert!(table.renew(&lease, LONG, 0), "a lease was lost");
                table.release(&lease, 0);
            }
        }
        assert!(table.budget().entries() <= MAX_ENTRIES);
        assert_counts_return_to_zero(&table);
    });
}

/// A search for a record reads counters that other calls change meanwhile. The checker reports a search without end.
#[test]
fn longest_retentions_of_two_callers_hold_limit() {
    const MAX_ENTRIES: usize = 4;
    explore(|| {
        let table = Arc::new(Table::new(2, MAX_ENTRIES, 1 << 20));
        let workers: Vec<_> = scopes_of_two_callers(&table)
            .into_iter()
            .zip([0, 10])
            .map(|(scope, first)| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    let complete = |(lease, retention): (LeaseRef, Ttl)| {
                        let completed = table.complete(&lease, &mut Bytes::new(), retention, 0);
                        completed.expect("the record is empty");
                    };
                    // While it holds a lease, the caller evicts only its own records.
                    let mut held = None;
                    for n in first..first + 4 {
                        let claim = Claim {
                            scope,
                            ..claim(n, 1)
                        };
                        // The other caller can use each entry that this call frees.
                        let Ok(acquired) = table.acquire(&claim, 0) else {
                            continue;
                        };
                        assert!(is_granted(&acquired));
                        let retention = if n % 2 == 0 { Ttl::MAX } else { LONG };
                        if let Some(previous) = held.replace((claim.lease_ref(1), retention)) {
                            complete(previous);
                        }
                        assert!(table.budget().entries() <= MAX_ENTRIES);
                    }
                    if let Some(last) = held {
                        complete(last);
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        assert!(table.budget().entries() <= MAX_ENTRIES);
        assert_counts_return_to_zero(&table);
    });
}

/// The caller holds a lease in a store full of records of another caller. The lease is completed during the caller's next claim,
/// after this claim found no record of its group.
#[test]
fn caller_limit_is_not_reported_as_full_store() {
    explore(|| {
        let table = Arc::new(Table::new(2, 4, 1 << 20));
        let [scope, other] = scopes_of_two_callers(&table);
        let falls_into = |shard| {
            let table = &table;
            move |key: &u8| table.shard_of(&claim(*key, 0).id) == shard
        };
        // The shard of the claim has no record that the claim could evict.
        let key = (1..).find(falls_into(0)).expect("some key falls there");
        let mut others = (1..).filter(falls_into(1));
        let held = Claim {
            scope,
            ..claim(others.next().expect("some key falls there"), 1)
        };
        table.acquire(&held, 0).unwrap();
        for key in others.take(3) {
            let completed = Claim {
                scope: other,
                ..claim(key, 0)
            };
            let lease = completed.lease_ref(1);
            table.complete(&lease, &mut Bytes::new(), LONG, 0).unwrap();
        }
        let completing = {
            let table = Arc::clone(&table);
            let lease = held.lease_ref(1);
            thread::spawn(move || table.complete(&lease, &mut Bytes::new(), LONG, 0))
        };
        let next = Claim {
            scope,
            ..claim(key, 2)
        };
        match table.acquire(&next, 0) {
            Ok(acquired) => assert!(is_granted(&acquired)),
            Err(StoreError::CallerLimit) => {}
            Err(error) => panic!("{error}"),
        }
        completing.join().unwrap().unwrap();
        assert_counts_return_to_zero(&table);
    });
}

/// The lease has expired, and its holder still runs.
#[test]
fn one_of_completion_resolution_and_takeover_wins() {
    explore(|| {
        let store = MemoryStore {
            table: Arc::new(Table::new(2, 100, 1 << 20)),
            epoch: Instant::now(),
        };
        let (holder, rival) = (claim(1, 1), claim(1, 2));
        store.table.acquire(&holder, 0).unwrap();
        let lease = holder.lease_ref(1);
        let completing = {
            let table = Arc::clone(&store.table);
            thread::spawn(move || {
                let mut record = Bytes::from_static(b"holder");
                let completed = table.complete(&lease, &mut record, LONG, 2 * SECOND);
                completed.is_ok()
            })
        };
        let resolving = {
            let store = store.clone();
            thread::spawn(move || {
                let is_as_seen = |snapshot: &Snapshot| {
                    snapshot.record.is_none() && snapshot.token == Some(lease.token)
                };
                let change = Change::Complete {
                    token: Token::from_bytes([3; 16]),
                    record: Bytes::from_static(b"operator"),
                    retention: LONG,
                };
                let changed = store.change(&lease.id, is_as_seen, &change, 2 * SECOND);
                changed.unwrap()
            })
        };
        let taken = store.table.acquire(&rival, 2 * SECOND).unwrap();
        let (completed, resolved) = (completing.join().unwrap(), resolving.join().unwrap());
        let won = [completed, resolved, is_granted(&taken)];
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "{won:?}");
        let found = store.table.acquire(&claim(1, 4), 2 * SECOND).unwrap();
        match found {
            Acquired::Completed { record, .. } if completed => assert_eq!(record, "holder"),
            Acquired::Completed { record, .. } if resolved => assert_eq!(record, "operator"),
            Acquired::InProgress { .. } if is_granted(&taken) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(store.table.budget().entries(), 1);
        assert_counts_return_to_zero(&store.table);
    });
}

/// A reservation made by evicting from another shard is returned if another claim acquired the key meanwhile.
#[test]
fn unused_reservation_is_returned() {
    explore(|| {
        let table = Arc::new(Table::new(2, 2, 1 << 20));
        // The key belongs to one shard, the records to the other.
        let falls_into = |shard| {
            let table = &table;
            move |key: &u8| table.shard_of(&claim(*key, 0).id) == shard
        };
        let key = (1..).find(falls_into(0)).expect("some key falls there");
        for other in (1..).filter(falls_into(1)).take(2) {
            let lease = claim(other, 0).lease_ref(1);
            table.complete(&lease, &mut Bytes::new(), LONG, 0).unwrap();
        }
        let claimants: Vec<_> = (1..4)
            .map(|token| {
                let table = Arc::clone(&table);
                thread::spawn(move || table.acquire(&claim(key, token), 0))
            })
            .collect();
        // A claim fails with a full store while two others hold reservations and only one of them is used.
        let granted = claimants
            .into_iter()
            .filter_map(|claimant| claimant.join().unwrap().ok())
            .map(|acquired| is_granted(&acquired));
        assert_eq!(granted.filter(|granted| *granted).count(), 1);
        let (entries, bytes) = (table.budget().entries(), table.budget().bytes());
        assert!((1..=2).contains(&entries), "{entries}");
        assert_eq!(bytes, entries * ENTRY_BYTES);
        assert_counts_return_to_zero(&table);
    });
}

/// An eviction that ignores a lowered limit would loop endlessly, which the checker reports.
#[test]
fn lowered_limit_ends_eviction() {
    explore(|| {
        let table = Arc::new(Table::new(2, 2, 1 << 20));
        let falls_into = |shard| {
            let table = &table;
            move |key: &u8| table.shard_of(&claim(*key, 0).id) == shard
        };
        let key = (1..).find(falls_into(0)).expect("some key falls there");
        for other in (1..).filter(falls_into(1)).take(2) {
            let lease = claim(other, 0).lease_ref(1);
            table.complete(&lease, &mut Bytes::new(), LONG, 0).unwrap();
        }
        let lowering = {
            let table = Arc::clone(&table);
            thread::spawn(move || table.budget().set_max_entries(0))
        };
        // The claim is granted before the limit is lowered, or rejected.
        let _ = table.acquire(&claim(key, 1), 0);
        lowering.join().unwrap();
    });
}

/// A renewal moves a lease to the end of the order, which a listing reads in parts of two entries.
#[test]
fn renewed_lease_is_listed_once() {
    explore(|| {
        let store = MemoryStore {
            table: Arc::new(Table::new(1, 100, 1 << 20)),
            epoch: Instant::now(),
        };
        for key in 1..4 {
            let claim = Claim {
                lease: Ttl::from_secs(1_000 + u64::from(key)),
                ..claim(key, key)
            };
            store.table.acquire(&claim, 0).unwrap();
        }
        let renewing = {
            let table = Arc::clone(&store.table);
            let lease = claim(1, 1).lease_ref(1);
            thread::spawn(move || assert!(table.renew(&lease, Ttl::from_secs(2_000), 0)))
        };
        let page = block_on(store.list(&Query::new(State::InProgress))).unwrap();
        renewing.join().unwrap();
        let mut ids: Vec<_> = page.entries.iter().map(|entry| *entry.id()).collect();
        ids.sort();
        assert_eq!(ids, [1, 2, 3].map(|key| claim(key, key).id));
    });
}

/// A waiter that missed the change would yield endlessly, which the checker reports.
#[test]
fn no_change_is_missed_between_query_and_wait() {
    const ID: KeyId = KeyId::from_bytes([1; 32]);
    explore(|| {
        let table = Arc::new(Table::new(2, 100, 1 << 20));
        let holder = claim(1, 1);
        table.acquire(&holder, 0).unwrap();
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let table = Arc::clone(&table);
                thread::spawn(move || {
                    let watch = table.watch(&ID, 0);
                    // A dropped waiter does not remove the registration of another waiter.
                    drop(table.watch(&ID, 0));
                    while watch.as_ref().is_some_and(|watch| !watch.is_changed()) {
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let lease = holder.lease_ref(1);
        table.complete(&lease, &mut Bytes::new(), LONG, 0).unwrap();
        for waiter in waiters {
            waiter.join().unwrap();
        }
        assert_eq!(table.waiter_groups(), 0);
    });
}
