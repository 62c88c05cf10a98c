//! Requests on `RedisStore` against a bare loop of the same scripts, in one run and on a separate server.
//!
//! A fresh request consists of the scripts for an acquire and a completion, with the same arguments and a record of the same
//! bytes. A replay is the script for an acquire. The bare loop sends them over the same kinds of connections as the
//! store, and does nothing else. Both run in turn, and the figure is the median over the rounds. One request after
//! another measures the latency that the layer adds to the round trip. With 64 at a time, clients and server share two
//! processors, which measures the layer's share of them.
//!
//! Replays through a tier in front of the store are compared with the same requests on a memory store.
//!
//! ```sh
//! cargo bench -p tests --bench redis            # all
//! cargo bench -p tests --bench redis -- replays # some of them
//! cargo bench -p tests --bench redis -- tiered  # the tier alone
//! ```

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::Router;
use bytes::Bytes;
use redis::{Script, Value, aio::MultiplexedConnection};
use tests::servers::redis::RedisServer;
use tower_idempotency::{MemoryStore, Tiered};
use tower_idempotency_redis::{RedisStore, redis};

use self::pace::{Pace, REPLAYS, Sides, app, ask, order};

mod pace;

fn main() {
    Pace::each(|pace| {
        let server = pace.server(|| RedisServer::start(&[]));
        let runtime = pace.runtime();
        let sides = runtime.block_on(Scripts::new(&server));
        pace.compare("redis", &runtime, &Arc::new(sides));
        let tiered = runtime.block_on(TieredReplays::new(&server));
        pace.compare("tiered redis", &runtime, &Arc::new(tiered));
    });
}

/// Replays through the layer: through a tier in front of Redis, and on a memory store.
struct TieredReplays {
    tiered: Router,
    memory: Router,
    order: Bytes,
}

impl TieredReplays {
    async fn new(server: &RedisServer) -> Self {
        let store = RedisStore::connect(&server.url()).await;
        // The age is so long that no replay calls the store.
        let tiered = Tiered::new(store.expect("the server runs")).with_max_age(Duration::MAX);
        let sides = Self {
            tiered: app(tiered),
            memory: app(MemoryStore::new()),
            order: order(),
        };
        for app in [&sides.tiered, &sides.memory] {
            ask(app, &sides.order, "tiered", false).await;
        }
        sides
    }
}

impl Sides for TieredReplays {
    const BARE: &'static str = "memory store";
    const KINDS: &'static [&'static str] = &[REPLAYS];

    async fn layer(&self, replay: bool) {
        ask(&self.tiered, &self.order, "tiered", replay).await;
    }

    async fn bare(&self, replay: bool) {
        ask(&self.memory, &self.order, "tiered", replay).await;
    }
}

struct Scripts {
    app: Router,
    order: Bytes,
    asking: MultiplexedConnection,
    keeping: MultiplexedConnection,
    acquire: Script,
    complete: Script,
    record: Vec<u8>,
    next: AtomicU64,
}

impl Scripts {
    async fn new(server: &RedisServer) -> Self {
        let store = RedisStore::connect(&server.url()).await;
        let connection = async || {
            let client = redis::Client::open(server.url()).expect("an address");
            let connection = client.get_multiplexed_async_connection().await;
            connection.expect("a connection")
        };
        let sides = Self {
            app: app(store.expect("the server runs")),
            order: order(),
            asking: connection().await,
            keeping: connection().await,
            acquire: Script::new(include_str!(
                "../../crates/tower-idempotency-redis/src/scripts/acquire.lua"
            )),
            complete: Script::new(include_str!(
                "../../crates/tower-idempotency-redis/src/scripts/complete.lua"
            )),
            record: Vec::new(),
            next: AtomicU64::new(0),
        };
        // Both sides replay the record that the layer creates from this response.
        ask(&sides.app, &sides.order, "replayed", false).await;
        let keys = server.list(&["KEYS", "*"]);
        let record = server.list(&["HMGET".as_bytes(), &keys[0], b"b"]).remove(0);
        let sides = Self { record, ..sides };
        sides.record_for_replays().await;
        sides
    }

    async fn acquired(&self, key: &str) -> Vec<Value> {
        let mut call = self.acquire.key(key);
        call.arg(TOKEN).arg(FINGERPRINT).arg(15_000).arg(86_400_000);
        call.arg("host:1").arg("POST /orders").arg(TOKEN).arg(1);
        let answer = call.invoke_async(&mut self.asking.clone()).await;
        answer.expect("an answer")
    }

    async fn completed(&self, key: &str) {
        let mut call = self.complete.key(key);
        call.arg(TOKEN).arg(FINGERPRINT).arg(1).arg(&self.record);
        call.arg(86_400_000).arg(1).arg(TOKEN);
        let answer: i64 = call
            .invoke_async(&mut self.keeping.clone())
            .await
            .expect("an answer");
        assert_eq!(answer, 1);
    }

    async fn record_for_replays(&self) {
        self.acquired("bare:replayed").await;
        self.completed("bare:replayed").await;
    }
}

impl Sides for Scripts {
    async fn layer(&self, replay: bool) {
        let key = match replay {
            true => "replayed".to_owned(),
            false => format!("{:032}", self.next.fetch_add(1, Relaxed)),
        };
        ask(&self.app, &self.order, &key, replay).await;
    }

    async fn bare(&self, replay: bool) {
        let key = match replay {
            true => "bare:replayed".to_owned(),
            false => format!("bare:{:064}", self.next.fetch_add(1, Relaxed)),
        };
        let answer = self.acquired(&key).await;
        if replay {
            assert!(matches!(&answer[2], Value::BulkString(record) if *record == self.record));
        } else {
            assert_eq!(answer, [Value::Int(1), Value::Int(1)]);
            self.completed(&key).await;
        }
    }
}

const TOKEN: &[u8] = &[7; 16];
const FINGERPRINT: &[u8] = &[9; 32];
