//! A simulated process: a separate runtime, whose clock advances only when the driver advances it.
//!
//! The layer runs in the process without changes: it spawns tasks, sleeps and reads the clock. A process that is not driven
//! is paused, as by SIGSTOP: when it continues, the real time has advanced. A process that is dropped is dead at once, with
//! all its tasks.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    runtime::{Builder, EnterGuard, Runtime},
    time::{Instant, advance, sleep_until},
};

use super::Millis;

pub(super) struct Process {
    runtime: Runtime,
    directive: Arc<Directive>,
    /// The time at the start, by its own clock and by the world's.
    begun: Instant,
    born: Millis,
    /// The time of its clock, converted to the world's time.
    clock: Millis,
}

/// The driver's directive for the runtime. The runtime reads it when no task is ready.
#[derive(Default)]
struct Directive {
    phase: AtomicU8,
    driver: Mutex<Option<Waker>>,
}

/// Runs all tasks that are ready, and nothing more.
const SETTLING: u8 = 0;
const SETTLED: u8 = 1;
/// Lets the clock advance to the next timer.
const PEEKING: u8 = 2;
const PEEKED: u8 = 3;

impl Directive {
    /// Ends the phase `from`, and wakes the driver.
    fn end_phase(&self, from: u8, to: u8) {
        if self.phase.load(Relaxed) == from {
            self.phase.store(to, Relaxed);
            let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(driver) = &*driver {
                driver.wake_by_ref();
            }
        }
    }

    fn start(&self, phase: u8, cx: &Context<'_>) {
        self.phase.store(phase, Relaxed);
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        match &*driver {
            Some(known) if known.will_wake(cx.waker()) => {}
            Some(_) | None => *driver = Some(cx.waker().clone()),
        }
    }
}

impl Process {
    pub(super) fn start(now: Millis) -> Self {
        let directive = Arc::<Directive>::default();
        // The directive stores the runtime's own waker: a runtime that owned the directive would never be dropped.
        let [parking, unparked] = [Arc::downgrade(&directive), Arc::downgrade(&directive)];
        let end_phase = |directive: &Weak<Directive>, from, to| {
            if let Some(directive) = directive.upgrade() {
                directive.end_phase(from, to);
            }
        };
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            // Waking the driver here keeps the runtime from advancing to the next timer.
            .on_thread_park(move || end_phase(&parking, SETTLING, SETTLED))
            // The timer has fired, and the tasks that it woke have not run yet.
            .on_thread_unpark(move || end_phase(&unparked, PEEKING, PEEKED))
            .build()
            .expect("a simulation can have a runtime");
        let begun = {
            let _entered = runtime.enter();
            Instant::now()
        };
        Self {
            runtime,
            directive,
            begun,
            born: now,
            clock: now,
        }
    }

    pub(super) fn clock(&self) -> Millis {
        self.clock
    }

    pub(super) fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(task));
    }

    /// Runs all tasks that can run at `now`. In a process that was paused until now, the clock has advanced, and all its
    /// timers are due at once.
    pub(super) fn settle(&mut self, now: Millis) {
        if self.runtime.metrics().num_alive_tasks() == 0 {
            return;
        }
        if self.clock < now {
            {
                let _entered = self.runtime.enter();
                let mut advancing = pin!(advance(Duration::from_millis(now - self.clock)));
                // The first poll advances the clock, and then yields.
                let _ = advancing
                    .as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()));
            }
            self.clock = now;
            // The first time the timers fire; the second time the tasks that they woke run.
            self.run_ready_tasks();
        }
        self.run_ready_tasks();
    }

    fn run_ready_tasks(&self) {
        let directive = &*self.directive;
        directive.phase.store(SETTLING, Relaxed);
        self.runtime.block_on(poll_fn(|cx| {
            if directive.phase.load(Relaxed) == SETTLED {
                return Poll::Ready(());
            }
            directive.start(SETTLING, cx);
            Poll::Pending
        }));
    }

    /// Lets the clock advance to the next timer, but no further than `limit`. The tasks that the timer wakes have not run
    /// yet. The process must be settled when the world has reached that time.
    pub(super) fn advance_to_next_timer(&mut self, limit: Millis) -> Millis {
        // Without tasks there are no timers, and no task reads the clock.
        if self.clock >= limit || self.runtime.metrics().num_alive_tasks() == 0 {
            return limit;
        }
        let directive = &*self.directive;
        let at = self.begun + Duration::from_millis(limit - self.born);
        directive.phase.store(SETTLING, Relaxed);
        let now = self.runtime.block_on(async {
            let mut limit = pin!(sleep_until(at));
            poll_fn(|cx| {
                if directive.phase.load(Relaxed) == PEEKED || limit.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Instant::now());
                }
                directive.start(PEEKING, cx);
                Poll::Pending
            })
            .await
        });
        let gone = (now - self.begun).as_millis();
        self.clock = self.born + Millis::try_from(gone).expect("a simulation is short");
        self.clock
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::time::sleep;

    use super::*;

    #[test]
    fn process_runs_due_timers_and_observes_pauses() {
        let mut process = Process::start(100);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (sees, begun) = (Arc::clone(&seen), process.begun);
        process.spawn(async move {
            for _ in 0..3 {
                sleep(Duration::from_millis(70)).await;
                let at = (Instant::now() - begun).as_millis();
                sees.lock().expect("no panics").push(at);
            }
        });
        let seen = || seen.lock().expect("no panics").clone();
        process.settle(100);
        assert!(process.advance_to_next_timer(150) <= 150);
        let mut next = process.clock();
        while next < 170 {
            process.settle(next);
            next = process.advance_to_next_timer(1_000);
        }
        assert_eq!((next, seen()), (170, vec![]), "due, and not run yet");
        process.settle(170);
        assert_eq!(seen(), [70]);
        process.settle(900);
        assert_eq!(seen(), [70, 800], "paused past its next timer");
        while seen().len() < 3 {
            let next = process.advance_to_next_timer(2_000);
            process.settle(next);
        }
        assert_eq!((process.clock(), seen()), (970, vec![70, 800, 870]));
    }
}
