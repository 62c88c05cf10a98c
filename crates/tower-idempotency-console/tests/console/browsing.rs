//! Every page, without scripts.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, NeedsAttention, Principal, Store as _, inspect::Resolution,
};

use crate::harness::{Fault, Keys, Server, claim, complete, orphan};

#[tokio::test]
async fn every_route_has_strict_headers() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let id = keys.completed.id.to_hex();
    for (path, status) in [
        ("/".to_owned(), 200),
        ("/?reload=1".to_owned(), 200),
        ("/entries".to_owned(), 200),
        ("/entries?state=completed".to_owned(), 200),
        (format!("/entries/{id}"), 200),
        (format!("/entries/{id}/body"), 200),
        (format!("/entries/{id}/resolve?how=delete-record"), 200),
        (format!("/entries/{id}/resolve?how=free"), 400),
        ("/resolve".to_owned(), 400),
        ("/find".to_owned(), 200),
        ("/find?id=0123456789".to_owned(), 404),
        ("/audit".to_owned(), 200),
        ("/healthz".to_owned(), 200),
        ("/assets/none.js".to_owned(), 404),
        ("/nowhere".to_owned(), 404),
        ("/entries/".to_owned(), 404),
        (format!("/entries/{}", "0".repeat(64)), 404),
        ("/api/v1/summary".to_owned(), 200),
        ("/api/v1/entries?state=completed".to_owned(), 200),
        (format!("/api/v1/entries/{id}"), 200),
        ("/api/v1/audit".to_owned(), 200),
        ("/api/v1/nowhere".to_owned(), 404),
    ] {
        let response = server.get(&path).await;
        assert_eq!(response.status, status, "{path}: {}", response.text);
        let header = |name: &str| response.headers[name].to_str().expect("text").to_owned();
        let policy = header("content-security-policy");
        assert!(policy.contains("default-src 'none'"), "{path}: {policy}");
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
        assert!(
            policy.contains("frame-ancestors 'none'"),
            "{path}: {policy}"
        );
        assert_eq!(header("cache-control"), "no-store", "{path}");
        assert_eq!(header("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(header("referrer-policy"), "same-origin", "{path}");
        if path.starts_with("/api/") {
            assert_eq!(header("content-type"), "application/json", "{path}");
        } else if response.text.starts_with("<!doctype") {
            // No page has code or styles of its own.
            assert!(!response.text.contains("<style") && !response.text.contains(" style="));
            assert!(!response.text.contains("<script>") && !response.text.contains(" onclick="));
            assert!(response.text.contains("<html lang=\"en\">"), "{path}");
        }
    }
    let wrong = server
        .send(
            Method::DELETE,
            "/entries",
            &[("sec-fetch-site", "none")],
            "",
        )
        .await;
    assert_eq!(wrong.status, StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test]
async fn overview_counts_each_state() {
    let server = Server::start().await;
    Keys::create(&server.store.store).await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    let page = server.get("/").await.text;
    assert_eq!(page.matches("<strong>1</strong>").count(), 4, "{page}");
    assert!(
        page.contains("No data: this console has no metrics of a service."),
        "{page}"
    );
    assert!(page.contains("Keys in the store"), "{page}");
    let api = server.get("/api/v1/summary").await.text;
    for state in ["in-progress", "orphaned", "needs-attention", "completed"] {
        let count = format!("\"{state}\":{{\"count\":1,\"is_exact\":true}}");
        assert!(api.contains(&count), "{api}");
    }
}

#[tokio::test]
async fn entry_shows_record_without_body() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let page = server
        .get(&format!("/entries/{}", keys.completed.id.to_hex()))
        .await
        .text;
    assert!(
        page.contains("status 201") && page.contains("/payments/7"),
        "{page}"
    );
    assert!(page.contains("4 bytes") && !page.contains("paid"), "{page}");
    let page = server
        .get(&format!("/entries/{}", keys.attention.id.to_hex()))
        .await
        .text;
    assert!(
        page.contains("refund-failed") && page.contains("refund re_7"),
        "{page}"
    );
    let page = server
        .get(&format!("/entries/{}/body", keys.attention.id.to_hex()))
        .await;
    assert_eq!(page.status, 404);
}

#[tokio::test]
async fn filters_are_links() {
    let server = Server::start().await;
    Keys::create(&server.store.store).await;
    let query = "state=orphaned&operation=POST+%2Forders";
    let page = server.get(&format!("/entries?{query}")).await.text;
    assert_eq!(page.matches("name=\"seen\"").count(), 1, "{page}");
    assert!(page.contains("value=\"POST /orders\""), "{page}");
    assert!(
        page.contains("?back=state%3Dorphaned%26operation%3DPOST%2B%252Forders"),
        "{page}"
    );
    let none = server
        .get("/entries?state=orphaned&operation=GET")
        .await
        .text;
    assert!(none.contains("No entry has the state orphaned"), "{none}");
    let old = server
        .get("/entries?state=in-progress&older=10m")
        .await
        .text;
    assert_eq!(old.matches("name=\"seen\"").count(), 0);
}

#[tokio::test]
async fn entry_is_found_by_key_and_by_digits() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_principal(Principal::authorization())
        .with_namespace("payments");
    let ids = layer.key_ids("key-1", &[b"Bearer hush"]).expect("a key");
    let server = Server::start_with(|it| it.with_layer(layer)).await;
    let mut claim = crate::harness::claim("POST /payments");
    claim.id = ids[0];
    crate::harness::acquire(&server.store.store, &claim).await;
    let hex = claim.id.to_hex();
    let fields = [("key", "key-1"), ("principal", "Bearer hush")];
    let found = server.post("/find", &fields).await;
    assert_eq!(found.status, 200);
    assert!(
        found.text.contains(&hex) && !found.text.contains("hush"),
        "{}",
        found.text
    );
    // The line of a log has the quotes of the header.
    let fields = [("key", " \"key-1\" "), ("principal", "Bearer hush")];
    assert!(server.post("/find", &fields).await.text.contains(&hex));
    let other = server
        .post("/find", &[("key", "key-1"), ("principal", "Bearer x")])
        .await;
    assert_eq!(other.status, 404);
    let digits = server.get(&format!("/find?id={}", &hex[..9])).await;
    assert!(digits.text.contains(&hex), "{}", digits.text);
    let whole = server.get(&format!("/find?id={hex}")).await;
    assert!(whole.text.contains(&hex));
}

#[tokio::test]
async fn assets_are_named_by_contents() {
    let server = Server::start().await;
    let page = server.get("/").await.text;
    for (before, media_type) in [
        (
            "rel=\"icon\" type=\"image/svg+xml\" href=\"./assets/",
            "image/svg+xml",
        ),
        (
            "rel=\"stylesheet\" href=\"./assets/",
            "text/css; charset=utf-8",
        ),
        ("src=\"./assets/", "text/javascript; charset=utf-8"),
    ] {
        let (_, name) = page.split_once(before).expect("an asset");
        let name = name.split('"').next().expect("an end");
        let asset = server.get(&format!("/assets/{name}")).await;
        assert_eq!(asset.headers["content-type"], media_type);
        let control = asset.headers["cache-control"].to_str().expect("text");
        assert!(control.contains("immutable"), "{control}");
        assert!(!media_type.contains("javascript") || asset.text.len() < 4096);
    }
}

/// A search that the time limit ended does not prove that there is no entry.
#[tokio::test]
async fn incomplete_search_offers_to_continue() {
    let server = Server::start().await;
    server.store.set_fault(Fault::EndlessList);
    let page = server.get("/find?id=0123456789").await;
    assert_eq!(page.status, 200, "{}", page.text);
    assert!(
        page.text.contains("The search is incomplete"),
        "{}",
        page.text
    );
    assert!(!page.text.contains("no such entry"), "{}", page.text);
    let (_, query) = page
        .text
        .split_once("entries?state=orphaned")
        .expect("a link");
    let (query, _) = query.split_once('"').expect("an end");
    assert!(
        query.contains("id=0123456789") && query.contains("after="),
        "{query}"
    );
}

/// Digits find only listed entries, and a whole id finds each entry.
#[tokio::test]
async fn absent_id_has_reason() {
    let server = Server::start().await;
    let (whole, digits) = ("0".repeat(64), "0".repeat(8));
    for (lists_all, id, reason) in [
        (true, &whole, "The store has no such entry."),
        (true, &digits, "No listed entry has this id."),
        (false, &digits, "No unresolved entry has this id."),
        (false, &whole, "The store has no such entry."),
    ] {
        if !lists_all {
            server.store.set_fault(Fault::UnlistedCompleted);
        }
        let page = server.get(&format!("/find?id={id}")).await;
        assert_eq!(page.status, 404, "{id}: {}", page.text);
        assert!(page.text.contains(reason), "{id}: {}", page.text);
    }
}

/// A retry of an execution whose response was not recorded gets no response.
#[tokio::test]
async fn page_of_tombstone_shows_rejection() {
    let server = Server::start().await;
    let claim = claim("POST /payments");
    crate::harness::acquire(&server.store.store, &claim).await;
    let mut response = http::Response::new(bytes::Bytes::new());
    for _ in 0..129 {
        let lines = response.headers_mut();
        lines.append("x-total", http::HeaderValue::from_static("3"));
    }
    complete(&server.store.store, &claim, response).await;
    let id = claim.id.to_hex();
    for path in ["", "/resolve?how=delete-record"] {
        let page = server.get(&format!("/entries/{id}{path}")).await.text;
        assert!(page.contains("409 response-not-retained"), "{page}");
        assert!(!page.contains("gets the recorded response"), "{page}");
    }
}

/// The code and the reason of such a record are no evidence.
#[tokio::test]
async fn page_of_damaged_attention_has_warning() {
    let server = Server::start().await;
    let claim = claim("POST /payments");
    crate::harness::acquire(&server.store.store, &claim).await;
    let attention = NeedsAttention::new("refund-failed").with_reason("refund re_7");
    let record = Resolution::NeedsAttention(attention).record(&claim.id);
    let (record, retention) = record.expect("it stores a record");
    let mut record = record.to_vec();
    *record.last_mut().expect("a byte") ^= 1;
    let (store, lease) = (&server.store.store, claim.lease_ref(1));
    let stored = store.complete(&lease, record.into(), retention).await;
    stored.expect("memory");
    let id = claim.id.to_hex();
    for path in ["", "/resolve?how=free"] {
        let page = server.get(&format!("/entries/{id}{path}")).await.text;
        assert!(page.contains("do not trust its code"), "{page}");
    }
    let json = server.get(&format!("/api/v1/entries/{id}")).await.text;
    assert!(json.contains("expected the checksum"), "{json}");
}

#[tokio::test]
async fn unknown_count_is_urgent() {
    let server = Server::start().await;
    server.store.set_fault(Fault::UnknownCounts);
    // The counts from before the fault are old then.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let page = server.get("/").await.text;
    assert_eq!(
        page.matches("<strong>unknown</strong>").count(),
        2,
        "{page}"
    );
    assert_eq!(page.matches("card urgent").count(), 2, "{page}");
    let metrics = server.get("/metrics").await.text;
    assert!(
        !metrics.contains("idempotency_store_entries{state=\"orphaned\"}"),
        "{metrics}"
    );
    let sample = "idempotency_store_entries_is_exact{state=\"orphaned\"} 0";
    assert!(metrics.contains(sample), "{metrics}");
}

/// The lease of the first entry is renewed between two pages of the store.
#[tokio::test]
async fn repeated_entry_is_listed_once() {
    let server = Server::start().await;
    for n in 0..3 {
        orphan(&server.store.store, &format!("POST /orders/{n}")).await;
    }
    server.store.set_fault(Fault::RepeatedEntry);
    for (path, row) in [
        ("/entries?state=orphaned", "name=\"seen\""),
        ("/api/v1/entries?state=orphaned", "\"seen\""),
    ] {
        let began = Instant::now();
        // A console that stalls shows the first page of the store alone.
        loop {
            let page = server.get(path).await.text;
            let rows = page.matches(row).count();
            if rows == 3 {
                break;
            }
            let has_time = began.elapsed() < Duration::from_secs(60);
            assert!(rows < 3 && has_time, "{rows} rows: {page}");
        }
    }
    // The counts from before the fault are old then.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let metrics = server.get("/metrics").await.text;
    let sample = "idempotency_store_oldest_entry_age_is_exact{state=\"orphaned\"} 0";
    assert!(metrics.contains(sample), "{metrics}");
}

/// Stores can share a log. A key has the same ID in each store, so the page of an entry may have lines of another one.
#[tokio::test]
async fn audit_lines_name_store() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let id = keys.orphaned.id.to_hex();
    let line = format!(
        r#"{{"line":"outcome","store":"redis://staging/0","what":"free","outcome":"applied","id":"{id}"}}"#
    );
    std::fs::write(server.log(), line + "\n").expect("the log");
    for page in ["/", "/audit", &format!("/entries/{id}")] {
        let text = server.get(page).await.text;
        assert!(text.contains("redis://staging/0"), "{page}: {text}");
    }
}
