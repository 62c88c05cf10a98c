//! The site of a fleet's store: a server, and the network path between the fleet and the server.

use std::{
    env, fs,
    io::{ErrorKind, Write},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use tests::{
    proxy::{ConnectionEnd, Mode, Proxy},
    random::Random,
    scratch::Scratch,
    servers::{
        dynamodb::{DynamoDbServer, StandIn},
        mariadb::{self, MariaDbServer},
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
};
use verification::oracle::Occasion;

use super::{Fault, Kind};

#[derive(Debug)]
pub(super) struct Site {
    server: StoreServer,
    /// The proxy that delays replies. A member is therefore often struck after the store acted and before the reply
    /// arrived.
    proxy: Option<Proxy>,
    /// The time at which each fault was injected, and the time at which it ended.
    pub(super) faults: Vec<(Instant, Instant)>,
}

#[derive(Debug)]
enum StoreServer {
    Postgres(PostgresServer),
    MariaDb(MariaDbServer),
    Sqlite(File),
    Redis(Box<Redis>),
    Cluster(RedisCluster),
    DynamoDb(DynamoDbServer),
}

#[derive(Debug)]
struct Redis {
    primary: RedisServer,
    replica: Option<RedisServer>,
}

/// A database without a server.
#[derive(Debug)]
struct File {
    path: PathBuf,
    /// The file that takes the free space of the disk while the disk is full.
    filler: PathBuf,
    _scratch: Scratch,
}

impl Site {
    pub(super) fn start(kind: Kind, fault: Fault) -> Self {
        let server = match kind {
            Kind::Postgres => {
                StoreServer::Postgres(PostgresServer::start(&["max_connections=300"]))
            }
            Kind::MariaDb => StoreServer::MariaDb(MariaDbServer::start(&[])),
            Kind::Sqlite => StoreServer::Sqlite(File::new(fault)),
            Kind::Redis => redis(fault),
            Kind::RedisCluster => {
                StoreServer::Cluster(RedisCluster::start_with_replicas_and(&FAST_FAILOVER))
            }
            Kind::DynamoDb => StoreServer::DynamoDb(DynamoDbServer::start(StandIn::Dynoxide)),
        };
        let address = match &server {
            StoreServer::Postgres(server) => Some(server.address()),
            StoreServer::MariaDb(server) => Some(server.address()),
            StoreServer::Redis(redis) => Some(redis.primary.address()),
            StoreServer::DynamoDb(server) => Some(server.address()),
            // The nodes of a cluster report the addresses of the other nodes, so the fleet would bypass a proxy.
            StoreServer::Sqlite(_) | StoreServer::Cluster(_) => None,
        };
        let proxy = address.map(Proxy::start);
        if let Some(proxy) = &proxy {
            proxy.set(LATE);
        }
        Self {
            server,
            proxy,
            faults: Vec::new(),
        }
    }

    /// Returns the URL of the store for playgrounds.
    pub(super) fn url(&self) -> String {
        match &self.server {
            StoreServer::Postgres(_) | StoreServer::MariaDb(_) => self.bank_url(),
            StoreServer::Sqlite(file) => format!("sqlite:{}", file.path.display()),
            StoreServer::Redis(_) => format!("redis://{}/0", self.through()),
            StoreServer::Cluster(cluster) => {
                let urls = cluster.urls();
                let nodes = urls.iter().map(|url| {
                    let url = url.trim_start_matches("redis://");
                    url.trim_end_matches("/0")
                });
                let nodes: Vec<_> = nodes.collect();
                format!("redis+cluster://{}", nodes.join(","))
            }
            // The processes of one machine share a clock.
            StoreServer::DynamoDb(_) => {
                format!(
                    "dynamodb://keys?endpoint=http://{}&skew=0ms",
                    self.through()
                )
            }
        }
    }

    /// Returns the URL of the store for banks.
    pub(super) fn bank_url(&self) -> String {
        match &self.server {
            StoreServer::Postgres(_) => format!("postgres://app@{}/postgres", self.through()),
            StoreServer::MariaDb(_) => mariadb::url(self.through()),
            StoreServer::Sqlite(file) => file.path.display().to_string(),
            StoreServer::Redis(_) | StoreServer::Cluster(_) | StoreServer::DynamoDb(_) => {
                unreachable!("the store has no transactions")
            }
        }
    }

    /// Returns the URL of the store for the campaign itself. No fault is injected on this path.
    pub(super) fn own_url(&self) -> String {
        match &self.server {
            StoreServer::Postgres(server) => server.url(),
            StoreServer::MariaDb(server) => server.url(),
            StoreServer::Sqlite(_) => self.bank_url(),
            StoreServer::Redis(_) | StoreServer::Cluster(_) | StoreServer::DynamoDb(_) => {
                unreachable!("the store has no transactions")
            }
        }
    }

    fn through(&self) -> std::net::SocketAddr {
        self.proxy().address()
    }

    fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("the fault is for the store")
    }

    /// Injects a fault once and ends it. Returns the [`Occasion`] for more effects if the store lost data.
    pub(super) fn inject(&mut self, fault: Fault, random: &mut Random) -> Option<Occasion> {
        let from = Instant::now();
        let forgets = match fault {
            Fault::Cut => self.set_mode_for(Mode::Cut, random.around(Duration::from_millis(60))),
            Fault::Delay => {
                let mut late = || Duration::from_millis(random.below(120) as u64);
                let (up, down) = (late(), late());
                self.set_mode_for(Mode::Delay { up, down }, Duration::from_millis(500))
            }
            Fault::Silence => {
                self.set_mode_for(Mode::Hold, random.around(Duration::from_millis(900)))
            }
            Fault::Replies => {
                let then = [ConnectionEnd::Cut, ConnectionEnd::Hang][random.below(2)];
                let length = random.around(Duration::from_millis(200));
                self.set_mode_for(Mode::LoseReplies(then), length)
            }
            Fault::Restart => self.restart(random.around(Duration::from_millis(200))),
            Fault::Freeze if matches!(self.server, StoreServer::Cluster(_)) => {
                self.freeze_node(random)
            }
            Fault::Freeze => self.freeze(random.around(Duration::from_millis(1800))),
            Fault::Empty => {
                self.restart(random.around(Duration::from_millis(50)));
                true
            }
            Fault::Failover => self.fail_over(),
            Fault::Evict => {
                let redis = self.redis();
                redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
                // This write evicts every entry that the eviction policy permits.
                let _ = redis.try_command(&["SET", "more", "y"]);
                redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
                true
            }
            Fault::Scripts => {
                self.redis().command(&["SCRIPT", "FLUSH"]);
                false
            }
            Fault::Full => {
                let redis = self.redis();
                redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
                thread::sleep(random.around(Duration::from_millis(300)));
                redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
                false
            }
            Fault::Node => self.lose_node(random),
            Fault::Slots => self.move_slots(random),
            Fault::Disk => self.fill_disk(random.around(Duration::from_millis(500))),
            Fault::Kill | Fault::Pause => unreachable!("the fault strikes the fleet"),
        };
        let until = Instant::now();
        self.faults.push((from, until));
        forgets.then_some(Occasion {
            key: None,
            from,
            until,
            takeover: false,
        })
    }

    fn set_mode_for(&self, mode: Mode, length: Duration) -> bool {
        self.proxy().set(mode);
        thread::sleep(length);
        self.proxy().set(LATE);
        false
    }

    fn restart(&mut self, away: Duration) -> bool {
        match &mut self.server {
            StoreServer::Postgres(server) => {
                server.kill();
                thread::sleep(away);
                server.restart();
            }
            StoreServer::MariaDb(server) => {
                server.kill();
                thread::sleep(away);
                server.restart();
            }
            StoreServer::Redis(redis) => {
                redis.primary.kill();
                thread::sleep(away);
                redis.primary.restart();
            }
            StoreServer::Sqlite(_) | StoreServer::Cluster(_) | StoreServer::DynamoDb(_) => {
                unreachable!()
            }
        }
        false
    }

    fn freeze(&self, length: Duration) -> bool {
        match &self.server {
            StoreServer::MariaDb(server) => server.pause(),
            StoreServer::Redis(redis) => redis.primary.pause(),
            StoreServer::DynamoDb(server) => server.pause(),
            StoreServer::Postgres(_) | StoreServer::Sqlite(_) | StoreServer::Cluster(_) => {
                unreachable!()
            }
        }
        thread::sleep(length);
        match &self.server {
            StoreServer::MariaDb(server) => server.resume(),
            StoreServer::Redis(redis) => redis.primary.resume(),
            StoreServer::DynamoDb(server) => server.resume(),
            StoreServer::Postgres(_) | StoreServer::Sqlite(_) | StoreServer::Cluster(_) => {
                unreachable!()
            }
        }
        false
    }

    fn redis(&self) -> &RedisServer {
        match &self.server {
            StoreServer::Redis(redis) => &redis.primary,
            _ => unreachable!("the fault is for Redis"),
        }
    }

    /// Fails over to the replica. Writes that had not reached the replica are lost.
    fn fail_over(&mut self) -> bool {
        let StoreServer::Redis(redis) = &mut self.server else {
            unreachable!("the fault is for Redis");
        };
        let Redis { primary, replica } = &mut **redis;
        let next = replica.take().expect("a replica");
        primary.kill();
        next.promote();
        let proxy = self.proxy.as_ref().expect("Redis has one");
        proxy.set_upstream(next.address());
        *replica = Some(RedisServer::replica_of(&next));
        *primary = next;
        true
    }

    fn cluster(&mut self) -> &mut RedisCluster {
        match &mut self.server {
            StoreServer::Cluster(cluster) => cluster,
            _ => unreachable!("the fault is for clusters"),
        }
    }

    /// Kills a master until its replica takes over. Writes that had not reached the replica are lost.
    fn lose_node(&mut self, random: &mut Random) -> bool {
        let cluster = self.cluster();
        let slot = u16::try_from(random.below(16_384)).expect("a slot");
        let master = cluster.master_of(slot).expect("all slots are served");
        cluster.node_mut(master).kill();
        let _ = cluster.failed_over(slot, master);
        cluster.node_mut(master).restart();
        cluster.wait_until_healthy();
        true
    }

    /// Pauses a master for long enough that its replica takes over.
    fn freeze_node(&mut self, random: &mut Random) -> bool {
        let cluster = self.cluster();
        let slot = u16::try_from(random.below(16_384)).expect("a slot");
        let master = cluster.master_of(slot).expect("all slots are served");
        cluster.node(master).pause();
        thread::sleep(Duration::from_secs(6));
        cluster.node(master).resume();
        cluster.wait_until_healthy();
        true
    }

    fn move_slots(&mut self, random: &mut Random) -> bool {
        let cluster = self.cluster();
        let first = u16::try_from(random.below(16_384 - 64)).expect("a slot");
        let from = cluster.master_of(first).expect("all slots are served");
        cluster.move_slots(first..=first + 63, (from + 1 + random.below(2)) % 3);
        false
    }

    fn fill_disk(&self, length: Duration) -> bool {
        let StoreServer::Sqlite(file) = &self.server else {
            unreachable!("the fault is for SQLite");
        };
        let mut filler = fs::File::create(&file.filler).expect("room for an empty file");
        loop {
            match filler.write(&[0; 4096]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("the disk does not fill: {error}"),
            }
        }
        thread::sleep(length);
        fs::remove_file(&file.filler).expect("the file exists");
        false
    }
}

impl File {
    /// Creates the directory, on the disk to be filled if the fault is a full disk.
    fn new(fault: Fault) -> Self {
        let scratch = Scratch::new();
        if fault != Fault::Disk {
            return Self {
                path: scratch.file("keys.db"),
                filler: scratch.file("filler"),
                _scratch: scratch,
            };
        }
        let disk = env::var_os(DISK).map(PathBuf::from);
        let disk = disk.unwrap_or_else(|| panic!("{DISK} names no small disk of its own"));
        for file in fs::read_dir(&disk).expect("a disk").flatten() {
            fs::remove_file(file.path()).expect("a file of the last round");
        }
        Self {
            path: disk.join("keys.db"),
            filler: disk.join("filler"),
            _scratch: scratch,
        }
    }
}

fn redis(fault: Fault) -> StoreServer {
    let kept = ["--appendonly", "yes", "--appendfsync", "always"];
    let args: &[&str] = match fault {
        Fault::Empty | Fault::Failover => &[],
        Fault::Evict => &["--maxmemory-policy", "allkeys-lru"],
        _ => &kept,
    };
    let primary = RedisServer::start(args);
    let replica = (fault == Fault::Failover).then(|| RedisServer::replica_of(&primary));
    StoreServer::Redis(Box::new(Redis { primary, replica }))
}

/// The mode of the proxy while no fault is injected.
const LATE: Mode = Mode::Delay {
    up: Duration::ZERO,
    down: Duration::from_millis(4),
};
/// The environment variable with the mount point of a small disk that the campaign may fill.
const DISK: &str = "CAMPAIGN_DISK";
/// A node that is unresponsive for a second has failed: the campaign has many failovers.
const FAST_FAILOVER: [&str; 2] = ["--cluster-node-timeout", "1000"];
