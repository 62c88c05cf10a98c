//! The throwaway servers that the tests of the network stores stand on.

use std::{
    env, fs, io,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::servers::redis::{self, RedisServer};

// ---- The guard ----

/// Not a test of its own: what the next one kills.
#[test]
fn holder_of_a_server() {
    if env::var_os("HOLD_A_SERVER").is_none() {
        return;
    }
    let server = RedisServer::start(&[]);
    println!("holding {}", server.pid());
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_server_ends_with_the_process_that_started_it_even_if_that_is_killed() {
    let mut holder = Command::new(env::current_exe().unwrap())
        .args(["--exact", "holder_of_a_server", "--nocapture"])
        .env("HOLD_A_SERVER", "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = io::BufReader::new(holder.stdout.take().unwrap());
    let pid = io::BufRead::lines(stdout)
        .map_while(Result::ok)
        // The harness may begin the line with the name of the test.
        .find_map(|line| line.split_once("holding ")?.1.parse::<u32>().ok())
        .expect("the process holds a server");
    let directory = env::temp_dir().join(format!("tower-idempotency-redis-{}-0", holder.id()));
    assert!(is_running(pid) && directory.is_dir());
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the server has ended", || !is_running(pid));
    eventually("its directory is gone", || !directory.exists());
}

#[test]
fn a_dropped_server_is_gone_at_once_with_its_files_even_if_it_was_paused() {
    let server = RedisServer::start(&["--appendonly", "yes"]);
    let pid = server.pid();
    let directory = server.command(&["CONFIG", "GET", "dir"]);
    let directory = directory.lines().nth(1).unwrap();
    assert!(Path::new(directory).is_dir());
    server.pause();
    drop(server);
    assert!(!is_running(pid));
    assert!(!Path::new(directory).exists());
}

#[test]
#[should_panic(expected = "redis-severe is needed and is not here: install redis-server")]
fn a_tool_that_is_missing_is_named_with_its_package() {
    let _ = tests::servers::tool("redis-severe", "redis-server", &[]);
}

// ---- Redis ----

#[test]
fn redis_answers_commands_and_counts_them() {
    let server = RedisServer::start(&[]);
    assert_eq!(server.command(&["SET", "k", "a\r\nb"]), "OK");
    assert_eq!(server.command(&["GET", "k"]), "a\r\nb");
    assert_eq!(server.command(&["GET", "none"]), "");
    assert_eq!(server.command(&["INCR", "n"]), "1");
    assert_eq!(server.command(&["MGET", "k", "none", "n"]), "a\r\nb\n\n1");
    let refusal = server.try_command(&["INCR", "k"]).unwrap().unwrap_err();
    assert!(refusal.contains("not an integer"), "{refusal}");
    let stats = server.commandstats();
    assert_eq!((stats["get"], stats["incr"], stats["mget"]), (2, 2, 1));
}

#[test]
fn redis_that_is_paused_is_silent_and_answers_later() {
    let server = RedisServer::start(&[]);
    server.pause();
    let asked = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            server.resume();
        });
        assert_eq!(server.command(&["PING"]), "PONG");
    });
    assert!(asked.elapsed() >= Duration::from_millis(300));
}

#[test]
fn redis_comes_back_on_its_port_empty_or_with_what_it_persisted() {
    for (args, kept) in [
        (&[][..], ""),
        (&["--appendonly", "yes", "--appendfsync", "always"], "v"),
    ] {
        let mut server = RedisServer::start(args);
        let (address, pid) = (server.address(), server.pid());
        server.command(&["SET", "k", "v"]);
        server.kill();
        let gone = server.try_command(&["PING"]).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
        server.restart();
        assert_eq!(server.address(), address);
        assert_ne!(server.pid(), pid);
        assert_eq!(server.command(&["GET", "k"]), kept);
        server.restart();
        assert_eq!(server.command(&["GET", "k"]), kept);
    }
}

#[test]
fn redis_with_a_password_is_asked_with_it() {
    let server = RedisServer::start(&["--requirepass", "open-sesame"]);
    assert_eq!(server.command(&["PING"]), "PONG");
    assert!(server.url().starts_with("redis://:open-sesame@127.0.0.1:"));
}

#[test]
fn the_shared_redis_is_one() {
    let pids = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| redis::shared().pid()))
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let pids: std::collections::BTreeSet<u32> = pids;
    assert_eq!(pids.len(), 1);
}

// ---- Helpers ----

fn is_running(pid: u32) -> bool {
    // A process that has ended and whose parent has not looked yet is a zombie.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "expected that {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
