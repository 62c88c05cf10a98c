//! Warnings of background tasks, which an outage repeats. The clock runs, because SQLite has threads of its own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tests::{
    barrier::eventually,
    created,
    observed::{Log, observed_on, observed_with_log, with_panicking_reports},
    scratch::Scratch,
    sql::{self, claim},
};
use tokio::runtime::{Builder, Runtime};
use tower_idempotency::store::{Store, Ttl};
use tower_idempotency_sqlx::{Completer, Orphan, SqliteStore};

/// Many times a second.
const OFTEN: Duration = Duration::from_millis(10);

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime")
}

/// Returns the sum of the counts of this event. Asserts that it was logged at most once a second, with its number. `run` calls
/// [`wait_for_number`].
fn count_of(event: &str, run: impl AsyncFnOnce(&Log)) -> u64 {
    let began = Instant::now();
    let (_, log) = observed_with_log(runtime(), "warn", run);
    let seconds = began.elapsed().as_secs();
    let counts = counts(&log, event);
    assert!(counts.len() as u64 <= seconds + 1, "{log}");
    assert!(counts.iter().any(|count| *count > 1), "{log}");
    counts.iter().sum()
}

/// Returns the count in each line of this event.
fn counts(log: &str, event: &str) -> Vec<u64> {
    let events = log.lines().filter(|line| line.contains(event));
    let count = |line: &str| {
        let (_, count) = line.rsplit_once("count=").expect("a count");
        let digits = count.split(|c: char| !c.is_ascii_digit()).next();
        digits
            .and_then(|it| it.parse::<u64>().ok())
            .expect("a number")
    };
    events.map(count).collect()
}

/// Waits until a line of this event counts several occurrences, or until there are five lines.
async fn wait_for_number(log: &Log, event: &str) {
    eventually("the event is counted", || {
        let counts = counts(&log.text(), event);
        counts.len() >= 5 || counts.iter().any(|count| *count > 1)
    })
    .await;
}

/// Retries an orphan whose work fails like this, until `wait` returns. Returns the number of attempts, which `wait` gets too.
async fn retry_orphan(
    fail: fn() -> Result<Response, &'static str>,
    wait: impl AsyncFnOnce(&AtomicU64),
) -> u64 {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let mut orphan = claim();
    orphan.lease = Ttl::MIN;
    orphan.operation = "POST /rides".into();
    let acquired = store.acquire(&orphan).await;
    acquired.expect("a file that can be written");
    let attempts = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&attempts);
    let work = move |_: Orphan| {
        counted.fetch_add(1, SeqCst);
        async move { fail() }
    };
    let completer = Completer::new(&store, &sql::layer(store.clone()), work);
    let task = completer.with_min_age(Duration::ZERO).spawn(OFTEN);
    let number: &AtomicU64 = &attempts;
    wait(number).await;
    drop(task);
    attempts.load(SeqCst)
}

// F-872
#[test]
fn failed_recoveries_warn_each_second() {
    let failures: [(&str, fn() -> Result<Response, &'static str>); 4] = [
        ("orphan recovery failed", || Err("the intended error")),
        ("orphan recovery failed", || Ok(unavailable())),
        ("orphan recovery failed", || panic!("the intended panic")),
        ("orphan recovery panicked", || panic!("the intended panic")),
    ];
    for (event, fail) in failures {
        let mut attempts = 0;
        let count = count_of(event, async |log: &Log| {
            let wait = async |_: &AtomicU64| wait_for_number(log, event).await;
            attempts = retry_orphan(fail, wait).await;
        });
        assert!(count <= attempts, "{event}: {count} of {attempts}");
    }
}

/// Returns a response that no layer records.
fn unavailable() -> Response {
    StatusCode::SERVICE_UNAVAILABLE.into_response()
}

// F-872
#[test]
fn failed_attempts_are_logged_with_reason() {
    let failures: [(&str, fn() -> Result<Response, &'static str>); 3] = [
        ("reason=\"error\"", || Err("the intended error")),
        ("reason=\"panic\"", || panic!("the intended panic")),
        ("reason=\"not_recorded\"", || Ok(unavailable())),
    ];
    let level = "tower_idempotency_sqlx=debug";
    for (reason, fail) in failures {
        observed_with_log(runtime(), level, async |log: &Log| {
            let is_logged = |level: &str, field: &str| {
                let text = log.text();
                let mut events = text
                    .lines()
                    .filter(|line| line.contains("orphan recovery failed"));
                events.any(|line| [level, " id=", field].iter().all(|it| line.contains(it)))
            };
            let wait = async |_: &AtomicU64| {
                eventually("the attempts are logged", || {
                    is_logged("WARN", "count=")
                        && is_logged("WARN", reason)
                        && is_logged("DEBUG", reason)
                })
                .await;
            };
            retry_orphan(fail, wait).await;
        });
    }
}

/// Runs this on a completer whose orphans are due after a minute and expire after this number of seconds. Returns the number of
/// warnings about that.
fn retention_warnings(retention: u64, run: impl AsyncFnOnce(Completer<SqliteStore>)) -> usize {
    let scratch = Scratch::new();
    let (_, log) = observed_on(runtime(), "warn", async {
        let store = sql::sqlite(&scratch).await;
        let layer = sql::layer(store.clone()).with_orphan_retention(Ttl::from_secs(retention));
        let work = async |_: Orphan| Ok::<_, &'static str>(created(1));
        run(Completer::new(&store, &layer, work)).await;
    });
    log.matches("orphan retention too short for the completer")
        .count()
}

// F-960
#[test]
fn retention_up_to_min_age_warns_once() {
    for (retention, warnings) in [(59, 1), (60, 1), (61, 0)] {
        let sweeps = async |completer: Completer<SqliteStore>| {
            for _ in 0..2 {
                completer.sweep().await.expect("a sweep");
            }
        };
        let logged = retention_warnings(retention, sweeps);
        assert_eq!(logged, warnings, "{retention} s");
    }
}

// F-960
#[test]
fn retention_that_no_sweep_meets_warns() {
    // The longest delay is 64 minutes, or half of the retention if that is shorter.
    for (retention, period, warnings) in [
        (80, 20, 1),
        (80, 19, 0),
        (3_600, 1_800, 1),
        (3_600, 1_799, 0),
        (86_400, 86_400 - 3_840, 1),
        (86_400, 86_400 - 3_841, 0),
    ] {
        let spawned = async |completer: Completer<SqliteStore>| {
            drop(completer.spawn(Duration::from_secs(period)));
        };
        let logged = retention_warnings(retention, spawned);
        assert_eq!(logged, warnings, "{retention} s, every {period} s");
    }
}

/// A store without its table. Each call fails.
fn unusable(scratch: &Scratch) -> SqliteStore {
    SqliteStore::in_file(scratch.file("keys.db"))
}

// F-872
#[test]
fn failed_purges_warn_each_second() {
    let (scratch, event) = (Scratch::new(), "purge failed, will retry");
    count_of(event, async |log: &Log| {
        let store = unusable(&scratch);
        let purger = store.spawn_purger(OFTEN);
        wait_for_number(log, event).await;
        drop(purger);
    });
}

// F-872
#[test]
fn failed_orphan_queries_warn_each_second() {
    let (scratch, event) = (Scratch::new(), "orphan query failed, will retry");
    count_of(event, async |log: &Log| {
        let store = unusable(&scratch);
        let work = async |_: Orphan| Ok::<_, &'static str>(created(1));
        let completer = Completer::new(&store, &sql::layer(store.clone()), work);
        let task = completer.spawn(OFTEN);
        wait_for_number(log, event).await;
        drop(task);
    });
}

// F-802
#[test]
fn recoveries_continue_after_panic_of_subscriber() {
    let failures: [fn() -> Result<Response, &'static str>; 2] = [
        || Err("the intended error"),
        || panic!("the intended panic"),
    ];
    for fail in failures {
        with_panicking_reports(runtime(), async |_: &AtomicU64| {
            let wait = async |attempts: &AtomicU64| {
                eventually("the orphan is retried", || attempts.load(SeqCst) >= 20).await;
            };
            retry_orphan(fail, wait).await
        });
    }
}

/// Starts a task on a store whose calls fail. Waits until the task has reported a second failure.
fn continues_after_report<T>(start: impl FnOnce(&SqliteStore) -> T) {
    let scratch = Scratch::new();
    with_panicking_reports(runtime(), async |panics: &AtomicU64| {
        let store = unusable(&scratch);
        let task = start(&store);
        eventually("a second report", || panics.load(SeqCst) > 1).await;
        drop(task);
    });
}

// F-802
#[test]
fn purger_continues_after_panic_of_subscriber() {
    continues_after_report(|store| store.spawn_purger(OFTEN));
}

// F-802
#[test]
fn orphan_queries_continue_after_panic_of_subscriber() {
    continues_after_report(|store| {
        let work = async |_: Orphan| Ok::<_, &'static str>(created(1));
        Completer::new(store, &sql::layer(store.clone()), work).spawn(OFTEN)
    });
}
