//! The playground as users run it: a real process, real sockets, and clients in other languages.

use std::{
    collections::BTreeSet,
    env, fs,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process, thread,
    time::{Duration, Instant},
};

use http::{HeaderMap, Method, Request, StatusCode};
use tests::{
    GuardedChild, HANG_GUARD, TestResponse, metrics_page,
    playground::{Playground, command, run},
    servers::redis::RedisServer,
};
use tokio::{task::JoinSet, time::sleep};

// ---- Retries ----

#[tokio::test]
async fn retry_gets_first_response_exactly() {
    let playground = Playground::start(&[]);
    for (path, body) in [
        ("/orders", &b"tea"[..]),
        ("/echo", b"\x00\xffbytes that are no text\r\n\r\n"),
        ("/bytes/0", b""),
        ("/bytes/300000", b""),
        ("/status/204", b""),
        ("/stream/3/10", b""),
    ] {
        let before = playground.executions().await;
        let first = playground.post(path, path, body).await;
        let retry = playground.post(path, path, body).await;
        let over_h2 = playground.send_h2(playground.keyed(path, path), body).await;
        assert!(!first.is_replay(), "{path}");
        assert!(retry.is_replay() && over_h2.is_replay(), "{path}");
        same(&first, &retry);
        same(&first, &over_h2);
        assert_eq!(playground.executions().await, before + 1, "{path}");
    }
}

#[tokio::test]
async fn http2_without_negotiation_is_served() {
    let playground = Playground::start(&[]);
    let first = playground
        .send_h2(playground.keyed("/orders", "k"), b"tea")
        .await;
    let retry = playground.post("/orders", "k", b"tea").await;
    assert!(retry.is_replay());
    same(&first, &retry);
}

#[tokio::test]
async fn curl_sees_one_execution() {
    let playground = Playground::start(&[]);
    let url = playground.url("/orders");
    let mut responses = Vec::new();
    for _ in 0..2 {
        let args = ["-sS", "-i", "-d", "tea", "-H", "Idempotency-Key: k", &url];
        let response = run("curl", args).expect("curl");
        responses.push(String::from_utf8(response).expect("text"));
    }
    assert!(
        responses[0].starts_with("HTTP/1.1 201 Created\r\n"),
        "{}",
        responses[0]
    );
    let bare = |response: &str| -> String {
        let lines = response.split_inclusive('\n');
        lines.filter(|line| !line.starts_with("date:")).collect()
    };
    let marker = "idempotent-replayed: true\r\n";
    assert!(responses[1].contains(marker), "{}", responses[1]);
    assert_eq!(bare(&responses[0]), bare(&responses[1]).replace(marker, ""));
    assert_eq!(playground.executions().await, 1);
}

#[tokio::test]
async fn python_client_sees_one_execution() {
    let playground = Playground::start(&[]);
    let script = r#"
import http.client, sys
responses = []
for _ in range(2):
    connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
    connection.request("POST", "/bytes/1000", body=b"tea", headers={"Idempotency-Key": '"k"'})
    response = connection.getresponse()
    responses.append((response.status, dict(response.getheaders()), response.read()))
(status, first, body), (status2, retry, body2) = responses
assert (status, body) == (status2, body2) and len(body) == 1000, responses
assert "idempotent-replayed" not in first and retry.pop("idempotent-replayed") == "true", responses
first.pop("date"), retry.pop("date")
assert first == retry, responses
"#;
    let address = playground.address().to_string();
    run("python3", ["-c", script, &address]).expect("python3");
    assert_eq!(playground.executions().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_64_concurrent_clients_get_one_response() {
    let playground = std::sync::Arc::new(Playground::start(&["--in-flight", "wait"]));
    let mut clients = JoinSet::new();
    for _ in 0..64 {
        let playground = std::sync::Arc::clone(&playground);
        clients.spawn(async move {
            playground
                .send(playground.keyed("/slow/300", "k"), b"tea")
                .await
        });
    }
    let responses = clients.join_all().await;
    assert_eq!(
        responses
            .iter()
            .filter(|response| !response.is_replay())
            .count(),
        1
    );
    for response in &responses {
        same(&responses[0], response);
    }
    assert_eq!(playground.executions().await, 1);
}

#[tokio::test]
async fn disconnect_does_not_cancel_or_repeat() {
    let playground = Playground::start(&[]);
    disconnect_during_execution(&playground, "/slow/8000").await;
    let meanwhile = playground.post("/slow/8000", "k", b"tea").await;
    assert_eq!(meanwhile.code(), "in-progress");
    let retry = eventually(&playground, "/slow/8000").await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), r#"{"execution":1,"received":3}"#);
}

#[tokio::test]
async fn printed_keys_differ_at_each_start() {
    // A store that is not in memory still has the keys of the previous start.
    let mut keys = BTreeSet::new();
    for _ in 0..2 {
        let playground = Playground::start(&[]);
        playground.terminate();
        let (_, _, said) = playground.wait();
        let found = said.split("Idempotency-Key: ").skip(1);
        let found = found.filter_map(|it| it.split('\'').next());
        let mut found: Vec<_> = found.map(str::to_owned).collect();
        found.dedup();
        assert_eq!(found.len(), 3, "{said}");
        for key in found {
            assert!(keys.insert(key), "the same again: {said}");
        }
    }
}

// ---- Routes ----

#[tokio::test]
async fn no_store_and_persist_apply() {
    let playground = Playground::start(&[]);
    for n in ["1", "2"] {
        let response = playground.post("/no-store", "n", b"").await;
        assert_eq!(response.header("x-execution"), Some(n));
        assert_eq!(response.header("x-idempo-policy"), None);
    }
    let persist = || async { playground.post("/persist/6", "p", b"").await };
    assert_eq!(persist().await.header("x-idempo-persist-for-seconds"), None);
    assert!(persist().await.is_replay());
    sleep(Duration::from_millis(6100)).await;
    let later = persist().await;
    assert!(!later.is_replay());
    assert_eq!(later.header("x-execution"), Some("4"));
}

#[tokio::test]
async fn events_stream_and_leave_tombstone() {
    let playground = Playground::start(&[]);
    let mut events = raw(
        &playground,
        "POST /events/2/6000 HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\n\r\n",
    );
    let seen = read_until(&mut events, "chunk 1 of execution 1");
    assert!(seen.contains("content-type: text/event-stream"), "{seen}");
    assert!(!seen.contains("chunk 2"), "the first event waited");
    read_until(&mut events, "chunk 2 of execution 1");
    let retry = playground.post("/events/2/6000", "k", b"").await;
    assert_eq!(
        (retry.status, retry.code()),
        (StatusCode::CONFLICT, "response-not-retained".to_owned())
    );
    assert!(!retry.is_replay());
    assert_eq!(playground.executions().await, 1);
}

#[tokio::test]
async fn long_stream_leaves_tombstone() {
    let playground = Playground::start(&[]);
    let first = playground.post("/stream/16/1000", "k", b"").await;
    let expected: String = (1..=16)
        .map(|i| format!("chunk {i} of execution 1\n"))
        .collect();
    assert_eq!(first.text(), expected);
    let retry = playground.post("/stream/16/1000", "k", b"").await;
    assert_eq!(retry.code(), "response-not-retained");
    assert!(retry.text().contains("streamed"));
}

#[tokio::test]
async fn replay_omits_connection_headers() {
    let playground = Playground::start(&[]);
    let send = || {
        raw_response(
            &playground,
            "POST /headers HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\nconnection: close\r\n\r\n",
        )
    };
    let (first, replay) = (send(), send());
    let lines = |response: &[u8], name: &str| -> Vec<Vec<u8>> {
        let head = response
            .split(|byte| *byte == b'\n')
            .map(<[u8]>::trim_ascii);
        head.filter(|line| {
            line.to_ascii_lowercase()
                .starts_with(format!("{name}:").as_bytes())
        })
        .map(<[u8]>::to_vec)
        .collect()
    };
    for (name, count) in [
        ("link", 2),
        ("etag", 1),
        ("x-latin1", 1),
        ("x-execution", 1),
        ("content-length", 1),
    ] {
        assert_eq!(lines(&first, name).len(), count, "{name}");
        assert_eq!(lines(&first, name), lines(&replay, name), "{name}");
    }
    assert_eq!(lines(&replay, "x-latin1"), [b"x-latin1: caf\xe9"]);
    for (name, count) in [("set-cookie", 2), ("x-request-id", 1), ("x-hop", 1)] {
        assert_eq!(lines(&first, name).len(), count, "{name}");
        assert_eq!(lines(&replay, name).len(), 0, "{name}");
    }
    assert_eq!(lines(&replay, "idempotent-replayed").len(), 1);
}

#[tokio::test]
async fn panic_closes_connection_and_releases_key() {
    let playground = Playground::start(&[]);
    for n in 1..=2 {
        assert!(
            playground
                .try_send(playground.keyed("/panic", "k"), b"")
                .await
                .is_err()
        );
        assert_eq!(playground.executions().await, n);
    }
}

#[tokio::test]
async fn failed_execution_follows_flag() {
    for (flags, retries_execute) in [
        (&["--failure", "release", "--orphans", "refuse"][..], true),
        (&["--orphans", "refuse"], false),
        (&["--failure", "orphan", "--orphans", "refuse"], false),
        (&["--failure", "needs-attention"], false),
    ] {
        let playground = Playground::start(flags);
        let request = || playground.keyed("/panic", "k");
        let panicked = playground.try_send(request(), b"").await;
        assert!(panicked.is_err(), "{flags:?}");
        let deadline = Instant::now() + HANG_GUARD;
        let refused = loop {
            let retry = playground.try_send(request(), b"").await;
            let refused = retry
                .ok()
                .map(|response| (response.status, response.code()));
            // The lease of an orphan expires after a millisecond.
            if !matches!(&refused, Some((_, code)) if code == "in-progress") {
                break refused;
            }
            assert!(Instant::now() < deadline, "{flags:?}: the lease stays");
            sleep(Duration::from_millis(5)).await;
        };
        let unknown = (StatusCode::CONFLICT, "outcome-unknown".to_owned());
        assert_eq!(refused, (!retries_execute).then_some(unknown), "{flags:?}");
        let executions = if retries_execute { 2 } else { 1 };
        assert_eq!(playground.executions().await, executions, "{flags:?}");
    }
}

#[tokio::test]
async fn aborted_body_releases_key() {
    let playground = Playground::start(&[]);
    for n in 1..=2 {
        let broken = playground
            .try_send(playground.keyed("/truncated", "k"), b"")
            .await;
        assert!(broken.is_err(), "{broken:?}");
        assert_eq!(playground.executions().await, n);
    }
    // With a key as without one, the start of the response reaches the client.
    let unprotected = "GET /truncated HTTP/1.1\r\nhost: x\r\n\r\n";
    let protected =
        "POST /truncated HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: 0\r\n\r\n";
    for (n, request) in [(3, unprotected), (4, protected)] {
        let response = String::from_utf8(raw_response(&playground, request)).expect("text");
        let start = format!("the start of execution {n}");
        assert!(response.contains(&start), "{response:?}");
        assert!(!response.ends_with("0\r\n\r\n"), "{response:?}");
    }
}

#[tokio::test]
async fn each_preset_records_its_statuses() {
    for (preset, kept, freed) in [
        (
            "recommended",
            &[200, 201, 204, 302, 304, 400, 404, 409, 418, 422][..],
            &[307, 308, 401, 403, 408, 412, 423, 425, 429, 500, 503][..],
        ),
        (
            "ietf",
            &[200, 204, 400, 404, 500, 502],
            &[307, 401, 408, 421, 425, 429, 503],
        ),
        ("stripe", &[200, 400, 404, 500, 503], &[308, 401, 403, 429]),
        ("idempo", &[200, 401, 404, 408], &[307, 425, 429, 500]),
    ] {
        let playground = Playground::start(&["--preset", preset]);
        for (codes, executions) in [(kept, 1), (freed, 2)] {
            for code in codes {
                let (path, before) = (format!("/status/{code}"), playground.executions().await);
                for _ in 0..2 {
                    let req = playground.keyed(&path, &format!("\"{code}\""));
                    let response = playground.send(req, b"").await;
                    assert_eq!(response.status, *code);
                }
                let ran = playground.executions().await - before;
                assert_eq!(ran, executions, "{preset} {code}");
            }
        }
    }
}

#[tokio::test]
async fn safe_methods_run_every_time() {
    let playground = Playground::start(&[]);
    for method in [Method::GET, Method::HEAD, Method::OPTIONS] {
        for _ in 0..2 {
            let req = playground.keyed("/orders", "k").method(&method);
            let response = playground.send(req, b"").await;
            assert!(!response.is_replay(), "{method}");
        }
    }
    for _ in 0..2 {
        let health = playground
            .send(Request::get(playground.url("/healthz")), b"")
            .await;
        assert_eq!(health.status, StatusCode::OK);
    }
    assert_eq!(playground.executions().await, 6);
}

// ---- Flags ----

#[tokio::test]
async fn each_preset_refuses_key_reuse() {
    for (preset, status, media_type) in [
        ("recommended", 422, "application/problem+json"),
        ("ietf", 422, "application/problem+json"),
        ("stripe", 400, "application/json"),
        ("idempo", 201, "application/json"),
    ] {
        let playground = Playground::start(&["--preset", preset]);
        for (body, status) in [("tea", 201), ("coffee", status)] {
            let req = playground.keyed("/orders", "\"k\"");
            let response = playground.send(req, body.as_bytes()).await;
            assert_eq!(response.status, status, "{preset} {body}");
        }
        let response = playground.post("/orders", "\"k\"", b"coffee").await;
        assert_eq!(
            response.header("content-type"),
            Some(media_type),
            "{preset}"
        );
    }
}

#[tokio::test]
async fn required_key_is_demanded_on_covered_methods() {
    let playground = Playground::start(&["--require-key"]);
    let refused = playground
        .send(Request::post(playground.url("/orders")), b"tea")
        .await;
    assert_eq!(
        (refused.status, refused.code()),
        (StatusCode::BAD_REQUEST, "missing-key".to_owned())
    );
    let safe = playground
        .send(Request::get(playground.url("/orders")), b"")
        .await;
    assert_eq!(safe.status, StatusCode::CREATED);
    assert_eq!(playground.executions().await, 1);
}

#[tokio::test]
async fn principal_follows_flag() {
    for (flag, header, other) in [
        ("authorization", "authorization", "x-account"),
        ("header:X-Account", "x-account", "authorization"),
    ] {
        let playground = Playground::start(&["--principal", flag]);
        for (header, who, replayed) in [
            (header, "ann", false),
            (header, "ann", true),
            (header, "bob", false),
            (other, "ann", false),
            (other, "bob", true),
        ] {
            let req = playground.keyed("/orders", "k").header(header, who);
            let response = playground.send(req, b"tea").await;
            assert_eq!(response.is_replay(), replayed, "{flag}: {header} {who}");
        }
    }
}

#[tokio::test]
async fn request_over_limit_is_refused() {
    let playground = Playground::start(&["--request-limit", "10"]);
    let allowed = playground.post("/orders", "a", b"0123456789").await;
    assert_eq!(allowed.status, StatusCode::CREATED);
    let refused = playground.post("/orders", "b", b"0123456789+").await;
    assert_eq!(
        (refused.status, refused.code()),
        (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large".to_owned())
    );
    // The length of a chunked body is known only when it has arrived.
    let chunked = raw_response(
        &playground,
        "POST /orders HTTP/1.1\r\nhost: x\r\nidempotency-key: c\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\nb\r\n0123456789+\r\n0\r\n\r\n",
    );
    assert!(
        chunked.starts_with(b"HTTP/1.1 413 "),
        "{}",
        String::from_utf8_lossy(&chunked)
    );
    assert_eq!(playground.executions().await, 1);
    let unprotected = Request::post(playground.url("/orders"));
    let unprotected = playground.send(unprotected, b"0123456789+").await;
    assert_eq!(unprotected.status, StatusCode::CREATED);
}

#[tokio::test]
async fn response_over_limit_follows_preset() {
    for (preset, retried, executions) in [("recommended", 409, 2), ("idempo", 200, 3)] {
        let playground = Playground::start(&["--response-limit", "100", "--preset", preset]);
        for (path, retried) in [("/bytes/100", 200), ("/bytes/101", retried)] {
            for status in [200, retried] {
                let response = playground.post(path, path, b"").await;
                assert_eq!(response.status, status, "{preset} {path}");
            }
        }
        assert_eq!(playground.executions().await, executions, "{preset}");
    }
}

#[tokio::test]
async fn concurrent_duplicate_follows_flag() {
    for (flags, status, retry_after, replayed) in [
        (&["--in-flight", "conflict"][..], 409, Some("1"), false),
        (&["--in-flight", "too-many-requests"], 429, Some("1"), false),
        (
            &["--in-flight", "wait", "--wait", "50ms"],
            409,
            Some("1"),
            false,
        ),
        (&["--in-flight", "wait"], 201, None, true),
        (&["--preset", "idempo"], 429, Some("2"), false),
        (
            &["--preset", "idempo", "--in-flight", "conflict"],
            409,
            Some("2"),
            false,
        ),
    ] {
        let playground = Playground::start(flags);
        // If no client waits for the handler, it runs until the playground is killed.
        let slow = if replayed {
            "/slow/1500"
        } else {
            "/slow/60000"
        };
        disconnect_during_execution(&playground, slow).await;
        let response = playground.post(slow, "k", b"tea").await;
        assert_eq!(response.status, status, "{flags:?}");
        assert_eq!(response.header("retry-after"), retry_after, "{flags:?}");
        assert_eq!(response.is_replay(), replayed, "{flags:?}");
        let other = playground.post("/orders", "k", b"coffee").await;
        let mismatch = if flags.contains(&"idempo") { 201 } else { 422 };
        assert_eq!(other.status, mismatch, "{flags:?}");
    }
}

#[tokio::test]
async fn record_lives_for_retention() {
    until_occurred(async || {
        let playground = Playground::start(&["--retention", "6s"]);
        let orders = || async { playground.post("/orders", "k", b"tea").await };
        let started = Instant::now();
        assert!(!orders().await.is_replay());
        let is_replay = orders().await.is_replay();
        let is_retained = started.elapsed() < Duration::from_secs(6);
        assert!(is_replay || !is_retained);
        sleep(Duration::from_millis(6100)).await;
        assert!(!orders().await.is_replay());
        is_retained
    })
    .await;
}

#[tokio::test]
async fn lease_is_renewed_during_execution() {
    let playground = Playground::start(&["--lease", "6s"]);
    disconnect_during_execution(&playground, "/slow/9000").await;
    let retry = eventually(&playground, "/slow/9000").await;
    assert!(retry.is_replay());
    assert_eq!(playground.executions().await, 1);
}

// ---- Metrics ----

// F-871, S-871
#[tokio::test]
async fn scrape_after_start_lists_every_metric() {
    let redis = RedisServer::start(&[]);
    let playground = Playground::start(&["--store", &redis.url()]);
    let scrape = async || {
        let request = Request::get(playground.url("/metrics"));
        let page = playground.send(request, b"").await;
        assert_eq!(page.headers["content-type"], "text/plain; version=0.0.4");
        page.text().to_owned()
    };
    let page = scrape().await;
    metrics_page::check(&page);
    let listed = metrics_page::parse(&page);
    let mut documented = metrics_page::documented();
    let others = ["idempotency_client_", "idempotency_proxy_"];
    documented.retain(|name, _| others.iter().all(|other| !name.starts_with(other)));
    assert!(listed.keys().eq(documented.keys()), "{page}");
    for (name, metric) in documented {
        let found = &listed[&name];
        assert_eq!(found.kind, metric.kind, "{name}");
        let values = found.samples.iter().map(|it| it.label(&metric.label));
        assert_eq!(values.collect::<BTreeSet<_>>(), metric.values, "{name}");
    }
    let samples = page.lines().filter(|it| it.starts_with("idempotency_"));
    for sample in samples {
        assert!(sample.ends_with(" 0"), "{sample}");
    }

    playground.post("/orders", "k", b"tea").await;
    let page = scrape().await;
    metrics_page::check(&page);
    let is_line = |line: &str| page.lines().any(|it| it == line);
    assert!(is_line("idempotency_granted_total 1"), "{page}");
    let fast = r#"idempotency_handler_seconds_bucket{le="60"} 1"#;
    assert!(is_line(fast), "{page}");
}

#[test]
fn unreachable_store_exits_with_2() {
    // No server listens on port 1.
    for (store, sentence) in [
        ("redis://:hush@127.0.0.1:1", "cannot reach the server"),
        (
            "redis+cluster://:hush@127.0.0.1:1",
            "cannot reach the server",
        ),
        (
            "postgres://app:hush@127.0.0.1:1/app",
            "cannot use the postgres store",
        ),
        (
            "mysql://app:hush@127.0.0.1:1/app",
            "cannot use the mysql store",
        ),
        (
            "sqlite:/no/such/directory/hush",
            "cannot use the sqlite store",
        ),
        (
            "dynamodb://keys?endpoint=http://127.0.0.1:1",
            "cannot use the dynamodb store: cannot reach DynamoDB",
        ),
        (
            "mongodb://hush@127.0.0.1",
            "expected the URL of a store: memory, redis,",
        ),
    ] {
        let output = command(&["--store", store])
            .output()
            .expect("the playground starts");
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{store}");
        assert!(said.contains(sentence), "{said}");
        assert!(!said.contains("hush"), "{said}");
        assert!(output.stdout.is_empty(), "{store}");
    }
}

#[test]
fn dynamodb_uses_environment_credentials() {
    let key = ("AWS_ACCESS_KEY_ID", "AKIAOFTHETEST");
    let secret = ("AWS_SECRET_ACCESS_KEY", "hush");
    let region = ("AWS_REGION", "eu-west-3");
    let of_the_environment = signature(&[key, secret, region]);
    assert_eq!(
        of_the_environment,
        ("AKIAOFTHETEST".into(), "eu-west-3".into())
    );
    // An endpoint of plain HTTP is no AWS service, and does not require an identity.
    assert_eq!(signature(&[region]), ("local".into(), "eu-west-3".into()));
    assert_eq!(signature(&[]), ("local".into(), "us-east-1".into()));
}

/// Returns the signer of the first call, and its region.
fn signature(environment: &[(&str, &str)]) -> (String, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    let store = format!("dynamodb://keys?endpoint=http://{address}");
    let mut command = command(&["--store", &store]);
    for (name, _) in env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    // The test must not read the user's AWS settings.
    command.env("AWS_CONFIG_FILE", "/nowhere");
    command.env("AWS_SHARED_CREDENTIALS_FILE", "/nowhere");
    command.envs(environment.iter().copied());
    let null = process::Stdio::null;
    let playground = GuardedChild::spawn(&command, null(), null());
    let head = first_head(&listener);
    drop(playground);
    let (_, scope) = head.split_once("Credential=").expect("a signature");
    let scope: Vec<_> = scope.split(['/', ',']).collect();
    assert_eq!(scope[3..5], ["dynamodb", "aws4_request"]);
    assert!(!head.contains("hush"));
    (scope[0].to_owned(), scope[2].to_owned())
}

/// Returns the head of the first request.
fn first_head(listener: &TcpListener) -> String {
    listener.set_nonblocking(true).expect("a socket");
    let began = Instant::now();
    let mut client = loop {
        match listener.accept() {
            Ok((client, _)) => break client,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no client connects"
        );
        thread::sleep(Duration::from_millis(10));
    };
    client.set_nonblocking(false).expect("a socket");
    let patience = Some(Duration::from_secs(60));
    client.set_read_timeout(patience).expect("a socket");
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte).expect("a whole head");
        head.extend(byte);
    }
    String::from_utf8(head).expect("text")
}

#[test]
fn used_address_is_named() {
    let first = Playground::start(&[]);
    let address = first.address().to_string();
    let output = command(&["--listen", &address])
        .output()
        .expect("the playground starts");
    let said = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said.contains(&format!("cannot listen on {address}")),
        "{said}"
    );
}

#[tokio::test]
async fn effects_of_processes_are_whole_lines() {
    let file = TempFile::new("effects");
    let flags = ["--effects", file.as_str()];
    let playgrounds = [Playground::start(&flags), Playground::start(&flags)];
    let mut expected = Vec::new();
    for playground in &playgrounds {
        let pid = playground.pid();
        for _ in 0..2 {
            let response = playground
                .send(playground.keyed("/orders?tea=1", "\"k 1\""), b"tea")
                .await;
            assert_eq!(response.header("x-execution"), Some("1"));
        }
        let unkeyed = Request::put(playground.url("/slow/1"));
        playground.send(unkeyed, b"").await;
        let safe = playground.keyed("/no-store", "k").method(Method::GET);
        playground.send(safe, b"").await;
        let _panicked = playground
            .try_send(playground.keyed("/panic", "k"), b"")
            .await;
        expected.extend([
            format!("{pid} 1 POST /orders k 1"),
            format!("{pid} 2 PUT /slow/1 -"),
            format!("{pid} 3 GET /no-store -"),
            format!("{pid} 4 POST /panic k"),
        ]);
    }
    let text = fs::read_to_string(file.as_str()).expect("the file");
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    assert!(text.ends_with('\n'));
}

// ---- Stopping ----

/// The path of a handler that still runs when the stop signal arrives, and its duration.
const SLOW: (&str, Duration) = ("/slow/3000", Duration::from_secs(3));

// F-049
#[tokio::test]
async fn stop_signal_finishes_started_requests() {
    until_occurred(async || {
        let playground = Playground::start(&[]);
        let (path, duration) = SLOW;
        let started = Instant::now();
        let mut client = post_tea(&playground, path);
        playground.wait_until_begun(1).await;
        playground.terminate();
        let is_stopped_early = started.elapsed() < duration;
        let mut response = String::new();
        client.read_to_string(&mut response).expect("an answer");
        assert!(response.starts_with("HTTP/1.1 201 "), "{response}");
        let (status, stdout, stderr) = playground.wait();
        assert_eq!(status.code(), Some(0), "{stderr}");
        assert!(
            stderr.contains("all connections and executions have finished"),
            "{stderr}"
        );
        assert_eq!(stdout, "", "one line on stdout is all");
        is_stopped_early
    })
    .await;
}

// F-049
#[tokio::test]
async fn stop_signal_finishes_detached_requests() {
    until_occurred(async || {
        let playground = Playground::start(&[]);
        let (path, duration) = SLOW;
        let started = Instant::now();
        disconnect_during_execution(&playground, path).await;
        playground.terminate();
        let is_stopped_early = started.elapsed() < duration;
        let (status, _, stderr) = playground.wait();
        assert!(
            started.elapsed() >= duration,
            "the process did not wait for the execution"
        );
        assert_eq!(status.code(), Some(0), "{stderr}");
        assert!(
            stderr.contains("all connections and executions have finished"),
            "{stderr}"
        );
        is_stopped_early
    })
    .await;
}

// ---- Helpers ----

/// Asserts that both responses are equal, except for the headers of one exchange.
#[track_caller]
fn same(one: &TestResponse, other: &TestResponse) {
    let lasting = |headers: &HeaderMap| {
        let mut headers = headers.clone();
        if one.status == StatusCode::NO_CONTENT {
            // Over HTTP/2, axum adds the length 0 to an empty body, with or without a key.
            headers.remove("content-length");
        }
        headers.remove("date");
        headers.remove("idempotent-replayed");
        headers
    };
    assert_eq!(one.status, other.status);
    assert_eq!(lasting(&one.headers), lasting(&other.headers));
    assert!(one.body == other.body, "the bodies differ");
}

/// Sends a request without changes.
fn raw(playground: &Playground, req: &str) -> TcpStream {
    let mut stream = TcpStream::connect(playground.address()).expect("a connection");
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a timeout");
    stream.write_all(req.as_bytes()).expect("a request");
    stream
}

/// Returns the raw response, up to the end of the connection.
fn raw_response(playground: &Playground, req: &str) -> Vec<u8> {
    let mut response = Vec::new();
    raw(playground, req)
        .read_to_end(&mut response)
        .expect("an answer");
    response
}

fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let (mut seen, mut buffer) = (String::new(), [0; 1024]);
    while !seen.contains(text) {
        let count = match stream.read(&mut buffer) {
            // On Linux, a read with a timeout fails if the process is stopped meanwhile.
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.expect("more of the response"),
        };
        assert!(count > 0, "expected {text}, found {seen}");
        seen.push_str(std::str::from_utf8(&buffer[..count]).expect("text"));
    }
    seen
}

/// Posts `tea` to `path` under the key `k`, to the host that other requests of a test are for.
fn post_tea(playground: &Playground, path: &str) -> TcpStream {
    let host = playground.address();
    let head = format!("host: {host}\r\nidempotency-key: k\r\ncontent-length: 3");
    let req = format!("POST {path} HTTP/1.1\r\n{head}\r\n\r\ntea");
    raw(playground, &req)
}

/// Posts `tea` to `path` under the key `k`, and disconnects when its execution has begun.
async fn disconnect_during_execution(playground: &Playground, path: &str) {
    let client = post_tea(playground, path);
    playground.wait_until_begun(1).await;
    drop(client);
}

/// Repeats a retry while the first request is in progress. Returns the last response.
async fn eventually(playground: &Playground, path: &str) -> TestResponse {
    let deadline = Instant::now() + HANG_GUARD;
    loop {
        let req = playground.keyed(path, "k");
        let response = playground.send(req, b"tea").await;
        if response.status != StatusCode::CONFLICT {
            return response;
        }
        assert!(Instant::now() < deadline, "{path} does not finish");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Repeats a trial until it returns `true`, because its case has occurred.
async fn until_occurred(trial: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + HANG_GUARD;
    while !trial().await {
        assert!(Instant::now() < deadline, "the case did not occur");
    }
}

/// A file that is deleted when this is dropped.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("tower-idempotency-{name}-{}", process::id())))
    }

    fn as_str(&self) -> &str {
        self.0.to_str().expect("a path of text")
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
