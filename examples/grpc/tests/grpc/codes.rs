//! Codes that are outcomes, and codes that free the key.

use payments_grpc::client::with_key;
use tonic::{Code, Status};
use tower_idempotency::{GrpcCode, GrpcMethods, IdempotencyLayer, KeyScope, MemoryStore};

use crate::harness::{PAY, Scripted, key, layer, payment, start};

const DEFINITE: [Code; 6] = [
    Code::InvalidArgument,
    Code::NotFound,
    Code::AlreadyExists,
    Code::PermissionDenied,
    Code::FailedPrecondition,
    Code::OutOfRange,
];
const FREE: [Code; 10] = [
    Code::Unavailable,
    Code::DeadlineExceeded,
    Code::Aborted,
    Code::ResourceExhausted,
    Code::Cancelled,
    Code::Unknown,
    Code::Internal,
    Code::DataLoss,
    Code::Unauthenticated,
    Code::Unimplemented,
];

/// Returns the effects of two calls under one key whose handler fails with this code.
async fn effects(layer: IdempotencyLayer, code: Code) -> u64 {
    let service =
        Scripted::new(move |n, _| async move { Err(Status::new(code, format!("failure {n}"))) });
    let (_, mut client) = start(layer, &service).await;
    for _ in 0..2 {
        let status = client.pay(with_key(payment("a"), &key("k"))).await;
        let status = status.expect_err("a failure");
        let expected = format!("failure {}", service.effects.count());
        assert_eq!((status.code(), status.message()), (code, expected.as_str()));
    }
    service.effects.count()
}

// S-885
#[tokio::test]
async fn definite_codes_are_recorded() {
    for code in DEFINITE {
        assert_eq!(effects(layer(), code).await, 1, "{code:?}");
    }
}

// S-886
#[tokio::test]
async fn other_codes_free_key() {
    for code in FREE {
        assert_eq!(effects(layer(), code).await, 2, "{code:?}");
    }
}

#[tokio::test]
async fn setting_chooses_recorded_codes() {
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    let methods = methods.with_recorded_codes(|code| {
        code == GrpcCode::from(Code::Aborted as i32) || code == GrpcCode::Ok
    });
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
    assert_eq!(effects(layer.clone(), Code::Aborted).await, 1);
    let (layer, other) = (layer.clone().with_namespace("b"), Code::NotFound);
    assert_eq!(effects(layer, other).await, 2);
}

/// A setting that panics after the effect must not lead to a second one.
#[tokio::test]
async fn panic_of_setting_leaves_tombstone() {
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    let methods = methods.with_recorded_codes(|_| panic!("a setting that panics"));
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
    let service = Scripted::paying();
    let (_, mut client) = start(layer, &service).await;
    client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect("paid");
    let status = client.pay(with_key(payment("a"), &key("k"))).await;
    assert_eq!(
        status.expect_err("a tombstone").code(),
        Code::FailedPrecondition
    );
    assert_eq!(service.effects.count(), 1);
}

/// Clients cannot choose another key for the corrected call.
// S-892
#[tokio::test]
async fn key_of_service_records_no_error() {
    let layer = layer().with_key_from(KeyScope::AllCallers, |_| Some("payment-1".to_owned()));
    for code in DEFINITE {
        let layer = layer.clone().with_namespace(format!("{code:?}"));
        assert_eq!(effects(layer, code).await, 2, "{code:?}");
    }
    let service = Scripted::paying();
    let (_, mut client) = start(layer, &service).await;
    for _ in 0..2 {
        client.pay(payment("a")).await.expect("paid");
    }
    assert_eq!(service.effects.count(), 1);
}
