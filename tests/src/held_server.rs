//! A handler behind the layer, with barriers before, during and after its effect.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{StatusCode, header};
use tokio::sync::Semaphore;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

use crate::{
    Effects, TestResponse,
    barrier::{Barrier, eventually},
    wire::{H1, Server, post_bytes},
};

/// The state of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum Phase {
    BeforeTheEffect,
    DuringTheEffect,
    AfterTheEffect,
}

/// All phases, in order.
pub const PHASES: [Phase; 3] = [
    Phase::BeforeTheEffect,
    Phase::DuringTheEffect,
    Phase::AfterTheEffect,
];

/// A server whose handler is held in one phase, and the counts of its effects.
#[derive(Debug)]
pub struct HeldServer {
    /// The layer.
    pub layer: IdempotencyLayer,
    /// The service under test, for requests without a socket.
    pub app: Router,
    /// The server of the service.
    pub server: Server,
    /// The number of effects that began.
    pub begun: Effects,
    /// The number of effects that finished.
    pub finished: Effects,
    barriers: Barriers,
    left: Arc<Semaphore>,
}

#[derive(Clone, Debug)]
struct Barriers([Barrier; 3]);

impl HeldServer {
    /// Starts with the default layer, and holds the handler in `phase`.
    pub async fn hold_in(phase: Phase) -> Self {
        Self::start(IdempotencyLayer::new(MemoryStore::new()), &[phase], |app| {
            app
        })
        .await
    }

    /// Starts with the default layer and an open barrier.
    pub async fn open() -> Self {
        Self::with_layer(IdempotencyLayer::new(MemoryStore::new())).await
    }

    /// Starts with this layer and an open barrier.
    pub async fn with_layer(layer: IdempotencyLayer) -> Self {
        Self::start(layer, &[], |app| app).await
    }

    /// Starts with the default layer inside a deadline, and holds the handler in `phase`. When the test lets a request
    /// through the barrier, the deadline of that request passes, and its client gets 408.
    pub async fn with_deadline(phase: Phase) -> (Self, Barrier) {
        let passes = Barrier::closed();
        let deadline = {
            let passes = passes.clone();
            move |req: Request, next: Next| {
                let passes = passes.clone();
                async move {
                    tokio::select! {
                        biased;
                        res = next.run(req) => res,
                        () = passes.pass() => StatusCode::REQUEST_TIMEOUT.into_response(),
                    }
                }
            }
        };
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let held = Self::start(layer, &[phase], |app| app.layer(from_fn(deadline))).await;
        (held, passes)
    }

    /// Starts with this layer, and holds the handler in each phase of `held`. `outside` adds middleware outside the
    /// layer.
    pub async fn start(
        layer: IdempotencyLayer,
        held: &[Phase],
        outside: impl FnOnce(Router) -> Router,
    ) -> Self {
        let barriers = Barriers(PHASES.map(|phase| {
            if held.contains(&phase) {
                Barrier::closed()
            } else {
                Barrier::open()
            }
        }));
        let (begun, finished) = (Effects::default(), Effects::default());
        let orders = {
            let (begun, finished, barriers) = (begun.clone(), finished.clone(), barriers.clone());
            async move || {
                let [before, during, after] = &barriers.0;
                before.pass().await;
                let n = begun.happen();
                during.pass().await;
                finished.happen();
                after.pass().await;
                let location = [(header::LOCATION, format!("/orders/{n}"))];
                (StatusCode::CREATED, location, format!("execution {n}"))
            }
        };
        let panics_once = {
            let orders = orders.clone();
            async move || {
                let response = orders().await;
                assert!(response.2 != "execution 1", "the intended panic");
                response
            }
        };
        let spawned = {
            let orders = orders.clone();
            async move || {
                let work = tokio::spawn(async move { orders().await });
                work.await.expect("the work does not panic")
            }
        };
        let left = Arc::new(Semaphore::new(0));
        let app = Router::new()
            .route("/orders", post(orders.clone()))
            // Like the route above, but it reads the body first.
            .route(
                "/read",
                post({
                    let orders = orders.clone();
                    async move |_: Bytes| orders().await
                }),
            )
            // This handler reads the body first, and rejects an incomplete one.
            .route(
                "/checks",
                post({
                    let orders = orders.clone();
                    async move |body: Bytes| {
                        if body == "0123456789" {
                            orders().await.into_response()
                        } else {
                            StatusCode::BAD_REQUEST.into_response()
                        }
                    }
                }),
            )
            // This handler holds the body until the handler ends, and does not read it.
            .route(
                "/holds",
                post({
                    let orders = orders.clone();
                    async move |body: Request| {
                        let response = orders().await;
                        drop(body);
                        response
                    }
                }),
            )
            // This handler works in a separate task.
            .route("/spawned", post(spawned))
            // Like the first route, but its first effect ends in a panic.
            .route("/panics-once", post(panics_once))
            .route_layer(layer.clone());
        let app = outside(app).layer(from_fn_with_state(Arc::clone(&left), count_departures));
        Self {
            server: Server::start(app.clone()).await,
            layer,
            app,
            begun,
            finished,
            barriers,
            left,
        }
    }

    /// Waits until the handler reaches the phase.
    pub async fn arrival(&self, phase: Phase) {
        self.barriers.0[phase as usize].arrival().await;
    }

    /// Waits until a response future was dropped before it was ready.
    ///
    /// # Panics
    ///
    /// Panics if none was dropped within a minute.
    pub async fn wait_for_departure(&self) {
        let left = tokio::time::timeout(Duration::from_secs(60), self.left.acquire()).await;
        left.expect("the server has not noticed that the client left")
            .expect("the semaphore is not closed")
            .forget();
    }

    /// Lets the handlers continue.
    pub fn open_barriers(&self) {
        for barrier in &self.barriers.0 {
            barrier.open_for_good();
        }
    }

    /// Waits until nothing is in flight.
    ///
    /// # Panics
    ///
    /// Panics if a request is still in flight after a minute.
    pub async fn wait_until_idle(&self) {
        eventually("nothing is in flight", || self.layer.in_flight() == 0).await;
    }

    /// Checks that a retry on another connection is refused while the handler runs.
    ///
    /// # Panics
    ///
    /// Panics if the retry gets another response.
    pub async fn assert_in_progress(&self, path: &str, key: &str, body: &str) {
        let early = self.retry(path, key, body).await;
        assert_eq!(early.status, StatusCode::CONFLICT, "{early:?}");
        assert_eq!(early.code(), "in-progress");
    }

    /// Lets the handlers continue, and checks that there was one effect and that retries return its response.
    ///
    /// # Panics
    ///
    /// Panics if there was another number of effects, or a retry gets another response.
    pub async fn assert_executed_once(&self, path: &str, key: &str, body: &str) {
        self.open_barriers();
        self.wait_until_idle().await;
        assert_eq!(
            (self.begun.count(), self.finished.count()),
            (1, 1),
            "number of effects before any retry"
        );
        let retry = self.retry(path, key, body).await;
        assert_eq!(retry.status, StatusCode::CREATED);
        assert_eq!(retry.text(), "execution 1");
        assert_eq!(retry.header("location"), Some("/orders/1"));
        assert!(retry.is_replay(), "the retry is marked: {retry:?}");
        assert_eq!(retry, self.retry(path, key, body).await, "another retry");
        assert_eq!((self.begun.count(), self.finished.count()), (1, 1));
    }

    /// Checks that there was no effect, and that the key is free.
    ///
    /// # Panics
    ///
    /// Panics if there was an effect, or the key is not free.
    pub async fn assert_untouched(&self, path: &str, key: &str, body: &str) {
        self.open_barriers();
        self.wait_until_idle().await;
        assert_eq!(self.begun.count(), 0, "effects of an incomplete request");
        let first = self.retry(path, key, body).await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert!(!first.is_replay(), "the key was not free: {first:?}");
        self.assert_executed_once(path, key, body).await;
    }

    async fn retry(&self, path: &str, key: &str, body: &str) -> TestResponse {
        let mut client = H1::connect(self.server.addr()).await;
        client.send(post_bytes(path, key, body)).await;
        client.response().await.expect("a response to a retry")
    }
}

async fn count_departures(
    State(left): State<Arc<Semaphore>>,
    req: Request,
    next: Next,
) -> Response {
    struct Departure(Option<Arc<Semaphore>>);
    impl Drop for Departure {
        fn drop(&mut self) {
            if let Some(left) = &self.0 {
                left.add_permits(1);
            }
        }
    }
    let mut departure = Departure(Some(left));
    let res = next.run(req).await;
    departure.0 = None;
    res
}
