//! The driver: it advances the time from one due event to the next, in the world and in every process.

use std::time::Duration;

use tower::Layer;
use tower_idempotency::{Idempotency, IdempotencyLayer};

use super::{
    Millis, Watch,
    bugs::Bug,
    client::{self, Leave},
    handler::Handler,
    history::{AttemptOutcome, EventKind},
    link::Link,
    operator, oracle,
    plan::Plan,
    process::Process,
    random::Random,
    run_once,
    setup::{layer, retry_all, schedule},
    world::{Execution, Progress, ScheduledEvent, SimulatedAttempt, World},
};

pub(super) struct Driver {
    world: World,
    plan: Plan,
    hosts: Vec<Host>,
    phase: Phase,
    /// The deadline of the phase.
    until: Millis,
    /// The interval by which processes look ahead. It grows while no event is due.
    stride: Millis,
}

/// A host that runs one process after another.
struct Host {
    process: Option<Process>,
    served: Option<Instance>,
    /// The number of the process.
    number: usize,
    paused: bool,
    draining: bool,
}

struct Instance {
    layer: IdempotencyLayer,
    service: Idempotency<Handler>,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Clients send requests, and faults are injected.
    Faults,
    /// No fault is injected any more, and requests in flight end.
    EndExchanges,
    /// Clients send every request until its outcome is known.
    RetryAll,
    /// Every process drains.
    Drain,
}

impl Driver {
    pub(super) fn new(plan: Plan, bug: Option<Bug>, random: Random, watch: Watch) -> Self {
        let world = World::new(plan, bug, random);
        world.lock().is_watched_inside = watch == Watch::FromInsideToo;
        let mut driver = Self {
            world,
            plan,
            hosts: Vec::new(),
            phase: Phase::Faults,
            until: 40 * plan.max_delay(),
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
            driver.start(host);
        }
        schedule(&mut driver.world.lock(), plan);
        driver
    }

    /// Runs to the end, or to the first violation.
    pub(super) fn run(mut self) -> World {
        let mut steps = 0_u64;
        while self.advance_phase() {
            let next = self.next_instant();
            self.world.lock().now = next;
            self.handle_instant(next);
            steps += 1;
            if steps > STEPS || next > self.until {
                let phase = self.phase;
                let violation = format!("{phase:?} does not end");
                self.world.lock().violated(violation);
                break;
            }
        }
        self.world.lock().dead.fill(true);
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
            let world = self.world.lock();
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
            // The clock of a process that is already ahead was limited by the events that were due when it advanced.
            let clock = if process.clock() <= now {
                process.advance_to_next_timer(next)
            } else {
                process.clock()
            };
            next = next.min(clock);
        }
        next
    }

    /// Handles all events that are due at this instant, in any order, and their consequences.
    fn handle_instant(&mut self, now: Millis) {
        loop {
            let due = self.world.lock().pop_due();
            let Some(due) = due else {
                break;
            };
            self.stride = STRIDE;
            self.handle(due);
            if self.world.lock().random.percent(50) {
                self.settle(now);
            }
        }
        self.settle(now);
        while self.world.lock().next_due() == Some(now) {
            let due = self.world.lock().pop_due();
            if let Some(due) = due {
                self.stride = STRIDE;
                self.handle(due);
            }
            self.settle(now);
        }
    }

    fn settle(&mut self, now: Millis) {
        let count = self.hosts.len();
        let first = self.world.lock().random.index(count);
        for at in 0..count {
            let host = &mut self.hosts[(first + at) % count];
            if let Some(process) = host.process.as_mut().filter(|_| !host.paused)
                && process.clock() <= now
            {
                process.settle(now);
            }
        }
    }

    fn handle(&mut self, due: ScheduledEvent) {
        match due {
            ScheduledEvent::Arrive(call) => {
                let mut world = self.world.lock();
                world.calls_in_flight -= 1;
                let done = world.arrive(call.process, &call.op, call.read);
                if let Some((reply, back)) = call.reply {
                    let received = (!call.fails).then_some(done);
                    world.after(back, ScheduledEvent::Reply(reply, received));
                }
            }
            // The receiver may already be dropped.
            ScheduledEvent::Reply(reply, received) => drop(reply.send(received)),
            ScheduledEvent::Notify(news) => drop(news.send(())),
            ScheduledEvent::Send(client) => self.send(client),
            ScheduledEvent::Kill(host) => self.kill(host),
            ScheduledEvent::Pause(host, pause) => self.pause(host, pause),
            ScheduledEvent::Resume(number) => self.unpause(number),
            ScheduledEvent::Drain(host) => self.drain(host),
            ScheduledEvent::TakeOver(host) => self.take_over(host),
            ScheduledEvent::Inspect(id, looks) => {
                let mut served = self.hosts.iter().filter_map(|host| host.served.as_ref());
                let layer = served.next().map(|served| &served.layer);
                self.world.lock().inspect(id, looks, layer);
            }
            ScheduledEvent::Resolve(decision) => self.world.lock().resolve(&decision),
            ScheduledEvent::Leave(number) => {
                let left = self.hosts.iter();
                let mut left = left.enumerate().filter(|(_, host)| host.number == number);
                if let Some((host, _)) = left.next() {
                    self.kill(host);
                }
            }
            ScheduledEvent::Start(host) => self.start(host),
            ScheduledEvent::StepClock(by) => {
                let mut world = self.world.lock();
                world.clock_offset += by;
                world.record_event(EventKind::ClockStepped(by));
            }
        }
    }

    // ---- Processes ----

    fn start(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.process.is_some() {
            return;
        }
        let mut world = self.world.lock();
        let number = world.dead.len();
        world.dead.push(false);
        world.paused_until.push(None);
        world.record_event(EventKind::ProcessStarted(number));
        let process = Process::start(world.now);
        drop(world);
        let link = Link {
            world: self.world.clone(),
            process: number,
        };
        let layer = {
            let _entered = process.enter();
            layer(&self.plan, &link)
        };
        host.served = Some(Instance {
            service: layer.layer(Handler(link.clone())),
            layer,
            link,
        });
        host.process = Some(process);
        (host.number, host.paused, host.draining) = (number, false, false);
    }

    fn kill(&mut self, at: usize) {
        let next = (at + 1) % self.hosts.len();
        let host = &mut self.hosts[at];
        let Some(process) = host.process.take() else {
            return;
        };
        let number = host.number;
        {
            let mut world = self.world.lock();
            world.dead[number] = true;
            world.record_event(EventKind::ProcessKilled(number));
            // The last processes are not replaced.
            if self.phase != Phase::Drain {
                let pause = [0, 3, self.plan.lease / 2, self.plan.lease * 2];
                let pause = world.random.pick(&pause);
                world.after(pause, ScheduledEvent::Start(at));
                // Retries take over the orphans of every other process, or these orphans expire.
                if number % 2 == 1 && !self.plan.jobs {
                    world.take_over_orphans_of(number, next);
                }
            }
        }
        host.served = None;
        drop(process);
        let mut world = self.world.lock();
        for attempt in 0..world.attempts.len() {
            let known = &world.attempts[attempt];
            if known.process == number && known.outcome.is_none() {
                world.ended(attempt, AttemptOutcome::Died);
            }
        }
    }

    fn pause(&mut self, at: usize, pause: Millis) {
        let host = &mut self.hosts[at];
        if host.process.is_none() || host.paused {
            return;
        }
        host.paused = true;
        let mut world = self.world.lock();
        world.pause(host.number);
        world.after(pause, ScheduledEvent::Resume(host.number));
    }

    fn unpause(&mut self, number: usize) {
        let mut hosts = self.hosts.iter_mut();
        let host = hosts.find(|host| host.number == number && host.process.is_some());
        if let Some(host) = host {
            host.paused = false;
            self.world.lock().resume(number);
        }
    }

    fn drain(&mut self, at: usize) {
        let max_delay = Duration::from_millis(self.plan.max_delay());
        let host = &mut self.hosts[at];
        let (Some(process), Some(served)) = (&host.process, &host.served) else {
            return;
        };
        if host.draining {
            return;
        }
        host.draining = true;
        let (number, layer, link) = (host.number, served.layer.clone(), served.link.clone());
        self.world
            .lock()
            .record_event(EventKind::DrainStarted(number));
        process.spawn(async move {
            let drained = layer.drain(max_delay).await;
            let mut world = link.world.lock();
            world.record_event(EventKind::DrainEnded(number, drained));
            if !drained {
                world.violated(format!("process {number} does not drain"));
            }
            let running = |it: &Execution| it.process == number && it.state == Progress::Runs;
            if layer.in_flight() > 0 || world.executions.iter().any(running) {
                world.violated(format!(
                    "process {number} has drained, with requests in flight"
                ));
            }
            world.after(0, ScheduledEvent::Leave(number));
        });
    }

    fn in_flight(&self) -> usize {
        let served = self.hosts.iter().filter_map(|host| host.served.as_ref());
        served.map(|served| served.layer.in_flight()).sum()
    }

    // ---- Clients ----

    fn send(&mut self, client: usize) {
        let mut world = self.world.lock();
        let alive: Vec<usize> = (0..self.hosts.len())
            .filter(|at| self.hosts[*at].process.is_some())
            .collect();
        if alive.is_empty() {
            // The client finds no live process.
            let pause = self.plan.lease / 4;
            return world.after(pause, ScheduledEvent::Send(client));
        }
        let host = &self.hosts[world.random.pick(&alive)];
        let (Some(process), Some(served)) = (&host.process, &host.served) else {
            return;
        };
        let (number, sent) = (world.attempts.len(), world.now);
        let request = world.clients[client].request;
        let faults_ended = world.faults_ended;
        let (req, clean) =
            client::request(&mut world.random, &self.plan, faults_ended, number, request);
        let leave = match faults_ended {
            true => Leave::Never,
            false => Leave::draw(&mut world.random, &self.plan),
        };
        world.open += 1;
        world.attempts.push(SimulatedAttempt {
            client: Some(client),
            process: host.number,
            request,
            sent,
            execution: None,
            clean: clean || self.plan.jobs,
            left: false,
            outcome: None,
            reply_missing: false,
        });
        world.record_event(EventKind::RequestSent {
            attempt: number,
            client: Some(client),
            process: host.number,
            request,
        });
        drop(world);
        let link = served.link.clone();
        if self.plan.jobs {
            let layer = served.layer.clone();
            process.spawn(run_once::attempt(link, layer, request, number, leave));
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
        operator::take_over(process, &served.link, &served.layer);
    }

    // ---- The phases ----

    /// Advances to the next phase if this one has ended. Returns `false` if all phases have ended.
    fn advance_phase(&mut self) -> bool {
        let mut world = self.world.lock();
        let (now, lease) = (world.now, self.plan.lease);
        let phase = self.phase;
        if world.violation.is_some() {
            return false;
        }
        match self.phase {
            Phase::Faults => {
                let up = |host: &Host| host.process.is_some() && !host.draining;
                if world.open == 0 && !world.is_eventful() && self.hosts.iter().all(up) {
                    world.faults_ended = true;
                    world.record_event(EventKind::FaultsEnded);
                    self.phase = Phase::EndExchanges;
                    self.until = now + self.plan.max_delay();
                }
            }
            Phase::EndExchanges => {
                if world.calls_in_flight > 0 || self.in_flight() > 0 {
                    return true;
                }
                world.record_event(EventKind::ExchangesEnded);
                oracle::judge_final_state(&mut world);
                let clocks = self.hosts.iter().filter_map(|host| host.process.as_ref());
                let ahead = clocks.map(Process::clock).max().unwrap_or(0);
                let retried = retry_all(&mut world, ahead.saturating_sub(now));
                // A lease whose holder is unknown to all processes has expired at that time.
                let last = world
                    .expected
                    .values()
                    .map(|expected| expected.last_end())
                    .max();
                let free = last
                    .unwrap_or(0)
                    .saturating_sub(world.clock_offset)
                    .max(now)
                    .max(ahead);
                self.phase = Phase::RetryAll;
                // If few requests may be in flight, each round of retries ends one of them at least.
                let rounds = if self.plan.crowded { retried } else { 1 };
                // Adds the poll intervals, and the duration of the calls and of a takeover.
                self.until = free + rounds * (lease / 4) + 50;
            }
            Phase::RetryAll => {
                if world
                    .clients
                    .iter()
                    .any(|client| client.asks && client.waiting)
                {
                    return true;
                }
                oracle::judge_final_state(&mut world);
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

/// The interval by which processes look ahead after an event.
const STRIDE: Millis = 4;

/// The largest number of steps of a run. No correct run needs as many.
const STEPS: u64 = 100_000;
