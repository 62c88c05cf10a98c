//! Large, slow and broken bodies.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use tests::{
    Effects, Scripted, Step, TestResponse, app, creating, post, read, send,
    wire::{Server, post_bytes},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep},
};
use tower::ServiceExt;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Unrecordable};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

/// Returns a router that responds with the result of `body`.
fn answering<B: Into<Body> + 'static>(
    layer: IdempotencyLayer,
    body: impl Fn() -> B + Clone + Send + Sync + 'static,
) -> (Router, Effects) {
    app(layer, move |_, _| {
        std::future::ready(Response::new(body().into()))
    })
}

fn scripted<S: Into<Step>>(steps: impl IntoIterator<Item = S>) -> Body {
    Body::new(Scripted::new(steps))
}

fn assert_not_retained(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::CONFLICT);
    assert_eq!(response.code(), "response-not-retained");
    assert_eq!(response.header("retry-after"), None);
    assert!(!response.is_replay());
}

/// Checks that the first response is complete and that a tombstone is left. No retry executes, and another request is a
/// mismatch.
async fn leaves_a_tombstone(app: &Router, effects: &Effects, expected: &[u8], what: &str) {
    let first = send(app, order()).await;
    assert_eq!(first.status, StatusCode::OK, "{what}");
    assert!(first.body == expected, "{what}: every byte");
    for _ in 0..2 {
        assert_not_retained(&send(app, order()).await);
    }
    assert_eq!(
        send(app, post("/orders", "k", "other")).await.code(),
        "key-reused"
    );
    assert_eq!(effects.count(), 1, "{what}");
}

// F-075, F-089, S-280
#[tokio::test(start_paused = true)]
async fn response_over_limit_leaves_tombstone() {
    let limited = || layer().with_response_limit(1000);
    for known_length in [true, false] {
        let body = move |bytes: usize| {
            let data = Bytes::from(vec![7; bytes]);
            if known_length {
                Body::from(data)
            } else {
                scripted([Step::Data(data.slice(..400)), Step::Data(data.slice(400..))])
            }
        };
        let (app, effects) = answering(limited(), move || body(1000));
        let first = send(&app, order()).await;
        let replay = send(&app, order()).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, first.body);
        assert_eq!(effects.count(), 1);

        let (app, effects) = answering(limited(), move || body(1001));
        let what = format!("known length: {known_length}");
        leaves_a_tombstone(&app, &effects, &[7; 1001], &what).await;
    }
}

// F-089, S-282
#[tokio::test(start_paused = true)]
async fn larger_response_can_release_key() {
    let release = layer()
        .with_response_limit(10)
        .with_unrecordable(Unrecordable::Release);
    for unknown_length in [false, true] {
        let (app, effects) = answering(release.clone(), move || {
            if unknown_length {
                scripted(["01234", "56789", "0"])
            } else {
                Body::from("01234567890")
            }
        });
        let key = if unknown_length { "a" } else { "b" };
        for _ in 0..2 {
            let response = send(&app, post("/orders", key, "order")).await;
            assert_eq!(response.text(), "01234567890");
            assert!(!response.is_replay());
        }
        assert_eq!(effects.count(), 2);
    }
}

// S-281
#[tokio::test(start_paused = true)]
async fn default_response_limit_is_4_mib() {
    let limit = 4 * 1024 * 1024;
    let plain = || layer().with_compression_above(usize::MAX);
    let (app, effects) = answering(plain(), move || vec![7; limit]);
    let first = send(&app, order()).await;
    let replay = send(&app, order()).await;
    assert!(replay.is_replay());
    assert!(replay.body == first.body);
    assert_eq!(effects.count(), 1);
    let (app, effects) = answering(plain(), move || vec![7; limit + 1]);
    leaves_a_tombstone(&app, &effects, &vec![7; limit + 1], "one byte more").await;
}

// F-105, S-283
#[tokio::test(start_paused = true)]
async fn record_over_store_limit_leaves_tombstone() {
    let small = || MemoryStore::new().with_max_bytes(2000);
    let plain = |store| IdempotencyLayer::new(store).with_compression_above(usize::MAX);
    let (app, effects) = answering(plain(small()), || vec![7; 3000]);
    leaves_a_tombstone(&app, &effects, &[7; 3000], "tombstone").await;

    let release = plain(small()).with_unrecordable(Unrecordable::Release);
    let (app, effects) = answering(release, || vec![7; 3000]);
    for _ in 0..2 {
        assert_eq!(send(&app, order()).await.body.len(), 3000);
    }
    assert_eq!(effects.count(), 2);
}

// S-284
#[tokio::test(start_paused = true)]
async fn too_many_headers_leave_tombstone() {
    let response = || {
        let mut res = Response::new(Body::from("x"));
        for _ in 0..129 {
            res.headers_mut()
                .append("x-line", HeaderValue::from_static("1"));
        }
        std::future::ready(res)
    };
    for (unrecordable, status, executions) in [
        (Unrecordable::Tombstone, StatusCode::CONFLICT, 1),
        (Unrecordable::Release, StatusCode::OK, 2),
    ] {
        let (app, effects) = app(layer().with_unrecordable(unrecordable), move |_, _| {
            response()
        });
        assert_eq!(send(&app, order()).await.headers.len(), 130);
        assert_eq!(send(&app, order()).await.status, status, "{unrecordable:?}");
        assert_eq!(effects.count(), executions, "{unrecordable:?}");
    }
}

// S-284
#[tokio::test(start_paused = true)]
async fn too_many_trailers_leave_tombstone() {
    for (unrecordable, status, executions) in [
        (Unrecordable::Tombstone, StatusCode::CONFLICT, 1),
        (Unrecordable::Release, StatusCode::OK, 2),
    ] {
        let (app, effects) = answering(layer().with_unrecordable(unrecordable), || {
            let mut trailers = HeaderMap::new();
            for _ in 0..129 {
                trailers.append("x-line", HeaderValue::from_static("1"));
            }
            scripted([Step::from("x"), Step::Trailers(trailers)])
        });
        let first = app.clone().oneshot(order()).await.expect("infallible");
        let first = first.into_body().collect().await.expect("a body");
        assert_eq!(first.trailers().map(HeaderMap::len), Some(129));
        assert_eq!(send(&app, order()).await.status, status, "{unrecordable:?}");
        assert_eq!(effects.count(), executions, "{unrecordable:?}");
    }
}

// S-288
#[tokio::test(start_paused = true)]
async fn unknown_length_response_is_recorded() {
    let wait = || Step::Wait(Duration::from_secs(3));
    let (app, effects) = answering(layer(), move || {
        scripted(["one ".into(), wait(), "two ".into(), wait(), "three".into()])
    });
    let started = Instant::now();
    let first = app.clone().oneshot(order()).await.expect("infallible");
    assert!(
        started.elapsed() >= Duration::from_secs(6),
        "collected first"
    );
    let first = read(first).await;
    assert_eq!(first.text(), "one two three");
    let replay = send(&app, order()).await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, first.body);
    assert_eq!(effects.count(), 1);
}

// F-079, S-290
// A body with a known length may be slow, but must not stall: it would hold its lease and its permit indefinitely.
#[tokio::test(start_paused = true)]
async fn known_length_response_may_be_slow() {
    let slow = |pause: u64| {
        answering(layer(), move || {
            let pause = Step::Wait(Duration::from_secs(pause));
            let steps = [
                "one ".into(),
                pause.clone(),
                "two ".into(),
                pause,
                "three".into(),
            ];
            Body::new(Scripted::new(steps).of_length(13))
        })
    };
    let (app, effects) = slow(9);
    let first = send(&app, order()).await;
    assert_eq!(first.text(), "one two three");
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 1);

    let (app, effects) = slow(11);
    let first = send(&app, order()).await;
    assert_eq!(first.text(), "one two three", "and streams on");
    assert_not_retained(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// F-076, S-289
#[tokio::test(start_paused = true)]
async fn long_response_counts_as_streamed() {
    let (app, effects) = answering(layer(), || {
        scripted([
            "one ".into(),
            Step::Wait(Duration::from_secs(6)),
            "two ".into(),
            Step::Wait(Duration::from_secs(6)),
            "three ".into(),
            Step::Wait(Duration::from_secs(60)),
            "four".into(),
        ])
    });
    let started = Instant::now();
    let first = app.clone().oneshot(order()).await.expect("infallible");
    let waited = started.elapsed().as_millis();
    assert!((10_000..10_010).contains(&waited), "{waited} ms");
    let mut body = first.into_body();
    let mut frames = Vec::new();
    while let Some(frame) = body.frame().await {
        let data = frame.expect("a frame").into_data().expect("data");
        frames.push((started.elapsed().as_secs(), data));
        if frames.len() == 1 {
            assert_not_retained(&send(&app, order()).await);
        }
    }
    let expected = [(10, "one two "), (12, "three "), (72, "four")];
    assert_eq!(frames, expected.map(|(at, data)| (at, Bytes::from(data))));
    assert_not_retained(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}

// F-076, S-291
#[tokio::test(start_paused = true)]
async fn events_reach_client_immediately() {
    for media_type in ["text/event-stream", "Text/Event-Stream; charset=utf-8"] {
        let (app, effects) = app(layer(), move |_, _| {
            let wait = Step::Wait(Duration::from_secs(1));
            let steps = [
                "data: 1\n\n".into(),
                wait.clone(),
                "data: 2\n\n".into(),
                wait,
            ];
            let headers = [("content-type", media_type)];
            std::future::ready((headers, scripted(steps)).into_response())
        });
        let started = Instant::now();
        let res = app.clone().oneshot(order()).await.expect("infallible");
        assert_eq!(started.elapsed(), Duration::ZERO);
        let mut body = res.into_body();
        for at in 0..2 {
            let frame = body.frame().await.expect("a frame").expect("a frame");
            assert_eq!(frame.into_data().expect("data").len(), 9);
            assert_eq!(started.elapsed().as_secs(), at);
            assert_not_retained(&send(&app, order()).await);
        }
        assert!(body.frame().await.is_none());
        assert_not_retained(&send(&app, order()).await);
        assert_eq!(effects.count(), 1);
    }
}

// F-081, S-294
#[tokio::test(start_paused = true)]
async fn wrong_length_response_is_not_recorded() {
    for length in [3, 5] {
        let (app, effects) = app(layer(), move |_, _| {
            let mut res = Response::new(scripted(["da", "ta"]));
            res.headers_mut()
                .insert("content-length", HeaderValue::from(length));
            std::future::ready(res)
        });
        for _ in 0..2 {
            let response = send(&app, order()).await;
            assert_eq!(response.text(), "data");
            assert!(!response.is_replay(), "{length}");
        }
        assert_eq!(effects.count(), 2, "{length}");
    }
}

// S-295
/// In HTTP/1, the length of an empty body is 0.
#[tokio::test]
async fn missing_announced_body_is_not_sent_as_empty() {
    let (app, effects) = app(layer(), |_, _| {
        let mut res = Response::new(scripted::<Step>([]));
        res.headers_mut()
            .insert("content-length", HeaderValue::from(10));
        std::future::ready(res)
    });
    let server = Server::start(app).await;
    for _ in 0..2 {
        let mut client = TcpStream::connect(server.addr()).await.expect("a server");
        let req = String::from_utf8(post_bytes("/orders", "k", "order")).expect("text");
        let req = req.replacen("\r\n", "\r\nconnection: close\r\n", 1);
        client.write_all(req.as_bytes()).await.expect("a server");
        let mut response = String::new();
        client.read_to_string(&mut response).await.expect("an end");
        assert!(!response.contains("content-length: 0"), "{response}");
    }
    assert_eq!(effects.count(), 2);
}

// S-079
#[tokio::test(start_paused = true)]
async fn bodies_in_flight_are_bounded_together() {
    let store = MemoryStore::new();
    // One caller can use 6,000 of these bytes.
    let layer = IdempotencyLayer::new(store.clone()).with_max_buffered(8_000, 8_000);
    let (app, effects) = creating(layer.clone());
    let slow = Body::new(Scripted::new([
        Step::Data(vec![b'x'; 5_000].into()),
        Step::Wait(Duration::from_secs(1)),
    ]));
    let holding = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("/orders", "slow", slow)).await }
    });
    sleep(Duration::from_millis(1)).await;
    let upload = |key, length| post("/orders", key, vec![b'x'; length]);
    let refused = send(&app, upload("k", 1_001)).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.code(), "caller-limit");
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert_eq!(effects.count(), 0);
    let fits = send(&app, upload("k", 1_000)).await;
    assert_eq!(fits.status, StatusCode::CREATED);
    assert_eq!(holding.await.expect("no panic").status, StatusCode::CREATED);
    let later = send(&app, upload("later", 1_001)).await;
    assert_eq!(
        later.status,
        StatusCode::CREATED,
        "the bytes are free again"
    );
    assert_eq!(effects.count(), 3);
    assert_eq!(layer.in_flight(), 0);
}

// S-285
#[tokio::test(start_paused = true)]
async fn response_over_budget_leaves_tombstone() {
    let tight = layer().with_max_buffered(20, 20);
    let (app, effects) = answering(tight, || scripted(["0123456789", "0123456789"]));
    leaves_a_tombstone(&app, &effects, b"01234567890123456789", "5 + 20").await;
}

// F-077, S-286
/// If a client does not read, the layer would have to buffer a streamed response. Without the layer, the handler would
/// wait for the client.
#[tokio::test(start_paused = true)]
async fn buffered_stream_counts_until_read() {
    let tight = layer().with_max_buffered(20_000, 20_000);
    let (app, effects) = answering(tight.clone(), || scripted([long_step()]));
    let unread = app.clone().oneshot(post("/orders", "unread", "order"));
    let unread = unread.await.expect("infallible");
    assert_eq!(tight.in_flight(), 0, "nothing runs");
    let whole = send(&app, order()).await;
    assert_eq!(whole.body.len(), LONG);
    drop(whole);
    assert_not_retained(&send(&app, order()).await);

    assert_eq!(read(unread).await.body.len(), LONG);
    let dropped = app.clone().oneshot(post("/orders", "dropped", "order"));
    drop(dropped.await.expect("infallible"));
    for replay in [false, true] {
        let response = send(&app, post("/orders", "kept", "order")).await;
        assert_eq!(response.is_replay(), replay);
    }
    assert_eq!(effects.count(), 4);
}

// F-078, S-287
/// A client that reads nothing leaves a quarter of the bytes of responses to other callers, and all bytes of requests.
#[tokio::test(start_paused = true)]
async fn unread_responses_leave_bytes_to_other_callers() {
    let tight = layer().with_max_buffered(100_000, 100_000);
    let (app, effects) = app(tight, |n, _| {
        let streamed = || scripted([long_step(), long_step()]);
        let one = || scripted([long_step()]);
        std::future::ready(Response::new(if n <= 5 { streamed() } else { one() }))
    });
    let stream = |n: usize| app.clone().oneshot(post("/orders", &n.to_string(), ""));
    let mut unread = Vec::new();
    for n in 1..=5 {
        unread.push(stream(n).await.expect("infallible"));
    }
    let of_other = || {
        let mut req = post("/orders", "k", "");
        let credential = HeaderValue::from_static("Bearer other");
        req.headers_mut().insert("authorization", credential);
        req
    };
    for replay in [false, true] {
        let response = send(&app, of_other()).await;
        assert_eq!((response.body.len(), response.is_replay()), (LONG, replay));
    }
    let upload = post("/orders", "upload", "u".repeat(75_000));
    assert_eq!(send(&app, upload).await.status, StatusCode::OK);
    // Every client gets the complete response. Three quarters of the bytes were for this caller.
    for (n, unread) in (1..).zip(unread) {
        assert_eq!(read(unread).await.body.len(), 2 * LONG);
        let retry = read(stream(n).await.expect("infallible")).await;
        assert_eq!(retry.is_replay(), n <= 3, "{n}");
    }
    assert_eq!(effects.count(), 7);
}

/// Length of a response that counts until its client has read it.
const LONG: usize = 10_000;

fn long_step() -> Step {
    Step::Data(vec![b'x'; LONG].into())
}

// S-286
/// Without the layer, a handler that forwards a response would buffer only one chunk at a time.
#[tokio::test(start_paused = true)]
async fn chunked_known_length_response_counts() {
    let tight = layer().with_max_buffered(20_000, 20_000);
    let (app, _) = answering(tight, || {
        let half = || Step::Data(vec![b'x'; LONG / 2].into());
        Body::new(Scripted::new([half(), half()]).of_length(LONG as u64))
    });
    let unread = app.clone().oneshot(post("/orders", "unread", "order"));
    let unread = unread.await.expect("infallible");
    send(&app, order()).await;
    assert_not_retained(&send(&app, order()).await);
    drop(unread);
    for replay in [false, true] {
        let response = send(&app, post("/orders", "kept", "order")).await;
        assert_eq!(response.is_replay(), replay);
    }
}

/// A response that exceeded the budget does not count, even while it is being sent.
#[tokio::test(start_paused = true)]
async fn oversized_response_uses_no_budget_while_sent() {
    let tight = layer().with_max_buffered(1000, 1000);
    let (app, effects) = answering(tight, || scripted([Step::Data(vec![b'a'; 200_000].into())]));
    let first = app.clone().oneshot(post("/orders", "unread", "order"));
    let mut first = first.await.expect("infallible").into_body();
    let piece = first.frame().await.expect("a piece").expect("a piece");
    assert!(piece.into_data().expect("data").len() < 200_000);
    let second = send(&app, order()).await;
    assert_eq!(second.status, StatusCode::OK, "{}", second.text());
    assert_eq!(effects.count(), 2);
}

// S-077
/// A layer outside may have replaced the body by a shorter one than the head announces.
#[tokio::test(start_paused = true)]
async fn body_with_exact_size_hint_is_complete() {
    let (app, effects) = creating(layer());
    let mut req = order();
    req.headers_mut()
        .insert("content-length", HeaderValue::from(1000));
    assert_eq!(send(&app, req).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-980
/// A response of at most 8 KiB does not count while its client has not read it.
#[tokio::test(start_paused = true)]
async fn small_response_is_uncounted_once_recorded() {
    let tight = layer().with_max_buffered(20, 20);
    let (app, effects) = answering(tight, || "0123456789");
    let mut unread = Vec::new();
    for key in ["a", "b", "c"] {
        let res = app.clone().oneshot(post("/orders", key, "order"));
        unread.push(res.await.expect("infallible"));
    }
    for replay in [false, true] {
        let response = send(&app, post("/orders", "kept", "order")).await;
        assert_eq!(response.is_replay(), replay);
    }
    assert_eq!(effects.count(), 4);
}

// S-082
#[tokio::test(start_paused = true)]
async fn requests_in_flight_are_bounded() {
    let layer = layer().with_max_in_flight(2).with_max_buffered(1000, 1000);
    let (app, effects) = app(layer.clone(), async |n, _| {
        sleep(Duration::from_secs(1)).await;
        tests::created(n)
    });
    let running: Vec<_> = ["a", "b"]
        .map(|key| {
            let app = app.clone();
            tokio::spawn(async move { send(&app, post("/orders", key, "order")).await })
        })
        .into_iter()
        .collect();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(layer.in_flight(), 2);
    let refused = send(&app, order()).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.code(), "caller-limit");
    let mut other = order();
    let credential = HeaderValue::from_static("Bearer other");
    other.headers_mut().insert("authorization", credential);
    let refused = send(&app, other).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.code(), "overloaded");
    assert_eq!(effects.count(), 2);
    let get = Request::get("/").body(Body::empty()).expect("a request");
    assert_eq!(
        send(&app, get).await.status,
        StatusCode::CREATED,
        "the layer does not cover it"
    );
    for task in running {
        assert_eq!(task.await.expect("no panic").status, StatusCode::CREATED);
    }
    assert_eq!(layer.in_flight(), 0);
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 4);
}

// S-073
#[tokio::test(start_paused = true)]
async fn chunked_upload_over_limit_skips_handler() {
    let (app, effects) = creating(layer().with_request_limit(1000));
    let body = Scripted::new((0..100).map(|_| Step::Data(Bytes::from(vec![7; 100]))));
    let taken = body.taken();
    let response = send(&app, post("/orders", "k", Body::new(body))).await;
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(taken.load(Ordering::SeqCst), 11, "the rest is not read");
    assert_eq!(effects.count(), 0);
}

// S-292
#[tokio::test(start_paused = true)]
async fn aborted_stream_frees_its_budget() {
    // If the client disconnects, the layer drops the rest of a streamed body.
    let dropped = Arc::new(Mutex::new(false));
    struct DropFlag(Arc<Mutex<bool>>);
    impl Drop for DropFlag {
        fn drop(&mut self) {
            *self.0.lock().expect("no panic") = true;
        }
    }
    let (app, effects) = {
        let dropped = Arc::clone(&dropped);
        app(layer(), move |_, _| {
            let drop_flag = DropFlag(Arc::clone(&dropped));
            let body = Scripted::new(["data: 1\n\n".into(), Step::Wait(Duration::MAX / 4)]);
            let body = body.map_frame(move |frame| {
                let _ = &drop_flag;
                frame
            });
            let headers = [("content-type", "text/event-stream")];
            std::future::ready((headers, Body::new(body)).into_response())
        })
    };
    let res = app.clone().oneshot(order()).await.expect("infallible");
    assert!(!*dropped.lock().expect("no panic"));
    drop(res);
    assert!(*dropped.lock().expect("no panic"));
    assert_not_retained(&send(&app, order()).await);
    assert_eq!(effects.count(), 1);
}
