//! Whether what happened may happen, as far as it is not the store's: that is in the books.

use std::collections::BTreeMap;

use http::StatusCode;
use tower_idempotency::{
    OrphanPolicy,
    store::{KeyId, LeaseRef, Token},
};

use super::{
    books::Books,
    history::{Held, Outcome, Reply},
    world::{Execution, Keep, Progress, State},
};

/// An execution begins.
pub(super) fn judge_execution(world: &mut State, number: usize, held: Option<Held>) {
    let Some(lease) = world.executions[number].lease else {
        return world.violated(format!("execution {number} without a lease"));
    };
    let books = world.books.get(&lease.id);
    if !books.is_some_and(|books| books.leases.iter().any(|it| it.token == lease.token)) {
        return world.violated(format!(
            "execution {number} under a lease that was never granted: {held:?}"
        ));
    }
    let before = &world.executions[..number];
    if let Some(other) = before.iter().position(|it| it.is_under(&lease)) {
        world.violated(format!("executions {other} and {number} under one lease"));
    }
}

/// A lease is about to be taken over: not from an execution that runs, in a process that is well, and whose store answers in
/// good time.
pub(super) fn judge_takeover(world: &mut State, id: KeyId, by: Token) {
    let plan = &world.plan;
    let well = plan.faults == 0 && plan.store_timeout <= plan.lease / 3 && world.ahead == 0;
    let holder = world.books.get(&id).and_then(Books::holder);
    let (true, Some(holder)) = (well, holder.filter(|holder| *holder != by)) else {
        return;
    };
    let runs = world.executions.iter().position(|it| {
        let holds = it.lease.is_some_and(|it| it.id == id && it.token == holder);
        let unwell = world.dead[it.process] || world.paused[it.process];
        holds && !unwell && it.state == Progress::Runs
    });
    if let Some(number) = runs {
        world.violated(format!("the lease of execution {number} was not kept"));
    }
}

/// An effect happens, and its handler has looked whether the lease was `held`.
pub(super) fn judge_effect(world: &mut State, number: usize, held: bool) {
    let (now, stepped) = (world.store_now(), world.ahead > 0);
    let Some(lease) = world.executions[number].lease else {
        return;
    };
    let books = world.books.get(&lease.id);
    if held && !stepped && !books.is_some_and(|books| books.holds(lease.token, now)) {
        world.violated(format!(
            "execution {number} was told that it holds its lease, and it is over"
        ));
    }
}

/// An execution is dropped before its end.
pub(super) fn judge_cut(world: &mut State, number: usize, process: usize) {
    if !world.dead[process] {
        world.violated(format!("execution {number} was cut off"));
    }
}

/// A release has reached the store.
pub(super) fn judge_release(world: &mut State, lease: &LeaseRef) {
    let under = world.executions.iter().position(|it| it.is_under(lease));
    let Some(number) = under else {
        return;
    };
    let execution = &world.executions[number];
    if execution.state == Progress::Runs && !world.dead[execution.process] {
        return world.violated(format!("the key is freed while execution {number} runs"));
    }
    let said = execution.answers.last().map(|said| said.keep);
    if execution.state == Progress::Answered && said == Some(Keep::Yes) {
        world.violated(format!(
            "the key is freed though the answer of execution {number} is to be kept"
        ));
    }
}

/// An attempt has ended for its client.
pub(super) fn judge_end(world: &mut State, attempt: usize, outcome: &Outcome) {
    let violation = match outcome {
        Outcome::Answered(reply) => judge_answer(world, attempt, reply),
        Outcome::Refused(reason, status) => judge_refusal(world, attempt, reason, *status),
        Outcome::Panicked
        | Outcome::Failed
        | Outcome::BrokeOff
        | Outcome::Died
        | Outcome::Left
        | Outcome::NoOrphan => Ok(()),
    };
    if let Err(violation) = violation {
        world.violated(format!("attempt {attempt}: {violation}"));
    }
}

fn judge_answer(world: &State, attempt: usize, reply: &Reply) -> Result<(), String> {
    let known = &world.attempts[attempt];
    let Some(number) = reply.execution else {
        return Err(format!("an answer of nobody's: {reply:?}"));
    };
    let Some(execution) = world.executions.get(number) else {
        return Err(format!(
            "the answer of an execution that never was: {reply:?}"
        ));
    };
    if execution.request != known.request {
        return Err(format!(
            "{:?} is answered what {:?} was",
            known.request, execution.request
        ));
    }
    let mut said = execution.answers.iter().rev();
    let said = said.find(|said| said.status == reply.status && said.body == reply.body);
    let Some(said) = said else {
        return Err(format!("execution {number} never said {reply:?}"));
    };
    let own = known.execution == Some(number);
    if !own && world.plan.marks() && !reply.replayed {
        return Err(format!("a replay of execution {number} is not marked"));
    }
    if said.keep == Keep::No {
        // Unless the store's clock has taken the record away before its time.
        if own && execution.is_stored(world) && world.ahead == 0 {
            return Err(format!(
                "execution {number} is answered with something else than it has stored"
            ));
        }
        if own && !reply.replayed {
            return Ok(());
        }
        return Err(format!(
            "what execution {number} said is replayed, and is not to be kept"
        ));
    }
    let committed = said.keep == Keep::Yes && said.status != StatusCode::SERVICE_UNAVAILABLE;
    if world.plan.transactional && committed && execution.effects.is_empty() {
        return Err(format!(
            "the answer of execution {number} without its effect"
        ));
    }
    // What the layer could not store, though it tried and heard nothing, it says once.
    let unheard = execution.completing && !execution.heard && !execution.lost;
    let unheard = unheard && !world.plan.transactional;
    let may_be_alone = own && !reply.replayed && (unheard || said.keep == Keep::Perhaps);
    if !may_be_alone && !execution.is_stored(world) {
        return Err(format!(
            "the answer of execution {number}, which is not what is stored"
        ));
    }
    Ok(())
}

fn judge_refusal(
    world: &State,
    attempt: usize,
    reason: &str,
    status: StatusCode,
) -> Result<(), String> {
    let known = &world.attempts[attempt];
    let may = match reason {
        // After an execution too: it may have lost its lease.
        "outcome-unknown" => return Ok(()),
        "response-not-retained" => {
            let mut others = world.executions.iter();
            return match others.any(|it| it.request == known.request && it.is_unretained()) {
                true => Ok(()),
                false => Err("an answer is said not to be retained, and all were".to_owned()),
            };
        }
        "in-progress" | "store-unavailable" => true,
        "key-reused" => {
            let another = |it: &super::world::Attempt| {
                it.request.key == known.request.key && it.request.variant != known.request.variant
            };
            !world.plan.separates() && world.attempts.iter().any(another)
        }
        "overloaded" => world.plan.crowded,
        "draining" => true,
        "body-timeout" | "body-unreadable" => !known.clean,
        _ => false,
    };
    if !may {
        return Err(format!("refused for no reason: {reason}, {status}"));
    }
    match known.execution {
        Some(number) => Err(format!(
            "{reason} is said to whoever made execution {number}"
        )),
        None => Ok(()),
    }
}

/// Nothing goes wrong any more, and nothing is under way.
pub(super) fn judge_rest(world: &mut State) {
    if let Some(attempt) = world.attempts.iter().position(|it| it.outcome.is_none()) {
        return world.violated(format!("attempt {attempt} has never ended"));
    }
    let mut runs = world.executions.iter();
    let running = runs.position(|it| it.state == Progress::Runs && !world.dead[it.process]);
    if let Some(number) = running {
        return world.violated(format!("execution {number} has never ended"));
    }
    judge_effects(world);
}

/// How often each key had its effect, from when it was free until it was free again.
fn judge_effects(world: &mut State) {
    let mut effects = BTreeMap::<_, u64>::new();
    for execution in &world.executions {
        let Some(lease) = execution.lease else {
            continue;
        };
        for story in &execution.effects {
            *effects.entry((lease.id, *story)).or_default() += 1;
        }
    }
    for ((id, story), effects) in effects {
        let leases = &world.books[&id].leases;
        let granted = leases.iter().filter(|it| it.story == story).count() as u64;
        let may = match world.plan.orphans {
            _ if world.plan.transactional => 1,
            OrphanPolicy::Refuse if world.plan.strikes.takeovers == 0 => 1,
            OrphanPolicy::Refuse => granted,
            OrphanPolicy::TakeOver => granted,
        };
        if effects > may {
            let id = world.name_id(id);
            return world.violated(format!(
                "{effects} effects of entry {id}, of which {may} may be"
            ));
        }
    }
}

impl Execution {
    fn is_under(&self, lease: &LeaseRef) -> bool {
        self.lease
            .is_some_and(|it| it.id == lease.id && it.token == lease.token)
    }

    fn is_unretained(&self) -> bool {
        self.answers.iter().any(|said| said.keep == Keep::Perhaps)
    }

    fn is_stored(&self, world: &State) -> bool {
        self.lease.is_some_and(|lease| {
            let leases = &world.books[&lease.id].leases;
            leases.iter().any(|it| it.token == lease.token && it.stored)
        })
    }
}
