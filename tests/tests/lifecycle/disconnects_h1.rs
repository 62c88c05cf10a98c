//! Clients on HTTP/1 sockets that leave, stall or send what they should not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::time::Duration;

use http::StatusCode;
use tests::{
    gate::eventually,
    on_both_runtimes,
    stage::{PHASES, Phase, Stage},
    wire::{H1, Leave, post_bytes, soon},
};
use tower_idempotency::{FingerprintBy, IdempotencyLayer, MemoryStore};

on_both_runtimes! {
    // F-001, S-142
    a_client_that_closes_costs_one_effect_and_its_retry_is_told,
    // F-001
    a_client_that_resets_costs_one_effect_and_its_retry_is_told,
    // F-001
    a_client_that_half_closes_costs_one_effect_and_its_retry_is_told,
    // F-006
    a_client_that_leaves_work_in_a_task_behind_costs_one_effect_and_its_retry_is_told,
    // F-008
    a_client_that_leaves_with_its_answer_unread_costs_one_effect,
    // F-007
    bytes_behind_the_request_change_nothing,
    // F-018, S-146
    a_timeout_outside_the_layer_costs_one_effect_and_the_retry_is_told,
    // F-017
    a_handler_that_panics_frees_the_key_and_closes_its_connection_only,
    // F-010
    a_body_that_breaks_off_has_no_effect_and_leaves_the_key_alone,
    // F-012
    a_body_that_stalls_is_refused_and_leaves_the_key_alone,
    // F-014
    a_client_that_waits_for_100_continue_gets_it,
    // F-014
    a_client_that_announces_too_much_is_refused_before_it_sends_any,
    // F-014
    a_client_that_never_sends_the_body_it_was_asked_for_has_no_effect,
    // F-080
    a_body_that_breaks_off_in_the_handlers_hands_is_not_recorded,
    // F-007
    a_body_that_breaks_off_and_that_nobody_reads_costs_one_effect_and_its_retry_is_told,
    // F-015
    a_body_that_nobody_reads_is_not_asked_for_and_costs_one_effect,
}

async fn leaves(path: &'static str, leave: Leave) {
    for phase in PHASES {
        let stage = Stage::held(phase).await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(post_bytes(path, "k", "{}")).await;
        stage.arrival(phase).await;
        client.leave(leave);
        stage.left().await;
        stage.assert_executed_once(path, "k", "{}").await;
    }
}

// fm 1, fm 3
async fn a_client_that_closes_costs_one_effect_and_its_retry_is_told() {
    leaves("/orders", Leave::Close).await;
    leaves("/read", Leave::Close).await;
}

// fm 1
async fn a_client_that_resets_costs_one_effect_and_its_retry_is_told() {
    leaves("/orders", Leave::Reset).await;
    leaves("/read", Leave::Reset).await;
}

// fm 4
async fn a_client_that_half_closes_costs_one_effect_and_its_retry_is_told() {
    for phase in PHASES {
        let stage = Stage::held(phase).await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        stage.arrival(phase).await;
        client.half_close().await;
        stage.left().await;
        stage.assert_executed_once("/orders", "k", "{}").await;
        assert_eq!(client.answer().await, None, "as hyper treats half-closers");
    }
}

// fm 1: the work is in a task that the handler spawned
async fn a_client_that_leaves_work_in_a_task_behind_costs_one_effect_and_its_retry_is_told() {
    leaves("/spawned", Leave::Close).await;
    leaves("/spawned", Leave::Reset).await;
}

// fm 18
async fn a_client_that_leaves_with_its_answer_unread_costs_one_effect() {
    for leave in [Leave::Close, Leave::Reset] {
        let stage = Stage::open().await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        eventually("it executes", || stage.finished.count() == 1).await;
        client.leave(leave);
        stage.assert_executed_once("/orders", "k", "{}").await;
    }
}

// fm 3: the server does not see that this client left
async fn bytes_behind_the_request_change_nothing() {
    for phase in PHASES {
        for leave in [Leave::Close, Leave::Reset] {
            let stage = Stage::held(phase).await;
            let mut client = H1::connect(stage.server.addr()).await;
            let mut bytes = post_bytes("/orders", "k", "{}");
            bytes.extend_from_slice(b"POST /orders HTTP/1.1\r\nhost: te");
            client.send(bytes).await;
            stage.arrival(phase).await;
            client.leave(leave);
            stage.assert_executed_once("/orders", "k", "{}").await;
        }
    }
    // And two whole requests in one go are two, in order.
    let stage = Stage::open().await;
    let mut client = H1::connect(stage.server.addr()).await;
    let mut bytes = post_bytes("/orders", "k", "{}");
    bytes.extend(post_bytes("/orders", "k", "{}"));
    client.send(bytes).await;
    let (first, second) = (
        client.answer().await.unwrap(),
        client.answer().await.unwrap(),
    );
    assert_eq!((first.is_replay(), second.is_replay()), (false, true));
    assert_eq!(first.body, second.body);
    stage.assert_executed_once("/orders", "k", "{}").await;
}

// fm 5
async fn a_timeout_outside_the_layer_costs_one_effect_and_the_retry_is_told() {
    for phase in PHASES {
        let (stage, deadline) = Stage::with_deadline(phase).await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(post_bytes("/orders", "k", "{}")).await;
        stage.arrival(phase).await;
        deadline.let_through(1);
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status, StatusCode::REQUEST_TIMEOUT);
        stage.assert_executed_once("/orders", "k", "{}").await;
    }
}

// fm 7
async fn a_handler_that_panics_frees_the_key_and_closes_its_connection_only() {
    let stage = Stage::open().await;
    let addr = stage.server.addr();
    let mut other = H1::connect(addr).await;
    let mut client = H1::connect(addr).await;
    client.send(post_bytes("/panics-once", "k", "{}")).await;
    assert_eq!(client.answer().await, None, "the connection is closed");
    stage.settle().await;
    assert_eq!(stage.begun.count(), 1);

    other.send(post_bytes("/panics-once", "k", "{}")).await;
    let retry = other.answer().await.unwrap();
    assert_eq!(
        (retry.status, retry.is_replay()),
        (StatusCode::CREATED, false)
    );
    assert_eq!(retry.text(), "execution 2");
    other.send(post_bytes("/panics-once", "k", "{}")).await;
    let again = other.answer().await.unwrap();
    assert!(again.is_replay());
    assert_eq!(again.body, retry.body);
    assert_eq!(stage.begun.count(), 2);
}

const PARTIAL: &str =
    "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\n01234";

const PARTIAL_CHUNKED: &str = "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\n\
     transfer-encoding: chunked\r\n\r\n5\r\n01234\r\n";

// fm 76
async fn a_body_that_breaks_off_has_no_effect_and_leaves_the_key_alone() {
    for partial in [PARTIAL, PARTIAL_CHUNKED] {
        for leave in [Some(Leave::Close), Some(Leave::Reset), None] {
            let stage = Stage::open().await;
            let mut client = H1::connect(stage.server.addr()).await;
            client.send(partial).await;
            eventually("it is read", || stage.layer.in_flight() == 1).await;
            if let Some(leave) = leave {
                client.leave(leave);
            } else {
                client.half_close().await;
            }
            stage.settle().await;
            stage.assert_untouched("/orders", "k", "0123456789").await;
        }
    }
}

// fm 74, behaviours K
async fn a_body_that_stalls_is_refused_and_leaves_the_key_alone() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let stage = Stage::with(layer.with_body_timeout(Duration::from_millis(50))).await;
    for partial in [PARTIAL, PARTIAL_CHUNKED] {
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(partial).await;
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(answer.code(), "body-timeout");
    }
    stage.assert_untouched("/orders", "k", "0123456789").await;
}

fn expecting(length: usize) -> String {
    format!(
        "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\n\
         expect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
    )
}

// fm 77
async fn a_client_that_waits_for_100_continue_gets_it() {
    let stage = Stage::open().await;
    let mut client = H1::connect(stage.server.addr()).await;
    client.send(expecting(10)).await;
    let go_on = client.answer().await.unwrap();
    assert_eq!(go_on.status, StatusCode::CONTINUE);
    assert_eq!(stage.begun.count(), 0);
    client.send("0123456789").await;
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED);
    stage
        .assert_executed_once("/orders", "k", "0123456789")
        .await;
}

// fm 77
async fn a_client_that_announces_too_much_is_refused_before_it_sends_any() {
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_request_limit(10);
    let stage = Stage::with(layer).await;
    let mut client = H1::connect(stage.server.addr()).await;
    client.send(expecting(11)).await;
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE, "and not 100");
    assert_eq!(answer.code(), "body-too-large");
    stage.assert_untouched("/orders", "k", "0123456789").await;
}

// fm 3, fm 77
async fn a_client_that_never_sends_the_body_it_was_asked_for_has_no_effect() {
    for leave in [Leave::Close, Leave::Reset] {
        let stage = Stage::open().await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(expecting(10)).await;
        assert_eq!(client.answer().await.unwrap().status, StatusCode::CONTINUE);
        client.leave(leave);
        stage.assert_untouched("/orders", "k", "0123456789").await;
    }
}

// The layer does not read this body, so a retry must not receive the handler's response to an incomplete body.
async fn a_body_that_breaks_off_in_the_handlers_hands_is_not_recorded() {
    for leave in [Leave::Close, Leave::Reset] {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let stage = Stage::with(layer.with_fingerprint(FingerprintBy::head_only())).await;
        let mut client = H1::connect(stage.server.addr()).await;
        client.send(PARTIAL.replace("/orders", "/read")).await;
        eventually("it is read", || stage.layer.in_flight() == 1).await;
        client.leave(leave);
        stage.assert_untouched("/read", "k", "0123456789").await;
    }
}

/// With a layer that leaves bodies to the handler.
async fn unread(phase: Phase) -> Stage {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let layer = layer.with_fingerprint(FingerprintBy::head_only());
    Stage::set(layer, &[phase], |app| app).await
}

// fm 3: an unread body prevents hyper from detecting that this client has disconnected
async fn a_body_that_breaks_off_and_that_nobody_reads_costs_one_effect_and_its_retry_is_told() {
    for path in ["/orders", "/holds", "/spawned"] {
        for partial in [PARTIAL, PARTIAL_CHUNKED] {
            for phase in PHASES {
                for leave in [Leave::Close, Leave::Reset] {
                    let stage = unread(phase).await;
                    let mut client = H1::connect(stage.server.addr()).await;
                    client.send(partial.replace("/orders", path)).await;
                    stage.arrival(phase).await;
                    client.leave(leave);
                    assert!(soon(stage.left()).await.is_none(), "it is noticed");
                    stage.assert_executed_once(path, "k", "0123456789").await;
                }
            }
        }
    }
}

// fm 3, fm 77
async fn a_body_that_nobody_reads_is_not_asked_for_and_costs_one_effect() {
    for path in ["/orders", "/holds"] {
        for phase in PHASES {
            for leave in [None, Some(Leave::Close), Some(Leave::Reset)] {
                let stage = unread(phase).await;
                let mut client = H1::connect(stage.server.addr()).await;
                client.send(expecting(10).replace("/orders", path)).await;
                stage.arrival(phase).await;
                if let Some(leave) = leave {
                    client.leave(leave);
                } else {
                    assert_eq!(soon(client.answer()).await, None, "nobody asks for it");
                    stage.go_on();
                    let answer = client.answer().await.unwrap();
                    assert_eq!(answer.status, StatusCode::CREATED, "and not 100");
                    assert_eq!(answer.text(), "execution 1");
                }
                stage.assert_executed_once(path, "k", "0123456789").await;
            }
        }
    }
}
