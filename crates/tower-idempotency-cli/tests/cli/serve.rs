//! `serve` as a process.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::net::{UnixDatagram, UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tests::{
    HANG_GUARD,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer, redis::RedisServer},
};
use tokio::task::spawn_blocking;
use tower_idempotency::inspect::{Inspect as _, State};
use tower_idempotency_any::AnyStore;
use tower_idempotency_sqlx::sqlx::{self, Connection as _};

use crate::{audit::table_lines, command, run_in, scenario::Keys, wait_for_end, wait_for_faults};

/// A running console. Killed when it is dropped.
pub(crate) struct Served {
    child: Child,
    at: String,
}

impl Served {
    pub(crate) fn start(directory: &Path, store: &str, args: &[&str]) -> Self {
        Self::start_with(directory, store, args, |_| {})
    }

    /// Starts a console with a changed command.
    pub(crate) fn start_with(
        directory: &Path,
        store: &str,
        args: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = command(directory, store);
        command.arg("serve").args(args);
        if !args.contains(&"--unix-socket") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        command.stdin(Stdio::null()).stderr(Stdio::null());
        command.stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the tool starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let at = line
            .trim_end()
            .strip_prefix("listening on ")
            .expect("an address");
        let at = at.trim_start_matches("http://").to_owned();
        Self { child, at }
    }

    /// Sends a request, and returns the response.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let host = if headers.to_ascii_lowercase().contains("host:") {
            String::new()
        } else {
            format!("host: {}\r\n", self.at)
        };
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{host}{headers}connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let mut response = Vec::new();
        if let Some(path) = self.at.strip_prefix("unix:") {
            let mut stream = UnixStream::connect(path).expect("it listens");
            stream.write_all(request.as_bytes()).expect("a connection");
            stream.read_to_end(&mut response).expect("a response");
        } else {
            let mut stream = TcpStream::connect(&self.at).expect("it listens");
            stream.write_all(request.as_bytes()).expect("a connection");
            stream.read_to_end(&mut response).expect("a response");
        }
        String::from_utf8_lossy(&response).into_owned()
    }

    pub(crate) fn get(&self, path: &str, headers: &str) -> String {
        self.send("GET", path, headers, "")
    }

    /// Resolves the present entry by the API.
    fn resolve(&self, id: &str, how: &str) -> String {
        let entry = self.get(&format!("/api/v1/entries/{id}"), "");
        let (_, seen) = entry.split_once("\"seen\":\"").expect("a member");
        let seen = seen.split('"').next().expect("an end");
        let body = format!("{{\"seen\":\"{seen}\",\"how\":\"{how}\",\"reason\":\"ticket 17\"}}");
        let path = format!("/api/v1/entries/{id}/resolve");
        self.send("POST", &path, "content-type: application/json\r\n", &body)
    }

    /// Opens the stream of the live view, and waits for the counts of the next query.
    pub(crate) fn wait_for_counts(&self) {
        let mut stream = TcpStream::connect(&self.at).expect("it listens");
        let request = format!("GET /events HTTP/1.1\r\nhost: {}\r\n\r\n", self.at);
        stream.write_all(request.as_bytes()).expect("a connection");
        let mut lines = BufReader::new(stream).lines();
        let is_event = |line: io::Result<String>| line.expect("a line").contains("event: counts");
        assert!(lines.any(is_event), "the stream has no counts");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub(crate) async fn store(scratch: &Scratch) -> (String, AnyStore, Keys) {
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    (url, store, keys)
}

#[tokio::test(flavor = "multi_thread")]
async fn loopback_console_resolves() {
    let scratch = Scratch::new();
    let (url, store, keys) = store(&scratch).await;
    let served = Served::start(scratch.path(), &url, &["--audit", "log"]);
    let page = served.get("/", "");
    assert!(
        page.starts_with("HTTP/1.1 200 ") && page.contains("keys in sqlite"),
        "{page}"
    );
    let id = keys.orphaned.id.to_hex();
    let entry = served.get(&format!("/api/v1/entries/{id}"), "");
    let (_, seen) = entry.split_once("\"seen\":\"").expect("a member");
    let seen = seen.split('"').next().expect("an end");
    let body = format!("{{\"seen\":\"{seen}\",\"how\":\"free\",\"reason\":\"ticket 17\"}}");
    let path = format!("/api/v1/entries/{id}/resolve");
    let json = "content-type: application/json\r\n";
    // A page of another site whose name leads to loopback.
    let rebound = served.send("POST", &path, &format!("{json}host: evil.test\r\n"), &body);
    assert!(rebound.starts_with("HTTP/1.1 421 "), "{rebound}");
    let read = served.get("/api/v1/summary", "host: evil.test:7480\r\n");
    assert!(read.starts_with("HTTP/1.1 421 "), "{read}");
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
    let done = served.send("POST", &path, json, &body);
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    assert!(
        store
            .get(&keys.orphaned.id)
            .await
            .expect("a file")
            .is_none()
    );
    let log = std::fs::read_to_string(scratch.file("log")).expect("the log");
    assert!(
        log.contains("\"actor\":\"alice\"") && log.lines().count() == 2,
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_needed_for_each_page() {
    let scratch = Scratch::new();
    let (url, _, keys) = store(&scratch).await;
    std::fs::write(scratch.file("token"), "0123456789abcdef\n").expect("a file");
    let served = Served::start(
        scratch.path(),
        &url,
        &["--audit", "log", "--token-file", "token"],
    );
    for headers in [
        "",
        "authorization: Bearer 0123456789abcdee\r\n",
        "authorization: Bearer\r\n",
        "authorization: Basic !\r\n",
        // bob:wrong
        "authorization: Basic Ym9iOndyb25n\r\n",
        "authorization: Digest 0123456789abcdef\r\n",
    ] {
        for path in [
            "/",
            "/entries",
            "/api/v1/summary",
            "/assets/x.js",
            "/events",
            "/metrics",
        ] {
            let refused = served.get(path, headers);
            assert!(
                refused.starts_with("HTTP/1.1 401 "),
                "{path} {headers}: {refused}"
            );
            assert!(refused.contains("www-authenticate: Basic"), "{refused}");
            let is_json = refused.ends_with("{\"error\":\"The token is missing or wrong.\"}");
            assert_eq!(is_json, path.starts_with("/api/"), "{refused}");
        }
    }
    let by_token = served.get("/", "authorization: Bearer 0123456789abcdef\r\n");
    assert!(by_token.starts_with("HTTP/1.1 200 "), "{by_token}");
    // bob:0123456789abcdef
    let bob = "authorization: Basic Ym9iOjAxMjM0NTY3ODlhYmNkZWY=\r\n";
    let page = served.get("/", bob);
    assert!(
        page.starts_with("HTTP/1.1 200 ") && page.contains("bob"),
        "{page}"
    );
    let path = format!("/entries/{}/resolve?how=retry", keys.orphaned.id.to_hex());
    assert!(served.get(&path, bob).starts_with("HTTP/1.1 200 "));
    assert!(served.get("/healthz", "").starts_with("HTTP/1.1 200 "));
}

#[tokio::test(flavor = "multi_thread")]
async fn unix_socket_is_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let scratch = Scratch::new();
    let (url, _, keys) = store(&scratch).await;
    let socket = scratch.file("s").display().to_string();
    let args = ["--read-only", "--unix-socket", &socket];
    let served = Served::start(scratch.path(), &url, &args);
    let mode = std::fs::metadata(&socket)
        .expect("a socket")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let page = served.get("/", "host: localhost\r\n");
    assert!(
        page.starts_with("HTTP/1.1 200 ") && page.contains("(uid "),
        "{page}"
    );
    // A page of another site whose name leads to a forwarded port.
    let page = served.get("/", "host: evil.test:7480\r\n");
    assert!(page.starts_with("HTTP/1.1 421 "), "{page}");
    let path = format!("/entries/{}/resolve?how=retry", keys.orphaned.id.to_hex());
    assert!(
        served
            .get(&path, "host: localhost\r\n")
            .starts_with("HTTP/1.1 403 ")
    );
    // It is in use, and afterwards the file of a killed process is replaced.
    let ran = run_in(
        scratch.path(),
        &url,
        &["serve", "--read-only", "--unix-socket", &socket],
    );
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("another process listens"), "{ran:?}");
    drop(served);
    let again = Served::start(scratch.path(), &url, &args);
    assert!(
        again
            .get("/", "host: localhost\r\n")
            .starts_with("HTTP/1.1 200 ")
    );
}

/// The reader of its output has ended, as in `serve | tee` after `tee` was killed.
#[tokio::test(flavor = "multi_thread")]
async fn console_is_served_without_reader_of_output() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    let mut tool = command(scratch.path(), &url);
    tool.args(["serve", "--read-only", "--unix-socket", "s"]);
    tool.stdin(Stdio::null());
    tool.stdout(writer).stderr(Stdio::null());
    let path = scratch.file("s");
    let mut served = Served {
        child: tool.spawn().expect("the tool starts"),
        at: format!("unix:{}", path.display()),
    };
    let began = Instant::now();
    while UnixStream::connect(&path).is_err() {
        let ended = served.child.try_wait().expect("a child");
        assert!(ended.is_none(), "it ended: {ended:?}");
        assert!(began.elapsed() < HANG_GUARD, "it does not listen");
        thread::sleep(Duration::from_millis(1));
    }
    let page = served.get("/", "host: localhost\r\n");
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
}

/// Sends a request to the socket `s` of a directory as another user of this machine.
const AS_ANOTHER_USER: &str = r#"
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
stream = socket.socket(socket.AF_UNIX)
stream.connect("s")
stream.sendall(("GET /entries HTTP/1.1\r\nhost: localhost\r\n" + sys.argv[1] + "connection: close\r\n\r\n").encode())
sys.stdout.write(str(os.getuid()) + "\n")
while part := stream.recv(65536):
    sys.stdout.buffer.write(part)
    sys.stdout.flush()
"#;

/// The file permits each user to connect, as between `bind` and `chmod`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, to connect as another user; scripts/test --all runs this test as root"]
async fn unix_socket_serves_only_its_owner() {
    use std::{fs, os::unix::fs::PermissionsExt as _};
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    fs::write(scratch.file("token"), "0123456789abcdef\n").expect("a file");
    let bearer = "authorization: Bearer 0123456789abcdef\r\n";
    for (token, headers, expected) in [
        (&[][..], "", "403"),
        (&[], bearer, "403"),
        (&["--token-file", "token"], "", "401"),
        (&["--token-file", "token"], bearer, "200"),
    ] {
        let args = [&["--read-only", "--unix-socket", "s"], token].concat();
        let served = Served::start(scratch.path(), &url, &args);
        for (path, mode) in [(scratch.path(), 0o755), (&scratch.file("s"), 0o666)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("our file");
        }
        let mut other = Command::new("python3");
        let other = other.current_dir(scratch.path());
        let sent = other.args(["-c", AS_ANOTHER_USER, headers]).output();
        let sent = sent.expect("Python");
        let received = String::from_utf8_lossy(&sent.stdout);
        let (uid, response) = received
            .split_once('\n')
            .unwrap_or_else(|| panic!("{sent:?}"));
        let own = Command::new("id").arg("-u").output().expect("id").stdout;
        assert_ne!(own, format!("{uid}\n").as_bytes(), "this test needs root");
        let status = format!("HTTP/1.1 {expected} ");
        assert!(
            response.starts_with(&status),
            "{headers}: {response} {sent:?}"
        );
        drop(served);
        fs::remove_file(scratch.file("s")).expect("our file");
    }
}

/// A socket to which this process cannot connect may be in use.
#[tokio::test(flavor = "multi_thread")]
async fn other_socket_is_not_replaced() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let path = scratch.file("s");
    let other = UnixDatagram::bind(&path).expect("a socket");
    let args = ["serve", "--read-only", "--unix-socket", "s"];
    let ran = run_in(scratch.path(), &url, &args);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("cannot listen on s"), "{ran:?}");
    let sender = UnixDatagram::unbound().expect("a socket");
    sender.send_to(b"still here", &path).expect("it exists");
    assert_eq!(other.recv(&mut [0; 16]).expect("a message"), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn unsafe_settings_are_refused() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    std::fs::write(scratch.file("short"), "0123456789\n").expect("a file");
    for (args, expected) in [
        (
            &["--listen", "0.0.0.0:0", "--read-only"][..],
            "is not loopback",
        ),
        (&["--listen", "[::]:0", "--read-only"], "is not loopback"),
        (&["--listen", "127.0.0.1:0"], "--audit"),
        (
            &["--read-only", "--token-file", "short"],
            "at least 16 characters",
        ),
        (
            &["--listen", "127.0.0.1:0", "--unix-socket", "s"],
            "cannot be used with",
        ),
    ] {
        let ran = run_in(scratch.path(), &url, &[&["serve"], args].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
        assert!(!ran.err.contains("0123456789\n"), "{ran:?}");
    }
}

/// The operator detects this at the start, and not at the first decision.
#[tokio::test(flavor = "multi_thread")]
async fn unusable_audit_file_ends_console() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    // The socket cannot be bound either, so the process ends in any case.
    let serve = ["serve", "--unix-socket", "/no/such/directory/s"];
    let audit = ["--audit", "/no/such/directory/log"];
    let ran = run_in(scratch.path(), &url, &[&serve[..], &audit].concat());
    assert_eq!(ran.code, 1, "{ran:?}");
    let expected = "cannot write the audit log /no/such/directory/log: ";
    assert!(ran.err.contains(expected), "{ran:?}");
    let read_only = [&serve[..], &audit, &["--read-only"]].concat();
    let ran = run_in(scratch.path(), &url, &read_only);
    assert!(ran.err.contains("cannot listen on"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn signal_ends_console_with_open_stream() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let mut served = Served::start(scratch.path(), &url, &["--read-only"]);
    let mut stream = TcpStream::connect(&served.at).expect("it listens");
    let request = format!("GET /events HTTP/1.1\r\nhost: {}\r\n\r\n", served.at);
    stream.write_all(request.as_bytes()).expect("a connection");
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).expect("a line");
    assert!(line.starts_with("HTTP/1.1 200 "), "{line}");
    let pid = served.child.id().to_string();
    let killed = Command::new("kill").args(["-TERM", &pid]).status();
    assert!(killed.expect("kill").success());
    assert!(wait_for_end(&mut served.child).success());
}

/// The browser disconnects while the store holds its change, and the process gets SIGTERM or SIGHUP.
#[tokio::test(flavor = "multi_thread")]
async fn change_ends_before_console() {
    for signal in ["-TERM", "-HUP"] {
        end_console_with_change(signal).await;
    }
}

async fn end_console_with_change(signal: &str) {
    let server = PostgresServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let store = AnyStore::open(&server.url()).await.expect("it runs");
    let keys = Keys::create(&store).await;
    let at = server.address().to_string();
    let url = server.url().replace(&at, &proxy.address().to_string());
    let scratch = Scratch::new();
    let args = ["--audit", "log", "--audit-table", "--timeout", "8s"];
    let mut served = Served::start(scratch.path(), &url, &args);
    let id = keys.orphaned.id.to_hex();
    let found = store.get(&keys.orphaned.id).await.expect("it runs");
    let seen = found.expect("an entry").entry.seen().to_string();
    let body = format!("{{\"seen\":\"{seen}\",\"how\":\"retry\",\"reason\":\"ticket 17\"}}");
    proxy.once(Fault::request("with resolved as"), ConnectionEnd::Hang);
    let mut stream = TcpStream::connect(&served.at).expect("it listens");
    let request = format!(
        "POST /api/v1/entries/{id}/resolve HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        served.at,
        body.len()
    );
    stream.write_all(request.as_bytes()).expect("a connection");
    wait_for_faults(&proxy, 1, &mut served.child);
    drop(stream);
    let pid = served.child.id().to_string();
    let killed = Command::new("kill").args([signal, &pid]).status();
    assert!(killed.expect("kill").success());
    assert!(wait_for_end(&mut served.child).success());
    let log = std::fs::read_to_string(scratch.file("log")).expect("the log");
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines[1].contains("\"outcome\":\"unknown"), "{log}");
    assert_eq!(table_lines(&server.url()).await, lines);
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_table_has_lines_of_console() {
    let scratch = Scratch::new();
    let (postgres, mariadb) = (PostgresServer::start(&[]), MariaDbServer::start(&[]));
    let sqlite = format!("sqlite:{}", scratch.file("keys.db").display());
    for url in [postgres.url(), mariadb.url(), sqlite] {
        let store = crate::open(&url).await.expect("it runs");
        let keys = Keys::create(&store).await;
        let served = Served::start(scratch.path(), &url, &["--audit-table"]);
        // The first line creates the table.
        let empty = served.get("/api/v1/audit", "");
        assert!(empty.ends_with("{\"lines\":[]}"), "{empty}");
        let id = keys.attention.id.to_hex();
        let done = served.resolve(&id, "retry");
        assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
        let lines = table_lines(&url).await;
        let parse = |line: &String| serde_json::from_str::<Value>(line).expect("JSON");
        let lines: Vec<_> = lines.iter().map(parse).collect();
        assert_eq!(lines.len(), 2, "{lines:?}");
        for (line, kind) in lines.iter().zip(["intent", "outcome"]) {
            for (member, expected) in [
                ("line", kind),
                ("actor", "alice"),
                ("source", "api"),
                ("what", "retry"),
                ("why", "ticket 17"),
                ("id", &*id),
            ] {
                assert_eq!(line[member], expected, "{line}");
            }
            assert_eq!(line["before"]["state"], "needs-attention", "{line}");
            assert_eq!(line["before"]["reason"], "refund re_7", "{line}");
        }
        assert_eq!(lines[0]["change"], lines[1]["change"]);
        assert_eq!(lines[1]["outcome"], "applied");
        assert_eq!(lines[1]["after"]["state"], "orphaned");
        // The console reads the table, the last line first.
        let listed = served.get("/api/v1/audit", "");
        let (_, listed) = listed.split_once("\r\n\r\n").expect("a body");
        let listed: Value = serde_json::from_str(listed).expect("JSON");
        assert_eq!(listed, json!({"lines": [lines[1], lines[0]]}));
        for path in [
            "/".to_owned(),
            "/audit".to_owned(),
            format!("/entries/{id}"),
        ] {
            let page = served.get(&path, "");
            assert!(page.starts_with("HTTP/1.1 200 "), "{path}: {page}");
            assert!(page.contains("ticket 17"), "{path}: {page}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn file_and_audit_table_have_same_lines() {
    let scratch = Scratch::new();
    let (url, store, keys) = store(&scratch).await;
    let served = Served::start(scratch.path(), &url, &["--audit", "log", "--audit-table"]);
    let done = served.resolve(&keys.attention.id.to_hex(), "free");
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    let log = std::fs::read_to_string(scratch.file("log")).expect("the log");
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert_eq!(table_lines(&url).await, lines);
    // The table alone is not enough.
    let args = ["--audit", "/dev/full", "--audit-table"];
    let served = Served::start(scratch.path(), &url, &args);
    let refused = served.resolve(&keys.orphaned.id.to_hex(), "free");
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(refused.contains("nothing was changed"), "{refused}");
    assert_eq!(table_lines(&url).await, lines);
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
}

/// Executes statements as the owner of the tables.
async fn execute(url: &str, sql: &'static str) {
    let executed = match url.split(':').next() {
        Some("postgres") => {
            let mut connection = sqlx::PgConnection::connect(url).await.expect("a server");
            sqlx::raw_sql(sql).execute(&mut connection).await.map(drop)
        }
        Some("mysql") => {
            let mut connection = sqlx::MySqlConnection::connect(url).await.expect("a server");
            sqlx::raw_sql(sql).execute(&mut connection).await.map(drop)
        }
        _ => {
            let mut connection = sqlx::SqliteConnection::connect(url).await.expect("a file");
            sqlx::raw_sql(sql).execute(&mut connection).await.map(drop)
        }
    };
    executed.expect("the statements are valid");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_resolved_without_line_in_table() {
    let scratch = Scratch::new();
    let (postgres, mariadb) = (PostgresServer::start(&[]), MariaDbServer::start(&[]));
    let sqlite = format!("sqlite:{}", scratch.file("keys.db").display());
    // The user may read the table, and not insert.
    let rights = "create table tower_idempotency_audit (n int primary key, line text);
        create role operator login;
        grant select, update, delete on tower_idempotency to operator;
        grant select on tower_idempotency_audit to operator";
    let operator = format!("postgres://operator:hush@{}/postgres", postgres.address());
    // A table of another program.
    let shape = "create table tower_idempotency_audit (x int)";
    for (owner, sql, url, status) in [
        (postgres.url(), rights, operator, "200"),
        (mariadb.url(), shape, mariadb.url(), "500"),
        (sqlite.clone(), shape, sqlite, "500"),
    ] {
        let store = crate::open(&owner).await.expect("it runs");
        let keys = Keys::create(&store).await;
        execute(&owner, sql).await;
        let served = Served::start(scratch.path(), &url, &["--audit-table"]);
        let id = keys.orphaned.id.to_hex();
        let refused = served.resolve(&id, "free");
        assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
        let sentence = "{\"error\":\"Cannot write the audit table, so nothing was changed: ";
        assert!(refused.contains(sentence), "{refused}");
        assert!(refused.contains("the database reported "), "{refused}");
        let found = store.get(&keys.orphaned.id).await.expect("it runs");
        assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
        // A table that cannot be read hides no entry.
        let audit = served.get("/audit", "");
        assert!(audit.starts_with(&format!("HTTP/1.1 {status} ")), "{audit}");
        let entry = served.get(&format!("/entries/{id}"), "");
        assert!(entry.starts_with("HTTP/1.1 200 "), "{entry}");
        let note = "Cannot read the audit table: ";
        for page in [&audit, &entry] {
            assert_eq!(page.contains(note), status == "500", "{page}");
        }
        for shown in [refused, audit, entry] {
            let has_password = shown.contains("hush") || shown.contains("app:app");
            assert!(!has_password, "{shown}");
        }
    }
}

/// Another client locks the table. The change ends after its time limit, and the console serves other requests meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_audit_table_holds_only_its_change() {
    let server = PostgresServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("it runs");
    let keys = Keys::create(&store).await;
    let scratch = Scratch::new();
    let args = ["--audit-table", "--timeout", "5s"];
    let served = Arc::new(Served::start(scratch.path(), &server.url(), &args));
    let done = served.resolve(&keys.attention.id.to_hex(), "retry");
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    let locker = sqlx::PgConnection::connect(&server.url()).await;
    let mut locker = locker.expect("a server");
    let lock = sqlx::raw_sql("begin; lock table tower_idempotency_audit");
    lock.execute(&mut locker).await.expect("a lock");
    let id = keys.orphaned.id.to_hex();
    let change = {
        let (served, id) = (Arc::clone(&served), id.clone());
        spawn_blocking(move || served.resolve(&id, "free"))
    };
    let entry = served.get(&format!("/api/v1/entries/{id}"), "");
    assert!(entry.starts_with("HTTP/1.1 200 "), "{entry}");
    let page = served.get(&format!("/entries/{id}"), "");
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    assert!(page.contains("Cannot read the audit table: "), "{page}");
    let refused = change.await.expect("a response");
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    let reason = "so nothing was changed: the store did not reply within 5s";
    assert!(refused.contains(reason), "{refused}");
    let found = store.get(&keys.orphaned.id).await.expect("it runs");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_table_needs_sql_store() {
    let scratch = Scratch::new();
    let redis = RedisServer::start(&[]);
    let serve = ["serve", "--listen", "127.0.0.1:0"];
    let ran = run_in(
        scratch.path(),
        &redis.url(),
        &[&serve[..], &["--audit-table"]].concat(),
    );
    assert_eq!(ran.code, 2, "{ran:?}");
    let expected = "expected --audit FILE: the redis store has no audit table";
    assert!(ran.err.contains(expected), "{ran:?}");
    // The parser counts a variable as an option, whatever its value.
    let (url, _, _) = store(&scratch).await;
    let mut tool = command(scratch.path(), &url);
    tool.args(serve).env("IDEMPOTENCY_AUDIT_TABLE", "false");
    let ran = tool.output().expect("the tool runs");
    let error = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(2), "{error}");
    assert!(error.contains("--audit-table"), "{error}");
}
