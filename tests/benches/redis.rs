//! Requests on `RedisStore` against a bare loop of the same scripts, in one run and on a separate server.
//!
//! A fresh request consists of the scripts for an acquire and a completion, with the same arguments and a record of the same
//! bytes. A replay is the script for an acquire. The bare loop uses the same kinds of connections as the store. It runs in
//! an axum handler that gets the same requests and digests their bodies. Both alternate, and the figure is the median over
//! the rounds. One request after another measures the latency that the layer adds to the round trip. With 64 at a time,
//! clients and server share two processors, which measures the layer's share of them.
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

use axum::{
    Router,
    extract::State,
    http::HeaderMap,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use redis::{Script, Value, aio::MultiplexedConnection};
use sha2::{Digest, Sha256};
use tests::servers::redis::{
    RedisServer,
    scripts::{ACQUIRE, COMPLETE},
};
use tower_idempotency::{MemoryStore, Tiered};
use tower_idempotency_redis::{RedisStore, redis};

use self::pace::{Pace, REPLAYS, Sides, app, order, send_order};

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
            send_order(app, &sides.order, "tiered", false).await;
        }
        sides
    }
}

impl Sides for TieredReplays {
    const BARE: &'static str = "memory store";
    const KINDS: &'static [&'static str] = &[REPLAYS];

    async fn layer(&self, replay: bool) {
        send_order(&self.tiered, &self.order, "tiered", replay).await;
    }

    async fn bare(&self, replay: bool) {
        send_order(&self.memory, &self.order, "tiered", replay).await;
    }
}

struct Scripts {
    app: Router,
    order: Bytes,
    bare: Router,
    next: AtomicU64,
}

/// The bare loop.
struct Bare {
    acquire_link: MultiplexedConnection,
    lease_link: MultiplexedConnection,
    acquire: Script,
    complete: Script,
    record: Bytes,
}

impl Scripts {
    async fn new(server: &RedisServer) -> Self {
        let store = RedisStore::connect(&server.url()).await;
        let connection = async || {
            let client = redis::Client::open(server.url()).expect("an address");
            let connection = client.get_multiplexed_async_connection().await;
            connection.expect("a connection")
        };
        let (app, order) = (app(store.expect("the server runs")), order());
        // Both sides replay the record that the layer creates from this response.
        send_order(&app, &order, "replayed", false).await;
        let record = server.list(&["HMGET", &server.entries()[0], "b"]).remove(0);
        let bare = Bare {
            acquire_link: connection().await,
            lease_link: connection().await,
            acquire: Script::new(ACQUIRE),
            complete: Script::new(COMPLETE),
            record: record.into(),
        };
        let bare = Router::new()
            .route("/orders", post(respond))
            .with_state(Arc::new(bare));
        send_order(&bare, &order, "replayed", false).await;
        Self {
            app,
            order,
            bare,
            next: AtomicU64::new(0),
        }
    }
}

/// Executes the request, or replays the response: it is the body of the request, as that of the handler.
async fn respond(State(bare): State<Arc<Bare>>, headers: HeaderMap, body: Bytes) -> Response {
    let key = headers["idempotency-key"].to_str().expect("a key");
    let key = format!("bare:{key:0>64}");
    let fingerprint = Sha256::digest(&body);
    let response = bare.acquire(&key, &fingerprint).await;
    if response.len() > 2 {
        assert!(matches!(&response[2], Value::BulkString(record) if *record == bare.record));
        return ([("idempotent-replayed", "true")], body).into_response();
    }
    assert_eq!(response, [Value::Int(1), Value::Int(1)]);
    bare.complete(&key, &fingerprint).await;
    body.into_response()
}

impl Bare {
    async fn acquire(&self, key: &str, fingerprint: &[u8]) -> Vec<Value> {
        let mut call = self.acquire.key(key);
        call.arg(TOKEN).arg(fingerprint).arg(15_000).arg(86_400_000);
        call.arg("host:1").arg("POST /orders").arg(TOKEN).arg(1);
        let response = call.invoke_async(&mut self.acquire_link.clone()).await;
        response.expect("a reply")
    }

    async fn complete(&self, key: &str, fingerprint: &[u8]) {
        let mut call = self.complete.key(key);
        call.arg(TOKEN)
            .arg(fingerprint)
            .arg(1)
            .arg(&self.record[..]);
        call.arg(86_400_000).arg(1).arg(TOKEN);
        let response: i64 = call
            .invoke_async(&mut self.lease_link.clone())
            .await
            .expect("a reply");
        assert_eq!(response, 1);
    }
}

impl Scripts {
    async fn send(&self, app: &Router, replay: bool) {
        let key = match replay {
            true => "replayed".to_owned(),
            false => format!("{:032}", self.next.fetch_add(1, Relaxed)),
        };
        send_order(app, &self.order, &key, replay).await;
    }
}

impl Sides for Scripts {
    async fn layer(&self, replay: bool) {
        self.send(&self.app, replay).await;
    }

    async fn bare(&self, replay: bool) {
        self.send(&self.bare, replay).await;
    }
}

const TOKEN: &[u8] = &[7; 16];
