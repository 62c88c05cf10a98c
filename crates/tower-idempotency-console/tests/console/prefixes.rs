//! The console below prefixes: each link of each page leads to a page.

use std::{collections::BTreeSet, time::Duration};

use axum::Router;
use http::Method;
use tests::scratch::Scratch;
use tower_idempotency::{MemoryStore, inspect::Inspector};
use tower_idempotency_console::{Console, audit::AuditLog};

use crate::harness::{Keys, access, listen, send};

/// Returns the path to which a relative link of a page leads (RFC 3986, section 5.2).
fn join(page: &str, link: &str) -> String {
    let page = page.split(['?', '#']).next().unwrap_or_default();
    let (path, query) = match link.split_once('?') {
        Some((path, query)) => (path, format!("?{query}")),
        None => (link, String::new()),
    };
    let mut segments: Vec<_> = page.split('/').collect();
    segments.pop();
    for segment in path.split('/') {
        match segment {
            "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let mut joined = segments.join("/");
    if path.ends_with("./") || path.ends_with("..") {
        joined.push('/');
    }
    format!("{}{query}", joined.replace("//", "/"))
}

fn links(text: &str) -> Vec<String> {
    let mut links = Vec::new();
    for attribute in ["href=\"", "src=\"", "action=\""] {
        for rest in text.split(attribute).skip(1) {
            let link = rest.split('"').next().unwrap_or_default();
            links.push(link.replace("&#38;", "&").replace("&amp;", "&"));
        }
    }
    links.retain(|link| !link.starts_with('#') && !link.starts_with("data:"));
    links
}

#[tokio::test]
async fn links_work_below_each_prefix() {
    let (store, scratch) = (MemoryStore::new().with_details(), Scratch::new());
    Keys::create(&store).await;
    let console = || {
        Console::new(Inspector::new(store.clone()), access)
            .with_refresh(Duration::from_millis(100))
            .with_audit_log(AuditLog::new(scratch.file("audit.jsonl")))
            .into_router()
    };
    let app = Router::new()
        .nest_service("/ops/idempotency", console())
        .nest_service("/console", console())
        .nest("/nested", console());
    let address = listen(app).await;
    for start in [
        "/ops/idempotency",
        "/ops/idempotency/",
        "/console",
        "/console/",
        "/nested",
    ] {
        let prefix = start.trim_end_matches('/');
        let (mut waiting, mut seen) = (vec![start.to_owned()], BTreeSet::new());
        while let Some(page) = waiting.pop() {
            if !seen.insert(page.clone()) || seen.len() > 60 {
                continue;
            }
            let response = send(address, Method::GET, &page, &[], "").await;
            // The form of ticked rows has nothing ticked.
            let is_empty_form = page == format!("{prefix}/resolve");
            let expected = if is_empty_form { 400 } else { 200 };
            assert_eq!(response.status, expected, "{start}: {page}");
            for link in links(&response.text) {
                assert!(link.starts_with('.'), "{page} has {link}");
                let path = join(&page, &link);
                assert!(
                    path.starts_with(prefix),
                    "{page} has {link}, which leads to {path}"
                );
                let is_form = path.ends_with("/resolve") && page.contains("how=");
                if !is_form && !path.contains("/body") {
                    waiting.push(path);
                }
            }
        }
        assert!(seen.len() > 20, "{start}: {seen:?}");
    }
}
