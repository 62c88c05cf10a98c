//! Tests of the table against a model of the contract that has only a map and a clock.

use bytes::Bytes;
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use self::reference::Model;
use super::{Change, table::Table};
use crate::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, StoreError, Token, Ttl,
};

mod reference;

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
    Resolve {
        id: u8,
        decision: Decision,
    },
    Advance(Millis),
    Sweep,
}

/// Decision of an operator.
#[derive(Clone, Copy, Debug)]
enum Decision {
    Delete,
    Orphan { token: u8, retention: Millis },
    Complete { len: usize, retention: Millis },
}

/// Token of an operator.
const OPERATOR: u8 = 8;
/// Token of an orphan whose retry an operator allows.
const RETRY: u8 = 9;

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
        let retention = prop_oneof![5 => millis.clone(), 1 => Just(Ttl::MAX.as_millis())];
        let orphans = prop_oneof![
            3 => Just(OrphanPolicy::TakeOver),
            2 => Just(OrphanPolicy::Refuse),
            1 => Just(OrphanPolicy::Never),
        ];
        let token = prop_oneof![Just(OPERATOR), Just(RETRY)];
        let decision = prop_oneof![
            1 => Just(Decision::Delete),
            2 => (token, millis.clone()).prop_map(|(token, retention)| Decision::Orphan { token, retention }),
            1 => (0..40usize, retention.clone()).prop_map(|(len, retention)| Decision::Complete { len, retention }),
        ];
        prop_oneof![
            8 => (caller.clone(), millis.clone(), millis.clone(), orphans).prop_map(
                |(caller, lease, orphan_retention, orphans)| Step::Acquire { caller, lease, orphan_retention, orphans }
            ),
            3 => (caller.clone(), millis.clone()).prop_map(|(caller, ttl)| Step::Renew { caller, ttl }),
            4 => (caller.clone(), 0..40usize, retention).prop_map(
                |(caller, len, retention)| Step::Complete { caller, len, retention }
            ),
            2 => caller.prop_map(|caller| Step::Release { caller }),
            2 => (0..3u8, decision).prop_map(|(id, decision)| Step::Resolve { id, decision }),
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
            Step::Resolve { id, decision } => model.resolve(id, decision),
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
            Step::Resolve { id: n, decision } => {
                match table.change(&id(n), &|_| true, &change(decision), now) {
                    Ok(true) => Reply::Done,
                    Ok(false) => Reply::Lost,
                    Err(_) => Reply::Full,
                }
            }
            Step::Advance(by) => {
                subject.now += by * 1_000_000;
                Reply::Done
            }
            Step::Sweep => {
                table.sweep(now);
                let size = (table.budget().entries(), table.budget().bytes());
                assert_eq!(size, model.size(), "entries and bytes once swept");
                assert_eq!(table.usage_sums(), model.usage());
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

fn change(decision: Decision) -> Change {
    match decision {
        Decision::Delete => Change::Delete,
        Decision::Orphan {
            token: n,
            retention,
        } => Change::Orphan {
            token: token(n),
            retention: Ttl::from_millis(retention),
        },
        Decision::Complete { len, retention } => Change::Complete {
            token: token(OPERATOR),
            record: record_by(OPERATOR, len),
            retention: Ttl::from_millis(retention),
        },
    }
}

fn record(caller: Caller, len: usize) -> Bytes {
    record_by(caller.token, len)
}

fn record_by(token: u8, len: usize) -> Bytes {
    vec![token; len].into()
}

fn id(n: u8) -> KeyId {
    KeyId::from_bytes([n; 32])
}

fn fingerprint(n: u8) -> Fingerprint {
    Fingerprint::from_bytes([n; 32])
}

fn token(n: u8) -> Token {
    let mut bytes = [n; 16];
    if n == RETRY {
        bytes[..8].copy_from_slice(&Token::RETRY_ALLOWED);
    }
    Token::from_bytes(bytes)
}
