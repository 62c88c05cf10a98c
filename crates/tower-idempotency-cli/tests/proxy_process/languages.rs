//! The example for upstreams in another language, as its page shows it.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use tests::{HANG_GUARD, environment::remove_settings, scratch::Scratch};

use crate::harness::{Process, exchange, get, post};

/// A program that prints its address. It is killed when this is dropped.
struct Program {
    child: Child,
    address: SocketAddr,
}

impl Program {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().parse();
        let address = address.unwrap_or_else(|_| panic!("{line}"));
        Self { child, address }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn example(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples/any-language")
        .join(file)
}

/// Runs the configuration of the example in front of an upstream.
fn check(upstream: &Program) {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let mut text = fs::read_to_string(example("proxy.toml")).unwrap();
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    for (from, to) in [
        ("127.0.0.1:8080", "127.0.0.1:0"),
        ("127.0.0.1:9090", "127.0.0.1:0"),
        ("127.0.0.1:3000", &upstream.address.to_string()),
        ("sqlite:keys.db", &store),
    ] {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    fs::write(&file, text).unwrap();
    let proxy = Process::start(&file);
    // A client that stops in the middle of its body does not stop the other ones.
    let stalled = "POST /orders HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na";
    let stalled = send(upstream.address, stalled.as_bytes());
    let count = || {
        get(proxy.address, "/count")
            .body()
            .parse::<usize>()
            .unwrap()
    };
    for round in 1..=20 {
        let key = format!("order-{round}");
        let first = post(proxy.address, "/orders", &key, "book");
        assert_eq!(
            (first.status(), first.is_replay()),
            (201, false),
            "{first:?}"
        );
        let retry = post(proxy.address, "/orders", &key, "book");
        assert_eq!(
            (retry.status(), retry.is_replay()),
            (201, true),
            "{retry:?}"
        );
        assert_eq!(first.body(), retry.body());
        assert_eq!(count(), round);
    }
    // A request without a key passes as before.
    let without_key =
        "POST /orders HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 4\r\n\r\nbook";
    assert_eq!(exchange(proxy.address, without_key).status(), 400);
    // Another path does not avoid the key, neither at the proxy nor at the service.
    let elsewhere = without_key.replace("/orders", "/elsewhere");
    for address in [proxy.address, upstream.address] {
        assert_eq!(exchange(address, &elsewhere).status(), 404);
    }
    // A body that is no text gets a response.
    let binary = [
        without_key.replace("4\r\n\r\nbook", "1\r\n\r\n").as_bytes(),
        &[0xff],
    ]
    .concat();
    let mut reply = String::new();
    send(upstream.address, &binary)
        .read_to_string(&mut reply)
        .unwrap();
    assert!(reply.starts_with("HTTP/1.1 400 "), "{reply}");
    assert_eq!(count(), 20);
    // The upstream fails after it has stored the order.
    let failed = post(proxy.address, "/orders", "crash", "crash");
    assert_eq!(failed.status(), 502, "{failed:?}");
    assert_eq!(count(), 21);
    let retry = post(proxy.address, "/orders", "crash", "crash");
    assert!(
        retry.status() == 409 && retry.is_problem("outcome-unknown"),
        "{retry:?}"
    );
    assert_eq!(count(), 21);
    check_conformance(&proxy);
    // One for each key, as in front of an upstream in Rust.
    assert_eq!(count(), 21 + EXECUTIONS);
    drop(stalled);
}

/// Sends bytes, and returns the connection.
fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// The executions of `idempotency conform` with all rows.
const EXECUTIONS: usize = 11;

/// Runs all rows.
fn check_conformance(proxy: &Process) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency"));
    let output = remove_settings(&mut command)
        .args(["conform", &format!("http://{}/orders", proxy.address)])
        .arg("--header=authorization: Bearer a")
        .arg("--other-header=authorization: Bearer b")
        .args(["--other-path=/orders/rush", "--other-method=PATCH"])
        .args(["--require-key", "--strict-keys", "--timeout=60s", "--json"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{stdout}{stderr}");
    let rows: Vec<serde_json::Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let with = |verdict: &str| {
        let rows = rows.iter().filter(|row| row["verdict"] == verdict);
        rows.map(|row| row["row"].as_str().unwrap())
            .collect::<Vec<_>>()
    };
    assert!(with("does not hold").is_empty(), "{stdout}");
    let mut unjudged = with("not judged");
    // Duplicates may all be replays.
    unjudged.retain(|row| *row != "concurrent-409");
    assert!(unjudged.is_empty(), "{stdout}");
}

#[test]
fn python_upstream_executes_once() {
    let mut command = Command::new("python3");
    check(&Program::start(command.arg(example("orders.py")).arg("0")));
}

#[test]
#[ignore = "needs Node; scripts/test --all installs it and runs this test"]
fn node_upstream_executes_once() {
    let program = Program::start(Command::new("node").arg(example("orders.js")).arg("0"));
    check(&program);
    // Node emits each chunk by itself: both bytes of a character are in different chunks.
    let head = "POST /orders HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunks = b"1\r\n\xc3\r\n1\r\n\xa9\r\n0\r\n\r\n";
    let mut reply = String::new();
    let mut stream = send(program.address, &[head.as_bytes(), chunks].concat());
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.contains("\"item\":\"é\""), "{reply}");
}

#[test]
#[ignore = "needs Go; scripts/test --all installs it and runs this test"]
fn go_upstream_executes_once() {
    let scratch = Scratch::new();
    let program = scratch.file("orders");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&program);
    build.arg(example("orders.go"));
    build.env("GOCACHE", scratch.file("cache"));
    assert!(build.env("GO111MODULE", "off").status().unwrap().success());
    check(&Program::start(Command::new(&program).arg("0")));
}

/// Returns the configurations in `ops/`, with their names.
fn shipped() -> [(&'static str, String); 2] {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ops");
    let compose = fs::read_to_string(ops.join("container/proxy.toml")).unwrap();
    let manifest = fs::read_to_string(ops.join("kubernetes/sidecar.yaml")).unwrap();
    let (_, block) = manifest.split_once("  proxy.toml: |\n").unwrap();
    let (block, _) = block.split_once("\n---\n").unwrap();
    let lines = block
        .lines()
        .map(|line| line.strip_prefix("    ").unwrap_or(line));
    let sidecar = lines.collect::<Vec<_>>().join("\n");
    [("compose", compose), ("sidecar", sidecar)]
}

/// Kubernetes signals both containers at once. The service must run until the proxy has drained.
#[test]
fn service_outlasts_drain_of_sidecar() {
    let [_, (_, proxy)] = shipped();
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ops/kubernetes/sidecar.yaml");
    let manifest = fs::read_to_string(manifest).unwrap();
    let seconds = |text: &str, name: &str| -> u64 {
        let mut values = text.split(name).skip(1);
        let value = values.next().unwrap_or_else(|| panic!("no {name}"));
        assert!(values.next().is_none(), "several {name}");
        let digits = value.trim_start_matches('"');
        let end = digits.find(|it: char| !it.is_ascii_digit()).unwrap();
        digits[..end].parse().unwrap()
    };
    let (_, drain) = proxy.split_once("[drain]").unwrap();
    let (drain, _) = drain.split_once("\n[").unwrap();
    let drained = seconds(drain, "delay = ") + seconds(drain, "timeout = ");
    let sleeps = seconds(&manifest, "sleep: {seconds: ");
    let killed = seconds(&manifest, "terminationGracePeriodSeconds: ");
    assert!(
        drained < sleeps && sleeps < killed,
        "{drained} s, {sleeps} s, {killed} s"
    );
    // A container of this kind is signalled after the service has ended.
    let mut lines = manifest.lines().map(str::trim_start);
    assert!(!lines.any(|line| line.starts_with("restartPolicy:")));
    assert!(!manifest.contains("\n      initContainers:"));
}

/// Returns a configuration in `ops/` with this upstream, and with files in `scratch`.
fn adapted(mut text: String, upstream: SocketAddr, scratch: &Scratch) -> String {
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    fs::write(scratch.file("store-url"), format!("{store}\n")).unwrap();
    fs::write(scratch.file("secret"), "sixteen bytes or more\n").unwrap();
    let folder = scratch.file("");
    let folder = folder.to_str().unwrap().trim_end_matches('/');
    for (from, to) in [
        ("0.0.0.0:8080", "127.0.0.1:0"),
        ("0.0.0.0:9090", "127.0.0.1:0"),
        ("127.0.0.1:3000", &upstream.to_string()),
        ("orders:3000", &upstream.to_string()),
        ("redis://redis:6379/0", &store),
        ("/run/secrets/idempotency", folder),
    ] {
        text = text.replace(from, to);
    }
    text
}

/// The ingress ends TLS. With another protocol, a service redirects its clients without an end.
#[test]
fn sidecar_passes_on_protocol_of_ingress() {
    let [_, (_, text)] = shipped();
    let scratch = Scratch::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = adapted(text, listener.local_addr().unwrap(), &scratch);
    let upstream = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
        let lines = BufReader::new(&stream).lines().map(Result::unwrap);
        let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        let response = "HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n";
        (&stream).write_all(response.as_bytes()).unwrap();
        head
    });
    let file = scratch.file("proxy.toml");
    fs::write(&file, text).unwrap();
    let proxy = Process::start(&file);
    let forwarded = ["x-forwarded-for: 192.0.2.7", "x-forwarded-proto: https"];
    let request = format!(
        "GET /orders HTTP/1.1\r\nhost: a\r\n{}\r\nconnection: close\r\n\r\n",
        forwarded.join("\r\n")
    );
    assert_eq!(exchange(proxy.address, &request).status(), 204);
    let head = upstream.join().unwrap();
    for line in forwarded {
        assert!(head.iter().any(|it| it == line), "{line}: {head:?}");
    }
}

/// Each configuration begins with observation: both requests reach the service.
#[test]
fn shipped_configurations_observe() {
    for (name, text) in shipped() {
        let scratch = Scratch::new();
        let mut command = Command::new("python3");
        let upstream = Program::start(command.arg(example("orders.py")).arg("0"));
        let text = adapted(text, upstream.address, &scratch);
        let file = scratch.file("proxy.toml");
        fs::write(&file, &text).unwrap();
        let mut proxy = Process::start(&file);
        for order in 1..=2 {
            let reply = post(proxy.address, "/orders", "k", "book");
            assert_eq!((reply.status(), reply.is_replay()), (201, false), "{name}");
            assert!(
                reply.body().contains(&format!("\"order\": {order}")),
                "{name}: {reply:?}"
            );
        }
        // A reload enforces the route, as in the guide.
        fs::write(
            &file,
            text.replace("mode = \"observe\"", "mode = \"enforce\""),
        )
        .unwrap();
        proxy.signal("-HUP");
        proxy.wait_for_log("configuration reloaded");
        let replays =
            [false, true].map(|_| post(proxy.address, "/orders", "k", "book").is_replay());
        assert_eq!(replays, [false, true], "{name}");
    }
}

#[test]
fn guide_shows_configuration_of_example() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/any-language.md");
    let guide = fs::read_to_string(guide).unwrap();
    let shown = guide
        .split("```toml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let lines = |text: &str| -> Vec<String> {
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.map(str::to_owned).collect()
    };
    let file = fs::read_to_string(example("proxy.toml")).unwrap();
    assert_eq!(lines(shown), lines(&file));
}
