//! Sockets of systemd.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
};

use tests::{environment::remove_settings, scratch::Scratch};

use crate::harness::{Process, Upstream, command, config, get, post};

/// Replaces this process by the program, with sockets as systemd hands them over: from descriptor 3 on. The first argument has
/// their names. A socket `unix` is no socket of TCP.
const HAND_OVER: &str = r#"
import fcntl, os, socket, sys
names = sys.argv[1].split(":")
sockets = []
for name in names:
    if name == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("socket")
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    sockets.append(fcntl.fcntl(listener, fcntl.F_DUPFD, 100))
for number, descriptor in enumerate(sockets):
    os.dup2(descriptor, 3 + number)
    os.close(descriptor)
os.environ["LISTEN_PID"] = str(os.getpid())
os.environ["LISTEN_FDS"] = str(len(names))
os.environ["LISTEN_FDNAMES"] = sys.argv[1].replace("unix", "listen")
os.execv(sys.argv[2], sys.argv[2:])
"#;

/// Returns the command of the proxy with sockets of these names.
fn with_sockets(config: &Path, names: &str) -> Command {
    let program = command(config);
    let mut python = Command::new("python3");
    remove_settings(&mut python)
        .args(["-c", HAND_OVER, names])
        .arg(program.get_program())
        .args(program.get_args())
        .current_dir(config.parent().unwrap());
    python
}

/// Returns a configuration with addresses to which no socket can be bound.
fn without_addresses(upstream: SocketAddr) -> String {
    config("memory", upstream, "")
        .replacen("127.0.0.1:0", "192.0.2.1:1", 1)
        .replacen("\"127.0.0.1:0\"", "\"192.0.2.1:2\"", 1)
}

#[test]
fn sockets_of_systemd_replace_addresses() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, without_addresses(upstream.address)).unwrap();
    // The name of `listen` is that of its unit by default.
    for names in ["idempotency-proxy.socket:admin", "admin:listen"] {
        let mut proxy = Process::spawn(with_sockets(&file, names), &file);
        assert_eq!(get(proxy.admin, "/healthz").status(), 200);
        let key = names.len().to_string();
        assert_eq!(post(proxy.address, "/pay", &key, "1").status(), 201);
        // The addresses of the file have not changed.
        proxy.signal("-HUP");
        proxy.wait_for_log("configuration reloaded");
        proxy.signal("-TERM");
        assert!(proxy.wait().success());
        fs::remove_file(file.with_extension("log")).unwrap();
    }
    let output = command(&file).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("cannot listen on 192.0.2.1:1"), "{stderr}");
}

#[test]
fn sockets_of_another_process_are_ignored() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let mut command = command(&file);
    command
        .env("LISTEN_PID", "1")
        .env("LISTEN_FDS", "1")
        .stdin(Stdio::null());
    let proxy = Process::spawn(command, &file);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
}

#[test]
fn unusable_sockets_are_rejected() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let text = without_addresses("127.0.0.1:1".parse().unwrap());
    let without_admin = text.replacen("[admin]\naddress = \"192.0.2.1:2\"\n", "", 1);
    for (text, names, expected) in [
        (
            &text,
            "listen:unknown",
            "expected one socket of systemd for [listen], found two",
        ),
        (
            &text,
            "admin:admin",
            "expected one socket of systemd for [admin], found two",
        ),
        (&text, "unix", "cannot use a socket of systemd"),
        // systemd names a connection so, with Accept=yes.
        (&text, "connection", "has the name \"connection\""),
        (&text, "Admin", "has the name \"Admin\""),
        (
            &without_admin,
            "listen:admin",
            "expected the section [admin]",
        ),
    ] {
        fs::write(&file, text).unwrap();
        let output = with_sockets(&file, names).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{names}: {stderr}");
        assert!(stderr.contains(expected), "{names}: {stderr}");
    }
}
