//! Handlers that rebuild the head of the batch request, without its extensions.

use axum::{Extension, Router, body::Body, routing::post};
use http::{Request, StatusCode, request};
use tests::{observed::observed, send};
use tower_idempotency::{
    Enforcement, GrpcMethods, IdempotencyLayer, KeyScope, MissingKey, StoreFailure,
};

use super::{
    layer,
    requests::{Service, body_of, send_batch},
};

type Configure = fn(IdempotencyLayer) -> IdempotencyLayer;

const WARNING: &str = "lease missing in the head of a batch";

fn rebuilt(head: request::Parts) -> request::Parts {
    let (mut rebuilt, ()) = Request::new(()).into_parts();
    rebuilt.method = head.method;
    rebuilt.uri = head.uri;
    rebuilt.headers = head.headers;
    rebuilt
}

/// Sends batches to a handler that rebuilds the head of the request. Returns the responses that are replays, and the number of
/// warnings.
fn send_to_rebuilding(configure: Configure, keys: [Option<&str>; 3]) -> ([bool; 3], usize) {
    let mut replays = [false; 3];
    let run = async {
        let service = Service::new(configure(layer())).with_failing_b();
        let of_handler = service.clone();
        let handler = async move |head: request::Parts, body: String| {
            let results = of_handler.results(&rebuilt(head), &body).await;
            (StatusCode::MULTI_STATUS, body_of(&results))
        };
        let app: Router = Router::new()
            .route("/batch", post(handler))
            .layer(service.layer.clone())
            .layer(Extension("entity-7"));
        for (key, is_replay) in keys.into_iter().zip(&mut replays) {
            let (response, _) = send_batch(&app, key, "a b").await;
            *is_replay = response.is_replay();
        }
    };
    let (_, log) = observed("warn", run);
    assert!(!log.contains("panicked"), "{log}");
    (replays, log.matches(WARNING).count())
}

const KEYS: [Option<&str>; 3] = [Some("batch-1"), Some("batch-1"), Some("batch-2")];

// S-417
/// The lease is in the extensions of the head. Without it, the layer cannot know that the request ran a batch.
#[test]
fn batch_without_lease_is_recorded_with_warning() {
    let recorded = ([false, true, false], 1);
    assert_eq!(send_to_rebuilding(|layer| layer, KEYS), recorded);
    // Closures get no head without its extensions.
    let recorded = ([false, true, false], 0);
    let named: Configure = |layer| {
        layer.with_key_from(KeyScope::EachCaller, |head| {
            let key = head.headers.get("idempotency-key")?;
            key.to_str().ok().map(str::to_owned)
        })
    };
    assert_eq!(send_to_rebuilding(named, KEYS), recorded);
}

#[test]
fn unprotected_batch_needs_no_lease() {
    let executed = ([false; 3], 0);
    assert_eq!(send_to_rebuilding(|layer| layer, [None; 3]), executed);
    let passing: [Configure; 3] = [
        |layer| layer.with_skip(|_| true),
        |layer| layer.with_enforcement(Enforcement::Off),
        |layer| layer.with_enforcement(Enforcement::Observe),
    ];
    for configure in passing {
        assert_eq!(send_to_rebuilding(configure, KEYS), executed);
    }
    // With this setting, a request may have no lease.
    let unprotected: Configure = |layer| {
        let failure = StoreFailure::DangerouslyExecuteUnprotected;
        layer.with_store_failure(failure)
    };
    let recorded = ([false, true, false], 0);
    assert_eq!(send_to_rebuilding(unprotected, KEYS), recorded);
}

/// The layer does not protect the call, although it rejects requests without a key.
#[test]
fn batch_of_unprotected_call_needs_no_lease() {
    const PATH: &str = "/payments.v1.Payments/Batch";
    let unprotected = GrpcMethods::all_but([PATH]).expect("a path");
    for (methods, warnings) in [(GrpcMethods::all(), 1), (unprotected, 0)] {
        let layer = layer().with_missing_key(MissingKey::Reject);
        let layer = layer.with_grpc(methods);
        let (_, log) = observed("warn", async {
            let of_handler = layer.clone();
            let handler = async move |head: request::Parts| {
                assert!(of_handler.items(&rebuilt(head)).is_ok());
            };
            let app: Router = Router::new().route(PATH, post(handler)).layer(layer);
            let req = Request::post(PATH)
                .header("content-type", "application/grpc")
                .header("idempotency-key", "k");
            let req = req.body(Body::from("\0\0\0\0\0"));
            send(&app, req.expect("a valid request")).await;
        });
        assert_eq!(log.matches(WARNING).count(), warnings, "{log}");
    }
}

/// The extension is in the head that the layer gets, and not in that of the handler.
#[test]
fn panicking_setting_fails_no_batch() {
    let by_extension: Configure = |layer| {
        layer.with_key_from(KeyScope::EachCaller, |head| {
            let entity = head.extensions.get::<&'static str>();
            Some((*entity.expect("an extension")).to_owned())
        })
    };
    let recorded = ([false, true, true], 0);
    assert_eq!(send_to_rebuilding(by_extension, KEYS), recorded);
}
