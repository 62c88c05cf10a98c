//! The requests: the same for all contenders.

use std::{
    convert::Infallible,
    fmt::Write as _,
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
};

use axum::{Router, body::Body};
use bytes::Bytes;
use footing::http::IdempotencyScope;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;

/// The key of each request of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Column {
    NoKey,
    Fresh,
    Replay,
}

pub const COLUMNS: [Column; 3] = [Column::NoKey, Column::Fresh, Column::Replay];

impl Column {
    pub fn key(self) -> Option<String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        match self {
            Self::NoKey => None,
            Self::Fresh => {
                let n = NEXT.fetch_add(1, Ordering::Relaxed);
                Some(format!("8e03978e-40d5-43e8-bc93-{n:012}"))
            }
            Self::Replay => Some("8e03978e-40d5-43e8-bc93-6894a57f9324".into()),
        }
    }
}

pub fn request(body: &Bytes, key: Option<&str>) -> Request<Body> {
    let mut req = Request::post("/orders")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("content-length", body.len())
        .header("authorization", "Bearer 0123456789abcdef0123456789abcdef")
        // axum-idempotent keeps records in sessions.
        .header("cookie", "session=AAAAAAAAAAAAAAAAAAAAAA")
        // footing gets the caller from the authentication outside of it.
        .extension(IdempotencyScope::new("caller"));
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    req.body(Body::from(body.clone())).expect("a valid request")
}

/// Sends a request and reads its response.
pub async fn send(app: &Router, req: Request<Body>) -> (StatusCode, HeaderMap, Bytes) {
    let Ok::<_, Infallible>(res) = app.clone().oneshot(req).await;
    let (head, body) = res.into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    (head.status, head.headers, body)
}

/// Sends a request that must succeed.
pub async fn succeed(app: &Router, body: &Bytes, column: Column) {
    let (status, _, body) = send(app, request(body, column.key().as_deref())).await;
    assert!(status.is_success(), "{status}");
    black_box(body);
}

/// 1 KiB of JSON.
pub fn order() -> Bytes {
    let mut lines = String::new();
    for n in 1..=8u32 {
        let _ = write!(
            lines,
            r#"{{"sku":"SKU-{n:06}-{:04}","quantity":{},"price":{},"note":"shelf {} of aisle {}, leave at the door"}},"#,
            n * 7919 % 10_000,
            n % 9 + 1,
            n * 137 % 10_000,
            n * 31 % 97,
            n * 17 % 53,
        );
    }
    lines.pop();
    let order = format!(
        r#"{{"id":7,"customer":"c0ffee00-1234-4a5b-8c6d-0123456789ab","currency":"EUR","lines":[{lines}]}}"#
    );
    order.into()
}
