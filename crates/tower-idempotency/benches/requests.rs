//! Benchmarks of whole requests, as ratios to the same axum router without the layer, in one run.
//!
//! Each round runs every variant once, so that other load affects all alike. The result is the median over the rounds. A
//! request is a POST of 1 KiB of JSON. The handler parses it and responds with 1 KiB of JSON.
//!
//! ```sh
//! cargo bench -p tower-idempotency --bench requests            # everything
//! cargo bench -p tower-idempotency --bench requests -- oneshot # the sections whose names contain a word
//! cargo bench -p tower-idempotency --features grpc --bench requests -- grpc # calls that are not protected
//! ```

use std::{
    convert::Infallible,
    fmt::Write as _,
    hint::black_box,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Json, Router, body::Body, http::Request, routing::post};
use bytes::Bytes;
use http::HeaderValue;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};
use tower::{Service, ServiceExt};
use tower_idempotency::{Enforcement, IdempotencyLayer, MemoryStore};

#[cfg(feature = "grpc")]
mod grpc;

#[derive(Clone, Serialize, Deserialize)]
struct Order {
    id: u64,
    customer: String,
    currency: String,
    lines: Vec<Line>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Line {
    sku: String,
    quantity: u32,
    price: f64,
    note: String,
}

/// Returns an order of about 1 KiB as JSON.
fn order() -> Order {
    let line = |n: u32| Line {
        sku: format!("SKU-{n:06}-{:04}", n * 7919 % 10_000),
        quantity: n % 9 + 1,
        price: f64::from(n * 137 % 10_000) / 100.0,
        note: format!(
            "shelf {} of aisle {}, leave at the door",
            n * 31 % 97,
            n * 17 % 53
        ),
    };
    Order {
        id: 7,
        customer: "c0ffee00-1234-4a5b-8c6d-0123456789ab".into(),
        currency: "EUR".into(),
        lines: (1..=8).map(line).collect(),
    }
}

async fn handler(Json(mut order): Json<Order>) -> Json<Order> {
    order.id += 1;
    Json(order)
}

/// Returns the routes without their state. The variants set it, as `axum::serve` does, because axum otherwise applies
/// the layers again for each request.
fn routes() -> Router {
    Router::new().route("/orders", post(handler))
}

fn bare() -> Router {
    routes().with_state(())
}

/// Returns the baseline for measurements of the mere presence of the layer.
fn with_noop_layer() -> Router {
    let noop = tower::layer::layer_fn(Noop);
    routes().layer(noop).with_state(())
}

fn protected(store: MemoryStore) -> Router {
    routes().layer(IdempotencyLayer::new(store)).with_state(())
}

/// Returns variants with the same requests and keys, which differ only in the router.
fn keyed(store: MemoryStore) -> [Variant; 3] {
    let app = protected(store);
    [
        Variant::new("bare axum", bare(), Key::Fresh),
        Variant::new("fresh key", app.clone(), Key::Fresh),
        Variant::new("replay", app, Key::Same),
    ]
}

/// Returns variants without protection: without the layer, and with a layer that is off or observes.
fn observed(store: &impl Fn() -> MemoryStore) -> Vec<Variant> {
    let layer = IdempotencyLayer::new(store()).with_enforcement(Enforcement::Observe);
    let observing = routes().layer(layer).with_state(());
    vec![
        Variant::new("no-op layer", with_noop_layer(), Key::Fresh),
        Variant::new("observed, fresh key", observing.clone(), Key::Fresh),
        Variant::new("observed, the same key", observing.clone(), Key::Same),
        Variant::new("observed, no key", observing, Key::None),
    ]
}

#[derive(Clone)]
struct Noop<S>(S);

impl<S: Service<Req>, Req> Service<Req> for Noop<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(
        &mut self,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, req: Req) -> Self::Future {
        self.0.call(req)
    }
}

/// The key of a request.
#[derive(Clone, Copy)]
enum Key {
    None,
    Fresh,
    Same,
}

struct Keys {
    next: AtomicU64,
}

impl Keys {
    fn text(&self, key: Key) -> Option<String> {
        match key {
            Key::None => None,
            Key::Fresh => {
                let n = self.next.fetch_add(1, Ordering::Relaxed);
                Some(format!("8e03978e-40d5-43e8-bc93-{n:012}"))
            }
            Key::Same => Some("8e03978e-40d5-43e8-bc93-6894a57f9324".into()),
        }
    }
}

fn request(body: &Bytes, key: Option<&str>) -> Request<Body> {
    let mut req = Request::post("/orders")
        .header("content-type", "application/json")
        .header("content-length", body.len())
        .header("authorization", "Bearer 0123456789abcdef0123456789abcdef");
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    req.body(Body::from(body.clone())).expect("a valid request")
}

async fn send(app: &Router, req: Request<Body>) {
    let Ok::<_, Infallible>(res) = app.clone().oneshot(req).await;
    assert!(res.status().is_success());
    black_box(
        axum::body::to_bytes(res.into_body(), usize::MAX)
            .await
            .expect("a body"),
    );
}

/// A variant of the same work, with its duration in each round.
struct Variant {
    name: &'static str,
    app: Router,
    /// Creates a request with this body and key.
    request: fn(&Bytes, Option<&str>) -> Request<Body>,
    key: Key,
    rounds: Vec<f64>,
}

impl Variant {
    fn new(name: &'static str, app: Router, key: Key) -> Self {
        Self {
            name,
            app,
            request,
            key,
            rounds: Vec::new(),
        }
    }

    fn median(&self) -> f64 {
        let mut rounds = self.rounds.clone();
        rounds.sort_by(f64::total_cmp);
        rounds[rounds.len() / 2]
    }
}

/// Runs a round with `tasks` tasks, each of which sends its requests one after another. Returns the nanoseconds per
/// request.
fn round(
    runtime: &Runtime,
    variant: &Variant,
    keys: &Arc<Keys>,
    body: &Bytes,
    tasks: u64,
    each: u64,
) -> f64 {
    runtime.block_on(async {
        let started = Instant::now();
        let tasks: Vec<_> = (0..tasks)
            .map(|_| {
                let (app, keys, body) = (variant.app.clone(), Arc::clone(keys), body.clone());
                let (request, key) = (variant.request, variant.key);
                tokio::spawn(async move {
                    for _ in 0..each {
                        let key = keys.text(key);
                        send(&app, request(&body, key.as_deref())).await;
                    }
                })
            })
            .collect();
        let count = tasks.len() as u64;
        for task in tasks {
            task.await.expect("the task ended");
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let per_request = started.elapsed().as_nanos() as f64 / (count * each) as f64;
        per_request
    })
}

/// Size of a measurement: tasks, requests per task, and rounds.
#[derive(Clone, Copy)]
struct Size {
    tasks: u64,
    each: u64,
    rounds: u64,
}

fn compare(
    title: &str,
    runtime: &Runtime,
    variants: &mut [Variant],
    Size {
        tasks,
        each,
        rounds,
    }: Size,
) {
    let keys = Arc::new(Keys {
        next: AtomicU64::new(0),
    });
    let body = Bytes::from(serde_json::to_vec(&order()).expect("an order"));
    for variant in &*variants {
        // A single request first: of many concurrent requests with a new key, the layer rejects all but one.
        round(runtime, variant, &keys, &body, 1, 1);
        round(runtime, variant, &keys, &body, tasks, each / 4 + 1);
    }
    for _ in 0..rounds {
        for variant in &mut *variants {
            let duration = round(runtime, variant, &keys, &body, tasks, each);
            variant.rounds.push(duration);
        }
    }
    report(title, variants);
}

fn report(title: &str, variants: &[Variant]) {
    let base = variants[0].median();
    let mut out = format!("\n{title}\n");
    for variant in variants {
        let median = variant.median();
        let _ = writeln!(
            out,
            "  {:<34} {:>9.2} us {:>7.3} x {:>7.1} % of the rate",
            variant.name,
            median / 1000.0,
            median / base,
            base / median * 100.0
        );
    }
    println!("{out}");
}

fn main() {
    // `cargo test --all-targets` also runs benchmarks, to check that they work, but does not pass `--bench`.
    let is_benchmark = std::env::args().any(|arg| arg == "--bench");
    let times = |n: u64| if is_benchmark { n } else { 1 };
    let size = |tasks, each, rounds| Size {
        tasks,
        each: times(each),
        rounds: times(rounds),
    };
    let wanted: Vec<_> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let wants = |section: &str| {
        wanted.is_empty() || wanted.iter().any(|word| section.contains(word.as_str()))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let big = || {
        MemoryStore::new()
            .with_max_entries(4_000_000)
            .with_max_bytes(8 << 30)
    };

    if wants("no-key") {
        let mut variants = [
            Variant::new("no-op layer", with_noop_layer(), Key::None),
            Variant::new("the layer", protected(big()), Key::None),
            Variant::new("no layer at all", bare(), Key::None),
        ];
        compare(
            "requests without a key, one task",
            &runtime,
            &mut variants,
            size(1, 2_000, 100),
        );
    }
    #[cfg(feature = "grpc")]
    if wants("grpc") {
        grpc::compare_calls(&runtime, big(), size(1, 2_000, 100));
    }
    if wants("oneshot") {
        let mut variants = keyed(big());
        compare(
            "oneshot, one task",
            &runtime,
            &mut variants,
            size(1, 2_000, 60),
        );
    }
    if wants("tasks") {
        let mut variants = keyed(big());
        compare(
            "oneshot, 64 tasks",
            &runtime,
            &mut variants,
            size(64, 100, 60),
        );
    }
    if wants("observed") {
        let sizes = size(1, 2_000, 60);
        compare("observed, one task", &runtime, &mut observed(&big), sizes);
        socket(&runtime, size(64, 100, 60), &mut observed(&big));
    }
    if wants("socket") {
        let full = protected(MemoryStore::new());
        runtime.block_on(async {
            let body = Bytes::from(serde_json::to_vec(&order()).expect("an order"));
            // 256 MiB hold fewer records than this.
            for n in 0..times(300_000) {
                send(&full, request(&body, Some(&format!("stored-{n}")))).await;
            }
        });
        let mut variants = Vec::from(keyed(big()));
        variants.push(Variant::new(
            "fresh key, the default store, full",
            full,
            Key::Fresh,
        ));
        socket(&runtime, size(64, 100, 30), &mut variants);
    }
}

/// Measures keep-alive connections over loopback. The hyper client and the server share the two workers.
fn socket(runtime: &Runtime, size: Size, variants: &mut [Variant]) {
    let body = Bytes::from(serde_json::to_vec(&order()).expect("an order"));
    let keys = Arc::new(Keys {
        next: AtomicU64::new(0),
    });
    let mut connections: Vec<Vec<Connection>> = variants
        .iter()
        .map(|variant| {
            runtime.block_on(async {
                let addr = serve(variant.app.clone()).await;
                let mut connections = Vec::new();
                for _ in 0..size.tasks {
                    connections.push(connect(addr).await);
                }
                // A single request first, as in `compare`.
                let alone = connections.pop().expect("a connection");
                let (keys, body) = (Arc::clone(&keys), body.clone());
                connections.push(drive(alone, keys, body, variant.key, 1).await);
                connections
            })
        })
        .collect();
    for warm in [true, false] {
        for _ in 0..if warm { 2 } else { size.rounds } {
            for (variant, connections) in variants.iter_mut().zip(&mut connections) {
                let taken = std::mem::take(connections);
                let started = Instant::now();
                *connections = runtime.block_on(async {
                    let tasks: Vec<_> = taken
                        .into_iter()
                        .map(|connection| {
                            let (keys, body, key) = (Arc::clone(&keys), body.clone(), variant.key);
                            tokio::spawn(drive(connection, keys, body, key, size.each))
                        })
                        .collect();
                    let mut connections = Vec::new();
                    for task in tasks {
                        connections.push(task.await.expect("the task ended"));
                    }
                    connections
                });
                let duration = started.elapsed();
                if !warm {
                    let requests = size.tasks * size.each;
                    variant.rounds.push(per_request(duration, requests));
                }
            }
        }
    }
    report("loopback sockets, keep-alive, 64 connections", variants);
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn per_request(duration: Duration, requests: u64) -> f64 {
    duration.as_nanos() as f64 / requests as f64
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    addr
}

type Connection = hyper::client::conn::http1::SendRequest<Body>;

async fn connect(addr: SocketAddr) -> Connection {
    let stream = TcpStream::connect(addr).await.expect("a connection");
    stream.set_nodelay(true).expect("an option");
    let (connection, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .expect("a connection that speaks HTTP");
    tokio::spawn(driver);
    connection
}

/// Sends requests one after another and reads every response completely.
async fn drive(
    mut connection: Connection,
    keys: Arc<Keys>,
    body: Bytes,
    key: Key,
    each: u64,
) -> Connection {
    for _ in 0..each {
        connection
            .ready()
            .await
            .expect("the connection is kept alive");
        let mut req = request(&body, keys.text(key).as_deref());
        req.headers_mut()
            .insert("host", HeaderValue::from_static("localhost"));
        let res = connection.send_request(req).await.expect("a response");
        assert!(res.status().is_success());
        black_box(res.into_body().collect().await.expect("a body").to_bytes());
    }
    connection
}
