//! The contenders: routers that differ only in the layer around one handler.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Router, response::IntoResponse, routing::post};
use bytes::Bytes;
use footing::{
    clock::system_clock,
    http::{IdempotencyConfig, IdempotencyRuntime, MemoryIdempotencyStore},
};
use ruts::{CookieOptions, SessionLayer, store::moka::MokaStore};
use tower::layer::layer_fn;
use tower_cookies::CookieManagerLayer;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Tiered};

use crate::floor::{Buffered, Floor, Noop, Responses};

/// The work of the handler.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Handler {
    /// Returns 1 KiB.
    Light,
    /// Parses its request as JSON and writes it as JSON again.
    Heavy,
}

/// Number of times that the handler ran.
#[derive(Clone, Default)]
pub struct Effects(Arc<AtomicU64>);

impl Effects {
    fn happen(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub struct Contender {
    pub name: &'static str,
    /// `true` if a retry is replayed.
    pub replays: bool,
    /// `true` if the store can hold the records of all rounds, and does not go through all of them at each write.
    pub can_grow: bool,
    layered: fn(Router) -> Router,
}

impl Contender {
    /// Returns a router with an empty store. Needs a runtime.
    pub fn build(&self, handler: Handler, effects: &Effects) -> Router {
        (self.layered)(routes(handler, effects.clone())).with_state(())
    }
}

/// Name of the contender that all others are compared with.
pub const BARE: &str = "bare axum";
pub const FLOOR: &str = "the floor";
pub const LAYER: &str = "this layer";

pub fn all() -> Vec<Contender> {
    let contender = |name, replays, can_grow, layered| Contender {
        name,
        replays,
        can_grow,
        layered,
    };
    vec![
        contender(BARE, false, true, |app| app),
        contender("a layer that does nothing", false, true, |app| {
            app.layer(layer_fn(Noop))
        }),
        contender("both bodies buffered", false, true, |app| {
            app.layer(layer_fn(Buffered))
        }),
        contender(FLOOR, true, true, |app| {
            let responses = Responses::default();
            app.layer(layer_fn(move |inner| Floor {
                inner,
                responses: Arc::clone(&responses),
            }))
        }),
        contender("axum-idempotent 0.6", true, false, axum_idempotent),
        contender("footing 0.6", true, false, footing),
        contender("idempotent 2.0", true, true, |app| {
            let store = idempotent::memory::MemoryStore::builder();
            let store = store.try_build().expect("a runtime");
            app.layer(idempotent::middleware::IdempotencyLayer::new(store))
        }),
        contender(LAYER, true, true, |app| {
            app.layer(IdempotencyLayer::new(MemoryStore::new()))
        }),
        contender("this layer, with a tier", true, true, |app| {
            // Replays come from the tier. Fresh keys go through the future of a store, as with a server.
            let tiered = Tiered::new(MemoryStore::new()).with_max_age(std::time::Duration::MAX);
            app.layer(IdempotencyLayer::new(tiered))
        }),
    ]
}

/// The key alone decides: the request has no part in it.
fn axum_idempotent(app: Router) -> Router {
    let options = axum_idempotent::IdempotentOptions::new(24 * 60 * 60)
        .use_idempotency_key_header(Some("idempotency-key"), false);
    let store = Arc::new(MokaStore::builder().build());
    let cookie = CookieOptions::build()
        .name("session")
        .max_age(86_400)
        .path("/");
    app.layer(axum_idempotent::IdempotentLayer::<MokaStore>::new(options))
        .layer(SessionLayer::new(store).with_cookie_options(cookie))
        .layer(CookieManagerLayer::new())
}

fn footing(app: Router) -> Router {
    // Each execution reserves the largest response, and the store has 64 MiB.
    let (day, minute) = (24 * 60 * 60, 60);
    let seconds = std::time::Duration::from_secs;
    let config = IdempotencyConfig::new(seconds(day), seconds(minute), 64 << 10, 64 << 10);
    let store = MemoryIdempotencyStore::with_clock_and_max_records(system_clock(), 1_000_000);
    let store = Arc::new(store.expect("a capacity"));
    let runtime = IdempotencyRuntime::new(store, config.expect("a policy"));
    app.layer(footing::http::IdempotencyLayer::new(runtime))
}

fn routes(handler: Handler, effects: Effects) -> Router {
    match handler {
        Handler::Light => Router::new().route(
            "/orders",
            post(async move |body: Bytes| {
                drop(body);
                effects.happen();
                // A response of its own: what is stored of it takes memory.
                Bytes::copy_from_slice(&RESPONSE)
            }),
        ),
        Handler::Heavy => Router::new().route(
            "/orders",
            post(
                async move |axum::Json(mut order): axum::Json<serde_json::Value>| {
                    effects.happen();
                    order["id"] = 8.into();
                    axum::Json(order).into_response()
                },
            ),
        ),
    }
}

/// 1 KiB.
static RESPONSE: [u8; 1024] = [b'r'; 1024];
