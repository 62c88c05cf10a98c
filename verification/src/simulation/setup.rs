//! The settings of the layer, the requests of the clients, and the times of the strikes.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tower_idempotency::{
    ExecutionFailure, FingerprintBy, IdempotencyLayer, OrphanPolicy, StoreFailure,
};

use super::{
    Millis,
    bugs::Bug,
    handler::LIMIT,
    history::Request,
    link::Link,
    plan::{Plan, ttl},
    random::Random,
    world::{ScheduledEvent, SimulatedClient, WorldState},
};

/// Returns the layer of a process, with the settings of the plan.
pub(super) fn layer(plan: &Plan, link: &Link) -> IdempotencyLayer {
    let bug = link.world.lock().bug;
    let millis = Duration::from_millis;
    let mut layer = IdempotencyLayer::with_preset(link.clone(), plan.preset)
        .with_lease_ttl(ttl(plan.lease))
        .with_store_timeout(millis(plan.store_timeout))
        .with_retention(ttl(plan.retention))
        .with_orphan_policy(plan.orphans)
        .with_concurrent_requests(plan.in_flight)
        .with_unrecordable(plan.unrecordable)
        .with_response_limit(LIMIT)
        .with_collect_timeout(millis(plan.collect_timeout))
        .with_body_timeout(millis(plan.body_timeout))
        .with_error_response(|error| {
            let mut res = Response::new(Bytes::new());
            *res.status_mut() = error.status();
            res.extensions_mut().insert(error.kind());
            res
        });
    if let Some(retention) = plan.orphan_retention {
        layer = layer.with_orphan_retention(ttl(retention));
    }
    if let Some(failure) = plan.failure {
        layer = layer.with_failure(failure);
    }
    if plan.head_only {
        layer = layer.with_fingerprint(FingerprintBy::head_only());
    }
    if plan.crowded {
        layer = layer
            .with_max_in_flight(if plan.clients > 3 { 2 } else { 1 })
            .with_max_waiters(1, 1);
    }
    match bug {
        Some(Bug::ExecutesUnprotected) => {
            layer.with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
        }
        Some(Bug::FingerprintsAreAlike) => {
            layer.with_fingerprint(FingerprintBy::custom(|_, _| Vec::new()))
        }
        Some(Bug::EverythingIsRecorded) => layer.with_recorded_statuses(|_| true),
        Some(Bug::RefusalIsIgnored) => layer.with_orphan_policy(OrphanPolicy::Refuse),
        Some(Bug::FailuresFreeTheKey) => layer.with_failure(ExecutionFailure::Release),
        Some(_) | None => layer,
    }
}

/// Draws the requests of the clients, and the times of the strikes.
pub(super) fn schedule(world: &mut WorldState, plan: Plan) {
    for client in 0..plan.clients {
        let random = &mut world.random;
        let request = Request {
            key: random.below(plan.keys),
            variant: u64::from(random.percent(15)),
        };
        let left = random.below(4);
        let at = random.below(plan.rush);
        world.clients.push(SimulatedClient {
            request,
            left,
            asks: false,
            waiting: true,
        });
        world.after(at, ScheduledEvent::Send(client));
    }
    let span = plan.rush + plan.lease * 3;
    let strikes = plan.strikes;
    let hosts = plan.processes as u64;
    let lease = plan.lease;
    let mut strike = |count: u64, due: fn(&mut Random, usize, Millis) -> ScheduledEvent| {
        for _ in 0..count {
            let at = world.random.below(span);
            let host = usize::try_from(world.random.below(hosts)).expect("a few");
            let due = due(&mut world.random, host, lease);
            world.after(at, due);
        }
    };
    strike(strikes.kills, |_, host, _| ScheduledEvent::Kill(host));
    strike(strikes.drains, |_, host, _| ScheduledEvent::Drain(host));
    strike(strikes.takeovers, |_, host, _| {
        ScheduledEvent::TakeOver(host)
    });
    strike(strikes.resolutions, |random, _, _| {
        let looks = random.between(2, 5);
        ScheduledEvent::Inspect(None, looks)
    });
    strike(strikes.pauses, |random, host, lease| {
        let pause = [lease / 3, lease, lease + 1, lease * 3];
        ScheduledEvent::Pause(host, random.pick(&pause))
    });
    strike(strikes.steps, |random, _, lease| {
        ScheduledEvent::StepClock(random.pick(&[lease / 2, lease * 2, lease * 20]))
    });
}

/// Adds a client for every request that was ever sent. The client retries until it has a definite outcome. Returns the
/// number of these clients.
pub(super) fn retry_all(world: &mut WorldState, pause: Millis) -> u64 {
    let mut requests: Vec<Request> = world.attempts.iter().map(|it| it.request).collect();
    requests.sort_unstable();
    requests.dedup();
    let retried = requests.len() as u64;
    for request in requests {
        let client = world.clients.len();
        world.clients.push(SimulatedClient {
            request,
            left: 0,
            asks: true,
            waiting: true,
        });
        let pause = pause + world.random.below(5);
        world.after(pause, ScheduledEvent::Send(client));
    }
    retried
}
