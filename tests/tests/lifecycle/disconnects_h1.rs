//! Clients on HTTP/1 sockets that disconnect, stall or send invalid bytes.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::time::Duration;

use http::StatusCode;
use tests::{
    barrier::eventually,
    held_server::{HeldServer, PHASES, Phase},
    on_both_runtimes,
    wire::{Disconnect, H1, poll_briefly, post_bytes},
};
use tower_idempotency::{FingerprintBy, IdempotencyLayer, MemoryStore};

on_both_runtimes! {
    // F-001, S-142
    closed_connection_executes_once,
    // F-001
    reset_connection_executes_once,
    // F-001
    half_closed_connection_executes_once,
    // F-006
    spawned_work_executes_once_after_disconnect,
    // F-008
    disconnect_with_unread_response_executes_once,
    // F-007
    trailing_bytes_change_nothing,
    // F-018, S-146
    outer_timeout_executes_once,
    // F-017
    panic_releases_key_and_closes_own_connection,
    // F-010
    aborted_body_has_no_effect,
    // F-012
    stalled_body_is_refused,
    // F-014
    waiting_client_gets_100_continue,
    // F-014
    oversized_length_is_refused_before_body,
    // F-014
    unsent_body_has_no_effect,
    // F-080
    body_aborted_in_handler_is_not_recorded,
    // F-007
    unread_aborted_body_executes_once,
    // F-015
    unread_body_is_not_requested,
}

async fn leaves(path: &'static str, leave: Disconnect) {
    for phase in PHASES {
        let held = HeldServer::hold_in(phase).await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(post_bytes(path, "k", "{}")).await;
        held.arrival(phase).await;
        client.disconnect(leave);
        held.wait_for_departure().await;
        held.assert_in_progress(path, "k", "{}").await;
        held.assert_executed_once(path, "k", "{}").await;
    }
}

async fn closed_connection_executes_once() {
    leaves("/orders", Disconnect::Close).await;
    leaves("/read", Disconnect::Close).await;
}

async fn reset_connection_executes_once() {
    leaves("/orders", Disconnect::Reset).await;
    leaves("/read", Disconnect::Reset).await;
}

async fn half_closed_connection_executes_once() {
    for phase in PHASES {
        let held = HeldServer::hold_in(phase).await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        held.arrival(phase).await;
        client.half_close().await;
        held.wait_for_departure().await;
        held.assert_in_progress("/orders", "k", "{}").await;
        held.assert_executed_once("/orders", "k", "{}").await;
        assert_eq!(
            client.response().await,
            None,
            "hyper closes half-closed connections"
        );
    }
}

// The work is in a task that the handler spawned.
async fn spawned_work_executes_once_after_disconnect() {
    leaves("/spawned", Disconnect::Close).await;
    leaves("/spawned", Disconnect::Reset).await;
}

async fn disconnect_with_unread_response_executes_once() {
    for leave in [Disconnect::Close, Disconnect::Reset] {
        let held = HeldServer::open().await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        eventually("it executes", || held.finished.count() == 1).await;
        client.disconnect(leave);
        held.assert_executed_once("/orders", "k", "{}").await;
    }
}

// The server cannot detect that this client disconnected.
async fn trailing_bytes_change_nothing() {
    for phase in PHASES {
        for leave in [Disconnect::Close, Disconnect::Reset] {
            let held = HeldServer::hold_in(phase).await;
            let mut client = H1::connect(held.server.addr()).await;
            let mut bytes = post_bytes("/orders", "k", "{}");
            bytes.extend_from_slice(b"POST /orders HTTP/1.1\r\nhost: te");
            client.send(bytes).await;
            held.arrival(phase).await;
            client.disconnect(leave);
            held.assert_executed_once("/orders", "k", "{}").await;
        }
    }
    // Two complete requests in one write are executed in order.
    let held = HeldServer::open().await;
    let mut client = H1::connect(held.server.addr()).await;
    let mut bytes = post_bytes("/orders", "k", "{}");
    bytes.extend(post_bytes("/orders", "k", "{}"));
    client.send(bytes).await;
    let (first, second) = (
        client.response().await.unwrap(),
        client.response().await.unwrap(),
    );
    assert_eq!((first.is_replay(), second.is_replay()), (false, true));
    assert_eq!(first.body, second.body);
    held.assert_executed_once("/orders", "k", "{}").await;
}

async fn outer_timeout_executes_once() {
    for phase in PHASES {
        let (held, deadline) = HeldServer::with_deadline(phase).await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        held.arrival(phase).await;
        deadline.release(1);
        let response = client.response().await.unwrap();
        assert_eq!(response.status, StatusCode::REQUEST_TIMEOUT);
        held.assert_executed_once("/orders", "k", "{}").await;
    }
}

async fn panic_releases_key_and_closes_own_connection() {
    let held = HeldServer::open().await;
    let addr = held.server.addr();
    let mut other = H1::connect(addr).await;
    let mut client = H1::connect(addr).await;
    client.send(post_bytes("/panics-once", "k", "{}")).await;
    assert_eq!(client.response().await, None, "the connection is closed");
    held.wait_until_idle().await;
    assert_eq!(held.begun.count(), 1);

    other.send(post_bytes("/panics-once", "k", "{}")).await;
    let retry = other.response().await.unwrap();
    assert_eq!(
        (retry.status, retry.is_replay()),
        (StatusCode::CREATED, false)
    );
    assert_eq!(retry.text(), "execution 2");
    other.send(post_bytes("/panics-once", "k", "{}")).await;
    let again = other.response().await.unwrap();
    assert!(again.is_replay());
    assert_eq!(again.body, retry.body);
    assert_eq!(held.begun.count(), 2);
}

const PARTIAL: &str =
    "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\n01234";

const PARTIAL_CHUNKED: &str = "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\n\
     transfer-encoding: chunked\r\n\r\n5\r\n01234\r\n";

async fn aborted_body_has_no_effect() {
    for partial in [PARTIAL, PARTIAL_CHUNKED] {
        for leave in [Some(Disconnect::Close), Some(Disconnect::Reset), None] {
            let held = HeldServer::open().await;
            let mut client = H1::connect(held.server.addr()).await;
            client.send(partial).await;
            eventually("the body is read", || held.layer.in_flight() == 1).await;
            if let Some(leave) = leave {
                client.disconnect(leave);
            } else {
                client.half_close().await;
            }
            held.wait_until_idle().await;
            held.assert_untouched("/orders", "k", "0123456789").await;
        }
    }
}

async fn stalled_body_is_refused() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let held = HeldServer::with_layer(layer.with_body_timeout(Duration::from_millis(50))).await;
    for partial in [PARTIAL, PARTIAL_CHUNKED] {
        let mut client = H1::connect(held.server.addr()).await;
        client.send(partial).await;
        let response = client.response().await.unwrap();
        assert_eq!(response.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(response.code(), "body-timeout");
    }
    held.assert_untouched("/orders", "k", "0123456789").await;
}

fn expecting(length: usize) -> String {
    format!(
        "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\n\
         expect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
    )
}

async fn waiting_client_gets_100_continue() {
    let held = HeldServer::open().await;
    let mut client = H1::connect(held.server.addr()).await;
    client.send(expecting(10)).await;
    let go_on = client.response().await.unwrap();
    assert_eq!(go_on.status, StatusCode::CONTINUE);
    assert_eq!(held.begun.count(), 0);
    client.send("0123456789").await;
    let response = client.response().await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    held.assert_executed_once("/orders", "k", "0123456789")
        .await;
}

async fn oversized_length_is_refused_before_body() {
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_request_limit(10);
    let held = HeldServer::with_layer(layer).await;
    let mut client = H1::connect(held.server.addr()).await;
    client.send(expecting(11)).await;
    let response = client.response().await.unwrap();
    assert_eq!(
        response.status,
        StatusCode::PAYLOAD_TOO_LARGE,
        "and not 100"
    );
    assert_eq!(response.code(), "body-too-large");
    held.assert_untouched("/orders", "k", "0123456789").await;
}

async fn unsent_body_has_no_effect() {
    for leave in [Disconnect::Close, Disconnect::Reset] {
        let held = HeldServer::open().await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(expecting(10)).await;
        assert_eq!(
            client.response().await.unwrap().status,
            StatusCode::CONTINUE
        );
        client.disconnect(leave);
        held.assert_untouched("/orders", "k", "0123456789").await;
    }
}

// The layer does not read this body, so a retry must not receive the handler's response to an incomplete body.
async fn body_aborted_in_handler_is_not_recorded() {
    for leave in [Disconnect::Close, Disconnect::Reset] {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let held = HeldServer::with_layer(layer.with_fingerprint(FingerprintBy::head_only())).await;
        let mut client = H1::connect(held.server.addr()).await;
        client.send(PARTIAL.replace("/orders", "/read")).await;
        eventually("the body is read", || held.layer.in_flight() == 1).await;
        client.disconnect(leave);
        held.assert_untouched("/read", "k", "0123456789").await;
    }
}

/// Creates a held whose layer leaves bodies to the handler.
async fn unread(phase: Phase) -> HeldServer {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let layer = layer.with_fingerprint(FingerprintBy::head_only());
    HeldServer::start(layer, &[phase], |app| app).await
}

// An unread body prevents hyper from detecting that this client has disconnected.
async fn unread_aborted_body_executes_once() {
    for path in ["/orders", "/holds", "/spawned"] {
        for partial in [PARTIAL, PARTIAL_CHUNKED] {
            for phase in PHASES {
                for leave in [Disconnect::Close, Disconnect::Reset] {
                    let held = unread(phase).await;
                    let mut client = H1::connect(held.server.addr()).await;
                    client.send(partial.replace("/orders", path)).await;
                    held.arrival(phase).await;
                    client.disconnect(leave);
                    assert!(
                        poll_briefly(held.wait_for_departure()).await.is_none(),
                        "the disconnect is noticed"
                    );
                    held.assert_executed_once(path, "k", "0123456789").await;
                }
            }
        }
    }
}

async fn unread_body_is_not_requested() {
    for path in ["/orders", "/holds"] {
        for phase in PHASES {
            for leave in [None, Some(Disconnect::Close), Some(Disconnect::Reset)] {
                let held = unread(phase).await;
                let mut client = H1::connect(held.server.addr()).await;
                client.send(expecting(10).replace("/orders", path)).await;
                held.arrival(phase).await;
                if let Some(leave) = leave {
                    client.disconnect(leave);
                } else {
                    assert_eq!(
                        poll_briefly(client.response()).await,
                        None,
                        "no client asks for it"
                    );
                    held.open_barriers();
                    let response = client.response().await.unwrap();
                    assert_eq!(response.status, StatusCode::CREATED, "and not 100");
                    assert_eq!(response.text(), "execution 1");
                }
                held.assert_executed_once(path, "k", "0123456789").await;
            }
        }
    }
}
