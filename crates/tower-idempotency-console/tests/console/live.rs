//! Live counts, and calls of the store.

use std::{
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::{Router, body::Body, response::Response};
use http::Request;
use http_body_util::BodyExt as _;
use tests::scratch::Scratch;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    time::{sleep, timeout},
};
use tower::ServiceExt as _;
use tower_idempotency::inspect::{Inspect as _, Inspector};
use tower_idempotency_console::{
    Console,
    audit::AuditLog,
    scrape::{CounterReader, RequestCounters, ScrapedMetrics},
};

use crate::harness::{Counted, Keys, Server, access, form, orphan};

const LONG: Duration = Duration::from_secs(60);

async fn watch(server: &Server) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(server.address)
        .await
        .expect("it listens");
    let request = b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(request).await.expect("a connection");
    BufReader::new(stream)
}

/// Reads until a line contains the text. Returns `false` at the end of the stream.
async fn read_until(reader: &mut BufReader<TcpStream>, text: &str) -> bool {
    let read = async {
        let mut line = String::new();
        while reader.read_line(&mut line).await.expect("a connection") > 0 {
            if line.contains(text) {
                return true;
            }
            line.clear();
        }
        false
    };
    timeout(LONG, read).await.expect("an event")
}

#[tokio::test]
async fn browsers_share_one_query() {
    let server =
        Server::start_with(|console| console.with_refresh(Duration::from_millis(400))).await;
    let mut browsers = Vec::new();
    for _ in 0..40 {
        browsers.push(watch(&server).await);
    }
    for browser in &mut browsers {
        assert!(read_until(browser, "event: counts").await);
    }
    Keys::create(&server.store.store).await;
    for browser in &mut browsers {
        assert!(read_until(browser, "<strong>1</strong>").await);
    }
    // Each event is one query, whatever the number of browsers is. Each browser got at least two events.
    let queries = server.store.summaries.load(Ordering::Relaxed);
    assert!(queries >= 2, "{queries}");
    let events = 40 * 2;
    assert!(
        queries < events,
        "{queries} queries for at least {events} events"
    );
}

/// Returns a console without a socket, and its store. It takes one sample a day for the charts.
fn without_socket() -> (Router, Counted) {
    let store = Counted::new();
    let console = Console::new(Inspector::new(store.clone()), access);
    let console = console.with_chart_window(Duration::from_secs(60 * 60 * 24 * 60));
    (console.into_router(), store)
}

/// Opens the stream of the counts without a socket.
async fn open_stream(app: &Router) -> Response {
    let req = Request::get("/events").body(Body::empty());
    let res = app.clone().oneshot(req.expect("a request")).await;
    res.expect("a response")
}

#[tokio::test(start_paused = true)]
async fn store_is_not_queried_without_browsers() {
    let (app, store) = without_socket();
    let mut browsers = Vec::new();
    for _ in 0..40 {
        browsers.push(open_stream(&app).await);
    }
    for browser in &mut browsers {
        let event = timeout(LONG, browser.body_mut().frame()).await;
        let event = event.expect("an event").expect("an open stream");
        let data = event.expect("an event").into_data().expect("data");
        let text = String::from_utf8_lossy(&data);
        assert!(text.contains("event: counts"), "{text}");
    }
    let queries = || store.summaries.load(Ordering::Relaxed);
    let before = queries();
    sleep(LONG).await;
    assert!(queries() > before, "the store is queried for browsers");
    drop(browsers);
    // The query for the last browser ends.
    sleep(LONG).await;
    let before = queries();
    sleep(LONG).await;
    assert_eq!(queries(), before);
}

#[tokio::test]
async fn watchers_are_limited() {
    let server = Server::start().await;
    let mut browsers = Vec::new();
    for _ in 0..100 {
        let mut browser = watch(&server).await;
        assert!(read_until(&mut browser, "200 OK").await);
        browsers.push(browser);
    }
    let mut refused = watch(&server).await;
    assert!(read_until(&mut refused, "503").await);
}

/// Browsers that read nothing.
#[tokio::test(start_paused = true)]
async fn unread_streams_end() {
    let (app, store) = without_socket();
    let mut unread = Vec::new();
    for _ in 0..100 {
        let res = open_stream(&app).await;
        assert_eq!(res.status(), 200);
        assert_eq!(res.headers()["x-accel-buffering"], "no");
        unread.push(res);
    }
    assert_eq!(open_stream(&app).await.status(), 503);
    sleep(Duration::from_secs(301)).await;
    // The store is no longer queried for them.
    let before = store.summaries.load(Ordering::Relaxed);
    sleep(Duration::from_secs(301)).await;
    assert_eq!(store.summaries.load(Ordering::Relaxed), before);
    let res = open_stream(&app).await;
    assert_eq!(res.status(), 200);
    let body = timeout(LONG * 10, res.into_body().collect()).await;
    let body = body.expect("the stream ends").expect("events").to_bytes();
    assert!(String::from_utf8_lossy(&body).contains("event: counts"));
}

#[tokio::test]
async fn shutdown_ends_streams() {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = Server::start_with(|console| {
        console.with_shutdown(async move {
            stopped.await.ok();
        })
    })
    .await;
    let mut browser = watch(&server).await;
    assert!(read_until(&mut browser, "event: counts").await);
    stop.send(()).expect("the console waits");
    let ended = async {
        let mut line = String::new();
        // The last chunk of a response has the length 0.
        while reader_line(&mut browser, &mut line).await != "0\r\n" {}
    };
    timeout(LONG, ended).await.expect("the stream ends");
}

async fn reader_line(reader: &mut BufReader<TcpStream>, line: &mut String) -> String {
    line.clear();
    let read = reader.read_line(line).await.expect("a connection");
    assert!(read > 0, "the response ends before the connection");
    line.clone()
}

#[tokio::test]
async fn metrics_are_drawn() {
    let granted = Arc::new(AtomicU64::new(10));
    let source = Arc::clone(&granted);
    let server = Server::start_with(move |console| {
        console
            .with_chart_window(Duration::from_secs(60))
            .with_metrics(move || {
                // Each sample sees ten more executions.
                let n = source.fetch_add(10, Ordering::Relaxed);
                format!(
                    "idempotency_granted_total {n}\nidempotency_refused_total{{code=\"a\"}} 1\n"
                )
            })
    })
    .await;
    let drawn = async {
        loop {
            let page = server.get("/").await.text;
            if page.contains("Requests per minute, last 1m") {
                return page;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    let page = timeout(LONG, drawn).await.expect("two samples");
    assert!(page.contains("replays: latest 0, largest 0. "), "{page}");
    assert!(page.contains("refusals: latest 0"), "{page}");
    assert!(!page.contains("executions: latest no data"), "{page}");
}

/// Reads the counters of a response.
fn read(text: &str) -> Result<RequestCounters, String> {
    let mut reader = CounterReader::new();
    reader.read(text.as_bytes()).expect("valid text");
    Ok(reader.finish().expect("counters"))
}

/// Returns the overview without a socket.
async fn overview(app: &Router) -> String {
    let req = Request::get("/").body(Body::empty()).expect("a request");
    let res = app.clone().oneshot(req).await.expect("a response");
    let body = res.into_body().collect().await.expect("a body");
    String::from_utf8_lossy(&body.to_bytes()).into_owned()
}

/// A browser disconnects during the first query after a decision. The counts from before it would be shown for half an hour.
#[tokio::test(start_paused = true)]
async fn dropped_query_leaves_counts_stale() {
    let (scratch, mut store) = (Scratch::new(), Counted::new());
    store.summary_delay = Duration::from_secs(1);
    let id = orphan(&store.store, "POST /orders").await.id;
    let app = Console::new(Inspector::new(store.clone()), access)
        .with_refresh(LONG * 60)
        .with_chart_window(LONG * 60 * 24 * 60)
        .with_audit_log(AuditLog::new(scratch.file("audit.jsonl")))
        .into_router();
    assert!(overview(&app).await.contains("<strong>1</strong>"));
    let details = store.get(&id).await.expect("memory").expect("an entry");
    let seen = details.entry.seen().to_string();
    let fields = [
        ("seen", &*seen),
        ("how", "free"),
        ("reason", "ticket 17"),
        ("confirm", "yes"),
    ];
    let req = Request::post(format!("/entries/{}/resolve", id.to_hex()))
        .header("content-type", "application/x-www-form-urlencoded")
        .header("host", "console.test")
        .header("sec-fetch-site", "same-origin")
        .body(Body::from(form(&fields)));
    let res = app.clone().oneshot(req.expect("a request")).await;
    assert_eq!(res.expect("a response").status(), 200);
    let queries = || store.summaries.load(Ordering::Relaxed);
    assert_eq!(queries(), 1);
    let dropped = timeout(Duration::from_millis(10), overview(&app)).await;
    assert!(dropped.is_err());
    assert_eq!(queries(), 2);
    let page = overview(&app).await;
    assert!(!page.contains("<strong>1</strong>"), "{page}");
}

#[tokio::test(start_paused = true)]
async fn requests_of_endpoints_are_drawn() {
    let metrics = ScrapedMetrics::new();
    let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
    let console = Console::new(Inspector::new(Counted::new()), access);
    let console = console.with_chart_window(Duration::from_secs(60));
    let app = console.with_scraped_metrics(metrics).into_router();
    // The console takes a sample each second.
    sleep(Duration::from_millis(500)).await;
    let page = overview(&app).await;
    assert!(page.contains("the first point follows"), "{page}");
    a.record(read("idempotency_granted_total 100\n"));
    b.record(read(
        "idempotency_granted_total 7\nidempotency_refused_total 3\n",
    ));
    sleep(Duration::from_secs(1)).await;
    a.record(read("idempotency_granted_total 101\n"));
    // This replica has restarted.
    b.record(read(
        "idempotency_granted_total 2\nidempotency_refused_total 0\n",
    ));
    sleep(Duration::from_secs(1)).await;
    let page = overview(&app).await;
    for line in [
        "executions: latest 180, largest 180. ",
        "replays: latest 0, largest 0. ",
        "refusals: latest 0, largest 0. ",
    ] {
        assert!(page.contains(line), "{line}: {page}");
    }
    assert!(!page.contains("No metrics of"), "{page}");
    sleep(Duration::from_secs(1)).await;
    let page = overview(&app).await;
    let line = "executions: latest 0, largest 180. ";
    assert!(page.contains(line), "{page}");
}

#[tokio::test(start_paused = true)]
async fn missing_endpoint_is_named() {
    let metrics = ScrapedMetrics::new();
    let (a, b) = (
        metrics.add_endpoint("http://a:1"),
        metrics.add_endpoint("<b>"),
    );
    let console = Console::new(Inspector::new(Counted::new()), access);
    let console = console.with_chart_window(Duration::from_secs(60));
    let app = console.with_scraped_metrics(metrics).into_router();
    a.record(read("idempotency_granted_total 100\n"));
    b.record(Err("<script>alert(1)</script>\u{202e}".to_owned()));
    sleep(Duration::from_millis(1500)).await;
    a.record(read("idempotency_granted_total 101\n"));
    sleep(Duration::from_secs(1)).await;
    let page = overview(&app).await;
    // The endpoint that responds is drawn.
    assert!(page.contains("executions: latest 60, "), "{page}");
    let note = "No metrics of &#60;b&#62; since 20";
    assert!(page.contains(note), "{page}");
    assert!(page.contains("Z: &#60;script&#62;alert(1)"), "{page}");
    assert!(!page.contains("<script>alert"), "{page}");
    assert!(!page.contains('\u{202e}'), "{page}");
    assert!(!page.contains("No metrics of http://a:1"), "{page}");
    let partial = "In 2 of 2 points, the requests of an endpoint are missing";
    assert!(page.contains(partial), "{page}");
    b.record(read("idempotency_granted_total 1\n"));
    for _ in 0..3 {
        a.record(Err("no connection".to_owned()));
    }
    let page = overview(&app).await;
    assert!(!page.contains("No metrics of &#60;b"), "{page}");
    assert!(page.contains("No metrics of http://a:1 since 20"), "{page}");
    assert!(page.contains("Z: no connection."), "{page}");
}

#[tokio::test(start_paused = true)]
async fn replica_is_replaced() {
    let metrics = ScrapedMetrics::new();
    let first = metrics.add_endpoint("http://first:1");
    let console = Console::new(Inspector::new(Counted::new()), access);
    let console = console.with_chart_window(Duration::from_secs(60));
    let app = console.with_scraped_metrics(metrics.clone()).into_router();
    first.record(read("idempotency_granted_total 100\n"));
    sleep(Duration::from_millis(1500)).await;
    first.record(read("idempotency_granted_total 101\n"));
    // The new replica has no result yet.
    let second = metrics.add_endpoint("http://second:1");
    sleep(Duration::from_secs(1)).await;
    let page = overview(&app).await;
    assert!(page.contains("executions: latest 60, "), "{page}");
    second.record(read("idempotency_granted_total 7\n"));
    first.record(Err("no connection".to_owned()));
    drop(first);
    second.record(read("idempotency_granted_total 9\n"));
    sleep(Duration::from_secs(1)).await;
    let page = overview(&app).await;
    let line = "executions: latest 120, largest 120. ";
    assert!(page.contains(line), "{page}");
    assert!(!page.contains("No metrics of"), "{page}");
    assert!(!page.contains("are missing"), "{page}");
}
