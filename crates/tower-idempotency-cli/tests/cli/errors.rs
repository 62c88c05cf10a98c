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
        dynamodb::{self, StandIn},
        free_port,
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
        redis::{self, RedisCluster, RedisServer},
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

/// Asserts that the command fails with this code and one sentence. Returns the sentence.
fn assert_fails(store: &str, args: &[&str], code: i32, expected: &str) -> String {
    // The client of Redis connects again until the timeout.
    let ran = run(store, &[args, &["--timeout", "20s"]].concat());
    assert_eq!(ran.code, code, "{store}: {ran:?}");
    assert!(ran.out.is_empty(), "{ran:?}");
    assert!(ran.err.contains(expected), "{ran:?}");
    assert_eq!(ran.err.trim_end().lines().count(), 1, "{ran:?}");
    assert!(!ran.err.contains("hush"), "{ran:?}");
    ran.err
}

/// Asserts that the tool cannot use the store, and that its sentence contains the reason.
fn assert_unusable(url: &str, store: &str, reason: &str) {
    let sentence = assert_fails(url, &["stats"], 1, reason);
    let beginning = format!("idempotency: cannot use the {store} store: ");
    assert!(sentence.starts_with(&beginning), "{sentence}");
}

#[test]
fn wrong_urls_are_one_sentence() {
    for (url, expected) in [
        (
            "mongodb://app:hush@localhost/x",
            "expected the URL of a store: memory",
        ),
        ("hush", "expected the URL of a store: memory"),
        (
            "postgres://app:hush@[::/app",
            "expected a URL of the form postgres://",
        ),
        (
            "mysql://app:hush@localhost:hush/app",
            "expected a URL of the form mysql://",
        ),
        (
            "redis://:hush@:x",
            "expected an address of the form redis://",
        ),
        (
            "redis+cluster://:hush@[::hush",
            "expected an address of the form redis+cluster://",
        ),
        ("dynamodb://?endpoint=hush", "expected a table"),
        ("dynamodb://keys?hush=hush", "expected endpoint=URL"),
        ("sqlite:", "expected a path after sqlite:"),
        ("", "expected the URL of a store"),
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
    for (url, store) in [
        (
            format!("postgres://app:hush@127.0.0.1:{port}/app"),
            "postgres",
        ),
        (format!("mysql://app:hush@127.0.0.1:{port}/app"), "mysql"),
        (format!("redis://:hush@127.0.0.1:{port}/0"), "redis"),
        (format!("redis+cluster://:hush@127.0.0.1:{port}"), "redis"),
        ("sqlite:/no/such/directory/keys.db".to_owned(), "sqlite"),
        (
            format!("dynamodb://hush?endpoint=http://127.0.0.1:{port}"),
            "dynamodb",
        ),
    ] {
        assert_unusable(&url, store, "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_passwords_are_one_sentence() {
    let has_password = ["--requirepass", "open-sesame"];
    let server = RedisServer::start(&has_password);
    let url = format!("redis://:hush@{}/0", server.address());
    assert_unusable(&url, "redis", "Password authentication failed");
    let cluster = RedisCluster::start_with(&has_password);
    let url = cluster.url().replace("127.0.0.1", ":hush@127.0.0.1");
    assert_unusable(&url, "redis", "Password authentication failed");
    let server = postgres::shared();
    let admin = sqlx::PgConnection::connect(&server.url()).await;
    let create = sqlx::raw_sql("create role locked login password 'open-sesame'");
    let created = create.execute(&mut admin.expect("the server runs")).await;
    created.expect("a role with a password");
    for (role, code) in [("stranger", "28000"), ("locked", "28P01")] {
        let url = format!("postgres://{role}:hush@{}/postgres", server.address());
        assert_unusable(&url, "postgres", code);
    }
    // Without TLS, the driver sends no password to MySQL.
    let server = MariaDbServer::start_with_tls();
    let url = format!("mysql://app:hush@{}/app", server.address());
    assert_unusable(&url, "mysql", "1045");
}

/// The service may quote the request, which has the token of temporary credentials.
#[tokio::test(flavor = "multi_thread")]
async fn refused_credentials_are_one_sentence() {
    for (code, message) in [
        (
            "UnrecognizedClientException",
            "The security token included in the request is invalid.",
        ),
        (
            "InvalidSignatureException",
            "The request signature we calculated does not match the signature you provided.\n\n\
             The Canonical String for this request should have been\n'POST\n/\n\nx-amz-security-token:hush\n'",
        ),
    ] {
        let service = dynamodb::start_refusing(code, message).await;
        let url = format!("dynamodb://keys?endpoint=http://{}", service.addr());
        let reason = format!("DynamoDB reports {code}");
        assert_unusable(&url, "dynamodb", &reason);
    }
}

#[test]
fn servers_without_tls_are_one_sentence() {
    let redis = redis::shared().address();
    let dynamodb = dynamodb::shared(StandIn::Dynoxide).address();
    for (url, store, reason) in [
        (
            format!("rediss://:hush@{redis}/0"),
            "redis",
            "cannot reach the server",
        ),
        (
            format!("rediss+cluster://:hush@{redis}"),
            "redis",
            "cannot reach the server",
        ),
        (
            format!("{}?sslmode=require", postgres::shared().url()),
            "postgres",
            "server does not support TLS",
        ),
        (
            format!("{}?ssl-mode=REQUIRED", mariadb::shared().url()),
            "mysql",
            "server does not support TLS",
        ),
        (
            format!("dynamodb://keys?endpoint=https://{dynamodb}"),
            "dynamodb",
            "DynamoDB",
        ),
    ] {
        assert_unusable(&url, store, reason);
    }
}

#[test]
fn unknown_certificates_are_one_sentence() {
    let redis = RedisServer::start_with_tls();
    let postgres = PostgresServer::start_with_tls();
    let mariadb = MariaDbServer::start_with_tls();
    let replaced = |scheme: &str| redis.tls_url().replace("rediss://", scheme);
    for (url, store) in [
        (redis.tls_url(), "redis"),
        (replaced("rediss+cluster://"), "redis"),
        (
            format!("{}?sslmode=verify-full", postgres.url()),
            "postgres",
        ),
        (
            format!("{}?ssl-mode=VERIFY_IDENTITY", mariadb.url()),
            "mysql",
        ),
        // The client rejects the certificate before it sends a request, so any server with TLS is an endpoint.
        (replaced("dynamodb://keys?endpoint=https://"), "dynamodb"),
    ] {
        assert_unusable(&url, store, "UnknownIssuer");
    }
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

#[tokio::test(flavor = "multi_thread")]
async fn unlisted_state_has_its_exit_code() {
    let redis = RedisServer::start(&[]);
    let setting = "set completed-index=true in its URL";
    assert_fails(&redis.url(), &["list", "completed"], 6, setting);
    let with_index = format!("{}?completed-index=true", redis.url());
    let ran = run(&with_index, &["list", "completed"]);
    assert_eq!(
        (ran.code, &*ran.out),
        (0, "no completed entry\n"),
        "{ran:?}"
    );
    // Another setting is missing.
    let address = dynamodb::shared(StandIn::Dynoxide).address();
    let without_index = format!("dynamodb://without-index?endpoint=http://{address}&shards=0");
    AnyStore::open(&without_index)
        .await
        .expect("the server runs");
    let expected = "the dynamodb store does not list completed entries";
    let text = assert_fails(&without_index, &["list", "completed"], 6, expected);
    assert!(!text.contains("completed-index"), "{text}");
    assert_fails(
        &redis.url(),
        &["purge", "--reason", "x", "--audit", "log", "--yes"],
        6,
        "itself",
    );
}

/// An empty prefix would be that of another store, without entries.
#[tokio::test(flavor = "multi_thread")]
async fn empty_prefix_variable_counts_as_absent() {
    let redis = RedisServer::start(&[]);
    let store = crate::open(&redis.url()).await.expect("the server runs");
    Keys::create(&store).await;
    let list = ["list", "orphaned", "--fail-if-any"];
    for (variable, option, code) in [
        ("", &[][..], 5),
        ("other:", &[], 0),
        ("", &["--prefix", "other:"], 0),
        ("other:", &["--prefix", ""], 0),
        ("other:", &["--prefix", "idempotency:"], 5),
    ] {
        let mut tool = crate::command(Path::new("."), &redis.url());
        tool.args(list).args(option);
        let ran = tool.env("IDEMPOTENCY_PREFIX", variable).output();
        let ran = ran.expect("the tool runs");
        assert_eq!(ran.status.code(), Some(code), "{variable:?} {option:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_listing_has_own_exit_code() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    AnyStore::open(&url).await.expect("a file");
    let ran = run(&url, &["list", "orphaned", "--fail-if-any"]);
    assert_eq!((ran.code, &*ran.out), (0, "no orphaned entry\n"));
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
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_key_length(1..=1024);
    let layer = layer.with_secret(SECRET).expect("a secret");
    // By default, a layer accepts 255 bytes. A service may accept more.
    let long = "k".repeat(300);
    for key in ["a \"b\"", &long] {
        let mut claim = sql::claim();
        claim.id = layer.key_ids(key, &[b"alice"]).expect("a key")[0];
        store.acquire(&claim).await.expect("a file");
    }
    fs::write(scratch.file("secret"), format!("{SECRET}\n")).expect("a file");
    let rest = ["--principal", "alice", "--secret-file", "secret"];
    for (key, code) in [
        ("a \"b\"", 0),
        (" a \"b\" ", 0),
        ("\"a \\\"b\\\"\"", 0),
        (&*long, 0),
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
}

/// Also if the file exists, and others can read it.
#[tokio::test(flavor = "multi_thread")]
async fn only_owner_reads_record() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    Keys::create(&store).await;
    let (new, old) = (scratch.file("new"), scratch.file("old"));
    fs::write(&old, [b'x'; 10_000]).expect("a file");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o644)).expect("an own file");
    for file in [&new, &old] {
        let path = file.display().to_string();
        let ran = run_in(
            scratch.path(),
            &url,
            &["show", "dddddddd", "--record", &path],
        );
        assert_eq!(ran.code, 0, "{ran:?}");
        let metadata = fs::metadata(file).expect("a file");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }
    let record = fs::read(&new).expect("a file");
    assert_eq!(record, fs::read(&old).expect("a file"));
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
