//! The limit of file descriptors.

use std::{fs, net::TcpStream, path::Path, process::Command};

use tests::{environment::remove_settings, scratch::Scratch};

use crate::harness::{Process, Upstream, command, config, get, post};

const SOFT: usize = 256;
const HARD: usize = 1024;
const WARNING: &str = "limit of file descriptors is too low for max_connections";

/// Starts the proxy with these lines in `[listen]`, under limits that the shell sets.
fn start(file: &Path, upstream: &Upstream, lines: &str) -> Process {
    let text = config("memory", upstream.address, "");
    fs::write(
        file,
        text.replacen("[admin]", &format!("{lines}\n[admin]"), 1),
    )
    .unwrap();
    let proxy = command(file);
    let mut shell = Command::new("sh");
    let script = format!("ulimit -S -n {SOFT} && ulimit -H -n {HARD} && exec \"$0\" \"$@\"");
    shell.arg("-c").arg(script);
    shell.arg(proxy.get_program()).args(proxy.get_args());
    remove_settings(&mut shell);
    Process::spawn(shell, file)
}

/// Returns the soft and the hard limit of a process.
fn limits(pid: u32) -> (usize, usize) {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let mut numbers = line.unwrap().split_whitespace();
    let mut next = || numbers.next().unwrap().parse().unwrap();
    (next(), next())
}

/// Idle connections of a client, more than the soft limit, keep no other client out.
#[test]
fn limit_of_descriptors_is_raised() {
    let scratch = Scratch::new();
    let upstream = Upstream::start(|_| true);
    // Without it, the proxy would close the idle connections after 30 s.
    let lines = "idle_timeout = \"1h\"";
    let proxy = start(&scratch.file("proxy.toml"), &upstream, lines);
    assert_eq!(limits(proxy.pid()), (HARD, HARD));
    let idle: Vec<_> = (0..SOFT + 100)
        .map(|_| TcpStream::connect(proxy.address).unwrap())
        .collect();
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    assert_eq!(get(proxy.admin, "/healthz").status(), 200);
    drop(idle);
}

#[test]
fn low_limit_of_descriptors_is_logged() {
    let scratch = Scratch::new();
    let upstream = Upstream::start(|_| true);
    let proxy = start(&scratch.file("low.toml"), &upstream, "");
    let warning = format!("{WARNING} limit={HARD} needed=21000");
    assert!(proxy.log().contains(&warning), "{}", proxy.log());
    let enough = start(
        &scratch.file("enough.toml"),
        &upstream,
        "max_connections = 12",
    );
    assert!(!enough.log().contains(WARNING), "{}", enough.log());
}
