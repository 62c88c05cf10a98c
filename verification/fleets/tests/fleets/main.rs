//! Fleets: several processes on one store, killed and paused at any moment.

mod dynamodb;
mod exactly_once;
mod memory;
mod outbox_clients;
mod redis;
mod sql;

use std::{net::SocketAddr, time::Duration};

use fleets::fleet::{Fleet, Load, Stampede};
use tests::proxy::{Mode, Proxy};
use verification::oracle::History;

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

/// Requests each key from 64 clients at once. Asserts that each key is executed once, and that each client gets a
/// response.
async fn execute_keys_once(
    members: usize,
    args: &[&str],
    keys: usize,
    poll: Duration,
    lease: Duration,
) {
    let stampede = Stampede {
        path: "/orders".to_owned(),
        clients: 64,
        keys,
        poll,
        lease,
        seed: 6,
    };
    let history = Fleet::start(members, args).stampede(&stampede).await;
    println!("{args:?}: {}", history.sums());
    assert_executed_once(&history);
    assert_eq!(history.effects.len(), keys);
    let responses = history.attempts.iter().filter_map(|it| it.response());
    assert_eq!(responses.count(), 64 * keys);
}

/// Asserts that no key has a second effect, and that the responses of each key agree.
fn assert_executed_once(history: &History) {
    assert_none("excess effects", &history.excess_effects());
    assert_none("contradictions", &history.contradictions());
}

/// Asserts that each second effect has an explanation, and that prompt responses agree.
fn assert_explained(history: &History) {
    assert_none("unexplained", &history.unexplained_effects());
    let contradictions = history.contradictions_of_prompt_answers();
    assert_none("contradictions", &contradictions);
}

fn assert_none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}
