//! Tests of the table against a model of the contract that has only a map and a clock.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::{budget::ENTRY_BYTES, table::Table};
use crate::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, StoreError, Token, Ttl,
};

prop_state_machine! {
    #![proptest_config(ProptestConfig {
        cases: 512,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn memory_store_replies_match_model(sequential 1..100 => Subject);
}

/// Small numbers of milliseconds, so that steps often fall exactly on a deadline, just before it or just after it.
type Millis = u64;

#[derive(Clone, Debug)]
enum Step {
    Acquire {
        caller: Caller,
        lease: Millis,
        orphan_retention: Millis,
        orphans: OrphanPolicy,
    },
    Renew {
        caller: Caller,
        ttl: Millis,
    },
    Complete {
        caller: Caller,
        len: usize,
        retention: Millis,
    },
    Release {
        caller: Caller,
    },
    Advance(Millis),
    Sweep,
}

#[derive(Clone, Copy, Debug)]
struct Caller {
    id: u8,
    token: u8,
    fingerprint: u8,
    generation: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Reply {
    Acquired(Acquired),
    Done,
    Lost,
    Full,
}

#[derive(Clone, Debug, Default)]
struct Model {
    now: Millis,
    entries: BTreeMap<u8, Entry>,
    reply: Option<Reply>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// `None` once a takeover was released.
    token: Option<u8>,
    fingerprint: u8,
    generation: u64,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Leased {
        lease_expires: Millis,
        orphan_retention: Millis,
    },
    Completed {
        record: Bytes,
        expires: Millis,
    },
}

impl Model {
    fn present(&mut self, id: u8) -> Option<&mut Entry> {
        let now = self.now;
        self.entries.retain(|_, entry| match entry.state {
            State::Leased {
                lease_expires,
                orphan_retention,
            } => now < lease_expires + orphan_retention,
            State::Completed { expires, .. } => now < expires,
        });
        self.entries.get_mut(&id)
    }

    fn acquire(
        &mut self,
        caller: Caller,
        lease: Millis,
        orphan_retention: Millis,
        orphans: OrphanPolicy,
    ) -> Acquired {
        let now = self.now;
        let leased = State::Leased {
            lease_expires: now + lease,
            orphan_retention,
        };
        let generation = match self.present(caller.id) {
            None => 1,
            Some(entry) => {
                let fingerprint = fingerprint(entry.fingerprint);
                match &entry.state {
                    State::Completed { record, expires } => {
                        return Acquired::Completed {
                            fingerprint,
                            record: record.clone(),
                            expires_in: Duration::from_millis(expires - now),
                            token: entry.token.map(token),
                        };
                    }
                    State::Leased { .. } if entry.token == Some(caller.token) => {
                        entry.state = leased;
                        return granted(entry.generation);
                    }
                    State::Leased { lease_expires, .. } if now < *lease_expires => {
                        return Acquired::InProgress {
                            fingerprint,
                            expires_in: Duration::from_millis(lease_expires - now),
                        };
                    }
                    State::Leased { lease_expires, .. } => {
                        let same = entry.fingerprint == caller.fingerprint;
                        if !same || orphans == OrphanPolicy::Refuse {
                            return Acquired::Orphaned {
                                fingerprint,
                                since: Duration::from_millis(now - lease_expires),
                            };
                        }
                        entry.generation + 1
                    }
                }
            }
        };
        let entry = Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            generation,
            state: leased,
        };
        self.entries.insert(caller.id, entry);
        granted(generation)
    }

    fn renew(&mut self, caller: Caller, ttl: Millis) -> Reply {
        let now = self.now;
        let Some(entry) = self.present(caller.id) else {
            return Reply::Lost;
        };
        match &mut entry.state {
            State::Leased { lease_expires, .. } if entry.token == Some(caller.token) => {
                *lease_expires = now + ttl;
                Reply::Done
            }
            State::Leased { .. } | State::Completed { .. } => Reply::Lost,
        }
    }

    fn complete(&mut self, caller: Caller, record: Bytes, retention: Millis) -> Reply {
        let expires = self.now + retention;
        let generation = match self.present(caller.id) {
            Some(entry) if entry.token.is_some_and(|token| token != caller.token) => {
                return Reply::Lost;
            }
            Some(Entry {
                state: State::Completed { .. },
                ..
            }) => return Reply::Done,
            Some(held) if held.token.is_some() => held.generation,
            Some(_) | None => caller.generation,
        };
        let completed = Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            generation,
            state: State::Completed { record, expires },
        };
        self.entries.insert(caller.id, completed);
        Reply::Done
    }

    fn release(&mut self, caller: Caller) {
        let now = self.now;
        if let Some(entry) = self.present(caller.id)
            && entry.token == Some(caller.token)
            && let State::Leased { lease_expires, .. } = &mut entry.state
        {
            if entry.generation > 1 {
                *lease_expires = now;
                entry.token = None;
            } else {
                self.entries.remove(&caller.id);
            }
        }
    }

    fn size(&self) -> (usize, usize) {
        let mut live = self.clone();
        let _ = live.present(0);
        let bytes = live.entries.values().map(|entry| match &entry.state {
            State::Leased { .. } => ENTRY_BYTES,
            State::Completed { record, .. } => ENTRY_BYTES + record.len(),
        });
        (live.entries.len(), bytes.sum())
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Self> {
        Just(Self::default()).boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Step> {
        let caller =
            (0..3u8, 0..3u8, 0..2u8, 1..3u64).prop_map(|(id, token, fingerprint, generation)| {
                Caller {
                    id,
                    token,
                    fingerprint,
                    generation,
                }
            });
        let millis = 1..6u64;
        let orphans = prop_oneof![
            3 => Just(OrphanPolicy::TakeOver),
            1 => Just(OrphanPolicy::Refuse),
        ];
        prop_oneof![
            8 => (caller.clone(), millis.clone(), millis.clone(), orphans).prop_map(
                |(caller, lease, orphan_retention, orphans)| Step::Acquire { caller, lease, orphan_retention, orphans }
            ),
            3 => (caller.clone(), millis.clone()).prop_map(|(caller, ttl)| Step::Renew { caller, ttl }),
            4 => (caller.clone(), 0..40usize, millis.clone()).prop_map(
                |(caller, len, retention)| Step::Complete { caller, len, retention }
            ),
            2 => caller.prop_map(|caller| Step::Release { caller }),
            4 => millis.prop_map(Step::Advance),
            1 => Just(Step::Sweep),
        ]
        .boxed()
    }

    fn apply(mut model: Self, step: &Step) -> Self {
        let reply = match *step {
            Step::Acquire {
                caller,
                lease,
                orphan_retention,
                orphans,
            } => Reply::Acquired(model.acquire(caller, lease, orphan_retention, orphans)),
            Step::Renew { caller, ttl } => model.renew(caller, ttl),
            Step::Complete {
                caller,
                len,
                retention,
            } => model.complete(caller, record(caller, len), retention),
            Step::Release { caller } => {
                model.release(caller);
                Reply::Done
            }
            Step::Advance(by) => {
                model.now += by;
                Reply::Done
            }
            Step::Sweep => Reply::Done,
        };
        model.reply = Some(reply);
        model
    }
}

/// The table and its virtual clock.
struct Subject {
    table: Table,
    now: u64,
}

impl StateMachineTest for Subject {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &Model) -> Self {
        Self {
            table: Table::new(2, 100, 1 << 20),
            now: 0,
        }
    }

    fn apply(mut subject: Self, model: &Model, step: Step) -> Self {
        let (table, now) = (&subject.table, subject.now);
        let reply = match step {
            Step::Acquire {
                caller,
                lease,
                orphan_retention,
                orphans,
            } => {
                let claim = Claim {
                    token: token(caller.token),
                    lease: Ttl::from_millis(lease),
                    orphan_retention: Ttl::from_millis(orphan_retention),
                    orphans,
                    ..Claim::new(id(caller.id), fingerprint(caller.fingerprint)).unwrap()
                };
                table
                    .acquire(&claim, now)
                    .map_or(Reply::Full, Reply::Acquired)
            }
            Step::Renew { caller, ttl } => {
                match table.renew(&lease_ref(caller), Ttl::from_millis(ttl), now) {
                    true => Reply::Done,
                    false => Reply::Lost,
                }
            }
            Step::Complete {
                caller,
                len,
                retention,
            } => {
                let retention = Ttl::from_millis(retention);
                match table.complete(&lease_ref(caller), &mut record(caller, len), retention, now) {
                    Ok(()) => Reply::Done,
                    Err(StoreError::LeaseLost) => Reply::Lost,
                    Err(_) => Reply::Full,
                }
            }
            Step::Release { caller } => {
                table.release(&lease_ref(caller), now);
                Reply::Done
            }
            Step::Advance(by) => {
                subject.now += by * 1_000_000;
                Reply::Done
            }
            Step::Sweep => {
                table.sweep(now);
                let size = (table.budget().entries(), table.budget().bytes());
                assert_eq!(size, model.size(), "entries and bytes once swept");
                Reply::Done
            }
        };
        assert_eq!(Some(reply), model.reply);
        subject
    }

    fn check_invariants(subject: &Self, model: &Model) {
        let budget = subject.table.budget();
        let (entries, bytes) = model.size();
        assert!(budget.entries() >= entries && budget.bytes() >= bytes);
    }
}

fn granted(generation: u64) -> Acquired {
    Acquired::Granted {
        generation,
        takeover: generation > 1,
    }
}

fn lease_ref(caller: Caller) -> LeaseRef {
    LeaseRef {
        id: id(caller.id),
        fingerprint: fingerprint(caller.fingerprint),
        token: token(caller.token),
        generation: caller.generation,
        scope: None,
        is_first_completion: false,
    }
}

fn record(caller: Caller, len: usize) -> Bytes {
    vec![caller.token; len].into()
}

fn id(n: u8) -> KeyId {
    KeyId::from_bytes([n; 32])
}

fn fingerprint(n: u8) -> Fingerprint {
    Fingerprint::from_bytes([n; 32])
}

fn token(n: u8) -> Token {
    Token::from_bytes([n; 16])
}
