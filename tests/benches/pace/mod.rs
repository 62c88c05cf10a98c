//! Compares requests through the layer with a bare loop of the calls of its store, alternately in one run.

use std::{future::Future, sync::Arc, thread, time::Instant};

use axum::{
    Router,
    body::Body,
    http::{Request, header},
    routing::post,
};
use bytes::Bytes;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::Runtime;
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, store::Store};

/// Two ways to the same effect in one store.
pub(crate) trait Sides: Send + Sync + 'static {
    /// The name of the bare side.
    const BARE: &'static str = "bare loop";
    /// The kinds of requests that are compared.
    const KINDS: &'static [&'static str] = &KINDS;

    /// Sends a single request, fresh or a replay.
    fn layer(&self, replay: bool) -> impl Future<Output = ()> + Send;

    /// Makes only the store calls of such a request.
    fn bare(&self, replay: bool) -> impl Future<Output = ()> + Send;
}

/// Number of requests in flight at the same time, and the processors that run them.
#[derive(Clone, Copy)]
pub(crate) enum Pace {
    /// A single request. The client is pinned to one processor and the server to another. Otherwise the operating system
    /// decides, and sharing a processor changes the figures more than anything measured here.
    One,
    /// 64 requests on two workers, which share two processors with the server.
    Many,
}

impl Pace {
    /// Calls `run` for both paces, each on a separate thread.
    pub(crate) fn each(run: impl Fn(Self) + Sync) {
        for pace in [Self::One, Self::Many] {
            thread::scope(|scope| scope.spawn(|| run(pace)).join()).expect("no panic");
        }
    }

    /// Starts a server on its processor.
    pub(crate) fn server<T>(self, start: impl FnOnce() -> T) -> T {
        if !is_in_earnest() {
            return start();
        }
        let before = sched_getaffinity(None).expect("processors");
        let here: Vec<_> = (0..CpuSet::MAX_CPU).filter(|n| before.is_set(*n)).collect();
        assert!(here.len() > 1, "this takes two processors");
        let stay = |places: &[usize]| {
            let mut set = CpuSet::new();
            places.iter().for_each(|place| set.set(*place));
            sched_setaffinity(None, &set).expect("processors of this process");
        };
        let (client, server) = match self {
            Self::One => (&here[..1], &here[1..2]),
            Self::Many => (&here[..2], &here[..2]),
        };
        // A process that the thread starts inherits its processor.
        stay(server);
        let started = start();
        stay(client);
        started
    }

    /// Returns the runtime of the client. The server must have been started.
    pub(crate) fn runtime(self) -> Runtime {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(match self {
                Self::One => 1,
                Self::Many => 2,
            })
            .enable_all()
            .build()
            .expect("a runtime")
    }

    /// Prints the times of both sides, for fresh requests and replays, if they were selected.
    pub(crate) fn compare<S: Sides>(self, store: &str, runtime: &Runtime, sides: &Arc<S>) {
        let tasks = match self {
            Self::One => 1,
            Self::Many => 64,
        };
        let (each, rounds) = match (is_in_earnest(), self) {
            (false, _) => (1, 1),
            (true, Self::One) => (160, 32),
            (true, Self::Many) => (40, 32),
        };
        for &kind in S::KINDS {
            if !is_wanted(store, kind) {
                continue;
            }
            let replay = kind == REPLAYS;
            let bare = || {
                round(runtime, tasks, each, sides, move |sides| async move {
                    sides.bare(replay).await;
                })
            };
            let layer = || {
                round(runtime, tasks, each, sides, move |sides| async move {
                    sides.layer(replay).await;
                })
            };
            // The first call initializes things once.
            bare();
            layer();
            let (mut loops, mut layers) = (Vec::new(), Vec::new());
            for n in 0..rounds {
                // The sides alternate, and each is first equally often.
                if n % 2 == 0 {
                    loops.push(bare());
                }
                layers.push(layer());
                if n % 2 == 1 {
                    loops.push(bare());
                }
            }
            let (bare, layer) = (median(loops), median(layers));
            println!(
                "{store}, {kind}, {tasks} at a time: {} {bare:.1} us, layer {layer:.1} us, {:.1} % of the rate",
                S::BARE,
                bare / layer * 100.0
            );
        }
    }
}

pub(crate) const REPLAYS: &str = "replays";
const KINDS: [&str; 2] = ["fresh keys", REPLAYS];

/// Returns `true` if the store was selected on the command line, or if no selection was made.
#[allow(dead_code, reason = "where there are several")]
pub(crate) fn is_any_wanted(store: &str) -> bool {
    KINDS.iter().any(|kind| is_wanted(store, kind))
}

fn is_wanted(store: &str, kind: &str) -> bool {
    let name = format!("{store}, {kind}");
    let mut wanted = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .peekable();
    wanted.peek().is_none() || wanted.any(|wanted| name.contains(&wanted))
}

/// Returns `true` if `--bench` is set: `cargo test --all-targets` runs benches without it, to check that they work.
fn is_in_earnest() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// Returns the microseconds for each request.
fn round<S, F>(
    runtime: &Runtime,
    tasks: u64,
    each: u64,
    sides: &Arc<S>,
    work: impl Fn(Arc<S>) -> F,
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

/// Returns the layer over a handler that returns its request body: the work of handlers is not part of the comparison.
pub(crate) fn app<S: Store>(store: S) -> Router {
    Router::new()
        .route("/orders", post(async |body: Bytes| body))
        .layer(IdempotencyLayer::new(store))
        .with_state(())
}

/// Sends an order and reads the response. Checks if the response is a replay.
pub(crate) async fn send_order(app: &Router, order: &Bytes, key: &str, replay: bool) {
    let req = Request::post("/orders")
        .header(header::CONTENT_TYPE, "application/json")
        .header("idempotency-key", key)
        .body(Body::from(order.clone()))
        .expect("a request");
    let Ok(res) = app.clone().oneshot(req).await;
    assert!(res.status().is_success(), "{}", res.status());
    assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
    let body = axum::body::to_bytes(res.into_body(), usize::MAX).await;
    assert_eq!(body.expect("a body").len(), order.len());
}

/// Returns 1 KiB of JSON.
pub(crate) fn order() -> Bytes {
    let line = |n: u32| {
        serde_json::json!({
            "sku": format!("SKU-{n:06}-{:04}", n * 7919 % 10_000),
            "quantity": n % 9 + 1,
            "price": f64::from(n * 137 % 10_000) / 100.0,
            "note": format!("shelf {} of aisle {}, leave at the door", n * 31 % 97, n * 17 % 53),
        })
    };
    serde_json::json!({
        "id": 7,
        "customer": "c0ffee00-1234-4a5b-8c6d-0123456789ab",
        "currency": "EUR",
        "lines": (1..=8).map(line).collect::<Vec<_>>(),
    })
    .to_string()
    .into()
}
