//! A cluster of Redis servers.

use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};

use super::{RedisServer, fields, owned};
use crate::{
    proxy::Proxy,
    scratch::Scratch,
    servers::{READY_WITHIN, certificates::Certificates, free_port},
};

/// Three masters that share the slots, a third each, and optionally a replica of each.
///
/// Nodes are numbered: 0, 1 and 2 are the masters at first, 3, 4 and 5 their replicas.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    /// Files shared by the nodes.
    files: Option<Scratch>,
}

impl RedisCluster {
    /// Starts three masters and waits until each serves. If a master stops, its slots are not served, and after six
    /// seconds the other masters refuse all commands. A stall of two seconds has no effect.
    ///
    /// # Panics
    ///
    /// Panics if Redis is not installed, or the nodes do not find each other.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Like [`start`](Self::start); `args` configure each node, like in [`RedisServer::start`].
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[must_use]
    pub fn start_with(args: &[&str]) -> Self {
        Self::start_nodes(MASTERS, || RedisServer::launch(|_| node_args(args)))
    }

    /// Like [`start`](Self::start), and each node also serves TLS, with the certificates of all. The nodes use TLS among
    /// themselves, too, so that they know each other's TLS ports.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start), and if there is no `openssl`.
    #[must_use]
    pub fn start_with_tls() -> Self {
        let files = Scratch::new();
        let made = Certificates::make(files.path());
        let args = || node_args(&["--tls-cluster", "yes"]);
        let mut cluster = Self::start_nodes(MASTERS, || {
            RedisServer::launch_with_tls(|_| made.clone(), args)
        });
        cluster.files = Some(files);
        cluster
    }

    /// Like [`start`](Self::start), with a replica of each master. A replica takes over if its master is unresponsive
    /// for six seconds.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[must_use]
    pub fn start_with_replicas() -> Self {
        Self::start_with_replicas_and(&[])
    }

    /// Like [`start_with_replicas`](Self::start_with_replicas); `args` configure each node, like in [`RedisServer::start`].
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start).
    #[must_use]
    pub fn start_with_replicas_and(args: &[&str]) -> Self {
        Self::start_nodes(2 * MASTERS, || RedisServer::launch(|_| node_args(args)))
    }

    fn start_nodes(nodes: usize, start_node: impl Fn() -> RedisServer + Sync) -> Self {
        let nodes: Vec<_> = thread::scope(|scope| {
            let starting: Vec<_> = (0..nodes).map(|_| scope.spawn(&start_node)).collect();
            let started = starting.into_iter().map(|node| node.join());
            started.map(|node| node.expect("a node")).collect()
        });
        let cluster = Self { nodes, files: None };
        for (i, node) in cluster.nodes.iter().enumerate() {
            let epoch = (i + 1).to_string();
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
            let port = node.address().port().to_string();
            let bus = node.command(&["CONFIG", "GET", "cluster-port"]);
            let bus = bus.lines().nth(1).expect("a value").to_owned();
            cluster.nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        }
        for (node, slots) in cluster.nodes.iter().zip(THIRDS) {
            let (first, last) = (slots.start().to_string(), slots.end().to_string());
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]);
        }
        let all = cluster.nodes.len().to_string();
        cluster.wait("the nodes know each other", || {
            cluster.every(|info| info["cluster_known_nodes"] == all)
        });
        for (replica, master) in cluster.nodes[MASTERS..].iter().zip(&cluster.nodes) {
            let master = id(master);
            // The replica may know the node, but not yet that it is a master with slots.
            cluster.wait("a master can have a replica", || {
                let replicated = replica.try_command(&["CLUSTER", "REPLICATE", &master]);
                matches!(replicated, Ok(Ok(_)))
            });
        }
        cluster.wait("the cluster serves", || {
            cluster.every(|info| {
                info["cluster_state"] == "ok" && info["cluster_slots_assigned"] == "16384"
            }) && cluster.nodes[MASTERS..].iter().all(RedisServer::is_linked)
                && cluster
                    .nodes
                    .iter()
                    .all(|node| replicas_seen_by(node) == cluster.nodes.len() - MASTERS)
        });
        cluster
    }

    /// Returns the URLs of all nodes.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// Returns the URL of the cluster: `redis+cluster://HOST:PORT,HOST:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        let nodes = self.nodes.iter().map(|node| node.address().to_string());
        format!("redis+cluster://{}", nodes.collect::<Vec<_>>().join(","))
    }

    /// Returns a node.
    ///
    /// # Panics
    ///
    /// Panics if there is no such node.
    #[must_use]
    pub fn node(&self, n: usize) -> &RedisServer {
        &self.nodes[n]
    }

    /// Returns a node, so that a test can kill or restart it. After a restart it is the same node, but a replica if its
    /// replica has taken over.
    ///
    /// # Panics
    ///
    /// Panics if there is no such node.
    pub fn node_mut(&mut self, n: usize) -> &mut RedisServer {
        &mut self.nodes[n]
    }

    /// Returns the slot of a key.
    ///
    /// # Panics
    ///
    /// Panics if no node replies.
    #[must_use]
    pub fn slot(&self, key: impl AsRef<[u8]>) -> u16 {
        let command = [b"CLUSTER".as_slice(), b"KEYSLOT", key.as_ref()];
        let slot = self.query_any(&command);
        slot.parse().expect("a slot")
    }

    /// Returns the node that serves a slot, as the first node that replies reports it. Returns `None` if that node does
    /// not run.
    ///
    /// # Panics
    ///
    /// Panics if no node replies.
    #[must_use]
    pub fn master_of(&self, slot: u16) -> Option<usize> {
        let nodes = self.query_any(&["CLUSTER", "NODES"]);
        let owner = nodes.lines().find(|line| {
            let mut words = line.split(' ');
            let flags = words.nth(2).unwrap_or_default();
            flags.contains("master") && !flags.contains("fail") && {
                let mut slots = words.skip(5).filter_map(range);
                slots.any(|slots| slots.contains(&slot))
            }
        })?;
        // Compares only the port, because a node may announce another host.
        let (_host, port) = owner
            .split(' ')
            .nth(1)?
            .split('@')
            .next()?
            .rsplit_once(':')?;
        self.nodes
            .iter()
            .position(|node| node.port.to_string() == port)
    }

    /// Moves slots to another master, with their keys. The former owner then replies `MOVED`.
    ///
    /// # Panics
    ///
    /// Panics if a node refuses, for example because it is not a master.
    pub fn move_slots(&self, slots: RangeInclusive<u16>, to: usize) {
        // A node that moves keys to itself would wait for itself.
        for slot in slots.filter(|slot| self.master_of(*slot) != Some(to)) {
            self.begin_move(slot, to);
            self.move_keys(slot, to);
            self.end_move(slot, to);
        }
    }

    /// Opens a slot: its master redirects absent keys to the other master with `ASK`.
    ///
    /// # Panics
    ///
    /// Like [`move_slots`](Self::move_slots).
    pub fn begin_move(&self, slot: u16, to: usize) {
        let from = self.master_of(slot).expect("a slot that is served");
        if from == to {
            return;
        }
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let slot = slot.to_string();
        target.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(source)]);
        source.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(target)]);
    }

    /// Moves the keys of an open slot.
    ///
    /// # Panics
    ///
    /// Like [`move_slots`](Self::move_slots).
    pub fn move_keys(&self, slot: u16, to: usize) {
        let from = self.master_of(slot).expect("a slot that is served");
        let (source, target) = (&self.nodes[from], &self.nodes[to]);
        let (slot, port) = (slot.to_string(), target.address().port().to_string());
        loop {
            let keys = source.list(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                return;
            }
            let migrate = ["MIGRATE", "127.0.0.1", &port, "", "0", "10000", "KEYS"];
            let mut migrate: Vec<_> = migrate.iter().map(|word| word.as_bytes()).collect();
            migrate.extend(keys.iter().map(Vec::as_slice));
            source.command(&migrate);
        }
    }

    /// Closes an open slot, and makes the other master its owner.
    ///
    /// # Panics
    ///
    /// Like [`move_slots`](Self::move_slots).
    pub fn end_move(&self, slot: u16, to: usize) {
        let from = self.master_of(slot).expect("a slot that is served");
        let (slot, owner) = (slot.to_string(), id(&self.nodes[to]));
        // The new owner comes first: if it were last, the slot would have no owner for a moment.
        for node in [to, from] {
            self.nodes[node].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &owner]);
        }
        for node in (0..MASTERS).filter(|node| ![to, from].contains(node)) {
            // The other masters would learn this by themselves, but later. Replicas reject the command.
            let _ = self.nodes[node].try_command(&["CLUSTER", "SETSLOT", &slot, "NODE", &owner]);
        }
    }

    /// Waits until a node other than `former` serves `slot`, and returns that node.
    ///
    /// # Panics
    ///
    /// Panics if there is none within 30 seconds.
    #[must_use]
    pub fn failed_over(&self, slot: u16, former: usize) -> usize {
        let other = || self.master_of(slot).filter(|master| *master != former);
        self.wait("a replica takes over", || other().is_some());
        other().expect("the wait has found it")
    }

    /// Waits until all nodes serve and each replica has the data of its master, for example after a restart of a node.
    ///
    /// # Panics
    ///
    /// Panics if they do not within 30 seconds.
    pub fn wait_until_healthy(&self) {
        let replicas = self.nodes.len() - MASTERS;
        self.wait("the cluster is whole again", || {
            let linked = self.nodes.iter().filter(|node| node.is_linked());
            linked.count() == replicas
                && self.every(|info| info["cluster_state"] == "ok")
                && self
                    .nodes
                    .iter()
                    .all(|node| replicas_seen_by(node) == replicas)
        });
    }

    fn query_any<A: AsRef<[u8]>>(&self, args: &[A]) -> String {
        let mut responses = self
            .nodes
            .iter()
            .filter_map(|node| node.try_command(args).ok());
        let response = responses.next().expect("a node that replies");
        response.expect("a valid command")
    }

    fn every(&self, holds: impl Fn(&BTreeMap<String, String>) -> bool) -> bool {
        let info = |node: &RedisServer| fields(&node.command(&["CLUSTER", "INFO"]));
        self.nodes.iter().all(|node| holds(&info(node)))
    }

    fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + READY_WITHIN;
        while !holds() {
            assert!(
                Instant::now() < deadline,
                "expected that {what}; the first node reports:\n{}",
                self.nodes[0].log()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl RedisServer {
    /// Starts a cluster of one node. The node announces the address of the proxy, so clients of the cluster use the proxy.
    ///
    /// # Panics
    ///
    /// Like [`start`](Self::start), and if the node does not serve.
    #[must_use]
    pub fn start_cluster_behind(proxy: &Proxy) -> Self {
        let port = proxy.address().port().to_string();
        let server = Self::launch(|_| node_args(&["--cluster-announce-port", &port]));
        proxy.set_upstream(server.address());
        server.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        let cluster = RedisCluster {
            nodes: vec![server],
            files: None,
        };
        cluster.wait("the cluster serves", || {
            cluster.every(|info| info["cluster_state"] == "ok")
        });
        let mut nodes = cluster.nodes;
        nodes.remove(0)
    }
}

fn node_args(more: &[&str]) -> Vec<String> {
    let bus = free_port().to_string();
    let mut args = owned(&[
        ["--cluster-enabled", "yes"],
        ["--cluster-port", &bus],
        ["--cluster-node-timeout", "6000"],
        // Permits a failover after any time without a link, because there is no other copy here.
        ["--cluster-replica-validity-factor", "0"],
    ]);
    args.extend(more.iter().map(|arg| (*arg).to_owned()));
    args
}

const MASTERS: usize = 3;
const THIRDS: [RangeInclusive<u16>; MASTERS] = [0..=5460, 5461..=10922, 10923..=16383];

fn id(node: &RedisServer) -> String {
    node.command(&["CLUSTER", "MYID"])
}

fn replicas_seen_by(node: &RedisServer) -> usize {
    let nodes = node.command(&["CLUSTER", "NODES"]);
    nodes.lines().filter(|line| line.contains("slave")).count()
}

/// Parses `0-5460` or `7`, but not `[7->-..]`, which describes an open slot.
fn range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}
