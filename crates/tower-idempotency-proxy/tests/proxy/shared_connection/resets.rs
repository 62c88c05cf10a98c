//! Resets of streams. The upstream ends a connection at the first one, and the outcomes of the other requests are then unknown.

use std::{future::poll_fn, net::SocketAddr, sync::atomic::Ordering, time::Duration};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{Request, Response};
use tests::barrier::{Barrier, bounded, eventually};
use tokio::{net::TcpStream, sync::Notify, time::sleep};

use super::{PIECE, Payments, WINDOW, finish_payment, start_payment};
use crate::harness::{Served, config, exchange, post};

/// Number of kept responses from which requests with a lease share no connection.
const MAX_KEPT: usize = 256;
/// Pieces of a response of 5 MiB.
const DOWNLOAD: usize = 80;

impl Payments {
    /// Sends an event, and waits for the reset of the stream.
    pub(super) async fn send_event(self, mut respond: SendResponse<Bytes>, reset: &Notify) {
        let response = Response::builder().header("content-type", "text/event-stream");
        let response = response.body(()).unwrap();
        let mut events = respond.send_response(response, false).unwrap();
        let event = Bytes::from_static(b"data: 1\n\n");
        events.send_data(event, false).unwrap();
        let is_reset = poll_fn(|cx| events.poll_reset(cx)).await.is_ok();
        self.count_reset(is_reset, reset);
    }

    /// Sends a response that is too large for a record, and its end in a frame of its own.
    pub(super) async fn send_download(self, mut respond: SendResponse<Bytes>) {
        let head = Response::builder().header("content-length", DOWNLOAD * PIECE);
        let mut download = respond
            .send_response(head.body(()).unwrap(), false)
            .unwrap();
        for _ in 0..DOWNLOAD {
            download.reserve_capacity(PIECE);
            while download.capacity() < PIECE {
                let capacity = poll_fn(|cx| download.poll_capacity(cx)).await;
                let Some(Ok(_)) = capacity else { return };
            }
            let piece = Bytes::from_static(&[b'x'; PIECE]);
            download.send_data(piece, false).unwrap();
        }
        download.send_data(Bytes::new(), true).unwrap();
    }

    /// Counts a reset, and ends its connection.
    pub(super) fn count_reset(&self, is_reset: bool, reset: &Notify) {
        if is_reset {
            self.resets.fetch_add(1, Ordering::SeqCst);
            reset.notify_one();
        }
    }
}

/// Sends requests with a lease over one connection. Returns the bodies of their responses, which do not end.
async fn open_events(proxy: SocketAddr, key: &str, count: usize) -> Vec<RecvStream> {
    let stream = TcpStream::connect(proxy).await.unwrap();
    let (mut sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut bodies = Vec::new();
    for number in 0..count {
        sender = sender.ready().await.unwrap();
        let request = Request::post("http://a/events");
        let request = request.header("idempotency-key", format!("{key}-{number}"));
        let request = request.body(()).unwrap();
        let (response, _) = sender.send_request(request, true).unwrap();
        let response = bounded(response).await.unwrap();
        assert_eq!(response.status(), 200);
        bodies.push(response.into_body());
    }
    bodies
}

/// Sends requests with a lease until the proxy opens a second connection for one. Returns the bodies of their responses.
async fn open_events_on_second_connection(
    upstream: &Payments,
    proxy: SocketAddr,
) -> Vec<RecvStream> {
    let mut bodies = Vec::new();
    while upstream.connections.load(Ordering::SeqCst) < 2 {
        // A connection has 100 streams.
        assert!(bodies.len() < 90, "the first connection is used again");
        let key = format!("other-{}", bodies.len());
        bodies.extend(open_events(proxy, &key, 1).await);
        sleep(Duration::from_millis(100)).await;
    }
    bodies
}

#[tokio::test]
async fn cancelled_response_breaks_no_leased_request() {
    let (upstream, proxy, payment) = start_payment().await;
    drop(open_events(proxy.address, "cancelled", 1).await);
    // A reset would arrive before the next connection.
    let others = open_events_on_second_connection(&upstream, proxy.address).await;
    let resets = || upstream.resets.load(Ordering::SeqCst);
    assert_eq!(resets(), 0);

    finish_payment(&upstream, &proxy, payment).await;
    // Some of these may have the first connection.
    drop(others);
    eventually("the stream is reset", || resets() > 0).await;
}

#[tokio::test]
async fn timed_out_request_breaks_no_leased_request() {
    let upstream = Payments::new(Barrier::open());
    let lines = "http2 = true\ntimeout = \"10s\"";
    let proxy = Served::start(&config(upstream.start().await, lines, "")).await;
    let open = open_events(proxy.address, "open", 1).await;
    let reply = exchange(proxy.address, post("/hang", "hanging", "1")).await;
    assert_eq!(reply.status(), 504, "{reply:?}");
    assert_eq!(upstream.connections.load(Ordering::SeqCst), 1);
    // A reset would arrive before the next connection. The proxy delays it for 10 s from the timeout.
    let _others = open_events_on_second_connection(&upstream, proxy.address).await;
    let resets = || upstream.resets.load(Ordering::SeqCst);
    assert_eq!(resets(), 0);
    drop(open);
    eventually("the stream is reset", || resets() > 0).await;
}

/// The upstream does not read the body of a request. This body fills the window of the connection until its stream is reset.
#[tokio::test]
async fn timed_out_upload_delays_no_leased_request() {
    let upstream = Payments::new(Barrier::open());
    let lines = "http2 = true\ntimeout = \"10s\"";
    let proxy = Served::start(&config(upstream.start().await, lines, "")).await;
    let upload = post("/stuck", "upload", &"x".repeat(70_000));
    let upload = tokio::spawn(exchange(proxy.address, upload));
    let unread = || upstream.unread.load(Ordering::SeqCst);
    eventually("the window is full", || unread() == WINDOW).await;
    // The payment waits for the window. After the timeout of the upload, it has 5 s left.
    sleep(Duration::from_secs(5)).await;
    let payment = exchange(proxy.address, post("/pay", "payment", "1")).await;
    assert_eq!(payment.status(), 201, "{payment:?}");
    assert_eq!(upstream.connections.load(Ordering::SeqCst), 1);
    assert_eq!(upstream.executed.load(Ordering::SeqCst), 1);
    let upload = bounded(upload).await.unwrap();
    assert_eq!(upload.status(), 504, "{upload:?}");
}

/// A client with HTTP/1.1 has read the response before its end arrives in a frame of its own.
#[tokio::test]
async fn complete_response_leaves_connection_in_use() {
    let upstream = Payments::new(Barrier::open());
    let proxy = Served::start(&config(upstream.start().await, "http2 = true", "")).await;
    let connections = || upstream.connections.load(Ordering::SeqCst);
    // If the end arrives too late, the response counts as cancelled.
    for round in 0..50 {
        let before = connections();
        for number in 1..=2 {
            let key = format!("{round}-{number}");
            let reply = exchange(proxy.address, post("/download", &key, "1")).await;
            assert_eq!(reply.status(), 200);
        }
        if before > 0 && connections() == before {
            return;
        }
    }
    panic!("the connection of a complete response is not used again");
}

/// Pays twice, and returns the number of connections that the proxy opens for these requests.
async fn count_connections(upstream: &Payments, proxy: SocketAddr, round: usize) -> usize {
    let connections = || upstream.connections.load(Ordering::SeqCst);
    let before = connections();
    for number in 1..=2 {
        let key = format!("payment-{round}-{number}");
        let reply = exchange(proxy, post("/pay", &key, "1")).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
    }
    connections() - before
}

/// A kept response takes memory, and no limit of its client counts it.
#[tokio::test]
async fn kept_responses_are_limited() {
    let upstream = Payments::new(Barrier::open());
    let address = upstream.start_with(1_000).await;
    let lines = "http2 = true\ntimeout = \"120s\"";
    let proxy = Served::start(&config(address, lines, "")).await;
    let other = open_events(proxy.address, "other", 1).await;
    // Of several clients: h2 ends a connection on which too many small frames arrive.
    let mut kept = Vec::new();
    for client in 0..MAX_KEPT / 32 {
        kept.push(open_events(proxy.address, &format!("kept-{client}"), 32).await);
    }
    drop(kept);
    let mut rounds = 0..400;
    // One response less, and both payments share a connection.
    loop {
        let round = rounds.next().expect("kept responses are limited");
        if count_connections(&upstream, proxy.address, round).await == 2 {
            break;
        }
    }
    assert_eq!(upstream.resets.load(Ordering::SeqCst), 0);
    drop(other);
    loop {
        let round = rounds.next().expect("connections are shared again");
        if count_connections(&upstream, proxy.address, round).await == 0 {
            break;
        }
    }
}
