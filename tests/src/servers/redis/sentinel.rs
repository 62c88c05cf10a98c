//! A sentinel, which watches a Redis server and promotes a replica if the server fails.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{RedisServer, password, query, responses};
use crate::servers::{Guard, READY_WITHIN, directory, start_on_free_port, tool};

/// A single sentinel; killed when it is dropped. It calls the primary [`NAME`](Self::NAME), and decides without
/// other sentinels.
#[derive(Debug)]
pub struct Sentinel {
    guard: Guard,
    port: u16,
}

impl Sentinel {
    /// The name of the primary that it watches.
    pub const NAME: &str = "main";

    /// Starts a sentinel that watches `primary`, and promotes a replica if the primary is unresponsive for five
    /// seconds. Waits until the sentinel has found `replicas` replicas.
    ///
    /// # Panics
    ///
    /// Panics if Redis is not installed, or the sentinel does not find the servers.
    #[must_use]
    pub fn start(primary: &RedisServer, replicas: usize) -> Self {
        let (name, watched) = (Self::NAME, primary.port);
        let auth = password(&primary.args).map_or_else(String::new, |password| {
            format!("sentinel auth-pass {name} {password}\n")
        });
        let configuration = format!(
            "bind 127.0.0.1\n\
             sentinel monitor {name} 127.0.0.1 {watched} 1\n\
             sentinel down-after-milliseconds {name} 5000\n\
             sentinel failover-timeout {name} 10000\n{auth}"
        );
        let start = |port: u16| {
            let directory = directory("sentinel");
            let file = directory.join("sentinel.conf");
            let text = format!("port {port}\n{configuration}");
            fs::write(&file, text).expect("a directory that can be written");
            let mut command = Command::new(tool("redis-server", "redis-server", &[]));
            command.arg(file).arg("--sentinel");
            Guard::start(&directory, &command, "KILL")
        };
        let (port, guard) = start_on_free_port(start, |port, guard| responses(port, None, guard));
        let sentinel = Self { guard, port };
        sentinel.wait("the sentinel finds the replicas", || {
            let found = sentinel.command(&["SENTINEL", "REPLICAS", name]);
            let links = found.lines().filter(|line| *line == "master-link-status");
            links.count() == replicas
        });
        sentinel
    }

    /// Returns the address of the sentinel.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the server that the sentinel considers the primary.
    ///
    /// # Panics
    ///
    /// Panics if the sentinel does not report one.
    #[must_use]
    pub fn primary(&self) -> SocketAddr {
        let response = self.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::NAME]);
        let address = response.replace('\n', ":").parse();
        address.expect("an address and a port")
    }

    /// Waits until a server other than `former` is the primary and accepts writes, and returns it.
    ///
    /// # Panics
    ///
    /// Panics if there is none within 30 seconds.
    #[must_use]
    pub fn failed_over(&self, former: SocketAddr) -> SocketAddr {
        self.wait("a replica takes over", || {
            let role = |address| query(address, None, &["ROLE"]);
            self.primary() != former
                && matches!(role(self.primary()), Ok(Ok(role)) if role.text().starts_with("master"))
        });
        self.primary()
    }

    fn command(&self, args: &[&str]) -> String {
        let response = query(self.address(), None, args);
        let response = response.expect("a reply of the sentinel");
        response.expect("a valid command").text()
    }

    fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + READY_WITHIN;
        while !holds() {
            let log = self.guard.log();
            assert!(Instant::now() < deadline, "expected that {what}:\n{log}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}
