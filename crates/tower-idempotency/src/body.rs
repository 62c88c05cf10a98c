//! The body of requests and responses that pass through the layer.

pub(crate) mod chunks;
pub(crate) mod watch;

use std::{
    any::Any,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

use self::watch::BodyWatch;

pin_project! {
    /// A request or response body that passed through the layer.
    ///
    /// The inner service gets its requests with this body, and the layer responds with it. It is the original body or the
    /// bytes that the layer buffered, with the same trailers.
    pub struct Body<B>
    where
        B: http_body::Body,
    {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<B>
    where
        B: http_body::Body,
    {
        Original { #[pin] body: B },
        // The original body. Sets `aborted` if it fails, or if it ends while `remaining` bytes are missing.
        Monitored { #[pin] body: B, remaining: u64, aborted: Arc<AtomicBool> },
        // The original body. An observer gets each frame.
        Watched { #[pin] body: B, watch: Option<Box<dyn BodyWatch>> },
        // `max_chunk` is the size of the largest frame in bytes.
        Buffered { data: Bytes, max_chunk: usize, trailers: Option<Box<HeaderMap>> },
        // Buffering stopped early: the buffered data, then the rest as it arrives.
        Prefixed { prefix: Bytes, rest: Pin<Box<B>> },
        // Buffering failed: the buffered data, then the error. `remaining` counts the announced bytes that were not sent. The
        // server learns from it that the body is incomplete.
        Failed { prefix: Bytes, error: Option<B::Error>, remaining: Option<u64>, flushed: bool },
    }
}

impl<B: http_body::Body> Body<B> {
    pub(crate) fn original(body: B) -> Self {
        Self {
            inner: Inner::Original { body },
        }
    }

    /// Creates the original body, which sets `aborted` if it fails or ends after fewer than `expected` bytes.
    pub(crate) fn monitored(body: B, expected: u64, aborted: Arc<AtomicBool>) -> Self {
        Self {
            inner: Inner::Monitored {
                body,
                remaining: expected,
                aborted,
            },
        }
    }

    /// Creates the original body, whose frames `watch` gets.
    pub(crate) fn watched(body: B, watch: Box<dyn BodyWatch>) -> Self {
        let mut watch = Some(watch);
        if body.is_end_stream() {
            end_watch(&mut watch, true);
        }
        Self {
            inner: Inner::Watched { body, watch },
        }
    }

    /// Creates the body of a request: one frame, which extractors read without a copy.
    pub(crate) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::in_chunks(data, usize::MAX, trailers)
    }

    /// Creates the body of a response, in chunks, so that a server that copies sent data copies one chunk at a time.
    pub(crate) fn chunked(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::in_chunks(data, MAX_CHUNK, trailers)
    }

    fn in_chunks(data: Bytes, max_chunk: usize, trailers: Option<HeaderMap>) -> Self {
        Self {
            inner: Inner::Buffered {
                data,
                max_chunk,
                trailers: trailers.map(Box::new),
            },
        }
    }

    /// Creates a body of `prefix` and then `rest`.
    pub(crate) fn with_prefix(prefix: Bytes, rest: Pin<Box<B>>) -> Self {
        Self {
            inner: Inner::Prefixed { prefix, rest },
        }
    }

    /// Creates a body of `prefix` and then `error`. `announced` is the exact length that the body stated, if any.
    pub(crate) fn failed(prefix: Bytes, error: Option<B::Error>, announced: Option<u64>) -> Self {
        Self {
            inner: Inner::Failed {
                prefix,
                error,
                remaining: announced,
                flushed: false,
            },
        }
    }
}

/// An empty body. Layers outside respond with it, such as CORS and authentication of tower-http.
impl<B: http_body::Body> Default for Body<B> {
    fn default() -> Self {
        Self::whole(Bytes::new(), None)
    }
}

impl<B: http_body::Body + 'static> http_body::Body for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            InnerProj::Original { body } => poll_bytes(body, cx),
            InnerProj::Monitored {
                body,
                remaining,
                aborted,
            } => {
                let frame = poll_bytes(body, cx);
                let is_incomplete = match &frame {
                    Poll::Ready(Some(Ok(frame))) => {
                        let received = frame.data_ref().map_or(0, |data| data.len() as u64);
                        *remaining = remaining.saturating_sub(received);
                        false
                    }
                    Poll::Ready(Some(Err(_))) => true,
                    Poll::Ready(None) => *remaining > 0,
                    Poll::Pending => false,
                };
                if is_incomplete {
                    aborted.store(true, Ordering::Release);
                }
                frame
            }
            InnerProj::Watched { mut body, watch } => {
                let frame = poll_bytes(body.as_mut(), cx);
                match &frame {
                    Poll::Ready(Some(Ok(frame))) => {
                        if let (Some(data), Some(observer)) = (frame.data_ref(), watch.as_mut())
                            && !observer.on_data(data)
                        {
                            *watch = None;
                        }
                        // A server does not poll again after the last frame.
                        if watch.is_some() && body.is_end_stream() {
                            end_watch(watch, true);
                        }
                    }
                    Poll::Ready(Some(Err(_))) => end_watch(watch, false),
                    Poll::Ready(None) => end_watch(watch, true),
                    Poll::Pending => {}
                }
                frame
            }
            InnerProj::Buffered {
                data,
                max_chunk,
                trailers,
            } => Poll::Ready(if data.is_empty() {
                trailers
                    .take()
                    .map(|trailers| Ok(Frame::trailers(*trailers)))
            } else {
                Some(Ok(Frame::data(take_chunk(data, *max_chunk))))
            }),
            InnerProj::Prefixed { prefix, rest } => {
                if prefix.is_empty() {
                    poll_bytes(rest.as_mut(), cx)
                } else {
                    Poll::Ready(Some(Ok(Frame::data(take_chunk(prefix, MAX_CHUNK)))))
                }
            }
            InnerProj::Failed {
                prefix,
                error,
                remaining,
                flushed,
            } => {
                if !prefix.is_empty() {
                    let data = take_chunk(prefix, MAX_CHUNK);
                    *remaining =
                        remaining.map(|remaining| remaining.saturating_sub(data.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                // A server that gets the error directly after the data drops both, and the head too. One more pending poll
                // lets the server send the data first.
                if error.is_some() && !std::mem::replace(flushed, true) {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(error.take().map(Err))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Original { body }
            | Inner::Monitored { body, .. }
            | Inner::Watched { body, .. } => body.is_end_stream(),
            Inner::Buffered { data, trailers, .. } => data.is_empty() && trailers.is_none(),
            Inner::Prefixed { prefix, rest } => prefix.is_empty() && rest.is_end_stream(),
            // The server must poll to learn that bytes are missing.
            Inner::Failed {
                prefix,
                error,
                remaining,
                ..
            } => prefix.is_empty() && error.is_none() && *remaining == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Original { body }
            | Inner::Monitored { body, .. }
            | Inner::Watched { body, .. } => body.size_hint(),
            Inner::Buffered {
                data,
                trailers: None,
                ..
            } => SizeHint::with_exact(data.len() as u64),
            // HTTP/1 servers announce an exact length, and a message with a length cannot have trailers.
            Inner::Buffered {
                data,
                trailers: Some(_),
                ..
            } => at_least(data.len() as u64),
            Inner::Prefixed { prefix, rest } => {
                let (prefix, rest) = (prefix.len() as u64, rest.size_hint());
                let mut hint = at_least(rest.lower().saturating_add(prefix));
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(prefix)) {
                    hint.set_upper(upper);
                }
                hint
            }
            Inner::Failed {
                prefix, remaining, ..
            } => match remaining {
                Some(remaining) if *remaining >= prefix.len() as u64 => {
                    SizeHint::with_exact(*remaining)
                }
                Some(_) | None => at_least(prefix.len() as u64),
            },
        }
    }
}

/// Shows the kind of body, never its bytes.
impl<B: http_body::Body> fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.inner {
            Inner::Original { .. } | Inner::Monitored { .. } | Inner::Watched { .. } => {
                "Body::Original"
            }
            Inner::Buffered { .. } => "Body::Buffered",
            Inner::Prefixed { .. } => "Body::Prefixed",
            Inner::Failed { .. } => "Body::Failed",
        })
    }
}

/// Result of [`poll_frame`](http_body::Body::poll_frame).
type PolledFrame<D, E> = Poll<Option<Result<Frame<D>, E>>>;

/// Polls for a frame and converts its data into `Bytes`. Data that are already `Bytes` are not copied.
fn poll_bytes<B: http_body::Body + 'static>(
    body: Pin<&mut B>,
    cx: &mut Context<'_>,
) -> PolledFrame<Bytes, B::Error> {
    let mut frame = body.poll_frame(cx);
    // Most bodies have `Bytes` already. The compiler then decides this comparison of types, and removes the conversion below.
    let same = (&mut frame as &mut dyn Any).downcast_mut::<PolledFrame<Bytes, B::Error>>();
    if let Some(frame) = same {
        return std::mem::replace(frame, Poll::Pending);
    }
    frame.map(|frame| {
        frame.map(|frame| {
            frame.map(|frame| frame.map_data(|mut data| data.copy_to_bytes(data.remaining())))
        })
    })
}

fn end_watch(watch: &mut Option<Box<dyn BodyWatch>>, is_complete: bool) {
    if let Some(observer) = watch.take() {
        observer.on_end(is_complete);
    }
}

fn at_least(lower: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(lower);
    hint
}

/// Takes all bytes, or the first `max` of them.
fn take_chunk(data: &mut Bytes, max: usize) -> Bytes {
    if data.len() <= max {
        return std::mem::take(data);
    }
    data.split_to(max)
}

/// Size of a chunk in bytes: large enough for throughput, small enough for every connection to hold a few.
const MAX_CHUNK: usize = 64 * 1024;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use http_body_util::{BodyExt, Full};

    use super::*;

    #[tokio::test]
    async fn other_data_become_bytes() {
        let body = Body::original(Full::new(&b"order"[..]));
        let collected = body.collect().await.expect("infallible");
        assert_eq!(collected.to_bytes(), "order");
    }
}
