//! The outside view of a run, as a history of a fleet on real servers, judged by the same oracle.
//!
//! Clients, effects and strikes are described as in a fleet. In a fleet, only the faults of the store show that a key
//! may have one more effect. Here the expected entries contain the time of each such occasion to the millisecond.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderName};
use tower_idempotency::ConcurrentRequests;

use super::{
    Millis,
    history::{AttemptOutcome, EventKind, Reply, Request},
    operator,
    plan::Plan,
    world::{Recording, WorldState},
};
use tests::TestResponse;

use crate::oracle::{Attempt, Effect, History, Occasion, Outcome, Strike};

/// The first violation.
pub(super) fn violation(world: &WorldState) -> Option<String> {
    let history = history_of(world);
    let found = [
        ("contradicts itself", history.contradictions()),
        ("is executed too often", history.excess_effects()),
        ("gets an expired response", history.stale()),
        (
            "gets its response, and is then refused",
            history.retracted(),
        ),
        ("never gets a response", history.keys_without_response()),
    ];
    let mut found = found.into_iter();
    found.find_map(|(what, keys)| {
        let key = keys.into_iter().next()?;
        Some(format!("seen from outside, a key {what}: {key}"))
    })
}

/// Returns the history of the run, with each process as a separate member.
fn history_of(world: &WorldState) -> History {
    let began = Instant::now();
    let instant = |at: Millis| began + Duration::from_millis(at);
    let end = instant(world.now);
    let mut history = History {
        effects: Vec::new(),
        attempts: Vec::with_capacity(world.attempts.len()),
        strikes: Vec::new(),
        occasions: Vec::new(),
        processes: (0..world.dead.len()).map(|it| (pid(it), it)).collect(),
        lease: Duration::from_millis(world.plan.lease),
        max_reply_age: max_reply_age(&world.plan),
        retention: retention(&world.plan),
        problems: PROBLEMS,
    };
    let (mut paused, mut of_operator) = (BTreeMap::new(), Vec::new());
    for event in &world.history {
        let at = instant(event.at);
        match &event.kind {
            EventKind::RequestSent {
                process, request, ..
            } => history.attempts.push(Attempt {
                key: key(&world.plan, *request),
                request: path(*request),
                member: *process,
                began: at,
                // This is the end of the run, and a later event replaces it.
                ended: end,
                outcome: Outcome::HungUp,
            }),
            EventKind::AttemptEnded(attempt, outcome) => {
                history.attempts[*attempt].ended = at;
                history.attempts[*attempt].outcome = client_outcome(world, *attempt, outcome);
            }
            EventKind::Effect { execution, .. } => {
                let known = &world.executions[*execution];
                history.effects.push(Effect {
                    pid: pid(known.process),
                    n: *execution as u64,
                    request: path(known.request),
                    key: key(&world.plan, known.request),
                });
            }
            EventKind::EntryResolved {
                response: Some(response),
                is_applied: true,
                ..
            } => {
                let (effect, attempt) = operator_response(world, *response, at);
                history.effects.push(effect);
                of_operator.push(attempt);
            }
            EventKind::ProcessPaused(process) => drop(paused.insert(*process, at)),
            EventKind::ProcessResumed(process) => {
                let down = paused.remove(process).unwrap_or(at);
                history.strikes.push(strike(*process, down, Some(at)));
            }
            EventKind::ProcessKilled(process) => history.strikes.push(strike(*process, at, None)),
            _ => {}
        }
    }
    history.attempts.extend(of_operator);
    history.processes.insert(OPERATOR, OPERATOR_MEMBER);
    history.occasions = occasions(world, instant);
    history
}

/// Returns an effect and an attempt that stand for a response of an operator. Each client that receives a response must
/// receive this one, and no process had its effect.
fn operator_response(world: &WorldState, number: usize, at: Instant) -> (Effect, Attempt) {
    let response = &world.operator_responses[number];
    let (key, request) = (key(&world.plan, response.request), path(response.request));
    let effect = Effect {
        pid: OPERATOR,
        n: operator::number(number) as u64,
        request: request.clone(),
        key: key.clone(),
    };
    let attempt = Attempt {
        key,
        request,
        member: OPERATOR_MEMBER,
        began: at,
        ended: at,
        outcome: Outcome::Answered(self::response(&response.reply(number))),
    };
    (effect, attempt)
}

/// Returns the longest time that a process waits for a reply of the store.
fn max_reply_age(plan: &Plan) -> Duration {
    match plan.in_flight {
        ConcurrentRequests::Wait(_) => Duration::from_millis(plan.store_timeout),
        _ => Duration::ZERO,
    }
}

/// Returns the retention, or `None` if a record may be stored again after its expiry. That can happen if calls are late, or
/// if the store's clock differs from the simulation's.
fn retention(plan: &Plan) -> Option<Duration> {
    let may_be_late = plan.faults > 0 || plan.strikes.pauses > 0 || plan.strikes.steps > 0;
    (!may_be_late).then(|| Duration::from_millis(plan.retention))
}

/// Returns an occasion for each time an entry became free, by its expiry or by an operator. If a takeover may have an effect
/// of its own, takeovers are included. A broken lease and an allowed retry permit an effect once a takeover uses them. The
/// response of an operator is an occasion for the effect that it stands for.
fn occasions(world: &WorldState, instant: impl Fn(Millis) -> Instant) -> Vec<Occasion> {
    let executed = |event: &super::history::Event| match event.kind {
        EventKind::ExecutionStarted {
            execution,
            lease: Some(held),
            ..
        } => Some((held.id, world.executions[execution].request)),
        _ => None,
    };
    // Only requests that were executed had effects.
    let keys: HashMap<_, _> = world.history.iter().filter_map(executed).collect();
    let occasions = world.history.iter().filter_map(|event| {
        let (id, takeover) = match event.kind {
            EventKind::KeyFreed(id) => (id, false),
            EventKind::LeaseTakenOver(id) if !world.plan.transactional => (id, true),
            EventKind::EntryResolved {
                id,
                response: Some(_),
                is_applied: true,
                ..
            } => (id, true),
            _ => return None,
        };
        let at = instant(event.at);
        Some(Occasion {
            key: Some(key(&world.plan, *keys.get(&id)?)),
            from: at,
            until: at,
            takeover,
        })
    });
    occasions.collect()
}

fn strike(process: usize, down: Instant, resumed: Option<Instant>) -> Strike {
    Strike {
        member: process,
        pid: pid(process),
        ordered: down,
        down,
        resumed,
    }
}

/// Returns the outcome as a client of a fleet reports it.
fn client_outcome(world: &WorldState, attempt: usize, outcome: &AttemptOutcome) -> Outcome {
    match outcome {
        AttemptOutcome::Answered(reply) => match is_recorded(world, attempt, reply) {
            true => Outcome::Answered(response(reply)),
            false => Outcome::NotYet("unkept".to_owned()),
        },
        AttemptOutcome::Refused(reason, _) => match *reason {
            "outcome-unknown" | "response-not-retained" | "key-reused" => Outcome::Refused,
            reason => Outcome::NotYet(reason.to_owned()),
        },
        AttemptOutcome::NoOrphan => Outcome::NotYet("no-orphan".to_owned()),
        AttemptOutcome::Left => Outcome::HungUp,
        AttemptOutcome::Panicked
        | AttemptOutcome::Failed
        | AttemptOutcome::BodyBroken
        | AttemptOutcome::Died => Outcome::Failed,
    }
}

/// Returns `true` if all clients must receive the same response. The handler returned the response and its storage was
/// acknowledged, or the response was stored although that was optional.
fn is_recorded(world: &WorldState, attempt: usize, reply: &Reply) -> bool {
    let number = reply.execution;
    let execution = number.and_then(|number| world.executions.get(number));
    let mut produced = execution.iter().flat_map(|it| it.responses.iter().rev());
    let produced = produced.find(|it| it.status == reply.status && it.body == reply.body);
    let known = &world.attempts[attempt];
    produced.is_none_or(|produced| match produced.recording {
        Recording::Expected => !known.reply_missing,
        Recording::Forbidden => false,
        Recording::Allowed => known.execution != number,
    })
}

fn response(reply: &Reply) -> TestResponse {
    let mut headers = HeaderMap::new();
    if let Some(execution) = reply.execution {
        headers.insert(HeaderName::from_static("x-execution"), execution.into());
    }
    TestResponse {
        status: reply.status,
        headers,
        body: reply.body.clone(),
    }
}

fn key(plan: &Plan, request: Request) -> String {
    match plan.separates_requests() {
        true => format!("{}, {}", request.key, request.variant),
        false => request.key.to_string(),
    }
}

fn path(request: Request) -> String {
    format!("POST /{}", request.variant)
}

fn pid(process: usize) -> u32 {
    u32::try_from(process).expect("a few")
}

/// The operator is a separate member.
const OPERATOR: u32 = u32::MAX;
const OPERATOR_MEMBER: usize = usize::MAX;

/// The problems after which clients of the simulation may retry.
const PROBLEMS: &[&str] = &[
    "unkept",
    "no-orphan",
    "overloaded",
    "caller-limit",
    "draining",
    "body-timeout",
    "body-unreadable",
];
