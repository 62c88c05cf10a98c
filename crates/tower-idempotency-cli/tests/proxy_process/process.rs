//! Signals, wrong configurations, and memory.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixDatagram,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use tests::{environment::remove_settings, few_or, metrics_page, scratch::Scratch};

use crate::harness::{Process, Upstream, command, config, exchange, get, post};

#[test]
fn wrong_configuration_is_rejected_with_line() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let address = "127.0.0.1:1".parse().unwrap();
    let text = config("redis://:hush@127.0.0.1:1", address, "unknwon = \"free\"");
    fs::write(&file, text).unwrap();
    let output = command(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let expected = format!(
        "idempotency proxy: {}: line 16: unknown setting `unknwon`, did you mean `unknown`?\n",
        file.display()
    );
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);

    // The file is right, but the store is down.
    fs::write(&file, config("redis://:hush@127.0.0.1:1", address, "")).unwrap();
    let output = command(&file).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("cannot use the redis store") && !stderr.contains("hush"),
        "{stderr}"
    );

    let output = command(&file).arg("--check").output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("\"unknown\": \"attention\""),
        "{stdout}"
    );
    assert!(!stdout.contains("hush"), "{stdout}");
    let output = command(&scratch.file("none")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

/// systemd does not start such a proxy again.
#[test]
fn wrong_file_or_store_exits_with_2() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let address = "127.0.0.1:1".parse().unwrap();
    let valid = config("memory", address, "");
    let tls = "[listen]\ntls = { certificate = \"/none/chain.pem\", key = \"/none/key.pem\" }";
    let ca_file = "ca_file = \"/none/ca.pem\"\n[[route]]";
    let with_store = |url: &str| (config(url, address, ""), false);
    for ((text, is_checked), expected) in [
        (
            (valid.replacen("[listen]", tls, 1), true),
            "cannot use certificate /none/chain.pem",
        ),
        (
            (
                valid
                    .replace("http://", "https://")
                    .replacen("[[route]]", ca_file, 1),
                true,
            ),
            "cannot use ca_file /none/ca.pem",
        ),
        (with_store("mongo://host"), "found mongo"),
        (with_store("redis://host/0?foo=1"), "after the ? of the URL"),
        (with_store(""), "found a text without a scheme"),
    ] {
        fs::write(&file, text).unwrap();
        let run = |arguments: &[&str]| command(&file).args(arguments).output().unwrap();
        let output = run(&[]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        let code = if is_checked { 2 } else { 0 };
        assert_eq!(run(&["--check"]).status.code(), Some(code), "{expected}");
    }
}

/// Neither the store nor an upstream is needed for a policy.
#[test]
fn policy_of_each_route_is_printed() {
    let scratch = Scratch::new();
    let (file, document) = (scratch.file("proxy.toml"), scratch.file("openapi.json"));
    let address = "127.0.0.1:1".parse().unwrap();
    let route = "retention = \"2h\"\nshare = \"25%\"";
    let text = config("redis://:hush@127.0.0.1:1", address, route);
    fs::write(&file, text).unwrap();
    let policy = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_idempotency"));
        command
            .args(["proxy", "policy", "--config"])
            .arg(&file)
            .args(arguments);
        let output = remove_settings(&mut command).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (code, text, _) = policy(&[]);
    assert_eq!(code, Some(0));
    assert!(
        text.contains("route ") && text.contains("for 7200s") && !text.contains("hush"),
        "{text}"
    );
    let (_, lines, _) = policy(&["--json"]);
    let routes: Vec<serde_json::Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(
        routes
            .iter()
            .any(|route| route["policy"]["retention"] == 7_200),
        "{lines}"
    );

    let original = "{\"openapi\":\"3.0.3\",\"info\":{\"title\":\"a\u{9b}2J\",\"version\":\"1\"},\"paths\":{\"/orders\":{\"post\":{\"responses\":{}}}}}";
    fs::write(&document, original).unwrap();
    let openapi = ["--openapi", document.to_str().unwrap()];
    let (code, described, _) = policy(&openapi);
    assert_eq!(code, Some(0));
    // A terminal obeys this character. The document has a line for each value.
    assert!(!described.contains('\u{9b}'), "{described}");
    assert!(described.lines().count() > 10, "{described}");
    let described: serde_json::Value = serde_json::from_str(&described).unwrap();
    assert_eq!(described["info"]["title"], "a\u{9b}2J");
    let post = &described["paths"]["/orders"]["post"];
    assert_eq!(
        post["responses"]["422"]["$ref"],
        "#/components/responses/Idempotency422"
    );
    assert_eq!(post["x-idempotency"]["enforced_percent"], 25);
    assert_eq!(fs::read_to_string(&document).unwrap(), original);

    for (text, expected) in [
        ("openapi: 3.0.3", "no JSON"),
        ("{\"swagger\":\"2.0\"}", "expected an OpenAPI document"),
    ] {
        fs::write(&document, text).unwrap();
        let (code, out, error) = policy(&openapi);
        assert!(
            code == Some(2) && out.is_empty() && error.contains(expected),
            "{error}"
        );
    }
    let (code, _, error) = policy(&["--host", "a.example"]);
    assert!(code == Some(2) && error.contains("--openapi"), "{error}");
}

#[test]
fn terminated_proxy_finishes_open_requests() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let released = Arc::new(AtomicBool::new(false));
    let barrier = Arc::clone(&released);
    let upstream = Upstream::start(move |_| {
        while !barrier.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        true
    });
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let mut proxy = Process::start(&file);
    let address = proxy.address;
    let clients: Vec<_> = (0..8)
        .map(|client| thread::spawn(move || post(address, "/pay", &format!("k{client}"), "1")))
        .collect();
    upstream.wait_for(8);
    proxy.signal("-TERM");
    proxy.wait_until(|it| get(it.admin, "/readyz").status() == 503);
    released.store(true, Ordering::SeqCst);
    for client in clients {
        assert_eq!(client.join().unwrap().status(), 201);
    }
    assert!(proxy.wait().success());
    assert_eq!(upstream.effects(), 8);
}

#[test]
fn hangup_reloads_configuration() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let (old, new) = (Upstream::start(|_| true), Upstream::start(|_| true));
    fs::write(&file, config("memory", old.address, "")).unwrap();
    let mut proxy = Process::start(&file);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);

    fs::write(&file, config("memory", new.address, "mode = \"of\"")).unwrap();
    proxy.signal("-HUP");
    proxy.wait_for_log("line 16: unknown value `of`, did you mean `off`?");
    fs::write(&file, config("memory", new.address, "mode = \"off\"")).unwrap();
    proxy.signal("-HUP");
    proxy.wait_for_log("would no longer protect requests of /**");
    assert_eq!(post(proxy.address, "/pay", "k2", "1").status(), 201);
    assert_eq!((old.effects(), new.effects()), (2, 0));

    fs::write(&file, config("memory", new.address, "")).unwrap();
    proxy.signal("-HUP");
    proxy.wait_for_log("configuration reloaded");
    assert!(post(proxy.address, "/pay", "k", "1").is_replay());
    assert_eq!(post(proxy.address, "/pay", "k3", "1").status(), 201);
    assert_eq!((old.effects(), new.effects()), (2, 1));
    let metrics = get(proxy.admin, "/metrics").0;
    for line in [
        "idempotency_proxy_reloads_total{result=\"done\"} 1",
        "idempotency_proxy_reloads_total{result=\"rejected\"} 2",
        "idempotency_proxy_requests_total{route=\"/**\",status=\"2xx\"} 4",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
}

/// The file stands for all calls of the system that hang and cannot be cancelled, such as the lookup of a name.
#[test]
fn hanging_file_delays_neither_requests_nor_exit() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let mut command = command(&file);
    command.env("TOKIO_WORKER_THREADS", "1");
    let mut proxy = Process::spawn(command, &file);
    fs::remove_file(&file).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&file).status();
    assert!(made.unwrap().success());
    // The pipe opens when the proxy opens it too. The proxy then waits for its end.
    let opening = thread::spawn(move || fs::File::options().write(true).open(&file));
    proxy.signal("-HUP");
    proxy.wait_until(|_| opening.is_finished());
    let writer = opening.join().unwrap().unwrap();
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    proxy.signal("-TERM");
    assert!(proxy.wait().success());
    drop(writer);
}

// S-871
#[test]
fn scrape_after_start_lists_every_metric() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let proxy = Process::start(&file);
    let scrape = || {
        let reply = get(proxy.admin, "/metrics").0;
        let (_, page) = reply.split_once("\r\n\r\n").unwrap();
        metrics_page::check(page);
        page.to_owned()
    };
    let page = scrape();
    let listed = metrics_page::parse(&page);
    let mut documented = metrics_page::documented();
    // The store sets this gauge when it connects to Redis.
    documented.remove("idempotency_redis_evicting");
    documented.retain(|name, _| !name.starts_with("idempotency_client_"));
    assert!(listed.keys().eq(documented.keys()), "{page}");
    for (name, metric) in documented {
        let found = &listed[&name];
        assert_eq!(found.kind, metric.kind, "{name}");
        assert!(!found.help.is_empty(), "{name}");
    }
    let samples = page.lines().filter(|it| it.starts_with("idempotency_"));
    for sample in samples {
        assert!(sample.ends_with(" 0"), "{sample}");
    }
    for (metric, reasons) in [
        (
            "upstream_failures",
            ["unsent", "upstream-broken", "upstream-timeout"],
        ),
        (
            "unknown_outcomes",
            ["status", "upstream-broken", "upstream-timeout"],
        ),
    ] {
        for reason in reasons {
            let line = format!(
                "idempotency_proxy_{metric}_total{{upstream=\"app\",reason=\"{reason}\"}} 0"
            );
            assert!(page.lines().any(|it| it == line), "{line} in {page}");
        }
    }

    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    scrape();
}

#[test]
fn coverage_of_unsafe_requests_is_counted() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let proxy = Process::start(&file);
    let request = |head: &str| {
        let request = format!("{head}connection: close\r\ncontent-length: 0\r\n\r\n");
        assert_eq!(exchange(proxy.address, &request).status(), 201, "{head}");
    };
    for (head, times) in [
        ("POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\n", 3),
        ("POST /pay HTTP/1.1\r\nhost: a\r\n", 2),
        // It is no WebSocket, which begins with GET.
        (
            "POST /pay HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n",
            1,
        ),
        ("POST /open/pay HTTP/1.1\r\nhost: a\r\n", 1),
        ("GET /pay HTTP/1.1\r\nhost: a\r\n", 1),
        ("QUERY /pay HTTP/1.1\r\nhost: a\r\n", 1),
        ("QUERY /open/pay HTTP/1.1\r\nhost: a\r\n", 1),
    ] {
        for _ in 0..times {
            request(head);
        }
    }
    let metrics = get(proxy.admin, "/metrics").0;
    let lines = metrics
        .lines()
        .filter(|line| line.starts_with("idempotency_proxy_unsafe_requests_total{"));
    let (unused, mut lines): (Vec<_>, Vec<_>) = lines.partition(|line| line.ends_with(" 0"));
    lines.sort_unstable();
    let expected = [
        "idempotency_proxy_unsafe_requests_total{route=\"/**\",coverage=\"keyed\"} 3",
        "idempotency_proxy_unsafe_requests_total{route=\"/**\",coverage=\"no_key\"} 3",
        "idempotency_proxy_unsafe_requests_total{route=\"/open/**\",coverage=\"off\"} 1",
    ];
    assert_eq!(lines, expected);
    assert_eq!(
        unused.len(),
        7,
        "counters exist before their first event: {unused:?}"
    );
}

/// A key does not protect a method that the preset leaves out.
#[test]
fn uncovered_method_counts_as_method() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    let text = config("memory", upstream.address, "preset = \"stripe\"");
    fs::write(&file, text).unwrap();
    let proxy = Process::start(&file);
    for key in ["idempotency-key: k\r\n", "idempotency-key: k\r\n", ""] {
        let request = format!(
            "PUT /pay HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\ncontent-length: 0\r\n\r\n"
        );
        assert_eq!(exchange(proxy.address, &request).status(), 201);
    }
    assert_eq!(upstream.effects(), 3);
    assert_eq!(post(proxy.address, "/pay", "k", "1").status(), 201);
    let metrics = get(proxy.admin, "/metrics").0;
    for (coverage, count) in [("method", 3), ("keyed", 1), ("no_key", 0)] {
        let line = format!(
            "idempotency_proxy_unsafe_requests_total{{route=\"/**\",coverage=\"{coverage}\"}} {count}"
        );
        assert!(metrics.lines().any(|it| it == line), "{line} in {metrics}");
    }
}

/// Returns the resident memory of a process in KiB.
fn resident(pid: u32) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn streams_take_little_memory() {
    const PIECE: usize = 64 * 1024;
    let total = few_or(128, 1024) * 1024 * 1024;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = listener.local_addr().unwrap();
    // Reads the upload, then sends as many bytes.
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let mut buffer = vec![0; PIECE];
        for _ in 0..total / PIECE {
            stream.read_exact(&mut buffer).unwrap();
        }
        write!(
            stream,
            "HTTP/1.1 200 OK\r\ncontent-length: {total}\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        for _ in 0..total / PIECE {
            stream.write_all(&buffer).unwrap();
        }
    });
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    fs::write(&file, config("memory", upstream, "")).unwrap();
    let proxy = Process::start(&file);
    let mut client = TcpStream::connect(proxy.address).unwrap();
    write!(
        client,
        "POST /open/up HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {total}\r\n\r\n"
    )
    .unwrap();
    let mut buffer = vec![7; PIECE];
    for _ in 0..total / PIECE {
        client.write_all(&buffer).unwrap();
    }
    let mut received = 0;
    loop {
        match client.read(&mut buffer).unwrap() {
            0 => break,
            read => received += read,
        }
    }
    assert!((total..total + 1000).contains(&received), "{received}");
    server.join().unwrap();
    let resident = resident(proxy.pid());
    assert!(resident < 64 * 1024, "{resident} KiB");
}

#[test]
fn systemd_is_notified() {
    let scratch = Scratch::new();
    let file = scratch.file("proxy.toml");
    let upstream = Upstream::start(|_| true);
    fs::write(&file, config("memory", upstream.address, "")).unwrap();
    let path = scratch.file("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut child = command(&file)
        .env("NOTIFY_SOCKET", &path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let receive = || {
        let mut buffer = [0; 1024];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };
    assert_eq!(receive(), "READY=1");
    let pid = child.id().to_string();
    let killed = std::process::Command::new("kill")
        .arg(pid)
        .status()
        .unwrap();
    assert!(killed.success());
    assert_eq!(receive(), "STOPPING=1");
    assert!(child.wait().unwrap().success());
}
