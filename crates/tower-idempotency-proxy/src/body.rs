//! Bodies of requests to the upstream, and of responses to the client.

use std::{
    mem,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use pin_project_lite::pin_project;
use tokio::time::Instant;

use crate::{
    connection::{Connection, OpenRequest},
    headers::{self, MAX_LINES},
    upstream::Stream,
};

/// Largest frame that hyper gets at once. Each frame that is read is progress. The layer passes a body that it has buffered as one
/// frame.
const MAX_FRAME: usize = 64 * 1024;

/// Smallest part that is not copied. It keeps the buffer into which hyper has read it, of 8 KiB or more.
const MIN_SHARED: usize = 4 * 1024;

/// An error while a body is read.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// A body from a client or an upstream. It fails if its end is missing.
///
/// hyper ends a body of HTTP/2 without an error if its stream was reset with NO_ERROR (RFC 9113, section 8.1).
pub(crate) struct ReceivedBody {
    /// `None` only while the value is dropped.
    body: Option<Incoming>,
    is_http2: bool,
    /// The stream is open until its body has ended or is dropped.
    stream: Option<Stream>,
    /// The connection of the client. It may be closed before the upstream drops the body.
    connection: Weak<Connection>,
    /// Lines of `Connection` in the head. The body passes no trailer that they name.
    connection_lines: Vec<HeaderValue>,
}

impl ReceivedBody {
    pub(crate) fn new(body: Incoming, version: Version) -> Self {
        Self {
            body: Some(body),
            is_http2: version == Version::HTTP_2,
            stream: None,
            connection: Weak::new(),
            connection_lines: Vec::new(),
        }
    }

    /// Removes the trailers that these lines of `Connection` name.
    pub(crate) fn without_trailers_of(mut self, connection_lines: Vec<HeaderValue>) -> Self {
        self.connection_lines = connection_lines;
        self
    }

    /// Counts each part of the body as a use of the connection of its client.
    pub(crate) fn with_connection(mut self, connection: &Arc<Connection>) -> Self {
        self.connection = Arc::downgrade(connection);
        self
    }

    /// Counts the stream as open until the body has ended or is dropped.
    pub(crate) fn with_stream(mut self, stream: Stream) -> Self {
        self.stream = Some(stream);
        self
    }
}

impl Drop for ReceivedBody {
    fn drop(&mut self) {
        let (Some(mut body), Some(stream)) = (self.body.take(), self.stream.take()) else {
            return;
        };
        // hyper drops a response to HTTP/1.1 after its announced length. Its end may have arrived as a separate frame.
        if body.size_hint().exact() == Some(0) {
            let _ = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
        }
        if !body.is_end_stream() {
            stream.keep(body);
        }
    }
}

impl Body for ReceivedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let mut frame = ready!(Pin::new(&mut *body).poll_frame(cx));
        if let Some(connection) = this.connection.upgrade() {
            connection.count_upload();
            let trailers = frame
                .as_ref()
                .and_then(|frame| frame.as_ref().ok()?.trailers_ref());
            if trailers.is_some_and(|trailers| trailers.len() > MAX_LINES) {
                return Poll::Ready(Some(Err("the request has too many trailers".into())));
            }
        }
        if !matches!(frame, Some(Ok(_))) {
            this.stream = None;
        }
        if !this.connection_lines.is_empty() {
            frame = change_trailers(frame, |trailers| {
                headers::remove_named(trailers, &this.connection_lines);
            });
        }
        match frame {
            None if this.is_http2 && !body.is_end_stream() => {
                Poll::Ready(Some(Err("the stream was reset before its end".into())))
            }
            frame => Poll::Ready(frame.map(|frame| Ok(frame?.map_data(without_buffer)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

/// Copies a small part.
///
/// Otherwise the part keeps the whole buffer of its read. Small parts that wait for a client would take a multiple of their size.
fn without_buffer(data: Bytes) -> Bytes {
    if data.len() < MIN_SHARED {
        Bytes::copy_from_slice(&data)
    } else {
        data
    }
}

pin_project! {
    /// A body in frames of at most [`MAX_FRAME`].
    struct Frames<B> {
        #[pin]
        source: B,
        // The rest of the last frame of the source.
        rest: Bytes,
    }
}

impl<B> Frames<B> {
    fn new(source: B) -> Self {
        Self {
            source,
            rest: Bytes::new(),
        }
    }
}

impl<B: Body<Data = Bytes, Error = BodyError>> Body for Frames<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.project();
        let frame = if this.rest.is_empty() {
            ready!(this.source.poll_frame(cx))
        } else {
            Some(Ok(Frame::data(mem::take(this.rest))))
        };
        let Some(Ok(frame)) = frame else {
            return Poll::Ready(frame);
        };
        Poll::Ready(Some(Ok(match frame.into_data() {
            Ok(mut data) if data.len() > MAX_FRAME => {
                *this.rest = data.split_off(MAX_FRAME);
                Frame::data(data)
            }
            Ok(data) => Frame::data(data),
            Err(trailers) => trailers,
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.source.size_hint(), self.rest.len() as u64);
        let mut with_rest = SizeHint::new();
        if let Some(upper) = hint.upper() {
            with_rest.set_upper(upper.saturating_add(rest));
        }
        with_rest.set_lower(hint.lower().saturating_add(rest));
        with_rest
    }
}

pin_project! {
    /// The body of a request to the upstream.
    pub(crate) struct RequestBody {
        #[pin]
        body: Frames<Source<ReceivedBody>>,
        progress: Arc<Progress>,
        // The stream is open until this body is dropped and the response has ended, or until the response is kept.
        stream: Option<Stream>,
        // Headers that no trailer may replace, beside those of all routes.
        kept: Arc<[HeaderName]>,
    }
}

/// A frame of a body, or its end.
type NextFrame<E> = Option<Result<Frame<Bytes>, E>>;

/// Removes trailers, as in [`headers::remove_trailers`].
fn without_unsafe_trailers(
    frame: NextFrame<BodyError>,
    kept: Option<&[HeaderName]>,
) -> NextFrame<BodyError> {
    change_trailers(frame, |trailers| headers::remove_trailers(trailers, kept))
}

/// Applies `change` to trailers. The body ends without trailers if none is left.
fn change_trailers<E>(
    mut frame: NextFrame<E>,
    change: impl FnOnce(&mut HeaderMap),
) -> NextFrame<E> {
    if let Some(Ok(frame)) = &mut frame
        && let Some(trailers) = frame.trailers_mut()
    {
        change(trailers);
        if trailers.is_empty() {
            return None;
        }
    }
    frame
}

/// A body that the layer wraps, or the body of a message that bypasses the layer.
type Source<B> = Either<tower_idempotency::Body<B>, B>;

/// The time at which the upstream last read from a request body.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    /// In milliseconds after `began`.
    last: AtomicU64,
}

impl Progress {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            last: AtomicU64::new(0),
        })
    }

    fn advance(&self) {
        let elapsed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    /// Returns the time of the last read of the body. Before the first read, this is the time of its creation.
    pub(crate) fn last(&self) -> Instant {
        self.began + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

impl From<tower_idempotency::Body<ReceivedBody>> for RequestBody {
    fn from(body: tower_idempotency::Body<ReceivedBody>) -> Self {
        Self::new(Either::Left(body))
    }
}

impl From<ReceivedBody> for RequestBody {
    fn from(body: ReceivedBody) -> Self {
        Self::new(Either::Right(body))
    }
}

impl RequestBody {
    fn new(source: Source<ReceivedBody>) -> Self {
        Self {
            body: Frames::new(source),
            progress: Progress::new(),
            stream: None,
            kept: Arc::default(),
        }
    }

    /// Sets the headers that no trailer may replace, beside those of all routes.
    pub(crate) fn keep_headers(&mut self, kept: Arc<[HeaderName]>) {
        self.kept = kept;
    }

    pub(crate) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Counts the stream as open until the body is dropped.
    pub(crate) fn set_stream(&mut self, stream: Stream) {
        self.stream = Some(stream);
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(cx));
        this.progress.advance();
        Poll::Ready(without_unsafe_trailers(frame, Some(this.kept)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a response, from the upstream or from the proxy itself.
pub(crate) type UpstreamBody = Either<ReceivedBody, Full<Bytes>>;

pin_project! {
    /// The body of a response to the client.
    pub(crate) struct ResponseBody {
        #[pin]
        body: Frames<Source<UpstreamBody>>,
        // The request waits for its client between two frames.
        request: Option<OpenRequest>,
    }
}

impl ResponseBody {
    fn new(source: Source<UpstreamBody>) -> Self {
        Self {
            body: Frames::new(source),
            request: None,
        }
    }

    /// Counts the request as open while hyper waits for a frame of the body.
    pub(crate) fn with_request(self, mut request: OpenRequest) -> Self {
        request.wait_for_client();
        Self {
            request: Some(request),
            ..self
        }
    }
}

impl From<tower_idempotency::Body<UpstreamBody>> for ResponseBody {
    fn from(body: tower_idempotency::Body<UpstreamBody>) -> Self {
        Self::new(Either::Left(body))
    }
}

impl From<UpstreamBody> for ResponseBody {
    fn from(body: UpstreamBody) -> Self {
        Self::new(Either::Right(body))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.project();
        // hyper reads a frame when it has sent almost all earlier ones.
        if let Some(request) = this.request {
            request.resume();
        }
        let frame = ready!(this.body.poll_frame(cx));
        if let Some(request) = this.request {
            request.wait_for_client();
        }
        Poll::Ready(without_unsafe_trailers(frame, None))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, sync::atomic::AtomicBool};

    use ::tests::barrier::bounded;
    use http_body_util::BodyExt;

    use super::*;

    /// A buffer of a read that registers its end.
    struct ReadBuffer(Vec<u8>, Arc<AtomicBool>);

    impl AsRef<[u8]> for ReadBuffer {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for ReadBuffer {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn small_parts_keep_no_buffer() {
        for (size, is_freed) in [(1, true), (MIN_SHARED - 1, true), (MIN_SHARED, false)] {
            let freed = Arc::new(AtomicBool::new(false));
            let buffer = ReadBuffer(vec![7; 2 * MIN_SHARED], Arc::clone(&freed));
            let part = without_buffer(Bytes::from_owner(buffer).split_to(size));
            assert_eq!(freed.load(Ordering::Relaxed), is_freed, "{size}");
            assert_eq!(part, vec![7; size]);
        }
    }

    #[tokio::test]
    async fn frames_of_response_are_small() {
        let bytes: Vec<_> = (0..4 * MAX_FRAME + 1).map(|index| index as u8).collect();
        let body = UpstreamBody::Right(Full::new(Bytes::from(bytes.clone())));
        let mut body = pin!(ResponseBody::from(body));
        let mut received = Vec::new();
        while let Some(frame) = bounded(body.frame()).await {
            let data = frame.unwrap().into_data().unwrap();
            assert!((1..=MAX_FRAME).contains(&data.len()), "{}", data.len());
            received.extend_from_slice(&data);
            let rest = bytes.len() - received.len();
            assert_eq!(body.size_hint().exact(), Some(rest as u64));
        }
        assert_eq!(received, bytes);
    }
}
