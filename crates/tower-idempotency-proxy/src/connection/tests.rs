//! The times of connections.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::Semaphore,
    task::JoinHandle,
};

use super::*;
use crate::{Proxy, config::tests::minimal};

impl Transport for DuplexStream {
    fn reset_on_close(&self) {}
}

const IDLE: Duration = Duration::from_secs(4);
/// Timers and times of requests are rounded up to a millisecond.
const ROUNDING: Duration = Duration::from_millis(5);

fn connection() -> Arc<Connection> {
    let permit = Arc::new(Semaphore::new(1)).try_acquire_owned();
    let open = OpenConnection::new(permit.unwrap());
    Connection::new(([127, 0, 0, 1], 1).into(), false, open)
}

#[tokio::test(start_paused = true)]
async fn connection_without_request_has_time_for_first() {
    for (idle, expected) in [
        (IDLE, FIRST_REQUEST),
        (FIRST_REQUEST * 2, FIRST_REQUEST * 2),
    ] {
        let began = Instant::now();
        assert!(!connection().unused(began, idle).await);
        let elapsed = began.elapsed();
        assert!(
            elapsed >= expected && elapsed < expected + ROUNDING,
            "{elapsed:?}"
        );
    }
}

/// The times between the requests are shorter than `IDLE`, and each request takes longer.
#[tokio::test(start_paused = true)]
async fn connection_is_unused_after_last_request() {
    let (connection, began) = (connection(), Instant::now());
    let requests = async {
        for _ in 0..3 {
            sleep(IDLE * 3 / 4).await;
            let request = connection.begin_request();
            let other = connection.begin_request();
            sleep(IDLE / 2).await;
            drop(other);
            sleep(IDLE * 3 / 2).await;
            drop(request);
        }
        Instant::now()
    };
    let unused = async { (connection.unused(began, IDLE).await, Instant::now()) };
    let (last, (has_request, ended)) = tokio::join!(requests, unused);
    let elapsed = ended - last;
    assert!(has_request);
    assert!(elapsed >= IDLE && elapsed < IDLE + ROUNDING, "{elapsed:?}");
}

/// The client reads a part of the response, and then nothing.
#[tokio::test(start_paused = true)]
async fn connection_is_unused_after_last_read() {
    let (connection, began) = (connection(), Instant::now());
    let mut request = connection.begin_request();
    let response = async {
        // The request waits for its upstream.
        sleep(IDLE * 2).await;
        request.wait_for_client();
        sleep(IDLE * 3 / 4).await;
        request.resume();
        sleep(IDLE * 2).await;
        request.wait_for_client();
        Instant::now()
    };
    let unused = async { (connection.unused(began, IDLE).await, Instant::now()) };
    let (last, (has_request, ended)) = tokio::join!(response, unused);
    let elapsed = ended - last;
    assert!(has_request);
    assert!(elapsed >= IDLE && elapsed < IDLE + ROUNDING, "{elapsed:?}");
    // The end of a request that waits for its client is the end of its last read.
    drop(request);
    assert_eq!(connection.open_requests.load(Ordering::Acquire), 0);
}

/// Serves a connection in a task. Returns the stream of its client, which has a buffer of this size.
async fn start(
    connection: Arc<Connection>,
    buffer: usize,
    closing: &CancellationToken,
) -> (DuplexStream, JoinHandle<()>) {
    let proxy = Proxy::bind(minimal("http://127.0.0.1:3000")).await;
    let shared = Arc::clone(&proxy.unwrap().shared);
    let (client, stream) = duplex(buffer);
    let serving = serve_stream(shared, stream, connection, closing.clone());
    (client, tokio::spawn(serving))
}

/// hyper has no timeout of its own.
#[tokio::test(start_paused = true)]
async fn drain_ends_with_time_for_first_head() {
    let closing = CancellationToken::new();
    let (mut client, serving) = start(connection(), 1, &closing).await;
    // The proxy has read all bytes but one.
    client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    closing.cancel();
    sleep(LAST_READ * 2).await;
    assert!(!serving.is_finished());
    let ended = timeout(Duration::from_secs(60 * 60), serving).await;
    ended.unwrap().unwrap();
}

/// Returns the first bytes of a client with HTTP/2.
fn preface() -> Vec<u8> {
    let settings = [0_u8, 0, 0, 4, 0, 0, 0, 0, 0];
    [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings].concat()
}

/// The machine of the client has lost its power. Without a limit, hyper waits for the reply to a ping.
#[tokio::test(start_paused = true)]
async fn vanished_client_delays_drain_briefly() {
    // Neither a client that sends a byte nor one whose response is incomplete has vanished.
    for (sends, has_request) in [(false, false), (true, false), (false, true)] {
        let (connection, closing) = (connection(), CancellationToken::new());
        let request = has_request.then(|| connection.begin_request());
        let (mut client, serving) = start(connection, 64 * 1024, &closing).await;
        client.write_all(&preface()).await.unwrap();
        sleep(LAST_READ / 2).await;
        closing.cancel();
        sleep(LAST_READ / 2).await;
        if sends {
            client.write_all(&[0]).await.unwrap();
        }
        sleep(LAST_READ).await;
        assert_eq!(serving.is_finished(), !sends && !has_request);
        drop(request);
        let ended = timeout(Duration::from_secs(60 * 60), serving).await;
        ended.unwrap().unwrap();
    }
}

/// The client reads nothing at first, and so it cannot reply.
#[tokio::test(start_paused = true)]
async fn client_that_reads_late_has_not_vanished() {
    // The frames of the shutdown do not fit.
    const BUFFER: usize = 64;
    let closing = CancellationToken::new();
    let (mut client, serving) = start(connection(), BUFFER, &closing).await;
    client.write_all(&preface()).await.unwrap();
    sleep(LAST_READ / 2).await;
    closing.cancel();
    sleep(LAST_READ * 3 / 2).await;
    assert!(!serving.is_finished());
    client.read_exact(&mut [0; BUFFER]).await.unwrap();
    // The proxy has written the rest for less than the limit.
    sleep(LAST_READ * 3 / 4).await;
    assert!(!serving.is_finished());
    let ended = timeout(LAST_READ, serving).await;
    ended.unwrap().unwrap();
}
