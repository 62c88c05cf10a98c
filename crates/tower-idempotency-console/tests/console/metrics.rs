//! `/metrics`: the series of a scrape, and the texts that it must not contain.

use std::{collections::BTreeSet, sync::atomic::Ordering, time::Duration};

use axum::{Router, body::Body};
use futures_util::future::join_all;
use http::Request;
use http_body_util::BodyExt as _;
use tests::metrics_page;
use tower::ServiceExt as _;
use tower_idempotency::inspect::Inspector;
use tower_idempotency_console::Console;

use crate::harness::{Counted, Keys, Server, access};

async fn scrape(server: &Server) -> String {
    let response = server.get("/metrics").await;
    assert_eq!(response.status, 200, "{}", response.text);
    let content_type = &response.headers["content-type"];
    assert_eq!(content_type, "text/plain; version=0.0.4; charset=utf-8");
    metrics_page::check(&response.text);
    response.text
}

fn assert_has(page: &str, sample: &str) {
    assert!(page.lines().any(|line| line == sample), "{sample}: {page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scrape_counts_entries_and_decisions() {
    let server = Server::start().await;
    let page = scrape(&server).await;
    // Each counter exists before its first event.
    let zeros = page.matches("idempotency_console_resolutions_total{");
    assert_eq!(zeros.count(), 24, "{page}");
    assert_has(&page, r#"idempotency_store_entries{state="orphaned"} 0"#);
    let keys = Keys::create(&server.store.store).await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    let fields = [("seen", &*seen), ("how", "retry"), ("reason", "ticket 17")];
    let path = format!("/entries/{id}/resolve");
    assert_eq!(server.post(&path, &fields).await.status, 200);
    assert_eq!(server.post(&path, &fields).await.status, 409);
    let page = scrape(&server).await;
    for sample in [
        "idempotency_store_up 1",
        "idempotency_store_entries_limit 1000",
        r#"idempotency_store_entries{state="orphaned"} 1"#,
        r#"idempotency_store_entries{state="needs-attention"} 1"#,
        r#"idempotency_store_oldest_entry_age_is_exact{state="orphaned"} 1"#,
        r#"idempotency_console_resolutions_total{decision="retry",outcome="applied"} 1"#,
        r#"idempotency_console_resolutions_total{decision="free",outcome="applied"} 0"#,
        r#"idempotency_console_responses_total{status="4xx"} 1"#,
    ] {
        assert_has(&page, sample);
    }
}

/// Clients choose keys, principals and operations, and each value of a label is a series.
#[tokio::test(flavor = "multi_thread")]
async fn scrape_has_no_value_of_client() {
    let server = Server::start().await;
    let series = |page: &str| -> BTreeSet<String> {
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        let names = samples.filter_map(|line| line.rsplit_once(' '));
        names.map(|(series, _)| series.to_owned()).collect()
    };
    let keys = Keys::create(&server.store.store).await;
    // A scrape may share a query from before.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let first = scrape(&server).await;
    for path in ["/nowhere/secret", "/entries?operation=secret&owner=secret"] {
        server.get(path).await;
    }
    Keys::create(&server.store.store).await;
    // Until the values are of a later query.
    let mut page = scrape(&server).await;
    while !page.contains("idempotency_store_entries{state=\"orphaned\"} 2") {
        tokio::time::sleep(Duration::from_millis(10)).await;
        page = scrape(&server).await;
    }
    assert_eq!(series(&first), series(&page));
    for secret in [
        "secret",
        "alice",
        "host-1",
        "payments",
        "POST",
        &keys.orphaned.id.to_hex()[..8],
    ] {
        assert!(!page.contains(secret), "{secret}: {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scrape_needs_access() {
    let server = Server::start().await;
    for (actor, status) in [("none", 403), ("read:prometheus", 200)] {
        let headers = [("x-actor", actor)];
        let response = server
            .send(http::Method::GET, "/metrics", &headers, "")
            .await;
        assert_eq!(response.status, status, "{}", response.text);
    }
}

/// The table of the documents and a scrape list the same metrics.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_documented() {
    let server = Server::start().await;
    Keys::create(&server.store.store).await;
    let page = scrape(&server).await;
    let document = include_str!("../../../../docs/operations/console.md");
    let rows = document
        .lines()
        .filter_map(|row| row.strip_prefix("| `idempotency_"));
    let documented: BTreeSet<_> = rows
        .map(|row| {
            let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`'));
            let name = cells.next().unwrap_or_default();
            format!("idempotency_{name} {}", cells.next().unwrap_or_default())
        })
        .collect();
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let listed: BTreeSet<_> = types.map(str::to_owned).collect();
    assert_eq!(listed, documented);
}

/// Returns a console without a socket, on a store whose summaries take this long, and the store.
fn with_slow_store(summary: Duration) -> (Router, Counted) {
    let mut store = Counted::new();
    store.summary_delay = summary;
    let console = Console::new(Inspector::new(store.clone()), access);
    (console.into_router(), store)
}

async fn get(app: &Router, path: &str) -> String {
    let req = Request::get(path).body(Body::empty()).expect("a request");
    let response = app.clone().oneshot(req).await.unwrap();
    let body = response.into_body().collect().await.expect("a body");
    String::from_utf8_lossy(&body.to_bytes()).into_owned()
}

#[tokio::test(start_paused = true)]
async fn slow_query_is_shared() {
    let (app, store) = with_slow_store(Duration::from_secs(4));
    join_all((0..8).map(|_| get(&app, "/api/v1/summary"))).await;
    assert_eq!(store.summaries.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn scrape_reports_unresponsive_store() {
    let (app, _) = with_slow_store(Duration::from_secs(3600));
    let began = tokio::time::Instant::now();
    let page = get(&app, "/metrics").await;
    assert_has(&page, "idempotency_store_up 0");
    assert!(!page.contains("idempotency_store_entries{"), "{page}");
    // The default limit of Prometheus is 10 s.
    assert!(began.elapsed() < Duration::from_secs(9));
}
