//! Servers on loopback sockets, and clients that can misbehave: HTTP/1 by hand, HTTP/2 by its frames.

use std::{
    future::{Future, poll_fn},
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use axum::Router;
use bytes::{Bytes, BytesMut};
use h2::{Reason, SendStream, client};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinHandle,
};

use crate::TestResponse;

/// A server on a free port, for HTTP/1 and HTTP/2.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
}

impl Server {
    /// Serves `app`.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    pub async fn start(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let (stop, mut stopping) = watch::channel(false);
        let (done, stopped) = watch::channel(false);
        tokio::spawn(async move {
            let stopping = async move {
                let _ = stopping.wait_for(|stopping| *stopping).await;
            };
            let served = axum::serve(listener, app).with_graceful_shutdown(stopping);
            served.await.expect("axum's server does not fail");
            done.send_replace(true);
        });
        Self {
            addr,
            stop,
            stopped,
        }
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops accepting connections, and waits for the open ones.
    ///
    /// # Panics
    ///
    /// Panics if the server panicked.
    pub async fn shut_down(&self) {
        self.stop.send_replace(true);
        let mut stopped = self.stopped.clone();
        let stopped = stopped.wait_for(|stopped| *stopped).await;
        stopped.expect("the server does not panic");
    }
}

/// The way in which a client disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disconnect {
    /// Closes the connection: FIN.
    Close,
    /// Resets the connection: RST.
    Reset,
}

/// An HTTP/1 connection, byte by byte.
#[derive(Debug)]
pub struct H1 {
    stream: TcpStream,
    unread: BytesMut,
}

impl H1 {
    /// Connects.
    ///
    /// # Panics
    ///
    /// Panics if no server listens there.
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("a server");
        stream.set_nodelay(true).expect("a TCP socket");
        Self {
            stream,
            unread: BytesMut::new(),
        }
    }

    /// Sends bytes as they are.
    ///
    /// # Panics
    ///
    /// Panics if the server has closed the connection.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let sent = self.stream.write_all(bytes.as_ref()).await;
        sent.expect("an open connection");
    }

    /// Closes the sending side, and continues to read.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn half_close(&mut self) {
        let closed = self.stream.shutdown().await;
        closed.expect("an open connection");
    }

    /// Disconnects.
    ///
    /// # Panics
    ///
    /// Panics if the socket takes no options.
    pub fn disconnect(self, how: Disconnect) {
        if how == Disconnect::Reset {
            self.stream.set_zero_linger().expect("a TCP socket");
        }
    }

    /// Returns the next response, or `None` if the connection ends first. Informational responses are returned too.
    ///
    /// # Panics
    ///
    /// Panics if the response is not HTTP, or breaks off.
    pub async fn response(&mut self) -> Option<TestResponse> {
        let head = loop {
            if let Some(end) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break self.unread.split_to(end + 4);
            }
            if !self.read_more().await {
                assert!(self.unread.is_empty(), "the response broke off in its head");
                return None;
            }
        };
        let head = std::str::from_utf8(&head).expect("a head of text");
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.get(9..12));
        let status = status.and_then(|status| status.parse::<StatusCode>().ok());
        let status = status.expect("a status line");
        let mut headers = HeaderMap::new();
        for line in lines.take_while(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').expect("a header line");
            headers.append(
                name.parse::<HeaderName>().expect("a header name"),
                HeaderValue::from_str(value.trim()).expect("a header value"),
            );
        }
        let body = self.body(status, &headers).await;
        headers.remove(http::header::DATE);
        Some(TestResponse {
            status,
            headers,
            body,
        })
    }

    /// Reads until the bytes of the next response contain `text`. Returns `false` if the connection ends first.
    pub async fn has_received(&mut self, text: &str) -> bool {
        let is_there = |unread: &[u8]| unread.windows(text.len()).any(|it| it == text.as_bytes());
        while !is_there(&self.unread) {
            if !self.read_more().await {
                return false;
            }
        }
        true
    }

    async fn body(&mut self, status: StatusCode, headers: &HeaderMap) -> Bytes {
        if status.is_informational() || status == StatusCode::NO_CONTENT {
            return Bytes::new();
        }
        if let Some(length) = headers.get(http::header::CONTENT_LENGTH) {
            let length = length.to_str().ok().and_then(|length| length.parse().ok());
            return self.take(length.expect("a length")).await;
        }
        if headers.contains_key(http::header::TRANSFER_ENCODING) {
            let mut body = BytesMut::new();
            loop {
                let size = self.line().await;
                let size = usize::from_str_radix(&size, 16).expect("the size of a chunk");
                body.extend_from_slice(&self.take(size).await);
                assert_eq!(self.line().await, "", "a chunk ends its line");
                if size == 0 {
                    return body.freeze();
                }
            }
        }
        while self.read_more().await {}
        self.unread.split().freeze()
    }

    async fn line(&mut self) -> String {
        loop {
            if let Some(end) = self.unread.windows(2).position(|two| two == b"\r\n") {
                let line = self.unread.split_to(end + 2);
                return String::from_utf8_lossy(&line[..end]).into_owned();
            }
            assert!(self.read_more().await, "the response broke off in a line");
        }
    }

    async fn take(&mut self, length: usize) -> Bytes {
        while self.unread.len() < length {
            assert!(self.read_more().await, "the response broke off in its body");
        }
        self.unread.split_to(length).freeze()
    }

    /// Reads more bytes. Returns `false` at the end of the connection or after an error.
    async fn read_more(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.unread).await, Ok(1..))
    }
}

/// Returns a POST under a key, as bytes.
#[must_use]
pub fn post_bytes(path: &str, key: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Sends a POST over a separate connection.
///
/// # Panics
///
/// Panics if there is no response.
pub async fn post_h1(addr: SocketAddr, path: &str, key: &str, body: &str) -> TestResponse {
    let mut client = H1::connect(addr).await;
    client.send(post_bytes(path, key, body)).await;
    client.response().await.expect("an answer")
}

/// An HTTP/2 connection.
#[derive(Debug)]
pub struct H2 {
    client: client::SendRequest<Bytes>,
    connection: JoinHandle<()>,
}

/// A request on an HTTP/2 connection.
#[derive(Debug)]
pub struct Stream {
    response: client::ResponseFuture,
    body: SendStream<Bytes>,
}

impl H2 {
    /// Connects.
    ///
    /// # Panics
    ///
    /// Panics if no server listens there.
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("a server");
        stream.set_nodelay(true).expect("a TCP socket");
        let (client, connection) = client::handshake(stream).await.expect("an HTTP/2 server");
        let connection = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { client, connection }
    }

    /// Sends the head of a POST without its body.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn start(&self, path: &str, key: &str) -> Stream {
        self.start_announcing(path, key, None).await
    }

    /// Like [`start`](Self::start), and announces the length of the body.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn start_announcing(&self, path: &str, key: &str, length: Option<u64>) -> Stream {
        self.start_by(None, path, key, length).await
    }

    /// Like [`start_announcing`](Self::start_announcing), with the credential of a caller.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn start_by(
        &self,
        caller: Option<&str>,
        path: &str,
        key: &str,
        length: Option<u64>,
    ) -> Stream {
        let mut req = Request::post(format!("http://test{path}")).header("idempotency-key", key);
        if let Some(caller) = caller {
            req = req.header(http::header::AUTHORIZATION, caller);
        }
        if let Some(length) = length {
            req = req.header(http::header::CONTENT_LENGTH, length);
        }
        let req = req.body(()).expect("a valid request");
        let client = self.client.clone().ready().await;
        let mut client = client.expect("an open connection");
        let (response, body) = client.send_request(req, false).expect("an open connection");
        Stream { response, body }
    }

    /// Sends a whole POST with the credential of a caller.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn post_by(&self, caller: Option<&str>, path: &str, key: &str, body: &str) -> Stream {
        let mut stream = self.start_by(caller, path, key, None).await;
        stream.send(body.to_owned(), true);
        stream
    }

    /// Sends a whole POST.
    ///
    /// # Panics
    ///
    /// Panics if the connection is closed.
    pub async fn post(&self, path: &str, key: &str, body: &str) -> Stream {
        let mut stream = self.start(path, key).await;
        stream.send(body.to_owned(), true);
        stream
    }

    /// Drops the connection.
    pub async fn lose(self) {
        self.connection.abort();
        let _ = self.connection.await;
    }
}

impl Stream {
    /// Sends a piece of the body.
    ///
    /// # Panics
    ///
    /// Panics if the stream is closed.
    pub fn send(&mut self, data: impl Into<Bytes>, last: bool) {
        let sent = self.body.send_data(data.into(), last);
        sent.expect("an open stream");
    }

    /// Sends bytes of the body as far as the windows of the stream and the connection allow, and counts them.
    ///
    /// # Panics
    ///
    /// Panics if the stream is closed.
    pub async fn send_within_windows(&mut self, bytes: usize, sent: &AtomicUsize) {
        let mut left = bytes;
        while left > 0 {
            self.body.reserve_capacity(left.min(64 * 1024));
            let capacity = poll_fn(|cx| self.body.poll_capacity(cx)).await;
            let piece = left.min(capacity.expect("an open stream").expect("an open stream"));
            if piece == 0 {
                continue;
            }
            self.send(vec![0; piece], false);
            sent.fetch_add(piece, Ordering::Relaxed);
            left -= piece;
        }
    }

    /// Sends RST_STREAM.
    pub fn reset(self) {
        self.reset_for(Reason::CANCEL);
    }

    /// Sends RST_STREAM with this reason.
    pub fn reset_for(mut self, reason: Reason) {
        self.body.send_reset(reason);
    }

    /// Returns the response, or the error of the stream or the connection.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream was reset, or broke off.
    pub async fn response(self) -> Result<TestResponse, h2::Error> {
        let (mut head, mut body) = self.response.await?.into_parts();
        let mut data = BytesMut::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            body.flow_control().release_capacity(chunk.len())?;
            data.extend_from_slice(&chunk);
        }
        head.headers.remove(http::header::DATE);
        Ok(TestResponse {
            status: head.status,
            headers: head.headers,
            body: data.freeze(),
        })
    }
}

/// Returns a listener that accepts no further connection: the kernel drops the packets of clients. The streams fill its queue.
///
/// # Panics
///
/// Panics if there is no free port.
pub async fn full_listener() -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().expect("a socket");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any_port).expect("a port");
    let listener = socket.listen(1).expect("a listener");
    let address = listener.local_addr().expect("an address");
    let mut queued = Vec::new();
    // The queue holds one connection more than the backlog.
    for _ in 0..2 {
        queued.push(TcpStream::connect(address).await.expect("a connection"));
    }
    (listener, queued)
}

/// Returns the output of `future`, or `None` if it is still pending after a moment. Use it for events that must not
/// happen.
pub async fn poll_briefly<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(Duration::from_millis(100), future)
        .await
        .ok()
}
