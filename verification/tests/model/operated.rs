//! The system with an operator that may resolve the entry at any time. All properties hold, except those that a decision
//! of the operator suspends.

use stateright::{Checker, HasDiscoveries, Model, Property};

use crate::{
    holds::system,
    mutant::Mutant,
    state::State,
    store::{Call, Entry, ModelReply, OPERATOR, Orphans, RETRY_ALLOWED, State as EntryState},
    system::{Action, System},
};

/// A decision of the operator about the entry in its present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    BreakLease,
    Free,
    Retry,
    Complete,
    NeedsAttention,
    DeleteRecord,
}

/// The record of an entry that needs attention. No execution makes it.
const ATTENTION: u8 = 102;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    System(Action),
    Operator(Decision),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OperatedState {
    inner: State,
    /// The number of decisions that the operator may still make.
    decisions: u8,
    /// The number of retries that the operator has allowed in this life of the key.
    allowed: u8,
    /// `true` if a broken lease has completed the entry.
    broken_completed: bool,
    /// `true` if the operator freed the key while its lease was held.
    freed_while_held: bool,
}

#[derive(Clone, Debug)]
struct Operated {
    system: System,
    decisions: u8,
    properties: Vec<&'static str>,
}

/// Does not apply to an entry without a holder: the key is free, or a takeover was released without an outcome.
const BROKEN: &str = "a broken lease never completes";
const AGREE: &str = "responses for a key agree";
const STORED: &str = "a stored record is never overwritten before it expires";
const EFFECTS: &str = "effects are at most one and one for each takeover";
const ALLOWED: &str = "an operator allowed each takeover";
const HELD: &str = "a held key is not freed";
const SAME: &str = "one key executes one request";
const OWN: &str = "no client is locked out by its own lease";
const COMMITS: &str = "a request commits once, unless its record is deleted";

impl Operated {
    fn new(system: System, properties: &[&'static str]) -> Self {
        Self {
            system,
            decisions: 2,
            properties: properties.to_vec(),
        }
    }

    fn decide(&self, state: &OperatedState, decision: Decision) -> Option<OperatedState> {
        let mut next = *state;
        next.decisions = state.decisions.checked_sub(1)?;
        let rules = &self.system.rules;
        let entry = next.inner.entry.as_mut()?;
        let (generation, is_held, is_completed) = match entry.state {
            EntryState::Leased {
                generation, left, ..
            } => (generation, left > 0, false),
            // The next execution takes the entry over, like that of an orphan.
            EntryState::Completed { record, .. } => (1, false, record != ATTENTION),
        };
        let is_orphan = matches!(entry.state, EntryState::Leased { .. }) && !is_held;
        let is_unresolved = !is_held && !is_completed;
        let orphan = EntryState::Leased {
            generation,
            left: 0,
            orphan_retention: rules.times.orphan_retention,
        };
        let completed = |record| EntryState::Completed {
            record,
            left: rules.times.retention,
        };
        match decision {
            Decision::BreakLease if is_held => {
                let holder = entry.token.map(usize::from);
                entry.token = (!rules.has(Mutant::BreakRemovesToken)).then_some(OPERATOR);
                entry.state = orphan;
                if let Some(client) = holder.and_then(|at| next.inner.clients.get_mut(at)) {
                    client.broken = true;
                }
            }
            Decision::Free if is_unresolved || is_held && rules.has(Mutant::FreeOfLiveLease) => {
                next.freed_while_held |= is_held;
                next.remove_entry();
            }
            Decision::DeleteRecord if is_completed => {
                next.inner.lose_record();
                next.remove_entry();
            }
            Decision::Retry if is_unresolved => {
                (entry.token, entry.state) = (Some(RETRY_ALLOWED), orphan);
                next.allowed += 1;
            }
            Decision::Complete if is_unresolved => {
                (entry.token, entry.state) = (Some(OPERATOR), completed(OPERATOR));
            }
            Decision::NeedsAttention if is_orphan => {
                (entry.token, entry.state) = (Some(OPERATOR), completed(ATTENTION));
            }
            _ => return None,
        }
        Some(next)
    }
}

impl OperatedState {
    /// Removes the entry, which ends the life of the key.
    fn remove_entry(&mut self) {
        self.inner.entry = None;
        self.inner.end_of_life();
        self.ends();
    }

    /// Begins a new life of the key, in which a lease that was broken before is like any other.
    fn ends(&mut self) {
        self.allowed = 0;
        self.accept_every_outcome();
    }

    fn accept_every_outcome(&mut self) {
        for client in &mut self.inner.clients {
            client.broken = false;
        }
    }
}

impl Model for Operated {
    type State = OperatedState;
    type Action = Step;

    fn init_states(&self) -> Vec<OperatedState> {
        vec![OperatedState {
            inner: self.system.first(),
            decisions: self.decisions,
            allowed: 0,
            broken_completed: false,
            freed_while_held: false,
        }]
    }

    fn actions(&self, state: &OperatedState, actions: &mut Vec<Step>) {
        let mut steps = Vec::new();
        self.system.steps(&state.inner, &mut steps);
        actions.extend(steps.into_iter().map(Step::System));
        let decisions = [
            Decision::BreakLease,
            Decision::Free,
            Decision::Retry,
            Decision::Complete,
            Decision::NeedsAttention,
            Decision::DeleteRecord,
        ];
        if state.decisions > 0 {
            actions.extend(decisions.map(Step::Operator));
        }
    }

    fn next_state(&self, state: &OperatedState, step: Step) -> Option<OperatedState> {
        let mut next = match step {
            Step::Operator(decision) => self.decide(state, decision)?,
            Step::System(action) => {
                let (mut inner, exchange) = self.system.step(&state.inner, action);
                let mut next = *state;
                if let Some((caller, call, response)) = exchange {
                    let at = usize::from(caller.token);
                    match (call, response) {
                        (Call::Complete | Call::Commit, ModelReply::Done) => {
                            next.broken_completed |= inner.clients[at].broken;
                        }
                        // A late call has granted the token another lease. A query never grants one to it.
                        (Call::Acquire(orphans), ModelReply::Granted { .. })
                            if orphans != Orphans::Never =>
                        {
                            inner.clients[at].broken = false;
                        }
                        // The retry is refused, which is not the response of an execution.
                        (
                            Call::Acquire(_),
                            ModelReply::Completed {
                                record: ATTENTION, ..
                            },
                        ) => {
                            inner.history.answered = state.inner.history.answered;
                            inner.history.disagreed = state.inner.history.disagreed;
                        }
                        _ => {}
                    }
                    if self.system.rules.has(Mutant::RetryStaysAllowed)
                        && call == Call::Release
                        && let Some(held) = &mut inner.entry
                        && held.token.is_none()
                    {
                        held.token = Some(RETRY_ALLOWED);
                    }
                }
                next.inner = inner;
                match next.inner.entry {
                    None => next.ends(),
                    // A takeover was released: the entry takes the first outcome, of any execution.
                    Some(Entry { token: None, .. }) => next.accept_every_outcome(),
                    Some(_) => {}
                }
                next
            }
        };
        next.inner = next.inner.canonical();
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let always = |name: &&'static str| {
            let holds: fn(&Self, &OperatedState) -> bool = match *name {
                BROKEN => |_, state| !state.broken_completed,
                AGREE => |_, state| !state.inner.history.disagreed,
                STORED => |_, state| !state.inner.history.overwritten,
                EFFECTS => {
                    |_, state| state.inner.history.effects <= 1 + state.inner.history.takeovers
                }
                ALLOWED => |_, state| state.inner.history.takeovers <= state.allowed,
                HELD => |_, state| !state.freed_while_held,
                SAME => |_, state| !state.inner.history.mixed,
                OWN => |_, state| !state.inner.history.locked_out,
                COMMITS => |_, state| !state.inner.history.recommitted,
                seen => return Property::sometimes(seen, reachable(seen)),
            };
            Property::always(name, holds)
        };
        self.properties.iter().map(always).collect()
    }
}

const A_LEASE_IS_BROKEN: &str = "a lease is broken";
const AN_ALLOWED_RETRY_RUNS: &str = "an allowed retry runs";
const OPERATOR_COMPLETES: &str = "an operator completes the entry";
const KEY_NEEDS_ATTENTION: &str = "the entry needs attention";

fn reachable(name: &str) -> fn(&Operated, &OperatedState) -> bool {
    match name {
        A_LEASE_IS_BROKEN => |_, state| state.inner.clients.iter().any(|client| client.broken),
        AN_ALLOWED_RETRY_RUNS => |_, state| state.inner.history.takeovers > 0 && state.allowed > 0,
        OPERATOR_COMPLETES => |_, state| state.inner.history.answered == Some(OPERATOR),
        KEY_NEEDS_ATTENTION => |_, state| {
            let stored = state.inner.entry.map(|entry| entry.state);
            matches!(
                stored,
                Some(EntryState::Completed {
                    record: ATTENTION,
                    ..
                })
            )
        },
        _ => panic!("no property is named {name}"),
    }
}

/// Checks every property in every reachable state. Asserts that there are `states` of them.
fn holds(system: System, states: usize) {
    let reachable_states = [
        A_LEASE_IS_BROKEN,
        AN_ALLOWED_RETRY_RUNS,
        OPERATOR_COMPLETES,
        KEY_NEEDS_ATTENTION,
    ];
    let seen = Operated::new(system.clone(), &reachable_states).checker();
    let seen = seen.finish_when(HasDiscoveries::All).spawn_bfs().join();
    seen.assert_properties();

    let mut must_hold = vec![BROKEN, AGREE, STORED, EFFECTS, HELD, SAME, OWN, COMMITS];
    if system.orphans == Orphans::Refuse {
        must_hold.push(ALLOWED);
    }
    let checked = Operated::new(system, &must_hold)
        .checker()
        .spawn_bfs()
        .join();
    println!(
        "{} states, {} deep",
        checked.unique_state_count(),
        checked.max_depth()
    );
    checked.assert_properties();
    assert_eq!(checked.unique_state_count(), states);
}

fn refusing() -> System {
    System {
        orphans: Orphans::Refuse,
        ..system(3)
    }
}

#[test]
fn operator_and_three_requests_that_take_over() {
    holds(system(3), 211_057);
}

#[test]
fn operator_and_three_requests_that_refuse() {
    holds(refusing(), 56_831);
}

#[test]
fn operator_and_transactional_requests() {
    let transactional = true;
    holds(
        System {
            transactional,
            ..system(3)
        },
        51_595,
    );
}

#[test]
fn operator_and_late_calls() {
    let late_calls = true;
    holds(
        System {
            late_calls,
            ..system(2)
        },
        165_422,
    );
}

/// Returns the smallest number of steps after which the mutant breaks the property, or `None` if it always holds.
fn breaks(mut system: System, mutant: Mutant, property: &'static str) -> Option<usize> {
    system.rules.mutant = Some(mutant);
    let checked = Operated::new(system, &[property]).checker();
    let checked = checked.finish_when(HasDiscoveries::Any).spawn_bfs().join();
    let path = checked.discovery(property)?;
    println!("broken: {property}\n{path}");
    Some(path.into_actions().len())
}

#[test]
fn each_rule_of_operator_is_needed() {
    for (system, mutant, property, steps) in [
        (system(3), Mutant::BreakRemovesToken, BROKEN, 4),
        (refusing(), Mutant::QueryTakesOver, BROKEN, 6),
        (system(3), Mutant::FreeOfLiveLease, HELD, 2),
        (refusing(), Mutant::RetryStaysAllowed, ALLOWED, 7),
    ] {
        let found = breaks(system, mutant, property);
        assert_eq!(found, Some(steps), "{mutant:?}: {property}");
    }
}
