//! `serve --metrics` as a process: the chart of requests from the metrics of real servers.

use std::{
    fs::{self, File},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{HeaderMap, StatusCode, header::LOCATION},
    response::{Html, IntoResponse as _},
    routing::get,
};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use tests::{HANG_GUARD, scratch::Scratch, servers::certificates::Certificates};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket},
};
use tokio_rustls::TlsAcceptor;

use crate::{
    command, run_in,
    serve::{Served, store},
};

/// The chart is short, so that the metrics are requested each second.
const ARGS: [&str; 3] = ["--read-only", "--chart-window", "1m"];

async fn listen(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// Starts a replica. The function returns the number of executions at its n-th request, from 1.
async fn replica(executions: impl Fn(u64) -> u64 + Clone + Send + Sync + 'static) -> SocketAddr {
    let requests = Arc::new(AtomicU64::new(0));
    let metrics = move || async move {
        let executions = executions(requests.fetch_add(1, Ordering::Relaxed) + 1);
        format!(
            "idempotency_granted_total {executions}\nidempotency_refused_total{{code=\"a\"}} 0\n"
        )
    };
    listen(Router::new().route("/metrics", get(metrics))).await
}

/// Returns the overview as soon as it fulfils the condition.
fn overview(served: &Served, is_expected: impl Fn(&str) -> bool) -> String {
    let began = Instant::now();
    loop {
        let page = served.get("/", "");
        if is_expected(&page) {
            return page;
        }
        assert!(began.elapsed() < HANG_GUARD, "{page}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Returns the largest number of executions per minute in the chart.
fn largest_rate(page: &str) -> Option<f64> {
    largest_rate_of("executions", page)
}

/// Returns the largest rate per minute of a line of the chart.
fn largest_rate_of(name: &str, page: &str) -> Option<f64> {
    let (_, line) = page.split_once(&format!("{name}: latest "))?;
    let (_, largest) = line.split_once("largest ")?;
    largest.split_once(". ")?.0.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn chart_has_requests_of_all_replicas() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let slow = replica(|request| request).await;
    // It restarts after each third request. Its counter rises by a million before each request.
    let busy = replica(|request| 1_000_000 * ((request - 1) % 3 + 1)).await;
    let urls = [slow, busy].map(|address| format!("http://{address}/metrics"));
    let by_options = ["--metrics", &*urls[0], "--metrics", &*urls[1]];
    let by_options = Served::start(scratch.path(), &url, &[&ARGS[..], &by_options].concat());
    let by_variable = Served::start_with(scratch.path(), &url, &ARGS, |command| {
        command.env("IDEMPOTENCY_METRICS", urls.join(" "));
    });
    for served in [by_options, by_variable] {
        // The slow replica has at most 120 executions per minute for each request between two points.
        let has_requests = |page: &str| largest_rate(page).is_some_and(|rate| rate > 100_000.0);
        let page = overview(&served, has_requests);
        assert!(page.contains("replays: latest 0, largest 0. "), "{page}");
        assert!(page.contains("refusals: latest 0, largest 0. "), "{page}");
        assert!(!page.contains("No metrics of"), "{page}");
        assert!(page.contains("Requests per minute, last 1m"), "{page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn series_that_comes_and_goes_has_no_peak() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let requests = Arc::new(AtomicU64::new(0));
    // Each second response lacks the series with the executions. The next one also has a million more replays.
    let metrics = move || async move {
        let request = requests.fetch_add(1, Ordering::Relaxed);
        let executions = match request % 2 {
            0 => "idempotency_granted_total{name=\"a\"} 1000000\n",
            _ => "",
        };
        let replays = request / 2 * 1_000_000;
        format!(
            "{executions}idempotency_granted_total{{name=\"b\"}} 0\n\
             idempotency_replayed_total {replays}\n"
        )
    };
    let address = listen(Router::new().route("/metrics", get(metrics))).await;
    let metrics = format!("http://{address}/metrics");
    let args = [&ARGS[..], &["--metrics", &metrics]].concat();
    let served = Served::start(scratch.path(), &url, &args);
    let has_replays =
        |page: &str| largest_rate_of("replays", page).is_some_and(|rate| rate > 100_000.0);
    let page = overview(&served, has_replays);
    assert_eq!(largest_rate(&page), Some(0.0), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_endpoints_are_named_without_secrets() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let stolen = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&stolen);
    let other = Router::new().fallback(move || async move {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let other = listen(other).await;
    let (is_up, received) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Mutex::new(Vec::<HeaderMap>::new())),
    );
    let (up, heads) = (Arc::clone(&is_up), Arc::clone(&received));
    let moved = move |head: HeaderMap| async move {
        heads.lock().expect("no panic").push(head);
        if up.load(Ordering::Relaxed) {
            return "idempotency_granted_total 1\n".into_response();
        }
        let location = format!("http://{other}/metrics");
        (StatusCode::FOUND, [(LOCATION, location)]).into_response()
    };
    let moved = listen(Router::new().route("/hush", get(moved))).await;
    let page = Router::new().fallback(async || Html("<script>alert(1)</script>\n"));
    let page = listen(page).await;
    // It accepts connections and sends nothing.
    let stalled = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    // Without a listener, the port rejects connections.
    let closed = TcpSocket::new_v4().expect("a socket");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    closed.bind(any_port).expect("a port");
    let addresses = [
        moved,
        page,
        stalled.local_addr().expect("an address"),
        closed.local_addr().expect("an address"),
    ];
    let urls = addresses.map(|it| format!("http://alice:hush@{it}/hush?token=hush"));
    let log = File::create(scratch.file("log")).expect("a file");
    let served = Served::start_with(scratch.path(), &url, &ARGS, |command| {
        command.env("IDEMPOTENCY_METRICS", urls.join(" "));
        command.stderr(log);
    });
    let page = overview(&served, |page| page.matches("No metrics of").count() == 4);
    for (address, reason) in addresses.iter().zip([
        "status 302.",
        "the response has none of the counters of requests.",
        "no whole response within 5s.",
        "no connection: Connection refused",
    ]) {
        let note = format!("No metrics of http://{address} since 20");
        let (_, note) = page
            .split_once(&note)
            .unwrap_or_else(|| panic!("{note}: {page}"));
        let (note, _) = note.split_once("</p>").expect("an end");
        assert!(note.contains(&format!("Z: {reason}")), "{note}");
    }
    assert!(page.contains("the first point follows"), "{page}");
    assert!(!page.contains("<script>alert"), "{page}");
    // The response with counters ends the outage of one endpoint.
    is_up.store(true, Ordering::Relaxed);
    let later = overview(&served, |page| page.matches("No metrics of").count() == 3);
    let events = fs::read_to_string(scratch.file("log")).expect("a log");
    let failed = events.matches("metrics of an endpoint cannot be read");
    assert_eq!(failed.count(), 4, "{events}");
    let again = events.matches("metrics of an endpoint are read again");
    assert_eq!(again.count(), 1, "{events}");
    for shown in [&page, &later, &events] {
        assert!(!shown.contains("hush"), "{shown}");
        assert!(!shown.contains("alice:"), "{shown}");
    }
    assert_eq!(stolen.load(Ordering::Relaxed), 0);
    let received = received.lock().expect("no panic");
    for head in &*received {
        // alice:hush
        assert_eq!(head["authorization"], "Basic YWxpY2U6aHVzaA==");
        assert_eq!(head["host"], moved.to_string());
    }
    assert!(received.len() >= 2, "{}", received.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_with_tls_needs_trusted_certificate() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let certificates = Certificates::make(scratch.path());
    let chain = CertificateDer::pem_file_iter(certificates.certificate()).expect("a file");
    let chain = chain.collect::<Result<Vec<_>, _>>().expect("PEM");
    let key = PrivateKeyDer::from_pem_file(certificates.key()).expect("PEM");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth();
    let config = config.with_single_cert(chain, key).expect("a certificate");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await?;
                stream.read_u8().await?;
                stream.write_all(RESPONSE).await?;
                stream.shutdown().await
            });
        }
    });
    let metrics = format!("https://{address}/metrics");
    let args = [&ARGS[..], &["--metrics", &metrics]].concat();
    let served = Served::start(scratch.path(), &url, &args);
    let page = overview(&served, |page| page.contains("No metrics of"));
    assert!(page.contains("Z: no connection: "), "{page}");
    assert!(page.contains("UnknownIssuer"), "{page}");
    let served = Served::start_with(scratch.path(), &url, &args, |command| {
        command.env("SSL_CERT_FILE", certificates.ca());
    });
    let page = overview(&served, |page| page.contains("executions: latest 0"));
    assert!(!page.contains("No metrics of"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_of_metrics_are_refused() {
    let scratch = Scratch::new();
    let (url, _, _) = store(&scratch).await;
    let serve = ["serve", "--read-only", "--listen", "127.0.0.1:0"];
    let many = "http://hush/ ".repeat(33);
    for (args, expected) in [
        (
            ["--metrics", "ftp://alice:hush@a/hush"],
            "URL 1 of --metrics: expected http://HOST:PORT/PATH",
        ),
        (
            ["--metrics", "http://a/hush http://a:hush"],
            "URL 2 of --metrics: expected http://HOST:PORT/PATH",
        ),
        (
            ["--metrics", "http://a/hush http://a/hush"],
            "URL 2 of --metrics occurs twice",
        ),
        (
            ["--metrics", &*many],
            "expected at most 32 URLs of --metrics, found 33",
        ),
        (["--chart-window", "59s"], "expected at least 1m"),
        (["--chart-window", "soon"], "expected"),
    ] {
        let ran = run_in(scratch.path(), &url, &[&serve[..], &args].concat());
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
        assert!(!ran.err.contains("hush"), "{ran:?}");
    }
    let mut help = command(scratch.path(), &url);
    help.args(["serve", "--help"]);
    help.env("IDEMPOTENCY_METRICS", "http://alice:hush@a/");
    let help = help.output().expect("the tool runs");
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(text.contains("IDEMPOTENCY_METRICS"), "{text}");
    assert!(!text.contains("hush"), "{text}");
}

const RESPONSE: &[u8] =
    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nidempotency_granted_total 1\n";
