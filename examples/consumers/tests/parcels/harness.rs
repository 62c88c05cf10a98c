//! A separate database for each test, a proxy in front of it, and a carrier.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};
use tests::database::pool_options;

use consumers::{
    Backoff, Carrier, Consumer,
    retry_queue::{Message, Move, PostgresQueue, RedisQueue, RetryQueue, State},
};
use tests::{
    proxy::{ConnectionEnd, Proxy},
    scratch::Scratch,
    servers::{
        postgres,
        redis::{RedisServer, until_connected},
    },
};
use tower_idempotency::{IdempotencyLayer, Ttl};
use tower_idempotency_redis::RedisOptions;
use tower_idempotency_sqlx::{
    PostgresStore,
    sqlx::{self, AssertSqlSafe, PgPool},
};

use crate::{
    points::{Kind, Moment, Point, Statement, VISIBILITY},
    process::Process,
};

pub(crate) struct Harness<Q> {
    pub(crate) queue: Q,
    /// A layer that reaches the database directly.
    pub(crate) layer: IdempotencyLayer,
    pub(crate) proxy: Proxy,
    pub(crate) database: Database,
    url: String,
    proxied_url: String,
    scratch: Scratch,
}

#[expect(clippy::large_enum_variant, reason = "one for each test")]
pub(crate) enum Database {
    Postgres(PgPool),
    Redis(RedisServer),
}

impl Harness<PostgresQueue> {
    pub(crate) async fn postgres(name: &str) -> Self {
        let server = postgres::shared();
        let admin = pool_options::<sqlx::Postgres>()
            .connect(&server.url())
            .await
            .expect("the server runs");
        let create = AssertSqlSafe(format!("create database {name}"));
        sqlx::raw_sql(create)
            .execute(&admin)
            .await
            .expect("a new name");
        let url = format!("postgres://app@{}/{name}", server.address());
        let proxy = Proxy::start(server.address());
        let store = PostgresStore::from_url(&url).expect("a URL");
        store.migrate().await.expect("the server runs");
        Self {
            queue: PostgresQueue::connect(&url).await.expect("it runs"),
            layer: unhurried(IdempotencyLayer::new(store)),
            proxied_url: format!("postgres://app@{}/{name}", proxy.address()),
            proxy,
            database: Database::Postgres(
                pool_options::<sqlx::Postgres>()
                    .connect(&url)
                    .await
                    .expect("it runs"),
            ),
            url,
            scratch: closed_carrier(),
        }
    }

    /// Returns a queue that reaches its database through the proxy.
    pub(crate) async fn queue_behind_proxy(&self) -> PostgresQueue {
        let queue = PostgresQueue::connect(&self.proxied_url).await;
        queue.expect("it runs")
    }
}

impl Harness<RedisQueue> {
    pub(crate) async fn redis() -> Self {
        let server = RedisServer::start(&[]);
        let proxy = Proxy::start(server.address());
        Self {
            queue: RedisQueue::connect(&server.url()).await.expect("it runs"),
            layer: unhurried(IdempotencyLayer::new(server.store().await)),
            proxied_url: format!("redis://{}/0", proxy.address()),
            proxy,
            url: server.url(),
            database: Database::Redis(server),
            scratch: closed_carrier(),
        }
    }
}

fn closed_carrier() -> Scratch {
    let scratch = Scratch::new();
    fs::create_dir(scratch.file("closed")).expect("a new directory");
    scratch
}

/// Sets timeouts that a stall of seconds does not reach.
fn unhurried(layer: IdempotencyLayer) -> IdempotencyLayer {
    layer
        .with_store_timeout(Duration::from_secs(20))
        .with_lease_ttl(Ttl::from_secs(120))
}

impl<Q: RetryQueue> Harness<Q> {
    /// Returns a consumer in this process, with the longest delays: 1 h, 2 h, 4 h.
    pub(crate) fn consumer(&self) -> Consumer {
        self.consumer_of(Carrier::new(&self.parcels_file()))
    }

    /// Returns a consumer whose layer reaches its store through the proxy.
    pub(crate) async fn consumer_behind_proxy(&self) -> Consumer {
        let url = &*self.proxied_url;
        let layer = match &self.database {
            Database::Postgres(_) => {
                IdempotencyLayer::new(PostgresStore::from_url(url).expect("a URL"))
            }
            Database::Redis(_) => {
                let store = until_connected(|| RedisOptions::new().connect(url)).await;
                IdempotencyLayer::new(store)
            }
        };
        let layer = layer.with_store_timeout(Duration::from_millis(200));
        Consumer::new(layer, Carrier::new(&self.parcels_file()))
    }

    pub(crate) fn consumer_of(&self, carrier: Carrier) -> Consumer {
        Consumer::new(self.layer.clone(), carrier)
            .with_backoff(Backoff::new(HOUR, 100 * HOUR).with_random(|| 1.0))
            .with_visibility(HOUR)
    }

    /// Lets the carrier accept parcels. At first it is closed: its directory has another name.
    pub(crate) fn open_carrier(&self) {
        let [open, closed] = ["open", "closed"].map(|it| self.scratch.file(it));
        if closed.exists() {
            fs::rename(closed, open).expect("a directory");
        }
    }

    pub(crate) fn close_carrier(&self) {
        let [open, closed] = ["open", "closed"].map(|it| self.scratch.file(it));
        if open.exists() {
            fs::rename(open, closed).expect("a directory");
        }
    }

    fn parcels_file(&self) -> PathBuf {
        self.scratch.file("open/parcels")
    }

    /// Returns the number of parcels of each order.
    pub(crate) fn parcels(&self) -> BTreeMap<String, u32> {
        let file = fs::read_to_string(self.parcels_file()).unwrap_or_default();
        let mut parcels = BTreeMap::new();
        for order in file.lines() {
            *parcels.entry(order.to_owned()).or_default() += 1;
        }
        parcels
    }

    pub(crate) fn parcels_of(&self, order: &str) -> u32 {
        self.parcels().get(order).copied().unwrap_or(0)
    }

    pub(crate) async fn send(&self, id: &str, order: &str) {
        assert!(self.queue.send(id, order).await.expect("it runs"));
    }

    pub(crate) async fn receive(&self) -> Message {
        let received = self.queue.receive(HOUR).await.expect("it runs");
        received.expect("a message is due")
    }

    pub(crate) async fn apply(&self, next: &Move) -> bool {
        self.queue.apply(next).await.expect("it runs")
    }

    pub(crate) async fn list(&self, state: State) -> Vec<Message> {
        self.queue.list(state, 1000).await.expect("it runs")
    }

    /// Returns the only message of the queue, after a check of its state.
    pub(crate) async fn only(&self, state: State) -> Message {
        let mut all = Vec::new();
        for state in STATES {
            all.extend(self.list(state).await);
        }
        assert_eq!(all.len(), 1, "one message in one state: {all:?}");
        assert_eq!(all[0].state, state, "{all:?}");
        all.remove(0)
    }

    /// Checks that the message is in this state and in no other one.
    pub(crate) async fn assert_state(&self, id: &str, state: State, point: Point) {
        for other in STATES {
            let listed = self.list(other).await;
            let times = listed.iter().filter(|it| it.id == id).count();
            assert_eq!(
                times,
                usize::from(other == state),
                "{other}, killed at {point:?}"
            );
        }
    }

    /// Deletes all messages, entries and parcels.
    pub(crate) async fn clear(&self) {
        match &self.database {
            Database::Postgres(pool) => {
                let truncate = sqlx::query("truncate messages, tower_idempotency");
                truncate.execute(pool).await.expect("the server runs");
            }
            Database::Redis(server) => {
                server.command(&["FLUSHALL"]);
            }
        }
        let _ = fs::remove_file(self.parcels_file());
    }

    /// Makes a message in this state due now.
    pub(crate) async fn make_due(&self, state: State, id: &str) {
        match &self.database {
            Database::Postgres(pool) => {
                let update = "update messages set due = 0 where id = $1 and state = $2";
                let update = sqlx::query(update).bind(id).bind(state.name());
                update.execute(pool).await.expect("the server runs");
            }
            Database::Redis(server) => {
                let ids = format!("{{messages}}:{state}");
                server.command(&["ZADD", &ids, "XX", "0", id]);
            }
        }
    }

    fn kind(&self) -> Kind {
        match &self.database {
            Database::Postgres(_) => Kind::Postgres,
            Database::Redis(_) => Kind::Redis,
        }
    }

    /// Runs a command of the operator. Returns `true` if it succeeded, and its output.
    pub(crate) async fn operate(&self, args: &[&str]) -> (bool, String) {
        self.start(&self.url, args).end().await
    }

    pub(crate) fn start_operator(&self, args: &[&str]) -> Process {
        self.start(&self.url, args)
    }

    fn start(&self, url: &str, args: &[&str]) -> Process {
        Process::start(&[&["--database", url], args].concat())
    }

    fn start_consumer(&self, url: &str, args: &[&str]) -> Process {
        let carrier = self.parcels_file().display().to_string();
        let consume = ["consume", "--carrier", &carrier, "--lease", LEASE];
        self.start(url, &[&consume[..], args].concat())
    }

    /// Runs a consumer until no message is queued.
    pub(crate) async fn consume(&self) {
        self.consume_with(&[]).await;
    }

    pub(crate) async fn consume_with(&self, args: &[&str]) {
        let args = [&["--until-empty"], args].concat();
        let (is_done, output) = self.start_consumer(&self.url, &args).end().await;
        assert!(is_done, "{output}");
    }

    pub(crate) fn start_endless_consumer(&self) -> Process {
        self.start_consumer(&self.url, &[])
    }

    /// Runs consumers at the same time until no message is queued.
    pub(crate) async fn consume_by(&self, processes: u32) {
        let consuming: Vec<_> = (0..processes)
            .map(|_| self.start_consumer(&self.url, &["--until-empty"]))
            .collect();
        for process in consuming {
            let (is_done, output) = process.end().await;
            assert!(is_done, "{output}");
        }
    }

    /// Starts a consumer, and kills it at this point. The message is then due.
    pub(crate) async fn kill_consumer_at(&self, point: Point, id: &str, args: &[&str]) {
        let visibility = format!("{VISIBILITY}ms");
        let rare = [
            "--base",
            "1h",
            "--visibility",
            &visibility,
            "--consumers",
            "1",
        ];
        let args = [&rare[..], args].concat();
        self.kill_at(point, id, || self.start_consumer(&self.proxied_url, &args))
            .await;
        self.make_due(State::Queued, id).await;
    }

    /// Starts a command of the operator, and kills it at this point.
    pub(crate) async fn kill_operator_at(&self, point: Point, id: &str, args: &[&str]) {
        self.kill_at(point, id, || self.start(&self.proxied_url, args))
            .await;
    }

    async fn kill_at(&self, point: Point, id: &str, start: impl FnOnce() -> Process) {
        let (hits, entries) = (self.proxy.injected_faults(), self.entries().await);
        self.proxy
            .once(self.kind().fault(point), ConnectionEnd::Hang);
        let is_reached = async || {
            self.proxy.injected_faults() > hits && self.is_executed(point, id, &entries).await
        };
        start().kill_when(is_reached).await;
    }

    /// Returns `true` if the kill is due: the database has executed the statement, or never gets it.
    async fn is_executed(&self, (statement, moment): Point, id: &str, before: &[bool]) -> bool {
        if moment == Moment::Before {
            return true;
        }
        let entries = self.entries().await;
        let completed = |entries: &[bool]| entries.iter().filter(|it| **it).count();
        match statement {
            Statement::Receive => {
                let queued = self.list(State::Queued).await;
                queued.iter().any(|it| it.id == id && it.delivery > 0)
            }
            Statement::Acquire => entries.len() > before.len(),
            Statement::Complete => completed(&entries) > completed(before),
            Statement::Release => entries.len() == before.len(),
            // A message that waits for its first attempt has no reason.
            Statement::MoveTo(state) => {
                let listed = self.list(state).await;
                let mut listed = listed.iter().filter(|it| it.id == id);
                listed.any(|it| state == State::Done || !it.reason.is_empty())
            }
        }
    }

    /// Returns the entries of the layer, each `true` if it is completed.
    async fn entries(&self) -> Vec<bool> {
        match &self.database {
            Database::Postgres(pool) => {
                let select = "select completed is not null from tower_idempotency";
                let entries = sqlx::query_scalar(select).fetch_all(pool).await;
                entries.expect("the server runs")
            }
            Database::Redis(server) => {
                let keys = server.command(&["KEYS", "idempotency:[0-9a-f]*"]);
                let is_done = |key: &str| server.command(&["HGET", key, "s"]) == "D";
                keys.lines()
                    .filter(|it| !it.is_empty())
                    .map(is_done)
                    .collect()
            }
        }
    }
}

const STATES: [State; 4] = [
    State::Queued,
    State::DeadLetter,
    State::NeedsAttention,
    State::Done,
];
pub(crate) const HOUR: Duration = Duration::from_secs(3600);
/// A process that stalls for two seconds keeps its leases. The next process waits for as long to find an orphan.
const LEASE: &str = "3s";
