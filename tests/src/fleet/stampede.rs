//! Many clients at once, key after key.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Barrier, task::JoinSet};

use super::{
    Fleet,
    client::{Client, LONGEST},
};
use crate::oracle::History;

/// Clients that all ask for one key at the same moment, each until it has the answer, and then for the next.
#[derive(Clone, Debug)]
pub struct Stampede {
    /// Where the requests go.
    pub path: String,
    /// How many clients.
    pub clients: usize,
    /// How many keys.
    pub keys: usize,
    /// How long a client waits before it tries again.
    pub poll: Duration,
    /// The lease of the members.
    pub lease: Duration,
    /// Which members are asked follows from it.
    pub seed: u64,
}

impl Fleet {
    /// Lets the clients loose on the fleet, each in a task of its own, and tells what happened.
    ///
    /// # Panics
    ///
    /// When a key has no answer for two minutes.
    pub async fn stampede(self, stampede: &Stampede) -> History {
        let fleet = Arc::new(self);
        let start = Arc::new(Barrier::new(stampede.clients));
        let mut clients = JoinSet::new();
        for n in 0..stampede.clients {
            let (start, keys) = (Arc::clone(&start), stampede.keys);
            let mut client = Client::new(&fleet, &stampede.path, stampede.poll, stampede.seed, n);
            clients.spawn(async move {
                let mut attempts = Vec::new();
                for n in 0..keys {
                    start.wait().await;
                    attempts.extend(client.insist(&format!("key-{n}"), LONGEST).await);
                }
                attempts
            });
        }
        let attempts = clients.join_all().await.into_iter().flatten().collect();
        fleet.history(attempts, Vec::new(), Vec::new(), stampede.lease)
    }
}
