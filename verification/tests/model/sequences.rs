//! The possible calls on an entry, and the calls that lead to each of its states.

use crate::store::{Call, Caller, Entry, Orphans, Rules, State};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Call(Caller, Call),
    Tick,
}

/// Returns all steps: a tick, and all calls of three callers, two with the same request and one with another.
pub(crate) fn all_steps() -> Vec<Step> {
    let mut steps = vec![Step::Tick];
    for (token, fingerprint) in [(1, 1), (2, 1), (3, 2)] {
        let calls = [
            Call::Acquire(Orphans::TakeOver),
            Call::Acquire(Orphans::Refuse),
            Call::Renew,
            Call::Complete,
            Call::Release,
        ];
        let caller = Caller { token, fingerprint };
        steps.extend(calls.map(|call| Step::Call(caller, call)));
    }
    steps
}

fn after(rules: &Rules, mut entry: Option<Entry>, step: Step) -> Option<Entry> {
    match step {
        Step::Tick => rules.tick(&mut entry),
        Step::Call(caller, call) => {
            rules.apply(&mut entry, caller, call);
        }
    }
    entry
}

/// Returns the shortest sequence to each state of the entry, up to this generation.
pub(crate) fn sequences(rules: &Rules, generations: u8) -> Vec<Vec<Step>> {
    let mut known = vec![(None, Vec::new())];
    let mut at = 0;
    while at < known.len() {
        let (entry, sequence) = known[at].clone();
        for step in all_steps() {
            let next = after(rules, entry, step);
            let generation = match next.map(|held| held.state) {
                Some(State::Leased { generation, .. }) => generation,
                Some(State::Completed { .. }) | None => 0,
            };
            if generation <= generations && !known.iter().any(|(entry, _)| *entry == next) {
                let mut longer = sequence.clone();
                longer.push(step);
                known.push((next, longer));
            }
        }
        at += 1;
    }
    known.into_iter().map(|(_, sequence)| sequence).collect()
}
