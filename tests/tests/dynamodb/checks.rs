//! The text of each check of a table in DynamoDB.

use std::{
    net::{SocketAddr, TcpListener},
    time::{Duration, Instant},
};

use tests::{
    barrier::within,
    dynamodb::{Endpoint, EndpointFault},
    servers::{
        dynamodb::{StandIn, client, shared},
        free_port,
    },
};
use tokio::join;
use tower_idempotency::{
    inspect::{Inspect, InspectErrorKind, Query, State},
    store::{CheckErrorKind, Store},
};
use tower_idempotency_dynamodb::{
    DynamoDbErrorKind, DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{
        Client,
        config::{retry::RetryConfig, timeout::TimeoutConfig},
        types::{
            AttributeDefinition, BillingMode, GlobalSecondaryIndex, KeySchemaElement, KeyType,
            Projection, ProjectionType, ScalarAttributeType, TimeToLiveSpecification,
        },
    },
};

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

/// Only an acquire of an expired entry calls `PutItem`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_missing_right_to_put() {
    let server = shared(StandIn::Dynoxide);
    let endpoint = Endpoint::start(server.address());
    let table = server.new_table();
    let store = store(endpoint.address(), &table);
    store.create_table().await.expect("the server runs");
    store.check().await.expect("all rights");
    endpoint.set(EndpointFault::DenyPuts);
    let error = store.check().await.expect_err("one right is missing");
    let text = error.to_string();
    let remedy = ": check the credentials and the clock, and permit GetItem, PutItem, UpdateItem, DeleteItem, Query, \
                  DescribeTable and DescribeTimeToLive";
    assert!(
        text.contains("AccessDeniedException") && text.ends_with(remedy),
        "{text}"
    );
    let items = client(server.address()).scan().table_name(&table).send();
    let items = items.await.expect("the server runs");
    assert_eq!(items.count(), 0, "each check has released its leases");
}

/// Returns the time in which all calls about the table and listings fail, at an address that does not reply. Each call makes one
/// attempt.
async fn time_without_reply(
    address: SocketAddr,
    options: DynamoDbOptions,
    timeouts: TimeoutConfig,
) -> Duration {
    let config = client(address).config().to_builder();
    let config = config.retry_config(RetryConfig::disabled());
    let client = Client::from_conf(config.timeout_config(timeouts).build());
    let (store, began) = (options.store(&client, "keys"), Instant::now());
    let query = Query::new(State::InProgress);
    let calls = async { join!(store.create_table(), store.check(), store.list(&query)) };
    let (created, checked, listed) = within(Duration::from_secs(60), calls).await;
    let kind = created.expect_err("no reply").kind();
    assert_eq!(kind, DynamoDbErrorKind::Unreachable);
    let kind = checked.expect_err("no reply").kind();
    assert_eq!(kind, CheckErrorKind::Unreachable);
    let kind = listed.expect_err("no reply").kind();
    assert_eq!(kind, InspectErrorKind::Backend);
    began.elapsed()
}

/// The client of the application has no timeout for a reply, or its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn table_calls_end_without_reply() {
    // The system accepts connections to the listener.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let (options, longer) = (DynamoDbOptions::new(), Duration::from_secs(12));
    let none = TimeoutConfig::builder().connect_timeout(longer).build();
    let own = TimeoutConfig::builder()
        .operation_attempt_timeout(longer)
        .build();
    let (default, of_options, of_client) = join!(
        time_without_reply(address, options.clone(), none.clone()),
        time_without_reply(address, options.clone().with_timeout(longer), none),
        time_without_reply(address, options, own),
    );
    assert!(default >= Duration::from_secs(10), "{default:?}");
    assert!(of_options >= longer, "{of_options:?}");
    assert!(of_client >= longer, "{of_client:?}");
}

/// Creates a table with this partition key, with this index or none, and without a TTL.
async fn create_other_table(
    address: SocketAddr,
    table: &str,
    kind: ScalarAttributeType,
    index: Option<GlobalSecondaryIndex>,
) {
    let mut attributes = vec![attribute("id", kind)];
    let keys = index.iter().flat_map(|index| index.key_schema());
    attributes.extend(keys.map(|key| match key.attribute_name() {
        "since" => attribute("since", ScalarAttributeType::N),
        name => attribute(name, ScalarAttributeType::S),
    }));
    let created = client(address)
        .create_table()
        .table_name(table)
        .billing_mode(BillingMode::PayPerRequest)
        .key_schema(key("id", KeyType::Hash))
        .set_attribute_definitions(Some(attributes))
        .set_global_secondary_indexes(index.map(|index| vec![index]));
    created.send().await.expect("the server runs");
}

fn attribute(name: &str, kind: ScalarAttributeType) -> AttributeDefinition {
    let attribute = AttributeDefinition::builder().attribute_name(name);
    let attribute = attribute.attribute_type(kind).build();
    attribute.expect("an attribute")
}

fn key(name: &str, kind: KeyType) -> KeySchemaElement {
    let key = KeySchemaElement::builder().attribute_name(name);
    key.key_type(kind).build().expect("a key")
}

/// Returns the index `listed` with these keys and this projection.
fn index(keys: &[&str], projection: ProjectionType, included: &[&str]) -> GlobalSecondaryIndex {
    let included = included.iter().map(|it| (*it).to_owned()).collect();
    let projection = Projection::builder()
        .set_non_key_attributes(Some(included).filter(|it: &Vec<_>| !it.is_empty()))
        .projection_type(projection)
        .build();
    let kinds = [KeyType::Hash, KeyType::Range];
    let keys = keys.iter().zip(kinds).map(|(name, kind)| key(name, kind));
    let index = GlobalSecondaryIndex::builder()
        .index_name("listed")
        .set_key_schema(Some(keys.collect()))
        .projection(projection);
    index.build().expect("an index")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_checks_have_these_texts() {
    let server = shared(StandIn::Dynoxide);
    let address = server.address();
    let mut lines = Vec::new();
    let mut note = async |name: &str, store: &DynamoDbStore, table: &str| {
        let error = store.check().await.expect_err(name);
        let text = error.to_string().replace(table, "TABLE");
        let kind = error.kind();
        // The measured difference of the clocks is a little more or less than an hour.
        let words = text.split(' ').map(|word| {
            let is_time = word.len() > 4 && word.starts_with(|it: char| it.is_ascii_digit());
            if is_time { "TIME" } else { word }
        });
        let text = words.collect::<Vec<_>>().join(" ");
        lines.push(format!("{kind:?}, {name}: {text}"));
    };
    let table = server.new_table();
    note("no table", &store(address, &table), &table).await;
    let table = server.new_table();
    create_other_table(address, &table, ScalarAttributeType::S, None).await;
    note("another key", &store(address, &table), &table).await;
    let table = server.new_table();
    create_other_table(address, &table, ScalarAttributeType::B, None).await;
    note("no index", &store(address, &table), &table).await;
    let keys = ["listed", "since"];
    for (name, index) in [
        ("no range key", index(&keys[..1], ProjectionType::All, &[])),
        (
            "an index of keys",
            index(&keys, ProjectionType::KeysOnly, &[]),
        ),
        (
            "an index without leases",
            index(
                &keys,
                ProjectionType::Include,
                &[
                    "expires",
                    "generation",
                    "operation",
                    "owner",
                    "reason",
                    "token",
                ],
            ),
        ),
    ] {
        let table = server.new_table();
        create_other_table(address, &table, ScalarAttributeType::B, Some(index)).await;
        note(name, &store(address, &table), &table).await;
    }
    let options = DynamoDbOptions::new().with_index_shards(0);
    let without_index = options.store(&client(address), table.as_str());
    note("no TTL", &without_index, &table).await;
    let table = server.new_table();
    let other_ttl = store(address, &table);
    other_ttl.create_table().await.expect("the server runs");
    set_ttl(address, &table, "ttl", false).await;
    set_ttl(address, &table, "expires", true).await;
    note("another TTL", &other_ttl, &table).await;

    let endpoint = Endpoint::start(address);
    let table = server.new_table();
    let skewed = store(endpoint.address(), &table);
    skewed.create_table().await.expect("the server runs");
    endpoint.set_date_behind(Duration::from_secs(3_600));
    note("a fast clock", &skewed, &table).await;
    insta::assert_snapshot!(lines.join("\n"));
}

/// Sets the TTL of a table.
async fn set_ttl(address: SocketAddr, table: &str, attribute: &str, is_enabled: bool) {
    let specification = TimeToLiveSpecification::builder()
        .attribute_name(attribute)
        .enabled(is_enabled)
        .build()
        .expect("a TTL");
    let update = client(address).update_time_to_live().table_name(table);
    let update = update.time_to_live_specification(specification);
    update.send().await.expect("the server runs");
}

/// The constructors make no call. `create_table` refuses a table that the store cannot use, and does not change it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_tables_have_these_texts() {
    let server = shared(StandIn::Dynoxide);
    let address = server.address();
    let mut lines = Vec::new();
    let mut note = async |name: &str, store: &DynamoDbStore| {
        let error = store.create_table().await.expect_err(name);
        lines.push(format!("{:?}, {name}: {error}", error.kind()));
    };
    let port = free_port();
    let unused = store(SocketAddr::from(([127, 0, 0, 1], port)), "keys");
    note("no server", &unused).await;
    let (text, bytes) = (ScalarAttributeType::S, ScalarAttributeType::B);
    let keys = ["listed", "since"];
    for (name, kind, index) in [
        ("another key", text, None),
        ("no index", bytes.clone(), None),
        (
            "no range key",
            bytes.clone(),
            Some(index(&keys[..1], ProjectionType::All, &[])),
        ),
        (
            "an index of keys",
            bytes,
            Some(index(&keys, ProjectionType::KeysOnly, &[])),
        ),
    ] {
        let table = server.new_table();
        create_other_table(address, &table, kind, index).await;
        note(name, &store(address, &table)).await;
    }
    let table = server.new_table();
    let other_ttl = store(address, &table);
    other_ttl.create_table().await.expect("the server runs");
    set_ttl(address, &table, "ttl", false).await;
    set_ttl(address, &table, "expires_at", true).await;
    note("another TTL", &other_ttl).await;
    let lines = lines.join("\n").replace(&port.to_string(), "PORT");
    insta::assert_snapshot!(lines);
}
