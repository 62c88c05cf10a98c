//! The server: the layer in front of a handler that counts its effects.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http::StatusCode;
use tests::random::Random;
use tokio::{net::TcpListener, task::JoinHandle, time::sleep};
use tower_idempotency::{IdempotencyLayer, store::Store};

use super::ClientTally;

/// A running server. It ends when it is dropped.
pub(super) struct Server {
    address: SocketAddr,
    state: Arc<OrderCounts>,
    task: JoinHandle<()>,
}

struct OrderCounts {
    /// Effects and requests of each operation.
    counts: Vec<Mutex<Counts>>,
    requests: AtomicU64,
    replays: AtomicU64,
    seed: u64,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    effects: u32,
    failures: u32,
    requests: u32,
}

impl Server {
    pub(super) async fn start<S: Store>(store: S, operations: usize, seed: u64) -> Self {
        let state = Arc::new(OrderCounts {
            counts: (0..operations).map(|_| Mutex::default()).collect(),
            requests: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            seed,
        });
        let app = Router::new()
            .route("/orders/{number}", post(order))
            .layer(IdempotencyLayer::new(store))
            .layer(middleware::from_fn_with_state(state.clone(), limit))
            .with_state(state.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let task = tokio::spawn(async move {
            axum::serve(listener, app).await.expect("it serves");
        });
        Self {
            address,
            state,
            task,
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the effects and the requests.
    pub(super) fn tally(&self) -> ClientTally {
        let mut tally = ClientTally {
            requests: self.state.requests.load(Ordering::Relaxed),
            replays: self.state.replays.load(Ordering::Relaxed),
            ..ClientTally::default()
        };
        for counts in &self.state.counts {
            let effects = counts.lock().expect("no panic").effects;
            tally.effects += u64::from(effects);
            tally.executed_twice += usize::from(effects > 1);
            tally.not_executed += usize::from(effects == 0);
        }
        tally
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl OrderCounts {
    /// Returns random numbers for an operation, which are the same for all its requests.
    fn random(&self, number: usize) -> Random {
        let mut random = Random(self.seed ^ (number as u64) << 20);
        random.draw();
        random
    }

    fn counts(&self, number: usize) -> std::sync::MutexGuard<'_, Counts> {
        self.counts[number].lock().expect("no panic")
    }
}

/// Rejects the first requests of some operations with 429, in front of the layer.
async fn limit(State(orders): State<Arc<OrderCounts>>, req: Request, next: Next) -> Response {
    orders.requests.fetch_add(1, Ordering::Relaxed);
    let number = req.uri().path().rsplit('/').next();
    let number: usize = number.and_then(|text| text.parse().ok()).expect("an order");
    let requests = {
        let mut counts = orders.counts(number);
        counts.requests += 1;
        counts.requests
    };
    if orders.random(number).below(30) == 0 && requests <= LIMITED {
        return StatusCode::TOO_MANY_REQUESTS.into_response();
    }
    let res = next.run(req).await;
    if res.headers().contains_key("idempotent-replayed") {
        orders.replays.fetch_add(1, Ordering::Relaxed);
    }
    res
}

/// Executes an order. The first execution of some operations fails before the effect, and its key is released.
async fn order(State(orders): State<Arc<OrderCounts>>, Path(number): Path<usize>) -> Response {
    let mut random = orders.random(number);
    let fails = random.draw() % 30 == 1;
    let delay = Duration::from_micros(random.draw() % 4000);
    let effects = {
        let mut counts = orders.counts(number);
        if fails && counts.failures == 0 {
            counts.failures += 1;
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        counts.effects += 1;
        counts.effects
    };
    // A connection that breaks now leaves an effect whose response is not recorded yet.
    sleep(delay).await;
    let padding = "x".repeat(random.below(400));
    let body = format!("effect {effects} of {number} {padding}");
    (StatusCode::CREATED, body).into_response()
}

/// Requests of a limited operation that get 429: one call, and the first request of the next one.
const LIMITED: u32 = 4;
