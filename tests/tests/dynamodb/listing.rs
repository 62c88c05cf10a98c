//! The operator's view of entries in progress and entries that need attention, page by page, and their resolution.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::StatusCode;
use tests::{
    attention::AttentionService,
    barrier::Barrier,
    dynamodb::{Endpoint, EndpointFault, ManualClock},
    post, send,
    servers::dynamodb::{StandIn, client, shared},
};
use tower_idempotency::{
    IdempotencyLayer, Lease, NeedsAttention, OrphanPolicy,
    inspect::{Entry, Inspect, InspectErrorKind, Query, Resolution, ResolveOutcome, State},
    run_once::{Outcome, WorkError},
    store::{Acquired, CheckErrorKind, Claim, Fingerprint, KeyId, LeaseRef, Store, Ttl},
};
use tower_idempotency_dynamodb::{DynamoDbErrorKind, DynamoDbOptions, DynamoDbStore};

use crate::held_request::proxy_through;

/// A long timeout, so that no call fails on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> DynamoDbOptions {
    DynamoDbOptions::new().with_timeout(PATIENCE)
}

async fn listed(stand_in: StandIn) -> (Endpoint, String, DynamoDbStore) {
    let server = shared(stand_in);
    let endpoint = Endpoint::start(server.address());
    let table = server.new_table();
    let store = options().store(&client(endpoint.address()), table.as_str());
    store.create_table().await.expect("the server runs");
    (endpoint, table, store)
}

pub(crate) fn claim(n: u32) -> Claim {
    // Spreads the ids over the shards, like digests.
    let mut id = [7; 32];
    id[..4].copy_from_slice(&n.wrapping_mul(0x9e37_79b9).to_be_bytes());
    let mut claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes([1; 32]))
        .expect("the system has random numbers");
    claim.owner = "host-1:4711";
    claim.operation = format!("POST /orders/{n}").into();
    claim
}

pub(crate) async fn hold(store: &DynamoDbStore, claim: &Claim) -> LeaseRef {
    match store.acquire(claim).await.expect("the server runs") {
        Acquired::Granted { generation, .. } => claim.lease_ref(generation),
        refused => panic!("expected a lease, found {refused:?}"),
    }
}

async fn unresolved(store: &DynamoDbStore) -> Vec<Entry> {
    pages(store, State::NeedsAttention, 10).await.concat()
}

pub(crate) async fn pages(store: &DynamoDbStore, state: State, limit: u16) -> Vec<Vec<Entry>> {
    let mut query = Query::new(state).with_limit(limit);
    let mut pages = Vec::new();
    loop {
        let page = store.list(&query).await.expect("the server runs");
        assert!(page.entries.len() <= usize::from(limit));
        pages.push(page.entries);
        match page.next {
            Some(next) => query = query.with_page(Some(next)),
            None => return pages,
        }
    }
}

async fn running_entries_are_listed_by_page(stand_in: StandIn) {
    let (endpoint, _, store) = listed(stand_in).await;
    let before = SystemTime::now();
    let mut leases = BTreeMap::new();
    for n in 0..40 {
        let mut claim = claim(n);
        claim.lease = Ttl::from_secs(600);
        leases.insert(n, hold(&store, &claim).await);
    }
    // Entries that are not in progress leave the index: 10 completed, 10 released.
    for n in 0..10 {
        let record = Bytes::from_static(b"answer");
        let completed = store.complete(&leases[&n], record, Ttl::from_secs(60));
        completed.await.expect("held");
    }
    for n in 10..20 {
        store.release(&leases[&n]).await.expect("the server runs");
    }
    endpoint.calls();

    let pages = pages(&store, State::InProgress, 3).await;
    let entries: Vec<_> = pages.concat();
    let operations: BTreeSet<_> = entries.iter().map(|it| it.operation.clone()).collect();
    let expected = (20..40).map(|n| format!("POST /orders/{n}").into());
    let expected: BTreeSet<Box<str>> = expected.collect();
    assert_eq!((entries.len(), operations), (20, expected));
    for entry in &entries {
        assert_eq!((&*entry.owner, entry.generation()), ("host-1:4711", 1));
        assert!(
            entry.since + Duration::from_millis(1) >= before && entry.since <= SystemTime::now()
        );
        let lease = entry.lease_expires.expect("leased");
        let lease = lease.duration_since(entry.since).expect("after");
        assert_eq!(lease, Duration::from_secs(600));
    }
    // One query returns a page, or shows that a shard has no more entries.
    let calls = endpoint.operations();
    assert!(calls.iter().all(|call| call == "Query"), "{calls:?}");
    assert!(calls.len() <= pages.len() + 8, "{}", calls.len());
}

#[tokio::test]
async fn in_progress_is_listed_by_page_on_dynoxide() {
    running_entries_are_listed_by_page(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn in_progress_is_listed_by_page_on_moto() {
    running_entries_are_listed_by_page(StandIn::Moto).await;
}

/// The sum of these partitions and of the additional calls for a page exceeds 16 bits.
#[tokio::test]
async fn most_index_partitions_are_listed() {
    let server = shared(StandIn::Dynoxide);
    let options = options().with_index_shards(u16::MAX);
    let store = options.store(&client(server.address()), server.new_table());
    store.create_table().await.expect("the server runs");
    // The entry is in the first partition.
    hold(&store, &claim(0)).await;
    let query = Query::new(State::InProgress).with_limit(1);
    let page = store.list(&query).await.expect("the server runs");
    assert_eq!((page.entries.len(), page.next.is_some()), (1, true));
}

/// A store with fewer partitions does not report the end of the listing.
#[tokio::test]
async fn page_of_more_partitions_is_invalid() {
    let server = shared(StandIn::Dynoxide);
    let table = server.new_table();
    let with_shards = |shards| {
        let options = options().with_index_shards(shards);
        options.store(&client(server.address()), table.as_str())
    };
    let store = with_shards(4);
    store.create_table().await.expect("the server runs");
    // Both entries are in the last partition.
    for id in [3, 7] {
        let mut claim = claim(0);
        claim.id = KeyId::from_bytes([id; 32]);
        claim.lease = Ttl::from_secs(600);
        hold(&store, &claim).await;
    }
    let query = Query::new(State::InProgress).with_limit(1);
    let first = store.list(&query).await.expect("the server runs");
    let query = query.with_page(first.next);
    let second = store.list(&query).await.expect("the server runs");
    assert_eq!((first.entries.len(), second.entries.len()), (1, 1));
    let invalid = with_shards(1).list(&query).await;
    let error = invalid.expect_err("the store has one partition");
    assert_eq!(error.kind(), InspectErrorKind::InvalidPage);
}

/// An entry moves to the end of its partition while a page is read in two calls. The second call is held.
#[tokio::test(flavor = "multi_thread")]
async fn entry_moved_between_calls_is_listed_once() {
    let (server, clock) = (shared(StandIn::Dynoxide), ManualClock::new());
    let (barrier, table) = (Barrier::closed(), server.new_table());
    let store = |address| {
        let clock = clock.clone();
        let options = options().with_clock(move || clock.now());
        let options = options.with_index_shards(1);
        options.store(&client(address), table.as_str())
    };
    let direct = store(server.address());
    direct.create_table().await.expect("the server runs");
    let proxied = store(proxy_through(&barrier, b"ExclusiveStartKey", server.address()).await);
    let mut moved = claim(1);
    moved.lease = Ttl::from_secs(600);
    let lease = hold(&direct, &moved).await;
    // Orphans, which the listing omits, fill the rest of the first reply and the beginning of the second one.
    for n in 2..4 {
        clock.advance(Duration::from_millis(1));
        hold(&direct, &claim(n)).await;
    }
    clock.advance(Duration::from_secs(60));
    let moving = async {
        barrier.arrival().await;
        direct.release(&lease).await.expect("the server runs");
        hold(&direct, &moved).await;
        barrier.open_for_good();
    };
    let query = Query::new(State::InProgress).with_limit(2);
    let (page, ()) = tokio::join!(proxied.list(&query), moving);
    let page = page.expect("the server runs");
    let ids: Vec<_> = page.entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!((ids, page.next), (vec![moved.id], None));
}

/// Writes are spread, so that no partition of the index gets all of them.
async fn running_entries_spread_over_index_partitions(stand_in: StandIn) {
    let (_endpoint, table, store) = listed(stand_in).await;
    for n in 0..40 {
        hold(&store, &claim(n)).await;
    }
    let scan = client(shared(stand_in).address()).scan().table_name(table);
    let items = scan.send().await.expect("the server runs").items;
    let mut partitions = BTreeMap::<String, usize>::new();
    for item in items.unwrap_or_default() {
        let partition = item["listed"].as_s().expect("a text").clone();
        *partitions.entry(partition).or_default() += 1;
    }
    assert_eq!(partitions.values().sum::<usize>(), 40);
    let known: BTreeSet<_> = (0..8).map(|shard| format!("in-progress#{shard}")).collect();
    assert!(partitions.keys().all(|it| known.contains(it)));
    // On average 5 are in each of 8.
    assert!(partitions.len() >= 4, "{partitions:?}");
    assert!(partitions.values().all(|it| *it <= 20), "{partitions:?}");
}

#[tokio::test]
async fn index_partitions_are_spread_on_dynoxide() {
    running_entries_spread_over_index_partitions(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn index_partitions_are_spread_on_moto() {
    running_entries_spread_over_index_partitions(StandIn::Moto).await;
}

// ---- Needs attention ----

const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");

fn serve(layer: IdempotencyLayer) -> AttentionService {
    AttentionService::new(layer.with_store_timeout(PATIENCE))
}

async fn attention_is_listed_until_resolved(stand_in: StandIn) {
    let (endpoint, _, store) = listed(stand_in).await;
    let layer = IdempotencyLayer::new(store.clone()).with_lease_ttl(Ttl::from_secs(600));
    let service = serve(layer);
    let before = SystemTime::now();
    for n in 0..12 {
        let first = service.send_request(&format!("k{n}")).await;
        assert_eq!(first.status, StatusCode::BAD_GATEWAY);
    }
    let mut other = claim(1);
    // The machine may be busy.
    other.lease = Ttl::from_secs(600);
    hold(&store, &other).await;
    endpoint.calls();

    let found = pages(&store, State::NeedsAttention, 2).await;
    let calls = endpoint.operations();
    assert!(calls.iter().all(|call| call == "Query"), "{calls:?}");
    let found = found.concat();
    assert_eq!(found.len(), 12);
    for entry in &found {
        assert_eq!(entry.attention_code.as_deref(), Some("refund-failed"));
        assert_eq!((&*entry.operation, entry.generation()), ("POST /cancel", 1));
        assert!(entry.owner.contains(&std::process::id().to_string()));
        assert!(
            entry.since + Duration::from_millis(1) >= before && entry.since <= SystemTime::now()
        );
    }
    // Neither list contains entries of the other.
    let leased = pages(&store, State::InProgress, 10).await.concat();
    assert_eq!(leased.len(), 1);
    assert_eq!(leased[0].attention_code, None);

    service.set_needs_attention(false);
    service.assert_refused("k0").await;
    for entry in &found {
        assert!(resolved(&store, entry, Resolution::Free).await);
        assert!(!resolved(&store, entry, Resolution::Free).await, "twice");
    }
    assert_eq!(unresolved(&store).await, []);
    assert_eq!(service.send_request("k0").await.status, StatusCode::CREATED);
    assert_eq!(service.effects.count(), 13);
    assert_eq!(service.takeovers().last(), Some(&false), "the key is free");
}

async fn resolved(store: &DynamoDbStore, entry: &Entry, resolution: Resolution) -> bool {
    let resolved = store.resolve(entry.seen(), &resolution).await;
    resolved.expect("the server runs").is_applied()
}

// S-239
#[tokio::test]
async fn attention_is_listed_until_resolved_on_dynoxide() {
    attention_is_listed_until_resolved(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn attention_is_listed_until_resolved_on_moto() {
    attention_is_listed_until_resolved(StandIn::Moto).await;
}

async fn the_only(store: &DynamoDbStore) -> Entry {
    only(store, State::NeedsAttention).await
}

async fn only(store: &DynamoDbStore, state: State) -> Entry {
    let found = pages(store, state, 10).await.concat();
    let [entry] = <[Entry; 1]>::try_from(found).expect("one entry");
    entry
}

/// The first execution may have had its effect: the next one is flagged as a takeover, and no other request gets the key.
async fn retry_resolution_is_takeover(stand_in: StandIn) {
    let (_endpoint, _, store) = listed(stand_in).await;
    let service = serve(IdempotencyLayer::new(store.clone()));
    service.send_request("k").await;
    let first = the_only(&store).await;
    assert!(resolved(&store, &first, Resolution::Retry).await);
    assert!(
        !resolved(&store, &first, Resolution::Free).await,
        "resolved"
    );
    assert_eq!(unresolved(&store).await, []);
    let orphan = only(&store, State::Orphaned).await;
    assert_eq!((orphan.id(), orphan.generation()), (first.id(), 1));
    assert!(orphan.retry_allowed);

    let other = send(&service.app, post("/cancel", "k", "another request")).await;
    assert_eq!(other.code(), "key-reused");
    // The service returns `NeedsAttention` again, in a later generation. The decision about the first generation does
    // not apply to it.
    assert_eq!(
        service.send_request("k").await.status,
        StatusCode::BAD_GATEWAY
    );
    let second = the_only(&store).await;
    assert_eq!((second.id(), second.generation()), (first.id(), 2));
    assert!(!resolved(&store, &first, Resolution::Free).await);
    assert!(resolved(&store, &second, Resolution::Retry).await);
    service.set_needs_attention(false);
    assert_eq!(service.send_request("k").await.status, StatusCode::CREATED);
    assert!(service.send_request("k").await.is_replay());
    assert_eq!(service.takeovers(), [false, true, true]);
    assert_eq!(unresolved(&store).await, []);
    for state in [State::InProgress, State::Orphaned] {
        assert_eq!(pages(&store, state, 10).await.concat(), []);
    }
}

// S-240
#[tokio::test]
async fn retry_resolution_is_takeover_on_dynoxide() {
    retry_resolution_is_takeover(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn retry_resolution_is_takeover_on_moto() {
    retry_resolution_is_takeover(StandIn::Moto).await;
}

// S-241
#[tokio::test]
async fn allowed_retry_executes_once_under_refuse() {
    let (_endpoint, _, store) = listed(StandIn::Dynoxide).await;
    let layer = IdempotencyLayer::new(store.clone()).with_orphan_policy(OrphanPolicy::Refuse);
    let service = serve(layer);
    service.send_request("k").await;
    assert!(resolved(&store, &the_only(&store).await, Resolution::Retry).await);
    assert_eq!(
        service.send_request("k").await.status,
        StatusCode::BAD_GATEWAY
    );
    assert_eq!(service.effects.count(), 2);
    // The second execution failed again, and needs another decision.
    service.assert_refused("k").await;
    assert!(resolved(&store, &the_only(&store).await, Resolution::Retry).await);
    service.set_needs_attention(false);
    assert_eq!(service.send_request("k").await.status, StatusCode::CREATED);
    assert_eq!(service.takeovers(), [false, true, true]);
}

async fn settled_attention_is_replayed(stand_in: StandIn) {
    let (_endpoint, _, store) = listed(stand_in).await;
    let service = serve(IdempotencyLayer::new(store.clone()));
    service.send_request("k").await;
    let entry = the_only(&store).await;
    let mut response = http::Response::new(Bytes::from_static(b"refunded by hand"));
    *response.status_mut() = StatusCode::ACCEPTED;
    let settled = Resolution::Complete {
        record: service.layer.encode_response_record(entry.id(), &response),
        retention: Ttl::from_secs(60),
    };
    let outcome = store.resolve(entry.seen(), &settled).await;
    let ResolveOutcome::Applied(Some(after)) = outcome.expect("the server runs") else {
        panic!("the entry was as it was seen");
    };
    let details = store.get(entry.id()).await.expect("the server runs");
    let record = details.and_then(|details| details.record);
    let length = record.map(|record| record.len() as u64);
    assert_eq!((after.record_bytes, length.is_some()), (length, true));
    assert!(!resolved(&store, &entry, settled).await, "twice");
    let replay = service.send_request("k").await;
    assert_eq!(
        (replay.status, replay.text()),
        (StatusCode::ACCEPTED, "refunded by hand")
    );
    assert!(replay.is_replay());
    assert_eq!(service.effects.count(), 1);
    assert_eq!(unresolved(&store).await, []);
}

// S-242
#[tokio::test]
async fn settled_entry_is_replayed_on_dynoxide() {
    settled_attention_is_replayed(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn settled_entry_is_replayed_on_moto() {
    settled_attention_is_replayed(StandIn::Moto).await;
}

// S-243
/// Consumers: an entry of `run_once` that needs attention is resolved with the value that the work would have returned.
#[tokio::test]
async fn work_attention_is_settled_with_value() {
    let (_endpoint, _, store) = listed(StandIn::Dynoxide).await;
    let layer = IdempotencyLayer::new(store.clone()).with_store_timeout(PATIENCE);
    let work = async |_lease: Lease| Err::<u32, _>(WorkError::NeedsAttention(REFUND_FAILED, "why"));
    let first = layer.run_once("message-42", "refund 7", work).await;
    assert_eq!(first.expect("an outcome"), Outcome::Failed("why"));
    let entry = the_only(&store).await;
    assert_eq!(&*entry.operation, "run_once");
    assert_eq!(layer.run_once_key_id("message-42"), *entry.id());
    let settled = Resolution::Complete {
        record: layer.encode_value_record(entry.id(), &7),
        retention: Ttl::from_secs(60),
    };
    assert!(resolved(&store, &entry, settled).await);
    let again = layer.run_once("message-42", "refund 7", work).await;
    assert_eq!(again.expect("an outcome"), Outcome::Replayed(7));
}

/// The item is deleted, and its former holder stores the outcome late. The new item has neither owner nor operation.
#[tokio::test]
async fn attention_is_resolved_after_entry_loss() {
    let (_endpoint, table, store) = listed(StandIn::Dynoxide).await;
    let service = serve(IdempotencyLayer::new(store.clone()));
    service.send_request("k").await;
    let entry = the_only(&store).await;
    let claim = Claim::new(*entry.id(), Fingerprint::from_bytes([1; 32])).expect("randomness");
    let Acquired::Completed { record, .. } = store.acquire(&claim).await.expect("it runs") else {
        panic!("expected a record");
    };
    assert!(resolved(&store, &entry, Resolution::Free).await);

    let lost = claim.lease_ref(3);
    let completed = store.complete(&lost, record, Ttl::MAX);
    completed.await.expect("absent");
    let entry = the_only(&store).await;
    assert_eq!(
        (&*entry.owner, &*entry.operation, entry.generation()),
        ("", "", 3)
    );
    assert!(resolved(&store, &entry, Resolution::Retry).await);
    let taken = store.acquire(&claim).await.expect("it runs");
    assert!(
        matches!(
            taken,
            Acquired::Granted {
                generation: 4,
                takeover: true
            }
        ),
        "{taken:?}"
    );

    // Its age grows until it is resolved, and it does not expire.
    store.release(&claim.lease_ref(4)).await.expect("it runs");
    let years =
        options().with_clock(|| SystemTime::now() + Duration::from_secs(50 * 365 * 24 * 60 * 60));
    let later = years.store(&client(shared(StandIn::Dynoxide).address()), table.as_str());
    service.send_request("other").await;
    let entry = the_only(&later).await;
    let age = entry.age.as_secs();
    assert!(age > 49 * 365 * 24 * 60 * 60, "{age}");
    let service = serve(IdempotencyLayer::new(later));
    service.assert_refused("other").await;
    assert_eq!(service.effects.count(), 0);
}

#[tokio::test]
async fn attention_is_refused_without_listing() {
    let (_endpoint, table, listing) = listed(StandIn::Dynoxide).await;
    let store = options().with_index_shards(0);
    let store = store.store(&client(shared(StandIn::Dynoxide).address()), table.as_str());
    let service = serve(IdempotencyLayer::new(store));
    service.send_request("k").await;
    service.assert_refused("k").await;
    assert_eq!(unresolved(&listing).await, []);
    assert_eq!(service.effects.count(), 1);
}

// ---- Orphans ----

#[tokio::test]
async fn orphan_is_listed_until_expiry() {
    let (_endpoint, table, store) = listed(StandIn::Dynoxide).await;
    let ago = |seconds| {
        let then = move || SystemTime::now() - Duration::from_secs(seconds);
        let options = options().with_clock(then);
        options.store(&client(shared(StandIn::Dynoxide).address()), table.as_str())
    };
    let first = claim(1);
    hold(&ago(3600), &first).await;
    let mut again = claim(1);
    again.token = Claim::new(first.id, first.fingerprint)
        .expect("randomness")
        .token;
    assert_eq!(hold(&ago(1800), &again).await.generation, 2);
    // An orphan is stored for 24 hours.
    hold(&ago(25 * 3600), &claim(2)).await;

    let entry = only(&store, State::Orphaned).await;
    assert_eq!((*entry.id(), entry.generation()), (first.id, 2));
    let age = entry.age.as_secs();
    assert!((1780..=1900).contains(&age), "{age}");
    assert_eq!(Some(entry.since), entry.lease_expires);
}

/// All entries may be in one of the partitions.
#[tokio::test]
async fn count_that_equals_limit_is_exact() {
    let (_endpoint, _, store) = listed(StandIn::Dynoxide).await;
    for n in 0..4 {
        let mut claim = claim(n);
        claim.lease = Ttl::from_secs(600);
        hold(&store, &claim).await;
    }
    for (limit, counted) in [(3, (3, false)), (4, (4, true)), (5, (4, true))] {
        let summary = store.summary(limit).await.expect("the server runs");
        let count = summary.count(State::InProgress).expect("it is listed");
        assert_eq!((count.value, count.is_exact), counted, "{limit}");
    }
}

/// The service has not deleted the expired orphans yet. There are more than a count examines.
#[tokio::test]
async fn live_orphan_is_counted_with_expired_ones() {
    let (_endpoint, table, store) = listed(StandIn::Dynoxide).await;
    let ago = |seconds| {
        let then = move || SystemTime::now() - Duration::from_secs(seconds);
        let options = options().with_clock(then).with_index_shards(1);
        options.store(&client(shared(StandIn::Dynoxide).address()), table.as_str())
    };
    let before = ago(25 * 3600);
    for n in 0..300 {
        hold(&before, &claim(n)).await;
    }
    hold(&ago(3600), &claim(300)).await;
    let summary = store.summary(10).await.expect("the server runs");
    let counted = summary.count(State::Orphaned).expect("it is listed");
    assert_eq!((counted.value, counted.is_exact), (1, false));
    let entry = only(&store, State::Orphaned).await;
    assert_eq!(*entry.id(), claim(300).id);
}

/// A listing reports an unreadable entry, because an operator may search for it. The entry hides no other one.
async fn unreadable_entry_is_listed_and_deleted(stand_in: StandIn) {
    use tower_idempotency_dynamodb::aws_sdk_dynamodb::{primitives::Blob, types::AttributeValue};

    let (_endpoint, table, store) = listed(stand_in).await;
    for n in 0..20 {
        let mut claim = claim(n);
        // Moto may be slow.
        claim.lease = Ttl::from_secs(3600);
        hold(&store, &claim).await;
    }
    // Writes entries of a later version, the oldest one in each partition.
    for shard in 0..8 {
        let put = client(shared(stand_in).address()).put_item();
        put.table_name(&table)
            .item("id", AttributeValue::B(Blob::new([shard; 32])))
            .item("listed", AttributeValue::S(format!("in-progress#{shard}")))
            .item("since", AttributeValue::N("1".to_owned()))
            .send()
            .await
            .expect("the server runs");
    }
    for limit in [1, 3, 100] {
        let mut entries = pages(&store, State::InProgress, limit).await.concat();
        let unreadable = entries.extract_if(.., |it| it.state() == State::Unreadable);
        let unreadable: Vec<_> = unreadable.collect();
        assert_eq!((unreadable.len(), entries.len()), (8, 20), "{limit}");
        for entry in &unreadable {
            let problem = entry.problem.as_deref().expect("a reason");
            assert!(
                problem.contains("expected a number in expires"),
                "{problem}"
            );
        }
    }
    let orphans = pages(&store, State::Orphaned, 100).await.concat();
    assert_eq!(orphans.len(), 8, "in each listing that meets them");
    for entry in orphans {
        let details = store.get(entry.id()).await.expect("the server runs");
        let details = details.expect("it exists");
        assert_eq!(details.entry.seen(), entry.seen());
        let mut claim = claim(0);
        claim.id = *entry.id();
        store.acquire(&claim).await.expect_err("of a later version");
        assert!(!resolved(&store, &changed(&entry), Resolution::DeleteRecord).await);
        assert!(resolved(&store, &entry, Resolution::DeleteRecord).await);
        assert!(!resolved(&store, &entry, Resolution::DeleteRecord).await);
        hold(&store, &claim).await;
    }
}

/// Returns the entry as an operator saw it before its contents changed.
fn changed(entry: &Entry) -> Entry {
    Entry::unreadable(
        *entry.id(),
        entry.seen().version() ^ 1,
        "of a later version",
    )
}

#[tokio::test]
async fn unreadable_entry_is_listed_and_deleted_on_dynoxide() {
    unreadable_entry_is_listed_and_deleted(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn unreadable_entry_is_listed_and_deleted_on_moto() {
    unreadable_entry_is_listed_and_deleted(StandIn::Moto).await;
}

// F-174
/// The operator's clock is a minute ahead of the service and of the lease holder. A live lease looks like an orphan.
#[tokio::test]
async fn fast_clock_frees_no_live_lease() {
    const MINUTE: Duration = Duration::from_secs(60);
    let (endpoint, table, store) = listed(StandIn::Dynoxide).await;
    let holder = options().with_clock(|| SystemTime::now() - MINUTE);
    let holder = holder.store(&client(shared(StandIn::Dynoxide).address()), table.as_str());
    let claim = claim(1);
    let lease = hold(&holder, &claim).await;
    let entry = only(&store, State::Orphaned).await;

    endpoint.calls();
    endpoint.set_date_behind(MINUTE);
    for resolution in [Resolution::Free, Resolution::Retry] {
        let refused = store.resolve(entry.seen(), &resolution).await;
        let error = refused.expect_err("another time");
        let problem = std::error::Error::source(&error).map(ToString::to_string);
        let problem = problem.unwrap_or_else(|| error.to_string());
        assert!(
            problem.contains("ahead of the clock of DynamoDB"),
            "{problem}"
        );
    }
    assert_eq!(endpoint.operations(), ["GetItem"; 2]);
    let error = store.check().await.expect_err("another time");
    assert_eq!(error.kind(), CheckErrorKind::Unsafe);
    assert!(
        error.to_string().contains("ahead of the clock of DynamoDB"),
        "{error}"
    );

    // The lease is still held.
    let renewed = holder.renew(&lease, Ttl::from_secs(15)).await;
    renewed.expect("the lease is held");
    endpoint.set_date_behind(Duration::ZERO);
    store.check().await.expect("the same time");
    let entry = only(&store, State::Orphaned).await;
    assert!(resolved(&store, &entry, Resolution::Free).await);
}

/// The reply is lost after the write. The next attempt recognizes its own write.
#[tokio::test]
async fn resolution_with_lost_reply_is_applied() {
    let (endpoint, _, store) = listed(StandIn::Dynoxide).await;
    let service = serve(IdempotencyLayer::new(store.clone()));
    service.send_request("k").await;
    let entry = the_only(&store).await;
    endpoint.calls();
    endpoint.set(EndpointFault::LoseWriteReplies(1));
    assert!(resolved(&store, &entry, Resolution::Retry).await);
    let calls = endpoint.operations();
    assert_eq!(calls, ["GetItem", "UpdateItem", "UpdateItem"]);
    assert!(only(&store, State::Orphaned).await.retry_allowed);
}

// F-176
/// The reply is lost after the deletion. The outcome is unknown: a second attempt would find no entry.
#[tokio::test]
async fn deletion_with_lost_reply_is_unknown() {
    let (endpoint, _, store) = listed(StandIn::Dynoxide).await;
    let service = serve(IdempotencyLayer::new(store.clone()));
    service.send_request("k").await;
    let attention = the_only(&store).await;
    let completed = claim(1);
    let lease = hold(&store, &completed).await;
    let record = b"\x01\x00\0\0\0\0".to_vec().into();
    let completed = store.complete(&lease, record, Ttl::from_secs(600)).await;
    completed.expect("the server runs");
    let found = store.get(&lease.id).await.expect("the server runs");
    let completed = found.expect("it exists").entry;
    for (entry, resolution) in [
        (attention, Resolution::Free),
        (completed, Resolution::DeleteRecord),
    ] {
        endpoint.calls();
        endpoint.set(EndpointFault::LoseWriteReplies(1));
        let unknown = store.resolve(entry.seen(), &resolution).await;
        let name = resolution.name();
        let error = unknown.expect_err(name);
        assert_eq!(error.kind(), InspectErrorKind::Backend, "{name}");
        assert_eq!(endpoint.operations(), ["GetItem", "DeleteItem"], "{name}");
        assert_eq!(
            store.get(entry.id()).await.expect("it runs"),
            None,
            "{name}"
        );
    }
}

/// With such a TTL setting, the service would delete no items or the wrong ones.
async fn refuses_other_ttl_attribute(stand_in: StandIn) {
    use tower_idempotency_dynamodb::aws_sdk_dynamodb::types::TimeToLiveSpecification;

    let server = shared(stand_in);
    let (client, table) = (client(server.address()), server.new_table());
    let store = DynamoDbStore::new(&client, table.as_str());
    store.create_table().await.expect("made");
    let set = async |name: &str, enabled| {
        let specification = TimeToLiveSpecification::builder()
            .attribute_name(name)
            .enabled(enabled)
            .build()
            .expect("complete");
        let update = client.update_time_to_live().table_name(&table);
        let update = update.time_to_live_specification(specification);
        update.send().await.expect("the server runs");
    };
    set("ttl", false).await;
    set("expires_at", true).await;
    let error = store.create_table().await.expect_err("another attribute");
    assert_eq!(error.kind(), DynamoDbErrorKind::Unusable, "{stand_in:?}");
    assert!(error.to_string().contains("attribute `ttl`"), "{error}");
    set("expires_at", false).await;
    store.create_table().await.expect("turned on");
    let described = client.describe_time_to_live().table_name(&table);
    let described = described.send().await.expect("the server runs");
    let described = described.time_to_live_description.expect("described");
    assert_eq!(described.attribute_name(), Some("ttl"));
}

#[tokio::test]
async fn other_ttl_attribute_is_refused_on_dynoxide() {
    refuses_other_ttl_attribute(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn other_ttl_attribute_is_refused_on_moto() {
    refuses_other_ttl_attribute(StandIn::Moto).await;
}

async fn refuses_other_schema(stand_in: StandIn) {
    use tower_idempotency_dynamodb::aws_sdk_dynamodb::types::{
        AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType,
    };
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
    assert!(
        error
            .to_string()
            .contains("the partition key `id` of type B"),
        "{error}"
    );
}

#[tokio::test]
async fn other_schema_is_refused_on_dynoxide() {
    refuses_other_schema(StandIn::Dynoxide).await;
}

#[tokio::test]
#[ignore = "moto is slow; scripts/test --all runs this test"]
async fn other_schema_is_refused_on_moto() {
    refuses_other_schema(StandIn::Moto).await;
}
