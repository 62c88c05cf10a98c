//! Many clients at once, key after key.

use std::{sync::Arc, time::Duration};

use tokio::{sync::Barrier, task::JoinSet};
use verification::oracle::History;

use super::{
    Fleet,
    client::{Client, LONGEST},
};

/// Clients that all request one key at the same moment, each until it has the response, and then the next key.
#[derive(Clone, Debug)]
pub struct Stampede {
    /// The path of the requests.
    pub path: String,
    /// The number of clients.
    pub clients: usize,
    /// The number of keys.
    pub keys: usize,
    /// The delay before a client retries.
    pub poll: Duration,
    /// The lease of the members.
    pub lease: Duration,
    /// The seed for the choice of members.
    pub seed: u64,
}

impl Fleet {
    /// Starts the clients, each in a separate task, and returns the history.
    ///
    /// # Panics
    ///
    /// Panics if a key has no response for ten minutes.
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
                    attempts.extend(
                        client
                            .request_until_response(&format!("key-{n}"), LONGEST)
                            .await,
                    );
                }
                attempts
            });
        }
        let attempts = clients.join_all().await.into_iter().flatten().collect();
        fleet.history(attempts, Vec::new(), Vec::new(), stampede.lease)
    }
}
