//! Clients that retry each key until it has an answer, while the fleet is struck.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::task::{JoinSet, spawn_blocking};

use super::{
    Fleet,
    client::{Client, LONGEST},
    strikes,
};
use crate::oracle::{Attempt, History, Occasion, Strike};

/// A load, and what befalls the fleet meanwhile.
#[derive(Clone, Debug)]
pub struct Load {
    /// Where the requests go, as in `/slow/40`: an execution has its effect at once and its answer after 40 ms.
    pub path: String,
    /// How many keys are asked for at a time. Each by two clients at once: one hangs up after half a lease and tries
    /// another member, the other one stays as long as its member is there.
    pub at_a_time: usize,
    /// How many keys are asked for at least.
    pub keys: usize,
    /// How long a client waits before it tries again.
    pub poll: Duration,
    /// The lease of the members.
    pub lease: Duration,
    /// How many blows fall; the load goes on until they have.
    pub blows: usize,
    /// Which.
    pub blow: Blow,
    /// How many members are down at a time, at most.
    pub at_once: usize,
    /// How long a member is left alone between two, half as long or half as long again.
    pub respite: Duration,
    /// What all that is random follows from, as far as it is not the time that things take.
    pub seed: u64,
}

/// What befalls a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// `kill -9`, and another process in its place.
    Kill,
    /// SIGSTOP, and SIGCONT after that long.
    Pause(Duration),
}

impl Fleet {
    /// Puts a load on the fleet until all blows have fallen and each key has its answer, then asks for each key once
    /// more, and tells what happened.
    ///
    /// # Panics
    ///
    /// When a key has no answer for two minutes, or a member does not come back.
    pub async fn run(self, load: Load) -> History {
        self.run_under(load, |fleet, load| {
            let strikes = strikes::all(fleet, load);
            (strikes.expect("the members come back"), Vec::new())
        })
        .await
    }

    /// As [`run`](Self::run) while `trouble` is made elsewhere, such as at the store: no blows fall, and the load goes on
    /// until that is over. It says when the store forgot something.
    ///
    /// # Panics
    ///
    /// When a key has no answer for two minutes, or `trouble` panics.
    pub async fn run_beside(
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
                        hasty.insist(&key, load.lease / 2),
                        patient.insist(&key, LONGEST)
                    );
                    attempts.extend(asked.0.into_iter().chain(asked.1));
                }
                attempts
            });
        }
        let mut attempts = gather(workers).await;
        let (strikes, occasions) = striking.await.expect("whoever strikes does not fail");

        let keys = next.load(Ordering::SeqCst);
        let mut workers = JoinSet::new();
        for worker in 0..load.at_a_time {
            let mut client = client(2 * load.at_a_time + worker);
            let mine = (worker..keys).step_by(load.at_a_time);
            workers.spawn(async move {
                let mut attempts = Vec::new();
                for n in mine {
                    attempts.extend(client.insist(&key(n), LONGEST).await);
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
