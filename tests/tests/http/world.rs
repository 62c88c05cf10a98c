//! A service in one process, whose handlers wait at a barrier and return the responses that a test queues.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Body,
    extract::DefaultBodyLimit,
    http::Uri,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use tests::{Effects, TestResponse, barrier::Barrier, send};
use tokio::task::JoinHandle;
use tower_idempotency::{IdempotencyLayer, MemoryStore, conformance::FaultInjector};

/// The layer, its store, and the handlers behind it.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) layer: IdempotencyLayer,
    pub(crate) store: FaultInjector<MemoryStore>,
    pub(crate) app: Router,
    pub(crate) effects: Effects,
    pub(crate) barrier: Barrier,
    responses: Arc<Mutex<VecDeque<Response>>>,
}

impl World {
    /// Creates a service whose handlers respond at once.
    pub(crate) fn new(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::with_barrier(Barrier::open(), configure)
    }

    /// Creates a service whose handlers wait at the barrier, except for the path `/fast`.
    pub(crate) fn with_closed_barrier(
        configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        Self::with_barrier(Barrier::closed(), configure)
    }

    fn with_barrier(
        barrier: Barrier,
        configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = configure(IdempotencyLayer::new(store.clone()));
        let effects = Effects::default();
        let responses = Arc::<Mutex<VecDeque<Response>>>::default();
        let handler = {
            let (effects, barrier, responses) =
                (effects.clone(), barrier.clone(), Arc::clone(&responses));
            async move |uri: Uri, body: Bytes| {
                let n = effects.happen();
                if uri.path() != "/fast" {
                    barrier.pass().await;
                }
                let queued = responses.lock().expect("no poison").pop_front();
                queued.unwrap_or_else(|| {
                    let location = [("location", format!("/orders/{n}"))];
                    (location, body.len().to_string()).into_response()
                })
            }
        };
        let app = Router::new()
            .fallback(handler)
            .layer(DefaultBodyLimit::disable())
            .layer(layer.clone());
        Self {
            layer,
            store,
            app,
            effects,
            barrier,
            responses,
        }
    }

    /// Queues the response of a handler. A handler without one responds with the number of its execution in `Location`,
    /// and with the length of the request body.
    pub(crate) fn enqueue_response(&self, response: Response) {
        let mut responses = self.responses.lock().expect("no poison");
        responses.push_back(response);
    }

    pub(crate) async fn post(&self, key: &str, body: impl Into<Body>) -> TestResponse {
        send(&self.app, tests::post("/", key, body)).await
    }

    pub(crate) fn spawn(&self, key: &str, body: impl Into<Body>) -> JoinHandle<TestResponse> {
        let (app, req) = (self.app.clone(), tests::post("/", key, body));
        tokio::spawn(async move { send(&app, req).await })
    }
}
