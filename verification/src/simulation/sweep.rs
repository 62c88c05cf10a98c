//! Many seeds, on several threads.

use std::{
    fmt,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use super::{Bug, Report, run};

/// Seeds to run, up to the first violation.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// The range of the seeds.
    pub seeds: Range<u64>,
    /// The number of threads.
    pub threads: usize,
    /// The bug that is seeded, if any.
    pub bug: Option<Bug>,
    /// The longest duration of the sweep, or `None` for no limit.
    pub limit: Option<Duration>,
}

/// The result of a sweep.
#[derive(Debug)]
pub struct SweepResult {
    /// The first of the seeds.
    pub from: u64,
    /// The number of seeds that ran.
    pub ran: u64,
    /// The sums over all seeds.
    pub sums: SweepSums,
    /// The lowest seed with a violation; several threads may have found others.
    pub found: Option<Report>,
    took: Duration,
    threads: usize,
    bug: Option<Bug>,
}

/// Sums over seeds.
#[derive(Clone, Copy, Debug, Default)]
pub struct SweepSums {
    /// The number of requests that were sent.
    pub attempts: u64,
    /// The number of executions of handlers.
    pub executions: u64,
    /// The number of leases that were taken over.
    pub takeovers: u64,
    /// The number of decisions of an operator that were applied.
    pub resolutions: u64,
    /// The number of events.
    pub events: u64,
}

impl Sweep {
    /// Runs the seeds.
    ///
    /// # Panics
    ///
    /// Panics if the simulation panics.
    #[must_use]
    pub fn run(self) -> SweepResult {
        let began = Instant::now();
        let (next, over) = (AtomicU64::new(self.seeds.start), AtomicBool::new(false));
        let work = || {
            let (mut ran, mut sums, mut found) = (0, SweepSums::default(), None::<Report>);
            while !over.load(Relaxed) {
                let seed = next.fetch_add(1, Relaxed);
                let late = self.limit.is_some_and(|limit| began.elapsed() >= limit);
                if seed >= self.seeds.end || late {
                    break;
                }
                let report = run(seed, self.bug);
                ran += 1;
                sums.add(&report);
                if report.violation.is_some() {
                    over.store(true, Relaxed);
                    found = Some(report);
                }
            }
            (ran, sums, found)
        };
        let parts: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(work)).collect();
            let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
            ended
                .map(|part| part.expect("a simulation does not panic"))
                .collect()
        });
        let mut swept = SweepResult {
            from: self.seeds.start,
            ran: 0,
            sums: SweepSums::default(),
            found: None,
            took: began.elapsed(),
            threads: self.threads,
            bug: self.bug,
        };
        for (ran, sums, found) in parts {
            swept.ran += ran;
            swept.sums.join(sums);
            let lower = |known: &Report| found.as_ref().is_none_or(|it| known.seed < it.seed);
            if !swept.found.as_ref().is_some_and(lower) {
                swept.found = found;
            }
        }
        swept
    }
}

impl SweepSums {
    fn add(&mut self, report: &Report) {
        self.join(Self {
            attempts: report.attempts as u64,
            executions: report.executions as u64,
            takeovers: report.takeovers as u64,
            resolutions: report.resolutions as u64,
            events: report.history.len() as u64,
        });
    }

    fn join(&mut self, other: Self) {
        self.attempts += other.attempts;
        self.executions += other.executions;
        self.takeovers += other.takeovers;
        self.resolutions += other.resolutions;
        self.events += other.events;
    }
}

impl fmt::Display for SweepResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, ran, .. } = self;
        let SweepSums {
            attempts,
            executions,
            takeovers,
            resolutions,
            events,
        } = self.sums;
        let seconds = self.took.as_secs_f64();
        write!(
            f,
            "{ran} seeds from {from} on {} threads in {seconds:.1} s, {:.0} a second: {attempts} requests, {executions} \
             executions, {takeovers} takeovers, {resolutions} resolutions, {events} events; ",
            self.threads,
            *ran as f64 / seconds,
        )?;
        match &self.found {
            None => f.write_str("no violation"),
            Some(Report {
                seed, violation, ..
            }) => {
                let violation = violation.as_deref().unwrap_or_default();
                let bug = self.bug.map(|bug| format!(" --bug {bug:?}"));
                write!(
                    f,
                    "seed {seed} is not as promised: {violation}\nto see it again: cargo run --locked --release -p campaign \
                     --bin simulate -- --seed {seed}{}",
                    bug.unwrap_or_default()
                )
            }
        }
    }
}
