//! Allocations of whole requests, compared with those of bare axum.

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use http::Request;
use tokio::runtime::{Builder, Runtime};
use tower::{ServiceExt, layer::layer_fn, util::MapRequest};

use crate::{Enforcement, IdempotencyLayer, MemoryStore};

fn routes() -> Router {
    let handler = async |body: Bytes| {
        drop(body);
        Bytes::copy_from_slice(&[b'r'; 1024])
    };
    Router::new().route("/orders", post(handler))
}

/// Returns the fewest allocations of 50 requests: the store grows in some of them.
fn fewest(runtime: &Runtime, app: &Router, key: impl Fn(u32) -> Option<String>) -> u64 {
    let allocations = (0..50).map(|n| {
        // hyper adds an extension too: the map of the extensions has grown before the layer adds its own.
        let mut req = Request::post("/orders")
            .header("authorization", "Bearer 1")
            .extension("hyper");
        if let Some(key) = key(n) {
            req = req.header("idempotency-key", key);
        }
        let req = req.body(Body::from(vec![b'o'; 1024])).expect("a request");
        let counted = allocation_counter::measure(|| {
            runtime.block_on(async {
                let Ok(res) = app.clone().oneshot(req).await;
                assert!(res.status().is_success(), "{}", res.status());
                let body = axum::body::to_bytes(res.into_body(), usize::MAX).await;
                assert_eq!(body.expect("a body").len(), 1024);
            });
        });
        counted.count_total
    });
    allocations.min().expect("50 of them")
}

#[test]
fn requests_allocate_little_beyond_axum() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let bare = routes().with_state(());
    let noop = layer_fn(|inner| MapRequest::new(inner, |req: Request<Body>| req));
    let noop = routes().layer(noop).with_state(());
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let app = routes().layer(layer).with_state(());
    let fresh = |n| Some(format!("8e03978e-40d5-43e8-bc93-{n:012}"));
    let same = |_| fresh(0);

    let passed = fewest(&runtime, &app, |_| None);
    let passed_by_noop = fewest(&runtime, &noop, |_| None);
    // axum boxes the body of each response that is not its own.
    assert_eq!(passed, passed_by_noop + 1, "no key");

    let observing = |enforcement| {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(enforcement);
        routes().layer(layer).with_state(())
    };
    for enforcement in [Enforcement::Off, Enforcement::Observe] {
        let app = observing(enforcement);
        assert_eq!(fewest(&runtime, &app, |_| None), passed, "{enforcement}");
    }
    let observed = fewest(&runtime, &observing(Enforcement::Observe), fresh);

    let executed = fewest(&runtime, &app, fresh);
    let executed_bare = fewest(&runtime, &bare, fresh);
    assert!(
        executed <= executed_bare + 12,
        "{executed}, {executed_bare} bare"
    );

    let replayed = fewest(&runtime, &app, same);
    assert!(replayed < executed_bare, "{replayed}, {executed_bare} bare");
    // The keys of the metrics of a layer with a name are built once.
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let named = layer.with_name("orders").expect("a valid name");
    let named = routes().layer(named).with_state(());
    let (fresh_named, same_named) = (
        fewest(&runtime, &named, fresh),
        fewest(&runtime, &named, same),
    );
    assert!(fresh_named <= executed, "{fresh_named}, {executed} unnamed");
    assert!(same_named <= replayed, "{same_named}, {replayed} unnamed");
    // The observation, its watches of both bodies, axum's box of the request, the record, and the table of the store.
    assert!(
        observed <= passed + 10,
        "{observed}, {passed} without a key"
    );
    println!(
        "observed {observed}, no key {passed}, fresh {executed}, replay {replayed}, bare {executed_bare}"
    );
}
