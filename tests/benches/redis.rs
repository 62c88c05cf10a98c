//! Requests on `RedisStore` against a bare loop of the same scripts, in one run and on a server of its own.
//!
//! A fresh request is the scripts for an acquire and a completion, of the same arguments and a record of the same bytes;
//! a replay is the script for an acquire. The bare loop sends them over the same kinds of connections as the store does,
//! and does nothing else. Both run in turn, and the figure is the median over the rounds: of one request after another,
//! which measures what the layer adds to the way to the server and back, and of 64 at a time, where clients and server
//! fight for the same cores.
//!
//! ```sh
//! cargo bench -p tests --bench redis            # both
//! cargo bench -p tests --bench redis -- replays # one of them
//! ```

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use axum::{
    Router,
    body::Body,
    http::{Request, header},
    routing::post,
};
use bytes::Bytes;
use redis::{Script, Value, aio::ConnectionManager};
use tests::servers::redis::RedisServer;
use tokio::runtime::Runtime;
use tower::ServiceExt;
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_redis::{RedisStore, redis};

fn main() {
    // `cargo test --all-targets` runs benches too, to see that they work; it does not say `--bench`.
    let in_earnest = std::env::args().any(|arg| arg == "--bench");
    let (each, rounds) = if in_earnest { (100, 40) } else { (1, 1) };
    let wanted: Vec<_> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let server = RedisServer::start(&[]);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let sides = runtime.block_on(Sides::new(&server));
    let sides = Arc::new(sides);
    for (title, replay, tasks) in [
        ("fresh keys", false, 1),
        ("replays", true, 1),
        ("fresh keys", false, 64),
        ("replays", true, 64),
    ] {
        if !wanted.is_empty() && !wanted.iter().any(|word| title.contains(word.as_str())) {
            continue;
        }
        let each = if tasks == 1 { each * 4 } else { each };
        let (mut bare, mut layer) = (Vec::new(), Vec::new());
        for _ in 0..=rounds {
            bare.push(round(
                &runtime,
                tasks,
                each,
                &sides,
                move |sides| async move {
                    sides.bare(replay).await;
                },
            ));
            layer.push(round(
                &runtime,
                tasks,
                each,
                &sides,
                move |sides| async move {
                    sides.layer(replay).await;
                },
            ));
        }
        let (bare, layer) = (median(bare), median(layer));
        println!(
            "{title}, {tasks} at a time: bare loop {bare:.2} us, layer {layer:.2} us, {:.1} % of the rate",
            bare / layer * 100.0
        );
    }
}

struct Sides {
    app: Router,
    body: Bytes,
    asking: ConnectionManager,
    keeping: ConnectionManager,
    acquire: Script,
    complete: Script,
    record: Vec<u8>,
    next: AtomicU64,
}

impl Sides {
    async fn new(server: &RedisServer) -> Self {
        let store = RedisStore::connect(&server.url()).await;
        let layer = IdempotencyLayer::new(store.expect("the server runs"));
        // What the handler does is no part of the comparison: it answers what it got.
        let app = Router::new()
            .route("/orders", post(async |body: Bytes| body))
            .layer(layer)
            .with_state(());
        let manager = async || {
            let client = redis::Client::open(server.url()).expect("an address");
            ConnectionManager::new(client).await.expect("a connection")
        };
        let sides = Self {
            app,
            body: order(),
            asking: manager().await,
            keeping: manager().await,
            acquire: Script::new(include_str!(
                "../../crates/tower-idempotency-redis/src/scripts/acquire.lua"
            )),
            complete: Script::new(include_str!(
                "../../crates/tower-idempotency-redis/src/scripts/complete.lua"
            )),
            record: Vec::new(),
            next: AtomicU64::new(0),
        };
        // The record that the layer makes of this answer, for both.
        sides.layer(true).await;
        let keys = server.list(&["KEYS", "*"]);
        let record = server.list(&["HMGET".as_bytes(), &keys[0], b"b"]).remove(0);
        let sides = Self { record, ..sides };
        sides.record_for_replays().await;
        sides
    }

    async fn layer(&self, replay: bool) {
        let key = match replay {
            true => "replayed".to_owned(),
            false => format!("{:032}", self.next.fetch_add(1, Relaxed)),
        };
        let req = Request::post("/orders")
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", key)
            .body(Body::from(self.body.clone()))
            .expect("a request");
        let Ok(res) = self.app.clone().oneshot(req).await;
        assert!(res.status().is_success(), "{}", res.status());
        let body = axum::body::to_bytes(res.into_body(), usize::MAX).await;
        assert_eq!(body.expect("a body").len(), self.body.len());
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

    async fn acquired(&self, key: &str) -> Vec<Value> {
        let mut call = self.acquire.key(key);
        call.arg(TOKEN).arg(FINGERPRINT).arg(15_000).arg(86_400_000);
        call.arg(1).arg("host:1").arg("POST /orders");
        let answer = call.invoke_async(&mut self.asking.clone()).await;
        answer.expect("an answer")
    }

    async fn completed(&self, key: &str) {
        let mut call = self.complete.key(key);
        call.arg(TOKEN).arg(FINGERPRINT).arg(1).arg(&self.record);
        call.arg(86_400_000).arg(1);
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

const TOKEN: &[u8] = &[7; 16];
const FINGERPRINT: &[u8] = &[9; 32];

/// Microseconds a request.
fn round<F>(
    runtime: &Runtime,
    tasks: u64,
    each: u64,
    sides: &Arc<Sides>,
    work: impl Fn(Arc<Sides>) -> F,
) -> f64
where
    F: Future<Output = ()> + Send + 'static,
{
    runtime.block_on(async {
        let began = Instant::now();
        let running: Vec<_> = (0..tasks)
            .map(|_| {
                let all: Vec<_> = (0..each).map(|_| work(Arc::clone(sides))).collect();
                tokio::spawn(async move {
                    for one in all {
                        one.await;
                    }
                })
            })
            .collect();
        for task in running {
            task.await.expect("it ended");
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let each = began.elapsed().as_nanos() as f64 / (tasks * each) as f64;
        each / 1000.0
    })
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

/// 1 KiB of JSON.
fn order() -> Bytes {
    let line = |n: u32| {
        serde_json::json!({
            "sku": format!("SKU-{n:06}-{:04}", n * 7919 % 10_000),
            "quantity": n % 9 + 1,
            "price": f64::from(n * 137 % 10_000) / 100.0,
            "note": format!("shelf {} of aisle {}, leave at the door", n * 31 % 97, n * 17 % 53),
        })
    };
    let order = serde_json::json!({
        "id": 7,
        "customer": "c0ffee00-1234-4a5b-8c6d-0123456789ab",
        "currency": "EUR",
        "lines": (1..=8).map(line).collect::<Vec<_>>(),
    });
    order.to_string().into()
}
