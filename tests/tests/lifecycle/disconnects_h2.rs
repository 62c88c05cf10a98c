//! Clients on HTTP/2 connections that reset their streams, lose their connections or stop in the middle.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::time::Duration;

use h2::Reason;
use http::StatusCode;
use tests::{
    barrier::eventually,
    held_server::{HeldServer, PHASES},
    on_both_runtimes,
    wire::H2,
};
use tower_idempotency::{FingerprintBy, IdempotencyLayer, MemoryStore};

on_both_runtimes! {
    // F-002, F-006
    reset_stream_executes_once,
    // F-002
    lost_connection_executes_each_stream_once,
    // F-008
    stream_reset_with_unread_response_executes_once,
    // F-002, S-142
    retry_on_same_connection_gets_reset_response,
    // F-018, S-146
    outer_timeout_executes_once,
    // F-017
    panic_releases_key_and_resets_own_stream,
    // F-010
    aborted_body_has_no_effect,
    // F-011, S-076
    body_cut_off_without_error_has_no_effect,
    // F-011
    incomplete_body_in_handler_is_known_by_length,
    // F-012
    stalled_body_is_refused,
    // F-007
    unread_aborted_body_executes_once,
}

async fn reset_stream_executes_once() {
    // The work of the last one runs in a separate task.
    for path in ["/orders", "/read", "/spawned"] {
        for phase in PHASES {
            let held = HeldServer::hold_in(phase).await;
            let client = H2::connect(held.server.addr()).await;
            let stream = client.post(path, "k", "{}").await;
            held.arrival(phase).await;
            stream.reset();
            held.wait_for_departure().await;
            held.assert_executed_once(path, "k", "{}").await;
        }
    }
}

async fn lost_connection_executes_each_stream_once() {
    const STREAMS: usize = 5;
    for phase in PHASES {
        let held = HeldServer::hold_in(phase).await;
        let client = H2::connect(held.server.addr()).await;
        let mut streams = Vec::new();
        for stream in 0..STREAMS {
            streams.push(client.post("/orders", &format!("k{stream}"), "{}").await);
            held.arrival(phase).await;
        }
        client.lose().await;
        for _ in 0..STREAMS {
            held.wait_for_departure().await;
        }
        held.open_barriers();
        held.wait_until_idle().await;
        assert_eq!(held.finished.count(), STREAMS as u64);

        let client = H2::connect(held.server.addr()).await;
        for stream in 0..STREAMS {
            let key = format!("k{stream}");
            let retry = client.post("/orders", &key, "{}").await.response().await;
            let retry = retry.unwrap();
            assert_eq!(retry.status, StatusCode::CREATED);
            assert!(retry.is_replay());
            let again = client.post("/orders", &key, "{}").await.response().await;
            assert_eq!(retry, again.unwrap());
        }
        assert_eq!(held.begun.count(), STREAMS as u64);
    }
}

async fn stream_reset_with_unread_response_executes_once() {
    let held = HeldServer::open().await;
    let client = H2::connect(held.server.addr()).await;
    let stream = client.post("/orders", "k", "{}").await;
    eventually("it executes", || held.finished.count() == 1).await;
    stream.reset();
    held.assert_executed_once("/orders", "k", "{}").await;
}

async fn retry_on_same_connection_gets_reset_response() {
    for phase in PHASES {
        let held = HeldServer::hold_in(phase).await;
        let client = H2::connect(held.server.addr()).await;
        let stream = client.post("/orders", "k", "{}").await;
        held.arrival(phase).await;
        stream.reset();
        held.wait_for_departure().await;
        let early = client.post("/orders", "k", "{}").await.response().await;
        let early = early.unwrap();
        assert_eq!(early.status, StatusCode::CONFLICT);
        assert_eq!(early.code(), "in-progress");
        held.assert_executed_once("/orders", "k", "{}").await;
        let late = client.post("/orders", "k", "{}").await.response().await;
        assert!(late.unwrap().is_replay());
    }
}

async fn outer_timeout_executes_once() {
    for phase in PHASES {
        let (held, deadline) = HeldServer::with_deadline(phase).await;
        let client = H2::connect(held.server.addr()).await;
        let stream = client.post("/orders", "k", "{}").await;
        held.arrival(phase).await;
        deadline.release(1);
        let response = stream.response().await;
        assert_eq!(response.unwrap().status, StatusCode::REQUEST_TIMEOUT);
        held.assert_executed_once("/orders", "k", "{}").await;
    }
}

async fn panic_releases_key_and_resets_own_stream() {
    let held = HeldServer::open().await;
    let client = H2::connect(held.server.addr()).await;
    let panicked = client
        .post("/panics-once", "k", "{}")
        .await
        .response()
        .await;
    assert!(panicked.unwrap_err().is_reset(), "the stream is reset");
    held.wait_until_idle().await;
    assert_eq!(held.begun.count(), 1);

    let retry = client
        .post("/panics-once", "k", "{}")
        .await
        .response()
        .await;
    let retry = retry.expect("the connection is fine");
    assert_eq!(
        (retry.status, retry.is_replay()),
        (StatusCode::CREATED, false)
    );
    let again = client
        .post("/panics-once", "k", "{}")
        .await
        .response()
        .await;
    let again = again.unwrap();
    assert!(again.is_replay());
    assert_eq!(again.body, retry.body);
    assert_eq!(held.begun.count(), 2);
}

async fn aborted_body_has_no_effect() {
    for lost in [false, true] {
        let held = HeldServer::open().await;
        let client = H2::connect(held.server.addr()).await;
        let mut stream = client.start("/orders", "k").await;
        stream.send("01234", false);
        eventually("the body is read", || held.layer.in_flight() == 1).await;
        if lost {
            client.lose().await;
        } else {
            stream.reset();
        }
        held.wait_until_idle().await;
        held.assert_untouched("/orders", "k", "0123456789").await;
    }
}

// Hyper treats a stream that is reset with NO_ERROR as ended, so an incomplete body looks complete. A proxy does
// this to its server if its own client disconnects.
async fn body_cut_off_without_error_has_no_effect() {
    for length in [None, Some(10)] {
        for sent in ["", "01234"] {
            let held = HeldServer::open().await;
            let client = H2::connect(held.server.addr()).await;
            let mut stream = client.start_announcing("/orders", "k", length).await;
            stream.send(sent, false);
            eventually("the body is read", || held.layer.in_flight() == 1).await;
            stream.reset_for(Reason::NO_ERROR);
            held.wait_until_idle().await;
            held.assert_untouched("/orders", "k", "0123456789").await;
        }
    }
}

// The layer does not read this body, and the handler believes that it is complete. A retry must not receive the
// handler's rejection.
async fn incomplete_body_in_handler_is_known_by_length() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let held = HeldServer::with_layer(layer.with_fingerprint(FingerprintBy::head_only())).await;
    let client = H2::connect(held.server.addr()).await;
    let mut stream = client.start_announcing("/checks", "k", Some(10)).await;
    stream.send("01234", false);
    eventually("the body is read", || held.layer.in_flight() == 1).await;
    stream.reset_for(Reason::NO_ERROR);
    held.wait_until_idle().await;
    held.assert_untouched("/checks", "k", "0123456789").await;
}

async fn stalled_body_is_refused() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let held = HeldServer::with_layer(layer.with_body_timeout(Duration::from_millis(50))).await;
    let client = H2::connect(held.server.addr()).await;
    let mut stream = client.start("/orders", "k").await;
    stream.send("01234", false);
    let response = stream.response().await.unwrap();
    assert_eq!(response.status, StatusCode::REQUEST_TIMEOUT);
    assert_eq!(response.code(), "body-timeout");
    held.assert_untouched("/orders", "k", "0123456789").await;
}

async fn unread_aborted_body_executes_once() {
    for path in ["/orders", "/holds", "/spawned"] {
        for phase in PHASES {
            for lost in [false, true] {
                let layer = IdempotencyLayer::new(MemoryStore::new());
                let layer = layer.with_fingerprint(FingerprintBy::head_only());
                let held = HeldServer::start(layer, &[phase], |app| app).await;
                let client = H2::connect(held.server.addr()).await;
                let mut stream = client.start(path, "k").await;
                stream.send("01234", false);
                held.arrival(phase).await;
                if lost {
                    client.lose().await;
                } else {
                    stream.reset();
                }
                held.wait_for_departure().await;
                held.assert_executed_once(path, "k", "0123456789").await;
            }
        }
    }
}
