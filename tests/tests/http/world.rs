//! A service in one process, whose handlers wait at a gate and return the responses that a test sets.

use std::sync::{Arc, Mutex};

use axum::{Router, body::Body, extract::DefaultBodyLimit, http::Uri, response::Response};
use bytes::Bytes;
use tests::{Answer, Effects, gate::Gate, send};
use tokio::task::JoinHandle;
use tower_idempotency::{IdempotencyLayer, MemoryStore, conformance::FaultInjector};

/// The layer, its store, and the handlers behind it.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) layer: IdempotencyLayer,
    pub(crate) store: FaultInjector<MemoryStore>,
    pub(crate) app: Router,
    pub(crate) effects: Effects,
    pub(crate) gate: Gate,
    response: Arc<Mutex<Option<Response>>>,
}

impl World {
    /// Creates a service whose handlers respond at once.
    pub(crate) fn new(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::at(Gate::open(), configure)
    }

    /// Creates a service whose handlers wait at the gate, except for the path `/fast`.
    pub(crate) fn held(configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        Self::at(Gate::shut(), configure)
    }

    fn at(gate: Gate, configure: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = configure(IdempotencyLayer::new(store.clone()));
        let (effects, response) = (
            Effects::default(),
            Arc::<Mutex<Option<Response>>>::default(),
        );
        let handler = {
            let (effects, gate, response) = (effects.clone(), gate.clone(), Arc::clone(&response));
            async move |uri: Uri, body: Bytes| {
                effects.happen();
                if uri.path() != "/fast" {
                    gate.pass().await;
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
            gate,
            response,
        }
    }

    /// Sets the response of the next handler. By default a handler responds with the length of the request body.
    pub(crate) fn answers(&self, response: Response) {
        *self.response.lock().expect("no poison") = Some(response);
    }

    pub(crate) async fn post(&self, key: &str, body: impl Into<Body>) -> Answer {
        send(&self.app, tests::post("/", key, body)).await
    }

    pub(crate) fn spawn(&self, key: &str, body: impl Into<Body>) -> JoinHandle<Answer> {
        let (app, req) = (self.app.clone(), tests::post("/", key, body));
        tokio::spawn(async move { send(&app, req).await })
    }
}
