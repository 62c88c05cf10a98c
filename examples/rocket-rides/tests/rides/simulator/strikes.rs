//! The faults of the processes.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use rocket_rides::provider::Mood;
use tests::{random::Random, server_process::ServerProcess};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};

use crate::processes::{Processes, set_mood};

/// The number of strikes of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strikes {
    kills: usize,
    pauses: usize,
    providers: usize,
    moods: usize,
}

impl Strikes {
    /// Returns `true` if there was at least one kill and one bad mood.
    pub(super) fn has_both_kinds(&self) -> bool {
        self.kills > 0 && self.moods > 0
    }
}

/// A task that strikes the processes until it is ended.
pub(super) struct Striking {
    over: Arc<AtomicBool>,
    /// Kills of services and bad moods so far.
    seen: Arc<[AtomicUsize; 2]>,
    task: JoinHandle<Strikes>,
    moods: JoinHandle<usize>,
}

pub(super) fn begin(processes: &Processes, seed: u64) -> Striking {
    let over = Arc::<AtomicBool>::default();
    let (services, provider) = (processes.services.clone(), Arc::clone(&processes.provider));
    let seen = Arc::<[AtomicUsize; 2]>::default();
    let (is_over, random, counted) = (Arc::clone(&over), Random(seed), Arc::clone(&seen));
    let task = spawn_blocking(move || {
        strike_processes(&services, &provider, random, &is_over, &counted[0])
    });
    let (is_over, random, counted) = (Arc::clone(&over), Random(!seed), Arc::clone(&seen));
    let provider = Arc::clone(&processes.provider);
    let moods = tokio::spawn(async move { moods(&provider, random, &is_over, &counted[1]).await });
    Striking {
        over,
        seen,
        task,
        moods,
    }
}

impl Striking {
    /// Returns `true` if a service was killed and the provider was unwell.
    pub(super) fn has_both_kinds(&self) -> bool {
        self.seen.iter().all(|count| count.load(SeqCst) > 0)
    }

    /// Ends the strikes. All processes run again afterwards.
    pub(super) async fn end(self) -> Strikes {
        self.over.store(true, SeqCst);
        let strikes = self.task.await.expect("every process is back");
        let moods = self.moods.await.expect("moods do not panic");
        Strikes { moods, ..strikes }
    }
}

fn strike_processes(
    services: &[Arc<ServerProcess>],
    provider: &ServerProcess,
    mut random: Random,
    is_over: &AtomicBool,
    counted: &AtomicUsize,
) -> Strikes {
    let mut strikes = Strikes::default();
    while !is_over.load(SeqCst) {
        thread::sleep(random.around(Duration::from_millis(80)));
        let service = &services[random.below(services.len())];
        match random.below(10) {
            0..=6 => {
                service.kill();
                strikes.kills += 1;
                counted.fetch_add(1, SeqCst);
            }
            7 => {
                // Longer than its leases: the service resumes after another process has taken over.
                service.pause(Duration::from_millis(1300));
                strikes.pauses += 1;
            }
            _ => {
                provider.kill();
                strikes.providers += 1;
            }
        }
    }
    strikes
}

/// Changes the provider's mood repeatedly. Returns the number of bad moods.
async fn moods(
    provider: &ServerProcess,
    mut random: Random,
    is_over: &AtomicBool,
    counted: &AtomicUsize,
) -> usize {
    let mut moods = 0;
    while !is_over.load(SeqCst) {
        let mood = match random.below(10) {
            0..=4 => Mood::Well,
            5 => Mood::Failing,
            6 => Mood::Hanging,
            7 => Mood::ChargingThenFailing,
            _ => Mood::ChargingThenHanging,
        };
        // The provider may not be running.
        if set_mood(provider, mood).await && mood != Mood::Well {
            moods += 1;
            counted.fetch_add(1, SeqCst);
        }
        sleep(random.around(Duration::from_millis(120))).await;
    }
    moods
}

impl fmt::Display for Strikes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kills,
            pauses,
            providers,
            moods,
        } = self;
        write!(
            f,
            "services killed {kills} times and paused {pauses}, the provider killed {providers} times and unwell {moods}"
        )
    }
}
