//! Batches of gRPC calls.

use axum::{Router, body::Body, extract, routing::post};
use http::Request;
use tests::send;
use tower_idempotency::{GrpcMethods, run_once::WorkError, testing::Effects};

use super::{items, layer};

const PAY_ALL: &str = "/payments.v1.Payments/PayAll";

/// tonic gives a handler the metadata and the extensions, and neither the method nor the path.
#[tokio::test(start_paused = true)]
async fn unfinished_batch_of_built_head_is_not_recorded() {
    let (layer, effects) = (layer().with_grpc(GrpcMethods::all()), Effects::new());
    let (of_handler, counted) = (layer.clone(), effects.clone());
    let handler = async move |req: extract::Request| {
        let (parts, _) = req.into_parts();
        let built = Request::post(PAY_ALL).body(()).expect("a valid request");
        let (mut head, ()) = built.into_parts();
        (head.headers, head.extensions) = (parts.headers, parts.extensions);
        let batch = of_handler.items(&head).expect("a principal");
        counted.add("batch");
        let pay = async move |key: String, _lease| {
            counted.add(&key);
            if key == "b" && counted.count("b") == 1 {
                return Err(WorkError::Release("try later"));
            }
            Ok(key)
        };
        let results = batch.run(items(&["a", "b"]), pay).await;
        assert!(results.is_ok());
        [("content-type", "application/grpc"), ("grpc-status", "0")]
    };
    let app: Router = Router::new().route(PAY_ALL, post(handler)).layer(layer);
    for _ in 0..3 {
        let call = Request::post(PAY_ALL)
            .header("content-type", "application/grpc")
            .header("idempotency-key", "k");
        let call = call.body(Body::from("\0\0\0\0\0"));
        let response = send(&app, call.expect("a valid request")).await;
        assert_eq!(response.headers["grpc-status"], "0");
    }
    let counts = ["batch", "a", "b"].map(|name| effects.count(name));
    assert_eq!(counts, [2, 1, 2]);
}
