//! Behavior of the SQL stores that the suite does not cover: outages, records that are too large, locked rows, and the
//! texts of their errors.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, StatusCode};
use tests::{
    app,
    barrier::{Barrier, bounded, within},
    created, creating,
    database::{TestDialect, sqlite_pool},
    post,
    scratch::Scratch,
    send,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
    },
    sql::{self, claim, duplicate, retried},
};
use tokio::task::JoinSet;
use tower_idempotency::{
    ConcurrentRequests,
    conformance::{Case, Subject},
    inspect::{Inspect, Resolution},
    store::{Acquired, Claim, OrphanPolicy, Store, StoreError, Ttl},
};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{
        Connection, Executor, MySqlConnection, PgConnection, postgres::PgConnectOptions,
        query_scalar,
    },
};

// ---- Outages ----

/// Checks that requests get 503 without an execution while the database is down, and are served again later.
async fn nothing_is_executed_while_down<S: Store>(
    store: S,
    down: impl FnOnce(),
    up: impl FnOnce(),
) {
    let (app, effects) = creating(sql::layer(store));
    let before = send(&app, post("/orders", "before", "tea")).await;
    assert_eq!(before.status, StatusCode::CREATED);
    down();
    for key in ["before", "meanwhile", "meanwhile"] {
        let refused = send(&app, post("/orders", key, "tea")).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.code(), "store-unavailable");
    }
    assert_eq!(effects.count(), 1);
    up();
    let replayed = send(&app, post("/orders", "before", "tea")).await;
    assert!(replayed.is_replay() && replayed.body == before.body);
    let after = send(&app, post("/orders", "meanwhile", "tea")).await;
    assert_eq!(after.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
}

// F-163
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_executed_while_postgres_is_down() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, TABLE).await;
    let server = RefCell::new(server);
    let (down, up) = (
        || server.borrow_mut().kill(),
        || server.borrow_mut().restart(),
    );
    nothing_is_executed_while_down(store, down, up).await;
}

// F-163
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_executed_while_mariadb_is_down() {
    let server = MariaDbServer::start(&[]);
    let store = sql::mariadb(&server, TABLE).await;
    let server = RefCell::new(server);
    let (down, up) = (
        || server.borrow_mut().kill(),
        || server.borrow_mut().restart(),
    );
    nothing_is_executed_while_down(store, down, up).await;
}

// F-163
#[tokio::test]
async fn missing_sqlite_file_executes_nothing() {
    let store = SqliteStore::in_file("/no/such/directory/keys.db");
    let (app, effects) = creating(sql::layer(store));
    let refused = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(effects.count(), 0);
}

// F-170
/// Some failures, such as a full disk, occur only at the commit, after the row was read. Here it is an invalid foreign
/// key.
#[tokio::test]
async fn failed_sqlite_commit_grants_nothing() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let (held, fresh) = (claim(), claim());
    let granted = store.acquire(&held).await;
    assert!(matches!(granted, Ok(Acquired::Granted { .. })));
    let pool = sqlite_pool(&scratch.file("keys.db").display().to_string());
    let spoil = format!(
        "create table absent (id integer primary key);
         create table spoilt (id integer references absent deferrable initially deferred);
         create trigger inserted after insert on {TABLE} begin insert into spoilt values (1); end;
         create trigger updated after update on {TABLE} begin insert into spoilt values (1); end;"
    );
    SqliteStore::run_alone(&pool, spoil).await.unwrap();

    let (lease, ttl) = (held.lease_ref(1), Ttl::from_secs(60));
    let outcomes = [
        store.acquire(&fresh).await.map(drop),
        store.renew(&lease, ttl).await,
        store.complete(&lease, "record".into(), ttl).await,
    ];
    for outcome in outcomes {
        assert!(
            matches!(outcome, Err(StoreError::Backend(_))),
            "{outcome:?}"
        );
    }
    let (app, effects) = creating(sql::layer(store));
    let refused = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(effects.count(), 0);
}

// ---- Records that are too large ----

/// The first response is complete. Its retry receives the error that the response was not retained, and is not executed
/// again.
async fn check_larger_record_is_tombstone<S: Store>(store: S) {
    let (app, effects) = app(sql::layer(store), async |_, _| tests::noise(2 << 20));
    let first = send(&app, post("/orders", "large", "tea")).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 2 << 20));
    for _ in 0..2 {
        let retry = send(&app, post("/orders", "large", "tea")).await;
        assert_eq!(retry.status, StatusCode::CONFLICT);
        assert_eq!(retry.code(), "response-not-retained");
    }
    assert_eq!(effects.count(), 1);
}

// F-162
#[tokio::test]
async fn record_over_limit_is_tombstone_in_postgres() {
    let store = sql::postgres(postgres::shared(), TABLE).await;
    check_larger_record_is_tombstone(store.with_record_limit(1 << 20)).await;
}

// F-162
#[tokio::test]
async fn record_over_limit_is_tombstone_in_sqlite() {
    let scratch = Scratch::new();
    // The store raises this limit, because a tombstone would exceed it too.
    let store = sql::sqlite(&scratch).await.with_record_limit(0);
    check_larger_record_is_tombstone(store).await;
}

// F-162
#[tokio::test]
async fn record_over_packet_limit_is_tombstone_in_mariadb() {
    let server = MariaDbServer::start(&["max-allowed-packet=2M"]);
    let store = sql::mariadb(&server, TABLE).await;
    check_larger_record_is_tombstone(store.clone()).await;
    // The store accepts a record of the reported limit.
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let lease = claim.lease_ref(1);
    let complete =
        |length: usize| store.complete(&lease, vec![7; length].into(), claim.orphan_retention);
    let Err(StoreError::RecordTooLarge { limit }) = complete(2 << 20).await else {
        panic!("a record as large as a packet is refused");
    };
    assert!(limit > 1 << 20, "{limit}");
    complete(limit).await.unwrap();
    match store.acquire(&duplicate(&claim)).await.unwrap() {
        Acquired::Completed { record, .. } => assert_eq!(record.len(), limit),
        other => panic!("expected the record, found {other:?}"),
    }
}

/// The record of the case exceeds the lowest limit. In the runs of the suite, no record exceeds the default limit.
#[test]
fn lowest_limit_rejects_large_record() {
    let case = Case::named("large_record_is_stored_or_rejected_for_size");
    let in_postgres = async || {
        let store = sql::postgres(postgres::shared(), TABLE).await;
        Subject::new(store.with_record_limit(0))
    };
    case.run(false, in_postgres, |_| None);
    let in_mariadb = async || {
        let store = sql::mariadb(mariadb::shared(), TABLE).await;
        Subject::new(store.with_record_limit(0))
    };
    case.run(false, in_mariadb, |_| None);
    let scratch = Scratch::new();
    let in_sqlite = async || Subject::new(sql::sqlite(&scratch).await.with_record_limit(0));
    case.run(false, in_sqlite, |_| None);
}

// ---- Isolation ----

// F-142
/// If the statements ran at the stricter default level, the server would reject most of them, and the store
/// would retry.
#[tokio::test(flavor = "multi_thread")]
async fn isolation_default_causes_no_failures() {
    for level in ["repeatable read", "serializable"] {
        // Autovacuum would log warnings on a machine that stalls.
        let server = PostgresServer::start(&["autovacuum=off"]);
        let options: PgConnectOptions = server.url().parse().unwrap();
        let options = options.options([("default_transaction_isolation", level)]);
        let mut same = PgConnection::connect_with(&options).await.unwrap();
        let shown: String = query_scalar("show transaction_isolation")
            .fetch_one(&mut same)
            .await
            .unwrap();
        assert_eq!(shown, level);
        let store = PostgresStore::new(options);
        store.migrate().await.unwrap();
        for _ in 0..20 {
            let claim = claim();
            let mut racing = JoinSet::new();
            for _ in 0..16 {
                let (store, claim) = (store.clone(), duplicate(&claim));
                racing.spawn(async move {
                    let acquired = retried(|| store.acquire(&claim)).await;
                    let acquired = acquired.unwrap();
                    let granted = matches!(acquired, Acquired::Granted { .. });
                    if granted {
                        let lease = claim.lease_ref(1);
                        let keep = claim.orphan_retention;
                        retried(|| store.complete(&lease, "answer".into(), keep))
                            .await
                            .unwrap();
                    }
                    u32::from(granted)
                });
            }
            assert_eq!(racing.join_all().await.iter().sum::<u32>(), 1);
        }
        let log = server.log();
        assert!(!log.contains("could not serialize"), "at {level}:\n{log}");
        assert!(!log.contains("WARNING"), "at {level}:\n{log}");
    }
}

// ---- Autocommit ----

/// The server's default leaves each statement in a transaction that nothing commits.
#[tokio::test]
async fn audit_lines_survive_missing_autocommit() {
    let server = MariaDbServer::start(&["autocommit=0"]);
    let store = sql::mariadb(&server, "audited").await;
    store.check().await.expect(WORKS);
    let claim = claim();
    store.acquire(&claim).await.expect(WORKS);
    let details = store.get(&claim.id).await.expect(WORKS);
    let entry = details.expect("it is leased").entry;
    store.append_audit_line("before").await.expect(WORKS);
    let resolved = store.resolve(entry.seen(), &Resolution::BreakLease).await;
    assert!(resolved.expect(WORKS).is_applied());
    store.append_audit_line("after").await.expect(WORKS);

    let mut other = MySqlConnection::connect(&server.url()).await.expect(WORKS);
    let lines = query_scalar("select line from audited_audit order by n");
    let lines: Vec<String> = lines.fetch_all(&mut other).await.expect(WORKS);
    assert_eq!(lines, ["before", "after"]);
}

const WORKS: &str = "the database works";

// ---- Locked rows ----

/// A handler's transaction may lock the row for as long as the handler runs. Its duplicates do not wait: they
/// get the record or 409 at once.
async fn assert_notified_at_once<S: Store>(store: &S, claim: &Claim) {
    // A statement that waits for the row is rejected after a while.
    let acquired = store
        .acquire(&duplicate(claim))
        .await
        .expect("the database works");
    assert!(
        matches!(acquired, Acquired::InProgress { .. }),
        "{acquired:?}"
    );
}

/// Checks that an orphan in such a transaction is not taken over. The database stops waiting for its row with this
/// code.
async fn assert_not_taken_over<S: Store>(store: &S, claim: &Claim, code: &str) {
    let claim = duplicate(claim);
    let refused = within(Duration::from_secs(60), store.acquire(&claim)).await;
    let error = refused.expect_err("the row is locked");
    assert!(format!("{error:?}").contains(code), "{error:?}");
}

// F-157
#[tokio::test]
async fn duplicates_do_not_wait_for_row_in_postgres() {
    let store = sql::postgres(postgres::shared(), "rows_held").await;
    let mut handler = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let (mut held, mut short) = (claim(), claim());
    held.lease = Ttl::from_secs(600);
    short.lease = Ttl::from_millis(50);
    store.acquire(&held).await.unwrap();
    store.acquire(&short).await.unwrap();
    let lock = "begin; select * from rows_held for update";
    handler.execute(lock).await.unwrap();
    assert_notified_at_once(&store, &held).await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_not_taken_over(&store, &short, "55P03").await;
    handler.execute("commit").await.unwrap();
    let taken = store.acquire(&duplicate(&short)).await.unwrap();
    assert!(matches!(taken, Acquired::Granted { generation: 2, .. }));
}

// F-157
#[tokio::test]
async fn duplicates_do_not_wait_for_row_in_mariadb() {
    let store = sql::mariadb(mariadb::shared(), "rows_held").await;
    let mut handler = MySqlConnection::connect(&mariadb::shared().url())
        .await
        .unwrap();
    let (mut held, mut short) = (claim(), claim());
    held.lease = Ttl::from_secs(600);
    short.lease = Ttl::from_millis(50);
    store.acquire(&held).await.unwrap();
    store.acquire(&short).await.unwrap();
    handler.execute("begin").await.unwrap();
    let lock = "select * from rows_held for update";
    handler.execute(lock).await.unwrap();
    assert_notified_at_once(&store, &held).await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_not_taken_over(&store, &short, "1205").await;
    handler.execute("commit").await.unwrap();
    let taken = store.acquire(&duplicate(&short)).await.unwrap();
    assert!(matches!(taken, Acquired::Granted { generation: 2, .. }));
}

/// An operator stores a response for an orphan without a token, so the record has no token.
async fn replays_record_without_token<C: Connection>(store: &impl Store, url: &str)
where
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    let claim = claim();
    let acquired = store.acquire(&claim).await.expect("a claim");
    assert!(matches!(acquired, Acquired::Granted { .. }));
    let mut operator = C::connect(url).await.expect("the test server runs");
    let answered = "update by_hand set completed = 1, token = null, record = 'by hand'";
    operator.execute(answered).await.expect("a statement");
    let lease = claim.lease_ref(1);
    let late = retried(|| store.complete(&lease, "late".into(), Ttl::from_secs(60))).await;
    assert!(matches!(late, Err(StoreError::LeaseLost)), "{late:?}");
    let found = retried(|| store.acquire(&claim)).await.expect("a reply");
    let Acquired::Completed { record, token, .. } = found else {
        panic!("expected a record, found {found:?}");
    };
    assert_eq!((&*record, token), (&b"by hand"[..], None));
}

// S-962
#[tokio::test]
async fn record_without_token_is_replayed_from_postgres() {
    let server = postgres::shared();
    let store = sql::postgres(server, "by_hand").await;
    replays_record_without_token::<PgConnection>(&store, &server.url()).await;
}

// S-962
#[tokio::test]
async fn record_without_token_is_replayed_from_mariadb() {
    let server = mariadb::shared();
    let store = sql::mariadb(server, "by_hand").await;
    replays_record_without_token::<MySqlConnection>(&store, &server.url()).await;
}

// F-160
/// The release waits for a transaction that writes a checkpoint. It then finds the checkpoint, and leaves an orphan at
/// once.
#[tokio::test]
async fn release_after_checkpoint_leaves_orphan() {
    let store = sql::postgres(postgres::shared(), "release_waits").await;
    let connect = || async { PgConnection::connect(&postgres::shared().url()).await };
    let (mut handler, mut watch) = (connect().await.unwrap(), connect().await.unwrap());
    let waiting = "select count(*) from pg_stat_activity
        where wait_event_type = 'Lock' and query like '%release_waits%'";
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(120) {
        let held = claim();
        store.acquire(&held).await.unwrap();
        let phase = "begin; update release_waits set checkpoint = 'phase', checkpoint_data = '1'";
        handler.execute(phase).await.unwrap();
        let (releasing, lease) = (store.clone(), held.lease_ref(1));
        let releasing = tokio::spawn(async move { releasing.release(&lease).await });
        while !releasing.is_finished()
            && query_scalar::<_, i64>(waiting)
                .fetch_one(&mut watch)
                .await
                .unwrap()
                == 0
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        handler.execute("commit").await.unwrap();
        // The release timed out, so this trial proves nothing.
        if releasing.await.unwrap().is_err() {
            continue;
        }
        let mut query = duplicate(&held);
        query.orphans = OrphanPolicy::Refuse;
        let found = store.acquire(&query).await.unwrap();
        assert!(matches!(found, Acquired::Orphaned { .. }), "{found:?}");
        return;
    }
    panic!("each release timed out");
}

// ---- Connections ----

/// Neither handlers nor waiters occupy a connection, so one is enough for all of them.
async fn one_connection_is_enough<S: Store>(store: S) {
    const HELD: u64 = 40;
    const FRESH: u64 = 10;
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let layer = sql::layer(store)
        .with_lease_ttl(Ttl::from_secs(8))
        .with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(600)));
    let (shop, effects) = app(layer, move |n, req: Request<Body>| {
        let held = held.clone();
        async move {
            if req.uri().path() == "/held" {
                held.pass().await;
            }
            created(n)
        }
    });
    let mut requests = JoinSet::new();
    let mut spawn_request = |key: u64| {
        let (shop, req) = (shop.clone(), post("/held", &format!("held-{key}"), "tea"));
        requests.spawn(async move { send(&shop, req).await });
    };
    for key in 0..HELD {
        spawn_request(key);
        bounded(barrier.arrival()).await;
    }
    for key in 0..HELD / 2 {
        spawn_request(key);
    }
    // Waits for longer than a lease. All leases are renewed.
    tokio::time::sleep(Duration::from_secs(9)).await;
    for n in 0..FRESH {
        let fresh = post("/orders", &format!("fresh-{n}"), "tea");
        let fresh = bounded(send(&shop, fresh)).await;
        assert_eq!(fresh.status, StatusCode::CREATED);
    }
    barrier.open_for_good();
    for response in bounded(requests.join_all()).await {
        assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    }
    assert_eq!(effects.count(), HELD + FRESH);
}

// F-141
#[tokio::test(flavor = "multi_thread")]
async fn one_postgres_connection_serves_many() {
    let store = sql::postgres(postgres::shared(), "one_connection").await;
    one_connection_is_enough(store.with_connections(1)).await;
}

// F-141
#[tokio::test(flavor = "multi_thread")]
async fn one_mariadb_connection_serves_many() {
    let store = sql::mariadb(mariadb::shared(), "one_connection").await;
    one_connection_is_enough(store.with_connections(1)).await;
}

// ---- Messages ----

/// A server may quote its input. The error of the store does not contain it.
#[tokio::test]
async fn error_shows_no_stored_data() {
    let url = postgres::shared().url();
    let store = sql::postgres(postgres::shared(), "talkative").await;
    let mut admin = PgConnection::connect(&url).await.unwrap();
    let trigger = "create function tell() returns trigger language plpgsql as $$
          begin raise exception 'refusing % % %', encode(new.id, 'hex'), encode(new.token, 'hex'), new.operation; end $$;
        create trigger tell before insert on talkative for each row execute function tell();";
    admin.execute(trigger).await.unwrap();
    let mut claim = claim();
    claim.operation = "POST /hush".into();
    let Err(StoreError::Backend(error)) = store.acquire(&claim).await else {
        panic!("the trigger refuses");
    };
    let message = format!("{error} {error:?}");
    assert!(message.contains("P0001"), "{message}");
    assert!(
        !message.contains("hush") && !message.contains("refusing"),
        "{message}"
    );
}

/// Clients choose the path, which operators see.
#[tokio::test]
async fn any_path_and_owner_can_be_stored() {
    let scratch = Scratch::new();
    let sqlite = sql::sqlite(&scratch).await;
    let postgres = sql::postgres(postgres::shared(), TABLE).await;
    let mariadb = sql::mariadb(mariadb::shared(), TABLE).await;
    let long = "ä".repeat(64);
    for operation in [
        "",
        "POST /it's",
        "POST /\"; drop table tower_idempotency; --",
        "POST /\\' or 1=1",
        "POST /\u{1F4B8}/\u{0}/x",
        "POST /${}/%s/{0}",
        long.as_str(),
    ] {
        let claim = || {
            let mut claim = claim();
            claim.operation = operation.into();
            claim.owner = "host's \"name\" \\ 1";
            claim
        };
        for granted in [
            postgres.acquire(&claim()).await.unwrap(),
            mariadb.acquire(&claim()).await.unwrap(),
            sqlite.acquire(&claim()).await.unwrap(),
        ] {
            assert!(matches!(granted, Acquired::Granted { .. }), "{operation:?}");
        }
    }
}

#[test]
fn hostile_table_names_are_refused_by_every_store() {
    for name in [
        "",
        "keys; drop table users",
        "keys\"",
        "keys`",
        "a.b.c",
        "K",
    ] {
        let postgres = PostgresStore::from_url("postgres://127.0.0.1").unwrap();
        assert!(postgres.with_table(name).is_err(), "{name:?}");
        let mysql = MySqlStore::from_url("mysql://127.0.0.1").unwrap();
        assert!(mysql.with_table(name).is_err(), "{name:?}");
        assert!(
            SqliteStore::in_file("keys.db").with_table(name).is_err(),
            "{name:?}"
        );
    }
}

#[test]
fn stores_are_shown_without_their_passwords() {
    let postgres = PostgresStore::from_url("postgres://app:hush@127.0.0.1/app").unwrap();
    let mysql = MySqlStore::from_url("mysql://app:hush@127.0.0.1/app").unwrap();
    let shown = format!("{postgres:?} {mysql:?}");
    assert!(
        shown.contains("tower_idempotency") && !shown.contains("hush"),
        "{shown}"
    );
}

const TABLE: &str = "tower_idempotency";
