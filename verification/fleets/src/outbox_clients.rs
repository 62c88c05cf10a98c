//! Both halves together: a client with an outbox sends operations to the layer through a relay that breaks connections, and
//! is killed repeatedly.
//!
//! The client forgets the key of each operation that is reported as not executed, and sends it under a new one. So a wrong
//! outcome causes a second effect, and so does a request that is sent before it is stored.

use std::{
    fmt, fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tests::{
    GuardedChild,
    random::Random,
    scratch::Scratch,
    servers::{postgres::PostgresServer, redis::RedisServer},
    sql,
};
use tokio::time::sleep;
use tower_idempotency::MemoryStore;

use self::{
    journal::{Journal, LINE},
    relay::Relay,
    server::Server,
};

mod journal;
mod orders;
mod relay;
mod server;

pub use self::orders::run as run_orders;

/// A campaign of clients.
#[derive(Clone, Copy, Debug)]
pub struct Clients {
    /// Store of the server. It also selects the outbox of the client.
    pub store: StoreKind,
    /// Number of operations.
    pub operations: usize,
    /// Operations that the client reports between two kills, at most.
    pub between_kills: usize,
    /// Seed of the kills, of the breaks and of the server. The result also depends on timing.
    pub seed: u64,
}

/// Store of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// `MemoryStore`; the outbox of the client is a file.
    Memory,
    /// PostgreSQL; the outbox is a table of the same server.
    Postgres,
    /// Redis; the outbox is a SQLite file.
    Redis,
}

impl StoreKind {
    /// All stores.
    pub const ALL: [Self; 3] = [Self::Memory, Self::Postgres, Self::Redis];

    /// Returns the name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Postgres => "postgres",
            Self::Redis => "redis",
        }
    }
}

/// Result of a campaign.
#[derive(Clone, Debug, Default)]
pub struct ClientTally {
    /// Operations of the client.
    pub operations: usize,
    /// Effects of all operations.
    pub effects: u64,
    /// Operations with more than one effect.
    pub executed_twice: usize,
    /// Operations without an effect.
    pub not_executed: usize,
    /// Operations that the client reported as done, once or several times.
    pub done: usize,
    /// Operations that the client reported as done by a recovery.
    pub recovered: usize,
    /// Reports of operations that were reported before. A process that is killed between its report and the removal of the
    /// entry leaves the entry for a recovery.
    pub repeated: usize,
    /// Reports that an operation was not executed. Each was sent again under a new key.
    pub reported_not_executed: usize,
    /// Responses of another operation or effect, and second reports that the client does not permit. It permits a second
    /// report only to the recovery of a later process, with the same response.
    pub contradictions: usize,
    /// Entries that the outbox still had at the end.
    pub pending: usize,
    /// Kills of the client.
    pub kills: usize,
    /// Connections through the relay.
    pub connections: u64,
    /// Connections that the relay broke.
    pub broken: u64,
    /// Requests that reached the server.
    pub requests: u64,
    /// Responses that were replays.
    pub replays: u64,
}

impl ClientTally {
    /// Returns `true` if each operation has one effect and one response, and the outbox is empty.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        let clean = Self {
            effects: self.operations as u64,
            executed_twice: 0,
            not_executed: 0,
            done: self.operations,
            contradictions: 0,
            pending: 0,
            ..self.clone()
        };
        format!("{self:?}") == format!("{clean:?}")
    }
}

impl fmt::Display for ClientTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} operations, {} effects, {} executed twice, {} not executed, {} done ({} by recovery), {} reported again, {} \
             contradictions, {} pending; {} reports of not executed, {} kills, {} of {} connections broken, {} requests, {} replays",
            self.operations,
            self.effects,
            self.executed_twice,
            self.not_executed,
            self.done,
            self.recovered,
            self.repeated,
            self.contradictions,
            self.pending,
            self.reported_not_executed,
            self.kills,
            self.broken,
            self.connections,
            self.requests,
            self.replays,
        )
    }
}

impl Clients {
    /// Runs the campaign with this program as the client. Calls `progress` after each kill, with the number of operations
    /// done.
    ///
    /// # Panics
    ///
    /// Panics if a server does not start, or if the client makes no progress for two minutes.
    pub async fn run(self, program: &Path, mut progress: impl FnMut(usize, usize)) -> ClientTally {
        let scratch = Scratch::new();
        let (server, outbox, _servers) = self.serve(&scratch).await;
        let relay = Relay::start(server.address(), self.seed).await;
        let path = scratch.file("journal");
        let mut command = Command::new(program);
        command
            .arg(format!("http://{}", relay.address()))
            .arg(outbox)
            .arg(&path)
            .arg(self.operations.to_string());
        let mut random = Random(self.seed ^ 0x6b69_6c6c);
        let mut kills = 0;
        loop {
            let mut child = GuardedChild::spawn(&command, Stdio::inherit(), Stdio::inherit());
            if let Some(success) = self.live(&mut child, &path, &mut random).await {
                assert!(success, "the client failed, see its output above");
                break;
            }
            kills += 1;
            progress(kills, Journal::read(&path).done.len());
        }
        let mut tally = server.tally();
        let journal = Journal::read(&path);
        tally.operations = self.operations;
        tally.done = journal.done.len();
        tally.recovered = journal.recovered;
        tally.repeated = journal.repeated;
        tally.reported_not_executed = journal.not_executed;
        tally.contradictions = journal.contradictions;
        tally.pending = journal.pending;
        tally.kills = kills;
        (tally.connections, tally.broken) = relay.counts();
        tally
    }

    /// Lets the client live until it has reported some operations, and kills it a moment later. Returns `None` then, or the
    /// success of a client that ended.
    async fn live(
        &self,
        child: &mut GuardedChild,
        journal: &Path,
        random: &mut Random,
    ) -> Option<bool> {
        let length = || fs::metadata(journal).map_or(0, |file| file.len());
        let before = length();
        // Some clients die before they report anything.
        let lines = match random.below(8) {
            0 => 0,
            _ => random.below(self.between_kills) as u64 + 1,
        };
        let moment = Duration::from_micros(random.draw() % 30_000);
        let deadline = Instant::now() + Duration::from_secs(120);
        while length() < before + LINE as u64 * lines {
            if let Some(status) = child.try_wait() {
                return Some(status.success());
            }
            assert!(Instant::now() < deadline, "the client makes no progress");
            sleep(Duration::from_millis(1)).await;
        }
        sleep(moment).await;
        if let Some(status) = child.try_wait() {
            return Some(status.success());
        }
        child.kill();
        None
    }

    /// Starts the server with its store. Returns the outbox of the client, and a guard that has to live as
    /// long as the campaign.
    async fn serve(&self, scratch: &Scratch) -> (Server, String, Box<dyn Send>) {
        match self.store {
            StoreKind::Memory => {
                let store = MemoryStore::new()
                    .with_max_entries(10 * self.operations + 1000)
                    .with_max_bytes(usize::MAX / 2);
                let outbox = format!("file:{}", scratch.file("outbox").display());
                let server = Server::start(store, self.operations, self.seed).await;
                (server, outbox, Box::new(()))
            }
            StoreKind::Postgres => {
                let postgres = PostgresServer::start(&[]);
                let store = sql::postgres(&postgres, "campaign").await;
                let server = Server::start(store, self.operations, self.seed).await;
                (server, postgres.url(), Box::new(postgres))
            }
            StoreKind::Redis => {
                let redis = RedisServer::start(&[]);
                let store = redis.store().await;
                let outbox = format!("sqlite:{}", scratch.file("outbox.db").display());
                let server = Server::start(store, self.operations, self.seed).await;
                (server, outbox, Box::new(redis))
            }
        }
    }
}
