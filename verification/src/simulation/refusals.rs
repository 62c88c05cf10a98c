//! Judges refusals: the reason of each refusal must follow from the events of the run.
//!
//! The events do not show which attempt made a call. A rule therefore accepts each call that the process made after the
//! request was sent, unless the call is known to be for another key.

use http::StatusCode;
use tower_idempotency::ExecutionFailure;

use super::{
    history::{Event, EventKind, ReplySummary, Request},
    world::{SimulatedAttempt, WorldState},
};

/// Judges a refusal that the client of the attempt received.
pub(super) fn judge_refusal(
    world: &WorldState,
    attempt: usize,
    reason: &str,
    status: StatusCode,
) -> Result<(), String> {
    let known = &world.attempts[attempt];
    let may = match reason {
        "outcome-unknown" => may_be_unknown(world, attempt),
        "response-not-retained" => may_lack_response(world, attempt),
        "in-progress" => has_found(world, attempt, |reply| {
            matches!(reply, ReplySummary::InProgress(_))
        }),
        "store-unavailable" => may_have_failed_call(world, attempt, |call| call == "acquire"),
        "key-reused" => is_key_reused(world, known.request),
        "overloaded" | "caller-limit" => world.plan.crowded,
        "draining" => is_draining(world, known.process),
        "body-timeout" | "body-unreadable" => !known.clean,
        _ => false,
    };
    if !may {
        return Err(format!("refused for no reason: {reason}, {status}"));
    }
    match known.execution {
        Some(number) if !matches!(reason, "outcome-unknown" | "response-not-retained") => Err(
            format!("{reason} is returned to the attempt of execution {number}"),
        ),
        Some(_) | None => Ok(()),
    }
}

/// Returns `true` if the outcome of the request may be unknown. An attempt without an execution must have found an orphan,
/// and the execution of any other attempt must have been disturbed. A record that needs attention is a reason for both.
fn may_be_unknown(world: &WorldState, attempt: usize) -> bool {
    let known = &world.attempts[attempt];
    let is_expected = match known.execution {
        Some(number) => is_disturbed(world, attempt, number),
        None => has_found(world, attempt, |reply| {
            matches!(reply, ReplySummary::Orphaned(_))
        }),
    };
    is_expected || needs_attention(world, known.request)
}

/// Returns `true` if a tombstone was stored for the request. An attempt that executed gets the tombstone only if its
/// execution was disturbed.
fn may_lack_response(world: &WorldState, attempt: usize) -> bool {
    let known = &world.attempts[attempt];
    let mut executions = world.executions.iter();
    let has_tombstone = executions
        .any(|it| it.request == known.request && it.is_unrecordable() && it.is_stored(world));
    let is_expected = |number| is_disturbed(world, attempt, number);
    has_tombstone && known.execution.is_none_or(is_expected)
}

/// Returns `true` if the execution may not return its own response: its lease was lost, or its commit is uncertain.
fn is_disturbed(world: &WorldState, attempt: usize, number: usize) -> bool {
    has_lost_lease(world, number)
        || (world.plan.transactional && is_commit_uncertain(world, attempt, number))
}

/// Returns `true` if the store has reported to the execution that its lease is lost.
fn has_lost_lease(world: &WorldState, number: usize) -> bool {
    let lease = world.history.iter().find_map(|event| match event.kind {
        EventKind::ExecutionStarted {
            execution, lease, ..
        } if execution == number => lease,
        _ => None,
    });
    let is_lost = |event: &Event| match event.kind {
        EventKind::CallArrived {
            token,
            reply: ReplySummary::Lost,
            ..
        } => lease.is_some_and(|lease| lease.token == token),
        _ => false,
    };
    world.history.iter().any(is_lost)
}

/// Returns `true` if the layer may not know the outcome of a commit. The handler failed after its commit, the record may
/// have expired or was deleted, or a call of the process may have failed.
fn is_commit_uncertain(world: &WorldState, attempt: usize, number: usize) -> bool {
    let execution = &world.executions[number];
    execution.has_failed()
        || execution.over.is_some_and(|over| world.now >= over)
        || world.clock_offset > 0
        || execution.was_freed_by_operator(world)
        || may_have_failed_call(world, attempt, |_call| true)
}

/// Returns `true` if a failed execution of the same request left a record that needs attention.
fn needs_attention(world: &WorldState, request: Request) -> bool {
    let mut executions = world.executions.iter();
    world.plan.failure() == ExecutionFailure::NeedsAttention
        && executions.any(|it| it.request == request && it.has_failed() && it.is_stored(world))
}

/// Returns `true` if another request was sent with the same key.
fn is_key_reused(world: &WorldState, request: Request) -> bool {
    let another = |it: &SimulatedAttempt| {
        it.request.key == request.key && it.request.variant != request.variant
    };
    !world.plan.separates_requests() && world.attempts.iter().any(another)
}

fn is_draining(world: &WorldState, process: usize) -> bool {
    let is_start =
        |event: &Event| matches!(event.kind, EventKind::DrainStarted(by) if by == process);
    world.history.iter().any(is_start)
}

/// Returns `true` if the store has given the process such a reply to an acquire of the request's key.
fn has_found(world: &WorldState, attempt: usize, is_such: fn(ReplySummary) -> bool) -> bool {
    let known = &world.attempts[attempt];
    let is_found = |event: &Event| match event.kind {
        EventKind::CallArrived {
            process,
            call: "acquire",
            id,
            reply,
            ..
        } => {
            process == known.process && is_such(reply) && may_be_entry_of(world, id, known.request)
        }
        _ => false,
    };
    events_since_sent(world, attempt).iter().any(is_found)
}

/// Returns `true` if a call of the process, of such a name, may have failed or timed out.
fn may_have_failed_call(world: &WorldState, attempt: usize, is_such: fn(&str) -> bool) -> bool {
    let process = world.attempts[attempt].process;
    let is_faulty = |event: &Event| match event.kind {
        EventKind::CallFaulted {
            process: by, call, ..
        } => by == process && is_such(call),
        _ => false,
    };
    // The timeouts of a request in flight pass during the pause of its process.
    world.was_paused_since_sent(attempt) || events_since_sent(world, attempt).iter().any(is_faulty)
}

/// Returns `false` if the entry is known to be that of another key. An execution shows the entry of its key.
fn may_be_entry_of(world: &WorldState, id: usize, request: Request) -> bool {
    let executed = world.history.iter().find_map(|event| match event.kind {
        EventKind::ExecutionStarted {
            execution,
            lease: Some(held),
            ..
        } if held.id == id => Some(world.executions[execution].request),
        _ => None,
    });
    executed.is_none_or(|executed| {
        executed.key == request.key
            && (executed.variant == request.variant || !world.plan.separates_requests())
    })
}

fn events_since_sent(world: &WorldState, attempt: usize) -> &[Event] {
    let is_sent = |event: &Event| match event.kind {
        EventKind::RequestSent { attempt: sent, .. } => sent == attempt,
        _ => false,
    };
    let sent = world.history.iter().rposition(is_sent);
    &world.history[sent.unwrap_or(0)..]
}
