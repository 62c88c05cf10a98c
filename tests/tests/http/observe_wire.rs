//! Observation on the wire: the same bytes as without it, for requests and responses of each form.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

use std::{future::pending, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use h2::client;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use tests::{
    Effects, Scripted, Step, app,
    barrier::{bounded, eventually},
    wire::{Disconnect, H1, Server, post_bytes},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
};
use tower_idempotency::{
    Enforcement::{Observe, Off},
    IdempotencyLayer, MemoryStore, MissingKey, Principal,
    conformance::{Fault, FaultInjector},
};

/// The layers whose wire is compared: without observation first.
fn layers() -> Vec<(&'static str, IdempotencyLayer)> {
    let hanging = FaultInjector::new(MemoryStore::new());
    hanging.set_fault_for_all(&Fault::HangCall);
    let down = FaultInjector::new(MemoryStore::new());
    down.set_fault_for_all(&Fault::CallLost);
    let strict = |layer: IdempotencyLayer| {
        layer
            .with_missing_key(MissingKey::Reject)
            .with_request_limit(2000)
            .with_response_limit(2000)
            .with_max_in_flight(0)
    };
    let layer = || strict(IdempotencyLayer::new(MemoryStore::new()));
    let behind = |store| strict(IdempotencyLayer::new(store)).with_enforcement(Observe);
    let principal = Principal::extension(|(): &()| *b"missing");
    vec![
        ("off", layer().with_enforcement(Off)),
        ("observed", layer().with_enforcement(Observe)),
        (
            "observed, no principal",
            layer().with_enforcement(Observe).with_principal(principal),
        ),
        (
            "observed, store behind",
            behind(FaultInjector::new(MemoryStore::new())),
        ),
        ("observed, store down", behind(down)),
        ("observed, store hangs", behind(hanging)),
    ]
}

fn trailers() -> Step {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("7"));
    Step::Trailers(trailers)
}

/// Responds by the path.
async fn respond(req: Request<Body>) -> Response {
    let path = req.uri().path().to_owned();
    let large = || Bytes::from(vec![b'x'; 100_000]);
    let stream = |steps: Vec<Step>| Body::new(Scripted::new(steps));
    match path.as_str() {
        "/echo" => match req.into_body().collect().await {
            Ok(body) => {
                let sum = body
                    .trailers()
                    .and_then(|lines| lines.get("x-sum").cloned());
                let sum = sum.unwrap_or(HeaderValue::from_static("none"));
                ([("x-request-sum", sum)], body.to_bytes()).into_response()
            }
            Err(_) => (StatusCode::BAD_REQUEST, "incomplete").into_response(),
        },
        "/half" => {
            let mut body = req.into_body();
            let frame = body.frame().await;
            let is_some = frame.is_some_and(|frame| frame.is_ok());
            (StatusCode::ACCEPTED, format!("{is_some}")).into_response()
        }
        "/ignored" => "ignored".into_response(),
        "/empty" => StatusCode::NO_CONTENT.into_response(),
        "/unchanged" => (StatusCode::NOT_MODIFIED, [("content-length", "7")]).into_response(),
        "/failed" => (StatusCode::INTERNAL_SERVER_ERROR, "failed").into_response(),
        "/large" => large().into_response(),
        "/chunks" => {
            let steps = vec!["a".into(), "bc".into(), Step::Data(large()), trailers()];
            let mut res = stream(steps).into_response();
            let names = HeaderValue::from_static("x-sum");
            res.headers_mut().insert("trailer", names);
            res
        }
        "/broken" => {
            // A server that gets the error directly after the data drops both.
            let pause = Step::Wait(Duration::from_millis(1));
            stream(vec!["begin".into(), pause, Step::Fail]).into_response()
        }
        "/short" => {
            let pause = Step::Wait(Duration::from_millis(1));
            let mut res = stream(vec!["begin".into(), pause]).into_response();
            res.headers_mut().insert("content-length", 10.into());
            res
        }
        "/events" => {
            let steps = vec![
                "data: 1\n\n".into(),
                Step::Wait(Duration::from_millis(1)),
                "data: 2\n\n".into(),
            ];
            ([("content-type", "text/event-stream")], stream(steps)).into_response()
        }
        "/directive" => ([("x-idempo-policy", "no-store")], "quote").into_response(),
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn serve(layer: IdempotencyLayer) -> (Server, Effects) {
    let (app, effects): (Router, _) = app(layer, |_, req| respond(req));
    (Server::start(app).await, effects)
}

const PATHS: [&str; 12] = [
    "/echo",
    "/half",
    "/ignored",
    "/empty",
    "/unchanged",
    "/failed",
    "/large",
    "/chunks",
    "/broken",
    "/short",
    "/events",
    "/directive",
];

/// The raw requests, as parts that are sent one after another. After each part but the last, the client waits for bytes.
fn requests() -> Vec<Vec<Vec<u8>>> {
    let head = |path: &str, lines: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{lines}\r\n")
    };
    let mut requests = Vec::new();
    let mut push = |parts: &[&str]| {
        requests.push(parts.iter().map(|part| part.as_bytes().to_vec()).collect());
    };
    let key = "idempotency-key: 8e03978e\r\n";
    for path in PATHS {
        for lines in [key, "", "idempotency-key: \"\r\n"] {
            let announced = format!("{lines}content-length: 3\r\nte: trailers\r\n");
            push(&[&(head(path, &announced) + "abc")]);
            push(&[&head(path, lines)]);
        }
        let chunked = format!("{key}transfer-encoding: chunked\r\ntrailer: x-sum\r\n");
        push(&[&(head(path, &chunked) + "1\r\na\r\n2\r\nbc\r\n0\r\nx-sum: 9\r\n\r\n")]);
        // Another body under the key, and the first one again.
        push(&[&(head(path, &format!("{key}content-length: 3\r\n")) + "xyz")]);
        push(&[&(head(path, &format!("{key}content-length: 3\r\n")) + "abc")]);
        let large = "y".repeat(5000);
        push(&[&(head(path, &format!("{key}content-length: 5000\r\n")) + &large)]);
    }
    let expect = format!("{key}content-length: 3\r\nexpect: 100-continue\r\n");
    push(&[&head("/echo", &expect), "abc"]);
    let aborted = format!("{key}content-length: 30\r\n");
    push(&[&(head("/echo", &aborted) + "abc")]);
    let broken = format!("{key}transfer-encoding: chunked\r\n");
    push(&[&(head("/echo", &broken) + "1\r\na\r\nzz\r\n")]);
    push(&[&(head("/echo", &broken) + "1\r\na\r\n")]);
    requests
}

/// Sends raw parts, and returns all bytes of the server without the date.
async fn exchange(server: &Server, parts: &[Vec<u8>]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.addr()).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut reply = Vec::new();
    let (last, first) = parts.split_last().unwrap();
    for part in first {
        stream.write_all(part).await.unwrap();
        while !reply.ends_with(b"\r\n\r\n") {
            let read = bounded(stream.read_buf(&mut reply)).await;
            assert!(read.unwrap() > 0, "the server closed the connection");
        }
    }
    // A server that rejects the head may have closed the connection.
    let _ = stream.write_all(last).await;
    if is_aborted(last) {
        let _ = stream.shutdown().await;
    }
    // Ends with FIN or, after a broken response, with RST.
    let _ = bounded(stream.read_to_end(&mut reply)).await;
    without_date(&reply)
}

/// Returns `true` if the request announces more than the client sends.
fn is_aborted(request: &[u8]) -> bool {
    let request = String::from_utf8_lossy(request);
    request.contains("content-length: 30\r\n") || request.ends_with("1\r\na\r\n")
}

fn without_date(reply: &[u8]) -> Vec<u8> {
    let date = b"date: ";
    let mut rest = reply;
    let mut kept = Vec::new();
    while let Some(at) = rest.windows(date.len()).position(|bytes| bytes == date) {
        kept.extend_from_slice(&rest[..at]);
        let end = rest[at..].windows(2).position(|bytes| bytes == b"\r\n");
        rest = &rest[at + end.unwrap() + 2..];
    }
    kept.extend_from_slice(rest);
    kept
}

// S-850
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_bytes_do_not_differ() {
    let requests = requests();
    let mut expected: Option<(Vec<Vec<u8>>, u64)> = None;
    for (name, layer) in layers() {
        let (server, effects) = serve(layer).await;
        let mut replies = Vec::new();
        for parts in &requests {
            replies.push(exchange(&server, parts).await);
        }
        let Some((expected, executed)) = &expected else {
            for (parts, reply) in requests.iter().zip(&replies) {
                let text = String::from_utf8_lossy(&parts[0]);
                let is_aborted = is_aborted(&parts[0]);
                assert!(reply.starts_with(b"HTTP/1.1 ") || is_aborted, "{text}");
            }
            let is_continued = |reply: &Vec<u8>| reply.starts_with(b"HTTP/1.1 100 Continue\r\n");
            assert!(
                replies.iter().any(is_continued),
                "a case with an interim response"
            );
            expected = Some((replies, effects.count()));
            continue;
        };
        for ((parts, reply), expected) in requests.iter().zip(&replies).zip(expected) {
            assert_eq!(
                String::from_utf8_lossy(reply),
                String::from_utf8_lossy(expected),
                "{name}: {}",
                String::from_utf8_lossy(&parts[0])
            );
        }
        assert_eq!(effects.count(), *executed, "{name}");
    }
}

/// Returns the frames of a response, or an error if no attempt gets its head.
///
/// On a busy machine the client can receive a head and the reset after it at once, and then drops the head.
async fn frames(server: &Server, path: &str, key: Option<&str>, body: &[&'static str]) -> String {
    for _ in 0..50 {
        let seen = frames_of_attempt(server, path, key, body).await;
        if seen != "error" {
            return seen;
        }
    }
    "error".to_owned()
}

/// The frames of a response: head, sizes and bytes of its data, trailers, and the way in which it ends.
async fn frames_of_attempt(
    server: &Server,
    path: &str,
    key: Option<&str>,
    body: &[&'static str],
) -> String {
    let stream = TcpStream::connect(server.addr()).await.unwrap();
    // With a small window, the sizes of frames depend on the time of its updates.
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(1 << 20)
        .initial_connection_window_size(1 << 20);
    let handshake = builder.handshake::<_, Bytes>(stream);
    let (sender, connection) = handshake.await.unwrap();
    let driver = tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let mut req = Request::post(format!("http://test{path}"));
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    let ends_with_head = body.is_empty();
    let (res, mut upload) = sender
        .send_request(req.body(()).unwrap(), ends_with_head)
        .unwrap();
    if let Some((last, first)) = body.split_last() {
        for part in first {
            // The server may have responded without the rest.
            let _ = upload.send_data(Bytes::from_static(part.as_bytes()), false);
        }
        let mut lines = HeaderMap::new();
        lines.insert("x-sum", HeaderValue::from_static("9"));
        let _ = upload.send_data(Bytes::from_static(last.as_bytes()), false);
        let _ = upload.send_trailers(lines);
    }
    let mut seen = String::new();
    match bounded(res).await {
        Ok(res) => {
            let (mut head, mut body) = res.into_parts();
            head.headers.remove("date");
            seen += &format!(
                "{} {:?} {}",
                head.status,
                head.headers,
                body.is_end_stream()
            );
            let mut sizes = Vec::new();
            while let Some(data) = bounded(body.data()).await {
                match data {
                    Ok(data) => {
                        let _ = body.flow_control().release_capacity(data.len());
                        sizes.push(data.len());
                    }
                    // Either side may be the first to notice a wrong length.
                    Err(_) => {
                        seen += " error";
                        break;
                    }
                }
            }
            let trailers = bounded(body.trailers()).await.ok();
            seen += &format!(" {sizes:?} {trailers:?}");
        }
        Err(_) => seen += "error",
    }
    driver.abort();
    seen
}

// S-850
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http2_frames_do_not_differ() {
    let mut expected = Vec::new();
    for (name, layer) in layers() {
        let (server, _) = serve(layer).await;
        let mut seen = Vec::new();
        for path in PATHS {
            for key in [Some("k"), None, Some("k")] {
                for body in [&[][..], &["abc"], &["a", "bc"]] {
                    let frames = frames(&server, path, key, body).await;
                    seen.push(format!("{path} {key:?} {body:?}: {frames}"));
                }
            }
        }
        if expected.is_empty() {
            expected = seen;
            continue;
        }
        for (seen, expected) in seen.iter().zip(&expected) {
            assert_eq!(seen, expected, "{name}");
        }
    }
}

// S-850
/// The handler of a client that leaves is cancelled, as without the layer.
#[tokio::test]
async fn client_that_leaves_cancels_its_handler() {
    for (name, layer) in layers() {
        let handlers = Arc::new(());
        let (started, mut running) = mpsc::channel(1);
        let held = Arc::downgrade(&handlers);
        let (app, _) = app(layer, move |_, _| {
            let (started, held) = (started.clone(), held.upgrade());
            async move {
                started.send(()).await.unwrap();
                pending::<()>().await;
                drop(held);
            }
        });
        let server = Server::start(app).await;
        let mut client = H1::connect(server.addr()).await;
        client.send(post_bytes("/", "k", "abc")).await;
        bounded(running.recv()).await.unwrap();
        assert_eq!(Arc::strong_count(&handlers), 2, "{name}");
        client.disconnect(Disconnect::Reset);
        eventually("the handler is cancelled", || {
            Arc::strong_count(&handlers) == 1
        })
        .await;
    }
}
