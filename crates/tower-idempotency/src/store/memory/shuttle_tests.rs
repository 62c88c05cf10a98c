//! The engine under schedules that a checker picks: `scripts/shuttle`.

use std::sync::Arc;

use bytes::Bytes;
use shuttle::thread;

use super::{budget::ENTRY_BYTES, table::Engine};
use crate::store::{Acquired, Claim, Fingerprint, KeyId, OrphanPolicy, StoreError, Token, Ttl};

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

/// fm 31: a refused claim does not end the holder's lease either.
#[test]
fn one_of_the_claims_at_once_is_granted() {
    explore(|| {
        let engine = Arc::new(Engine::new(2, 100, 1 << 20));
        let claimants: Vec<_> = (0..4)
            .map(|token| {
                let engine = Arc::clone(&engine);
                thread::spawn(move || {
                    let claim = claim(1, token);
                    let granted = is_granted(&engine.acquire(&claim, 0).unwrap());
                    if !granted {
                        engine.release(&claim.lease_ref(1), 0);
                    }
                    granted
                })
            })
            .collect();
        let granted = claimants.into_iter().map(|t| t.join().unwrap());
        assert_eq!(granted.filter(|granted| *granted).count(), 1);
        assert_eq!(engine.budget().entries(), 1);
        assert_eq!(engine.budget().bytes(), ENTRY_BYTES);
    });
}

#[test]
fn a_complete_a_release_and_a_takeover_at_once_agree() {
    explore(|| {
        let engine = Arc::new(Engine::new(2, 100, 1 << 20));
        let (holder, rival) = (claim(1, 1), claim(1, 2));
        engine.acquire(&holder, 0).unwrap();
        let lease = holder.lease_ref(1);
        let completing = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let record = Bytes::from_static(b"answer");
                engine.complete(&lease, record, LONG, 2 * SECOND)
            })
        };
        let releasing = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || engine.release(&lease, 2 * SECOND))
        };
        let taken = engine.acquire(&rival, 2 * SECOND).unwrap();
        releasing.join().unwrap();
        match (completing.join().unwrap(), taken) {
            (Ok(()), Acquired::Completed { record, .. }) => assert_eq!(record, "answer"),
            (Err(StoreError::LeaseLost), Acquired::Granted { .. }) => {
                assert!(engine.renew(&rival.lease_ref(1), LONG, 2 * SECOND));
            }
            both => panic!("{both:?}"),
        }
        assert_eq!(engine.budget().entries(), 1);
        engine.sweep(u64::MAX);
        assert_eq!((engine.budget().entries(), engine.budget().bytes()), (0, 0));
    });
}

#[test]
fn a_takeover_that_is_released_under_a_renewal_and_a_waiter_is_an_orphan() {
    explore(|| {
        let engine = Arc::new(Engine::new(2, 100, 1 << 20));
        let (first, second) = (claim(1, 1), claim(1, 2));
        engine.acquire(&first, 0).unwrap();
        engine.acquire(&second, 2 * SECOND).unwrap();
        let lease = second.lease_ref(2);
        let renewing = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                engine.renew(&lease, LONG, 2 * SECOND);
            })
        };
        let waiting = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let watch = engine.watch(&lease.id, 2 * SECOND);
                while watch.as_ref().is_some_and(|watch| !watch.is_over()) {
                    thread::yield_now();
                }
            })
        };
        engine.release(&lease, 2 * SECOND);
        renewing.join().unwrap();
        waiting.join().unwrap();
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..claim(1, 3)
        };
        let found = engine.acquire(&refusing, 2 * SECOND).unwrap();
        assert!(matches!(found, Acquired::Orphaned { .. }), "{found:?}");
        assert_eq!(engine.waiting(), 0);
        engine.sweep(u64::MAX);
        assert_eq!((engine.budget().entries(), engine.budget().bytes()), (0, 0));
    });
}

#[test]
fn eviction_takes_no_lease_and_the_bounds_hold_throughout() {
    const MAX_ENTRIES: usize = 4;
    const MAX_BYTES: usize = 4 * ENTRY_BYTES + 60;
    explore(|| {
        let engine = Arc::new(Engine::new(2, MAX_ENTRIES, MAX_BYTES));
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let engine = Arc::clone(&engine);
                thread::spawn(move || {
                    let mut held = Vec::new();
                    for n in 0..3 {
                        let claim = claim(worker * 10 + n, worker);
                        match engine.acquire(&claim, 0) {
                            Ok(acquired) => assert!(is_granted(&acquired)),
                            Err(_full) => continue,
                        }
                        let lease = claim.lease_ref(1);
                        let record = Bytes::from(vec![worker; 40]);
                        match engine.complete(&lease, record, LONG, 0) {
                            Ok(()) => {}
                            Err(StoreError::Backend(_)) => held.push(lease),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    assert!(engine.budget().entries() <= MAX_ENTRIES);
                    assert!(engine.budget().bytes() <= MAX_BYTES);
                    held
                })
            })
            .collect();
        for worker in workers {
            for lease in worker.join().unwrap() {
                assert!(engine.renew(&lease, LONG, 0), "a lease was lost");
                engine.release(&lease, 0);
            }
        }
        assert!(engine.budget().entries() <= MAX_ENTRIES);
        engine.sweep(u64::MAX);
        assert_eq!((engine.budget().entries(), engine.budget().bytes()), (0, 0));
    });
}

/// Room that another shard's record made is given back when the key was taken meanwhile.
#[test]
fn a_reservation_that_is_not_needed_is_given_back() {
    explore(|| {
        let engine = Arc::new(Engine::new(2, 2, 1 << 20));
        // The key falls into one shard, the records into the other.
        let falls_into = |shard| {
            let engine = &engine;
            move |key: &u8| engine.shard_of(&claim(*key, 0).id) == shard
        };
        let key = (1..).find(falls_into(0)).expect("some key falls there");
        for other in (1..).filter(falls_into(1)).take(2) {
            let lease = claim(other, 0).lease_ref(1);
            engine.complete(&lease, Bytes::new(), LONG, 0).unwrap();
        }
        let claimants: Vec<_> = (1..4)
            .map(|token| {
                let engine = Arc::clone(&engine);
                thread::spawn(move || engine.acquire(&claim(key, token), 0))
            })
            .collect();
        // Full is who comes while two others hold room that only one of them will use.
        let granted = claimants
            .into_iter()
            .filter_map(|claimant| claimant.join().unwrap().ok())
            .map(|acquired| is_granted(&acquired));
        assert_eq!(granted.filter(|granted| *granted).count(), 1);
        let (entries, bytes) = (engine.budget().entries(), engine.budget().bytes());
        assert!((1..=2).contains(&entries), "{entries}");
        assert_eq!(bytes, entries * ENTRY_BYTES);
        engine.sweep(u64::MAX);
        assert_eq!((engine.budget().entries(), engine.budget().bytes()), (0, 0));
    });
}

/// Whoever makes room while a bound is lowered would look for it for ever, which the checker reports.
#[test]
fn a_bound_that_is_lowered_while_room_is_made_ends_that() {
    explore(|| {
        let engine = Arc::new(Engine::new(2, 2, 1 << 20));
        let falls_into = |shard| {
            let engine = &engine;
            move |key: &u8| engine.shard_of(&claim(*key, 0).id) == shard
        };
        let key = (1..).find(falls_into(0)).expect("some key falls there");
        for other in (1..).filter(falls_into(1)).take(2) {
            let lease = claim(other, 0).lease_ref(1);
            engine.complete(&lease, Bytes::new(), LONG, 0).unwrap();
        }
        let lowering = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || engine.budget().set_max_entries(0))
        };
        // Granted before, or refused.
        let _ = engine.acquire(&claim(key, 1), 0);
        lowering.join().unwrap();
    });
}

/// A waiter that missed the change would yield for ever, which the checker reports.
#[test]
fn no_change_falls_between_a_look_and_the_wait() {
    const ID: KeyId = KeyId::from_bytes([1; 32]);
    explore(|| {
        let engine = Arc::new(Engine::new(2, 100, 1 << 20));
        let holder = claim(1, 1);
        engine.acquire(&holder, 0).unwrap();
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let engine = Arc::clone(&engine);
                thread::spawn(move || {
                    let watch = engine.watch(&ID, 0);
                    // One that leaves takes nobody else's registration along.
                    drop(engine.watch(&ID, 0));
                    while watch.as_ref().is_some_and(|watch| !watch.is_over()) {
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let lease = holder.lease_ref(1);
        engine.complete(&lease, Bytes::new(), LONG, 0).unwrap();
        for waiter in waiters {
            waiter.join().unwrap();
        }
        assert_eq!(engine.waiting(), 0);
    });
}
