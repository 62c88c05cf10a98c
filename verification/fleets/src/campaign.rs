//! Long runs of a fleet on a real server while one fault is injected repeatedly, round after round.
//!
//! ```text
//! Campaign -> round: a Site (server, way to it), a Fleet under load, a Fault -> History, judged -> Tally
//! ```

use std::{
    env,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tests::random::Random;
use verification::oracle::{History, Sums};

use crate::fleet::{Fleet, Load, StrikeKind};

pub use self::{fault::Fault, kind::Kind, mode::Mode, tally::Tally};

mod bank;
mod fault;
mod kind;
mod mode;
mod site;
mod tally;

use self::site::Site;

/// The settings of a campaign: store, fault, promise, seed and length.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "settings, given whole")]
pub struct Campaign {
    /// The store.
    pub kind: Kind,
    /// The fault to inject.
    pub fault: Fault,
    /// The expected handling of keys whose lease holder died.
    pub mode: Mode,
    /// The seed of the first round; each further round uses the next number.
    pub seed: u64,
    /// No round begins after this time.
    pub limit: Duration,
    /// No round begins after this number of faults that met a request.
    pub strikes: usize,
}

impl Campaign {
    /// Returns `Ok` if this campaign can be run.
    ///
    /// # Errors
    ///
    /// Returns the reason why the campaign cannot be run, and the possible choices.
    pub fn check(&self) -> Result<(), String> {
        let (kind, fault, mode) = (self.kind, self.fault, self.mode);
        if !fault.applies_to(kind) {
            let possible = Fault::ALL.iter().filter(|fault| fault.applies_to(kind));
            let possible: Vec<_> = possible.map(|fault| fault.name()).collect();
            let possible = possible.join(", ");
            return Err(format!(
                "{} cannot be injected into {}: choose one of {possible}",
                fault.name(),
                kind.name()
            ));
        }
        if mode == Mode::Transaction && !kind.has_transactions() {
            return Err(format!("{} has no transactions", kind.name()));
        }
        if mode == Mode::TakeOver && !fault.strikes_members() {
            return Err("the mode take-over needs the fault kill or pause".to_owned());
        }
        Ok(())
    }

    /// Runs rounds, each on a new server and with new keys. Stops after enough rounds, or after the first violation. Calls
    /// `report` after each round.
    ///
    /// # Panics
    ///
    /// Panics if a server does not start, or if a key has no response for ten minutes.
    pub async fn run(&self, mut report: impl FnMut(&Round)) -> Tally {
        let mut tally = Tally::new(self);
        let began = Instant::now();
        for seed in self.seed.. {
            let round = self.round(seed).await;
            report(&round);
            tally.add(&round, began.elapsed());
            let over = tally.strikes() >= self.strikes || began.elapsed() >= self.limit;
            if over || !round.violations.is_empty() {
                break;
            }
        }
        tally
    }

    async fn round(&self, seed: u64) -> Round {
        let site = Arc::new(Mutex::new(Site::start(self.kind, self.fault)));
        let load = self.load(seed);
        let injected = load.strike_count;
        let history = match self.mode {
            Mode::Transaction => bank::run(self, &site, load).await,
            Mode::Refuse | Mode::TakeOver => {
                let lease = format!("{}ms", load.lease.as_millis());
                let (store, orphans) = (at(&site).url(), self.mode.orphans());
                let args = ["--store", &store, "--orphans", orphans, "--lease", &lease];
                let fleet = Fleet::of_playgrounds(playground, self.kind.members(), &args);
                self.run_with_fault(fleet, &site, load).await
            }
        };
        let strikes = if self.fault.strikes_members() {
            history.count_strikes_with_request()
        } else {
            let site = at(&site);
            let faults = site.faults.iter();
            let met = faults.filter(|(from, until)| history.has_request_between(*from, *until));
            met.count()
        };
        Round {
            seed,
            injected,
            strikes,
            violations: self.mode.violations(&history),
            sums: history.sums(),
            requests: history.attempts.len(),
        }
    }

    /// Puts the load on the fleet, and injects this campaign's fault into the fleet or the site meanwhile.
    async fn run_with_fault(&self, fleet: Fleet, site: &Arc<Mutex<Site>>, load: Load) -> History {
        let fault = self.fault;
        if fault.strikes_members() {
            return fleet.run(load).await;
        }
        let (mut random, strike_count, strike_interval) =
            (Random(load.seed), load.strike_count, load.strike_interval);
        let site = Arc::clone(site);
        let trouble = move || {
            let losses = (0..strike_count).filter_map(|_| {
                thread::sleep(random.around(strike_interval));
                at(&site).inject(fault, &mut random)
            });
            losses.collect()
        };
        fleet.run_until(load, trouble).await
    }

    fn load(&self, seed: u64) -> Load {
        let kind = self.kind;
        let pause = kind.lease() * 3 / 2;
        // The handler takes so long that a strike usually meets a member that executes.
        let handler = match (self.fault, self.mode) {
            // Only one process writes at a time.
            (_, Mode::Transaction) if kind == Kind::Sqlite => 4,
            (Fault::Pause, _) | (_, Mode::Transaction) => 150,
            _ => 40,
        };
        let (strike_count, strike_interval, at_once) = match self.fault {
            Fault::Kill => (200, kind.strike_interval(), 2),
            Fault::Pause => (40, Duration::from_millis(250), 2),
            Fault::Scripts | Fault::Full | Fault::Evict => (25, Duration::from_millis(250), 1),
            Fault::Empty | Fault::Delay | Fault::Cut | Fault::Replies => {
                (20, Duration::from_millis(400), 1)
            }
            Fault::Silence | Fault::Freeze | Fault::Restart | Fault::Disk => {
                (12, Duration::from_millis(700), 1)
            }
            Fault::Failover | Fault::Node | Fault::Slots => (10, Duration::from_millis(800), 1),
        };
        Load {
            path: self.mode.path(handler),
            at_a_time: kind.at_a_time(),
            keys: 0,
            poll: Duration::from_millis(100),
            lease: kind.lease(),
            strike_count,
            strike_kind: match self.fault {
                Fault::Pause => StrikeKind::Pause(pause),
                _ => StrikeKind::Kill,
            },
            at_once,
            strike_interval,
            seed,
        }
    }
}

/// A finished round.
#[derive(Debug)]
#[non_exhaustive]
pub struct Round {
    /// The seed of the round. All random choices follow from the seed, except those that depend on timing.
    pub seed: u64,
    /// The number of faults that were injected.
    pub injected: usize,
    /// The number of these that met a request. A request was in flight during the fault, at the member if the fault struck a
    /// member.
    pub strikes: usize,
    /// The violations of the promise, described key by key.
    pub violations: Vec<String>,
    /// Sums over the requests and effects of the round.
    pub sums: Sums,
    /// The number of requests.
    pub requests: usize,
}

/// Returns a command for the playground that was built together with this program, without changes.
fn playground(args: &[&str]) -> Command {
    let mut command = sibling_command("playground");
    command.args(args).env("RUST_BACKTRACE", "0");
    command
}

fn sibling_command(name: &str) -> Command {
    let own = env::current_exe().expect("this program has a path");
    Command::new(own.with_file_name(name))
}

fn at(site: &Mutex<Site>) -> MutexGuard<'_, Site> {
    site.lock().unwrap_or_else(PoisonError::into_inner)
}
