//! Executions without HTTP: `run_once`.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fmt::Debug,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use tests::{
    Effects,
    barrier::Barrier,
    creating,
    ledger::{CommitFault, Ledger},
    post, send,
};
use tokio::time::{Instant, advance, sleep};
use tower_idempotency::{
    Error, ErrorKind, IdempotencyLayer, Lease, MemoryStore, OrphanPolicy, Ttl,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
    store::StoreError,
    transaction::LeaseExt,
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

type Work<T, E = Infallible> = Result<Outcome<T, E>, Error>;

/// Runs work that counts and returns `value`.
async fn run<T>(layer: &IdempotencyLayer, effects: &Effects, value: T) -> Work<T>
where
    T: Serialize + DeserializeOwned + Send + 'static,
{
    run_as(layer, effects, "message-42", "invoice 7", value).await
}

async fn run_as<T>(
    layer: &IdempotencyLayer,
    effects: &Effects,
    key: &str,
    fingerprint: &str,
    value: T,
) -> Work<T>
where
    T: Serialize + DeserializeOwned + Send + 'static,
{
    let effects = effects.clone();
    let work = async move |_lease| {
        let _ = effects.happen();
        Ok(value)
    };
    layer.run_once(key, fingerprint, work).await
}

async fn assert_replayed<T>(value: T, other: T)
where
    T: Serialize + DeserializeOwned + Clone + PartialEq + Debug + Send + 'static,
{
    let (layer, effects) = (layer(), Effects::default());
    let first = run(&layer, &effects, value.clone()).await;
    assert_eq!(first.expect("executed"), Outcome::Executed(value.clone()));
    for _ in 0..2 {
        let again = run(&layer, &effects, other.clone()).await;
        assert_eq!(again.expect("replayed"), Outcome::Replayed(value.clone()));
    }
    assert_eq!(effects.count(), 1, "{value:?}");
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum State {
    Pending,
    Paid { at: u64 },
    Refused(String, i32),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Invoice {
    number: u64,
    lines: Vec<Line>,
    state: State,
    note: Option<String>,
    tags: BTreeMap<String, Option<bool>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Line {
    what: String,
    price: f64,
    raw: Vec<u8>,
}

fn invoice(number: u64) -> Invoice {
    Invoice {
        number,
        lines: vec![
            Line {
                what: "café".to_owned(),
                price: -0.1,
                raw: vec![0, 255],
            },
            Line {
                what: String::new(),
                price: f64::MAX,
                raw: Vec::new(),
            },
        ],
        state: State::Refused("card".to_owned(), i32::MIN),
        note: None,
        tags: BTreeMap::from([("a".to_owned(), None), ("b".to_owned(), Some(false))]),
    }
}

// S-346
#[tokio::test(start_paused = true)]
async fn any_value_is_replayed() {
    assert_replayed((), ()).await;
    assert_replayed(None, Some(7)).await;
    assert_replayed(Some(0), None).await;
    assert_replayed(String::new(), "x".to_owned()).await;
    assert_replayed(0_u64, 1).await;
    assert_replayed(i64::MIN, 1).await;
    assert_replayed(false, true).await;
    assert_replayed(Vec::<u8>::new(), vec![1]).await;
    assert_replayed(vec![(1_u8, 'x')], Vec::new()).await;
    assert_replayed(State::Pending, State::Paid { at: 1 }).await;
    assert_replayed(State::Paid { at: u64::MAX }, State::Pending).await;
    assert_replayed(Ok::<u8, String>(1), Err("no".to_owned())).await;
    assert_replayed(invoice(1), invoice(2)).await;
    assert_replayed("x".repeat(100_000), String::new()).await;
}

// S-347
/// MessagePack has only one nil, so these values would be equal.
#[tokio::test(start_paused = true)]
async fn some_of_nothing_is_replayed_as_none() {
    async fn becomes_none<T>(value: Option<T>)
    where
        T: Clone + Debug + PartialEq + Send + Serialize + DeserializeOwned + 'static,
    {
        let layer = layer();
        let first = layer
            .run_once("k", "f", {
                let value = value.clone();
                async move |_| Ok::<_, WorkError<Infallible>>(value)
            })
            .await;
        assert_eq!(first.expect("executed"), Outcome::Executed(value));
        let work = async |_| Ok::<Option<T>, WorkError<Infallible>>(None);
        let retry = layer.run_once("k", "f", work).await;
        assert_eq!(retry.expect("replayed"), Outcome::Replayed(None));
    }
    becomes_none(Some(())).await;
    becomes_none(Some(None::<u8>)).await;
    becomes_none(Some(serde_json::Value::Null)).await;
}

// S-348
#[tokio::test(start_paused = true)]
async fn value_is_replayed_for_retention() {
    let layer = layer().with_retention(Ttl::from_secs(60));
    let effects = Effects::default();
    let _ = run(&layer, &effects, 1).await.expect("executed");
    advance(Duration::from_millis(59_999)).await;
    let again = run(&layer, &effects, 2).await.expect("replayed");
    assert_eq!(again, Outcome::Replayed(1));
    advance(Duration::from_millis(1)).await;
    let later = run(&layer, &effects, 3).await.expect("executed");
    assert_eq!(later, Outcome::Executed(3));
    assert_eq!(effects.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn other_keys_and_namespaces_are_other_runs() {
    let (layer, effects) = (layer(), Effects::default());
    let other = layer.clone().with_namespace("other");
    for (layer, key) in [(&layer, "a"), (&layer, "b"), (&other, "a")] {
        let outcome = run_as(layer, &effects, key, "x", 1)
            .await
            .expect("executed");
        assert_eq!(outcome, Outcome::Executed(1));
    }
    assert_eq!(effects.count(), 3);
}

// S-349
#[tokio::test(start_paused = true)]
async fn other_fingerprint_is_mismatch() {
    let (layer, effects) = (layer(), Effects::default());
    let _ = run_as(&layer, &effects, "k", "a", 1)
        .await
        .expect("executed");
    let other = run_as(&layer, &effects, "k", "b", 2).await;
    assert_eq!(other.expect("an outcome"), Outcome::Mismatch);
    assert_eq!(effects.count(), 1);
}

// S-350
#[tokio::test(start_paused = true)]
async fn second_attempt_is_in_progress() {
    let (layer, effects) = (layer(), Effects::default());
    let running = tokio::spawn({
        let (layer, effects) = (layer.clone(), effects.clone());
        async move {
            let work = async move |_lease: Lease| {
                let _ = effects.happen();
                sleep(Duration::from_secs(3)).await;
                Ok::<_, WorkError<Infallible>>(1)
            };
            layer.run_once("message-42", "invoice 7", work).await
        }
    });
    sleep(Duration::from_secs(1)).await;
    assert_eq!(layer.in_flight(), 1);
    match run(&layer, &effects, 2).await.expect("an outcome") {
        Outcome::InProgress { expires_in } => {
            assert_eq!(expires_in, Duration::from_secs(14));
        }
        other => panic!("{other:?}"),
    }
    let other = run_as(&layer, &effects, "message-42", "invoice 8", 2).await;
    assert_eq!(
        other.expect("an outcome"),
        Outcome::Mismatch,
        "judged first"
    );
    let first = running.await.expect("no panic").expect("executed");
    assert_eq!(first, Outcome::Executed(1));
    assert_eq!(effects.count(), 1);
    assert_eq!(layer.in_flight(), 0);
}

/// Leaves an orphan: the work returned `WorkError::Orphan`, and its lease expired.
async fn orphan(layer: &IdempotencyLayer, effects: &Effects) {
    let counted = effects.clone();
    let work = async move |_lease: Lease| {
        let _ = counted.happen();
        Err::<u64, _>(WorkError::Orphan("no response from the bank"))
    };
    let outcome = layer.run_once("message-42", "invoice 7", work).await;
    assert_eq!(
        outcome.expect("an outcome"),
        Outcome::Failed("no response from the bank")
    );
}

// S-352
#[tokio::test(start_paused = true)]
async fn held_key_blocks_until_lease_expiry() {
    let (layer, effects) = (layer(), Effects::default());
    orphan(&layer, &effects).await;
    for _ in 0..14 {
        let meanwhile = run(&layer, &effects, 2_u64).await.expect("an outcome");
        assert!(
            matches!(meanwhile, Outcome::InProgress { .. }),
            "{meanwhile:?}"
        );
        advance(Duration::from_secs(1)).await;
    }
    advance(Duration::from_secs(1)).await;
    let counted = effects.clone();
    let work = async move |lease: Lease| {
        assert!(lease.is_takeover());
        assert_eq!(lease.generation(), 2);
        Ok::<_, WorkError<Infallible>>(counted.happen())
    };
    let taken_over = layer.run_once("message-42", "invoice 7", work).await;
    assert_eq!(taken_over.expect("executed"), Outcome::Executed(2));
    assert_eq!(effects.count(), 2);
}

// S-353
#[tokio::test(start_paused = true)]
async fn refused_orphan_is_not_run() {
    let layer = layer().with_orphan_policy(OrphanPolicy::Refuse);
    let effects = Effects::default();
    orphan(&layer, &effects).await;
    advance(Duration::from_secs(20)).await;
    match run(&layer, &effects, 2).await.expect("an outcome") {
        Outcome::Orphaned { since } => assert_eq!(since, Duration::from_secs(5)),
        other => panic!("{other:?}"),
    }
    let other = run_as(&layer, &effects, "message-42", "invoice 8", 2).await;
    assert_eq!(other.expect("an outcome"), Outcome::Mismatch);
    assert_eq!(effects.count(), 1);
}

// S-354
#[tokio::test(start_paused = true)]
async fn lost_lease_returns_own_value() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let (one, other) = (
        IdempotencyLayer::new(store.clone()),
        IdempotencyLayer::new(store.clone()),
    );
    let effects = Effects::default();
    let work = {
        let (other, effects) = (other.clone(), effects.clone());
        async move |lease: Lease| {
            let _ = effects.happen();
            advance(Duration::from_secs(16)).await;
            assert!(!lease.is_held());
            let taken_over = run(&other, &effects, "other".to_owned()).await;
            let other = Outcome::Executed("other".to_owned());
            assert_eq!(taken_over.expect("executed"), other);
            Ok::<_, WorkError<Infallible>>("own".to_owned())
        }
    };
    let outcome = one.run_once("message-42", "invoice 7", work).await;
    assert_eq!(
        outcome.expect("an outcome"),
        Outcome::LeaseLost("own".to_owned())
    );
    let again = run(&one, &effects, String::new()).await;
    let other = Outcome::Replayed("other".to_owned());
    assert_eq!(again.expect("replayed"), other);
    assert_eq!(effects.count(), 2);
}

// S-355
/// If the process that took over left no value, this process has the only value, and it is stored.
#[tokio::test(start_paused = true)]
async fn lost_lease_stores_value_if_rival_left_none() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let layers = [store.clone(), store.clone()].map(IdempotencyLayer::new);
    let [one, other] = layers.clone();
    let effects = Effects::default();
    let (work_of_other, reply) = (Barrier::closed(), Barrier::closed());
    let held_back = reply.clone();
    store.set_script(move |op, nth| match (op, nth) {
        (Operation::Complete, 1) => Fault::HoldReply(held_back.clone().into()),
        _ => Fault::None,
    });
    let work = {
        let (effects, barrier) = (effects.clone(), work_of_other.clone());
        async move |_lease| {
            let _ = effects.happen();
            advance(Duration::from_secs(16)).await;
            barrier.arrival().await;
            Ok::<_, WorkError<Infallible>>("own".to_owned())
        }
    };
    let running = tokio::spawn(async move { one.run_once("message-42", "invoice 7", work).await });
    sleep(Duration::from_secs(17)).await;
    let taking_over = {
        let barrier = work_of_other.clone();
        let work = async move |_lease| {
            barrier.pass().await;
            Err::<String, _>(WorkError::Release(()))
        };
        tokio::spawn(async move { other.run_once("message-42", "invoice 7", work).await })
    };
    // The other process holds the lease when this one calls complete, and has released it when the reply arrives.
    reply.arrival().await;
    work_of_other.open_for_good();
    let left = taking_over.await.expect("no panic").expect("an outcome");
    assert_eq!(left, Outcome::Failed(()));
    reply.open_for_good();
    let outcome = running.await.expect("no panic");
    let own = "own".to_owned();
    assert_eq!(outcome.expect("stored"), Outcome::Executed(own.clone()));
    for layer in layers {
        let again = run(&layer, &effects, String::new()).await;
        assert_eq!(again.expect("replayed"), Outcome::Replayed(own.clone()));
    }
    assert_eq!(effects.count(), 1);
}

// S-356
/// The stored value cannot be determined, but it is not the value of this execution.
#[tokio::test(start_paused = true)]
async fn lost_lease_returns_value_during_outage() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::LeaseLost);
    store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone());
    let work = async |lease: Lease| {
        lease.lost().await;
        Ok::<_, WorkError<Infallible>>("own".to_owned())
    };
    let outcome = layer.run_once("message-42", "invoice 7", work).await;
    assert_eq!(
        outcome.expect("an outcome"),
        Outcome::LeaseLost("own".to_owned())
    );
}

// S-356
/// The committed value may be stored, and differs from the returned value.
#[tokio::test(start_paused = true)]
async fn value_after_unacknowledged_commit_is_unknown() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::HangReply);
    ledger.store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(ledger.clone());
    let database = ledger.clone();
    let work = async move |lease: Lease| {
        let commit = database
            .begin()
            .commit_prepared(lease.prepare_value("paid".to_owned()));
        let timed_out = tokio::time::timeout(Duration::from_secs(1), commit).await;
        assert!(timed_out.is_err());
        Ok::<_, WorkError<Infallible>>("timed out".to_owned())
    };
    let outcome = layer.run_once("message-42", "invoice 7", work).await;
    assert_eq!(
        outcome.expect("an outcome"),
        Outcome::LeaseLost("timed out".to_owned())
    );
}

// S-351
#[tokio::test(start_paused = true)]
async fn failed_work_releases_key() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::default();
    let work = async |_lease: Lease| Err::<u64, _>(WorkError::Release("no connection"));
    let failed = layer.run_once("message-42", "invoice 7", work).await;
    assert_eq!(
        failed.expect("an outcome"),
        Outcome::Failed("no connection")
    );
    assert!(store.is_empty());
    let again = run(&layer, &effects, 1_u64).await.expect("executed");
    assert_eq!(again, Outcome::Executed(1));
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn question_mark_operator_releases_key() {
    let layer = layer();
    let work = async |_lease: Lease| {
        let number: u64 = "seven".parse::<u64>()?;
        Ok::<_, WorkError<std::num::ParseIntError>>(number)
    };
    let failed = layer.run_once("message-42", "invoice 7", work).await;
    assert!(matches!(failed, Ok(Outcome::Failed(_))));
    let effects = Effects::default();
    let again = run(&layer, &effects, 1_u64).await.expect("executed");
    assert_eq!(again, Outcome::Executed(1));
    assert_eq!(effects.count(), 1);
}

// F-017, S-094
#[tokio::test(start_paused = true)]
async fn panic_propagates_and_releases_key() {
    let (layer, effects) = (layer(), Effects::default());
    let panicking = {
        let (layer, effects) = (layer.clone(), effects.clone());
        tokio::spawn(async move {
            let work = async move |_lease: Lease| {
                assert!(effects.happen() > 1, "the first one fails");
                Ok::<_, WorkError<Infallible>>(1)
            };
            layer.run_once("message-42", "invoice 7", work).await
        })
    };
    let panic = panicking.await.expect_err("a panic").into_panic();
    assert_eq!(panic.downcast_ref(), Some(&"the first one fails"));
    assert_eq!(layer.in_flight(), 0);
    let again = run(&layer, &effects, 2).await.expect("executed");
    assert_eq!(again, Outcome::Executed(2));
    assert_eq!(effects.count(), 2);
}

// S-357
#[tokio::test(start_paused = true)]
async fn dropped_work_runs_to_completion() {
    let (layer, effects) = (layer(), Effects::default());
    let ended = Arc::new(AtomicBool::new(false));
    let work = {
        let (effects, ended) = (effects.clone(), Arc::clone(&ended));
        async move |_lease: Lease| {
            let _ = effects.happen();
            sleep(Duration::from_secs(5)).await;
            ended.store(true, Ordering::SeqCst);
            Ok::<_, WorkError<Infallible>>(1)
        }
    };
    let run_once = layer.run_once("message-42", "invoice 7", work);
    let left = tokio::time::timeout(Duration::from_secs(1), run_once).await;
    assert!(left.is_err());
    assert_eq!((effects.count(), layer.in_flight()), (1, 1));
    let meanwhile = run(&layer, &effects, 2).await.expect("an outcome");
    assert!(matches!(meanwhile, Outcome::InProgress { .. }));
    assert!(layer.drain(Duration::from_secs(10)).await);
    assert!(ended.load(Ordering::SeqCst));
    assert_eq!((effects.count(), layer.in_flight()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn dropped_work_is_replayed() {
    let (layer, effects) = (layer(), Effects::default());
    let counted = effects.clone();
    let work = async move |_lease: Lease| {
        sleep(Duration::from_secs(5)).await;
        Ok::<_, WorkError<Infallible>>(counted.happen())
    };
    let run_once = layer.run_once("message-42", "invoice 7", work);
    assert!(
        tokio::time::timeout(Duration::from_secs(1), run_once)
            .await
            .is_err()
    );
    sleep(Duration::from_secs(5)).await;
    let again = run(&layer, &effects, 7_u64).await.expect("replayed");
    assert_eq!(again, Outcome::Replayed(1));
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn unpolled_future_runs_nothing() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::default();
    drop(run(&layer, &effects, 1));
    tokio::task::yield_now().await;
    assert_eq!((effects.count(), store.all_calls()), (0, 0));
}

// S-358
#[tokio::test(start_paused = true)]
async fn oversized_value_leaves_tombstone() {
    for layer in [
        layer().with_response_limit(100),
        IdempotencyLayer::new(MemoryStore::new().with_max_bytes(1000))
            .with_compression_above(usize::MAX),
    ] {
        let effects = Effects::default();
        let large = "x".repeat(2000);
        let first = run(&layer, &effects, large.clone()).await;
        assert_eq!(first.expect("executed"), Outcome::Executed(large));
        for _ in 0..2 {
            let again = run(&layer, &effects, String::new()).await;
            assert_eq!(again.expect("an outcome"), Outcome::ValueNotRecorded);
        }
        assert_eq!(effects.count(), 1);
    }
}

/// A value that cannot be serialized.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Opaque(u8);

impl Serialize for Opaque {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("secret-value"))
    }
}

// S-359
#[tokio::test(start_paused = true)]
async fn unserializable_value_leaves_tombstone() {
    let (layer, effects) = (layer(), Effects::default());
    let first = run(&layer, &effects, Opaque(1)).await;
    assert_eq!(first.expect("executed"), Outcome::Executed(Opaque(1)));
    let again = run(&layer, &effects, Opaque(2)).await;
    assert_eq!(again.expect("an outcome"), Outcome::ValueNotRecorded);
    assert_eq!(effects.count(), 1);
}

/// A value that panics when it is serialized, after the work was done.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct PanickingValue(u8);

impl Serialize for PanickingValue {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        panic!("the intended panic")
    }
}

// S-359
#[tokio::test(start_paused = true)]
async fn value_panicking_on_serialize_leaves_tombstone() {
    let (layer, effects) = (layer(), Effects::default());
    let first = run(&layer, &effects, PanickingValue(1)).await;
    assert_eq!(
        first.expect("executed"),
        Outcome::Executed(PanickingValue(1))
    );
    let again = run(&layer, &effects, PanickingValue(2)).await;
    assert_eq!(again.expect("an outcome"), Outcome::ValueNotRecorded);
    assert_eq!(effects.count(), 1);
}

/// A value that serde writes and cannot read. Its buffer for tagged types takes each format for a readable one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Sent {
    To { address: IpAddr },
}

// S-359
#[tokio::test(start_paused = true)]
async fn value_without_round_trip_leaves_tombstone() {
    let (layer, effects) = (layer(), Effects::default());
    let sent = Sent::To {
        address: Ipv4Addr::LOCALHOST.into(),
    };
    let first = run(&layer, &effects, sent.clone()).await;
    assert_eq!(first.expect("executed"), Outcome::Executed(sent.clone()));
    let again = run(&layer, &effects, sent).await;
    assert_eq!(again.expect("an outcome"), Outcome::ValueNotRecorded);
    assert_eq!(effects.count(), 1);
}

/// A value that panics when it is read.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PanickingRead(u8);

impl<'de> Deserialize<'de> for PanickingRead {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("the intended panic")
    }
}

// S-359
#[tokio::test(start_paused = true)]
async fn value_panicking_on_read_leaves_tombstone() {
    let (layer, effects) = (layer(), Effects::default());
    let first = run(&layer, &effects, PanickingRead(1)).await;
    let expected = Outcome::Executed(PanickingRead(1));
    assert_eq!(first.expect("executed"), expected);
    let again = run(&layer, &effects, PanickingRead(2)).await;
    assert_eq!(again.expect("an outcome"), Outcome::ValueNotRecorded);
    assert_eq!(effects.count(), 1);
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Renamed {
    serial: u64,
}

// S-360
#[tokio::test(start_paused = true)]
async fn unreadable_value_is_error() {
    let (layer, effects) = (layer(), Effects::default());
    let _ = run(&layer, &effects, invoice(1)).await.expect("executed");
    for _ in 0..2 {
        let error = run(&layer, &effects, Renamed { serial: 1 }).await;
        let error = error.expect_err("another type");
        assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        assert!(!error.is_retryable());
        assert!(!format!("{error} {error:?}").contains("café"), "{error:?}");
    }
    assert_eq!(effects.count(), 1);
    let still = run(&layer, &effects, invoice(2)).await.expect("replayed");
    assert_eq!(
        still,
        Outcome::Replayed(invoice(1)),
        "the value is not lost either"
    );
}

#[tokio::test(start_paused = true)]
async fn value_error_does_not_quote_value() {
    let (layer, effects) = (layer(), Effects::default());
    let secret = "secret-value".to_owned();
    let _ = run(&layer, &effects, secret).await.expect("executed");
    // The message of serde would contain the value: unknown variant `secret-value`.
    let error = run(&layer, &effects, State::Pending).await;
    let error = error.expect_err("another type");
    let mut shown = format!("{error} {error:?}");
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        shown += &format!(" {error} {error:?}");
        source = error.source();
    }
    assert!(!shown.contains("secret"), "{shown}");
    assert_eq!(effects.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn added_field_with_default_is_readable() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Old {
        number: u64,
        dropped: String,
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct New {
        #[serde(default)]
        added: Option<u64>,
        number: u64,
    }
    let (layer, effects) = (layer(), Effects::default());
    let old = Old {
        number: 7,
        dropped: String::new(),
    };
    let _ = run(&layer, &effects, old).await.expect("executed");
    let new = New {
        added: Some(1),
        number: 1,
    };
    let again = run(&layer, &effects, new).await.expect("replayed");
    let expected = New {
        added: None,
        number: 7,
    };
    assert_eq!(again, Outcome::Replayed(expected));
    assert_eq!(effects.count(), 1);
}

// S-361
#[tokio::test(start_paused = true)]
async fn work_needs_lease() {
    for fault in [Fault::CallLost, Fault::HangCall] {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault(Operation::Acquire, fault);
        let layer = IdempotencyLayer::new(store.clone());
        let effects = Effects::default();
        let started = Instant::now();
        let error = run(&layer, &effects, 1).await.expect_err("no lease");
        assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        assert!(std::error::Error::source(&error).is_some());
        assert!(started.elapsed() <= Duration::from_secs(4));
        assert_eq!(effects.count(), 0);
        store.clear_faults();
        sleep(Duration::from_secs(2)).await;
        let later = run(&layer, &effects, 1).await.expect("executed");
        assert_eq!(later, Outcome::Executed(1));
        assert_eq!(effects.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn unstored_value_is_stored_later() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::default();
    let first = run(&layer, &effects, 1).await.expect("executed");
    assert_eq!(first, Outcome::Executed(1));
    let meanwhile = run(&layer, &effects, 2).await.expect("an outcome");
    assert!(matches!(meanwhile, Outcome::InProgress { .. }));
    store.clear_faults();
    sleep(Duration::from_secs(2)).await;
    let later = run(&layer, &effects, 2).await.expect("replayed");
    assert_eq!(later, Outcome::Replayed(1));
    assert_eq!(effects.count(), 1);
}

// S-362
#[tokio::test(start_paused = true)]
async fn full_or_draining_layer_runs_nothing() {
    let effects = Effects::default();
    let full = layer().with_max_in_flight(0);
    let error = run(&full, &effects, 1).await.expect_err("full");
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    let draining = layer();
    assert!(draining.drain(Duration::ZERO).await);
    let error = run(&draining, &effects, 1).await.expect_err("draining");
    assert_eq!(error.kind(), ErrorKind::Draining);
    assert_eq!(effects.count(), 0);
}

// S-371
#[tokio::test(start_paused = true)]
async fn http_and_run_once_have_separate_entries() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let (app, requests) = creating(layer.clone());
    let effects = Effects::default();
    assert_eq!(send(&app, post("/orders", "k", "order")).await.status, 201);
    let outcome = run_as(&layer, &effects, "k", "order", 1).await;
    assert_eq!(outcome.expect("executed"), Outcome::Executed(1));
    assert_eq!(send(&app, post("/orders", "k2", "order")).await.status, 201);
    let outcome = run_as(&layer, &effects, "k2", "order", 2).await;
    assert_eq!(outcome.expect("executed"), Outcome::Executed(2));
    assert_eq!((requests.count(), effects.count(), store.len()), (2, 2, 4));
}

// S-424
/// The key has no principal, no route and no name of the work.
#[tokio::test(start_paused = true)]
async fn equal_key_skips_other_work() {
    let layer = layer();
    let (sends, books) = (Effects::default(), Effects::default());
    let sent = run_as(&layer, &sends, "event-7", "{}", ()).await;
    assert_eq!(sent.expect("executed"), Outcome::Executed(()));
    let booked = run_as(&layer, &books, "event-7", "{}", ()).await;
    assert_eq!(booked.expect("replayed"), Outcome::Replayed(()));
    assert_eq!((sends.count(), books.count()), (1, 0));
    // With the name of the work in the key, or with a namespace for each kind of work, each one runs.
    let booked = run_as(&layer, &books, r#"["book","event-7"]"#, "{}", ()).await;
    assert_eq!(booked.expect("executed"), Outcome::Executed(()));
    let ledger = layer.with_namespace("ledger");
    let booked = run_as(&ledger, &books, "event-7", "{}", ()).await;
    assert_eq!(booked.expect("executed"), Outcome::Executed(()));
    assert_eq!((sends.count(), books.count()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn derived_key_is_stable_across_runs() {
    let layer = layer();
    let derived = async || {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let work = async move |lease: Lease| {
            let keys = (lease.derive("charge"), lease.derive("email"));
            sender.send(keys).expect("the receiver waits");
            Err::<(), _>(WorkError::Release("again"))
        };
        let failed = layer.run_once("message-42", "invoice 7", work).await;
        assert_eq!(failed.expect("an outcome"), Outcome::Failed("again"));
        receiver.await.expect("keys")
    };
    let (first, second) = (derived().await, derived().await);
    assert_eq!(first, second);
    assert_ne!(first.0, first.1);
    assert_eq!(first.0.len(), 64);
}

// ---- Work that commits its value itself ----

/// Runs work that commits the value "paid" with its effect. The work returns the result of `end` for the outcome of the
/// commit.
async fn pay<T>(
    ledger: &Ledger,
    end: fn(Result<String, StoreError>) -> Result<T, WorkError<&'static str>>,
) -> Work<T, &'static str>
where
    T: Serialize + DeserializeOwned + Send + 'static,
{
    let layer = IdempotencyLayer::new(ledger.clone());
    let ledger = ledger.clone();
    let work = async move |lease: Lease| {
        let mut tx = ledger.begin();
        tx.insert("payment");
        let prepared = lease.prepare_value("paid".to_owned());
        end(tx.commit_prepared(prepared).await)
    };
    layer.run_once("message-42", "invoice 7", work).await
}

fn committed(result: Result<String, StoreError>) -> Result<String, WorkError<&'static str>> {
    result.map_err(|_| WorkError::Release("not committed"))
}

async fn assert_paid_once(ledger: &Ledger) {
    let again = pay(ledger, committed).await.expect("a record");
    assert_eq!(again, Outcome::Replayed("paid".to_owned()));
    assert_eq!(ledger.rows().await, ["payment"]);
    assert_eq!(
        ledger.calls(Operation::Complete) + ledger.calls(Operation::Release),
        0
    );
}

// S-363
#[tokio::test(start_paused = true)]
async fn committed_value_needs_no_completion() {
    let paid = || Outcome::Executed("paid".to_owned());
    let ledger = Ledger::default();
    assert_eq!(pay(&ledger, committed).await.expect("executed"), paid());
    assert_eq!(ledger.store.calls(Operation::Acquire), 1, "no query");
    for fault in [CommitFault::Committed, CommitFault::ReplyLost] {
        let ledger = Ledger::default();
        ledger.next(fault);
        assert_eq!(pay(&ledger, committed).await.expect("executed"), paid());
        assert_paid_once(&ledger).await;
    }
    // The later result has no effect.
    let ends: [fn(Result<String, StoreError>) -> Result<String, WorkError<&'static str>>; 3] = [
        |_| Ok("something else".to_owned()),
        |_| Err(WorkError::Release("something else")),
        |_| Err(WorkError::Orphan("something else")),
    ];
    for end in ends {
        let ledger = Ledger::default();
        assert_eq!(pay(&ledger, end).await.expect("executed"), paid());
        assert_paid_once(&ledger).await;
    }
}

// S-364
#[tokio::test(start_paused = true)]
async fn committed_value_of_other_type_is_error() {
    let ledger = Ledger::default();
    let error = pay(&ledger, |_| Ok(7)).await.expect_err("another type");
    assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
    assert_paid_once(&ledger).await;
}

// S-365
#[tokio::test(start_paused = true)]
async fn panic_after_commit_keeps_value() {
    let ledger = Ledger::default();
    let panicking = ledger.clone();
    let task = tokio::spawn(async move { pay::<String>(&panicking, |_| panic!("after it")).await });
    assert!(task.await.expect_err("a panic").is_panic());
    assert_paid_once(&ledger).await;
}

// S-366
#[tokio::test(start_paused = true)]
async fn work_runs_again_after_failed_commit() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::CallLost);
    let failed = pay(&ledger, committed).await.expect("an outcome");
    assert_eq!(failed, Outcome::Failed("not committed"));
    assert!(ledger.rows().await.is_empty());
    let again = pay(&ledger, committed).await.expect("executed");
    assert_eq!(again, Outcome::Executed("paid".to_owned()));
    assert_eq!(ledger.rows().await, ["payment"]);
}

// S-367
#[tokio::test(start_paused = true)]
async fn unacknowledged_commit_returns_stored_value() {
    for (fault, rows) in [(CommitFault::HangReply, 1), (CommitFault::HangCall, 0)] {
        for end in [
            Err(WorkError::Release("timed out")),
            Err(WorkError::Orphan("timed out")),
            Ok("timed out".to_owned()),
        ] {
            let ledger = Ledger::default();
            ledger.next(fault.clone());
            let layer = IdempotencyLayer::new(ledger.clone());
            let (database, ends) = (ledger.clone(), end.clone());
            let work = async move |lease: Lease| {
                let mut tx = database.begin();
                tx.insert("payment");
                let prepared = lease.prepare_value("paid".to_owned());
                let commit = tx.commit_prepared(prepared);
                assert!(
                    tokio::time::timeout(Duration::from_secs(1), commit)
                        .await
                        .is_err()
                );
                ends
            };
            let outcome = layer
                .run_once("message-42", "invoice 7", work)
                .await
                .expect("an outcome");
            let held = matches!(end, Err(WorkError::Orphan(_)));
            let expected = match (rows, end) {
                (1, _) => Outcome::Executed("paid".to_owned()),
                // The work holds its key, so the commit may still arrive.
                (_, Err(WorkError::Orphan(error))) => Outcome::Unknown(error),
                (_, Err(_)) => Outcome::Failed("timed out"),
                (_, Ok(value)) => Outcome::Executed(value),
            };
            assert_eq!(outcome, expected);
            assert_eq!(ledger.rows().await.len(), rows);
            if held && rows == 0 {
                let again = run(&layer, &Effects::default(), String::new()).await;
                let again = again.expect("an outcome");
                assert!(matches!(again, Outcome::InProgress { .. }), "{again:?}");
            }
        }
    }
}

// S-368
/// If the work reports a failure and the key becomes free, the caller concludes that nothing was paid.
#[tokio::test(start_paused = true)]
async fn unverifiable_work_commit_is_outcome_unknown() {
    type End = fn(&'static str) -> WorkError<&'static str>;
    let ends: [End; 2] = [WorkError::Release, WorkError::Orphan];
    for (fault, end) in [CommitFault::HangReply, CommitFault::HangCall]
        .into_iter()
        .flat_map(|fault| ends.map(|end| (fault.clone(), end)))
    {
        let ledger = Ledger::default();
        ledger.next(fault);
        let layer = IdempotencyLayer::new(ledger.clone());
        let database = ledger.clone();
        let work = async move |lease: Lease| {
            let commit = database
                .begin()
                .commit_prepared(lease.prepare_value("paid".to_owned()));
            let timed_out = tokio::time::timeout(Duration::from_secs(1), commit).await;
            assert!(timed_out.is_err());
            database
                .store
                .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
            Err::<String, _>(end("timed out"))
        };
        let outcome = layer.run_once("message-42", "invoice 7", work).await;
        assert_eq!(outcome.expect("an outcome"), Outcome::Unknown("timed out"));
    }
}

// S-369
/// The tombstone shows that the work committed, and the work returns the value.
#[tokio::test(start_paused = true)]
async fn oversized_value_with_lost_commit_is_returned() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
    let layer = IdempotencyLayer::new(ledger.clone()).with_response_limit(10);
    let database = ledger.clone();
    let work = async move |lease: Lease| {
        database
            .store
            .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
        let prepared = lease.prepare_value("x".repeat(100));
        let committed = database.begin().commit_prepared(prepared).await;
        assert!(committed.is_err());
        Ok::<_, WorkError<()>>("x".repeat(100))
    };
    let outcome = layer.run_once("message-42", "invoice 7", work).await;
    let executed = Outcome::Executed("x".repeat(100));
    assert_eq!(outcome.expect("an outcome"), executed);
}

// S-370
#[tokio::test(start_paused = true)]
async fn oversized_committed_value_leaves_tombstone() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone()).with_response_limit(10);
    assert_commit_leaves_tombstone(&layer, &ledger, "x".repeat(100)).await;
}

// S-370
#[tokio::test(start_paused = true)]
async fn unreadable_committed_value_leaves_tombstone() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone());
    let sent = Sent::To {
        address: Ipv4Addr::LOCALHOST.into(),
    };
    assert_commit_leaves_tombstone(&layer, &ledger, sent).await;

    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone());
    assert_commit_leaves_tombstone(&layer, &ledger, PanickingRead(1)).await;
}

/// Runs work twice that commits `value` with its effect. Asserts that the second call gets no value and has no effect.
async fn assert_commit_leaves_tombstone<T>(layer: &IdempotencyLayer, ledger: &Ledger, value: T)
where
    T: Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + 'static,
{
    for expected in [Outcome::Executed(value.clone()), Outcome::ValueNotRecorded] {
        let (database, value) = (ledger.clone(), value.clone());
        let work = async move |lease: Lease| {
            let mut tx = database.begin();
            tx.insert("payment");
            let prepared = lease.prepare_value(value);
            tx.commit_prepared(prepared)
                .await
                .map_err(|_| WorkError::Orphan(()))
        };
        let outcome = layer.run_once("message-42", "invoice 7", work).await;
        assert_eq!(outcome.expect("an outcome"), expected);
    }
    assert_eq!(ledger.rows().await, ["payment"]);
}
