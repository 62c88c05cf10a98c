//! Warnings during an outage of the store, and about executions that do not end.

use std::time::Duration;

use axum::{Router, body::Body, routing::post};
use http::Request;
use tests::{Effects, send};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, OrphanPolicy, StoreFailure, Ttl,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
};

use crate::observability::{Flow, counted, logged};

fn order(key: &str) -> Request<Body> {
    tests::post("/", key, "")
}

/// An app whose handler takes `seconds`.
fn slow(layer: IdempotencyLayer, seconds: u64) -> (Router, Effects) {
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
fn lines<'a>(log: &'a str, level: &str, event: &str) -> Vec<&'a str> {
    let is_event = |line: &&str| line.contains(&format!(" {level} ")) && line.contains(event);
    log.lines().filter(is_event).collect()
}

/// Returns the sum of the fields `count`.
fn sum_of_counts(lines: &[&str]) -> usize {
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
    let mut requests = tokio::task::JoinSet::new();
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
