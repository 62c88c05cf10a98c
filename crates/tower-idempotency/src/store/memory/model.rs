//! The engine against a model of the contract that has nothing but a map and a clock.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::{budget::ENTRY_BYTES, table::Engine};
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
    fn the_memory_store_answers_as_the_model(sequential 1..100 => Subject);
}

/// Milliseconds, few of them: steps must meet deadlines exactly, before and after.
type Millis = u64;

#[derive(Clone, Debug)]
enum Step {
    Acquire {
        who: Who,
        lease: Millis,
        keep: Millis,
        orphans: OrphanPolicy,
    },
    Renew {
        who: Who,
        ttl: Millis,
    },
    Complete {
        who: Who,
        len: usize,
        retention: Millis,
    },
    Release {
        who: Who,
    },
    Advance(Millis),
    Sweep,
}

#[derive(Clone, Copy, Debug)]
struct Who {
    id: u8,
    token: u8,
    fingerprint: u8,
    generation: u64,
}

#[derive(Clone, Debug, PartialEq)]
enum Answer {
    Acquired(Acquired),
    Done,
    Lost,
    Full,
}

#[derive(Clone, Debug, Default)]
struct Model {
    now: Millis,
    entries: BTreeMap<u8, Entry>,
    answer: Option<Answer>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// None once a takeover was released.
    token: Option<u8>,
    fingerprint: u8,
    generation: u64,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Leased { ends: Millis, keep: Millis },
    Completed { record: Bytes, expires: Millis },
}

impl Model {
    fn present(&mut self, id: u8) -> Option<&mut Entry> {
        let now = self.now;
        self.entries.retain(|_, entry| match entry.state {
            State::Leased { ends, keep } => now < ends + keep,
            State::Completed { expires, .. } => now < expires,
        });
        self.entries.get_mut(&id)
    }

    fn acquire(
        &mut self,
        who: Who,
        lease: Millis,
        keep: Millis,
        orphans: OrphanPolicy,
    ) -> Acquired {
        let now = self.now;
        let leased = State::Leased {
            ends: now + lease,
            keep,
        };
        let generation = match self.present(who.id) {
            None => 1,
            Some(entry) => {
                let fingerprint = fingerprint(entry.fingerprint);
                match &entry.state {
                    State::Completed { record, .. } => {
                        return Acquired::Completed {
                            fingerprint,
                            record: record.clone(),
                        };
                    }
                    State::Leased { .. } if entry.token == Some(who.token) => {
                        entry.state = leased;
                        return granted(entry.generation);
                    }
                    State::Leased { ends, .. } if now < *ends => {
                        return Acquired::InProgress {
                            fingerprint,
                            expires_in: Duration::from_millis(ends - now),
                        };
                    }
                    State::Leased { ends, .. } => {
                        let same = entry.fingerprint == who.fingerprint;
                        if !same || orphans == OrphanPolicy::Refuse {
                            return Acquired::Orphaned {
                                fingerprint,
                                since: Duration::from_millis(now - ends),
                            };
                        }
                        entry.generation + 1
                    }
                }
            }
        };
        let entry = Entry {
            token: Some(who.token),
            fingerprint: who.fingerprint,
            generation,
            state: leased,
        };
        self.entries.insert(who.id, entry);
        granted(generation)
    }

    fn renew(&mut self, who: Who, ttl: Millis) -> Answer {
        let now = self.now;
        let Some(entry) = self.present(who.id) else {
            return Answer::Lost;
        };
        match &mut entry.state {
            State::Leased { ends, .. } if entry.token == Some(who.token) => {
                *ends = now + ttl;
                Answer::Done
            }
            State::Leased { .. } | State::Completed { .. } => Answer::Lost,
        }
    }

    fn complete(&mut self, who: Who, record: Bytes, retention: Millis) -> Answer {
        let expires = self.now + retention;
        let completed = Entry {
            token: Some(who.token),
            fingerprint: who.fingerprint,
            generation: who.generation,
            state: State::Completed { record, expires },
        };
        match self.present(who.id) {
            Some(entry) if entry.token.is_some_and(|token| token != who.token) => {
                return Answer::Lost;
            }
            Some(Entry {
                state: State::Completed { .. },
                ..
            }) => {}
            Some(Entry {
                state: State::Leased { .. },
                ..
            })
            | None => {
                self.entries.insert(who.id, completed);
            }
        }
        Answer::Done
    }

    fn release(&mut self, who: Who) {
        let now = self.now;
        if let Some(entry) = self.present(who.id)
            && entry.token == Some(who.token)
            && let State::Leased { ends, .. } = &mut entry.state
        {
            if entry.generation > 1 {
                *ends = now;
                entry.token = None;
            } else {
                self.entries.remove(&who.id);
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
        let who =
            (0..3u8, 0..3u8, 0..2u8, 1..3u64).prop_map(|(id, token, fingerprint, generation)| {
                Who {
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
            8 => (who.clone(), millis.clone(), millis.clone(), orphans).prop_map(
                |(who, lease, keep, orphans)| Step::Acquire { who, lease, keep, orphans }
            ),
            3 => (who.clone(), millis.clone()).prop_map(|(who, ttl)| Step::Renew { who, ttl }),
            4 => (who.clone(), 0..40usize, millis.clone()).prop_map(
                |(who, len, retention)| Step::Complete { who, len, retention }
            ),
            2 => who.prop_map(|who| Step::Release { who }),
            4 => millis.prop_map(Step::Advance),
            1 => Just(Step::Sweep),
        ]
        .boxed()
    }

    fn apply(mut model: Self, step: &Step) -> Self {
        let answer = match *step {
            Step::Acquire {
                who,
                lease,
                keep,
                orphans,
            } => Answer::Acquired(model.acquire(who, lease, keep, orphans)),
            Step::Renew { who, ttl } => model.renew(who, ttl),
            Step::Complete {
                who,
                len,
                retention,
            } => model.complete(who, record(who, len), retention),
            Step::Release { who } => {
                model.release(who);
                Answer::Done
            }
            Step::Advance(by) => {
                model.now += by;
                Answer::Done
            }
            Step::Sweep => Answer::Done,
        };
        model.answer = Some(answer);
        model
    }
}

/// The engine and its virtual clock.
struct Subject {
    engine: Engine,
    now: u64,
}

impl StateMachineTest for Subject {
    type SystemUnderTest = Self;
    type Reference = Model;

    fn init_test(_: &Model) -> Self {
        Self {
            engine: Engine::new(2, 100, 1 << 20),
            now: 0,
        }
    }

    fn apply(mut subject: Self, model: &Model, step: Step) -> Self {
        let (engine, now) = (&subject.engine, subject.now);
        let answer = match step {
            Step::Acquire {
                who,
                lease,
                keep,
                orphans,
            } => {
                let claim = Claim {
                    token: token(who.token),
                    lease: Ttl::from_millis(lease),
                    orphan_retention: Ttl::from_millis(keep),
                    orphans,
                    ..Claim::new(id(who.id), fingerprint(who.fingerprint)).unwrap()
                };
                engine
                    .acquire(&claim, now)
                    .map_or(Answer::Full, Answer::Acquired)
            }
            Step::Renew { who, ttl } => {
                match engine.renew(&lease_ref(who), Ttl::from_millis(ttl), now) {
                    true => Answer::Done,
                    false => Answer::Lost,
                }
            }
            Step::Complete {
                who,
                len,
                retention,
            } => {
                let retention = Ttl::from_millis(retention);
                match engine.complete(&lease_ref(who), record(who, len), retention, now) {
                    Ok(()) => Answer::Done,
                    Err(StoreError::LeaseLost) => Answer::Lost,
                    Err(StoreError::RecordTooLarge { .. } | StoreError::Backend(_)) => Answer::Full,
                }
            }
            Step::Release { who } => {
                engine.release(&lease_ref(who), now);
                Answer::Done
            }
            Step::Advance(by) => {
                subject.now += by * 1_000_000;
                Answer::Done
            }
            Step::Sweep => {
                engine.sweep(now);
                let size = (engine.budget().entries(), engine.budget().bytes());
                assert_eq!(size, model.size(), "entries and bytes once swept");
                Answer::Done
            }
        };
        assert_eq!(Some(answer), model.answer);
        subject
    }

    fn check_invariants(subject: &Self, model: &Model) {
        let budget = subject.engine.budget();
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

fn lease_ref(who: Who) -> LeaseRef {
    LeaseRef {
        id: id(who.id),
        fingerprint: fingerprint(who.fingerprint),
        token: token(who.token),
        generation: who.generation,
    }
}

fn record(who: Who, len: usize) -> Bytes {
    vec![who.token; len].into()
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
