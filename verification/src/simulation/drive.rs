//! The driver: it advances the time from one due event to the next, in the world and in every process.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tower::Layer;
use tower_idempotency::{
    ExecutionFailure, FingerprintBy, Idempotency, IdempotencyLayer, OrphanPolicy, StoreFailure,
    store::Claim,
};

use super::{
    Millis, Watch,
    bugs::Bug,
    client::{self, Leave},
    dice::Dice,
    handler::{Handler, LIMIT},
    history::{Outcome, Request, What},
    job,
    link::Link,
    oracle,
    plan::{Plan, ttl},
    process::Process,
    world::{Attempt, Client, Due, Execution, Progress, State, World},
};

pub(super) struct Driver {
    world: World,
    plan: Plan,
    hosts: Vec<Host>,
    phase: Phase,
    /// The deadline of the phase.
    until: Millis,
    /// The interval by which processes look ahead. It grows while nothing happens.
    stride: Millis,
}

/// A host that runs one process after another.
struct Host {
    process: Option<Process>,
    served: Option<Served>,
    /// The number of the process.
    number: usize,
    paused: bool,
    draining: bool,
}

struct Served {
    layer: IdempotencyLayer,
    service: Idempotency<Handler>,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Clients send requests, and faults are injected.
    Rush,
    /// No fault is injected any more; exchanges in flight end.
    Rest,
    /// Clients send every request until its outcome is known.
    Ask,
    /// Every process drains.
    Drain,
}

impl Driver {
    pub(super) fn new(plan: Plan, bug: Option<Bug>, dice: Dice, watch: Watch) -> Self {
        let world = World::new(plan, bug, dice);
        world.look().watched = watch == Watch::FromInsideToo;
        let mut driver = Self {
            world,
            plan,
            hosts: Vec::new(),
            phase: Phase::Rush,
            until: 40 * plan.patience(),
            stride: STRIDE,
        };
        for host in 0..plan.processes {
            driver.hosts.push(Host {
                process: None,
                served: None,
                number: 0,
                paused: false,
                draining: false,
            });
            driver.begin(host);
        }
        plan_ahead(&mut driver.world.look(), plan);
        driver
    }

    /// Runs to the end, or to the first violation.
    pub(super) fn run(mut self) -> World {
        let mut steps = 0_u64;
        while self.go_on() {
            let next = self.next_instant();
            self.world.look().now = next;
            self.live_through(next);
            steps += 1;
            if steps > STEPS || next > self.until {
                let phase = self.phase;
                let violation = format!("{phase:?} does not end");
                self.world.look().violated(violation);
                break;
            }
        }
        self.world.look().dead.fill(true);
        for host in &mut self.hosts {
            host.served = None;
            host.process = None;
        }
        self.world
    }

    /// Advances every clock to the next due instant, in the world or in a process, and returns that instant. A clock may
    /// arrive there later.
    fn next_instant(&mut self) -> Millis {
        let (now, due) = {
            let world = self.world.look();
            (world.now, world.next_due())
        };
        // A process that is ahead misses events of other processes. No process therefore looks far ahead while events
        // happen.
        let far = (now + self.stride).min(self.until + 1);
        self.stride = (self.stride * 2).min(self.plan.lease.max(STRIDE));
        let mut next = due.map_or(far, |due| due.min(far));
        for host in &mut self.hosts {
            let Some(process) = host.process.as_mut().filter(|_| !host.paused) else {
                continue;
            };
            // A process that is already ahead is limited by the events that were due when it looked.
            let clock = if process.clock() <= now {
                process.look_ahead(next)
            } else {
                process.clock()
            };
            next = next.min(clock);
        }
        next
    }

    /// Handles all events that are due at this instant, in any order, and their consequences.
    fn live_through(&mut self, now: Millis) {
        loop {
            let due = self.world.look().pop_due();
            let Some(due) = due else {
                break;
            };
            self.stride = STRIDE;
            self.happen(due);
            if self.world.look().dice.percent(50) {
                self.settle(now);
            }
        }
        self.settle(now);
        while self.world.look().next_due() == Some(now) {
            let due = self.world.look().pop_due();
            if let Some(due) = due {
                self.stride = STRIDE;
                self.happen(due);
            }
            self.settle(now);
        }
    }

    fn settle(&mut self, now: Millis) {
        let count = self.hosts.len();
        let first = self.world.look().dice.index(count);
        for at in 0..count {
            let host = &mut self.hosts[(first + at) % count];
            if let Some(process) = host.process.as_mut().filter(|_| !host.paused)
                && process.clock() <= now
            {
                process.settle(now);
            }
        }
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Arrival(call) => {
                let mut world = self.world.look();
                world.under_way -= 1;
                let done = world.arrive(call.process, &call.op, call.read);
                if let Some((reply, back)) = call.reply {
                    let heard = (!call.fails).then_some(done);
                    world.after(back, Due::Reply(reply, heard));
                }
            }
            // The receiver may already be dropped.
            Due::Reply(reply, heard) => drop(reply.send(heard)),
            Due::Push(news) => drop(news.send(())),
            Due::Send(client) => self.send(client),
            Due::Kill(host) => self.kill(host),
            Due::Pause(host, pause) => self.pause(host, pause),
            Due::GoOn(number) => self.unpause(number),
            Due::Drain(host) => self.drain(host),
            Due::TakeOver(host) => self.take_over(host),
            Due::Leave(number) => {
                let left = self.hosts.iter();
                let mut left = left.enumerate().filter(|(_, host)| host.number == number);
                if let Some((host, _)) = left.next() {
                    self.kill(host);
                }
            }
            Due::Begin(host) => self.begin(host),
            Due::Step(by) => {
                let mut world = self.world.look();
                world.ahead += by;
                world.record_event(What::ClockSteps(by));
            }
        }
    }

    // ---- Processes ----

    fn begin(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.process.is_some() {
            return;
        }
        let mut world = self.world.look();
        let number = world.dead.len();
        world.dead.push(false);
        world.paused.push(false);
        world.record_event(What::Begins(number));
        let process = Process::begin(world.now);
        drop(world);
        let link = Link {
            world: self.world.clone(),
            process: number,
        };
        let layer = {
            let _entered = process.enter();
            layer(&self.plan, &link)
        };
        host.served = Some(Served {
            service: layer.layer(Handler(link.clone())),
            layer,
            link,
        });
        host.process = Some(process);
        (host.number, host.paused, host.draining) = (number, false, false);
    }

    fn kill(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let Some(process) = host.process.take() else {
            return;
        };
        let number = host.number;
        {
            let mut world = self.world.look();
            world.dead[number] = true;
            world.record_event(What::Dies(number));
            // The last processes are not replaced.
            if self.phase != Phase::Drain {
                let pause = [0, 3, self.plan.lease / 2, self.plan.lease * 2];
                let pause = world.dice.pick(&pause);
                world.after(pause, Due::Begin(at));
            }
        }
        host.served = None;
        drop(process);
        let mut world = self.world.look();
        for attempt in 0..world.attempts.len() {
            let known = &world.attempts[attempt];
            if known.process == number && known.outcome.is_none() {
                world.ended(attempt, Outcome::Died);
            }
        }
    }

    fn pause(&mut self, at: usize, pause: Millis) {
        let host = &mut self.hosts[at];
        if host.process.is_none() || host.paused {
            return;
        }
        host.paused = true;
        let mut world = self.world.look();
        world.paused[host.number] = true;
        world.record_event(What::Pauses(host.number));
        world.after(pause, Due::GoOn(host.number));
    }

    fn unpause(&mut self, number: usize) {
        let mut hosts = self.hosts.iter_mut();
        let host = hosts.find(|host| host.number == number && host.process.is_some());
        if let Some(host) = host {
            host.paused = false;
            self.world.look().record_event(What::GoesOn(number));
        }
    }

    fn drain(&mut self, at: usize) {
        let patience = Duration::from_millis(self.plan.patience());
        let host = &mut self.hosts[at];
        let (Some(process), Some(served)) = (&host.process, &host.served) else {
            return;
        };
        if host.draining {
            return;
        }
        host.draining = true;
        let (number, layer, link) = (host.number, served.layer.clone(), served.link.clone());
        self.world.look().record_event(What::Drains(number));
        process.spawn(async move {
            let drained = layer.drain(patience).await;
            let mut world = link.world.look();
            world.record_event(What::Drained(number, drained));
            if !drained {
                world.violated(format!("process {number} does not drain"));
            }
            let running = |it: &Execution| it.process == number && it.state == Progress::Runs;
            if layer.in_flight() > 0 || world.executions.iter().any(running) {
                world.violated(format!("process {number} has drained, and is at work"));
            }
            world.after(0, Due::Leave(number));
        });
    }

    fn in_flight(&self) -> usize {
        let served = self.hosts.iter().filter_map(|host| host.served.as_ref());
        served.map(|served| served.layer.in_flight()).sum()
    }

    // ---- Clients ----

    fn send(&mut self, client: usize) {
        let mut world = self.world.look();
        let alive: Vec<usize> = (0..self.hosts.len())
            .filter(|at| self.hosts[*at].process.is_some())
            .collect();
        if alive.is_empty() {
            // The client finds no live process.
            let pause = self.plan.lease / 4;
            return world.after(pause, Due::Send(client));
        }
        let host = &self.hosts[world.dice.pick(&alive)];
        let (Some(process), Some(served)) = (&host.process, &host.served) else {
            return;
        };
        let number = world.attempts.len();
        let request = world.clients[client].request;
        let healed = world.healed;
        let (req, clean) = client::request(&mut world.dice, &self.plan, healed, number, request);
        let leave = match healed {
            true => Leave::Never,
            false => Leave::draw(&mut world.dice, &self.plan),
        };
        world.open += 1;
        world.attempts.push(Attempt {
            client: Some(client),
            process: host.number,
            request,
            execution: None,
            clean: clean || self.plan.jobs,
            left: false,
            outcome: None,
            unheard: false,
        });
        world.record_event(What::Sends {
            attempt: number,
            client: Some(client),
            process: host.number,
            request,
        });
        drop(world);
        let link = served.link.clone();
        if self.plan.jobs {
            let layer = served.layer.clone();
            process.spawn(job::attempt(link, layer, request, number, leave));
        } else {
            let service = served.service.clone();
            process.spawn(client::attempt(link, service, req, number, leave));
        }
    }

    /// An operator tries to finish one of the requests that were executed.
    fn take_over(&mut self, at: usize) {
        let host = &self.hosts[at];
        let (Some(process), Some(served)) = (&host.process, &host.served) else {
            return;
        };
        let mut world = self.world.look();
        let executions = world.executions.len();
        if executions == 0 {
            return;
        }
        let execution = world.dice.index(executions);
        let execution = &world.executions[execution];
        let (request, Some(lease)) = (execution.request, execution.lease) else {
            return;
        };
        let number = world.attempts.len();
        let leave = Leave::draw(&mut world.dice, &self.plan);
        world.open += 1;
        world.attempts.push(Attempt {
            client: None,
            process: host.number,
            request,
            execution: None,
            clean: true,
            left: false,
            outcome: None,
            unheard: false,
        });
        world.record_event(What::Sends {
            attempt: number,
            client: None,
            process: host.number,
            request,
        });
        drop(world);
        let claim = Claim::new(lease.id, lease.fingerprint).expect("there is randomness");
        let (link, layer) = (served.link.clone(), served.layer.clone());
        process.spawn(client::take_over(link, layer, claim, number, leave));
    }

    // ---- From the rush to the end ----

    /// Advances to the next phase if this phase is over. Returns `false` if all phases are over.
    fn go_on(&mut self) -> bool {
        let mut world = self.world.look();
        let (now, lease) = (world.now, self.plan.lease);
        let phase = self.phase;
        if world.violation.is_some() {
            return false;
        }
        match self.phase {
            Phase::Rush => {
                let up = |host: &Host| host.process.is_some() && !host.draining;
                if world.open == 0 && !world.is_eventful() && self.hosts.iter().all(up) {
                    world.healed = true;
                    world.record_event(What::Heals);
                    self.phase = Phase::Rest;
                    self.until = now + self.plan.patience();
                }
            }
            Phase::Rest => {
                if world.under_way > 0 || self.in_flight() > 0 {
                    return true;
                }
                world.record_event(What::Rests);
                oracle::judge_rest(&mut world);
                let clocks = self.hosts.iter().filter_map(|host| host.process.as_ref());
                let ahead = clocks.map(Process::clock).max().unwrap_or(0);
                ask_for_all(&mut world, ahead.saturating_sub(now));
                // A lease whose holder is unknown to all processes expires by then.
                let last = world.books.values().map(|books| books.last_end()).max();
                let free = last
                    .unwrap_or(0)
                    .saturating_sub(world.ahead)
                    .max(now)
                    .max(ahead);
                self.phase = Phase::Ask;
                // A poll, and the duration of the calls and of a takeover.
                self.until = free + lease / 4 + 50;
            }
            Phase::Ask => {
                if world
                    .clients
                    .iter()
                    .any(|client| client.asks && client.waiting)
                {
                    return true;
                }
                oracle::judge_rest(&mut world);
                drop(world);
                self.phase = Phase::Drain;
                // A process without work may be ahead.
                let clocks = self.hosts.iter().filter_map(|host| host.process.as_ref());
                let ahead = clocks.map(Process::clock).max().unwrap_or(0);
                self.until = now.max(ahead) + lease / 4 + 50;
                for host in 0..self.hosts.len() {
                    self.drain(host);
                }
            }
            Phase::Drain => return self.hosts.iter().any(|host| host.process.is_some()),
        }
        if self.phase != phase {
            self.stride = STRIDE;
        }
        true
    }
}

fn layer(plan: &Plan, link: &Link) -> IdempotencyLayer {
    let bug = link.world.look().bug;
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
    if let Some(keep) = plan.orphan_retention {
        layer = layer.with_orphan_retention(ttl(keep));
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
fn plan_ahead(world: &mut State, plan: Plan) {
    for client in 0..plan.clients {
        let dice = &mut world.dice;
        let request = Request {
            key: dice.below(plan.keys),
            variant: u64::from(dice.percent(15)),
        };
        let left = dice.below(4);
        let at = dice.below(plan.rush);
        world.clients.push(Client {
            request,
            left,
            asks: false,
            waiting: true,
        });
        world.after(at, Due::Send(client));
    }
    let span = plan.rush + plan.lease * 3;
    let strikes = plan.strikes;
    let hosts = plan.processes as u64;
    let lease = plan.lease;
    let mut strike = |count: u64, due: fn(&mut Dice, usize, Millis) -> Due| {
        for _ in 0..count {
            let at = world.dice.below(span);
            let host = usize::try_from(world.dice.below(hosts)).expect("a few");
            let due = due(&mut world.dice, host, lease);
            world.after(at, due);
        }
    };
    strike(strikes.kills, |_, host, _| Due::Kill(host));
    strike(strikes.drains, |_, host, _| Due::Drain(host));
    strike(strikes.takeovers, |_, host, _| Due::TakeOver(host));
    strike(strikes.pauses, |dice, host, lease| {
        let pause = [lease / 3, lease, lease + 1, lease * 3];
        Due::Pause(host, dice.pick(&pause))
    });
    strike(strikes.steps, |dice, _, lease| {
        Due::Step(dice.pick(&[lease / 2, lease * 2, lease * 20]))
    });
}

/// Adds a client for every request that was ever sent. The client retries until it has a definite outcome.
fn ask_for_all(world: &mut State, pause: Millis) {
    let mut requests: Vec<Request> = world.attempts.iter().map(|it| it.request).collect();
    requests.sort_unstable();
    requests.dedup();
    for request in requests {
        let client = world.clients.len();
        world.clients.push(Client {
            request,
            left: 0,
            asks: true,
            waiting: true,
        });
        let pause = pause + world.dice.below(5);
        world.after(pause, Due::Send(client));
    }
}

/// The interval by which processes look ahead after an event.
const STRIDE: Millis = 4;

/// The largest number of steps of a run. No correct run needs as many.
const STEPS: u64 = 100_000;
