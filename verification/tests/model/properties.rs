//! Properties that must hold in every state, and states that must be reachable for the properties to be meaningful.

use stateright::Property;

use crate::{
    clients::{Client, Phase},
    state::State,
    store::{Call, Caller, ModelReply, Orphans, State as EntryState},
    system::System,
    tiers::TierRecord,
};

pub(crate) const STORED: &str = "a stored record is never overwritten before it expires";
pub(crate) const AGREE: &str = "responses for a key agree";
pub(crate) const EFFECTS: &str = "effects are at most one and one for each takeover";
pub(crate) const ONCE: &str = "there is at most one effect";
pub(crate) const OWN: &str = "no client is refused its own lease";
pub(crate) const FREE: &str = "every key becomes free or completed in time";
pub(crate) const OTHER: &str = "no client gets the response to another request";
pub(crate) const SAME: &str = "one key executes one request";
pub(crate) const COMMITS: &str = "a request commits once, unless its record is lost";
pub(crate) const TIER: &str = "a tier has the stored record, and no longer than the store";

/// Returns the properties that must hold. `ONCE` holds only if orphans are refused, or with transactions.
pub(crate) fn invariants(orphans: Orphans, transactional: bool) -> Vec<&'static str> {
    let mut names = vec![STORED, AGREE, EFFECTS, OWN, FREE, OTHER, SAME, COMMITS];
    if orphans == Orphans::Refuse || transactional {
        names.push(ONCE);
    }
    names
}

/// Returns the states that must be reachable with more than two clients. Otherwise the check would be meaningless.
pub(crate) fn reachable_states(orphans: Orphans, transactional: bool) -> Vec<&'static str> {
    let mut names = vec!["all get one record", "one waits", "a lease has expired"];
    if orphans == Orphans::TakeOver {
        names.extend([
            "two execute at once after a pause",
            "an orphan has no holder",
            "a third execution runs",
        ]);
    }
    if transactional {
        names.extend([
            "a commit is unacknowledged",
            "an unacknowledged record has expired",
        ]);
    } else {
        names.extend([
            "a response is not stored",
            "a lease is lost",
            "a record is sent again after a lost lease",
        ]);
    }
    names
}

pub(crate) fn named(name: &'static str) -> Property<System> {
    let must_hold: fn(&System, &State) -> bool = match name {
        STORED => |_, state| !state.history.overwritten,
        AGREE => |_, state| !state.history.disagreed,
        EFFECTS => |_, state| state.history.effects <= 1 + state.history.takeovers,
        ONCE => |_, state| state.history.effects <= 1,
        OWN => |_, state| !state.history.locked_out,
        FREE => is_free_in_time,
        OTHER => |_, state| !state.history.leaked,
        SAME => |_, state| !state.history.mixed,
        COMMITS => |_, state| !state.history.recommitted,
        TIER => |_, state| state.tiers.iter().all(|tier| is_stored(state, tier.kept)),
        _ => return Property::sometimes(name, reachable(name)),
    };
    Property::always(name, must_hold)
}

/// Returns `true` if the store has the record that a tier keeps.
fn is_stored(state: &State, kept: Option<TierRecord>) -> bool {
    let Some(kept) = kept else { return true };
    state.entry.is_some_and(|held| {
        let EntryState::Completed { record, .. } = held.state else {
            return false;
        };
        (held.fingerprint, record) == (kept.fingerprint, kept.record)
    })
}

/// Returns `true` if the key becomes free in time. After a lease without any activity, the next request is executed or
/// gets the record. If orphans are refused, it may get the orphan error, and is executed after the orphan has expired.
/// It is also executed after the record has expired.
fn is_free_in_time(system: &System, state: &State) -> bool {
    let times = system.rules.times;
    let next = Caller {
        token: u8::MAX,
        fingerprint: state.entry.map_or(0, |held| held.fingerprint),
    };
    let mut entry = state.entry;
    let mut ask_after = |ticks| {
        for _ in 0..ticks {
            system.rules.tick(&mut entry);
        }
        let mut asked = entry;
        let ask = Call::Acquire(system.orphans);
        system.rules.apply(&mut asked, next, ask)
    };
    match ask_after(times.lease) {
        ModelReply::Granted { .. } => true,
        ModelReply::Completed { .. } => {
            matches!(ask_after(times.retention), ModelReply::Granted { .. })
        }
        ModelReply::Orphaned { .. } => {
            system.orphans == Orphans::Refuse
                && matches!(
                    ask_after(times.orphan_retention),
                    ModelReply::Granted { .. }
                )
        }
        ModelReply::InProgress { .. } | ModelReply::Done | ModelReply::LeaseLost => false,
    }
}

fn reachable(name: &str) -> fn(&System, &State) -> bool {
    match name {
        "all get one record" => |_, state| {
            let mut clients = state.clients.iter();
            state.history.answered.is_some()
                && clients.all(|client| client.phase == Phase::Finished)
        },
        "one waits" => |_, state| is_in(state, Phase::Waiting),
        "a lease has expired" => |_, state| {
            let held = state.entry.map(|held| held.state);
            matches!(held, Some(EntryState::Leased { left: 0, .. }))
        },
        "two execute at once after a pause" => |_, state| {
            let executes = |client: &&_| is_one_of(client, &[Phase::Running, Phase::Executed]);
            state.clients.iter().filter(executes).count() > 1
        },
        "an orphan has no holder" => {
            |_, state| state.entry.is_some_and(|held| held.token.is_none())
        }
        "a third execution runs" => |_, state| state.history.takeovers > 1,
        "a commit is unacknowledged" => |_, state| is_in(state, Phase::Unacknowledged),
        "an unacknowledged record has expired" => |_, state| {
            let mut clients = state.clients.iter().filter(|client| client.committed);
            state.entry.is_none() && clients.any(|client| client.phase == Phase::Unacknowledged)
        },
        "a response is not stored" => |_, state| is_in(state, Phase::Late),
        "a lease is lost" => |_, state| is_in(state, Phase::Lost),
        "a record is sent again after a lost lease" => |_, state| is_in(state, Phase::Resending),
        "each tier has the record" => |_, state| state.tiers.iter().all(|tier| tier.kept.is_some()),
        "a tier no longer has the record" => |_, state| {
            let has_record = state.tiers.iter().any(|tier| tier.kept.is_some());
            let stored = state.entry.map(|held| held.state);
            !has_record && matches!(stored, Some(EntryState::Completed { left: 1, .. }))
        },
        _ => panic!("no property is named {name}"),
    }
}

fn is_in(state: &State, phase: Phase) -> bool {
    let mut clients = state.clients.iter();
    clients.any(|client| is_one_of(client, &[phase]))
}

fn is_one_of(client: &Client, phases: &[Phase]) -> bool {
    phases.contains(&client.phase)
}
