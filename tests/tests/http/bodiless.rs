//! Responses with a status that has no body, and with the length of a body that is not sent.
//!
//! Servers and clients of HTTP ignore this length. Some services send it with a 204, and it is usual with a 304.

use std::time::Duration;

use axum::{body::Body, response::Response};
use http::{HeaderValue, StatusCode, header::CONTENT_LENGTH};
use tests::{observed::counted, post, send};
use tokio::time::sleep;
use tower_idempotency::{Enforcement, IdempotencyLayer, MemoryStore};

use crate::replay::bare;

/// The second length exceeds the limit of a response body.
const LENGTHS: [&str; 2] = ["27", "5000000"];
const STATUSES: [StatusCode; 2] = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED];

fn bodiless(status: StatusCode, length: &'static str) -> Response {
    let mut res = Response::new(Body::empty());
    *res.status_mut() = status;
    let length = HeaderValue::from_static(length);
    res.headers_mut().insert(CONTENT_LENGTH, length);
    res
}

// F-083, S-114
#[tokio::test(start_paused = true)]
async fn bodiless_response_with_length_is_complete() {
    for status in STATUSES {
        for length in LENGTHS {
            let layer = IdempotencyLayer::new(MemoryStore::new());
            let (service, effects) = bare(&layer, move || bodiless(status, length));
            for is_replay in [false, true] {
                let response = send(&service, post("/orders", "k", "order")).await;
                assert_eq!(
                    (response.status, response.is_replay()),
                    (status, is_replay),
                    "{length}"
                );
                let expected = (!is_replay).then_some(length);
                assert_eq!(response.header("content-length"), expected, "{status}");
            }
            assert_eq!(effects.count(), 1, "{status} {length}");
        }
    }
}

// S-114
#[test]
fn observed_bodiless_response_is_complete() {
    for status in STATUSES {
        for length in LENGTHS {
            let metrics = counted(async {
                let layer = IdempotencyLayer::new(MemoryStore::new())
                    .with_enforcement(Enforcement::Observe);
                let (service, _) = bare(&layer, move || bodiless(status, length));
                for _ in 0..2 {
                    // The service reads no body, and an observation judges only a body that is read or empty.
                    send(&service, post("/orders", "k", "")).await;
                    // Lets the observation end.
                    sleep(Duration::from_millis(1)).await;
                }
            });
            let replayed = metrics.get("idempotency_observed_total{outcome=would_replay}");
            assert_eq!(replayed, Some(&1.0), "{status} {length} {metrics:?}");
        }
    }
}
