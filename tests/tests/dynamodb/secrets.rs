//! Data in the table that its readers can see.

use std::{collections::HashMap, time::Duration};

use axum::routing::post;
use tests::{
    secrets::{assert_only_digests_stored, needs_attention},
    servers::dynamodb::{StandIn, client, shared},
    sql,
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions,
    aws_sdk_dynamodb::{Client, types::AttributeValue},
};

/// A long timeout, so that no call fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the names and the values of all items.
async fn everything(client: &Client, table: &str) -> Vec<u8> {
    let scanned = client.scan().table_name(table).send().await;
    let items = scanned.expect("the server runs").items.unwrap_or_default();
    let mut all = Vec::new();
    for item in &items {
        add(item, &mut all);
    }
    all
}

fn add(attributes: &HashMap<String, AttributeValue>, all: &mut Vec<u8>) {
    for (name, value) in attributes {
        all.extend_from_slice(name.as_bytes());
        all.push(b'=');
        match value {
            AttributeValue::B(blob) => all.extend_from_slice(blob.as_ref()),
            AttributeValue::S(text) | AttributeValue::N(text) => {
                all.extend_from_slice(text.as_bytes());
            }
            AttributeValue::M(attributes) => add(attributes, all),
            other => panic!("expected bytes, a text, a number or a map, found {other:?}"),
        }
        all.push(b'\n');
    }
}

// F-185
#[tokio::test]
async fn table_holds_only_digests_on_dynoxide() {
    let server = shared(StandIn::Dynoxide);
    let (client, table) = (client(server.address()), server.new_table());
    let options = DynamoDbOptions::new().with_timeout(PATIENCE);
    let store = options.store(&client, table.as_str());
    store.create_table().await.expect("the server runs");
    let attention = post(async || needs_attention());
    let read = async || everything(&client, &table).await;
    assert_only_digests_stored(sql::layer(store), attention, read).await;
}
