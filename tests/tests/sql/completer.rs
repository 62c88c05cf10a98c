//! Takeovers of orphans by a completer, on each database.

use std::{
    future::pending,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use tests::{
    Effects, app,
    barrier::{Barrier, bounded, eventually, within},
    created,
    database::{self, TestDatabase, TestDialect},
    post,
    scratch::Scratch,
    send,
    sql::{self, claim},
};
use tokio::time::sleep;
use tower_idempotency::{
    ExecutionFailure, IdempotencyLayer, Lease, MissingKey, OrphanPolicy, TakeOverOutcome, Ttl,
    inspect::{Inspect, Resolution},
    store::{Acquired, Claim, Token},
};
use tower_idempotency_sqlx::{Completer, Orphan, SweepStats};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const OLDER: Duration = Duration::from_millis(20);

/// Returns a service whose handler completes its first phase and fails in the second.
fn failing_after_first_phase<S: TestDialect>(
    database: &TestDatabase<S>,
    layer: IdempotencyLayer,
) -> (Router, Effects) {
    let bank = database.clone();
    app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let key = req.headers()["idempotency-key"].to_str().expect("text");
        let (database, key) = (bank.clone(), key.to_owned());
        async move {
            let mut tx = database.begin(&lease).await.expect("a transaction");
            let created = S::run(&mut tx, database.effect(&format!("created {key}"), 1, n)).await;
            created.expect("the effect");
            let checkpoint = (key, lease.derive("charge"));
            tx.checkpoint("created", &checkpoint)
                .await
                .expect("a phase");
            StatusCode::BAD_GATEWAY
        }
    })
}

/// Executes the second phase, as the work of a completer.
async fn finish<S: TestDialect>(
    database: TestDatabase<S>,
    orphan: Orphan,
) -> Result<Response, Failure> {
    assert_eq!(orphan.operation(), "POST /rides");
    assert!(orphan.lease().is_takeover());
    let at = orphan.checkpoint().expect("the first phase is done");
    assert_eq!(at.name(), "created");
    let (key, charge): (String, String) = at.data()?;
    assert_eq!(orphan.lease().derive("charge"), charge);
    let mut tx = database.begin(orphan.lease()).await?;
    S::run(&mut tx, database.effect(&format!("paid {key}"), 1, 1)).await?;
    Ok(tx.commit(created(1)).await?.into_response())
}

fn finishing<S: TestDialect>(database: &TestDatabase<S>) -> Completer<S> {
    let (bank, layer) = (database.clone(), sql::layer(database.store.clone()));
    let work = move |orphan| finish(bank.clone(), orphan);
    Completer::new(&database.store, &layer, work).with_min_age(OLDER)
}

async fn two_replicas_finish_each_orphan_once<S: TestDialect>(database: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone());
    let (app, executions) = failing_after_first_phase(&database, layer);
    let keys: Vec<_> = (0..24).map(|n| format!("ride-{n}")).collect();
    for key in &keys {
        let half = send(&app, post("/rides", key, "tea")).await;
        assert_eq!(half.status, StatusCode::BAD_GATEWAY);
    }
    sleep(2 * OLDER).await;
    let (one, other) = (finishing(&database), finishing(&database));
    let (one, other) = tokio::join!(one.sweep(), other.sweep());
    let (one, other) = (one.expect("a sweep"), other.expect("a sweep"));
    assert_eq!(one.failed + other.failed, 0, "{one:?} {other:?}");
    assert_eq!(one.not_recorded + other.not_recorded, 0);
    // If both completers found the same entry, the store refused one of them because the other one held the lease.
    assert_eq!(one.executed + other.executed, 24, "{one:?} {other:?}");

    let mut effects: Vec<_> = database
        .effects()
        .await
        .into_iter()
        .map(|it| it.key)
        .collect();
    effects.sort();
    let mut expected: Vec<_> = keys
        .iter()
        .flat_map(|key| [format!("created {key}"), format!("paid {key}")])
        .collect();
    expected.sort();
    assert_eq!(effects, expected);
    for key in &keys {
        let retry = send(&app, post("/rides", key, "tea")).await;
        assert!(retry.is_replay() && retry.status == StatusCode::CREATED);
    }
    assert_eq!(executions.count(), 24, "the first phases");
    assert_eq!(
        finishing(&database).sweep().await.expect("a sweep"),
        SweepStats::default()
    );
}

/// The provider declines after the first phase. A completer must not continue after the 402 of the client.
async fn client_error_after_checkpoint_is_final<S: TestDialect>(database: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone()).with_missing_key(MissingKey::Derive);
    let bank = database.clone();
    let (app, executions) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let database = bank.clone();
        async move {
            let mut tx = database.begin(&lease).await.expect("a transaction");
            let created = S::run(&mut tx, database.effect("created", 1, n)).await;
            created.expect("the effect");
            tx.checkpoint("created", &n).await.expect("a phase");
            let mut tx = database.begin(&lease).await.expect("a transaction");
            let declined = S::run(&mut tx, database.effect("declined", 1, n)).await;
            declined.expect("the effect");
            let declined = StatusCode::PAYMENT_REQUIRED.into_response();
            tx.commit(declined).await.expect("a record").into_response()
        }
    });
    for is_replay in [false, true] {
        let keyless = Request::post("/rides").body(Body::from("tea"));
        let res = send(&app, keyless.expect("a request")).await;
        assert_eq!(res.status, StatusCode::PAYMENT_REQUIRED);
        assert_eq!(res.is_replay(), is_replay);
    }
    assert_eq!((database.count().await, executions.count()), (2, 1));
    sleep(2 * OLDER).await;
    let swept = finishing(&database).sweep().await;
    assert_eq!(swept.expect("a sweep"), SweepStats::default());
}

/// Creates an orphan, as if its process had died.
async fn orphan<S: TestDialect>(database: &TestDatabase<S>, operation: &str) -> Claim {
    let mut claim = claim();
    claim.lease = Ttl::MIN;
    claim.operation = operation.into();
    let acquired = database.store.acquire(&claim).await.expect("an answer");
    assert!(matches!(acquired, Acquired::Granted { .. }));
    claim
}

/// Returns a completer of this work, which receives the orphan.
fn working<S, W, F>(database: &TestDatabase<S>, older_than: Duration, work: W) -> Completer<S>
where
    S: TestDialect,
    W: Fn(Orphan) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Response, &'static str>> + Send + 'static,
{
    let layer = sql::layer(database.store.clone());
    Completer::new(&database.store, &layer, work).with_min_age(older_than)
}

async fn every_page_is_examined<S: TestDialect>(database: TestDatabase<S>) {
    for _ in 0..230 {
        orphan(&database, "POST /rides").await;
    }
    sleep(2 * OLDER).await;
    let done = Effects::default();
    let counted = done.clone();
    let completer = working(&database, OLDER, move |_| {
        counted.happen();
        async { Ok(created(1)) }
    });
    let completer = completer.with_concurrency(8);
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.executed), (230, 230));
    assert_eq!(done.count(), 230);
}

async fn completer_leaves_other_entries_alone<S: TestDialect>(database: TestDatabase<S>) {
    // Entries in progress, completed entries, those that are not of executed requests, and young orphans.
    let mut running = claim();
    running.lease = Ttl::from_secs(600);
    running.operation = "POST /rides".into();
    database.store.acquire(&running).await.expect("an answer");
    let completed = orphan(&database, "POST /rides").await;
    let (reference, record) = (completed.lease_ref(1), vec![7_u8].into());
    let stored = database.store.complete(&reference, record, Ttl::MAX);
    stored.await.expect("the record is stored");
    for operation in ["run_once", "item: POST /rides", "observed: POST /rides"] {
        orphan(&database, operation).await;
    }
    sleep(2 * OLDER).await;
    let completer = |older_than| {
        working(&database, older_than, async |_| {
            panic!("the work must not run")
        })
    };
    let swept = completer(OLDER).sweep().await.expect("a sweep");
    assert_eq!(swept, SweepStats::default());
    orphan(&database, "POST /rides").await;
    let swept = completer(Duration::from_secs(3_600)).sweep().await;
    assert_eq!(swept.expect("a sweep"), SweepStats::default());
}

/// An operator has allowed the retry for the client. The completer is that of another service.
async fn allowed_retry_is_left_to_client<S: TestDialect + Inspect>(database: TestDatabase<S>) {
    let mut claim = orphan(&database, "POST /rides").await;
    sleep(2 * OLDER).await;
    let read = async || {
        let read = database.store.get(&claim.id).await.expect("an answer");
        read.expect("an entry").entry
    };
    let before = read().await;
    let seen = before.seen();
    let resolved = database.store.resolve(seen, &Resolution::Retry).await;
    assert!(resolved.expect("a decision").is_applied());
    sleep(2 * OLDER).await;
    let completer = working(&database, Duration::ZERO, async |_| {
        Err("not its operation")
    });
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!(swept, SweepStats::default());
    assert!(read().await.retry_allowed);
    claim.token = Token::random().expect("randomness");
    claim.orphans = OrphanPolicy::Refuse;
    let acquired = database.store.acquire(&claim).await.expect("an answer");
    assert!(matches!(acquired, Acquired::Granted { takeover: true, .. }));
}

/// The client has chosen these methods.
async fn method_hides_no_orphan<S: TestDialect>(database: TestDatabase<S>) {
    for operation in ["item /rides", "observed /rides"] {
        orphan(&database, operation).await;
    }
    sleep(2 * OLDER).await;
    let completer = working(&database, OLDER, async |_| Ok(created(1)));
    assert_eq!(completer.sweep().await.expect("a sweep").executed, 2);
}

/// The delay is ten hours, and 64 times that after many takeovers.
async fn delays_may_be_long<S: TestDialect>(database: TestDatabase<S>) {
    orphan(&database, "POST /rides").await;
    let hours = "update {table} set generation = 7, lease_ends = lease_ends - 11 * 3600000";
    database.admin(hours).await;
    let older = Duration::from_secs(10 * 3_600);
    let completer = working(&database, older, async |_| panic!("the work must not run"));
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!(swept, SweepStats::default());
    database.admin("update {table} set generation = 1").await;
    let completer = working(&database, older, async |_| Ok(created(1)));
    assert_eq!(completer.sweep().await.expect("a sweep").executed, 1);
}

/// The entry stays an orphan, and the delay before each retry grows. The test moves the lease expiry back to simulate
/// the time.
async fn failed_execution_is_retried_after_delay<S: TestDialect>(database: TestDatabase<S>) {
    const PAUSE: Duration = Duration::from_secs(3_600);
    /// Longer than the test.
    const MINUTES: Duration = Duration::from_secs(10 * 60);
    let before = orphan(&database, "POST /rides").await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let generations = Arc::clone(&seen);
    let completer = working(&database, PAUSE, move |orphan: Orphan| {
        let generation = orphan.lease().generation();
        generations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(generation);
        async move {
            match generation {
                2 => Err("no provider"),
                3 => panic!("the intended panic"),
                _ => Ok(created(generation)),
            }
        }
    });
    let sweep = async || completer.sweep().await.expect("a sweep");
    let pass = async |time: Duration| {
        let back = format!(
            "update {{table}} set lease_ends = lease_ends - {}",
            time.as_millis()
        );
        assert_eq!(database.admin(&back).await, 1);
    };
    for due in [PAUSE, PAUSE * 2, PAUSE * 4] {
        assert_eq!(sweep().await.due, 0, "at once");
        pass(due - MINUTES).await;
        assert_eq!(sweep().await.due, 0, "before {due:?}");
        pass(MINUTES).await;
        let swept = sweep().await;
        assert_eq!(swept.due, 1, "after {due:?}");
        assert_eq!(swept.failed, u64::from(due < PAUSE * 4));
    }
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(seen, [2, 3, 4]);
    let mut again = before;
    again.token = Token::random().expect("randomness");
    let acquired = database.store.acquire(&again).await.expect("an answer");
    assert!(matches!(acquired, Acquired::Completed { .. }));
}

/// The orphan retention is four times the minimum age. The third delay would be as long, so the orphan and its checkpoint would
/// expire first. The test moves the times of the entry back to simulate the time. A sweep begins each hour.
async fn orphan_is_retried_before_it_expires<S: TestDialect>(database: TestDatabase<S>) {
    const HOUR: Duration = Duration::from_secs(3_600);
    let layer = sql::layer(database.store.clone());
    let layer = layer.with_orphan_retention(Ttl::from_secs(4 * 3_600));
    let (app, _) = failing_after_first_phase(&database, layer.clone());
    let half = send(&app, post("/rides", "ride", "tea")).await;
    assert_eq!(half.status, StatusCode::BAD_GATEWAY);
    let (bank, attempts) = (database.clone(), Effects::default());
    let counted = attempts.clone();
    let completer = Completer::new(&database.store, &layer, move |orphan| {
        let (database, attempt) = (bank.clone(), counted.happen());
        async move {
            if attempt <= 4 {
                return Err("no provider".into());
            }
            finish(database, orphan).await
        }
    });
    let completer = completer.with_min_age(HOUR);
    let mut due = Vec::new();
    for _ in 1..=9 {
        let hour =
            "update {table} set lease_ends = lease_ends - 3600000, expires = expires - 3600000";
        assert_eq!(database.admin(hour).await, 1);
        due.push(completer.sweep().await.expect("a sweep").due);
    }
    assert_eq!(due, [1, 0, 1, 0, 1, 0, 1, 0, 1]);
    let effects = database.effects().await.into_iter().map(|it| it.key);
    let mut effects: Vec<_> = effects.collect();
    effects.sort();
    assert_eq!(effects, ["created ride", "paid ride"]);
    let retry = send(&app, post("/rides", "ride", "tea")).await;
    assert!(retry.is_replay() && retry.status == StatusCode::CREATED);
    assert_eq!(attempts.count(), 5);
}

/// Rows that no claim has written have no orphan retention.
async fn unset_retention_limits_no_delay<S: TestDialect>(database: TestDatabase<S>) {
    orphan(&database, "POST /rides").await;
    let hours = "update {table} set orphan_retention = 0, generation = 3, lease_ends = lease_ends - 3 * 3600000";
    assert_eq!(database.admin(hours).await, 1);
    let completer = working(&database, Duration::from_secs(3_600), async |_| {
        Ok(created(1))
    });
    assert_eq!(completer.sweep().await.expect("a sweep").due, 0);
    let hour = "update {table} set lease_ends = lease_ends - 3600000";
    assert_eq!(database.admin(hour).await, 1);
    assert_eq!(completer.sweep().await.expect("a sweep").executed, 1);
}

/// The completer reports the operation unchanged after any number of takeovers.
async fn operation_is_reported_unchanged<S: TestDialect>(database: TestDatabase<S>) {
    let path = "/\\a\\134b/ä/€/\u{1}\u{7f}";
    let requested = format!("POST {path}");
    orphan(&database, &requested).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (operations, expected) = (Arc::clone(&seen), vec![requested; 3]);
    let completer = working(&database, Duration::ZERO, move |orphan: Orphan| {
        let operation = orphan.operation().to_owned();
        let mut seen = operations.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push(operation);
        async { Err("no provider") }
    });
    let mut stored = Vec::new();
    for _ in 0..3 {
        sleep(OLDER).await;
        assert_eq!(completer.sweep().await.expect("a sweep").failed, 1);
        let length = format!(
            "select 'length', 0 * generation + length(operation), generation from {}",
            database.table
        );
        stored.push(S::rows(&database.pool, length).await[0].pid);
    }
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(seen, expected);
    assert!(stored.iter().all(|it| *it == stored[0]), "{stored:?}");
}

/// Attempts do not change the age.
async fn orphan_age_counts_from_first_lease<S: TestDialect>(database: TestDatabase<S>) {
    const HOUR: Duration = Duration::from_secs(3_600);
    orphan(&database, "POST /rides").await;
    let older = "update {table} set created = created - 3600000";
    assert_eq!(database.admin(older).await, 1);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let ages = Arc::clone(&seen);
    let completer = working(&database, Duration::ZERO, move |orphan: Orphan| {
        let mut ages = ages.lock().unwrap_or_else(PoisonError::into_inner);
        ages.push(orphan.age());
        async { Err("no provider") }
    });
    for _ in 0..2 {
        sleep(OLDER).await;
        assert_eq!(completer.sweep().await.expect("a sweep").failed, 1);
    }
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(seen.len(), 2);
    let is_old = |age: &Duration| (HOUR..2 * HOUR).contains(age);
    assert!(seen.iter().all(is_old), "{seen:?}");
}

/// An entry that failed in this sweep is due again at once, but only the next sweep retries it.
async fn sweep_ends_if_everything_fails<S: TestDialect>(database: TestDatabase<S>) {
    for _ in 0..150 {
        orphan(&database, "POST /rides").await;
    }
    sleep(OLDER).await;
    let completer = working(&database, Duration::ZERO, async |_| Err("no provider"));
    let sweeping = completer.with_concurrency(8);
    let swept = within(Duration::from_secs(60), sweeping.sweep()).await;
    let swept = swept.expect("a sweep");
    assert_eq!((swept.due, swept.failed), (150, 150));
}

/// Another replica that found the same entry does not retry it either.
async fn failed_execution_is_not_retried_by_each_replica<S: TestDialect>(
    database: TestDatabase<S>,
) {
    for _ in 0..12 {
        orphan(&database, "POST /rides").await;
    }
    sleep(2 * OLDER).await;
    let (tried, barrier) = (Effects::default(), Barrier::closed());
    let replica = |barrier: Barrier| {
        let tried = tried.clone();
        let work = move |_| {
            tried.happen();
            let barrier = barrier.clone();
            async move {
                barrier.pass().await;
                Err("no provider")
            }
        };
        working(&database, OLDER, work).with_concurrency(1)
    };
    let (one, other) = (replica(barrier.clone()), replica(Barrier::open()));
    let meanwhile = async {
        // The replica has found all entries, and executes the first one.
        bounded(barrier.arrival()).await;
        let swept = other.sweep().await;
        barrier.open_for_good();
        swept
    };
    let (one, other) = tokio::join!(one.sweep(), meanwhile);
    let (one, other) = (one.expect("a sweep"), other.expect("a sweep"));
    assert_eq!((one.due, other.due), (12, 11));
    assert_eq!(tried.count(), 12, "{one:?} {other:?}");
    // The entry was not taken over without an execution, which would double its delay.
    let twice = "delete from {table} where generation <> 2";
    assert_eq!(database.admin(twice).await, 0, "{one:?} {other:?}");
}

/// An error of the completer may mean that the orphan belongs to another service. It is no failed execution, which this
/// layer would leave to an operator.
async fn error_leaves_orphan_for_retry<S: TestDialect>(database: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone()).with_failure(ExecutionFailure::NeedsAttention);
    let bank = database.clone();
    let (app, executions) = app(layer.clone(), move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let database = bank.clone();
        async move {
            if n > 2 {
                return created(n);
            }
            let tx = database.begin(&lease).await.expect("a transaction");
            tx.checkpoint("phase", &n).await.expect("a phase");
            StatusCode::BAD_GATEWAY.into_response()
        }
    });
    for (path, key) in [("/rides", "ride"), ("/parcels", "parcel")] {
        let half = send(&app, post(path, key, "tea")).await;
        assert_eq!(half.status, StatusCode::BAD_GATEWAY);
    }
    sleep(2 * OLDER).await;
    let work = async |orphan: Orphan| match orphan.operation() {
        "POST /rides" => Ok(created(1)),
        _ => Err("an operation of another service"),
    };
    let completer = Completer::new(&database.store, &layer, work).with_min_age(OLDER);
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!((swept.executed, swept.failed), (1, 1));
    let orphans = "select 'orphan', 0 * generation, generation from {table} where completed is null and token is null";
    let orphans = S::rows(&database.pool, orphans.replace("{table}", &database.table)).await;
    assert_eq!(orphans.len(), 1);
    assert_eq!(orphans[0].n, 2);
    let finished = send(&app, post("/rides", "ride", "tea")).await;
    assert!(finished.is_replay(), "{finished:?}");
    let retry = send(&app, post("/parcels", "parcel", "tea")).await;
    assert_eq!(retry.status, StatusCode::CREATED, "{retry:?}");
    assert_eq!(executions.count(), 3);
}

/// The caller of `take_over` knows only ID and fingerprint. Completers find orphans by their operation.
async fn failed_take_over_leaves_orphan_to_completer<S: TestDialect>(database: TestDatabase<S>) {
    let orphan = orphan(&database, "POST /rides").await;
    sleep(2 * OLDER).await;
    let layer = sql::layer(database.store.clone());
    let claim = Claim::new(orphan.id, orphan.fingerprint).expect("randomness");
    let failing = async |_: Lease| Err::<Response, _>("no provider");
    let taken = layer.take_over(claim, failing).await.expect("a lease");
    assert!(matches!(taken, TakeOverOutcome::Failed("no provider")));
    sleep(4 * OLDER).await;
    let work = async |orphan: Orphan| match orphan.operation() {
        "POST /rides" => Ok(created(1)),
        _ => Err("an operation of another service"),
    };
    let swept = working(&database, OLDER, work).sweep().await;
    let swept = swept.expect("a sweep");
    assert_eq!((swept.due, swept.executed), (1, 1), "{swept:?}");
}

/// The completer is that of another layer, which leaves its own orphans for a minute.
async fn foreign_completer_keeps_retention<S: TestDialect>(database: TestDatabase<S>) {
    const HOUR: Ttl = Ttl::from_secs(3_600);
    let mut claim = claim();
    (claim.lease, claim.orphan_retention) = (Ttl::MIN, HOUR);
    claim.operation = "POST /payments".into();
    database.store.acquire(&claim).await.expect("an answer");
    sleep(2 * OLDER).await;
    let layer = sql::layer(database.store.clone()).with_orphan_retention(Ttl::from_secs(60));
    let work = async |_: Orphan| Err::<Response, _>("an operation of another service");
    let completer = Completer::new(&database.store, &layer, work).with_min_age(OLDER);
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!((swept.due, swept.failed), (1, 1));
    let left = "select 'left', 0 * generation + expires - lease_ends, generation from {table}";
    let left = S::rows(&database.pool, left.replace("{table}", &database.table)).await;
    assert_eq!((left[0].pid, left[0].n), (3_600_000, 2));
}

/// The first work never ends, for example because the server of its connection has vanished.
async fn endless_work_stops_no_later_sweep<S: TestDialect>(database: TestDatabase<S>) {
    let (endless, done) = (Effects::default(), Effects::default());
    let (begun, counted) = (endless.clone(), done.clone());
    let completer = working(&database, OLDER, move |orphan: Orphan| {
        let (begun, counted) = (begun.clone(), counted.clone());
        async move {
            if orphan.operation() == "POST /endless" {
                begun.happen();
                pending::<()>().await;
            }
            counted.happen();
            Ok(created(1))
        }
    });
    let completing = completer.spawn(Duration::from_millis(30));
    orphan(&database, "POST /endless").await;
    eventually("the endless work begins", || endless.count() == 1).await;
    for n in 1..=2 {
        orphan(&database, "POST /rides").await;
        eventually("the orphan is executed", || done.count() == n).await;
    }
    drop(completing);
}

async fn background_completer_runs_until_dropped<S: TestDialect>(database: TestDatabase<S>) {
    let done = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&done);
    let completer = working(&database, OLDER, move |_| {
        counted.fetch_add(1, SeqCst);
        async { Ok(created(1)) }
    });
    let completing = completer.spawn(Duration::from_millis(30));
    for n in 1..=2 {
        orphan(&database, "POST /rides").await;
        eventually("the orphan is executed", || done.load(SeqCst) == n).await;
    }
    assert!(Arc::strong_count(&done) > 1, "the task owns the work");
    drop(completing);
    eventually("the task ends", || Arc::strong_count(&done) == 1).await;
    assert_eq!(done.load(SeqCst), 2);
}

/// An execution in progress continues, and drain waits for it. No other entry is taken over.
async fn dropped_sweep_takes_over_nothing_more<S: TestDialect>(database: TestDatabase<S>) {
    for _ in 0..3 {
        orphan(&database, "POST /rides").await;
    }
    sleep(2 * OLDER).await;
    let (barrier, done) = (Barrier::closed(), Effects::default());
    let layer = sql::layer(database.store.clone());
    let (held, counted) = (barrier.clone(), done.clone());
    let work = move |_: Orphan| {
        let (held, counted) = (held.clone(), counted.clone());
        async move {
            held.pass().await;
            counted.happen();
            Ok::<_, Failure>(created(1))
        }
    };
    let completer = Completer::new(&database.store, &layer, work)
        .with_min_age(OLDER)
        .with_concurrency(1);
    let sweeping = {
        let completer = completer.clone();
        tokio::spawn(async move { completer.sweep().await })
    };
    barrier.arrival().await;
    sweeping.abort();
    let _ = sweeping.await;
    assert_eq!(layer.in_flight(), 1);
    barrier.open_for_good();
    assert!(layer.drain(Duration::from_secs(60)).await);
    assert_eq!(done.count(), 1);
    let swept = completer.sweep().await.expect("a sweep");
    assert_eq!((swept.executed, done.count()), (0, 1));
}

macro_rules! each {
    ($($case:ident)*) => {
        mod on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(super::database::on_postgres(&super::table(stringify!($case))).await).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(super::database::on_mariadb(&super::table(stringify!($case))).await).await;
                }
            )*
        }

        mod on_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let scratch = super::Scratch::new();
                    super::$case(super::database::sqlite_file_database(&scratch, "keys").await).await;
                }
            )*
        }
    };
}

each! {
    // F-033, S-211
    two_replicas_finish_each_orphan_once
    every_page_is_examined
    completer_leaves_other_entries_alone
    // S-959
    client_error_after_checkpoint_is_final
    // S-991
    allowed_retry_is_left_to_client
    method_hides_no_orphan
    delays_may_be_long
    failed_execution_is_retried_after_delay
    // F-960
    orphan_is_retried_before_it_expires
    unset_retention_limits_no_delay
    failed_execution_is_not_retried_by_each_replica
    error_leaves_orphan_for_retry
    failed_take_over_leaves_orphan_to_completer
    foreign_completer_keeps_retention
    operation_is_reported_unchanged
    orphan_age_counts_from_first_lease
    // F-152
    sweep_ends_if_everything_fails
    background_completer_runs_until_dropped
    // F-155
    endless_work_stops_no_later_sweep
    dropped_sweep_takes_over_nothing_more
}

/// Returns a table name, which must be shorter than some test names.
fn table(case: &str) -> String {
    case.chars().take(40).collect()
}
