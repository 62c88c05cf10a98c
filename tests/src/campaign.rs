//! Long runs of a fleet on a real server while one thing goes wrong again and again, round after round.
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

use crate::{
    fleet::{Blow, Fleet, Load},
    oracle::{History, Sums},
    random::Random,
};

pub use self::{fault::Fault, kind::Kind, mode::Mode, tally::Tally};

mod bank;
mod fault;
mod kind;
mod mode;
mod site;
mod tally;

use self::site::Site;

/// What is to be run, and for how long.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "an order, given whole")]
pub struct Campaign {
    /// On which store.
    pub kind: Kind,
    /// What goes wrong.
    pub fault: Fault,
    /// What becomes of the keys of those who die.
    pub mode: Mode,
    /// Of the first round; the next one has the next.
    pub seed: u64,
    /// No round begins after that long.
    pub limit: Duration,
    /// No round begins after it has gone wrong that often.
    pub strikes: usize,
}

impl Campaign {
    /// Why this cannot be run, if it cannot.
    ///
    /// # Errors
    ///
    /// Says what is possible instead.
    pub fn check(&self) -> Result<(), String> {
        let (kind, fault, mode) = (self.kind, self.fault, self.mode);
        if !fault.befalls(kind) {
            let possible = Fault::ALL.iter().filter(|fault| fault.befalls(kind));
            let possible: Vec<_> = possible.map(|fault| fault.name()).collect();
            let possible = possible.join(", ");
            return Err(format!(
                "{} does not befall {}: choose one of {possible}",
                fault.name(),
                kind.name()
            ));
        }
        if mode == Mode::Transaction && !kind.has_transactions() {
            return Err(format!("{} has no transactions", kind.name()));
        }
        if mode == Mode::TakeOver && !fault.strikes_members() {
            return Err("who takes orphans over is judged by kills and pauses only".to_owned());
        }
        Ok(())
    }

    /// Runs rounds, each on a new server and with new keys, until there were enough or one went wrong; says how each one
    /// went.
    ///
    /// # Panics
    ///
    /// When a server does not start, or a key has no answer for two minutes.
    pub async fn run(&self, mut told: impl FnMut(&Round)) -> Tally {
        let mut tally = Tally::new(self);
        let began = Instant::now();
        for seed in self.seed.. {
            let round = self.round(seed).await;
            told(&round);
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
        let strikes = load.blows;
        let history = match self.mode {
            Mode::Transaction => bank::run(self, &site, load).await,
            Mode::Refuse | Mode::TakeOver => {
                let lease = format!("{}ms", load.lease.as_millis());
                let (store, orphans) = (at(&site).url(), self.mode.orphans());
                let args = ["--store", &store, "--orphans", orphans, "--lease", &lease];
                let fleet = Fleet::of_playgrounds(playground, self.kind.members(), &args);
                self.befall(fleet, &site, load).await
            }
        };
        Round {
            seed,
            strikes,
            violations: self.mode.violations(&history),
            sums: history.sums(),
            requests: history.attempts.len(),
        }
    }

    /// Puts the load on the fleet while this campaign's fault comes over it, or over the site.
    async fn befall(&self, fleet: Fleet, site: &Arc<Mutex<Site>>, load: Load) -> History {
        let fault = self.fault;
        if fault.strikes_members() {
            return fleet.run(load).await;
        }
        let (mut random, blows, respite) = (Random(load.seed), load.blows, load.respite);
        let site = Arc::clone(site);
        let trouble = move || {
            let losses = (0..blows).filter_map(|_| {
                thread::sleep(random.around(respite));
                at(&site).suffer(fault, &mut random)
            });
            losses.collect()
        };
        fleet.run_beside(load, trouble).await
    }

    fn load(&self, seed: u64) -> Load {
        let kind = self.kind;
        let pause = kind.lease() * 3 / 2;
        // As long as it takes for blows to find somebody at work.
        let handler = match (self.fault, self.mode) {
            // One writes at a time.
            (_, Mode::Transaction) if kind == Kind::Sqlite => 4,
            (Fault::Pause, _) | (_, Mode::Transaction) => 150,
            _ => 40,
        };
        let (blows, respite, at_once) = match self.fault {
            Fault::Kill => (200, kind.respite(), 2),
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
            blows,
            blow: match self.fault {
                Fault::Pause => Blow::Pause(pause),
                _ => Blow::Kill,
            },
            at_once,
            respite,
            seed,
        }
    }
}

/// A round that is over.
#[derive(Debug)]
#[non_exhaustive]
pub struct Round {
    /// From which it follows, as far as not from the time that things take.
    pub seed: u64,
    /// How often it went wrong.
    pub strikes: usize,
    /// What may not have happened, told key by key.
    pub violations: Vec<String>,
    /// What happened.
    pub sums: Sums,
    /// How many requests there were.
    pub requests: usize,
}

/// Built beside this program, and as it is.
fn playground(args: &[&str]) -> Command {
    let mut command = beside("playground");
    command.args(args).env("RUST_BACKTRACE", "0");
    command
}

fn beside(name: &str) -> Command {
    let own = env::current_exe().expect("this program has a path");
    Command::new(own.with_file_name(name))
}

fn at(site: &Mutex<Site>) -> MutexGuard<'_, Site> {
    site.lock().unwrap_or_else(PoisonError::into_inner)
}
