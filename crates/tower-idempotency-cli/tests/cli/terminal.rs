//! The tool on a terminal: progress, tables that fit, colours, and the question before a change.

use std::{
    fs,
    io::Write as _,
    net::TcpListener,
    process::{Command, Stdio},
};

use tests::{environment::remove_settings, scratch::Scratch, servers::redis::RedisServer};
use tower_idempotency::inspect::{Inspect, State};

use crate::{run, scenario::Keys};

/// Runs a command with a terminal of this width as its input, its output and its errors. Prints what the terminal shows.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(sys.argv[1]), 0, 0))
    os.execvp(sys.argv[3], sys.argv[3:])
os.write(terminal, sys.argv[2].encode())
while True:
    try:
        shown = os.read(terminal, 65536)
    except OSError:
        break
    if not shown:
        break
    sys.stdout.buffer.write(shown)
sys.stdout.flush()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

/// Runs the tool on a terminal. Returns its exit code, and what the terminal shows.
pub(crate) fn on_terminal(
    columns: usize,
    typed: &str,
    variables: &[(&str, &str)],
    line: &str,
) -> (i32, String) {
    let tool = env!("CARGO_BIN_EXE_idempotency");
    let line = line.replace("idempotency ", &format!("{tool} "));
    let mut command = Command::new("python3");
    command.args([
        "-c",
        TERMINAL,
        &columns.to_string(),
        typed,
        "bash",
        "-c",
        &line,
    ]);
    remove_settings(&mut command)
        .env("TERM", "xterm")
        .env("USER", "alice");
    command.env("IDEMPOTENCY_TIMEOUT", "120s");
    command.envs(variables.iter().copied()).stdin(Stdio::null());
    let output = command.output().expect("Python");
    std::io::stderr().write_all(&output.stderr).ok();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code().expect("an exit code"), shown)
}

/// Returns the text without the sequences that colour it.
fn plain(shown: &str) -> String {
    let mut plain = String::new();
    let mut parts = shown.split("\x1b[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        plain.push_str(part.split_once('m').map_or(part, |(_, rest)| rest));
    }
    plain
}

async fn store() -> (Scratch, String, Keys) {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    (scratch, url, keys)
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_fit_terminal() {
    let (scratch, url, _) = store().await;
    let store = crate::open(&url).await.expect("a file");
    let mut claim = tests::sql::claim();
    // A letter of this operation takes two columns.
    claim.operation = format!("POST /{}/{}", "long".repeat(60), "\u{8a9e}".repeat(60)).into();
    claim.lease = tower_idempotency::Ttl::from_secs(600);
    tower_idempotency::Store::acquire(&store, &claim)
        .await
        .expect("a file");
    let url = &[("IDEMPOTENCY_STORE", url.as_str())];
    for columns in [80, 100, 200] {
        let (code, shown) = on_terminal(columns, "", url, "idempotency list in-progress");
        assert_eq!(code, 0, "{shown}");
        let shown = plain(&shown);
        assert_eq!(shown.lines().count(), 3, "{shown}");
        for line in shown.lines() {
            assert!(
                console::measure_text_width(line) <= columns,
                "{columns}: {line}"
            );
        }
        assert!(shown.contains('\u{2026}'), "{shown}");
    }
    // Another program gets whole cells.
    let whole = run(url[0].1, &["list", "in-progress"]);
    assert!(whole.out.contains(&"long".repeat(60)) && !whole.out.contains('\u{2026}'));
    drop(scratch);
}

#[tokio::test(flavor = "multi_thread")]
async fn colours_obey_no_color() {
    let (_scratch, url, _) = store().await;
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let list = "idempotency list orphaned";
    for (variables, line, has_colour) in [
        (&[store][..], list, true),
        (&[store, ("NO_COLOR", "")], list, true),
        (&[store, ("NO_COLOR", "1")], list, false),
        (&[store], "idempotency list orphaned --no-color", false),
        (&[store], "idempotency list orphaned | cat", false),
    ] {
        let (code, shown) = on_terminal(100, "", variables, line);
        assert_eq!(code, 0, "{shown}");
        assert!(shown.contains("bbbbbbbb"), "{shown}");
        assert_eq!(
            shown.contains("\x1b["),
            has_colour,
            "{variables:?} {line}: {shown:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn change_asks_on_terminal() {
    let (scratch, url, keys) = store().await;
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let log = scratch.file("log");
    let line = format!(
        "idempotency resolve bbbbbbbb free --reason x --audit {}",
        log.display()
    );
    let any = crate::open(&url).await.expect("a file");
    for (typed, code) in [("no\n", 2), ("\n", 2), ("yes\n", 0)] {
        let found = any.get(&keys.orphaned.id).await.expect("a file");
        assert_eq!(found.map(|it| it.entry.state()), Some(State::Orphaned));
        assert!(!log.exists());
        let (ended, shown) = on_terminal(100, typed, &[store], &line);
        assert_eq!(ended, code, "{shown}");
        assert!(shown.contains("would happen twice"), "{shown}");
        assert!(shown.contains("Type yes to continue"), "{shown}");
    }
    assert!(any.get(&keys.orphaned.id).await.expect("a file").is_none());
    let log = scratch.file("purges");
    let line = format!("idempotency purge --reason x --audit {}", log.display());
    for (typed, code) in [("no\n", 2), ("yes\n", 0)] {
        assert!(!log.exists());
        let (ended, shown) = on_terminal(100, typed, &[store], &line);
        assert_eq!(ended, code, "{shown}");
        assert!(shown.contains("at most 100000 expired"), "{shown}");
    }
    assert!(log.exists());
}

/// The line of a long command is shown on a terminal, and nowhere else.
#[tokio::test(flavor = "multi_thread")]
async fn progress_needs_terminal() {
    let (scratch, url, _) = store().await;
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let file = scratch.file("out").display().to_string();
    let change = format!("--reason x --audit {file}.log --yes");
    let export = format!("idempotency export > {file}");
    for line in [&export, &format!("idempotency purge {change}")] {
        let (code, shown) = on_terminal(100, "", &[store], line);
        assert_eq!(code, 0, "{shown}");
        assert!(shown.contains("entries "), "{shown:?}");
        let (code, shown) = on_terminal(100, "", &[store], &format!("{line} 2> {file}.err"));
        assert_eq!(code, 0, "{shown}");
        let errors = std::fs::read_to_string(format!("{file}.err")).expect("a file");
        assert_eq!(errors, "", "{line}");
    }
    // On one terminal, lines of the output and a progress line would mix.
    let (code, shown) = on_terminal(100, "", &[store], "idempotency export");
    assert_eq!(code, 0, "{shown}");
    assert_eq!(shown.lines().count(), 4, "{shown:?}");
    assert!(!shown.contains("exported"), "{shown:?}");
}

/// The server examines all keys, and the command learns only the number of those with the prefix.
#[tokio::test(flavor = "multi_thread")]
async fn repair_progress_has_no_total() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let store = crate::open(&url).await.expect("the server runs");
    Keys::create(&store).await;
    for n in 0..20 {
        server.command(&["SET", &format!("of another program {n}"), "x"]);
    }
    let scratch = Scratch::new();
    let log = scratch.file("log").display().to_string();
    let line = format!("idempotency check --repair --reason x --audit {log} --yes");
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let (code, shown) = on_terminal(100, "", &[store], &line);
    assert_eq!(code, 0, "{shown}");
    let is_progress = |line: &&str| line.contains("keys with the prefix (");
    let progress = shown.split(['\r', '\n']).find(is_progress);
    let progress = progress.unwrap_or_else(|| panic!("no progress: {shown:?}"));
    assert!(!progress.contains('/'), "{progress:?}");
}

/// A client has chosen the bytes of an operation and of a response.
#[tokio::test(flavor = "multi_thread")]
async fn terminal_gets_no_bytes_of_client() {
    let (scratch, url, _) = store().await;
    let store = crate::open(&url).await.expect("a file");
    let mut claim = tests::sql::claim();
    claim.operation = "POST /x\u{9b}2J\u{202e}\u{61c}".into();
    claim.lease = tower_idempotency::Ttl::from_secs(600);
    tower_idempotency::Store::acquire(&store, &claim)
        .await
        .expect("a file");
    let id = claim.id.to_hex();
    let broken = [
        "resolve",
        &id,
        "break-lease",
        "--force",
        "--reason",
        "x\u{9b}",
    ];
    let log = scratch.file("log").display().to_string();
    let listed = run(&url, &["list", "in-progress", "--json"]).out;
    let exported = run(&url, &["export"]).out;
    let broke = run(&url, &[&broken[..], &["--audit", &log, "--yes"]].concat());
    assert_eq!(broke.code, 0, "{broke:?}");
    let log = std::fs::read_to_string(&log).expect("the log");
    for text in [&listed, &exported, &log] {
        assert!(text.contains(r"POST /x\u009b2J\u202e\u061c"), "{text}");
        assert!(!text.contains(['\u{9b}', '\u{202e}', '\u{61c}']), "{text}");
    }
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let show = "idempotency show dddddddd --record -";
    let (code, shown) = on_terminal(100, "", &[store], show);
    assert_eq!(code, 2, "{shown:?}");
    assert!(shown.contains("found a terminal"), "{shown:?}");
    let (code, shown) = on_terminal(100, "", &[store], &format!("{show} | wc -c"));
    assert_eq!((code, shown.trim()), (0, "6"));
}

/// The log of the processes that serve has no colours, and no error about them.
#[tokio::test(flavor = "multi_thread")]
async fn log_on_terminal_is_plain() {
    let (scratch, url, _) = store().await;
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("an address");
    let config = scratch.file("proxy.toml");
    let text = format!(
        "[listen]\naddress = \"{address}\"\n[store]\nurl = \"memory\"\n[upstream.app]\nurl = \"http://{address}\"\n\
         [[route]]\npath = \"/**\"\nupstream = \"app\"\n"
    );
    fs::write(&config, text).expect("a file");
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let proxy = format!("idempotency proxy --config {}", config.display());
    let serve = format!("idempotency serve --read-only --listen {address}");
    for (variables, line) in [(&[store][..], &serve), (&[], &proxy)] {
        let (code, shown) = on_terminal(200, "", variables, line);
        assert_eq!(code, 1, "{shown}");
        assert!(shown.contains("Address already in use"), "{shown:?}");
        assert!(
            !shown.contains("ansi") && !shown.contains('\x1b'),
            "{shown:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn question_shows_state_that_is_decided() {
    let (scratch, url, _) = store().await;
    let store = ("IDEMPOTENCY_STORE", url.as_str());
    let log = scratch.file("log");
    let line = format!(
        "idempotency resolve cccccccc needs-attention --reason x --audit {}",
        log.display()
    );
    let (code, shown) = on_terminal(200, "no\n", &[store], &line);
    assert_eq!(code, 2, "{shown}");
    for part in [
        "has been needs-attention for ",
        "generation 1",
        "Its code is refund-failed, and its reason: refund re_7",
        "Your reason is added",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}
