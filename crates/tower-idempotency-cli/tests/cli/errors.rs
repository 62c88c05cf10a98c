//! Each failure is one sentence, without a password.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
};

use tests::{
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        free_port,
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::RedisServer,
    },
    sql,
};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    inspect::Inspect as _,
    store::{Store as _, Ttl},
};
use tower_idempotency_any::AnyStore;
use tower_idempotency_sqlx::sqlx::{self, Connection as _};

use crate::{run, run_in, scenario::Keys};

/// Asserts that the command fails with this code and one sentence.
fn assert_fails(store: &str, args: &[&str], code: i32, expected: &str) {
    // The client of Redis connects again until the timeout.
    let ran = run(store, &[args, &["--timeout", "20s"]].concat());
    assert_eq!(ran.code, code, "{store}: {ran:?}");
    assert!(ran.out.is_empty(), "{ran:?}");
    assert!(ran.err.contains(expected), "{ran:?}");
    assert_eq!(ran.err.trim_end().lines().count(), 1, "{ran:?}");
    assert!(!ran.err.contains("hush"), "{ran:?}");
}

#[test]
fn wrong_urls_are_one_sentence() {
    for (url, expected) in [
        (
            "mongodb://app:hush@localhost/x",
            "expected a store of memory",
        ),
        ("hush", "expected a store of memory"),
        (
            "postgres://app:hush@[::/app",
            "expected a URL of the form postgres://",
        ),
        (
            "redis://:hush@:x",
            "expected an address of the form redis://",
        ),
        ("sqlite:", "expected a path after sqlite:"),
        ("", "expected a store"),
        (
            "memory",
            "expected a store that other processes can reach, found memory",
        ),
    ] {
        assert_fails(url, &["stats"], 2, expected);
    }
}

#[test]
fn stores_that_are_down_are_one_sentence() {
    let port = free_port();
    for url in [
        format!("postgres://app:hush@127.0.0.1:{port}/app"),
        format!("mysql://app:hush@127.0.0.1:{port}/app"),
        format!("redis://:hush@127.0.0.1:{port}/0"),
        format!("redis+cluster://:hush@127.0.0.1:{port}"),
        "sqlite:/no/such/directory/keys.db".to_owned(),
        format!("dynamodb://hush?endpoint=http://127.0.0.1:{port}"),
    ] {
        assert_fails(&url, &["stats"], 1, "cannot use the ");
    }
}

#[test]
fn refused_connections_are_one_sentence() {
    let redis = RedisServer::start(&["--requirepass", "open-sesame"]);
    let url = format!("redis://:hush@{}/0", redis.address());
    assert_fails(&url, &["stats"], 1, "cannot use the redis store");
    // The server speaks no TLS.
    let url = format!("rediss://:hush@{}/0", redis.address());
    assert_fails(&url, &["stats"], 1, "cannot use the redis store");
    let postgres = PostgresServer::start(&[]);
    let role = async {
        let mut admin = sqlx::PgConnection::connect(&postgres.url()).await;
        let create = sqlx::raw_sql("create role locked login password 'open-sesame'");
        let created = create.execute(admin.as_mut().expect("a server")).await;
        created.expect("a role with a password");
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(role);
    for role in ["stranger", "locked"] {
        let url = format!("postgres://{role}:hush@{}/postgres", postgres.address());
        assert_fails(&url, &["stats"], 1, "cannot use the postgres store");
    }
    let url = format!("{}?sslmode=require", postgres.url());
    assert_fails(&url, &["stats"], 1, "cannot use the postgres store");
    let mariadb = MariaDbServer::start(&[]);
    let url = format!("mysql://app:hush@{}/app", mariadb.address());
    assert_fails(&url, &["stats"], 1, "cannot use the mysql store");
    let url = format!("{}?ssl-mode=REQUIRED", mariadb.url());
    assert_fails(&url, &["stats"], 1, "cannot use the mysql store");
}

#[test]
fn unknown_certificates_are_one_sentence() {
    let redis = RedisServer::start_with_tls();
    assert_fails(
        &redis.tls_url(),
        &["stats"],
        1,
        "cannot use the redis store",
    );
    let dynamodb = shared(StandIn::Dynoxide);
    // The server speaks no TLS.
    let url = format!("dynamodb://keys?endpoint=https://{}", dynamodb.address());
    assert_fails(&url, &["stats"], 1, "cannot use the dynamodb store");
}

/// The console has the same rule.
#[test]
fn status_of_response_is_final_and_known() {
    for status in ["100", "199", "600", "999", "20", "x"] {
        let args = ["resolve", "bbbbbbbb", "complete", "--status", status];
        let ran = run(
            "memory",
            &[&args[..], &["--reason", "x", "--audit", "log"]].concat(),
        );
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(
            ran.err.contains("expected a status of 200 to 599"),
            "{ran:?}"
        );
    }
}

#[test]
fn unlisted_state_has_its_exit_code() {
    let redis = RedisServer::start(&[]);
    assert_fails(&redis.url(), &["list", "completed"], 6, "");
    assert_fails(
        &redis.url(),
        &["purge", "--reason", "x", "--audit", "log", "--yes"],
        6,
        "itself",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_listing_has_own_exit_code() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    AnyStore::open(&url).await.expect("a file");
    let ran = run(&url, &["list", "orphaned", "--fail-if-any"]);
    assert_eq!((ran.code, &*ran.out), (0, "no entry is orphaned\n"));
    let ran = run(&url, &["watch", "--exit-when-empty", "attention"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = run(&url, &["show", "0123456789"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    let ran = run(&url, &["show", "0123"]);
    assert_eq!(ran.code, 2, "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_output_ends_quietly() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    AnyStore::open(&url).await.expect("a file");
    let config = scratch.file("proxy.toml");
    let text = "[listen]\naddress = \"127.0.0.1:0\"\n[store]\nurl = \"memory\"\n[upstream.a]\nurl = \"http://127.0.0.1:1\"\n[[route]]\npath = \"/**\"\nupstream = \"a\"\n";
    fs::write(&config, text).expect("a file");
    let [check, policy] = ["--check", "policy"].map(|it| match it {
        "policy" => format!("proxy policy --config {}", config.display()),
        _ => format!("proxy {it} --config {}", config.display()),
    });
    for line in [
        &*check,
        &*policy,
        "man",
        "completions bash",
        "list orphaned",
        "watch --interval 100ms",
        "export",
    ] {
        let args: Vec<_> = line.split(' ').collect();
        let (ended, errors) = run_unread(scratch.path(), &url, &args);
        assert_eq!((ended, &*errors), (Some(0), ""), "{line}");
    }
}

#[test]
fn completions_are_scripts() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let ran = run("", &["completions", shell]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.out.contains("fail-if-any"), "{shell}");
    }
    let script = run("", &["completions", "bash"]).out;
    let parsed = Command::new("bash").args(["-n", "-c", &script]).status();
    assert!(parsed.expect("bash").success());
}

#[test]
#[ignore = "needs zsh and fish; scripts/test --all installs them and runs this test"]
fn completions_of_zsh_and_fish_are_scripts() {
    for shell in ["zsh", "fish"] {
        let scratch = Scratch::new();
        let file = scratch.file("script");
        std::fs::write(&file, run("", &["completions", shell]).out).expect("a file");
        let parsed = Command::new(shell).arg("-n").arg(&file).status();
        assert!(parsed.expect("the shell is installed").success(), "{shell}");
    }
}

/// Returns a pipe whose reader has ended.
fn closed_pipe() -> io::PipeWriter {
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    writer
}

/// Runs the tool with an output whose reader has ended. Returns its exit code and its errors.
fn run_unread(directory: &Path, store: &str, args: &[&str]) -> (Option<i32>, String) {
    let mut tool = crate::command(directory, store);
    let tool = tool.args(args).stdin(Stdio::null()).stdout(closed_pipe());
    let ran = tool.output().expect("the tool runs");
    let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
    (ran.status.code(), errors)
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_output_keeps_exit_code() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    let seen = found.expect("an entry").entry.seen().to_string();
    let change = ["--reason", "x", "--audit", "log", "--yes"];
    let resolve = [
        &["resolve", "bbbbbbbb", "retry", "--seen", &seen],
        &change[..],
    ]
    .concat();
    for (args, code) in [
        (&["list", "orphaned", "--fail-if-any"][..], 5),
        (&["list", "orphaned", "--fail-if-any", "--json"], 5),
        (&["list", "orphaned"], 0),
        (&resolve, 0),
        (&resolve, 4),
    ] {
        let (ended, errors) = run_unread(scratch.path(), &url, args);
        assert_eq!((ended, &*errors), (Some(code), ""), "{args:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_errors_keep_exit_code() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    Keys::create(&store).await;
    let change = ["--reason", "x", "--audit", "log", "--yes"];
    let free = [&["resolve", "bbbbbbbb", "free"], &change[..]].concat();
    for (args, code) in [(&["show", "eeeeeeee"][..], 3), (&free, 0), (&free, 3)] {
        let mut tool = crate::command(scratch.path(), &url);
        // A change is an event.
        let tool = tool.env("IDEMPOTENCY_LOG", "info").args(args);
        let tool = tool.stdin(Stdio::null()).stdout(Stdio::null());
        let ended = tool.stderr(closed_pipe()).status().expect("the tool runs");
        assert_eq!(ended.code(), Some(code), "{args:?}");
    }
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    assert_eq!(log.lines().count(), 2, "{log}");
}

/// The file of the secret is that of the proxy, and the key is the line of an access log.
#[tokio::test(flavor = "multi_thread")]
async fn key_is_found_as_client_sent_it() {
    const SECRET: &str = "0123456789abcdef0123456789abcdef";
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_secret(SECRET);
    let ids = layer.expect("a secret").key_ids("a \"b\"", &[b"alice"]);
    let mut claim = sql::claim();
    claim.id = ids.expect("a key")[0];
    store.acquire(&claim).await.expect("a file");
    fs::write(scratch.file("secret"), format!("{SECRET}\n")).expect("a file");
    let rest = ["--principal", "alice", "--secret-file", "secret"];
    for (key, code) in [
        ("a \"b\"", 0),
        (" a \"b\" ", 0),
        ("\"a \\\"b\\\"\"", 0),
        ("\"a b\"", 3),
        ("\"", 3),
    ] {
        let find = [&["find", "--key", key][..], &rest].concat();
        let ran = run_in(scratch.path(), &url, &find);
        assert_eq!(ran.code, code, "{key}: {ran:?}");
    }
}

/// A record that the device does not store is no success.
#[tokio::test(flavor = "multi_thread")]
async fn record_that_is_not_written_is_failure() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    Keys::create(&store).await;
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    let mut command = crate::command(scratch.path(), &url);
    let ran = command
        .args(["show", "dddddddd", "--record", "-"])
        .stdout(full.expect("a device"))
        .output();
    let ran = ran.expect("the tool runs");
    assert_eq!(ran.status.code(), Some(1), "{ran:?}");
    let file = scratch.file("record");
    let path = file.display().to_string();
    let ran = run_in(
        scratch.path(),
        &url,
        &["show", "dddddddd", "--record", &path],
    );
    assert_eq!(ran.code, 0, "{ran:?}");
    let metadata = fs::metadata(&file).expect("a file");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}

/// A retry of an execution whose response was not recorded gets no response.
#[tokio::test(flavor = "multi_thread")]
async fn tombstone_is_shown_as_rejection() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let mut claim = tests::sql::claim();
    claim.lease = Ttl::from_secs(600);
    store.acquire(&claim).await.expect("a file");
    let mut response = http::Response::new(bytes::Bytes::new());
    for _ in 0..129 {
        let lines = response.headers_mut();
        lines.append("x-total", http::HeaderValue::from_static("3"));
    }
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let record = layer.encode_response_record(&claim.id, &response);
    let lease = claim.lease_ref(1);
    let stored = store.complete(&lease, record, Ttl::from_secs(600));
    stored.await.expect("a file");
    let shown = run(&url, &["show", &claim.id.to_hex()]);
    assert_eq!(shown.code, 0, "{shown:?}");
    assert!(shown.out.contains("409 response-not-retained"), "{shown:?}");
    assert!(
        !shown.out.contains("gets the recorded response"),
        "{shown:?}"
    );
}
