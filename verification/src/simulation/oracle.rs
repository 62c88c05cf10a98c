//! Judges the facts that are visible only inside the simulation. The expected entries judge the store.
//!
//! The oracle sees leases, their tokens and processes, so it judges each event at once. It judges executions, renewals, the
//! process that frees a key, and the equality of responses and stored records. The whole run, with its clients and effects,
//! is judged by the [oracle](crate::oracle) of fleets on real servers: see [`outside_view`](super::outside_view).

use std::collections::BTreeMap;

use tower_idempotency::{
    ExecutionFailure,
    store::{KeyId, LeaseRef, Token},
};

use super::{
    expected_entry::ExpectedEntry,
    history::{AttemptOutcome, HeldLease, Reply},
    refusals::judge_refusal,
    world::{Execution, Progress, Recording, WorldState},
};

/// Judges the beginning of an execution.
pub(super) fn judge_execution(world: &mut WorldState, number: usize, held: Option<HeldLease>) {
    let Some(lease) = world.executions[number].lease else {
        return world.violated(format!("execution {number} without a lease"));
    };
    let expected = world.expected.get(&lease.id);
    if !expected.is_some_and(|expected| expected.leases.iter().any(|it| it.token == lease.token)) {
        return world.violated(format!(
            "execution {number} under a lease that was never granted: {held:?}"
        ));
    }
    let before = &world.executions[..number];
    if let Some(other) = before.iter().position(|it| it.is_under(&lease)) {
        world.violated(format!("executions {other} and {number} under one lease"));
    }
}

/// Judges a takeover that is about to happen. It is a violation if the execution still runs, its process is well, and the
/// store replies in time. A process is well if it is alive and was not paused since it received the request.
pub(super) fn judge_takeover(world: &mut WorldState, id: KeyId, by: Token) {
    let plan = &world.plan;
    let well = plan.faults == 0 && plan.store_timeout <= plan.lease / 3 && world.clock_offset == 0;
    let holder = world.expected.get(&id).and_then(ExpectedEntry::holder);
    let (true, Some(holder)) = (well, holder.filter(|holder| *holder != by)) else {
        return;
    };
    let runs = world.executions.iter().position(|it| {
        let holds = it.lease.is_some_and(|it| it.id == id && it.token == holder);
        let unwell = world.dead[it.process] || world.was_paused_since_sent(it.attempt);
        holds && !unwell && it.state == Progress::Runs
    });
    if let Some(number) = runs {
        world.violated(format!(
            "the lease of execution {number} was not renewed in time"
        ));
    }
}

/// Judges an effect. `is_held` is `true` if its handler has seen the lease as held.
pub(super) fn judge_effect(world: &mut WorldState, number: usize, is_held: bool) {
    let (now, stepped) = (world.store_now(), world.clock_offset > 0);
    let Some(lease) = world.executions[number].lease else {
        return;
    };
    let expected = world.expected.get(&lease.id);
    // The handler learns of a broken lease only from its next renewal.
    let holds = |expected: &ExpectedEntry| {
        expected.holds(lease.token, now) || expected.was_broken(lease.token, now)
    };
    if is_held && !stepped && !expected.is_some_and(holds) {
        world.violated(format!(
            "execution {number} sees its lease as held after its expiry"
        ));
    }
}

/// Judges a commit that was stored. A second one of an execution is a violation, unless the first record expired early by
/// the store's clock, or an operator deleted it.
pub(super) fn judge_second_commit(world: &mut WorldState, id: KeyId, number: usize) {
    let commits = &world.executions[number].commits;
    let was_freed = world.expected[&id].was_freed_by_operator(commits[0]);
    if commits.len() > 1 && world.clock_offset == 0 && !was_freed {
        world.violated(format!("execution {number} has its effect twice"));
    }
}

/// Judges an execution that is dropped before its end.
pub(super) fn judge_drop(world: &mut WorldState, number: usize, process: usize) {
    if !world.dead[process] {
        world.violated(format!("execution {number} was dropped before its end"));
    }
}

/// Judges a release that has reached the store. `is_held` is `true` if its token held the entry. Returns `true` if the
/// release may free the key.
pub(super) fn judge_release(world: &mut WorldState, lease: &LeaseRef, is_held: bool) -> bool {
    let under = world.executions.iter().position(|it| it.is_under(lease));
    let Some(number) = under else {
        return true;
    };
    let execution = &world.executions[number];
    let produced = execution
        .responses
        .last()
        .map(|produced| produced.recording);
    let runs = execution.state == Progress::Runs && !world.dead[execution.process];
    // A response does not count if the record of an earlier commit may have expired.
    let record_may_have_expired = execution.over.is_some_and(|over| world.now >= over);
    // After a refused completion, a release frees only the lease that a late query may have acquired.
    let keeps = execution.state == Progress::Answered
        && produced == Some(Recording::Expected)
        && !record_may_have_expired
        && !execution.refused;
    // If work of `run_once` returns an error, its key must become free. A released takeover becomes an orphan instead. The
    // generation is that of the execution: a release that revokes a late acquire does not know the one of the store.
    let leaves_key = world.plan.jobs || world.plan.failure() == ExecutionFailure::Release;
    let is_first = execution.lease.is_some_and(|lease| lease.generation == 1);
    let failed = execution.state == Progress::Failed && is_first && !leaves_key && is_held;
    if failed {
        world.violated(format!(
            "the key is freed although execution {number} failed and the settings keep its key"
        ));
    }
    if runs {
        world.violated(format!("the key is freed while execution {number} runs"));
    }
    if keeps {
        world.violated(format!(
            "the key is released although the response of execution {number} should be recorded"
        ));
    }
    !runs && !keeps && !failed
}

/// Judges an attempt that has ended for its client. A failure or a broken body must be that of its own execution. An attempt
/// that found no orphan must have no execution.
pub(super) fn judge_end(world: &mut WorldState, attempt: usize, outcome: &AttemptOutcome) {
    let own = world.attempts[attempt].execution;
    let own = own.map(|number| &world.executions[number]);
    let violation = match outcome {
        AttemptOutcome::Answered(reply) => judge_response(world, attempt, reply),
        AttemptOutcome::Refused(reason, status) => judge_refusal(world, attempt, reason, *status),
        AttemptOutcome::Panicked | AttemptOutcome::Failed
            if own.is_none_or(|own| own.state != Progress::Failed) =>
        {
            Err(format!(
                "it ends as {outcome:?}, but its execution did not fail"
            ))
        }
        AttemptOutcome::BodyBroken if own.is_none_or(|own| !own.has_broken_body()) => {
            Err("its body breaks off, but its handler broke none off".to_owned())
        }
        AttemptOutcome::NoOrphan if own.is_some() => {
            Err("it found no orphan, but executed one".to_owned())
        }
        AttemptOutcome::Panicked
        | AttemptOutcome::Failed
        | AttemptOutcome::BodyBroken
        | AttemptOutcome::Died
        | AttemptOutcome::Left
        | AttemptOutcome::NoOrphan => Ok(()),
    };
    if let Err(violation) = violation {
        world.violated(format!("attempt {attempt}: {violation}"));
    }
}

fn judge_response(world: &WorldState, attempt: usize, reply: &Reply) -> Result<(), String> {
    let known = &world.attempts[attempt];
    let Some(number) = reply.execution else {
        return Err(format!("a response without an execution: {reply:?}"));
    };
    if let Some(response) = world.operator_answer(number) {
        return response.judge(known.request, reply, world.plan.marks_replays());
    }
    let Some(execution) = world.executions.get(number) else {
        return Err(format!("the response of an unknown execution: {reply:?}"));
    };
    if execution.request != known.request {
        return Err(format!(
            "{:?} gets the response to {:?}",
            known.request, execution.request
        ));
    }
    let mut produced = execution.responses.iter().rev();
    let produced =
        produced.find(|produced| produced.status == reply.status && produced.body == reply.body);
    let Some(produced) = produced else {
        return Err(format!("execution {number} never returned {reply:?}"));
    };
    let own = known.execution == Some(number);
    if !own && world.plan.marks_replays() && !reply.replayed {
        return Err(format!("a replay of execution {number} is not marked"));
    }
    if produced.recording == Recording::Forbidden {
        // If the record was stored, this response is a violation, unless the record expired early by the store's clock, or
        // an operator deleted it.
        let is_deleted = world.clock_offset > 0 || execution.was_freed_by_operator(world);
        if own && execution.is_stored(world) && !is_deleted {
            return Err(format!(
                "execution {number} returns a response that differs from its stored one"
            ));
        }
        if own && !reply.replayed {
            return Ok(());
        }
        return Err(format!(
            "a response of execution {number} is replayed that should not be recorded"
        ));
    }
    let perhaps = own && !reply.replayed && produced.recording == Recording::Allowed;
    let may_be_alone = perhaps || lacks_reply(world, attempt, reply);
    if !may_be_alone && !execution.is_stored(world) {
        return Err(format!(
            "the response of execution {number} differs from the stored one"
        ));
    }
    Ok(())
}

/// Returns `true` if the layer tried to store the response, received no reply, and no renewal found the lease lost. Only the
/// first client may receive such a response.
pub(super) fn lacks_reply(world: &WorldState, attempt: usize, reply: &Reply) -> bool {
    let own = world.attempts[attempt].execution;
    let execution = own.filter(|_| own == reply.execution && !reply.replayed);
    let execution = execution.and_then(|number| world.executions.get(number));
    let reply_missing = |it: &Execution| it.completing && !it.received && !it.lost;
    execution.is_some_and(reply_missing) && !world.plan.transactional
}

/// Judges the end of the run: no fault is injected any more, and no exchange is in flight.
pub(super) fn judge_final_state(world: &mut WorldState) {
    if let Some(attempt) = world.attempts.iter().position(|it| it.outcome.is_none()) {
        return world.violated(format!("attempt {attempt} has never ended"));
    }
    let mut runs = world.executions.iter();
    let running = runs.position(|it| it.state == Progress::Runs && !world.dead[it.process]);
    if let Some(number) = running {
        return world.violated(format!("execution {number} has never ended"));
    }
    judge_commits(world);
}

/// Judges the commits of transactions. A key has its effect once in each of its lives. A life begins when the key is
/// free and ends when the key is free again. The expected entry knows in which life the effect was committed. The store
/// does not report other effects; they are judged from outside.
fn judge_commits(world: &mut WorldState) {
    let mut commits = BTreeMap::<_, u64>::new();
    for execution in &world.executions {
        let Some(lease) = execution.lease else {
            continue;
        };
        for life in &execution.commits {
            *commits.entry((lease.id, *life)).or_default() += 1;
        }
    }
    let twice = commits.into_iter().find(|(_, commits)| *commits > 1);
    if let Some(((id, _), commits)) = twice {
        let id = world.name_id(id);
        world.violated(format!(
            "{commits} effects of entry {id}, of which 1 may be"
        ));
    }
}

impl Execution {
    fn is_under(&self, lease: &LeaseRef) -> bool {
        self.lease
            .is_some_and(|it| it.id == lease.id && it.token == lease.token)
    }

    /// Returns `true` if the handler failed, or the body of its last response.
    pub(super) fn has_failed(&self) -> bool {
        let last = self.responses.last();
        self.state == Progress::Failed
            || last.is_some_and(|it| it.recording == Recording::Forbidden || it.breaks)
    }

    /// Returns `true` if the body of one of its responses breaks off.
    fn has_broken_body(&self) -> bool {
        self.responses.iter().any(|produced| produced.breaks)
    }

    /// Returns `true` if a tombstone may be stored in place of a response of the execution.
    pub(super) fn is_unrecordable(&self) -> bool {
        self.responses
            .iter()
            .any(|produced| produced.recording == Recording::Allowed)
    }

    /// Returns `true` if an operator ended the life of the key in which the execution stored its record, or a later life.
    pub(super) fn was_freed_by_operator(&self, world: &WorldState) -> bool {
        self.lease.is_some_and(|lease| {
            let expected = &world.expected[&lease.id];
            let mut leases = expected.leases.iter().filter(|it| it.token == lease.token);
            leases.any(|it| it.stored && expected.was_freed_by_operator(it.life))
        })
    }

    pub(super) fn is_stored(&self, world: &WorldState) -> bool {
        self.lease.is_some_and(|lease| {
            let leases = &world.expected[&lease.id].leases;
            leases.iter().any(|it| it.token == lease.token && it.stored)
        })
    }
}

#[cfg(test)]
mod tests;
