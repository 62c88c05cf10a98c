//! Two versions of the store on one table at the same time.
//!
//! The other version is frozen below: its expressions, and the items that it writes. All later versions must work together
//! with them. Add expressions and items, but do not change any.

use std::{
    collections::HashMap,
    time::{Duration, UNIX_EPOCH},
};

use tests::{
    dynamodb::ManualClock,
    servers::dynamodb::{StandIn, client, shared},
    versions::{EarlierVersion, FINGERPRINT, RECORD, Reply, claims, share_entries, take_over},
};
use tower_idempotency::{
    inspect::{Inspect, Query, State},
    store::{Acquired, Claim, KeyId, OrphanPolicy, Store, Token, Ttl},
};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{
        Client,
        operation::{delete_item::DeleteItemError, update_item::UpdateItemError},
        primitives::Blob,
        types::{AttributeValue, ReturnValue, ReturnValuesOnConditionCheckFailure},
    },
};

type Item = HashMap<String, AttributeValue>;

const WORKS: &str = "the server runs";
const SKEW: Duration = Duration::from_secs(2);

// ---- Expressions of the first version ----

const CAN_ACQUIRE: &str = "attribute_not_exists(#id) \
    OR (#status <> :in_progress AND #expires <= :passed) \
    OR (#status = :in_progress AND #expires > :passed AND #fingerprint = :fingerprint \
        AND (#token = :token OR #lease_ends <= :passed))";
const ACQUIRE: &str = "SET #status = :in_progress, #token = :token, \
    #lease_ends = :lease_ends, #expires = :expires, #ttl = :ttl, #orphan_retention = :orphan_retention, #orphan_retention_seconds = :orphan_retention_seconds, \
    #owner = :owner, #operation = :operation, \
    #created = if_not_exists(#since, :now), #since = if_not_exists(#since, :now), \
    #generation = if_not_exists(#granted.#this_token, :one) + if_not_exists(#grants, :zero), \
    #grants = if_not_exists(#granted.#this_token, :one) + if_not_exists(#grants, :zero), \
    #granted = :granted, #fingerprint = :fingerprint, #listed = :listed REMOVE #record, #completed, #reason";
const IS_HOLDER: &str = "#status = :in_progress AND #token = :token AND #expires > :passed";
const RENEW: &str = "SET #lease_ends = :lease_ends, #expires = :lease_ends + #orphan_retention, \
    #ttl = :ttl + #orphan_retention_seconds";
const CAN_COMPLETE: &str = "attribute_not_exists(#id) OR #expires <= :passed \
    OR (#status = :in_progress AND (#token = :token OR attribute_not_exists(#token)))";
const COMPLETE: &str = "SET #status = :completed, #token = :token, #fingerprint = :fingerprint, \
    #generation = if_not_exists(#grants, :generation), #created = if_not_exists(#since, :now), #completed = :now, \
    #expires = :expires, #ttl = :ttl, #record = :record \
    REMOVE #listed, #since, #grants, #granted, #orphan_retention, #orphan_retention_seconds";
const IS_FIRST_HOLDER: &str = "#status = :in_progress AND #token = :token AND #generation = :one";
const RELEASE_AS_ORPHAN: &str = "SET #lease_ends = :passed, #expires = :now + #orphan_retention, #ttl = :ttl + #orphan_retention_seconds \
    REMOVE #token, #granted";

/// The first version of the store, with a client of its own.
struct VersionOne {
    client: Client,
    table: String,
    clock: ManualClock,
}

impl VersionOne {
    /// Returns the time in milliseconds, and the latest deadline that has passed on every clock.
    fn moment(&self) -> (u64, u64) {
        let now = self.clock.now().duration_since(UNIX_EPOCH);
        let now = now.expect("after 1970").as_millis();
        let now = u64::try_from(now).expect("a few digits");
        (now, now - SKEW.as_secs() * 1000)
    }

    /// Updates the item under a condition. Returns the new item, or the one that failed the condition.
    async fn update(
        &self,
        claim: &Claim,
        condition: &str,
        update: &str,
        values: Vec<(&str, AttributeValue)>,
    ) -> Result<Item, Item> {
        let sent = self
            .client
            .update_item()
            .table_name(&self.table)
            .key("id", binary(claim.id.as_bytes()))
            .condition_expression(condition)
            .update_expression(update)
            .set_expression_attribute_names(Some(names(claim, &[condition, update])))
            .set_expression_attribute_values(Some(value_map(values)))
            .return_values(ReturnValue::AllNew)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
            .send();
        match Box::pin(sent).await {
            Ok(updated) => Ok(updated.attributes.expect("the new item")),
            Err(error) => match error.into_service_error() {
                UpdateItemError::ConditionalCheckFailedException(failed) => {
                    Err(failed.item.expect("the item of the refusal"))
                }
                error => panic!("{error}"),
            },
        }
    }
}

impl EarlierVersion for VersionOne {
    async fn acquire(&mut self, claim: &Claim) -> Reply {
        let (now, passed) = self.moment();
        let lease_ends = now + claim.lease.as_millis();
        let retention = claim.orphan_retention.as_millis();
        let seconds = retention.div_ceil(1000);
        let [first, second, ..] = claim.id.as_bytes();
        let shard = u16::from_be_bytes([*first, *second]) % 8;
        let granted = HashMap::from([(hex(claim.token.as_bytes()), number(0))]);
        let values = vec![
            (":in_progress", text("in-progress")),
            (":token", binary(claim.token.as_bytes())),
            (":fingerprint", binary(claim.fingerprint.as_bytes())),
            (":lease_ends", number(lease_ends)),
            (":expires", number(lease_ends + retention)),
            (":ttl", number(lease_ends.div_ceil(1000) + seconds)),
            (":orphan_retention", number(retention)),
            (":orphan_retention_seconds", number(seconds)),
            (":owner", text("other")),
            (":operation", text("POST /")),
            (":now", number(now)),
            (":passed", number(passed)),
            (":one", number(1)),
            (":zero", number(0)),
            (":granted", AttributeValue::M(granted)),
            (":listed", text(&format!("in-progress#{shard}"))),
        ];
        let item = match self.update(claim, CAN_ACQUIRE, ACQUIRE, values).await {
            Ok(item) => return Reply::Granted(read_number(&item, "generation")),
            Err(item) => item,
        };
        assert_eq!(item["fingerprint"], binary(FINGERPRINT.as_bytes()));
        if item["status"] == text("completed") {
            assert_eq!(item["record"], binary(RECORD));
            return Reply::Completed;
        }
        assert_eq!(item["status"], text("in-progress"));
        assert!(read_number(&item, "lease_ends") > passed, "an orphan");
        Reply::InProgress
    }

    async fn renew(&mut self, claim: &Claim) -> bool {
        let (now, passed) = self.moment();
        let lease_ends = now + claim.lease.as_millis();
        let values = vec![
            (":in_progress", text("in-progress")),
            (":token", binary(claim.token.as_bytes())),
            (":passed", number(passed)),
            (":lease_ends", number(lease_ends)),
            (":ttl", number(lease_ends.div_ceil(1000))),
        ];
        self.update(claim, IS_HOLDER, RENEW, values).await.is_ok()
    }

    async fn complete(&mut self, claim: &Claim) -> bool {
        let (now, passed) = self.moment();
        let expires = now + 60_000;
        let values = vec![
            (":in_progress", text("in-progress")),
            (":completed", text("completed")),
            (":token", binary(claim.token.as_bytes())),
            (":fingerprint", binary(claim.fingerprint.as_bytes())),
            (":generation", number(1)),
            (":now", number(now)),
            (":passed", number(passed)),
            (":expires", number(expires)),
            (":ttl", number(expires.div_ceil(1000))),
            (":record", binary(RECORD)),
        ];
        match self.update(claim, CAN_COMPLETE, COMPLETE, values).await {
            Ok(_) => true,
            // This token completed the entry before.
            Err(item) => {
                item["status"] == text("completed")
                    && item["token"] == binary(claim.token.as_bytes())
            }
        }
    }

    async fn release(&mut self, claim: &Claim) {
        let values = vec![
            (":in_progress", text("in-progress")),
            (":token", binary(claim.token.as_bytes())),
            (":one", number(1)),
        ];
        let delete = self
            .client
            .delete_item()
            .table_name(&self.table)
            .key("id", binary(claim.id.as_bytes()))
            .condition_expression(IS_FIRST_HOLDER)
            .set_expression_attribute_names(Some(names(claim, &[IS_FIRST_HOLDER])))
            .set_expression_attribute_values(Some(value_map(values)))
            .send();
        let Err(error) = Box::pin(delete).await else {
            return;
        };
        match error.into_service_error() {
            DeleteItemError::ConditionalCheckFailedException(_) => {}
            error => panic!("{error}"),
        }
        // The lease is a takeover, or the token does not hold it.
        let (now, passed) = self.moment();
        let values = vec![
            (":in_progress", text("in-progress")),
            (":token", binary(claim.token.as_bytes())),
            (":passed", number(passed)),
            (":now", number(now)),
            (":ttl", number(now.div_ceil(1000))),
        ];
        let released = self.update(claim, IS_HOLDER, RELEASE_AS_ORPHAN, values);
        released.await.expect("a takeover");
    }
}

/// Returns the names of the attributes in the expressions.
fn names(claim: &Claim, expressions: &[&str]) -> HashMap<String, String> {
    let is_end = |c: char| !(c.is_ascii_lowercase() || c == '_' || c == '#');
    let words = expressions.iter().flat_map(|it| it.split(is_end));
    words
        .filter(|word| word.starts_with('#'))
        .map(|word| {
            let name = match &word[1..] {
                "this_token" => hex(claim.token.as_bytes()),
                name => name.to_owned(),
            };
            (word.to_owned(), name)
        })
        .collect()
}

fn value_map(values: Vec<(&str, AttributeValue)>) -> Item {
    let values = values.into_iter();
    values
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn number(value: u64) -> AttributeValue {
    AttributeValue::N(value.to_string())
}

fn text(value: &str) -> AttributeValue {
    AttributeValue::S(value.to_owned())
}

fn binary(bytes: &[u8]) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}

fn read_number(item: &Item, name: &str) -> u64 {
    match &item[name] {
        AttributeValue::N(digits) => digits.parse().expect("a number"),
        other => panic!("{name}: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// ---- Tests ----

/// Returns both versions, on a new table and with one clock.
async fn versions() -> (DynamoDbStore, VersionOne) {
    let server = shared(StandIn::Dynoxide);
    let (table, clock) = (server.new_table(), ManualClock::new());
    let (client, time) = (client(server.address()), clock.clone());
    let store = DynamoDbOptions::new()
        .with_timeout(Duration::from_secs(20))
        .with_clock_skew(SKEW)
        .with_clock(move || time.now())
        .store(&client, table.as_str());
    store.create_table().await.expect(WORKS);
    let version_one = VersionOne {
        client,
        table,
        clock,
    };
    (store, version_one)
}

// F-993
#[tokio::test]
async fn versions_share_table() {
    let (store, mut earlier) = versions().await;
    share_entries(&store, &mut earlier).await;
    let clock = earlier.clock.clone();
    let expire = async || clock.advance(SKEW + Duration::from_secs(1));
    take_over(&store, &mut earlier, expire).await;
    // Operators of this version see entries of the other one.
    let (claim, _) = claims(200);
    earlier.acquire(&claim).await;
    let listed = store.list(&Query::new(State::InProgress)).await;
    let entries = listed.expect(WORKS).entries;
    assert!(
        entries.iter().any(|entry| *entry.id() == claim.id),
        "{entries:?}"
    );
}

/// An item of the first version, at this moment.
fn item_of_v1(id: u8, own: Item, now: u64) -> Item {
    let mut item = HashMap::from([
        ("id".to_owned(), binary(&[id; 32])),
        ("fingerprint".to_owned(), binary(FINGERPRINT.as_bytes())),
        ("owner".to_owned(), text("host-1:4711")),
        ("operation".to_owned(), text("POST /payments")),
        ("created".to_owned(), number(now - 60_000)),
        ("expires".to_owned(), number(now + 86_400_000)),
        ("ttl".to_owned(), number(now / 1000 + 86_401)),
    ]);
    item.extend(own);
    item
}

/// Attributes of a lease of the first version. `token` is that of the holder, and `None` if a takeover was released.
fn lease_of_v1(token: Option<[u8; 16]>, generation: u64, lease_ends: u64, now: u64) -> Item {
    let mut lease = vec![
        ("status", text("in-progress")),
        ("lease_ends", number(lease_ends)),
        ("since", number(now - 60_000)),
        ("generation", number(generation)),
        ("grants", number(generation)),
        ("orphan_retention", number(86_400_000)),
        ("orphan_retention_seconds", number(86_400)),
    ];
    if let Some(token) = token {
        let granted = HashMap::from([(hex(&token), number(0))]);
        lease.push(("token", binary(&token)));
        lease.push(("granted", AttributeValue::M(granted)));
    }
    value_map(lease)
}

// F-993
#[tokio::test]
async fn items_of_v1_are_readable() {
    let (store, other) = versions().await;
    let (now, _) = other.moment();
    let expired = now - 60_000;
    let record = vec![
        ("status", text("completed")),
        ("token", binary(&[0xaa; 16])),
        ("generation", number(1)),
        ("completed", number(now - 59_000)),
        ("record", binary(RECORD)),
    ];
    for (id, own) in [
        (1, value_map(record)),
        (2, lease_of_v1(Some([0xbb; 16]), 1, now + 600_000, now)),
        (3, lease_of_v1(Some([0xcc; 16]), 3, expired, now)),
        (4, lease_of_v1(None, 2, expired, now)),
    ] {
        let put = other.client.put_item().table_name(&other.table);
        let put = put.set_item(Some(item_of_v1(id, own, now))).send();
        Box::pin(put).await.expect(WORKS);
    }

    let claim = |id| {
        let (mut claim, _) = claims(0);
        claim.id = KeyId::from_bytes([id; 32]);
        claim
    };
    let completed = store.acquire(&claim(1)).await.expect(WORKS);
    let Acquired::Completed {
        fingerprint,
        record,
        token,
        ..
    } = completed
    else {
        panic!("expected a record, found {completed:?}");
    };
    assert_eq!((fingerprint, &record[..]), (FINGERPRINT, RECORD));
    assert_eq!(token, Some(Token::from_bytes([0xaa; 16])));

    let in_progress = store.acquire(&claim(2)).await.expect(WORKS);
    assert!(
        matches!(in_progress, Acquired::InProgress { .. }),
        "{in_progress:?}"
    );
    // The process of the first version still holds its lease.
    let mut held = claim(2);
    held.token = Token::from_bytes([0xbb; 16]);
    let (lease, minute) = (held.lease_ref(1), Ttl::from_secs(60));
    store.renew(&lease, minute).await.expect(WORKS);
    let late = store.complete(&lease, "late".into(), minute).await;
    late.expect(WORKS);

    for (id, generation) in [(3, 4), (4, 3)] {
        let mut refusing = claim(id);
        refusing.orphans = OrphanPolicy::Refuse;
        let orphaned = store.acquire(&refusing).await.expect(WORKS);
        assert!(
            matches!(orphaned, Acquired::Orphaned { .. }),
            "{orphaned:?}"
        );
        let taken_over = store.acquire(&claim(id)).await.expect(WORKS);
        let expected = Acquired::Granted {
            generation,
            takeover: true,
        };
        assert_eq!(taken_over, expected, "{id}");
    }
}
