//! Calls of the protected method: replays, rejections and deadlines.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use payments_grpc::{
    client::{connect, pay, with_key},
    messages::{BalanceRequest, PayRequest},
    payments::payments_server::PaymentsServer,
    service::{Accounts, serve},
};
use tests::barrier::{Barrier, eventually};
use tokio::{net::TcpListener, sync::Semaphore, time::sleep};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status, codec::CompressionEncoding, transport::Server};
use tonic_types::StatusExt;
use tower::util::MapResponseLayer;
use tower_idempotency::{
    Body, ExecutionFailure, GrpcMethods, IdempotencyLayer, Lease, MemoryStore, NeedsAttention,
    OrphanPolicy,
};

use crate::harness::{PAY, Scripted, call, frame, key, layer, payment, send_raw, start};

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info().expect("an ErrorInfo");
    assert_eq!(info.domain, "tower-idempotency");
    info.reason.clone()
}

fn pushback(status: &Status) -> Option<&str> {
    let value = status.metadata().get("grpc-retry-pushback-ms")?;
    Some(value.to_str().expect("a number"))
}

// S-884
#[tokio::test]
async fn replay_has_every_byte_of_first_response() {
    let service = Scripted::paying();
    let (addr, _) = start(layer(), &service).await;
    let message = frame(0, b"\x0a\x01a\x10\x05");
    let first = send_raw(addr, call(PAY, "k"), &[&message]).await;
    let mut replay = send_raw(addr, call(PAY, "k"), &[&message])
        .await
        .expect("a response");
    let first = first.expect("a response");
    assert_eq!((first.code(), first.body.len()), (Some(0), 9));
    assert!(replay.take_marker());
    let date = first.headers.get("date").cloned();
    replay.headers.remove("date");
    if let Some(date) = date {
        replay.headers.insert("date", date);
    }
    assert_eq!(replay, first);
    assert_eq!(service.effects.count(), 1);
}

// S-885
#[tokio::test]
async fn error_replay_has_every_byte() {
    let service = Scripted::new(async |n, _| {
        let mut status = Status::with_details(
            Code::FailedPrecondition,
            "no money: 50 %",
            vec![1, 2, 0xff].into(),
        );
        let value = tonic::metadata::MetadataValue::from_bytes(&[0, n.to_le_bytes()[0]]);
        status.metadata_mut().insert_bin("x-balance-bin", value);
        Err(status)
    });
    let (addr, _) = start(layer(), &service).await;
    let message = frame(0, b"");
    let first = send_raw(addr, call(PAY, "k"), &[&message])
        .await
        .expect("a response");
    let mut replay = send_raw(addr, call(PAY, "k"), &[&message])
        .await
        .expect("a response");
    assert!(replay.take_marker());
    assert_eq!(first.code(), Some(9));
    assert!(first.trailers.is_none() && first.body.is_empty());
    assert!(first.headers.contains_key("grpc-status-details-bin"));
    let without_date = |mut headers: http::HeaderMap| {
        headers.remove("date");
        headers
    };
    assert_eq!(without_date(replay.headers), without_date(first.headers));
    assert_eq!((replay.body, replay.trailers), (first.body, first.trailers));
    assert_eq!(service.effects.count(), 1);
}

// S-887
#[tokio::test]
async fn missing_key_is_invalid_argument() {
    let service = Scripted::paying();
    let (_, mut client) = start(layer(), &service).await;
    let status = client
        .pay(Request::new(payment("a")))
        .await
        .expect_err("no key");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(reason(&status), "IDEMPOTENCY_MISSING_KEY");
    assert_eq!(pushback(&status), Some("-1"));
    assert!(status.message().contains("idempotency-key"), "{status}");
    let malformed = client.pay(with_key(payment("a"), &key("\"k"))).await;
    let status = malformed.expect_err("a malformed key");
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::InvalidArgument, "IDEMPOTENCY_MALFORMED_KEY")
    );
    assert_eq!(service.effects.count(), 0);
}

// S-887
#[tokio::test]
async fn other_message_under_key_is_invalid_argument() {
    let service = Scripted::paying();
    let (_, mut client) = start(layer(), &service).await;
    client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect("paid");
    let status = client.pay(with_key(payment("b"), &key("k"))).await;
    let status = status.expect_err("another message");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(reason(&status), "IDEMPOTENCY_KEY_REUSED");
    let details = status.get_error_details();
    let entry = &details.error_info().expect("an ErrorInfo").metadata["entry"];
    assert_eq!(entry.len(), 8, "{entry}");
    assert_eq!(service.effects.count(), 1);
}

// S-888
#[tokio::test]
async fn duplicate_in_progress_is_unavailable() {
    let running = Arc::new(Semaphore::new(0));
    let permits = Arc::clone(&running);
    let service = Scripted::new(move |id, _| {
        let permits = Arc::clone(&permits);
        async move {
            permits.acquire().await.expect("open").forget();
            Ok(Response::new(payments_grpc::messages::Payment {
                id,
                amount: 5,
            }))
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound socket");
    let refusals = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&refusals);
    let counting = MapResponseLayer::new(move |res: http::Response<Body<tonic::body::Body>>| {
        let code = res.headers().get("grpc-status");
        let is_refusal = code.is_some_and(|code| code == "14");
        counted.fetch_add(usize::from(is_refusal), Ordering::SeqCst);
        res
    });
    let router = Server::builder()
        .layer(counting)
        .layer(layer().with_retry_after(Duration::from_millis(30)))
        .add_service(PaymentsServer::new(service.clone()));
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut client = connect(addr).expect("a valid address");
    let mut of_first = client.clone();
    let first = tokio::spawn(async move { of_first.pay(with_key(payment("a"), &key("k"))).await });
    eventually("the handler has begun", || service.effects.count() == 1).await;
    let status = client.pay(with_key(payment("a"), &key("k"))).await;
    let status = status.expect_err("in progress");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(reason(&status), "IDEMPOTENCY_IN_PROGRESS");
    assert_eq!(pushback(&status), Some("30"));
    let details = status.get_error_details();
    let delay = details.retry_info().expect("a RetryInfo").retry_delay;
    assert_eq!(delay, Some(Duration::from_millis(30)));
    let retry = tokio::spawn(async move { pay(&mut client, &key("k"), &payment("a")).await });
    eventually("the retry is refused", || {
        refusals.load(Ordering::SeqCst) >= 2
    })
    .await;
    running.add_permits(1);
    let first = first.await.expect("no panic").expect("paid");
    let retry = retry.await.expect("no panic").expect("paid");
    assert_eq!(first.get_ref(), retry.get_ref());
    assert_eq!(service.effects.count(), 1);
}

/// The handler continues after the deadline of the client.
// F-888
#[tokio::test]
async fn handler_finishes_after_deadline() {
    let (begun, held) = (Arc::<Mutex<Vec<String>>>::default(), Barrier::closed());
    let service = {
        let (begun, held) = (Arc::clone(&begun), held.clone());
        Scripted::new(move |id, req| {
            let account = req.into_inner().account;
            begun.lock().expect("no panic").push(account);
            let held = held.clone();
            async move {
                held.pass().await;
                Ok(Response::new(payments_grpc::messages::Payment {
                    id,
                    amount: 5,
                }))
            }
        })
    };
    let (_, mut client) = start(layer(), &service).await;
    let executions = |name: &str| {
        let begun = begun.lock().expect("no panic");
        begun.iter().filter(|account| *account == name).count()
    };
    let give_up = Instant::now() + Duration::from_secs(60);
    let mut deadline = Duration::from_millis(50);
    // The deadline may pass before the handler begins.
    let name = loop {
        let name = format!("{deadline:?}");
        let mut req = with_key(payment(&name), &key(&name));
        req.set_timeout(deadline);
        let status = client.pay(req).await.expect_err("the deadline passed");
        assert!(
            matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
            "{status}"
        );
        if executions(&name) == 1 {
            // The server drops the call at a deadline of its own, which began later.
            tokio::time::sleep(deadline).await;
            break name;
        }
        assert!(Instant::now() < give_up, "no handler has begun");
        deadline *= 2;
    };
    held.open_for_good();
    let paid = pay(&mut client, &key(&name), &payment(&name))
        .await
        .expect("paid");
    assert!(paid.metadata().contains_key("idempotent-replayed"));
    assert_eq!(executions(&name), 1);
}

// S-891
#[tokio::test]
async fn panic_releases_key() {
    let service = Scripted::new(async |id, _| {
        assert!(id > 1, "the first execution panics");
        Ok(Response::new(payments_grpc::messages::Payment {
            id,
            amount: 5,
        }))
    });
    let (_, mut client) = start(layer(), &service).await;
    let failed = client.pay(with_key(payment("a"), &key("k"))).await;
    failed.expect_err("a panic");
    let paid = client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect("paid");
    assert_eq!((paid.get_ref().id, service.effects.count()), (2, 2));
}

// S-889
#[tokio::test]
async fn unknown_outcome_is_failed_precondition() {
    let service = Scripted::new(async |_, _| panic!("each execution panics"));
    for failure in [ExecutionFailure::Orphan, ExecutionFailure::NeedsAttention] {
        let layer = layer()
            .with_orphan_policy(OrphanPolicy::Refuse)
            .with_failure(failure);
        let (_, mut client) = start(layer, &service).await;
        let before = service.effects.count();
        let failed = client.pay(with_key(payment("a"), &key("k"))).await;
        failed.expect_err("a panic");
        // The orphan is one when its lease of 1 ms has expired.
        let mut status = Status::ok("");
        for _ in 0..100 {
            let retry = client.pay(with_key(payment("a"), &key("k"))).await;
            status = retry.expect_err("an unknown outcome");
            if status.code() != Code::Unavailable {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(reason(&status), "IDEMPOTENCY_OUTCOME_UNKNOWN");
        assert_eq!(pushback(&status), Some("-1"));
        assert_eq!(service.effects.count() - before, 1);
    }
}

// S-889
#[tokio::test]
async fn unrecorded_response_is_failed_precondition() {
    let service = Scripted::paying();
    let (_, mut client) = start(layer().with_response_limit(4), &service).await;
    client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect("paid");
    let status = client.pay(with_key(payment("a"), &key("k"))).await;
    let status = status.expect_err("not recorded");
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(reason(&status), "IDEMPOTENCY_RESPONSE_NOT_RETAINED");
    assert_eq!(service.effects.count(), 1);
}

// S-890
#[tokio::test]
async fn limits_and_shutdown_have_codes_of_grpc() {
    let service = Scripted::paying();
    let (_, mut client) = start(layer().with_max_in_flight(0), &service).await;
    let status = client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect_err("full");
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.get_error_details().retry_info().is_some());

    let (_, mut client) = start(layer().with_request_limit(6), &service).await;
    let status = client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect_err("large");
    assert_eq!(
        (status.code(), pushback(&status)),
        (Code::ResourceExhausted, Some("-1"))
    );

    let layer = layer();
    layer.drain(Duration::ZERO).await;
    let (_, mut client) = start(layer, &service).await;
    let status = client
        .pay(with_key(payment("a"), &key("k")))
        .await
        .expect_err("draining");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(reason(&status), "IDEMPOTENCY_DRAINING");
    assert_eq!(service.effects.count(), 0);
}

#[tokio::test]
async fn optional_key_may_be_missing() {
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods);
    let service = Scripted::paying();
    let (_, mut client) = start(layer, &service).await;
    for _ in 0..2 {
        client.pay(Request::new(payment("a"))).await.expect("paid");
    }
    assert_eq!(service.effects.count(), 2);
    for _ in 0..2 {
        let paid = client
            .pay(with_key(payment("a"), &key("k")))
            .await
            .expect("paid");
        assert_eq!(paid.get_ref().id, 3);
    }
}

/// The compressed message is another message than the plain one.
// S-896
#[tokio::test]
async fn compressed_call_is_replayed() {
    let service = Scripted::paying();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("a bound socket");
    let server = PaymentsServer::new(service.clone())
        .accept_compressed(CompressionEncoding::Gzip)
        .send_compressed(CompressionEncoding::Gzip);
    let router = Server::builder().layer(layer()).add_service(server);
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    let mut plain = connect(addr).expect("a valid address");
    let mut client = plain
        .clone()
        .send_compressed(CompressionEncoding::Gzip)
        .accept_compressed(CompressionEncoding::Gzip);
    for is_replay in [false, true] {
        let paid = client.pay(with_key(payment("a"), &key("k"))).await;
        let paid = paid.expect("paid");
        assert_eq!(paid.get_ref().id, 1);
        assert_eq!(
            paid.metadata().get("grpc-encoding").expect("compressed"),
            "gzip"
        );
        assert_eq!(
            paid.metadata().contains_key("idempotent-replayed"),
            is_replay
        );
    }
    let status = plain.pay(with_key(payment("a"), &key("k"))).await;
    let status = status.expect_err("another message");
    assert_eq!(reason(&status), "IDEMPOTENCY_KEY_REUSED");
    assert_eq!(service.effects.count(), 1);
}

#[tokio::test]
async fn overflowing_amount_is_refused() {
    let addr = serve(layer(), Accounts::default()).await;
    let mut client = connect(addr.expect("a free port")).expect("a valid address");
    let payment = |amount| PayRequest {
        account: "a".to_owned(),
        amount,
    };
    let paid = client.pay(with_key(payment(30), &key("k"))).await;
    paid.expect("paid");
    for is_replay in [false, true] {
        // With the first payment, the sum is 0 in 64 bits.
        let refused = client.pay(with_key(payment(u64::MAX - 29), &key("l")));
        let status = refused.await.expect_err("not enough money");
        assert_eq!(status.code(), Code::FailedPrecondition);
        let metadata = status.metadata();
        assert_eq!(metadata.contains_key("idempotent-replayed"), is_replay);
    }
    let account = "a".to_owned();
    let balance = client.get_balance(BalanceRequest { account }).await;
    assert_eq!(balance.expect("a balance").get_ref().amount, 70);
}

/// tonic copies the extensions of requests and responses.
#[tokio::test]
async fn handler_has_lease_and_may_need_attention() {
    let service = Scripted::new(async |id, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease");
        assert!(lease.is_held() && !lease.is_takeover());
        let mut res = Response::new(payments_grpc::messages::Payment { id, amount: 5 });
        let attention = NeedsAttention::new("refund-failed");
        res.extensions_mut().insert(attention);
        Ok(res)
    });
    let (_, mut client) = start(layer(), &service).await;
    let paid = client.pay(with_key(payment("a"), &key("k"))).await;
    paid.expect("paid");
    let retry = client.pay(with_key(payment("a"), &key("k"))).await;
    let status = retry.expect_err("it needs attention");
    assert_eq!(status.code(), Code::FailedPrecondition);
    let details = status.get_error_details();
    let info = details.error_info().expect("an ErrorInfo");
    assert_eq!(info.metadata["reason"], "refund-failed");
    assert_eq!(service.effects.count(), 1);
}
