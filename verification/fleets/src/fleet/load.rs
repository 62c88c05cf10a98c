//! Clients that retry each key until it has a response, while the fleet is struck.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::task::{JoinSet, spawn_blocking};
use verification::oracle::{Attempt, History, Occasion, Strike};

use super::{
    Fleet,
    client::{Client, LONGEST},
    strikes,
};

/// A load, and the strikes at the fleet meanwhile.
#[derive(Clone, Debug)]
pub struct Load {
    /// The path of the requests, such as `/slow/40`: an execution has its effect at once and its response after 40 ms.
    pub path: String,
    /// The number of keys that are requested at a time, each by two clients at once. The first client hangs up after half a
    /// lease and tries another member. The second client stays as long as its member runs.
    pub at_a_time: usize,
    /// The least number of keys to request.
    pub keys: usize,
    /// The delay before a client retries.
    pub poll: Duration,
    /// The lease of the members.
    pub lease: Duration,
    /// The number of strikes. The load continues until the last one.
    pub strike_count: usize,
    /// The kind of the strikes.
    pub strike_kind: StrikeKind,
    /// The largest number of members that are down at a time.
    pub at_once: usize,
    /// The typical delay between two strikes at a member. The actual delay is between 0.5 and 1.5 times this value.
    pub strike_interval: Duration,
    /// The seed of all random choices. The history also depends on timing.
    pub seed: u64,
}

/// A kind of strike at a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrikeKind {
    /// `kill -9`, and another process that replaces it.
    Kill,
    /// SIGSTOP, and SIGCONT after this duration.
    Pause(Duration),
}

impl Fleet {
    /// Puts a load on the fleet until all strikes are done and each key has its response. Then requests each key once
    /// more, and returns the history.
    ///
    /// # Panics
    ///
    /// Panics if a key has no response for ten minutes, or if a member does not return.
    pub async fn run(self, load: Load) -> History {
        self.run_under(load, |fleet, load| {
            let strikes = strikes::all(fleet, load);
            (strikes.expect("the members come back"), Vec::new())
        })
        .await
    }

    /// Like [`run`](Self::run), but `trouble` injects faults elsewhere, such as into the store. No member is struck,
    /// and the load continues until `trouble` returns. `trouble` returns the [`Occasion`]s on which the store lost
    /// data.
    ///
    /// # Panics
    ///
    /// Panics if a key has no response for ten minutes, or if `trouble` panics.
    pub async fn run_until(
        self,
        load: Load,
        trouble: impl FnOnce() -> Vec<Occasion> + Send + 'static,
    ) -> History {
        self.run_under(load, |_, _| (Vec::new(), trouble())).await
    }

    async fn run_under(
        self,
        load: Load,
        adversary: impl FnOnce(&Fleet, &Load) -> (Vec<Strike>, Vec<Occasion>) + Send + 'static,
    ) -> History {
        let (fleet, load) = (Arc::new(self), Arc::new(load));
        let over = Arc::new(AtomicBool::new(false));
        let striking = {
            let (fleet, load, over) = (Arc::clone(&fleet), Arc::clone(&load), Arc::clone(&over));
            spawn_blocking(move || {
                let befell = catch_unwind(AssertUnwindSafe(|| adversary(&fleet, &load)));
                over.store(true, Ordering::SeqCst);
                befell.unwrap_or_else(|panic| resume_unwind(panic))
            })
        };
        let next = Arc::new(AtomicUsize::new(0));
        let client = |n| Client::new(&fleet, &load.path, load.poll, load.seed, n);

        let mut workers = JoinSet::new();
        for worker in 0..load.at_a_time {
            let (next, over, load) = (Arc::clone(&next), Arc::clone(&over), Arc::clone(&load));
            let (mut hasty, mut patient) = (client(2 * worker), client(2 * worker + 1));
            workers.spawn(async move {
                let mut attempts = Vec::new();
                while next.load(Ordering::SeqCst) < load.keys || !over.load(Ordering::SeqCst) {
                    let key = key(next.fetch_add(1, Ordering::SeqCst));
                    let asked = tokio::join!(
                        hasty.request_until_response(&key, load.lease / 2),
                        patient.request_until_response(&key, LONGEST)
                    );
                    attempts.extend(asked.0.into_iter().chain(asked.1));
                }
                attempts
            });
        }
        let mut attempts = gather(workers).await;
        let (strikes, occasions) = striking
            .await
            .expect("the task of the strikes does not fail");

        let keys = next.load(Ordering::SeqCst);
        let mut workers = JoinSet::new();
        for worker in 0..load.at_a_time {
            let mut client = client(2 * load.at_a_time + worker);
            let mine = (worker..keys).step_by(load.at_a_time);
            workers.spawn(async move {
                let mut attempts = Vec::new();
                for n in mine {
                    attempts.extend(client.request_until_response(&key(n), LONGEST).await);
                }
                attempts
            });
        }
        attempts.extend(gather(workers).await);
        fleet.history(attempts, strikes, occasions, load.lease)
    }
}

fn key(n: usize) -> String {
    format!("key-{n}")
}

async fn gather(workers: JoinSet<Vec<Attempt>>) -> Vec<Attempt> {
    workers.join_all().await.into_iter().flatten().collect()
}
