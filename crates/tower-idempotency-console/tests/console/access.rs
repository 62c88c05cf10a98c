//! Rights, and requests of other sites.

use http::Method;
use tower_idempotency::inspect::State;

use crate::harness::{Keys, Server, form};

const PAGES: [&str; 11] = [
    "/",
    "/entries",
    "/entries/ID",
    "/entries/ID/body",
    "/entries/ID/resolve?how=retry",
    "/resolve?how=retry&seen=SEEN",
    "/find",
    "/audit",
    "/events",
    "/api/v1/summary",
    "/api/v1/entries/ID",
];

#[tokio::test]
async fn visitor_without_access_sees_nothing() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    for page in PAGES {
        let page = page.replace("ID", &id).replace("SEEN", &seen);
        let response = server
            .send(Method::GET, &page, &[("x-actor", "none")], "")
            .await;
        assert_eq!(response.status, 403, "{page}");
        assert!(!response.text.contains(&id), "{page}: {}", response.text);
        assert!(
            !response.text.contains("payments"),
            "{page}: {}",
            response.text
        );
    }
    // A load balancer has no credentials.
    let health = server
        .send(Method::GET, "/healthz", &[("x-actor", "none")], "")
        .await;
    assert_eq!((health.status.as_u16(), &*health.text), (200, "ok\n"));
}

#[tokio::test]
async fn reader_changes_nothing() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    let reader = [
        ("x-actor", "read:bob"),
        ("content-type", "application/json"),
    ];
    let page = server
        .send(Method::GET, &format!("/entries/{id}"), &reader, "")
        .await;
    assert_eq!(page.status, 200);
    assert!(!page.text.contains("/resolve?how="), "{}", page.text);
    let fields = form(&[("seen", &seen), ("how", "retry"), ("reason", "x")]);
    let object = format!(r#"{{"seen":"{seen}","how":"retry","reason":"x"}}"#);
    for (method, path, body) in [
        (Method::GET, format!("/entries/{id}/resolve?how=retry"), ""),
        (Method::POST, format!("/entries/{id}/resolve"), &*fields),
        (Method::POST, "/resolve".to_owned(), &*fields),
        (
            Method::POST,
            format!("/api/v1/entries/{id}/resolve"),
            &*object,
        ),
    ] {
        let response = server.send(method, &path, &reader, body).await;
        assert_eq!(response.status, 403, "{path}: {}", response.text);
    }
    let details = server.store.store.clone();
    let found = tower_idempotency::inspect::Inspect::get(&details, &keys.orphaned.id).await;
    assert!(
        !found
            .expect("memory")
            .expect("an entry")
            .entry
            .retry_allowed
    );
    assert!(server.audit().is_empty());
}

#[tokio::test]
async fn console_without_log_changes_nothing() {
    let store = tower_idempotency::MemoryStore::new().with_details();
    let keys = Keys::create(&store).await;
    let inspector = tower_idempotency::inspect::Inspector::new(store.clone());
    let console = tower_idempotency_console::Console::new(inspector, crate::harness::access);
    let address = crate::harness::listen(console.into_router()).await;
    let id = keys.orphaned.id.to_hex();
    let details = tower_idempotency::inspect::Inspect::get(&store, &keys.orphaned.id).await;
    let seen = details
        .expect("memory")
        .expect("an entry")
        .entry
        .seen()
        .to_string();
    let body = form(&[
        ("seen", &seen),
        ("how", "free"),
        ("reason", "x"),
        ("confirm", "yes"),
    ]);
    let path = format!("/entries/{id}/resolve");
    let response = crate::harness::send(address, Method::POST, &path, &[], &body).await;
    assert_eq!(response.status, 403, "{}", response.text);
    assert!(response.text.contains("no audit log"), "{}", response.text);
    let found = tower_idempotency::inspect::Inspect::get(&store, &keys.orphaned.id).await;
    assert!(found.expect("memory").is_some());
}

#[tokio::test]
async fn other_sites_cannot_post() {
    let server = Server::start_with(|console| {
        console
            .with_trusted_origin("https://ops.test")
            .expect("an origin")
    })
    .await;
    let keys = Keys::create(&server.store.store).await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    let body = form(&[
        ("seen", &seen),
        ("how", "free"),
        ("reason", "x"),
        ("confirm", "yes"),
    ]);
    for path in [
        format!("/entries/{id}/resolve"),
        "/resolve".to_owned(),
        "/find".to_owned(),
    ] {
        for headers in [
            [
                ("sec-fetch-site", "cross-site"),
                ("origin", "https://evil.test"),
            ],
            [
                ("sec-fetch-site", "same-site"),
                ("origin", "http://other.console.test"),
            ],
            [("origin", "https://evil.test"), ("x-n", "1")],
            [("origin", "null"), ("x-n", "1")],
        ] {
            let response = server.send(Method::POST, &path, &headers, &body).await;
            assert_eq!(response.status, 403, "{path} {headers:?}");
            assert!(response.text.contains("another site"), "{}", response.text);
        }
    }
    assert_eq!(server.state(&keys.orphaned.id).await, Some(State::Orphaned));
    assert!(server.audit().is_empty());
    // The console's own form over plain HTTP, a trusted origin, and a tool without either header.
    for headers in [
        &[("origin", "http://console.test")][..],
        &[
            ("origin", "https://ops.test"),
            ("sec-fetch-site", "cross-site"),
        ],
        &[],
    ] {
        let path = format!("/entries/{id}/resolve");
        let empty = server.send(Method::POST, &path, headers, "").await;
        assert_eq!(empty.status, 400, "{headers:?}: {}", empty.text);
    }
}

#[tokio::test]
async fn trusted_origin_has_to_be_origin() {
    let server = Server::start_with(|console| {
        for wrong in ["ops.test", "https://ops.test/path", "file:///x", ""] {
            let inspector =
                tower_idempotency::inspect::Inspector::new(tower_idempotency::MemoryStore::new());
            let other = tower_idempotency_console::Console::new(inspector, crate::harness::access);
            assert!(other.with_trusted_origin(wrong).is_err(), "{wrong}");
        }
        console
    })
    .await;
    assert_eq!(server.get("/healthz").await.status, 200);
}
