//! Fleets: several processes on one store, killed and paused at any moment.

mod clients;
mod dynamodb;
mod exactly_once;
mod memory;
mod redis;
mod sql;

use std::{net::SocketAddr, time::Duration};

use tests::proxy::{Mode, Proxy};
use verification::{
    fleet::{Fleet, Load},
    oracle::History,
};

/// A server with delayed replies, so that processes are often struck between an effect on the store and its reply.
struct DelayedServer<S> {
    _server: S,
    proxy: Proxy,
}

impl<S> DelayedServer<S> {
    fn new(server: S, address: SocketAddr) -> Self {
        let proxy = Proxy::start(address);
        proxy.set(Mode::Delay {
            up: Duration::ZERO,
            down: Duration::from_millis(8),
        });
        Self {
            _server: server,
            proxy,
        }
    }

    fn address(&self) -> SocketAddr {
        self.proxy.address()
    }

    async fn run(self, members: usize, store: &str, orphans: &str, load: Load) -> History {
        let lease = format!("{}ms", load.lease.as_millis());
        let args = ["--store", store, "--orphans", orphans, "--lease", &lease];
        let history = Fleet::start(members, &args).run(load).await;
        println!("{orphans}: {}", history.sums());
        history
    }
}
