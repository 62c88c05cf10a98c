//! The throwaway servers of the tests of network stores.

use std::{
    env, fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, UdpSocket},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::{
    GuardedChild,
    playground::Playground,
    servers::{
        free_port,
        mariadb::MariaDbServer,
        redis::{self, RedisCluster, RedisServer, Sentinel},
    },
};
use tower_idempotency_sqlx::sqlx::{self, Connection as _, MySqlConnection};

// ---- The guards ----

/// The process that the next test kills.
#[test]
#[ignore = "server_ends_with_killed_test_process starts it"]
fn server_holder_process() {
    let server = RedisServer::start(&[]);
    println!("holding {}", server.pid());
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn server_ends_with_killed_test_process() {
    let (mut holder, _stdout, pid) = start_holder("servers::server_holder_process");
    let directory = env::temp_dir().join(format!("tower-idempotency-redis-{}-0", holder.id()));
    assert!(is_running(pid) && directory.is_dir());
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the server has ended", || !is_running(pid));
    eventually("the directory is deleted", || !directory.exists());
}

/// The process that the next test kills. Its child has inherited its output.
#[test]
#[ignore = "child_ends_with_killed_test_process starts it"]
fn child_holder_process() {
    let child = GuardedChild::spawn(&sleep_command(), Stdio::inherit(), Stdio::inherit());
    println!("holding {}", child.id());
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn child_ends_with_killed_test_process() {
    let (mut holder, mut stdout, pid) = start_holder("servers::child_holder_process");
    assert!(is_running(pid));
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the child has ended", || !is_running(pid));
    // The output ends, because no process can write to it any more.
    stdout.read_to_end(&mut Vec::new()).unwrap();
}

/// The process that the next test kills.
#[test]
#[ignore = "playground_ends_with_killed_test_process starts it"]
fn playground_holder_process() {
    let playground = Playground::start(&[]);
    println!("holding {}", playground.pid());
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn playground_ends_with_killed_test_process() {
    let (mut holder, _stdout, pid) = start_holder("servers::playground_holder_process");
    assert!(is_running(pid));
    holder.kill().unwrap();
    holder.wait().unwrap();
    eventually("the playground has ended", || !is_running(pid));
}

/// The pipes and the exit status are those of the command. Its watcher, which still runs, holds no pipe.
#[test]
fn guarded_child_returns_output_and_status() {
    let mut command = Command::new("sh");
    command.args(["-c", "echo out; echo error >&2; exit 3"]);
    let mut child = GuardedChild::spawn(&command, Stdio::piped(), Stdio::piped());
    let [mut out, mut error] = [String::new(), String::new()];
    child.stdout().read_to_string(&mut out).unwrap();
    child.stderr().read_to_string(&mut error).unwrap();
    assert_eq!((out.as_str(), error.as_str()), ("out\n", "error\n"));
    assert_eq!(child.wait().code(), Some(3));
}

#[test]
fn dropped_child_is_killed() {
    let child = GuardedChild::spawn(&sleep_command(), Stdio::null(), Stdio::null());
    let pid = child.id();
    assert!(is_running(pid));
    drop(child);
    assert!(!is_running(pid));
}

/// No port is returned twice, even if no server listens on it: the server may be restarting.
#[test]
fn free_port_is_given_once() {
    let port = free_port();
    // Binds the port like another process would.
    assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_err());
    assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok());
}

#[test]
fn dropped_server_is_removed_with_files() {
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
#[should_panic(expected = "redis-severe is not installed: install redis-server")]
fn missing_tool_is_named_with_package() {
    let _ = tests::servers::tool("redis-severe", "redis-server", &[]);
}

// ---- MariaDB ----

/// A server that starts deletes all temporary tables in its temporary directory.
#[tokio::test]
async fn starting_mariadb_keeps_tables_of_others() {
    let first = MariaDbServer::start(&[]);
    let mut connection = MySqlConnection::connect(&first.url()).await.unwrap();
    let create = "create temporary table t (a text) engine=Aria";
    sqlx::raw_sql(create)
        .execute(&mut connection)
        .await
        .unwrap();
    let second = MariaDbServer::start(&[]);
    for sql in ["insert into t values ('x')", "drop temporary table t"] {
        let ran = sqlx::raw_sql(sql).execute(&mut connection).await;
        assert!(ran.is_ok(), "{ran:?}");
    }
    drop(second);
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
fn paused_redis_replies_after_resume() {
    let server = RedisServer::start(&[]);
    let directory = server.command(&["CONFIG", "GET", "dir"]);
    let stopped = Path::new(directory.lines().nth(1).unwrap()).join("stopped");
    server.pause();
    assert!(stopped.exists());
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(300));
            server.resume();
        });
        assert_eq!(server.command(&["PING"]), "PONG");
    });
    assert!(started.elapsed() >= Duration::from_millis(300));
    assert!(!stopped.exists());
}

#[test]
fn redis_restarts_on_its_port() {
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
fn redis_with_password_accepts_commands() {
    let server = RedisServer::start(&["--requirepass", "open-sesame"]);
    assert_eq!(server.command(&["PING"]), "PONG");
    assert!(server.url().starts_with("redis://:open-sesame@127.0.0.1:"));
}

#[test]
fn shared_redis_is_one_server() {
    let pids = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| redis::shared().pid()))
            .collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    });
    let pids: std::collections::BTreeSet<u32> = pids;
    assert_eq!(pids.len(), 1);
}

#[test]
fn replica_has_data_and_can_be_promoted() {
    let primary = RedisServer::start(&["--requirepass", "open-sesame"]);
    primary.command(&["SET", "k", "v"]);
    let replica = RedisServer::replica_of(&primary);
    assert_eq!(replica.command(&["GET", "k"]), "v");
    let refusal = replica.try_command(&["SET", "k", "w"]).unwrap();
    assert!(refusal.unwrap_err().starts_with("READONLY"));
    // Acknowledged writes do not reach a paused replica.
    replica.pause();
    primary.command(&["SET", "k", "lost"]);
    drop(primary);
    replica.resume();
    replica.promote();
    assert_eq!(replica.command(&["SET", "l", "w"]), "OK");
}

#[test]
fn redis_with_tls_is_trusted_only_by_its_authority() {
    let server = RedisServer::start_with_tls();
    let other = RedisServer::start_with_tls();
    let ping = |ca: &Path| {
        let address = server.tls_url().replace("rediss://", "").replace("/0", "");
        let mut client = Command::new("openssl")
            .args(["s_client", "-quiet", "-verify_return_error"])
            .args(["-verify_hostname", "localhost", "-connect", &address])
            .arg("-CAfile")
            .arg(ca)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // A client that does not trust the server may close the connection before the server receives anything.
        let _ = client.stdin.take().unwrap().write_all(b"PING\r\nQUIT\r\n");
        let output = client.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ping(server.certificates().ca()), "+PONG\r\n+OK\r\n");
    assert_eq!(ping(other.certificates().ca()), "");
    assert_eq!(server.command(&["PING"]), "PONG", "the other port is open");
}

#[test]
fn sentinel_promotes_replica_of_dead_primary() {
    let deadline = Instant::now() + Duration::from_secs(120);
    let (mut primary, replica, sentinel) = loop {
        let primary = RedisServer::start(&[]);
        let replica = RedisServer::replica_of(&primary);
        let sentinel = Sentinel::start(&primary, 1);
        if sentinel.primary() == primary.address() {
            break (primary, replica, sentinel);
        }
        // The sentinel considers a primary down after half a second without a reply.
        assert!(Instant::now() < deadline, "expected the primary it watches");
    };
    primary.kill();
    let next = sentinel.failed_over(primary.address());
    assert_eq!(next, replica.address());
    assert_eq!(replica.command(&["SET", "k", "v"]), "OK");
}

#[test]
fn cluster_serves_and_moves_slots() {
    let cluster = RedisCluster::start();
    let key = b"\xff{a}\0\r\n".as_slice();
    let slot = cluster.slot(key);
    let from = cluster.master_of(slot).unwrap();
    let to = (from + 1) % 3;
    let get = |node: usize| cluster.node(node).try_command(&[b"GET", key]).unwrap();
    assert_eq!(cluster.node(from).command(&[b"SET", key, b"v"]), "OK");
    let address = cluster.node(from).address();
    assert_eq!(get(to).unwrap_err(), format!("MOVED {slot} {address}"));

    let address = cluster.node(to).address();
    cluster.begin_move(slot, to);
    assert_eq!(get(from).unwrap(), "v");
    cluster.move_keys(slot, to);
    assert_eq!(get(from).unwrap_err(), format!("ASK {slot} {address}"));
    cluster.end_move(slot, to);
    assert_eq!(get(from).unwrap_err(), format!("MOVED {slot} {address}"));
    assert_eq!(get(to).unwrap(), "v");

    cluster.move_slots(slot - 3..=slot + 3, from);
    assert_eq!(get(from).unwrap(), "v");
    for slot in [0, 5460, 5461, 10922, 10923, 16383, slot - 3, slot + 3] {
        assert!(cluster.master_of(slot).is_some(), "{slot}");
    }
    assert_eq!(cluster.urls().len(), 3);
}

#[test]
fn cluster_refuses_without_master() {
    let mut cluster = RedisCluster::start();
    cluster.node_mut(0).kill();
    let set = || cluster.node(1).try_command(&["SET", "{b}", "v"]).unwrap();
    eventually("the others notice", || {
        set().is_err_and(|error| error.starts_with("CLUSTERDOWN"))
    });
    cluster.node_mut(0).restart();
    let get = || cluster.node(0).try_command(&["CLUSTER", "INFO"]).unwrap();
    eventually("the node is back", || {
        get().is_ok_and(|info| info.contains("cluster_state:ok"))
    });
}

#[test]
fn cluster_replica_replaces_dead_master() {
    let mut cluster = RedisCluster::start_with_replicas();
    let slot = cluster.slot("k");
    let master = cluster.master_of(slot).unwrap();
    cluster.node(master).command(&["SET", "k", "v"]);
    eventually("the replica has it", || {
        cluster.node(master).command(&["WAIT", "1", "1000"]) == "1"
    });
    cluster.node_mut(master).kill();
    let next = cluster.failed_over(slot, master);
    assert_eq!(next, master + 3);
    assert_eq!(cluster.node(next).command(&["GET", "k"]), "v");
    cluster.node_mut(master).restart();
    assert_eq!(cluster.master_of(slot), Some(next));
}

// ---- Helpers ----

/// Starts an ignored test of this binary in a separate process. Returns the process, its output, and the process id that it
/// printed.
fn start_holder(test: &str) -> (Child, io::BufReader<ChildStdout>, u32) {
    let mut holder = Command::new(env::current_exe().expect("this binary has a path"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("this binary starts");
    let mut stdout = io::BufReader::new(holder.stdout.take().expect("a piped stdout"));
    let pid = io::BufRead::lines(&mut stdout)
        .map_while(Result::ok)
        // The harness may begin the line with the name of the test.
        .find_map(|line| line.split_once("holding ")?.1.parse::<u32>().ok())
        .expect("the process prints the id");
    (holder, stdout, pid)
}

/// Returns a command that runs for longer than a test waits for its end.
fn sleep_command() -> Command {
    let mut command = Command::new("sleep");
    command.arg("120");
    command
}

fn is_running(pid: u32) -> bool {
    // A zombie has ended, but its parent has not waited for it yet.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "expected that {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
