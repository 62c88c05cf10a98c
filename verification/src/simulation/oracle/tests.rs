//! Tests of the judgments that excuse an attempt: a pause of its process, and an end without a response.

use bytes::Bytes;
use http::StatusCode;
use tower_idempotency::store::{Claim, Fingerprint};

use super::*;
use crate::simulation::{
    Millis,
    history::{EventKind, Request},
    plan::Plan,
    random::Random,
    world::{ProducedResponse, SimulatedAttempt, StoreCall, World},
};

/// The time at which the request was sent, and `true` if the pause from 10 to 20 ms excuses it.
const REQUESTS: [(Millis, bool); 4] = [(0, true), (10, true), (20, true), (21, false)];

/// Returns a world without faults, whose process was paused from 10 to 20 ms and received a request at this time.
fn world_with_request(sent: Millis) -> World {
    let mut random = Random::new(0);
    let plan = Plan {
        lease: 60,
        store_timeout: 20,
        faults: 0,
        memory: false,
        ..Plan::draw(&mut random)
    };
    let shared = World::new(plan, None, random);
    let mut world = shared.lock();
    world.dead.push(false);
    world.paused_until.push(None);
    world.now = 10;
    world.pause(0);
    world.now = 20;
    world.resume(0);
    world.now = sent.max(20);
    let request = Request { key: 0, variant: 0 };
    world.attempts.push(SimulatedAttempt {
        client: None,
        process: 0,
        request,
        sent,
        execution: None,
        clean: true,
        left: false,
        outcome: None,
        reply_missing: false,
    });
    world.record_event(EventKind::RequestSent {
        attempt: 0,
        client: None,
        process: 0,
        request,
    });
    drop(world);
    shared
}

/// Adds an execution of the attempt.
fn add_execution(world: &mut WorldState, state: Progress) -> &mut Execution {
    let request = world.attempts[0].request;
    world.attempts[0].execution = Some(world.executions.len());
    world.executions.push(Execution {
        attempt: 0,
        process: 0,
        request,
        lease: None,
        commits: Vec::new(),
        over: None,
        responses: Vec::new(),
        state,
        completing: false,
        received: false,
        refused: false,
        lost: false,
    });
    world.executions.last_mut().unwrap()
}

#[test]
fn pause_excuses_failed_call_of_request_in_flight() {
    for (sent, is_excused) in REQUESTS {
        let world = world_with_request(sent);
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let judged = judge_refusal(&world.lock(), 0, "store-unavailable", status);
        assert_eq!(judged.is_ok(), is_excused, "sent at {sent}: {judged:?}");
    }
}

#[test]
fn pause_excuses_lost_lease_of_request_in_flight() {
    for (sent, is_excused) in REQUESTS {
        let world = world_with_request(sent);
        let mut world = world.lock();
        let id = KeyId::from_bytes([1; 32]);
        let claim = || Claim::new(id, Fingerprint::from_bytes([2; 32])).unwrap();
        let (holder, next) = (claim(), claim());
        world.arrive(0, &StoreCall::Acquire(holder.clone()), None);
        add_execution(&mut world, Progress::Runs).lease = Some(holder.lease_ref(1));
        world.now += holder.lease.as_millis();
        world.arrive(0, &StoreCall::Acquire(next), None);
        assert_eq!(world.takeovers, 1, "sent at {sent}");
        let found = world.violation.as_deref().unwrap_or_default();
        assert_eq!(found.is_empty(), is_excused, "sent at {sent}: {found}");
        assert!(is_excused || found.contains("was not renewed in time"));
    }
}

#[test]
fn pause_excuses_until_its_end() {
    let world = world_with_request(21);
    let mut world = world.lock();
    assert!(!world.was_paused_since_sent(0));
    world.now = 30;
    world.pause(0);
    world.now = 40;
    assert!(world.was_paused_since_sent(0), "it is still paused");
    world.resume(0);
    assert!(world.was_paused_since_sent(0));
}

#[test]
fn end_without_response_needs_execution() {
    use AttemptOutcome::{BodyBroken, Failed, NoOrphan, Panicked};

    // The progress of the own execution, and `true` if its handler broke the body off.
    for (own, valid) in [
        (None, &[NoOrphan][..]),
        (Some((Progress::Runs, false)), &[]),
        (Some((Progress::Answered, false)), &[]),
        (Some((Progress::Answered, true)), &[BodyBroken]),
        (Some((Progress::Failed, false)), &[Panicked, Failed]),
    ] {
        for outcome in [Panicked, Failed, BodyBroken, NoOrphan] {
            let world = world_with_request(21);
            let mut world = world.lock();
            if let Some((state, breaks)) = own {
                let response = ProducedResponse {
                    status: StatusCode::CREATED,
                    body: Bytes::new(),
                    recording: Recording::Forbidden,
                    breaks,
                };
                add_execution(&mut world, state).responses.push(response);
            }
            judge_end(&mut world, 0, &outcome);
            let is_valid = world.violation.is_none();
            assert_eq!(is_valid, valid.contains(&outcome), "{outcome:?}: {own:?}");
        }
    }
}
