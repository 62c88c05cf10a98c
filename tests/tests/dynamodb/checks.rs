//! The text of each check of a table in DynamoDB.

use std::{net::SocketAddr, time::Duration};

use tests::servers::{
    dynamodb::{StandIn, client, shared},
    free_port,
};
use tower_idempotency::store::{CheckErrorKind, Store};
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

fn store(address: SocketAddr, table: &str) -> DynamoDbStore {
    let options = DynamoDbOptions::new().with_timeout(Duration::from_secs(20));
    options.store(&client(address), table)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_missing_table() {
    let server = shared(StandIn::Dynoxide);
    let table = server.new_table();
    let store = store(server.address(), &table);
    let error = store.check().await.unwrap_err();
    let remedy = "call `create_table`, or create the table as in docs/stores/dynamodb.md";
    assert_eq!(
        error.to_string(),
        format!("the table {table:?} is missing: {remedy}")
    );
    assert_eq!(error.kind(), CheckErrorKind::Incomplete);
    store.create_table().await.unwrap();
    store.check().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_unreachable_endpoint() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let error = store(address, "keys").check().await.unwrap_err();
    let text = error.to_string();
    let remedy = ": check the endpoint, the region and the network";
    assert!(
        text.starts_with("cannot reach DynamoDB: ") && text.ends_with(remedy),
        "{text}"
    );
    assert_eq!(error.kind(), CheckErrorKind::Unreachable);
}
