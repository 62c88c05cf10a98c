//! What operators see of what is in progress, page by page.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tests::{
    dynamodb::Endpoint,
    servers::dynamodb::{StandIn, client, shared},
};
use tower_idempotency::store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, Ttl};
use tower_idempotency_dynamodb::{DynamoDbErrorKind, DynamoDbOptions, DynamoDbStore, Entry};

async fn listed(stand_in: StandIn) -> (Endpoint, String, DynamoDbStore) {
    let server = shared(stand_in);
    let endpoint = Endpoint::start(server.address());
    let table = server.new_table();
    let store = DynamoDbOptions::new().store(&client(endpoint.address()), table.as_str());
    store.create_table().await.expect("the server runs");
    (endpoint, table, store)
}

fn claim(n: u32) -> Claim {
    // Spread over the shards, as digests are.
    let mut id = [7; 32];
    id[..4].copy_from_slice(&n.wrapping_mul(0x9e37_79b9).to_be_bytes());
    let mut claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes([1; 32]))
        .expect("tests run where there is randomness");
    claim.owner = "host-1:4711";
    claim.operation = format!("POST /orders/{n}").into();
    claim
}

async fn hold(store: &DynamoDbStore, claim: &Claim) -> LeaseRef {
    match store.acquire(claim).await.expect("the server runs") {
        Acquired::Granted { generation, .. } => claim.lease_ref(generation),
        refused => panic!("expected a lease, found {refused:?}"),
    }
}

async fn all(store: &DynamoDbStore, page: u16) -> Vec<Vec<Entry>> {
    let mut listing = store.in_progress(page);
    let mut pages = Vec::new();
    while let Some(page) = listing.next().await.expect("the server runs") {
        pages.push(page);
    }
    pages
}

async fn what_is_in_progress_is_listed_page_by_page(stand_in: StandIn) {
    let (endpoint, _, store) = listed(stand_in).await;
    let before = SystemTime::now();
    let mut leases = BTreeMap::new();
    for n in 0..40 {
        leases.insert(n, hold(&store, &claim(n)).await);
    }
    // What has ended leaves the index: 10 completed, 10 released.
    for n in 0..10 {
        let record = Bytes::from_static(b"answer");
        let completed = store.complete(&leases[&n], record, Ttl::from_secs(60));
        completed.await.expect("held");
    }
    for n in 10..20 {
        store.release(&leases[&n]).await.expect("the server runs");
    }
    endpoint.calls();

    let pages = all(&store, 3).await;
    assert!(pages.iter().all(|page| (1..=3).contains(&page.len())));
    let entries: Vec<_> = pages.concat();
    let operations: BTreeSet<_> = entries.iter().map(|it| it.operation.clone()).collect();
    let expected: BTreeSet<_> = (20..40).map(|n| format!("POST /orders/{n}")).collect();
    assert_eq!((entries.len(), operations), (20, expected));
    for entry in &entries {
        assert_eq!((&*entry.owner, entry.generation), ("host-1:4711", 1));
        assert!(
            entry.since + Duration::from_millis(1) >= before && entry.since <= SystemTime::now()
        );
        let lease = entry.lease_ends.duration_since(entry.since).expect("after");
        assert_eq!(lease, Duration::from_secs(15));
        assert_eq!(entry.overdue, None);
    }
    // A query for each page, or to learn that a shard has no more.
    let calls = endpoint.operations();
    assert!(calls.iter().all(|call| call == "Query"), "{calls:?}");
    assert!(calls.len() <= pages.len() + 8, "{}", calls.len());
}

#[tokio::test]
async fn what_is_in_progress_is_listed_page_by_page_on_dynoxide() {
    what_is_in_progress_is_listed_page_by_page(StandIn::Dynoxide).await;
}

#[tokio::test]
async fn what_is_in_progress_is_listed_page_by_page_on_moto() {
    what_is_in_progress_is_listed_page_by_page(StandIn::Moto).await;
}

#[tokio::test]
async fn an_orphan_is_listed_as_overdue_until_it_is_forgotten() {
    let (_endpoint, table, store) = listed(StandIn::Dynoxide).await;
    let ago = |seconds| {
        let then = move || SystemTime::now() - Duration::from_secs(seconds);
        let options = DynamoDbOptions::new().with_clock(then);
        options.store(&client(shared(StandIn::Dynoxide).address()), table.as_str())
    };
    let first = claim(1);
    hold(&ago(3600), &first).await;
    let mut again = claim(1);
    again.token = Claim::new(first.id, first.fingerprint)
        .expect("randomness")
        .token;
    assert_eq!(hold(&ago(1800), &again).await.generation, 2);
    // Remembered for 24 hours.
    hold(&ago(25 * 3600), &claim(2)).await;

    let [entry] = <[Entry; 1]>::try_from(all(&store, 10).await.concat()).expect("one entry");
    assert_eq!((entry.id, entry.generation), (first.id, 2));
    let overdue = entry.overdue.expect("overdue").as_secs();
    assert!((1780..=1790).contains(&overdue), "{overdue}");
    let since = entry.since.elapsed().expect("in the past").as_secs();
    assert!((3600..=3610).contains(&since), "first leased {since} s ago");
}

#[tokio::test]
async fn a_table_of_another_kind_is_refused_and_a_second_store_finds_the_first_ones_table() {
    use tower_idempotency_dynamodb::aws_sdk_dynamodb::types::{
        AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
    };
    for stand_in in [StandIn::Dynoxide, StandIn::Moto] {
        let server = shared(stand_in);
        let (client, table) = (client(server.address()), server.new_table());
        let stores = [0, 1, 2].map(|_| DynamoDbStore::new(&client, table.as_str()));
        let [a, b, c] = &stores;
        let made = tokio::join!(a.create_table(), b.create_table());
        made.0.expect("made");
        made.1.expect("made by the other");
        c.create_table().await.expect("there");

        let other = server.new_table();
        let attribute = AttributeDefinition::builder()
            .attribute_name("pk")
            .attribute_type(ScalarAttributeType::S);
        let key = KeySchemaElement::builder()
            .attribute_name("pk")
            .key_type(KeyType::Hash);
        let create = client
            .create_table()
            .table_name(&other)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(attribute.build().expect("complete"))
            .key_schema(key.build().expect("complete"));
        create.send().await.expect("the server runs");
        let refused = DynamoDbStore::new(&client, other).create_table().await;
        let error = refused.expect_err("of another kind");
        assert_eq!(error.kind(), DynamoDbErrorKind::Unusable);
        assert!(error.to_string().contains("partition key id"), "{error}");
    }
}
