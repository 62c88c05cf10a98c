use std::{
    convert::Infallible,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use ::tests::wire::full_listener;
use axum::{
    Router,
    body::Body,
    response::{Html, Redirect},
    routing::get,
};
use futures_util::{StreamExt as _, stream};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::oneshot,
};

use super::*;

/// Longer than any response takes.
const LONG: Duration = Duration::from_secs(600);

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

fn target(address: SocketAddr, path: &str) -> Target {
    Target::parse(&format!("http://{address}{path}"), None).expect("a URL")
}

/// Returns a port without a listener, which rejects connections while the socket exists.
fn closed_port() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("a socket");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any_port).expect("a port");
    let address = socket.local_addr().expect("an address");
    (socket, address)
}

/// Returns the reason for which there are no counters.
async fn reason(address: SocketAddr, path: &str) -> String {
    let mut target = target(address, path);
    let scraped = target.scrape(LONG).await;
    scraped.expect_err("no counters")
}

fn counters(text: &str) -> Result<RequestCounters, String> {
    let mut reader = CounterReader::new();
    reader.read(text.as_bytes()).expect("valid text");
    Ok(reader.finish().expect("counters"))
}

/// Returns a body of these pieces, and the number of pieces that the server has taken.
fn pieces(piece: &str, count: usize) -> (Body, Arc<AtomicUsize>) {
    let (piece, taken) = (Bytes::from(piece.to_owned()), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&taken);
    let pieces = stream::iter(0..count).map(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Infallible>(piece.clone())
    });
    (Body::from_stream(pieces), taken)
}

#[tokio::test]
async fn counters_of_response_are_read() {
    let granted = Arc::new(AtomicU64::new(10));
    let app = Router::new().route(
        "/metrics",
        get(move || async move {
            let granted = granted.fetch_add(5, Ordering::Relaxed);
            format!(
                "# TYPE idempotency_granted_total counter\nidempotency_granted_total {granted}\n"
            )
        }),
    );
    let mut target = target(serve(app).await, "/metrics");
    for expected in [10, 15, 20] {
        let expected = counters(&format!("idempotency_granted_total {expected}\n"));
        assert_eq!(target.scrape(LONG).await, expected);
    }
}

#[tokio::test]
async fn failures_have_reasons() {
    let text = "idempotency_granted_total 1\n";
    let broken = move || {
        let parts = [Ok(text), Err(io::Error::other("hush"))];
        Body::from_stream(stream::iter(parts))
    };
    let app = Router::new()
        .route("/metrics", get(move || async move { text }))
        .route("/moved", get(async || Redirect::temporary("/metrics")))
        .route("/page", get(async || Html("<script>alert(1)</script>\n")))
        .route("/damaged", get(async || "idempotency_granted_total <b>\n"))
        .route("/broken", get(move || async move { broken() }));
    let address = serve(app).await;
    for (path, expected) in [
        ("/hush", "status 404"),
        ("/moved", "status 307"),
        ("/page", "the response has none of the counters of requests"),
        ("/damaged", "a line of a counter is damaged"),
    ] {
        assert_eq!(reason(address, path).await, expected);
    }
    let reason_of_broken = reason(address, "/broken").await;
    let beginning = "the connection broke off: ";
    assert!(
        reason_of_broken.starts_with(beginning),
        "{reason_of_broken}"
    );
    assert!(!reason_of_broken.contains("hush"), "{reason_of_broken}");
    let (_socket, closed) = closed_port();
    let reason_of_closed = reason(closed, "/hush").await;
    assert!(
        reason_of_closed.starts_with("no connection: "),
        "{reason_of_closed}"
    );
}

#[tokio::test]
async fn stalled_response_ends() {
    let text = "idempotency_granted_total 1\n";
    let half = move || {
        let first = stream::iter([Ok::<_, Infallible>(text)]);
        Body::from_stream(first.chain(stream::pending()))
    };
    let app = Router::new()
        .route("/head", get(async || pending::<&str>().await))
        .route("/body", get(move || async move { half() }));
    let address = serve(app).await;
    for path in ["/head", "/body"] {
        let mut target = target(address, path);
        let scraped = target.scrape(Duration::from_millis(200));
        let scraped = tokio::time::timeout(LONG, scraped).await.expect("it ends");
        let reason = scraped.expect_err("no counters");
        assert_eq!(reason, "no whole response within 200ms");
    }
}

/// Each response has 100 MiB.
#[tokio::test]
async fn large_response_is_not_read_to_its_end() {
    let line = format!("{}\n", "x".repeat(32 * 1024 - 1));
    let (lines, taken_lines) = pieces(&line, 3200);
    let (line_without_end, taken_of_line) = pieces(&"x".repeat(32 * 1024), 3200);
    for (body, taken, expected) in [
        (lines, taken_lines, "the metrics are larger than 16 MiB"),
        (
            line_without_end,
            taken_of_line,
            "a line is longer than 64 KiB",
        ),
    ] {
        let body = Arc::new(Mutex::new(Some(body)));
        let app = Router::new().route(
            "/metrics",
            get(move || async move { body.lock().expect("no panic").take().expect("one request") }),
        );
        assert_eq!(reason(serve(app).await, "/metrics").await, expected);
        // The buffers of the connection have some of it.
        let taken = taken.load(Ordering::Relaxed);
        assert!(taken < 2000, "{taken} pieces of 3200");
    }
}

/// Without a limit of its own, the client would read this head.
#[tokio::test]
async fn large_head_is_rejected() {
    let head = || [("x", "x".repeat(300 * 1024))];
    let app = Router::new().route(
        "/metrics",
        get(move || async move { (head(), "idempotency_granted_total 1\n") }),
    );
    let reason = reason(serve(app).await, "/metrics").await;
    assert!(reason.starts_with("the connection broke off: "), "{reason}");
}

#[tokio::test]
async fn unfinished_lookup_is_not_repeated() {
    let text = "idempotency_granted_total 1\n";
    let app = Router::new().route("/metrics", get(move || async move { text }));
    let address = serve(app).await;
    let (_socket, closed) = closed_port();
    // A second lookup would find the closed port.
    let mut target = target(closed, "/metrics");
    let (found, addresses) = oneshot::channel::<Vec<SocketAddr>>();
    target.lookup = Some(tokio::spawn(async move {
        addresses.await.map_err(io::Error::other)
    }));
    for _ in 0..2 {
        let scraped = target.scrape(Duration::from_millis(100)).await;
        let reason = scraped.expect_err("no addresses");
        assert_eq!(reason, "no connection within 100ms");
    }
    found.send(vec![closed, address]).expect("the lookup waits");
    // The second address accepts the connection.
    assert_eq!(target.scrape(LONG).await, counters(text));
    // The lookup has ended, so the next request looks the host up again.
    let scraped = target.scrape(LONG).await;
    let reason = scraped.expect_err("a closed port");
    assert!(reason.starts_with("no connection: "), "{reason}");
}

/// Without another attempt, the kernel tries the first address for two minutes.
#[tokio::test]
async fn dead_address_leaves_time_for_next() {
    let text = "idempotency_granted_total 1\n";
    let app = Router::new().route("/metrics", get(move || async move { text }));
    let address = serve(app).await;
    let (listener, _queued) = full_listener().await;
    let dead = listener.local_addr().expect("an address");
    let mut only_dead = target(dead, "/metrics");
    let scraped = only_dead.scrape(Duration::from_millis(500)).await;
    let reason = scraped.expect_err("no connection");
    assert_eq!(reason, "no connection within 500ms");
    let mut target = target(dead, "/metrics");
    let addresses = vec![dead, address];
    target.lookup = Some(tokio::spawn(async move { Ok(addresses) }));
    let scraped = target.scrape(Duration::from_secs(30)).await;
    assert_eq!(scraped, counters(text));
}

#[test]
fn urls_are_parsed() {
    for (url, name, host, port, target, authorization) in [
        (
            "http://a:9464/metrics",
            "http://a:9464",
            "a",
            9464,
            "/metrics",
            None,
        ),
        ("HTTP://a", "http://a", "a", 80, "/", None),
        (
            "http://[::1]:1/m?token=hush#hush",
            "http://[::1]:1",
            "::1",
            1,
            "/m?token=hush",
            None,
        ),
        (
            "http://alice:hush%20%3A@a:1/",
            "http://a:1",
            "a",
            1,
            "/",
            // alice:hush :
            Some("Basic YWxpY2U6aHVzaCA6"),
        ),
        // hush:
        (
            "http://hush@a/",
            "http://a",
            "a",
            80,
            "/",
            Some("Basic aHVzaDo="),
        ),
    ] {
        let parsed = Target::parse(url, None).expect(url);
        assert_eq!(parsed.name, name);
        assert_eq!((&*parsed.host, parsed.port), (host, port), "{url}");
        assert_eq!(parsed.request.uri(), target);
        let headers = parsed.request.headers();
        assert_eq!(headers[HOST], name["http://".len()..], "{url}");
        let found = headers.get(AUTHORIZATION);
        assert_eq!(found.map(|it| it.to_str().expect("text")), authorization);
    }
    let connector = crate::stream::connector().expect("TLS");
    let parsed = Target::parse("https://a.test/m", Some(&connector)).expect("a URL");
    assert_eq!((&*parsed.name, parsed.port), ("https://a.test", 443));
    assert!(parsed.tls.is_some());
    for url in [
        "hush",
        "/hush",
        "ftp://a/hush",
        "http://",
        "http:///hush",
        "http://a:hush",
        "http://a:99999/hush",
        "http://a:/hush",
        "http://a:%zz@a/hush",
        "http://a b/hush",
        // The password is `123/hush`, `123?hush` or `123#hush`.
        "http://alice:123/hush@a/",
        "http://alice:123?hush@a/",
        "http://alice:123#hush@a/",
        // There is no TLS without its client.
        "https://a/hush",
    ] {
        assert!(Target::parse(url, None).is_none(), "{url}");
    }
}

#[tokio::test]
async fn endpoints_are_limited_and_distinct() {
    let urls = |count: usize| {
        let urls = (0..count).map(|n| format!("http://127.0.0.1:9/hush{n}"));
        urls.collect::<Vec<_>>()
    };
    let failure = |urls: &[String]| match Targets::parse(urls) {
        Ok(_) => panic!("the URLs are wrong"),
        Err(failure) => failure.to_string(),
    };
    assert_eq!(
        failure(&urls(33)),
        "expected at most 32 URLs of --metrics, found 33"
    );
    for same in [
        "http://replica/hush",
        "HTTP://alice:hush@REPLICA:80/hush#hush",
    ] {
        let twice = ["http://replica/hush", "http://replica/", same];
        assert_eq!(
            failure(&twice.map(str::to_owned)),
            "URL 3 of --metrics occurs twice, and its requests would count twice"
        );
    }
    let distinct = [
        "http://a/hush",
        "http://b/hush",
        "http://a:81/hush",
        "https://a:80/hush",
        "http://a/HUSH",
        "http://a/hush?a",
    ];
    assert!(Targets::parse(&distinct.map(str::to_owned)).is_ok());
    let wrong = [urls(1), vec!["hush".to_owned()]].concat();
    assert_eq!(failure(&wrong), format!("URL 2 of --metrics: {WRONG_URL}"));
    let most = Targets::parse(&urls(32)).expect("valid URLs");
    let (_, tasks) = most.start(LONG).expect("endpoints");
    assert_eq!(tasks.len(), 32);
    let none = Targets::parse(&[String::new()]).expect("no URL");
    assert!(none.start(LONG).is_none());
}
