//! The console on the admin port.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    HANG_GUARD,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    servers::postgres::PostgresServer,
};

use crate::harness::{Process, Reply, Upstream, command, config, exchange, get, post};

/// The name `bob` and the token, in Base64.
const BOB: &str = "authorization: Basic Ym9iOjAxMjM0NTY3ODlhYmNkZWY=\r\n";
const TOKEN: &str = "0123456789abcdef";

/// Sends a request to the console. The lines of `headers` contain the host, or it is the address.
fn send(admin: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Reply {
    let host = if headers.contains("host: ") {
        String::new()
    } else {
        format!("host: {admin}\r\n")
    };
    let length = body.len();
    exchange(
        admin,
        &format!(
            "{method} /console{path} HTTP/1.1\r\n{host}{headers}connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        ),
    )
}

/// Returns the configuration with these lines in `[admin]`.
fn with_console(store: &str, upstream: SocketAddr, lines: &str) -> String {
    config(store, upstream, "").replacen("[store]", &format!("{lines}\n[store]"), 1)
}

/// Creates an entry that needs attention. Returns its ID and the state that a decision has seen.
fn entry(proxy: &Process, headers: &str) -> (String, String) {
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 502);
    let list = "/api/v1/entries?state=needs-attention";
    let reply = send(proxy.admin, "GET", list, headers, "");
    assert_eq!(reply.status(), 200, "{reply:?}");
    let list: Value = serde_json::from_str(reply.body()).unwrap();
    let entry = &list["entries"][0];
    let member = |name: &str| entry[name].as_str().unwrap().to_owned();
    (member("id"), member("seen"))
}

fn resolve(admin: SocketAddr, (id, seen): &(String, String), how: &str, headers: &str) -> Reply {
    let path = format!("/api/v1/entries/{id}/resolve");
    let body = format!("{{\"seen\":\"{seen}\",\"how\":\"{how}\",\"reason\":\"ticket 17\"}}");
    let headers = format!("content-type: application/json\r\n{headers}");
    send(admin, "POST", &path, &headers, &body)
}

#[test]
fn console_is_off_by_default() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let proxy = Process::start(&file);
    let reply = send(proxy.admin, "GET", "/", "", "");
    assert_eq!(reply.status(), 404, "{reply:?}");
}

/// On loopback, reading needs no token. Another name may be that of a site in a browser.
#[test]
fn read_only_console_resolves_nothing() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| false);
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    let log = scratch.file("audit");
    let lines = format!(
        "console = \"read-only\"\naudit_file = \"{}\"",
        log.display()
    );
    fs::write(&file, with_console(&store, upstream.address, &lines)).unwrap();
    let proxy = Process::start(&file);
    let admin = proxy.admin;
    let entry = entry(&proxy, "");
    for path in ["", "/", "/entries?state=needs-attention", "/metrics"] {
        let reply = send(admin, "GET", path, "", "");
        assert_eq!(reply.status(), 200, "{path}: {reply:?}");
        let reply = send(admin, "GET", path, "host: evil.test:9090\r\n", "");
        assert_eq!(reply.status(), 421, "{path}: {reply:?}");
    }
    let found = send(admin, "GET", "/find", "", "");
    assert!(found.0.contains("By the key of a client"), "{found:?}");
    assert_eq!(resolve(admin, &entry, "free", "").status(), 403);
    assert_eq!(resolve(admin, &entry, "free", BOB).status(), 403);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 409);
    assert!(!log.exists());
    // The other pages need no host.
    assert_eq!(get(admin, "/readyz").status(), 200);
}

#[test]
fn resolving_needs_token_and_is_audited() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let (token, log) = (scratch.file("token"), scratch.file("audit"));
    fs::write(&token, format!("{TOKEN}\n")).unwrap();
    let upstream = Upstream::start(|effect| effect > 1);
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    let lines = format!(
        "console = \"resolve\"\ntoken_file = \"{}\"\naudit_file = \"{}\"\naudit_table = true",
        token.display(),
        log.display()
    );
    fs::write(&file, with_console(&store, upstream.address, &lines)).unwrap();
    let proxy = Process::start(&file);
    let admin = proxy.admin;
    let entry = entry(&proxy, BOB);
    for headers in ["", "authorization: Bearer 0123456789abcdee\r\n"] {
        for path in ["/", "/entries", "/api/v1/summary", "/metrics", "/events"] {
            let reply = send(admin, "GET", path, headers, "");
            assert_eq!(reply.status(), 401, "{path}: {reply:?}");
        }
        assert_eq!(resolve(admin, &entry, "free", headers).status(), 401);
    }
    // The browser of the operator shows a page of another site.
    let other = format!("{BOB}origin: http://evil.test\r\nsec-fetch-site: cross-site\r\n");
    assert_eq!(resolve(admin, &entry, "free", &other).status(), 403);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 409);
    // The proxy creates the file when it starts.
    assert_eq!(fs::read_to_string(&log).unwrap(), "");
    let reply = resolve(admin, &entry, "free", BOB);
    assert_eq!(reply.status(), 200, "{reply:?}");
    let lines = fs::read_to_string(&log).unwrap();
    assert_eq!(lines.lines().count(), 2, "{lines}");
    assert!(
        lines.contains("\"actor\":\"bob\"") && lines.contains("\"outcome\":\"applied\""),
        "{lines}"
    );
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    assert_eq!(upstream.effects(), 2);
    for shown in [
        get(admin, "/policy").0,
        get(admin, "/metrics").0,
        proxy.log(),
    ] {
        assert!(!shown.contains(TOKEN), "{shown}");
    }
}

#[test]
fn console_without_audit_table_is_rejected() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let address = "127.0.0.1:1".parse().unwrap();
    let lines = "console = \"read-only\"\naudit_table = true";
    fs::write(&file, with_console("memory", address, lines)).unwrap();
    let output = command(&file).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("cannot serve the console: the memory store has no audit table"),
        "{stderr}"
    );
}

/// The operator detects this at the start, and not at the first decision.
#[test]
fn unusable_audit_file_is_rejected() {
    let scratch = Scratch::new();
    let (file, token) = (scratch.file("proxy.toml"), scratch.file("token"));
    fs::write(&token, TOKEN).unwrap();
    let address = "127.0.0.1:1".parse().unwrap();
    let lines = format!(
        "console = \"resolve\"\ntoken_file = \"{}\"\naudit_file = \"/no/such/directory/log\"",
        token.display()
    );
    fs::write(&file, with_console("memory", address, &lines)).unwrap();
    let mut proxy = command(&file);
    proxy.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut proxy = proxy.spawn().unwrap();
    let mut printed = String::new();
    let stdout = proxy.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut printed).unwrap();
    if !printed.is_empty() {
        proxy.kill().unwrap();
    }
    let output = proxy.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(printed, "", "{stderr}");
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let expected = "cannot serve the console: cannot write the audit log /no/such/directory/log: ";
    assert!(stderr.contains(expected), "{stderr}");
}

/// The proxy would cut a stream that does not end itself.
#[test]
fn live_view_ends_with_proxy() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    let text = with_console("memory", upstream.address, "console = \"read-only\"");
    fs::write(&file, text).unwrap();
    let proxy = Process::start(&file);
    let mut browser = TcpStream::connect(proxy.admin).unwrap();
    browser.set_read_timeout(Some(HANG_GUARD)).unwrap();
    let request = format!(
        "GET /console/events HTTP/1.1\r\nhost: {}\r\n\r\n",
        proxy.admin
    );
    browser.write_all(request.as_bytes()).unwrap();
    let mut stream = vec![0; 12];
    browser.read_exact(&mut stream).unwrap();
    assert_eq!(stream, b"HTTP/1.1 200");
    proxy.signal("-TERM");
    browser.read_to_end(&mut stream).unwrap();
    let stream = String::from_utf8_lossy(&stream);
    assert!(stream.ends_with("\r\n0\r\n\r\n"), "{stream}");
    assert!(proxy.wait().success());
}

/// The browser disconnects while the store holds its change, and the process gets SIGTERM.
#[test]
fn change_ends_before_proxy() {
    let server = PostgresServer::start(&[]);
    let faults = Proxy::start(server.address());
    let at = server.address().to_string();
    let store = server.url().replace(&at, &faults.address().to_string());
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let (token, log) = (scratch.file("token"), scratch.file("audit"));
    fs::write(&token, TOKEN).unwrap();
    let upstream = Upstream::start(|_| false);
    let lines = format!(
        "console = \"resolve\"\ntoken_file = \"{}\"\naudit_file = \"{}\"",
        token.display(),
        log.display()
    );
    fs::write(&file, with_console(&store, upstream.address, &lines)).unwrap();
    let proxy = Process::start(&file);
    let (id, seen) = entry(&proxy, BOB);
    faults.once(Fault::request("with resolved as"), ConnectionEnd::Hang);
    let body = format!("{{\"seen\":\"{seen}\",\"how\":\"retry\",\"reason\":\"ticket 17\"}}");
    let request = format!(
        "POST /console/api/v1/entries/{id}/resolve HTTP/1.1\r\nhost: {}\r\n{BOB}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        proxy.admin,
        body.len()
    );
    let mut browser = TcpStream::connect(proxy.admin).unwrap();
    browser.write_all(request.as_bytes()).unwrap();
    let began = Instant::now();
    while faults.injected_faults() < 1 {
        assert!(began.elapsed() < HANG_GUARD, "{}", proxy.log());
        thread::sleep(Duration::from_millis(1));
    }
    drop(browser);
    proxy.signal("-TERM");
    assert!(proxy.wait().success());
    let lines = fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = lines.lines().collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[1].contains("\"outcome\":\"unknown"), "{lines:?}");
}
