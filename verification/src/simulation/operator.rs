//! An operator reads entries and resolves them, or finishes an orphan.
//!
//! The operator is another program than the processes: it calls the store as `Inspect` does. Time passes between reading
//! and deciding, so that the entry may have changed. A decision may arrive late, twice, or not at all.

use bytes::Bytes;
use http::{Response, StatusCode};
use tower_idempotency::{
    IdempotencyLayer,
    inspect::{Resolution, Seen, State as SeenState},
    store::{Claim, Fingerprint, KeyId, LeaseRef},
};

use super::{
    client::{self, Leave},
    expected_entry::ExpectedView,
    history::{EventKind, Reply, Request},
    link::Link,
    plan::ttl,
    process::Process,
    world::{Progress, ScheduledEvent, SimulatedAttempt, WorldState},
};

/// A decision about an entry that has not reached the store yet.
#[derive(Clone)]
pub(super) struct Decision {
    number: usize,
    seen: Seen,
    expected: ExpectedView,
    resolution: Resolution,
    /// The index of the response that the decision stores.
    response: Option<usize>,
    /// The number of times that the operator may still read the entry.
    looks: u64,
}

/// A response that an operator stored, or tried to store.
#[derive(Debug)]
pub(super) struct OperatorResponse {
    pub(super) request: Request,
    body: Bytes,
    is_stored: bool,
}

/// Responses of operators are numbered like executions, from here on.
const FIRST_RESPONSE: usize = 1_000_000;

/// Returns the number of an operator's response, which replaces the number of an execution.
pub(super) fn number(response: usize) -> usize {
    FIRST_RESPONSE + response
}

impl OperatorResponse {
    /// Returns the response of this index, as a client receives it.
    pub(super) fn reply(&self, response: usize) -> Reply {
        Reply {
            status: StatusCode::CREATED,
            execution: Some(number(response)),
            replayed: false,
            body: self.body.clone(),
        }
    }

    /// Judges the reply of an attempt that received this response.
    pub(super) fn judge(
        &self,
        request: Request,
        reply: &Reply,
        marks_replays: bool,
    ) -> Result<(), String> {
        if !self.is_stored {
            return Err(format!("a response that no operator has stored: {reply:?}"));
        }
        if self.request != request {
            let of = self.request;
            return Err(format!("{request:?} gets an operator's response to {of:?}"));
        }
        if reply.status != StatusCode::CREATED || reply.body != self.body {
            return Err(format!("the operator's response is changed: {reply:?}"));
        }
        if marks_replays && !reply.replayed {
            return Err("a replay of an operator's response is not marked".to_owned());
        }
        Ok(())
    }
}

impl WorldState {
    /// Returns the response of an operator with this number.
    pub(super) fn operator_answer(&self, number: usize) -> Option<&OperatorResponse> {
        self.operator_responses
            .get(number.checked_sub(FIRST_RESPONSE)?)
    }

    /// Reads an entry for an operator, which may then resolve it. `layer` encodes responses.
    pub(super) fn inspect(
        &mut self,
        id: Option<KeyId>,
        looks: u64,
        layer: Option<&IdempotencyLayer>,
    ) {
        let Some(looks) = looks.checked_sub(1) else {
            return;
        };
        let Some(id) = id.or_else(|| self.any_entry()) else {
            return self.inspect_later(None, looks);
        };
        let now = self.store_now();
        let found = self.backend.inspect(id, now);
        let expected = self.expected.entry(id).or_default();
        let life = expected.life;
        let view = expected.view(now);
        let is_freed = expected.life > life;
        let name = self.name_id(id);
        if is_freed {
            self.record_event(EventKind::KeyFreed(name));
        }
        self.record_event(EventKind::EntryRead {
            id: name,
            state: found.map(|(seen, _)| seen.state().name()),
        });
        let seen_as = found.map(|(seen, _)| (seen.state(), seen.generation()));
        if seen_as != view.map(|view| (view.state, view.generation)) {
            self.violated(format!("an operator sees {seen_as:?}, expected {view:?}"));
        }
        let (Some((seen, fingerprint)), Some(expected)) = (found, view) else {
            return self.inspect_later(Some(id), looks);
        };
        let Some((resolution, response)) = self.decide(&seen, fingerprint, layer) else {
            return self.inspect_later(Some(id), looks);
        };
        self.decisions += 1;
        self.send_decision(Decision {
            number: self.decisions,
            seen,
            expected,
            resolution,
            response,
            looks,
        });
    }

    /// Returns the entry of any execution.
    fn any_entry(&mut self) -> Option<KeyId> {
        let count = self.executions.len();
        if count == 0 {
            return None;
        }
        let execution = self.random.index(count);
        self.executions[execution].lease.map(|lease| lease.id)
    }

    /// Schedules an operator on `host` for the expiry of each lease that an execution in the process holds. At other times,
    /// few entries are orphans.
    pub(super) fn take_over_orphans_of(&mut self, process: usize, host: usize) {
        let now = self.store_now();
        let executions = self.executions.iter();
        let running = executions.filter(|it| it.process == process && it.state == Progress::Runs);
        let held = running.filter_map(|it| {
            let lease = it.lease?;
            let expected = self.expected.get(&lease.id)?;
            (expected.holder() == Some(lease.token)).then(|| expected.last_end())
        });
        let expiries: Vec<_> = held.collect();
        for expiry in expiries {
            self.after(expiry.saturating_sub(now), ScheduledEvent::TakeOver(host));
        }
    }

    /// Returns the request and the lease of an execution that left an orphan, or of any execution if there is no orphan.
    fn draw_execution(&mut self) -> Option<(Request, LeaseRef)> {
        let count = self.executions.len();
        if count == 0 {
            return None;
        }
        let (drawn, now) = (self.random.index(count), self.store_now());
        // Only one number is drawn. Another one would change runs that tests name by their seeds.
        let mut from_drawn = self.executions.iter().cycle().skip(drawn).take(count);
        let orphaned = from_drawn.find(|it| {
            it.lease.is_some_and(|lease| {
                let found = self.backend.inspect(lease.id, now);
                found.is_some_and(|(seen, fingerprint)| {
                    seen.state() == SeenState::Orphaned && fingerprint == lease.fingerprint
                })
            })
        });
        let execution = orphaned.unwrap_or(&self.executions[drawn]);
        Some((execution.request, execution.lease?))
    }

    fn inspect_later(&mut self, id: Option<KeyId>, looks: u64) {
        if looks > 0 {
            let lease = self.plan.lease;
            let pause = self.random.pick(&[1, lease / 4, lease, lease * 2]);
            self.after(pause, ScheduledEvent::Inspect(id, looks));
        }
    }

    /// Draws a resolution that applies to the state that was seen, or `None` if the operator waits.
    fn decide(
        &mut self,
        seen: &Seen,
        fingerprint: Fingerprint,
        layer: Option<&IdempotencyLayer>,
    ) -> Option<(Resolution, Option<usize>)> {
        let resolution = match seen.state() {
            SeenState::InProgress if self.random.percent(60) => Resolution::BreakLease,
            SeenState::Completed if self.random.percent(40) => Resolution::DeleteRecord,
            SeenState::InProgress | SeenState::Completed => return None,
            _ => match self.random.below(8) {
                0 => return None,
                1 | 2 => Resolution::Free,
                3..6 => Resolution::Retry,
                _ => {
                    let (record, response) = self.respond(seen.id(), fingerprint, layer)?;
                    let retention = ttl(self.plan.retention);
                    return Some((Resolution::Complete { record, retention }, Some(response)));
                }
            },
        };
        Some((resolution, None))
    }

    /// Returns the record of a response to the request of the entry, and the index of the response.
    fn respond(
        &mut self,
        id: &KeyId,
        fingerprint: Fingerprint,
        layer: Option<&IdempotencyLayer>,
    ) -> Option<(Bytes, usize)> {
        let mut executions = self.executions.iter();
        let is_of_entry = |lease: &LeaseRef| lease.id == *id && lease.fingerprint == fingerprint;
        let execution = executions.find(|it| it.lease.as_ref().is_some_and(is_of_entry))?;
        let request = execution.request;
        let response = self.operator_responses.len();
        let text = format!("operator's response {response}");
        let record = if self.plan.jobs {
            layer?.encode_value_record(id, &(number(response), &text))
        } else {
            let res = Response::builder().status(StatusCode::CREATED);
            let res = res.header("x-execution", number(response));
            let res = res.body(Bytes::from(text.clone()));
            layer?.encode_response_record(id, &res.expect("a valid response"))
        };
        self.operator_responses.push(OperatorResponse {
            request,
            body: text.into(),
            is_stored: false,
        });
        Some((record, response))
    }

    /// Sends a decision after the time that the operator needs for it, and draws how it is delivered.
    fn send_decision(&mut self, decision: Decision) {
        let lease = self.plan.lease;
        let soon = self.random.below(4);
        let mut pause = self.random.pick(&[0, 1, soon, lease / 3, lease]);
        if self.random.percent(self.plan.faults) {
            match self.random.below(3) {
                // The call does not arrive, and the operator reads the entry again.
                0 => return self.inspect_later(Some(*decision.seen.id()), decision.looks),
                1 => pause += self.random.below(lease * 2),
                // The reply is lost, and the operator's driver repeats the call.
                _ => {
                    let again = pause + self.random.below(lease);
                    let repeated = Decision {
                        looks: 0,
                        ..decision.clone()
                    };
                    self.after(again, ScheduledEvent::Resolve(Box::new(repeated)));
                }
            }
        }
        self.after(pause, ScheduledEvent::Resolve(Box::new(decision)));
    }

    /// Handles the arrival of a decision at the store.
    pub(super) fn resolve(&mut self, decision: &Decision) {
        let now = self.store_now();
        let id = *decision.seen.id();
        let is_applied = self
            .backend
            .resolve(&decision.seen, &decision.resolution, now);
        self.resolutions += usize::from(is_applied);
        let expected = self.expected.entry(id).or_default();
        let life = expected.life;
        let (seen, resolution) = (&decision.expected, &decision.resolution);
        let verdict = expected.resolved(seen, resolution, decision.number, now, is_applied);
        let is_freed = expected.life > life;
        let name = self.name_id(id);
        if is_freed {
            self.record_event(EventKind::KeyFreed(name));
        }
        if let Some(response) = decision.response.filter(|_| is_applied) {
            self.operator_responses[response].is_stored = true;
        }
        self.record_event(EventKind::EntryResolved {
            id: name,
            resolution: resolution.name(),
            is_applied,
            response: decision.response,
        });
        if let Err(violation) = verdict {
            let name = decision.resolution.name();
            self.violated(format!("{violation} ({name})"));
        }
        if !self.backend.is_in_progress(id, now) {
            self.wake(id);
        }
        self.inspect_later(Some(id), decision.looks);
    }
}

/// Tries to finish one of the requests that were executed.
pub(super) fn take_over(process: &Process, link: &Link, layer: &IdempotencyLayer) {
    let mut world = link.world.lock();
    let Some((request, lease)) = world.draw_execution() else {
        return;
    };
    let (number, sent) = (world.attempts.len(), world.now);
    let plan = world.plan;
    let leave = Leave::draw(&mut world.random, &plan);
    world.open += 1;
    world.attempts.push(SimulatedAttempt {
        client: None,
        process: link.process,
        request,
        sent,
        execution: None,
        clean: true,
        left: false,
        outcome: None,
        reply_missing: false,
    });
    world.record_event(EventKind::RequestSent {
        attempt: number,
        client: None,
        process: link.process,
        request,
    });
    drop(world);
    let claim = Claim::new(lease.id, lease.fingerprint).expect("there is randomness");
    let (link, layer) = (link.clone(), layer.clone());
    process.spawn(client::take_over(link, layer, claim, number, leave));
}
