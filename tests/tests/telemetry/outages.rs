//! Warnings during an outage of the store, and about executions that do not end.

use std::time::Duration;

use axum::{Router, body::Body, routing::post};
use http::Request;
use tests::{Effects, send, unreadable_store::UnreadableStore};
use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower_idempotency::{
    ExecutionFailure, IdempotencyLayer, Lease, MemoryStore, NeedsAttention, OrphanPolicy,
    StoreFailure, Ttl,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
};

use crate::observability::{Flow, StartFlow, counted, logged};

pub(crate) fn order(key: &str) -> Request<Body> {
    tests::post("/", key, "")
}

/// An app whose handler takes `seconds`.
pub(crate) fn slow(layer: IdempotencyLayer, seconds: u64) -> (Router, Effects) {
    let effects = Effects::default();
    let counting = effects.clone();
    let handler = async move || {
        counting.happen();
        sleep(Duration::from_secs(seconds)).await;
    };
    let app = Router::new().route("/", post(handler)).route_layer(layer);
    (app, effects)
}

/// Returns the lines of this event at this level.
pub(crate) fn lines<'a>(log: &'a str, level: &str, event: &str) -> Vec<&'a str> {
    let is_event = |line: &&str| line.contains(&format!(" {level} ")) && line.contains(event);
    log.lines().filter(is_event).collect()
}

/// Returns the sum of the fields `count`.
pub(crate) fn sum_of_counts(lines: &[&str]) -> usize {
    let count = |line: &&str| {
        let (_, count) = line.split_once(" count=").expect("a count");
        let digits = count.split(|c: char| !c.is_ascii_digit()).next();
        digits
            .and_then(|it| it.parse::<usize>().ok())
            .expect("a number")
    };
    lines.iter().map(count).sum()
}

const OUTAGE_SECONDS: usize = 10;

/// Sends a request every 50 ms while the store fails.
async fn send_during_outage(layer: fn(FaultInjector<MemoryStore>) -> IdempotencyLayer) -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::CallLost);
    let (app, effects) = slow(layer(store), 0);
    let started = Instant::now();
    let mut requests = JoinSet::new();
    for n in 0..OUTAGE_SECONDS * 20 {
        let (app, request) = (app.clone(), order(&n.to_string()));
        requests.spawn(async move { drop(send(&app, request).await) });
        sleep(Duration::from_millis(50)).await;
    }
    requests.join_all().await;
    let elapsed = started.elapsed();
    assert!(elapsed.as_secs() < OUTAGE_SECONDS as u64 + 5, "{elapsed:?}");
    effects.count()
}

fn outage() -> Flow {
    Box::pin(send_during_outage(IdempotencyLayer::new))
}

fn outage_unprotected() -> Flow {
    Box::pin(send_during_outage(|store| {
        IdempotencyLayer::new(store).with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
    }))
}

// F-872, S-874
#[test]
fn store_errors_warn_each_second_with_count() {
    let failed = counted(outage)["idempotency_store_error_total{operation=acquire}"];
    let log = logged(outage);
    let warnings = lines(&log, "WARN", "store call failed");
    let details = lines(&log, "DEBUG", "store call failed");
    let seconds = OUTAGE_SECONDS;
    assert!(
        (seconds..seconds + 6).contains(&warnings.len()),
        "{warnings:#?}"
    );
    assert_eq!((warnings.len() + details.len()) as f64, failed);
    assert!(warnings[0].ends_with(" count=1"), "{}", warnings[0]);
    // A warning counts the failures since the previous one.
    let last = *warnings.last().expect("a warning");
    let (_, after) = log.split_once(last).expect("the last warning");
    let uncounted = lines(after, "DEBUG", "store call failed").len();
    let total = warnings.len() + details.len();
    assert_eq!(sum_of_counts(&warnings) + uncounted, total);
}

/// Sends a retry of a damaged record every 50 ms.
fn damaged_record() -> Flow {
    Box::pin(async {
        let store = FaultInjector::new(MemoryStore::new());
        let (app, effects) = slow(IdempotencyLayer::new(store.clone()), 0);
        send(&app, order("k")).await;
        store.rewrite_records(|record| record.slice(1..));
        for _ in 0..OUTAGE_SECONDS * 20 {
            assert_eq!(send(&app, order("k")).await.code(), "store-unavailable");
            sleep(Duration::from_millis(50)).await;
        }
        effects.count()
    })
}

/// A client may repeat such a request without a limit.
#[test]
fn damaged_record_logs_each_second_with_count() {
    let log = logged(damaged_record);
    let errors = lines(&log, "ERROR", "record cannot be read");
    let details = lines(&log, "DEBUG", "record cannot be read");
    let seconds = OUTAGE_SECONDS;
    assert!(
        (seconds - 1..=seconds).contains(&errors.len()),
        "{errors:#?}"
    );
    assert_eq!(errors.len() + details.len(), seconds * 20);
    assert!(errors[1].ends_with(" count=20"), "{}", errors[1]);
}

/// Sends a request every 50 ms whose record is too large for the store.
fn records_too_large() -> Flow {
    Box::pin(async {
        let store = FaultInjector::new(MemoryStore::new());
        // The second call of each execution stores its tombstone.
        store.set_script(|operation, nth| match operation {
            Operation::Complete if nth % 2 == 1 => Fault::RecordTooLarge(10),
            _ => Fault::None,
        });
        let (app, effects) = slow(IdempotencyLayer::new(store), 0);
        for n in 0..OUTAGE_SECONDS * 20 {
            assert_eq!(send(&app, order(&n.to_string())).await.status, 200);
            sleep(Duration::from_millis(50)).await;
        }
        effects.count()
    })
}

// S-874
/// A client may repeat such a request without a limit.
#[test]
fn record_too_large_warns_each_second_with_count() {
    let log = logged(records_too_large);
    let event = "record exceeds the limit of the store";
    let warnings = lines(&log, "WARN", event);
    let details = lines(&log, "DEBUG", event);
    let seconds = OUTAGE_SECONDS;
    assert!(
        (seconds - 1..=seconds).contains(&warnings.len()),
        "{warnings:#?}"
    );
    assert_eq!(warnings.len() + details.len(), seconds * 20);
    assert!(warnings[1].contains(" id="), "{}", warnings[1]);
    assert!(
        warnings[1].ends_with(" limit=10 count=20"),
        "{}",
        warnings[1]
    );
}

/// Sends two retries of a request whose entry the store cannot read.
fn unreadable_entry() -> Flow {
    Box::pin(async {
        let layer = IdempotencyLayer::new(UnreadableStore::default());
        let policy = StoreFailure::DangerouslyExecuteUnprotected;
        let (app, effects) = slow(layer.with_store_failure(policy), 0);
        send(&app, order("k")).await;
        for _ in 0..2 {
            assert_eq!(send(&app, order("k")).await.code(), "store-unavailable");
        }
        effects.count()
    })
}

// S-990
#[test]
fn unreadable_entry_counts_as_bad_record() {
    let counted = counted(unreadable_entry);
    assert_eq!(counted["idempotency_bad_record_total"], 2.0);
    let failed = |name: &&String| name.contains("store_error") || name.contains("unprotected");
    let failed: Vec<_> = counted.keys().filter(failed).collect();
    assert!(failed.is_empty(), "{failed:?}");
    let log = logged(unreadable_entry);
    let errors = lines(&log, "ERROR", "record cannot be read");
    assert_eq!(errors.len(), 1, "{log}");
    assert!(errors[0].contains("an entry of this version"), "{log}");
}

// S-874
#[test]
fn unprotected_executions_log_each_second() {
    let counted = counted(outage_unprotected);
    let log = logged(outage_unprotected);
    let errors = lines(&log, "ERROR", "executing without a lease");
    let details = lines(&log, "DEBUG", "executing without a lease");
    let seconds = OUTAGE_SECONDS;
    assert!(
        (seconds..seconds + 6).contains(&errors.len()),
        "{errors:#?}"
    );
    assert_eq!(
        counted["idempotency_unprotected_total"],
        (seconds * 20) as f64
    );
    assert_eq!(errors.len() + details.len(), seconds * 20);
}

// S-874
#[test]
fn refused_retries_of_orphan_warn_each_second() {
    const RETRIES: usize = 60;
    let flow: fn() -> Flow = || {
        Box::pin(async {
            let layer = IdempotencyLayer::new(MemoryStore::new());
            let layer = layer.with_orphan_policy(OrphanPolicy::Refuse);
            let work = async |_lease| Err::<(), _>(WorkError::Orphan(()));
            let first = layer.run_once("k", "", work).await;
            assert!(matches!(first, Ok(Outcome::Failed(()))), "{first:?}");
            // Until the lease has expired.
            sleep(Duration::from_secs(20)).await;
            for _ in 0..RETRIES {
                let retry = layer.run_once("k", "", work).await;
                assert!(matches!(retry, Ok(Outcome::Orphaned { .. })), "{retry:?}");
                sleep(Duration::from_millis(50)).await;
            }
            1
        })
    };
    let event = "earlier execution ended without an outcome";
    assert_eq!(counted(flow)["idempotency_orphaned_total"], RETRIES as f64);
    let log = logged(flow);
    let warnings = lines(&log, "WARN", event);
    assert_eq!(warnings.len(), 3, "{warnings:#?}");
    assert_eq!(lines(&log, "DEBUG", event).len(), RETRIES - 3);
    assert_eq!(sum_of_counts(&warnings), 1 + 20 + 20);
}

// S-874
/// Another layer may have another store, so it logs its own warning.
#[test]
fn layers_count_their_store_errors_separately() {
    let log = logged(|| {
        Box::pin(async {
            for _ in 0..2 {
                let store = FaultInjector::new(MemoryStore::new());
                store.set_fault(Operation::Renew, Fault::CallLost);
                let (app, _) = slow(IdempotencyLayer::new(store), 6);
                send(&app, order("k")).await;
            }
            0
        })
    });
    let warnings = lines(&log, "WARN", "store call failed");
    let first = |line: &&&str| line.ends_with(" count=1");
    assert_eq!(
        warnings.iter().filter(first).count(),
        warnings.len(),
        "{warnings:#?}"
    );
    assert!(warnings.len() >= 2, "{warnings:#?}");
}

// ---- Events of many leases ----

/// Number of keys that one outage concerns.
const KEYS: usize = 30;

/// Makes a call for each key, a tenth of a second apart. Returns after the last events.
async fn for_each_key<F>(call: impl Fn(String) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut calls = JoinSet::new();
    for n in 0..KEYS {
        calls.spawn(call(n.to_string()));
        sleep(Duration::from_millis(100)).await;
    }
    calls.join_all().await;
    sleep(Duration::from_secs(40)).await;
}

/// Sends a request for each key. The handler takes `seconds`.
async fn request_each(layer: IdempotencyLayer, seconds: u64) -> u64 {
    let (app, effects) = slow(layer, seconds);
    for_each_key(|key| {
        let app = app.clone();
        async move { drop(send(&app, order(&key)).await) }
    })
    .await;
    effects.count()
}

/// Runs work that fails like this, for each key.
async fn fail_each(layer: IdempotencyLayer, failure: fn() -> WorkError<()>) -> u64 {
    let effects = Effects::default();
    for_each_key(|key| {
        let (layer, effects) = (layer.clone(), effects.clone());
        async move {
            let work = move |_: Lease| async move {
                effects.happen();
                Err::<(), _>(failure())
            };
            // Work that panics ends its task.
            let run = tokio::spawn(async move { layer.run_once(&key, "", work).await.is_ok() });
            assert!(run.await.unwrap_or(true), "the store works");
        }
    })
    .await;
    effects.count()
}

/// The store has lost its data.
fn leases_lost() -> Flow {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::LeaseLost);
    Box::pin(request_each(IdempotencyLayer::new(store), 6))
}

/// The store accepts no record.
fn never_recorded() -> Flow {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Complete, Fault::CallLost);
    Box::pin(request_each(IdempotencyLayer::new(store), 0))
}

/// A server that all handlers call does not reply.
fn all_overdue() -> Flow {
    Box::pin(request_each(IdempotencyLayer::new(MemoryStore::new()), 160))
}

/// The process is stopped for longer than a third of the lease.
fn renewed_late() -> Flow {
    Box::pin(async {
        let (app, effects) = slow(IdempotencyLayer::new(MemoryStore::new()), 20);
        let mut calls = JoinSet::new();
        for n in 0..KEYS {
            let (app, request) = (app.clone(), order(&n.to_string()));
            calls.spawn(async move { drop(send(&app, request).await) });
        }
        sleep(Duration::from_secs(1)).await;
        advance(Duration::from_secs(11)).await;
        calls.join_all().await;
        sleep(Duration::from_secs(40)).await;
        effects.count()
    })
}

/// Each handler panics.
fn orphans_left() -> Flow {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let layer = layer.with_failure(ExecutionFailure::Orphan);
    Box::pin(fail_each(layer, || panic!("the intended panic")))
}

/// Each handler panics, and so does the takeover of its orphan.
fn orphans_left_again() -> Flow {
    Box::pin(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let layer = layer.with_failure(ExecutionFailure::Orphan);
        let first = fail_each(layer.clone(), || panic!("the intended panic")).await;
        first + fail_each(layer, || panic!("the intended panic")).await
    })
}

/// Each execution holds its key, and is taken over once.
fn taken_over() -> Flow {
    Box::pin(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let first = fail_each(layer.clone(), || WorkError::Orphan(())).await;
        first + fail_each(layer, || WorkError::Orphan(())).await
    })
}

// F-872, S-874
#[test]
fn each_event_of_outage_is_limited() {
    let cases: [(StartFlow, &str, &str, &str, usize); 8] = [
        (
            leases_lost,
            "ERROR",
            "lease lost while the handler was running",
            "idempotency_lease_lost_total",
            KEYS,
        ),
        (
            never_recorded,
            "ERROR",
            "record of a sent response was never stored",
            "idempotency_unrecorded_total",
            KEYS,
        ),
        (
            all_overdue,
            "WARN",
            "execution overdue",
            "idempotency_overdue_total",
            KEYS,
        ),
        (
            renewed_late,
            "WARN",
            "renewal late by more than a third of the lease",
            "idempotency_renew_late_total",
            KEYS,
        ),
        (
            orphans_left,
            "WARN",
            "execution failed, its key is an orphan",
            "idempotency_failed_total{reason=panic}",
            KEYS,
        ),
        (
            orphans_left_again,
            "WARN",
            "execution failed, its key is an orphan",
            "idempotency_failed_total{reason=panic}",
            2 * KEYS,
        ),
        (
            taken_over,
            "WARN",
            "took over an orphan",
            "idempotency_takeover_total",
            KEYS,
        ),
        (
            taken_over,
            "WARN",
            "key held until its lease expires",
            "idempotency_held_total",
            2 * KEYS,
        ),
    ];
    for (flow, level, event, counter, expected) in cases {
        assert_eq!(counted(flow)[counter], expected as f64, "{event}");
        let log = logged(flow);
        let rest: Vec<_> = lines(&log, "WARN", "earlier event occurred again")
            .into_iter()
            .filter(|line| line.contains(event))
            .collect();
        let mut events = lines(&log, level, event);
        events.retain(|line| !rest.contains(line));
        let details = lines(&log, "DEBUG", event).len();
        assert_eq!(events.len() + details, expected, "{event}");
        assert!(events.len() <= expected / 3, "{events:#?}");
        assert!(events[0].ends_with(" count=1"), "{}", events[0]);
        // Each occurrence is in one count, the last ones too.
        let counts = sum_of_counts(&events) + sum_of_counts(&rest);
        assert_eq!(counts, expected, "{events:#?} {rest:#?}");
    }
}

// S-874
/// While an outage continues, each second has the event with an entry.
#[test]
fn rest_is_reported_after_outage() {
    let log = logged(leases_lost);
    let event = "lease lost while the handler was running";
    let last = *lines(&log, "ERROR", event).last().expect("an event");
    let (before, after) = log.split_once(last).expect("the last event");
    let again = "earlier event occurred again";
    assert_eq!(lines(before, "WARN", again), [""; 0]);
    let rest = lines(after, "WARN", again);
    assert_eq!(rest.len(), 1, "{rest:#?}");
    assert_eq!(sum_of_counts(&rest), lines(after, "DEBUG", event).len());
}

// S-316, S-874
/// A person has to resolve each of these entries.
#[test]
fn events_about_attention_have_no_limit() {
    const CODE: NeedsAttention = NeedsAttention::new("stock-below-zero");
    let flow: fn() -> Flow = || {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        Box::pin(fail_each(layer, || WorkError::NeedsAttention(CODE, ())))
    };
    let log = logged(flow);
    let events = lines(&log, "ERROR", "execution needs attention");
    assert_eq!(events.len(), KEYS, "{events:#?}");
}

// ---- Overdue ----

async fn runs_for(seconds: u64, set: fn(IdempotencyLayer) -> IdempotencyLayer) -> u64 {
    let (app, effects) = slow(set(IdempotencyLayer::new(MemoryStore::new())), seconds);
    assert_eq!(send(&app, order("k")).await.status, 200);
    effects.count()
}

fn overdue(flow: fn() -> Flow) -> (f64, usize) {
    let count = counted(flow).get("idempotency_overdue_total").copied();
    let log = logged(flow);
    (
        count.unwrap_or(0.0),
        lines(&log, "WARN", "execution overdue").len(),
    )
}

// F-873, S-875
#[test]
fn overdue_execution_is_counted_once() {
    // The limit is detected by a renewal, at most 5 s later. The lease is 15 s.
    assert_eq!(overdue(|| Box::pin(runs_for(149, |layer| layer))), (0.0, 0));
    assert_eq!(overdue(|| Box::pin(runs_for(156, |layer| layer))), (1.0, 1));
    assert_eq!(overdue(|| Box::pin(runs_for(900, |layer| layer))), (1.0, 1));
}

// S-875
#[test]
fn time_until_overdue_follows_settings() {
    assert_eq!(
        overdue(|| Box::pin(runs_for(26, |layer| {
            layer.with_overdue_after(Duration::from_secs(20))
        }))),
        (1.0, 1)
    );
    assert_eq!(
        overdue(|| Box::pin(runs_for(900, |layer| {
            layer.with_overdue_after(Duration::MAX)
        }))),
        (0.0, 0)
    );
    assert_eq!(
        overdue(|| Box::pin(runs_for(156, |layer| {
            layer.with_lease_ttl(Ttl::from_secs(60))
        }))),
        (0.0, 0)
    );
}

// S-875
#[test]
fn overdue_run_once_is_counted() {
    let flow: fn() -> Flow = || {
        Box::pin(async {
            let layer = IdempotencyLayer::new(MemoryStore::new());
            let work = async |_lease| {
                sleep(Duration::from_secs(156)).await;
                Ok::<_, WorkError<()>>(())
            };
            let outcome = layer.run_once("k", "", work).await;
            assert!(outcome.is_ok(), "{outcome:?}");
            1
        })
    };
    assert_eq!(overdue(flow), (1.0, 1));
}
