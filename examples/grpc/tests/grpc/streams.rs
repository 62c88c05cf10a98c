//! Streams: those of other methods pass, those of protected methods are never executed twice.

use payments_grpc::{
    client::with_key,
    messages::{BalanceRequest, PayRequest},
    service::serve,
};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::Code;
use tower_idempotency::{GrpcMethods, IdempotencyLayer, MemoryStore, MissingKey};

use crate::harness::{Scripted, call, frame, key, layer, payment, send_raw, start};

const WATCH: &str = "/payments.v1.Payments/Watch";
const PAY_ALL: &str = "/payments.v1.Payments/PayAll";
const GET_BALANCE: &str = "/payments.v1.Payments/GetBalance";

fn protecting(path: &str) -> IdempotencyLayer {
    let methods = GrpcMethods::only([path]).expect("a valid path");
    IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods)
}

// S-893
#[tokio::test]
async fn unprotected_streams_pass_byte_for_byte() {
    let two = [frame(0, b"\x10\x07"), frame(0, b"\x10\x09")].concat();
    let one = frame(0, b"");
    for (path, body) in [
        (WATCH, &one),
        (PAY_ALL, &two),
        (PAY_ALL, &one),
        (GET_BALANCE, &one),
    ] {
        let (with, without) = (Scripted::paying(), Scripted::paying());
        let (addr, _) = start(layer(), &with).await;
        let off = IdempotencyLayer::new(MemoryStore::new())
            .with_enforcement(tower_idempotency::Enforcement::Off);
        let bare = serve(off, without.clone()).await.expect("a port");
        for _ in 0..2 {
            let (first, rest) = body.split_at(3);
            let through = send_raw(addr, call(path, "k"), &[first, rest]).await;
            let direct = send_raw(bare, call(path, "k"), &[first, rest]).await;
            let (mut through, mut direct) =
                (through.expect("a response"), direct.expect("a response"));
            through.headers.remove("date");
            direct.headers.remove("date");
            assert_eq!(through, direct, "{path}");
        }
        assert_eq!(with.effects.count(), without.effects.count(), "{path}");
    }
}

/// Each side waits for the other one, so nothing may be buffered.
// S-893
#[tokio::test]
async fn conversation_passes_message_by_message() {
    let service = Scripted::paying();
    let (_, mut client) = start(layer(), &service).await;
    let (send, sent) = mpsc::channel::<PayRequest>(1);
    send.send(payment("a")).await.expect("open");
    let conversation = client
        .pay_all(with_key(ReceiverStream::new(sent), &key("k")))
        .await;
    let mut payments = conversation.expect("a stream").into_inner();
    for id in 1..=3 {
        assert_eq!(
            payments.next().await.expect("a payment").expect("paid").id,
            id
        );
        send.send(payment("a")).await.expect("open");
    }
    drop(send);
    assert_eq!(
        payments.next().await.expect("a payment").expect("paid").id,
        4
    );
    assert!(payments.next().await.is_none());
}

// S-894
#[tokio::test]
async fn protected_response_stream_is_not_repeated() {
    let service = Scripted::paying();
    let (_, mut client) = start(protecting(WATCH), &service).await;
    let account = BalanceRequest::default();
    let stream = client.watch(with_key(account.clone(), &key("k"))).await;
    let payments: Vec<_> = stream.expect("a stream").into_inner().collect().await;
    assert_eq!(payments.len(), 3);
    let retry = client.watch(with_key(account, &key("k"))).await;
    assert_eq!(
        retry.expect_err("a tombstone").code(),
        Code::FailedPrecondition
    );
    assert_eq!(service.effects.count(), 1);
}

#[tokio::test]
async fn protected_request_stream_is_rejected() {
    let service = Scripted::paying();
    for layer in [
        protecting(PAY_ALL),
        IdempotencyLayer::new(MemoryStore::new()).with_grpc(GrpcMethods::all()),
    ] {
        let (_, mut client) = start(layer, &service).await;
        let requests = tokio_stream::iter([payment("a"), payment("a")]);
        let status = client.pay_all(with_key(requests, &key("k"))).await;
        assert_eq!(status.expect_err("a stream").code(), Code::InvalidArgument);
        // The client does not end its stream.
        let (send, sent) = mpsc::channel::<PayRequest>(2);
        send.send(payment("a")).await.expect("open");
        send.send(payment("a")).await.expect("open");
        let status = client
            .pay_all(with_key(ReceiverStream::new(sent), &key("k")))
            .await;
        assert_eq!(status.expect_err("a stream").code(), Code::InvalidArgument);
    }
    assert_eq!(service.effects.count(), 0);
}

#[tokio::test]
async fn excluded_methods_pass_without_key() {
    let methods = GrpcMethods::all_but([WATCH, PAY_ALL, GET_BALANCE]).expect("valid paths");
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Reject)
        .with_grpc(methods);
    let service = Scripted::paying();
    let (_, mut client) = start(layer, &service).await;
    let account = BalanceRequest::default();
    client
        .get_balance(account.clone())
        .await
        .expect("a balance");
    let payments: Vec<_> = client
        .watch(account)
        .await
        .expect("a stream")
        .into_inner()
        .collect()
        .await;
    assert_eq!(payments.len(), 3);
    let requests = tokio_stream::iter([payment("a"), payment("a")]);
    client.pay_all(requests).await.expect("a stream");
    let status = client.pay(payment("a")).await.expect_err("no key");
    assert_eq!(status.code(), Code::InvalidArgument);
}
