//! Servers that conform, and that refuse the request of a row under each key.

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::StatusCode,
    middleware::{self, Next},
    response::IntoResponse as _,
};
use tests::{creating, wire::Server};
use tower_idempotency::{IdempotencyLayer, MemoryStore, MissingKey};

use crate::{every_row, run};

/// Judges a server that refuses some requests with 404 before it reads their keys. Returns the rows that were not judged, and
/// the output.
async fn unjudged_rows(is_refused: fn(caller: &str, body: &[u8]) -> bool) -> (Vec<String>, String) {
    let refuse = move |req: Request, next: Next| async move {
        let (head, body) = req.into_parts();
        let Ok(body) = to_bytes(body, 1 << 20).await else {
            return StatusCode::BAD_REQUEST.into_response();
        };
        let caller = head.headers["authorization"].to_str().expect("text");
        if is_refused(caller, &body) {
            return StatusCode::NOT_FOUND.into_response();
        }
        next.run(Request::from_parts(head, Body::from(body))).await
    };
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_missing_key(MissingKey::Reject);
    let app: Router = creating(layer).0.layer(middleware::from_fn(refuse));
    let server = Server::start(app).await;
    let mut args = every_row(server.addr());
    args.push("--json".to_owned());
    let ran = run(args).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.rows("does not hold").is_empty(), "{}", ran.out);
    let mut unjudged = ran.rows("not judged");
    // Duplicates may all be replays.
    unjudged.retain(|row| row != "concurrent-409");
    (unjudged, ran.out)
}

/// The server accepts only the members of its schema.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_other_body_is_not_judged() {
    let (unjudged, out) = unjudged_rows(|_, body| body != b"{\"conform\":1}").await;
    let expected = [
        "other-body",
        "other-body-422",
        "other-caller",
        "case",
        "quoting",
    ];
    assert_eq!(unjudged, expected);
    let mut rows = out.lines();
    let other_caller = rows.find(|line| line.contains("\"other-caller\""));
    assert!(
        other_caller.is_some_and(|row| row.contains("--other-body")),
        "{out}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn other_caller_without_rights_is_not_judged() {
    let (unjudged, _) = unjudged_rows(|caller, _| caller == "Bearer b").await;
    assert_eq!(unjudged, ["other-caller"]);
}
