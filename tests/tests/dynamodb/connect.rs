//! Stores that are opened by a URL.

use std::{net::SocketAddr, time::Duration};

use tests::{
    dynamodb::Endpoint,
    servers::{
        dynamodb::{StandIn, shared, start_refusing},
        free_port,
    },
};
use tower_idempotency::{
    inspect::{Inspect, State},
    store::{CheckErrorKind, Store},
};
use tower_idempotency_dynamodb::{DynamoDbErrorKind, DynamoDbOptions, DynamoDbStore};

use crate::listing::{claim, hold, pages};

fn url(table: &str, address: SocketAddr) -> String {
    format!("dynamodb://{table}?endpoint=http://{address}")
}

/// A long timeout, so that no call fails on a busy machine.
fn options() -> DynamoDbOptions {
    DynamoDbOptions::new().with_timeout(Duration::from_secs(20))
}

#[tokio::test]
async fn url_opens_and_creates_table() {
    let server = shared(StandIn::Dynoxide);
    let table = server.new_table();
    let url = url(&table, server.address());
    let created = DynamoDbStore::connect(&url).await;
    let created = created.expect("the server runs");
    let can_list = |state: &State| created.abilities().can_list(*state);
    let states: Vec<_> = State::ALL.iter().map(can_list).collect();
    assert_eq!(states, [true, true, true, false, false]);

    // The table exists.
    let store = options().connect(&url).await.expect("the server runs");
    store.check().await.expect("the server runs");
    hold(&store, &claim(1)).await;
    let entries = pages(&store, State::InProgress, 10).await.concat();
    assert_eq!(entries.len(), 1);
}

#[tokio::test]
async fn parameters_of_url_replace_settings() {
    let server = shared(StandIn::Dynoxide);
    let url = url(&server.new_table(), server.address());
    let url = format!("{url}&skew=5s&shards=2&completed-index=true");
    let store = options().with_index_shards(0).connect(&url).await;
    let store = store.expect("the server runs");
    assert!(store.abilities().can_list(State::Completed));
    let debug = format!("{store:?}");
    for setting in ["shards: 2", "skew: 5s", "timeout: 20s"] {
        assert!(debug.contains(setting), "{debug}");
    }
}

#[tokio::test]
async fn store_from_url_makes_no_call() {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let url = url(&server.new_table(), endpoint.address());
    let store = options().store_from_url(&url).await.expect("a valid URL");
    assert!(endpoint.operations().is_empty());
    let error = store.check().await.expect_err("there is no table");
    assert_eq!(error.kind(), CheckErrorKind::Incomplete);
    assert!(error.to_string().contains("is missing"), "{error}");
}

#[tokio::test]
async fn refused_urls_have_these_texts() {
    let mut lines = Vec::new();
    for url in [
        "postgres://app:hush@host/app",
        "dynamodb://app:hush@keys",
        "dynamodb://keys?endpoint=https://app:hush@host",
        "dynamodb://keys?skew=hush",
        "dynamodb://keys?shards=hush",
        "dynamodb://keys?completed-index=hush",
        "dynamodb://keys?hush=hush",
    ] {
        let error = DynamoDbStore::connect(url).await.expect_err(url);
        assert!(!format!("{error:?}").contains("hush"), "{error:?}");
        lines.push(format!("{:?}: {error}", error.kind()));
    }
    insta::assert_snapshot!(lines.join("\n"), @r"
    Address: expected a table, as in dynamodb://TABLE?endpoint=URL
    Address: expected a table, as in dynamodb://TABLE?endpoint=URL
    Address: expected an HTTP or HTTPS URL without credentials after endpoint=
    Address: expected a duration after skew=, as in skew=500ms
    Address: expected a number up to 65535 after shards=, as in shards=32
    Address: expected true or false after completed-index=
    Address: expected endpoint=URL, skew=DURATION, shards=N or completed-index=BOOL after the ?
    ");
}

#[tokio::test]
async fn unusable_service_has_error_without_secrets() {
    let unused = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let error = DynamoDbStore::connect(&url("keys", unused)).await;
    let error = error.expect_err("no server");
    assert_eq!(error.kind(), DynamoDbErrorKind::Unreachable);
    let text = error.to_string();
    assert!(text.starts_with("cannot reach DynamoDB: "), "{text}");

    let message = "x-amz-security-token:hush";
    let service = start_refusing("InvalidSignatureException", message).await;
    let error = DynamoDbStore::connect(&url("keys", service.addr())).await;
    let error = error.expect_err("refused credentials");
    assert_eq!(error.kind(), DynamoDbErrorKind::Refused);
    assert_eq!(
        error.to_string(),
        "DynamoDB reports InvalidSignatureException"
    );
}
