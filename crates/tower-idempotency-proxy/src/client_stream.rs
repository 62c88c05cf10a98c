//! The stream of a client's connection.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use http::Version;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

use crate::lengths::{LengthCheck, Reader};

/// A connection of TCP, with or without TLS.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Lets the kernel reset the connection when it is closed.
    fn reset_on_close(&self);
}

impl Transport for TcpStream {
    fn reset_on_close(&self) {
        // If this fails, the client sees an orderly end, and takes the incomplete response for a complete one.
        let _ = self.set_zero_linger();
    }
}

impl Transport for TlsStream<TcpStream> {
    fn reset_on_close(&self) {
        self.get_ref().0.reset_on_close();
    }
}

/// The state of a stream. The connection and its service share it.
#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) lengths: Arc<LengthCheck>,
    /// The number of reads with bytes.
    reads: AtomicU64,
    /// `true` if the last write or flush has to wait until the client reads.
    is_blocked: AtomicBool,
    /// `true` if the last request has HTTP/1.0. The end of the connection may be the end of its response.
    is_http10: AtomicBool,
}

impl StreamState {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            lengths: LengthCheck::new(),
            reads: AtomicU64::new(0),
            is_blocked: AtomicBool::new(false),
            is_http10: AtomicBool::new(false),
        })
    }

    /// Returns the number of times that the client has sent bytes.
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Returns `true` if bytes wait until the client reads earlier ones.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Relaxed)
    }

    fn set_blocked(&self, is_blocked: bool) {
        self.is_blocked.store(is_blocked, Ordering::Relaxed);
    }

    /// Sets the version of the last request.
    pub(crate) fn set_version(&self, version: Version) {
        let is_http10 = version == Version::HTTP_10;
        self.is_http10.store(is_http10, Ordering::Relaxed);
    }
}

/// The stream of a connection. Checks the lengths of the requests that hyper reads from it. Resets the connection if a response of
/// HTTP/1.0 is incomplete.
///
/// hyper reads the head of a request before it calls the service. So the result of the check is known by then.
pub(crate) struct ClientStream<S: Transport> {
    stream: S,
    state: Arc<StreamState>,
    reader: Reader,
    /// `true` if hyper has ended the stream, after it had written all bytes.
    has_ended: bool,
}

impl<S: Transport> ClientStream<S> {
    pub(crate) fn new(stream: S, state: Arc<StreamState>) -> Self {
        let reader = Reader::new(Arc::clone(&state.lengths));
        Self {
            stream,
            state,
            reader,
            has_ended: false,
        }
    }
}

impl<S: Transport> Drop for ClientStream<S> {
    fn drop(&mut self) {
        if !self.has_ended && self.state.is_http10.load(Ordering::Relaxed) {
            self.stream.reset_on_close();
        }
    }
}

impl<S: Transport> AsyncRead for ClientStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        let bytes = &buf.filled()[before..];
        if !bytes.is_empty() {
            this.state.reads.fetch_add(1, Ordering::Relaxed);
        }
        this.reader.read(bytes);
        Poll::Ready(Ok(()))
    }
}

impl<S: Transport> AsyncWrite for ClientStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.state.set_blocked(written.is_pending());
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.state.set_blocked(flushed.is_pending());
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        this.has_ended = true;
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.state.set_blocked(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
