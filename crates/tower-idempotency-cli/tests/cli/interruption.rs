//! Changes that a signal ends while the store holds a call: the audit log has an outcome.

use std::{
    fs::{self, File},
    io::Read as _,
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::{
    HANG_GUARD,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    servers::{postgres::PostgresServer, redis::RedisServer},
};
use tower_idempotency::inspect::{Inspect as _, State};

use crate::{command, scenario::Keys, wait_for_end, wait_for_faults};

/// Starts a change through a proxy that holds a call, and sends the signal when the store has it. Returns the exit code, the
/// errors and the audit log.
fn interrupt(
    url: &str,
    server: SocketAddr,
    fault: Fault,
    args: &[&str],
    signal: &str,
) -> (i32, String, String) {
    let proxy = Proxy::start(server);
    let url = url.replace(&server.to_string(), &proxy.address().to_string());
    let scratch = Scratch::new();
    proxy.once(fault, ConnectionEnd::Hang);
    let mut tool = command(scratch.path(), &url);
    tool.args(args);
    tool.args(["--reason", "x", "--audit", "log", "--yes"]);
    let tool = tool.stdin(Stdio::null()).stderr(Stdio::piped());
    let mut tool = tool.spawn().expect("the tool starts");
    wait_for_faults(&proxy, 1, &mut tool);
    let mut errors = String::new();
    let code = end(&mut tool, signal);
    let stderr = tool.stderr.as_mut().expect("a pipe");
    stderr.read_to_string(&mut errors).expect("text");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    (code, errors, log)
}

/// Sends the signal, and returns the exit code. The code is -1 if the signal itself ended the process.
pub(crate) fn end(tool: &mut Child, signal: &str) -> i32 {
    send(tool, signal);
    wait_for_end(tool).code().unwrap_or(-1)
}

fn send(tool: &Child, signal: &str) {
    let pid = tool.id().to_string();
    let sent = Command::new("kill").args([signal, &pid]).status();
    assert!(sent.expect("kill").success());
}

/// Waits until the process has opened the file.
fn wait_for_open_file(process: &mut Child, path: &Path) {
    let path = path.canonicalize().expect("a file");
    let files = format!("/proc/{}/fd", process.id());
    let began = Instant::now();
    loop {
        let mut open = fs::read_dir(&files).into_iter().flatten().flatten();
        if open.any(|it| fs::read_link(it.path()).is_ok_and(|it| it == path)) {
            return;
        }
        let ended = process.try_wait().expect("a child");
        assert!(ended.is_none(), "the tool opens no log: {ended:?}");
        assert!(began.elapsed() < HANG_GUARD, "the tool opens no log");
        thread::sleep(Duration::from_millis(1));
    }
}

fn check_log(log: &str, errors: &str, outcome: &str) {
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log} {errors}");
    assert!(lines[0].contains("\"line\":\"intent\""), "{log}");
    let outcome = format!("\"outcome\":\"unknown: {outcome}");
    assert!(lines[1].contains(&outcome), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_change_has_outcome() {
    let server = PostgresServer::start(&[]);
    let url = server.url();
    let store = crate::open(&url).await.expect("the server runs");
    Keys::create(&store).await;
    let resolve = &["resolve", "bbbbbbbb", "retry"][..];
    for (args, statement) in [
        (resolve, "with resolved as"),
        (&["purge"], "any (array(select over.id"),
    ] {
        for (signal, name, expected) in [
            ("-HUP", "SIGHUP", 129),
            ("-INT", "SIGINT", 130),
            ("-TERM", "SIGTERM", 143),
        ] {
            for fault in [Fault::request(statement), Fault::reply_to(statement)] {
                let at = server.address();
                let (code, errors, log) = interrupt(&url, at, fault, args, signal);
                assert_eq!(code, expected, "{args:?} {errors} {log}");
                assert!(
                    errors.contains(&format!("interrupted by {name}")),
                    "{errors}"
                );
                check_log(&log, &errors, &format!("interrupted by {name}"));
            }
        }
    }
}

/// The signal arrives while the tool waits for the lock of the log, so the store gets no call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signal_before_call_has_failed_outcome() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    let path = scratch.file("log");
    for (args, clause) in [
        (
            &["resolve", "bbbbbbbb", "free"][..],
            "; nothing was changed",
        ),
        (&["purge"], ""),
    ] {
        let log = File::create(&path).expect("a file");
        log.lock().expect("no other process holds it");
        let mut tool = command(scratch.path(), &url);
        tool.args(args);
        tool.args(["--reason", "x", "--audit", "log", "--yes"]);
        let tool = tool.stdin(Stdio::null()).stderr(Stdio::piped());
        let mut tool = tool.spawn().expect("the tool starts");
        wait_for_open_file(&mut tool, &path);
        send(&tool, "-INT");
        // The tool receives the signal before it gets the lock, for which it waits up to five seconds.
        thread::sleep(Duration::from_secs(1));
        log.unlock().expect("it is held");
        assert_eq!(wait_for_end(&mut tool).code(), Some(130), "{args:?}");
        let mut errors = String::new();
        let stderr = tool.stderr.as_mut().expect("a pipe");
        stderr.read_to_string(&mut errors).expect("text");
        let expected = format!("interrupted by SIGINT{clause}");
        assert!(errors.trim_end().ends_with(&expected), "{errors}");
        let log = fs::read_to_string(&path).expect("the log");
        assert_eq!(log.lines().count(), 2, "{log}");
        let outcome = "\"outcome\":\"failed: interrupted by SIGINT\"";
        assert!(log.contains(outcome), "{log}");
    }
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_repair_has_outcome_and_counts() {
    let server = RedisServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    Keys::create(&store).await;
    let (args, scan) = (&["check", "--repair"], Fault::request("\r\nSCAN\r\n"));
    let (code, errors, log) = interrupt(&server.url(), server.address(), scan, args, "-INT");
    assert_eq!(code, 130, "{errors} {log}");
    check_log(&log, &errors, "interrupted by SIGINT");
    assert!(log.contains("\"after\":{\"added\":0"), "{log}");
}

/// The database deletes the batch, and its reply is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_purge_has_unknown_outcome() {
    let server = PostgresServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let url = server.url();
    crate::open(&url).await.expect("the server runs");
    let url = url.replace(&server.address().to_string(), &proxy.address().to_string());
    let scratch = Scratch::new();
    proxy.once(
        Fault::reply_to("any (array(select over.id"),
        ConnectionEnd::Hang,
    );
    let args = [
        "purge",
        "--reason",
        "x",
        "--audit",
        "log",
        "--yes",
        "--timeout",
        "5s",
    ];
    let ran = crate::run_in(scratch.path(), &url, &args);
    assert_eq!((proxy.injected_faults(), ran.code), (1, 1), "{ran:?}");
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    check_log(&log, &ran.err, "");
}

/// The exit code shows that no entry is left, so `watch` continues without a reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_without_reader_waits() {
    let server = PostgresServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    Keys::create(&store).await;
    let proxy = Proxy::start(server.address());
    let at = server.address().to_string();
    let url = server.url().replace(&at, &proxy.address().to_string());
    // A part of the last statement of each count. The tool prints the first count, and the second one hangs.
    let needle = b"(select not coalesce(".to_vec();
    proxy.once(Fault::Request { needle, nth: 2 }, ConnectionEnd::Hang);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let scratch = Scratch::new();
    let mut tool = command(scratch.path(), &url);
    tool.args(["watch", "--interval", "100ms"]);
    tool.args(["--exit-when-empty", "orphaned"]);
    let tool = tool.stdin(Stdio::null()).stdout(writer);
    let mut tool = tool.spawn().expect("the tool starts");
    wait_for_faults(&proxy, 1, &mut tool);
    assert_eq!(end(&mut tool, "-INT"), 130);
}

/// `watch` did not reach its end, so a script must not continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_watch_has_own_exit_code() {
    let server = PostgresServer::start(&[]);
    crate::open(&server.url()).await.expect("the server runs");
    let proxy = Proxy::start(server.address());
    let at = server.address().to_string();
    let url = server.url().replace(&at, &proxy.address().to_string());
    let scratch = Scratch::new();
    // Between two counts, and during a call of the store.
    for fault in [None, Some(Fault::request("select count(case"))] {
        let is_call = fault.is_some();
        let faults = proxy.injected_faults();
        if let Some(fault) = fault {
            proxy.once(fault, ConnectionEnd::Hang);
        }
        let mut tool = command(scratch.path(), &url);
        let tool = tool
            .args(["watch", "--interval", "1h"])
            .stdin(Stdio::null());
        let mut tool = tool
            .stdout(Stdio::piped())
            .spawn()
            .expect("the tool starts");
        if is_call {
            wait_for_faults(&proxy, faults + 1, &mut tool);
        } else {
            let mut first = [0];
            let out = tool.stdout.as_mut().expect("a pipe");
            out.read_exact(&mut first).expect("a line");
        }
        assert_eq!(end(&mut tool, "-INT"), 130, "{is_call}");
    }
}
