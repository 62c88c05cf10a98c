//! Without an audit line nothing is changed.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    HANG_GUARD,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::RedisServer,
    },
};
use tokio::{task::spawn_blocking, time::sleep};
use tower_idempotency::{
    NeedsAttention, Preset,
    inspect::{Inspect, RecordContents, State},
    run_once::{Outcome, WorkError},
    store::KeyId,
};
use tower_idempotency_any::AnyStore;
use tower_idempotency_sqlx::sqlx::{self, Connection as _, Row as _};

use crate::{run_in, scenario::Keys, wait_for_end, wait_for_faults};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_resolved_without_audit_line() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    let made = Command::new("mkfifo").arg(scratch.file("pipe")).status();
    assert!(made.expect("mkfifo runs").success());
    // The device is always full, and the pipe has no reader. The others cannot be opened.
    for audit in ["/dev/full", "pipe", "/no/such/directory/audit.jsonl", "."] {
        for args in [
            vec!["resolve", "bbbbbbbb", "free"],
            vec!["resolve", "aaaaaaaa", "break-lease", "--force"],
            vec!["resolve", "dddddddd", "delete-record", "--force"],
            vec!["purge"],
        ] {
            let change = ["--reason", "x", "--audit", audit, "--yes"];
            let ran = run_in(&scratch.file(""), &url, &[&args[..], &change].concat());
            assert_eq!(ran.code, 1, "{ran:?}");
            assert!(ran.err.contains("nothing was changed"), "{ran:?}");
        }
    }
    for (claim, state) in [
        (&keys.orphaned, State::Orphaned),
        (&keys.in_progress, State::InProgress),
        (&keys.completed, State::Completed),
    ] {
        let found = store.get(&claim.id).await.expect("a file");
        assert_eq!(found.map(|it| it.entry.state()), Some(state));
    }
}

/// A response would block the key: the next run could not read it as a value.
#[tokio::test(flavor = "multi_thread")]
async fn entry_of_run_once_gets_no_response() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let layer = crate::open(&url)
        .await
        .expect("a file")
        .layer(Preset::Recommended);
    let examined = async |_lease| -> Result<u8, _> {
        Err(WorkError::NeedsAttention(NeedsAttention::new("refund"), ()))
    };
    let first = layer.run_once("refund-7", "7", examined).await;
    assert!(matches!(first, Ok(Outcome::Failed(()))), "{first:?}");
    let run = |args: &[&str]| run_in(&scratch.file(""), &url, args);
    let listed = run(&["list", "attention", "--json"]);
    let entry: Value =
        serde_json::from_str(listed.out.lines().next().expect("an entry")).expect("JSON");
    let id = entry["id"].as_str().expect("an id");
    let shown = run(&["show", id]).out;
    assert!(shown.contains("decisions: free, retry"), "{shown}");
    let audited = ["--reason", "x", "--audit", "log", "--yes"];
    let response = ["resolve", id, "complete", "--status", "201"];
    let ran = run(&[&response[..], &audited].concat());
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(
        ran.err.contains("the record of this entry is a value"),
        "{ran:?}"
    );
    let ran = run(&[&["resolve", id, "free"][..], &audited].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    let again = layer.run_once("refund-7", "7", async |_| Ok::<_, WorkError<()>>(7_u8));
    let again = again.await.expect("it runs");
    assert!(matches!(again, Outcome::Executed(7)), "{again:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn change_needs_reason_log_and_confirmation() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    for (args, expected) in [
        (&["--audit", "log", "--yes"][..], "--reason"),
        (&["--reason", "x", "--yes"], "--audit"),
        (&["--reason", " ", "--audit", "log", "--yes"], "a reason"),
        (&["--reason", "x", "--audit", "log"], "--yes"),
        // Options of other decisions.
        (
            &[
                "--reason",
                "x",
                "--audit",
                "log",
                "--yes",
                "--retention",
                "7d",
            ],
            "--retention are for complete",
        ),
        (
            &[
                "--reason", "x", "--audit", "log", "--yes", "--code", "fraud",
            ],
            "--code is for needs-attention",
        ),
    ] {
        let args = [&["resolve", "bbbbbbbb", "free"][..], args].concat();
        let ran = run_in(&scratch.file(""), &url, &args);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
    }
    // The parser counts a variable as an option, whatever its value.
    for value in ["false", "0", "no"] {
        let mut command = crate::command(&scratch.file(""), &url);
        command.env("IDEMPOTENCY_AUDIT_TABLE", value);
        let args = ["resolve", "bbbbbbbb", "free", "--reason", "x", "--yes"];
        let ran = command.args(args).output().expect("the tool runs");
        let error = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{value}: {error}");
        assert!(error.contains("--audit-table"), "{value}: {error}");
    }
    assert!(!scratch.file("log").exists());
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    assert!(found.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn log_has_failed_outcome() {
    let server = RedisServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    Keys::create(&store).await;
    // The user may read, and the script that resolves is refused.
    server.command(&[
        "ACL", "SETUSER", "reader", "on", ">hush", "~*", "&*", "+@all", "-hdel", "-del",
    ]);
    let url = server.url().replace("redis://", "redis://reader:hush@");
    let scratch = Scratch::new();
    let change = ["--reason", "x", "--audit", "log", "--yes"];
    let args = [&["resolve", "bbbbbbbb", "retry"][..], &change].concat();
    let ran = run_in(&scratch.file(""), &url, &args);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(!ran.err.contains("hush"), "{ran:?}");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines[0].contains("\"line\":\"intent\""), "{log}");
    assert!(lines[1].contains("\"outcome\":\"unknown: "), "{log}");
}

/// Waits until the entry has this state.
async fn wait_for_state(store: &AnyStore, id: &KeyId, state: State) {
    let began = Instant::now();
    loop {
        let found = store.get(id).await.expect("the server runs");
        let found = found.map(|it| it.entry.state());
        if found == Some(state) {
            return;
        }
        assert!(began.elapsed() < HANG_GUARD, "{found:?}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// The store dies between the intent and the outcome: the log has both, and the second one is `unknown`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_dies_leaves_unknown_outcome() {
    let statement = "with resolved as";
    for (fault, state) in [
        (Fault::request(statement), State::Orphaned),
        (Fault::reply_to(statement), State::Completed),
    ] {
        let mut server = PostgresServer::start(&[]);
        let direct = server.url();
        let store = crate::open(&direct).await.expect("the server runs");
        let keys = Keys::create(&store).await;
        let proxy = Proxy::start(server.address());
        let url = direct.replace(&server.address().to_string(), &proxy.address().to_string());
        let scratch = Scratch::new();
        proxy.once(fault, ConnectionEnd::Hang);
        let resolve = [
            "resolve",
            "bbbbbbbb",
            "complete",
            "--status",
            "201",
            "--reason",
            "x",
            "--audit",
            "log",
            "--yes",
            "--timeout",
            "5s",
        ];
        let directory = scratch.file("");
        let tool = spawn_blocking(move || run_in(&directory, &url, &resolve));
        while proxy.injected_faults() == 0 && !tool.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        // The proxy counts a request before it forwards it.
        if proxy.injected_faults() == 1 {
            wait_for_state(&store, &keys.orphaned.id, state).await;
        }
        drop(store);
        server.kill();
        let ran = tool.await.expect("the tool ends");
        assert_eq!((proxy.injected_faults(), ran.code), (1, 1), "{ran:?}");
        let log = fs::read_to_string(scratch.file("log")).expect("the log");
        let lines: Vec<_> = log.lines().collect();
        assert_eq!(lines.len(), 2, "{log}");
        assert!(lines[0].contains("\"line\":\"intent\""), "{log}");
        assert!(lines[1].contains("\"outcome\":\"unknown: "), "{log}");
        // The present state of the entry shows the outcome.
        server.restart();
        let shown = run_in(
            &scratch.file(""),
            &direct,
            &["show", &keys.orphaned.id.to_hex()],
        );
        assert!(shown.out.contains(state.name()), "{shown:?}");
    }
}

/// Returns the lines of the audit table.
pub(crate) async fn table_lines(url: &str) -> Vec<String> {
    let select = "select line from tower_idempotency_audit order by n";
    match url.split(':').next() {
        Some("postgres") => {
            let mut connection = sqlx::PgConnection::connect(url).await.expect("a server");
            let rows = sqlx::query(select).fetch_all(&mut connection).await;
            rows.expect("a table")
                .iter()
                .map(|row| row.get(0))
                .collect()
        }
        Some("mysql") => {
            let mut connection = sqlx::MySqlConnection::connect(url).await.expect("a server");
            let rows = sqlx::query(select).fetch_all(&mut connection).await;
            rows.expect("a table")
                .iter()
                .map(|row| row.get(0))
                .collect()
        }
        _ => {
            let mut connection = sqlx::SqliteConnection::connect(url).await.expect("a file");
            let rows = sqlx::query(select).fetch_all(&mut connection).await;
            rows.expect("a table")
                .iter()
                .map(|row| row.get(0))
                .collect()
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn table_has_lines_of_file() {
    let scratch = Scratch::new();
    let (postgres, mariadb) = (PostgresServer::start(&[]), MariaDbServer::start(&[]));
    let sqlite = format!("sqlite:{}", scratch.file("keys.db").display());
    for url in [postgres.url(), mariadb.url(), sqlite] {
        let store = crate::open(&url).await.expect("the server runs");
        Keys::create(&store).await;
        let scratch = Scratch::new();
        // The reason has every kind of quote, and letters of other encodings.
        let reason = "ticket '17' \"x\" `y` \\ \n; drop table t; -- caf\u{e9} \u{1f4a3}";
        let change = ["--reason", reason, "--audit-table", "--yes"];
        let ran = run_in(
            &scratch.file(""),
            &url,
            &[
                &["resolve", "bbbbbbbb", "free", "--audit", "log"],
                &change[..],
            ]
            .concat(),
        );
        assert_eq!(ran.code, 0, "{ran:?}");
        let log = fs::read_to_string(scratch.file("log")).expect("the log");
        let mut lines = table_lines(&url).await;
        let without_time = |line: &str| line.replace(&line[..line.find("before").unwrap_or(0)], "");
        for (of_file, of_table) in log.lines().zip(&lines) {
            assert_eq!(without_time(of_file), without_time(of_table));
        }
        assert_eq!((log.lines().count(), lines.len()), (2, 2), "{lines:?}");
        // Without a file.
        let resolve = ["resolve", "cccccccc", "free"];
        let ran = run_in(&scratch.file(""), &url, &[&resolve, &change[..]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        lines = table_lines(&url).await;
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[3].contains("\"outcome\":\"applied\""), "{lines:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_resolved_without_line_in_table() {
    let server = PostgresServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let mut admin = sqlx::PgConnection::connect(&server.url())
        .await
        .expect("a server");
    let operator =
        "create role operator login; grant select, update, delete on tower_idempotency to operator";
    sqlx::raw_sql(operator)
        .execute(&mut admin)
        .await
        .expect("a role");
    let url = format!("postgres://operator@{}/postgres", server.address());
    let scratch = Scratch::new();
    let change = ["--reason", "x", "--audit-table", "--yes"];
    let resolve = [&["resolve", "bbbbbbbb", "free"], &change[..]].concat();
    let ran = run_in(&scratch.file(""), &url, &resolve);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("nothing was changed"), "{ran:?}");
    let found = store.get(&keys.orphaned.id).await.expect("the server runs");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
    // With a table that another operator has created, the right to append is enough.
    let ran = run_in(
        &scratch.file(""),
        &server.url(),
        &[&["resolve", "cccccccc", "free"], &change[..]].concat(),
    );
    assert_eq!(ran.code, 0, "{ran:?}");
    let grant = "grant insert on tower_idempotency_audit to operator";
    sqlx::raw_sql(grant)
        .execute(&mut admin)
        .await
        .expect("a right");
    let ran = run_in(&scratch.file(""), &url, &resolve);
    assert_eq!(ran.code, 0, "{ran:?}");
    // Redis has no table.
    let redis = RedisServer::start(&[]);
    let store = crate::open(&redis.url()).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let ran = run_in(&scratch.file(""), &redis.url(), &resolve);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("expected --audit FILE"), "{ran:?}");
    assert!(
        store
            .get(&keys.orphaned.id)
            .await
            .expect("the server runs")
            .is_some()
    );
}

/// The database holds the line of the intent. Both logs then show that nothing was changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_intent_changes_nothing() {
    let server = PostgresServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let proxy = Proxy::start(server.address());
    let at = server.address().to_string();
    let url = server.url().replace(&at, &proxy.address().to_string());
    let scratch = Scratch::new();
    proxy.once(
        Fault::request("tower_idempotency_audit"),
        ConnectionEnd::Hang,
    );
    let mut tool = crate::command(scratch.path(), &url);
    tool.args(["resolve", "bbbbbbbb", "free", "--reason", "x", "--yes"]);
    tool.args(["--audit", "log", "--audit-table"]);
    let tool = tool.stdin(Stdio::null()).stderr(Stdio::null());
    let mut tool = tool.spawn().expect("the tool starts");
    wait_for_faults(&proxy, 1, &mut tool);
    let pid = tool.id().to_string();
    let sent = Command::new("kill").args(["-INT", &pid]).status();
    assert!(sent.expect("kill").success());
    assert_eq!(wait_for_end(&mut tool).code(), Some(130));
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    assert_eq!(log.lines().count(), 2, "{log}");
    let table = table_lines(&server.url()).await;
    for line in [log.lines().next_back(), table.last().map(String::as_str)] {
        let line = line.expect("a line");
        let outcome = "\"outcome\":\"failed: cannot write the audit table, so nothing was changed: interrupted by SIGINT\"";
        assert!(line.contains(outcome), "{line}");
    }
    let found = store.get(&keys.orphaned.id).await.expect("the server runs");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_events() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    Keys::create(&store).await;
    let events = |args: &[&str]| {
        let ran = crate::program()
            .args(args)
            .args(["--reason", "ticket 17", "--yes"])
            .args(["--store", &url, "--audit", "log", "--actor", "alice"])
            .env("IDEMPOTENCY_LOG", "info")
            .current_dir(scratch.file(""))
            .output()
            .expect("the tool runs");
        assert!(ran.status.success(), "{ran:?}");
        let events = String::from_utf8_lossy(&ran.stderr);
        let of_audit = events
            .lines()
            .filter(|line| line.contains("tower_idempotency::audit"));
        let of_audit: Vec<_> = of_audit.map(str::to_owned).collect();
        assert_eq!(of_audit.len(), 2, "{events}");
        for (event, name) in of_audit.iter().zip(["change begins", "change ended"]) {
            for field in [
                name.to_owned(),
                "actor=\"alice\"".to_owned(),
                "source=\"cli\"".to_owned(),
                format!("what=\"{}\"", args.get(2).unwrap_or(&args[0])),
                "why=\"ticket 17\"".to_owned(),
            ] {
                assert!(event.contains(&field), "{field}: {event}");
            }
        }
        assert!(of_audit[1].contains("outcome=\"applied\""), "{events}");
        of_audit
    };
    for (id, decision, before, after) in [
        ("cccccccc", "retry", "needs-attention", "orphaned"),
        ("bbbbbbbb", "free", "orphaned", "absent"),
    ] {
        let found = events(&["resolve", id, decision]);
        let (before, after) = (format!("before=\"{before}\""), format!("after=\"{after}\""));
        for event in &found {
            let id = format!("id=\"{id}");
            assert!(event.contains(&id) && event.contains(&before), "{event}");
        }
        assert!(!found[0].contains("after="), "{found:?}");
        assert!(found[1].contains(&after), "{found:?}");
    }
    // A purge is not about one entry.
    for event in events(&["purge"]) {
        assert!(
            !event.contains("before=") && !event.contains("after="),
            "{event}"
        );
    }
}

/// The reason of the handler is the only statement about its effect.
#[tokio::test(flavor = "multi_thread")]
async fn reason_and_code_of_handler_stay() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    Keys::create(&store).await;
    let run = |args: &[&str]| run_in(&scratch.file(""), &url, args);
    let resolve = |how: &[&str], reason: &str| {
        let change = ["--reason", reason, "--audit", "log", "--yes"];
        let ran = run(&[&["resolve", "cccccccc"], how, &change[..]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        run(&["show", "cccccccc", "--json"]).out
    };
    let kept = resolve(&["needs-attention"], "for bob");
    assert!(
        kept.contains(r#""attention_code":"refund-failed""#),
        "{kept}"
    );
    assert!(
        kept.contains(r#""reason":"refund re_7; for bob""#),
        "{kept}"
    );
    let kept = resolve(&["needs-attention", "--code", "examine"], "monday");
    assert!(kept.contains(r#""attention_code":"examine""#), "{kept}");
    assert!(
        kept.contains(r#""reason":"refund re_7; for bob; monday""#),
        "{kept}"
    );
    resolve(&["retry"], "refunded");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    let reasons: Vec<_> = log
        .lines()
        .step_by(2)
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["before"]["reason"].clone())
        .collect();
    let expected = [
        "refund re_7",
        "refund re_7; for bob",
        "refund re_7; for bob; monday",
    ];
    assert_eq!(reasons, expected);
}

/// The store rejects the record, so nothing is changed and the outcome is known.
#[tokio::test(flavor = "multi_thread")]
async fn record_too_large_is_failed_outcome() {
    let server = shared(StandIn::Dynoxide);
    let (table, address) = (server.new_table(), server.address());
    let url = format!("dynamodb://{table}?endpoint=http://{address}&skew=100ms");
    let store = crate::open(&url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let scratch = Scratch::new();
    // The digits cannot be compressed below the limit of an item.
    let mut state = 1_u64;
    let body: String = (0..1_000_000)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            char::from(b'!' + u8::try_from((state >> 33) % 94).expect("less than 94"))
        })
        .collect();
    fs::write(scratch.file("body"), body).expect("a file");
    let args =
        "resolve bbbbbbbb complete --status 201 --body-file body --reason x --audit log --yes";
    let args: Vec<_> = args.split(' ').collect();
    let ran = run_in(scratch.path(), &url, &args);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("nothing was changed"), "{ran:?}");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    assert!(log.contains("\"outcome\":\"failed: "), "{log}");
    let found = store.get(&keys.orphaned.id).await.expect("the server runs");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
}

#[tokio::test(flavor = "multi_thread")]
async fn response_is_recorded_whole_or_rejected() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    fs::write(scratch.file("body"), "paid").expect("a file");
    for (response, expected) in [
        (
            ["--status", "201", "--header", "set-cookie: a=b"],
            "these headers: set-cookie",
        ),
        (
            ["--status", "204", "--body-file", "body"],
            "status 204 has no body",
        ),
        // A year of the parser has 365.25 days.
        (
            ["--status", "201", "--retention", "100y"],
            "at most 36500 days",
        ),
    ] {
        let args = [
            "resolve", "bbbbbbbb", "complete", "--reason", "x", "--audit", "log", "--yes",
        ];
        let ran = run_in(&scratch.file(""), &url, &[&args[..], &response].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
    }
    assert!(!scratch.file("log").exists(), "nothing was intended");

    // The operator knows a setting of the service.
    let replayed = [
        "resolve",
        "bbbbbbbb",
        "complete",
        "--reason",
        "x",
        "--audit",
        "log",
        "--yes",
        "--status",
        "201",
        "--header",
        "set-cookie: a=b",
        "--replayed-header",
        "Set-Cookie",
    ];
    let ran = run_in(&scratch.file(""), &url, &replayed);
    assert_eq!(ran.code, 0, "{ran:?}");
    let details = store.get(&keys.orphaned.id).await.expect("a file");
    let contents = details.expect("an entry").contents(usize::MAX);
    let Some(RecordContents::Response(response)) = contents else {
        panic!("expected a response");
    };
    assert_eq!(response.headers()["set-cookie"], "a=b");
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_user_is_unknown_operator() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    crate::open(&url).await.expect("a file");
    for (user, actor) in [("", "unknown"), (" ", "unknown"), ("bob", "bob")] {
        let mut tool = crate::command(scratch.path(), &url);
        tool.args(["purge", "--reason", "x", "--audit", "log", "--yes"]);
        let ran = tool.env("USER", user).output().expect("the tool runs");
        assert_eq!(ran.status.code(), Some(0), "{ran:?}");
        let log = fs::read_to_string(scratch.file("log")).expect("the log");
        let last = log.lines().next_back().expect("a line");
        assert!(last.contains(&format!("\"actor\":\"{actor}\"")), "{last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_of_purge_name_store() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    crate::open(&url).await.expect("a file");
    let args = ["purge", "--reason", "x", "--audit", "log", "--yes"];
    let ran = run_in(&scratch.file(""), &url, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines.iter().all(|it| it["store"] == url.as_str()), "{log}");
    assert_eq!(lines[0]["change"], lines[1]["change"]);
    assert_eq!(lines[0]["change"].as_str().map(str::len), Some(16), "{log}");
}
