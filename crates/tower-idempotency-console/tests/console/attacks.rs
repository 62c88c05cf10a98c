//! Texts that clients choose, and limits.

use bytes::Bytes;
use http::{Method, Response};

use crate::harness::{Server, acquire, attention, claim, complete, form, orphan};

const SCRIPT: &str = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>";

/// Asserts that the page has the script as text only.
fn assert_escaped(text: &str) {
    assert!(!text.contains("<script>alert"), "{text}");
    assert!(!text.contains("<img src=x"), "{text}");
    assert!(text.contains("&#60;script&#62;alert(1)"), "{text}");
}

#[tokio::test]
async fn scripts_of_clients_are_text() {
    let server = Server::start().await;
    let store = &server.store.store;
    let orphaned = orphan(store, &format!("POST /{SCRIPT}")).await;
    let mut owned = claim("POST /x");
    owned.owner = SCRIPT;
    acquire(store, &owned).await;
    let noted = claim("POST /refund");
    acquire(store, &noted).await;
    attention(store, &noted, SCRIPT).await;
    let recorded = claim("POST /pay");
    acquire(store, &recorded).await;
    let response = Response::builder()
        .header("x-note", SCRIPT)
        .header("content-type", "text/html");
    let response = response.body(Bytes::from(SCRIPT)).expect("a response");
    complete(store, &recorded, response).await;

    let id = orphaned.id.to_hex();
    let fields = [
        ("seen", &*server.seen(&orphaned.id).await),
        ("how", "retry"),
        ("reason", SCRIPT),
    ]
    .map(|(name, value)| (name, value.to_owned()));
    let fields: Vec<_> = fields
        .iter()
        .map(|(name, value)| (*name, &**value))
        .collect();
    let done = server
        .post(&format!("/entries/{id}/resolve"), &fields)
        .await;
    assert_eq!(done.status, 200, "{}", done.text);
    for page in [
        "/".to_owned(),
        "/audit".to_owned(),
        "/entries?state=orphaned".to_owned(),
        "/entries?state=in-progress".to_owned(),
        format!("/entries?{}", form(&[("operation", SCRIPT)])),
        format!("/entries?{}", form(&[("owner", SCRIPT)])),
        format!("/entries/{id}"),
        format!("/entries/{id}/resolve?how=retry"),
        format!("/entries/{}", owned.id.to_hex()),
        format!("/entries/{}", noted.id.to_hex()),
        format!("/entries/{}", recorded.id.to_hex()),
        format!("/find?id={}", &id[..8]),
    ] {
        let reply = server.get(&page).await;
        assert_eq!(reply.status, 200, "{page}");
        assert_escaped(&reply.text);
    }
    for page in [
        format!("/entries?{}", form(&[("state", SCRIPT)])),
        format!("/find?{}", form(&[("id", SCRIPT)])),
        format!("/entries/{id}/resolve?{}", form(&[("how", SCRIPT)])),
        format!("/entries/{}", "%3Cscript%3Ealert"),
    ] {
        let reply = server.get(&page).await;
        assert!(reply.status.is_client_error(), "{page}");
        assert!(!reply.text.contains("<script>alert"), "{}", reply.text);
    }
}

#[tokio::test]
async fn body_is_downloaded_as_text() {
    let server = Server::start().await;
    let recorded = claim("POST /pay");
    acquire(&server.store.store, &recorded).await;
    let response = Response::builder().header("content-type", "text/html");
    let response = response.body(Bytes::from(SCRIPT)).expect("a response");
    complete(&server.store.store, &recorded, response).await;
    let page = server
        .get(&format!("/entries/{}", recorded.id.to_hex()))
        .await;
    assert!(!page.text.contains("alert(1)"), "the page shows no body");
    let body = server
        .get(&format!("/entries/{}/body", recorded.id.to_hex()))
        .await;
    assert_eq!(body.text, SCRIPT);
    let header = |name: &str| body.headers[name].to_str().expect("text").to_owned();
    assert_eq!(header("content-type"), "text/plain; charset=utf-8");
    assert!(header("content-disposition").starts_with("attachment; filename=\"body-"));
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert!(header("content-security-policy").starts_with("sandbox; default-src 'none'"));
    assert_eq!(header("cache-control"), "no-store");
}

#[tokio::test]
async fn sizes_are_bounded() {
    let server = Server::start().await;
    let id = "ab".repeat(32);
    let path = format!("/api/v1/entries/{id}/resolve");
    let headers = [("content-type", "application/json")];
    let large = server
        .send(Method::POST, &path, &headers, &"x".repeat(2 << 20))
        .await;
    assert_eq!(large.status, 413);
    assert_eq!(large.text, "{\"error\":\"Payload Too Large\"}");
    let store = &server.store.store;
    for n in 0..60 {
        acquire(store, &claim(&format!("POST /{n}"))).await;
    }
    let long = claim(&format!("POST /{}", "x".repeat(10_000)));
    acquire(store, &long).await;
    let rows = |text: &str| text.matches("name=\"seen\"").count();
    let first = server.get("/entries?state=in-progress").await;
    assert_eq!(rows(&first.text), 50);
    let (_, next) = first
        .text
        .split_once("rel=\"next\" href=\"./")
        .expect("a next page");
    let next = next
        .split('"')
        .next()
        .expect("an end")
        .replace("&#38;", "&");
    let second = server.get(&format!("/{next}")).await;
    assert_eq!(rows(&second.text), 11);
    assert!(!second.text.contains("rel=\"next\""));
    assert!(first.text.contains(&"x".repeat(10_000)) || second.text.contains(&"x".repeat(10_000)));
    for limit in ["0", "51", "1000", "65536", "-1", "x"] {
        let response = server.get(&format!("/entries?limit={limit}")).await;
        assert_eq!(response.status, 400, "{limit}");
        let response = server.get(&format!("/api/v1/entries?limit={limit}")).await;
        assert_eq!(response.status, 400, "{limit}");
        assert!(
            response.text.starts_with("{\"error\":"),
            "{}",
            response.text
        );
    }
    let one = server.get("/entries?state=in-progress&limit=1").await;
    assert_eq!(rows(&one.text), 1);
    // The token of another listing.
    let other = next.replace("in-progress", "orphaned");
    assert_eq!(server.get(&format!("/{other}")).await.status, 400);
    let large = "x".repeat(2 * 1024 * 1024);
    let response = server.post("/find", &[("key", &large)]).await;
    assert_eq!(response.status, 413);
}
