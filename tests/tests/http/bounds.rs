//! Limits: the size of a body, bytes in total, requests in flight, and the time for each of them.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body::Frame;
use http_body_util::BodyExt;
use tests::{
    Scripted, Step,
    barrier::{bounded, eventually, within},
    bodies::{BodyProgress, Piece, Pieces, pieces},
    send,
};
use tokio::time::{Instant, Interval, interval};
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Unrecordable, conformance::Operation};

use crate::world::World;

const CHUNK: usize = 64 * 1024;

/// Returns an endless body and a counter of its bytes. Each chunk is filled with the number of earlier chunks.
fn endless() -> (Body, BodyProgress) {
    let mut n = 0;
    let body = Pieces::new(move || {
        n += 1;
        Some(Piece::Data(Bytes::from(vec![(n - 1) as u8; CHUNK])))
    });
    let progress = body.progress();
    (Body::new(body), progress)
}

impl World {
    fn assert_untouched(&self) {
        assert_eq!(self.effects.count(), 0, "effects");
        assert_eq!(
            self.store.calls(Operation::Acquire),
            0,
            "the store was called"
        );
        assert_eq!(self.layer.in_flight(), 0);
    }
}

// ---- Request bodies ----

// F-013
#[tokio::test(start_paused = true)]
async fn upload_of_10_gb_is_refused_at_limit() {
    bounded(async {
        let world = World::new(|layer| layer);
        let mut left = 10 * 1024 * 1024 * 1024 / CHUNK;
        let chunk = Bytes::from(vec![b'x'; CHUNK]);
        let body = Pieces::new(move || {
            left = left.checked_sub(1)?;
            Some(Piece::Data(chunk.clone()))
        });
        let progress = body.progress();
        let refused = world.post("k", Body::new(body)).await;
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(refused.code(), "body-too-large");
        assert!(
            progress.bytes() <= (2 * 1024 * 1024 + CHUNK) as u64,
            "{} bytes",
            progress.bytes()
        );
        world.assert_untouched();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn body_limit_is_exact_for_every_framing() {
    bounded(async {
        let whole = |length: usize| Body::from(vec![b'x'; length]);
        let bytewise = |length: usize| pieces((0..length).map(|_| Piece::Data("x".into())));
        let lying = |length: usize| bytewise(length);
        for (announced, body) in [
            (None, &whole as &dyn Fn(usize) -> Body),
            (None, &bytewise),
            (Some("1"), &lying),
            (Some("-1"), &lying),
            (Some("many"), &lying),
        ] {
            let world = World::new(|layer| layer.with_request_limit(1_000));
            let request = |length| {
                let mut req = tests::post("/", "k", body(length));
                if let Some(announced) = announced {
                    let announced = HeaderValue::from_static(announced);
                    req.headers_mut().insert(header::CONTENT_LENGTH, announced);
                }
                req
            };
            let refused = send(&world.app, request(1_001)).await;
            assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
            world.assert_untouched();
            let accepted = send(&world.app, request(1_000)).await;
            assert_eq!((accepted.status, accepted.text()), (StatusCode::OK, "1000"));
            assert!(send(&world.app, request(1_000)).await.is_replay());
            assert_eq!(world.effects.count(), 1);
        }
    })
    .await;
}

/// An endless body of one byte per second.
struct Trickle(Interval);

impl http_body::Body for Trickle {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.0
            .poll_tick(cx)
            .map(|_| Some(Ok(Frame::data("x".into()))))
    }
}

fn trickle() -> Body {
    Body::new(Trickle(interval(Duration::from_secs(1))))
}

// F-012
#[tokio::test(start_paused = true)]
async fn trickling_body_is_refused() {
    within(Duration::from_secs(600), async {
        let world = World::new(|layer| layer);
        let started = Instant::now();
        let refused = world.post("k", trickle()).await;
        assert_eq!(refused.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(refused.code(), "body-timeout");
        assert!(started.elapsed() <= Duration::from_millis(30_010));
        world.assert_untouched();
        assert_eq!(world.post("k", "").await.status, StatusCode::OK);
    })
    .await;
}

// ---- Response bodies ----

/// Reads at least `length` bytes, and no further chunk.
async fn read_some(res: Response, length: usize) -> Vec<u8> {
    let mut body = res.into_body();
    let mut data = Vec::new();
    while data.len() < length {
        let frame = body.frame().await.expect("more").expect("no error");
        data.extend_from_slice(&frame.into_data().expect("data"));
    }
    data
}

// F-076
#[tokio::test(start_paused = true)]
async fn endless_response_streams_after_limit() {
    bounded(async {
        let limit = 4 * 1024 * 1024;
        for unrecordable in [Unrecordable::Tombstone, Unrecordable::Release] {
            let world = World::new(|layer| layer.with_unrecordable(unrecordable));
            let (body, progress) = endless();
            world.enqueue_response(Response::new(body));
            let res = world.app.clone().oneshot(tests::post("/", "k", "")).await;
            let Ok(res) = res;
            assert!(
                progress.bytes() <= (limit + CHUNK) as u64,
                "{} bytes",
                progress.bytes()
            );
            let data = read_some(res, 2 * limit).await;
            for (n, chunk) in data.chunks(CHUNK).enumerate() {
                assert!(chunk.iter().all(|byte| *byte == n as u8), "chunk {n}");
            }
            let retry = world.post("k", "").await;
            if unrecordable == Unrecordable::Tombstone {
                assert_eq!(retry.status, StatusCode::CONFLICT);
                assert_eq!(retry.code(), "response-not-retained");
                assert_eq!(world.effects.count(), 1);
            } else {
                assert_eq!((retry.status, world.effects.count()), (StatusCode::OK, 2));
            }
        }
    })
    .await;
}

// F-075
#[tokio::test(start_paused = true)]
async fn announced_oversized_response_is_not_buffered() {
    bounded(async {
        for (length, kept) in [(1_000, true), (1_001, false)] {
            let world = World::new(|layer| layer.with_response_limit(1_000));
            let mut chunks = (0..length).map(|_| Piece::Data("x".into()));
            let body = Pieces::new(move || chunks.next());
            let progress = body.progress();
            let mut res = Response::new(Body::new(body));
            let announced = HeaderValue::from(length);
            res.headers_mut().insert(header::CONTENT_LENGTH, announced);
            world.enqueue_response(res);
            let Ok(res) = world.app.clone().oneshot(tests::post("/", "k", "")).await;
            assert_eq!(progress.bytes(), if kept { length } else { 0 });
            assert_eq!(tests::read(res).await.body.len() as u64, length);
            assert_eq!(world.post("k", "").await.is_replay(), kept);
            assert_eq!(world.effects.count(), 1);
        }
    })
    .await;
}

// ---- All requests together ----

/// Limit of the bytes of requests, and of those of responses. One caller can use 100,002 of each.
const BYTES: usize = 133_336;

// S-080
/// Without this limit, clients with slow uploads would prevent the recording of other clients' responses.
#[tokio::test(start_paused = true)]
async fn uploads_leave_bytes_for_responses() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_buffered(BYTES, BYTES));
        let answered = world.spawn("k", "");
        world.barrier.arrival().await;
        let slow = || Scripted::new([Step::Data(vec![b'x'; 10_000].into()), Step::Wait(STALL)]);
        let stalled: Vec<_> = (0..20)
            .map(|n| world.spawn(&format!("slow-{n}"), Body::new(slow())))
            .collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let parts = (0..3).map(|_| Piece::Data(vec![b'y'; 5_000].into()));
        world.enqueue_response(Response::new(pieces(parts)));
        world.barrier.open_for_good();
        assert_eq!(answered.await.expect("no panic").body.len(), 15_000);
        assert!(world.post("k", "").await.is_replay());
        for stalled in stalled {
            stalled.abort();
        }
    })
    .await;
}

// F-078, S-287
/// Clients that upload or read slowly leave bytes for the short responses of the same caller.
#[tokio::test(start_paused = true)]
async fn slow_clients_leave_budget_for_whole_responses() {
    bounded(async {
        let world = World::new(|layer| layer.with_max_buffered(BYTES, BYTES));
        let slow = Scripted::new([Step::Data(vec![b'x'; 99_999].into()), Step::Wait(STALL)]);
        let stalled = world.spawn("slow", Body::new(slow));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut unread = Vec::new();
        let streamed = |parts: usize| {
            let parts = (0..parts).map(|_| Piece::Data(vec![b'y'; 1_000].into()));
            world.enqueue_response(Response::new(pieces(parts)));
        };
        for n in 0..20 {
            streamed(11);
            let req = tests::post("/", &n.to_string(), "");
            let Ok(res) = world.app.clone().oneshot(req).await;
            unread.push(res);
        }
        world.enqueue_response(Response::new(vec![b'z'; 1_000].into()));
        assert_eq!(world.post("k", "").await.body.len(), 1_000);
        assert!(world.post("k", "").await.is_replay());

        // All bytes are free again, also those of responses that did not fit.
        stalled.abort();
        drop((unread, stalled.await));
        streamed(60);
        assert_eq!(world.post("later", "").await.body.len(), 60_000);
        assert!(world.post("later", "").await.is_replay());
    })
    .await;
}

const STALL: Duration = Duration::from_secs(20);

// F-013
#[tokio::test(start_paused = true)]
async fn request_bytes_are_bounded_and_freed() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_buffered(BYTES, BYTES));
        let body = |length: usize| vec![b'x'; length];
        let first = world.spawn("first", body(80_000));
        world.barrier.arrival().await;
        let acquires = world.store.calls(Operation::Acquire);
        for n in 0..100 {
            // The body arrives in pieces, so that some bytes are buffered before the limit is exceeded.
            let halves = [15_000, 5_101].map(|length| Piece::Data(body(length).into()));
            let refused = world.post(&n.to_string(), pieces(halves)).await;
            assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(refused.code(), "caller-limit");
            assert_eq!(refused.header("retry-after"), Some("1"));
        }
        assert_eq!(world.store.calls(Operation::Acquire), acquires);
        assert_eq!(world.effects.count(), 1);
        let second = world.spawn("second", body(20_000));
        world.barrier.arrival().await;
        world.barrier.open_for_good();
        for response in [first, second] {
            assert_eq!(response.await.expect("no panic").status, StatusCode::OK);
        }
        // All bytes are free again.
        assert_eq!(world.post("third", body(90_000)).await.text(), "90000");
        assert!(world.post("third", body(90_000)).await.is_replay());
        assert_eq!(world.effects.count(), 3);
    })
    .await;
}

// F-009, F-021, F-093
#[tokio::test(start_paused = true)]
async fn in_flight_limit_counts_disconnected_clients() {
    const BOUND: usize = 100;
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(BOUND));
        for n in 0..10 * BOUND {
            let call = world
                .app
                .clone()
                .oneshot(tests::post("/", &n.to_string(), "{}"));
            let mut call = Box::pin(call);
            // The future is polled until it waits, and then dropped.
            let polled = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
            // A caller gets no new executions if its disconnected clients have more than half of them.
            if n <= BOUND / 2 {
                assert!(polled.is_pending());
            } else {
                let Poll::Ready(Ok(res)) = polled else {
                    panic!("there is no permit for it");
                };
                let refused = tests::read(res).await;
                assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
                assert_eq!(refused.code(), "caller-limit");
            }
            assert!(world.layer.in_flight() <= BOUND);
        }
        let executed = BOUND / 2 + 1;
        eventually("the handlers run", || {
            world.effects.count() == executed as u64
        })
        .await;
        // A request without a key passes.
        let unkeyed = Request::post("/").body(Body::empty()).expect("a request");
        world.barrier.open_for_good();
        assert_eq!(send(&world.app, unkeyed).await.status, StatusCode::OK);
        eventually("the handlers end", || world.layer.in_flight() == 0).await;
        for n in 0..executed {
            assert!(world.post(&n.to_string(), "{}").await.is_replay());
        }
        assert_eq!(world.effects.count(), executed as u64 + 1);
    })
    .await;
}

// S-967, F-940
/// 400 responses under fresh keys of one caller in a full store: the records of another caller stay.
#[tokio::test(start_paused = true)]
async fn one_caller_evicts_no_record_of_another() {
    const LARGE: usize = 64 * 1024;
    let store = MemoryStore::new().with_max_bytes(60 * LARGE);
    let (app, effects) = tests::app(IdempotencyLayer::new(store), |_, _| async {
        // Generates pseudo-random bytes, which do not compress.
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..LARGE).map(|_| next()).collect::<Vec<u8>>()
    });
    let req = |caller: &'static str, key: String| {
        let req = Request::post("/orders").header("idempotency-key", key);
        let req = req.header("authorization", caller).body(Body::empty());
        req.expect("a valid request")
    };
    for n in 0..3 {
        send(&app, req("Bearer other", n.to_string())).await;
    }
    for n in 0..400 {
        send(&app, req("Bearer hostile", n.to_string())).await;
    }
    assert_eq!(effects.count(), 403);
    for n in 0..3 {
        let replay = send(&app, req("Bearer other", n.to_string())).await;
        assert!(replay.is_replay());
    }
    assert_eq!(effects.count(), 403);
}
