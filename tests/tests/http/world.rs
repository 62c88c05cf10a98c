//! A service in one process, whose handlers wait at a barrier and return the responses that a test sets.

use std::sync::{Arc, Mutex};

use axum::{Router, body::Body, extract::DefaultBodyLimit, http::Uri, response::Response};
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
    response: Arc<Mutex<Option<Response>>>,
}

impl World {
    /// Creates a service whose handlers respond at once.
    pub(crate) fn new(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::at(Barrier::open(), configure)
    }

    /// Creates a service whose handlers wait at the barrier, except for the path `/fast`.
    pub(crate) fn held(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::at(Barrier::closed(), configure)
    }

    fn at(barrier: Barrier, configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = configure(IdempotencyLayer::new(store.clone()));
        let (effects, response) = (
            Effects::default(),
            Arc::<Mutex<Option<Response>>>::default(),
        );
        let handler = {
            let (effects, barrier, response) =
                (effects.clone(), barrier.clone(), Arc::clone(&response));
            async move |uri: Uri, body: Bytes| {
                effects.happen();
                if uri.path() != "/fast" {
                    barrier.pass().await;
                }
                let response = response.lock().expect("no poison").take();
                response.unwrap_or_else(|| Response::new(Body::from(body.len().to_string())))
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
            response,
        }
    }

    /// Sets the response of the next handler. By default a handler responds with the length of the request body.
    pub(crate) fn responses(&self, response: Response) {
        *self.response.lock().expect("no poison") = Some(response);
    }

    pub(crate) async fn post(&self, key: &str, body: impl Into<Body>) -> TestResponse {
        send(&self.app, tests::post("/", key, body)).await
    }

    pub(crate) fn spawn(&self, key: &str, body: impl Into<Body>) -> JoinHandle<TestResponse> {
        let (app, req) = (self.app.clone(), tests::post("/", key, body));
        tokio::spawn(async move { send(&app, req).await })
    }
}
