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
use tests::{actor::Actor, random::Random};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};

use crate::cast::{Cast, set_mood};

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
    pub(super) fn fell(&self) -> bool {
        self.kills > 0 && self.moods > 0
    }
}

/// A task that strikes the processes until it is ended.
pub(super) struct Striking {
    over: Arc<AtomicBool>,
    /// Kills of services and bad moods so far.
    seen: Arc<[AtomicUsize; 2]>,
    blows: JoinHandle<Strikes>,
    moods: JoinHandle<usize>,
}

pub(super) fn begin(cast: &Cast, seed: u64) -> Striking {
    let over = Arc::<AtomicBool>::default();
    let (services, provider) = (cast.services.clone(), Arc::clone(&cast.provider));
    let seen = Arc::<[AtomicUsize; 2]>::default();
    let (is_over, random, counted) = (Arc::clone(&over), Random(seed), Arc::clone(&seen));
    let blows = spawn_blocking(move || blows(&services, &provider, random, &is_over, &counted[0]));
    let (is_over, random, counted) = (Arc::clone(&over), Random(!seed), Arc::clone(&seen));
    let provider = Arc::clone(&cast.provider);
    let moods = tokio::spawn(async move { moods(&provider, random, &is_over, &counted[1]).await });
    Striking {
        over,
        seen,
        blows,
        moods,
    }
}

impl Striking {
    /// Returns `true` if a service was killed and the provider was unwell.
    pub(super) fn have_fallen(&self) -> bool {
        self.seen.iter().all(|count| count.load(SeqCst) > 0)
    }

    /// Ends the strikes. All processes run again afterwards.
    pub(super) async fn end(self) -> Strikes {
        self.over.store(true, SeqCst);
        let strikes = self.blows.await.expect("every process is back");
        let moods = self.moods.await.expect("moods do not panic");
        Strikes { moods, ..strikes }
    }
}

fn blows(
    services: &[Arc<Actor>],
    provider: &Actor,
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

/// Changes the provider's mood again and again. Returns the number of bad moods.
async fn moods(
    provider: &Actor,
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
