//! Completed entries in the index, which an option adds.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, UNIX_EPOCH},
};

use axum::response::IntoResponse;
use bytes::Bytes;
use tests::{
    app,
    dynamodb::{Endpoint, ManualClock},
    noise, post, send,
    servers::dynamodb::{StandIn, client, shared},
};
use tower_idempotency::{
    IdempotencyLayer, NeedsAttention, OrphanPolicy,
    inspect::{Entry, Inspect, InspectErrorKind, Query, Resolution, State},
    store::{Claim, KeyId, Store, Ttl},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{primitives::Blob, types::AttributeValue},
};

use crate::listing::{claim, hold, pages};

/// A long timeout, so that no call fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The server deletes expired items by the clock of the machine. The manual clocks of the tests are ahead of it.
const HOUR: Ttl = Ttl::from_secs(3600);

const LISTED: [State; 4] = [
    State::InProgress,
    State::Orphaned,
    State::NeedsAttention,
    State::Completed,
];

/// A table behind an endpoint. All its processes have the same clock.
struct Table {
    endpoint: Endpoint,
    name: String,
    clock: ManualClock,
}

impl Table {
    async fn create() -> Self {
        let server = shared(StandIn::Dynoxide);
        let table = Self {
            endpoint: Endpoint::start(server.address()),
            name: server.new_table(),
            clock: ManualClock::new(),
        };
        let store = table.store(DynamoDbOptions::new());
        store.create_table().await.expect("the server runs");
        table
    }

    /// Returns the store of a process with these options.
    fn store(&self, options: DynamoDbOptions) -> DynamoDbStore {
        let clock = self.clock.clone();
        let options = options.with_timeout(PATIENCE);
        let options = options.with_clock(move || clock.now());
        options.store(&client(self.endpoint.address()), self.name.as_str())
    }

    /// Lets this time pass, and the allowance for skew.
    fn advance(&self, time: Ttl) {
        self.clock
            .advance(time.as_duration() + Duration::from_secs(2));
    }

    /// Returns the time as an attribute, in milliseconds.
    fn now(&self) -> AttributeValue {
        let now = self.clock.now().duration_since(UNIX_EPOCH);
        AttributeValue::N(now.expect("after 1970").as_millis().to_string())
    }

    async fn item(&self, id: &KeyId) -> HashMap<String, AttributeValue> {
        let get = client(shared(StandIn::Dynoxide).address()).get_item();
        let get = get.table_name(&self.name);
        let key = AttributeValue::B(Blob::new(id.as_bytes().as_slice()));
        let read = get.key("id", key).send().await;
        read.expect("the server runs").item.expect("an item")
    }
}

fn with_index() -> DynamoDbOptions {
    DynamoDbOptions::new().with_completed_index(true)
}

/// Returns a record without contents.
fn record() -> Bytes {
    Bytes::from_static(b"\x01\0\0\0\0\0")
}

async fn complete(store: &DynamoDbStore, claim: &Claim, record: Bytes, retention: Ttl) {
    let lease = hold(store, claim).await;
    let completed = store.complete(&lease, record, retention).await;
    completed.expect("the lease is held");
}

async fn listed(store: &DynamoDbStore, state: State) -> Vec<Entry> {
    pages(store, state, 10).await.concat()
}

/// Returns the IDs of the completed entries.
async fn completed_ids(store: &DynamoDbStore) -> Vec<KeyId> {
    let entries = listed(store, State::Completed).await;
    entries.iter().map(|entry| *entry.id()).collect()
}

/// Returns the only entry of all listings. The listing of its state has it, and no other one.
async fn only(store: &DynamoDbStore) -> Entry {
    let mut found = Vec::new();
    for state in LISTED {
        for entry in listed(store, state).await {
            assert_eq!(entry.state(), state);
            found.push(entry);
        }
    }
    let [entry] = <[Entry; 1]>::try_from(found).expect("one entry");
    let read = store.get(entry.id()).await.expect("the server runs");
    assert_eq!(read.expect("it exists").entry.seen(), entry.seen());
    entry
}

#[tokio::test]
async fn completed_entries_are_listed_by_page() {
    let table = Table::create().await;
    let store = table.store(with_index());
    for n in 0..20 {
        // Entries that are completed later expire earlier.
        let retention = Ttl::from_secs(u64::from(1_000 - 2 * n));
        complete(&store, &claim(n), record(), retention).await;
        table.clock.advance(Duration::from_secs(1));
    }
    hold(&store, &claim(20)).await;
    table.endpoint.calls();

    let found = pages(&store, State::Completed, 3).await;
    let calls = table.endpoint.operations();
    assert!(calls.iter().all(|call| call == "Query"), "{calls:?}");
    assert!(calls.len() <= found.len() + 8, "{}", calls.len());
    let entries = found.concat();
    let mut partitions = BTreeMap::<u16, Vec<_>>::new();
    let mut numbers = BTreeSet::new();
    for entry in &entries {
        let number = entry.operation.trim_start_matches("POST /orders/");
        let n: u64 = number.parse().expect("a number");
        numbers.insert(n);
        assert_eq!((&*entry.owner, entry.generation()), ("host-1:4711", 1));
        assert_eq!(entry.state(), State::Completed);
        assert_eq!(entry.age, Duration::from_secs(20 - n));
        let expires = entry.expires.expect("a readable entry");
        let retention = expires.duration_since(entry.since).expect("later");
        assert_eq!(retention, Duration::from_secs(1_000 - 2 * n));
        let details = store.get(entry.id()).await.expect("the server runs");
        let read = details.expect("it exists").entry;
        assert_eq!((read.seen(), read.since), (entry.seen(), entry.since));
        let [first, second, ..] = entry.id().as_bytes();
        let partition = u16::from_be_bytes([*first, *second]) % 8;
        partitions.entry(partition).or_default().push(expires);
        let item = table.item(entry.id()).await;
        let listed = item["listed"].as_s().expect("a text");
        assert_eq!(*listed, format!("completed#{partition}"));
    }
    let expected: BTreeSet<u64> = (0..20).collect();
    assert_eq!((entries.len(), numbers), (20, expected));
    for expiries in partitions.values() {
        assert!(expiries.is_sorted(), "{partitions:?}");
    }
    let summary = store.summary(100).await.expect("the server runs");
    let counts = LISTED.map(|state| summary.count(state).expect("it is listed"));
    assert!(counts.iter().all(|count| count.is_exact), "{counts:?}");
    assert_eq!(counts.map(|count| count.value), [1, 0, 0, 20]);
}

#[tokio::test]
async fn completed_entries_are_listed_only_with_option() {
    let table = Table::create().await;
    let without = table.store(DynamoDbOptions::new());
    let unlisted = claim(1);
    complete(&without, &unlisted, record(), HOUR).await;
    let item = table.item(&unlisted.id).await;
    for absent in ["listed", "since", "reason"] {
        assert!(!item.contains_key(absent), "{absent}");
    }
    let query = Query::new(State::Completed);
    let error = without.list(&query).await.expect_err("no such list");
    assert_eq!(error.kind(), InspectErrorKind::Unsupported);
    let remedy = std::error::Error::source(&error).map(ToString::to_string);
    let remedy = remedy.expect("a remedy");
    let setting = "DynamoDbOptions::with_completed_index(true)";
    assert!(remedy.contains(setting), "{remedy}");
    let summary = without.summary(10).await.expect("the server runs");
    assert_eq!(summary.count(State::Completed), None);

    // The other process has completed its entry without the index.
    let with = table.store(with_index());
    let other = claim(2);
    complete(&with, &other, record(), HOUR).await;
    assert_eq!(completed_ids(&with).await, [other.id]);
    let details = with.get(&unlisted.id).await.expect("the server runs");
    let details = details.expect("it exists");
    assert_eq!(details.entry.state(), State::Completed);

    for options in [with_index(), DynamoDbOptions::new()] {
        let without_index = table.store(options.with_index_shards(0));
        for state in LISTED {
            let setting = without_index.abilities().setting_to_list(state);
            assert_eq!(setting, Some("DynamoDbOptions::with_index_shards(8)"));
        }
        let error = without_index.list(&query).await.expect_err("no index");
        assert_eq!(error.kind(), InspectErrorKind::Unsupported);
    }
}

/// The service has not deleted the expired entries yet. There are more than a page or a count examines.
#[tokio::test]
async fn expired_completed_entries_are_not_read() {
    let table = Table::create().await;
    let store = table.store(with_index().with_index_shards(1));
    for n in 0..300 {
        complete(&store, &claim(n), record(), HOUR).await;
    }
    let live = claim(300);
    complete(&store, &live, record(), Ttl::from_secs(24 * 3600)).await;
    table.advance(HOUR);
    table.endpoint.calls();
    let query = Query::new(State::Completed).with_limit(1);
    let page = store.list(&query).await.expect("the server runs");
    let ids: Vec<_> = page.entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!(ids, [live.id]);
    let summary = store.summary(10).await.expect("the server runs");
    let count = summary.count(State::Completed).expect("it is listed");
    assert_eq!((count.value, count.is_exact), (1, true));
    for call in table.endpoint.calls() {
        assert_eq!(call.operation, "Query");
        let examined = call.response["ScannedCount"].as_u64();
        assert!(examined.is_some_and(|it| it <= 1), "{examined:?}");
    }
}

/// The record expires on the clock of the reader, and within the allowance for skew on that of another process.
#[tokio::test]
async fn completed_entry_is_listed_within_skew_allowance() {
    let table = Table::create().await;
    let store = table.store(with_index());
    let claim = claim(1);
    complete(&store, &claim, record(), HOUR).await;
    table.clock.advance(HOUR.as_duration());
    assert_eq!(completed_ids(&store).await, [claim.id]);
    table.clock.advance(Duration::from_secs(2));
    assert_eq!(completed_ids(&store).await, []);
}

/// The service rejects a position outside the range of the query.
#[tokio::test]
async fn page_continues_after_expiry_of_last_entry() {
    let table = Table::create().await;
    let store = table.store(with_index().with_index_shards(1));
    let claims = [1, 2, 3].map(claim);
    for (claim, hours) in claims.iter().zip(1..) {
        let retention = Ttl::from_secs(hours * 3600);
        complete(&store, claim, record(), retention).await;
    }
    let query = Query::new(State::Completed).with_limit(1);
    let first = store.list(&query).await.expect("the server runs");
    assert_eq!(*first.entries[0].id(), claims[0].id);
    table.advance(HOUR);
    let query = query.with_page(Some(first.next.expect("two more")));
    let second = store.list(&query).await.expect("the server runs");
    assert_eq!(*second.entries[0].id(), claims[1].id);
}

#[tokio::test]
async fn resolved_entry_is_listed_in_its_state() {
    let table = Table::create().await;
    let store = table.store(with_index());
    let failed = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    let settled = Resolution::Complete {
        record: record(),
        retention: HOUR,
    };
    let first = claim(1);
    let (attention, retention) = failed.record(&first.id).expect("it stores a record");
    complete(&store, &first, attention.clone(), retention).await;
    assert_eq!(only(&store).await.state(), State::NeedsAttention);
    for (resolution, expected) in [
        (&Resolution::Retry, State::Orphaned),
        (&failed, State::NeedsAttention),
        (&settled, State::Completed),
    ] {
        let entry = only(&store).await;
        let resolved = store.resolve(entry.seen(), resolution).await;
        assert!(resolved.expect("the server runs").is_applied());
        assert_eq!(only(&store).await.state(), expected);
    }
    let entry = only(&store).await;
    let deleted = store.resolve(entry.seen(), &Resolution::DeleteRecord).await;
    assert!(deleted.expect("the server runs").is_applied());
    assert_eq!(completed_ids(&store).await, []);

    // A process without the option removes the entry from the index.
    let without = table.store(DynamoDbOptions::new());
    complete(&store, &claim(1), attention, retention).await;
    let entry = only(&store).await;
    let resolved = without.resolve(entry.seen(), &settled).await;
    assert!(resolved.expect("the server runs").is_applied());
    let item = table.item(&first.id).await;
    for absent in ["listed", "since", "reason"] {
        assert!(!item.contains_key(absent), "{absent}");
    }
}

#[tokio::test]
async fn tombstone_is_listed_as_completed() {
    let table = Table::create().await;
    let store = table.store(with_index().with_record_limit(0));
    let layer = IdempotencyLayer::new(store.clone()).with_store_timeout(PATIENCE);
    let (app, _) = app(layer, async |_, _| noise(10_000).into_response());
    send(&app, post("/orders", "k", "tea")).await;
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(retry.code(), "response-not-retained");
    let entry = only(&store).await;
    assert_eq!(entry.state(), State::Completed);
}

/// A key is used again before the service has deleted its expired item. Nothing of the expired record stays in the index.
#[tokio::test]
async fn key_of_expired_listed_record_begins_again() {
    for (name, options, is_listed) in [
        ("with the option", with_index(), true),
        ("without it", DynamoDbOptions::new(), false),
        (
            "without an index",
            DynamoDbOptions::new().with_index_shards(0),
            false,
        ),
    ] {
        for orphans in [
            OrphanPolicy::TakeOver,
            OrphanPolicy::Refuse,
            OrphanPolicy::Never,
        ] {
            let table = Table::create().await;
            let operator = table.store(with_index());
            complete(&operator, &claim(1), record(), HOUR).await;
            table.advance(HOUR);
            let store = table.store(options.clone());
            let mut again = claim(1);
            again.orphans = orphans;
            table.endpoint.calls();
            let lease = hold(&store, &again).await;
            assert_eq!(lease.generation, 1, "{name}");
            let calls = table.endpoint.operations();
            assert_eq!(calls, ["UpdateItem", "PutItem"], "{name}");

            let item = table.item(&again.id).await;
            assert_eq!(item["since"], table.now(), "{name}");
            assert!(!item.contains_key("reason"), "{name}");
            assert_eq!(completed_ids(&operator).await, [], "{name}");

            let completed = store.complete(&lease, record(), HOUR).await;
            completed.expect("the lease is held");
            let ids = completed_ids(&operator).await;
            assert_eq!(ids.len(), usize::from(is_listed), "{name}");
            let item = table.item(&again.id).await;
            assert_eq!(item.contains_key("listed"), is_listed, "{name}");
        }
    }
}

/// A record that needs attention is in the index of each store.
#[tokio::test]
async fn key_of_expired_attention_record_begins_again() {
    let table = Table::create().await;
    let store = table.store(DynamoDbOptions::new());
    let first = claim(1);
    let failed = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    let (attention, _) = failed.record(&first.id).expect("it stores a record");
    complete(&store, &first, attention, HOUR).await;
    table.advance(HOUR);
    table.endpoint.calls();
    let lease = hold(&store, &claim(1)).await;
    assert_eq!(lease.generation, 1);
    let calls = table.endpoint.operations();
    assert_eq!(calls, ["UpdateItem", "PutItem"]);
    assert_eq!(table.item(&first.id).await["since"], table.now());
}

/// The process that acquired the lease has an index, and the one that completes the entry has none.
#[tokio::test]
async fn attention_without_index_is_no_orphan() {
    let table = Table::create().await;
    let with_index = table.store(DynamoDbOptions::new());
    let without = table.store(DynamoDbOptions::new().with_index_shards(0));
    let claim = claim(1);
    let lease = hold(&with_index, &claim).await;
    let failed = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    let (attention, retention) = failed.record(&claim.id).expect("it stores a record");
    let completed = without.complete(&lease, attention, retention).await;
    completed.expect("the lease is held");
    table.advance(claim.lease);
    for state in [State::InProgress, State::Orphaned, State::NeedsAttention] {
        assert_eq!(listed(&with_index, state).await, [], "{state:?}");
    }
    let details = with_index.get(&claim.id).await.expect("the server runs");
    let details = details.expect("it exists");
    assert_eq!(details.entry.state(), State::NeedsAttention);
}
