//! The body that is either the original or bytes we hold.

use std::{
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

use crate::limits::Unsent;

pin_project! {
    /// A request or response body that passed through the layer.
    ///
    /// The inner service gets its requests with this body, and the layer answers with it: either the original,
    /// untouched, or the bytes the layer holds, with the same trailers.
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
        // Original too, and says when it failed, or ended although of what was announced some is left.
        Watched { #[pin] body: B, left: u64, broke: Arc<AtomicBool> },
        Held { data: Data, trailers: Option<Box<HeaderMap>> },
        // Collecting was given up: what was collected, then the rest as it comes.
        Resumed { prefix: Data, rest: Pin<Box<B>> },
        // Collecting failed: what was collected, then the failure. `left` is what was announced and has not been sent, so
        // that whoever sends this on sees that something is missing.
        Broken { prefix: Data, error: Option<B::Error>, left: Option<u64>, flushed: bool },
    }
}

/// Data that we hold, and what of them counts as buffered until they are taken.
pub(crate) struct Data {
    bytes: Bytes,
    unsent: Option<Unsent>,
}

/// Marks a response with such data, for whoever gives the same data in their place.
#[derive(Clone)]
pub(crate) struct Counted;

impl Data {
    /// They count for what `unsent` has taken.
    pub(crate) fn counted(bytes: Bytes, unsent: Unsent) -> Self {
        let unsent = Some(unsent);
        Self { bytes, unsent }
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// All of them, or of those that count a piece: a server that asks for the next one has room for it. A copy, for what is
    /// cut off keeps all of them in memory for as long as a connection holds it.
    fn take(&mut self) -> Bytes {
        let Some(unsent) = &mut self.unsent else {
            return std::mem::take(&mut self.bytes);
        };
        let piece = Bytes::copy_from_slice(&self.bytes[..self.bytes.len().min(PIECE)]);
        self.bytes.advance(piece.len());
        if self.bytes.is_empty() {
            self.bytes = Bytes::new();
        }
        unsent.shrink(self.bytes.len());
        piece
    }

    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
}

impl From<Bytes> for Data {
    fn from(bytes: Bytes) -> Self {
        Self {
            bytes,
            unsent: None,
        }
    }
}

impl<B: http_body::Body> Body<B> {
    pub(crate) fn original(body: B) -> Self {
        Self {
            inner: Inner::Original { body },
        }
    }

    /// `whole` is the length that it has at the least.
    pub(crate) fn watched(body: B, whole: u64, broke: Arc<AtomicBool>) -> Self {
        Self {
            inner: Inner::Watched {
                body,
                left: whole,
                broke,
            },
        }
    }

    pub(crate) fn held(data: impl Into<Data>, trailers: Option<HeaderMap>) -> Self {
        Self {
            inner: Inner::Held {
                data: data.into(),
                trailers: trailers.map(Box::new),
            },
        }
    }

    /// Whether these are held data that count until they are taken.
    pub(crate) fn is_counted(&self) -> bool {
        matches!(&self.inner, Inner::Held { data, .. } if data.unsent.is_some())
    }

    pub(crate) fn resumed(prefix: Data, rest: Pin<Box<B>>) -> Self {
        Self {
            inner: Inner::Resumed { prefix, rest },
        }
    }

    /// `announced` is the exact length that the body itself gave, if it gave one.
    pub(crate) fn broken(prefix: Data, error: Option<B::Error>, announced: Option<u64>) -> Self {
        Self {
            inner: Inner::Broken {
                prefix,
                error,
                left: announced,
                flushed: false,
            },
        }
    }
}

impl<B: http_body::Body> http_body::Body for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            InnerProj::Original { body } => poll_bytes(body, cx),
            InnerProj::Watched { body, left, broke } => {
                let frame = poll_bytes(body, cx);
                let half = match &frame {
                    Poll::Ready(Some(Ok(frame))) => {
                        let came = frame.data_ref().map_or(0, |data| data.len() as u64);
                        *left = left.saturating_sub(came);
                        false
                    }
                    Poll::Ready(Some(Err(_))) => true,
                    Poll::Ready(None) => *left > 0,
                    Poll::Pending => false,
                };
                if half {
                    broke.store(true, Ordering::Release);
                }
                frame
            }
            InnerProj::Held { data, trailers } => Poll::Ready(if data.is_empty() {
                trailers
                    .take()
                    .map(|trailers| Ok(Frame::trailers(*trailers)))
            } else {
                Some(Ok(Frame::data(data.take())))
            }),
            InnerProj::Resumed { prefix, rest } => {
                if prefix.is_empty() {
                    poll_bytes(rest.as_mut(), cx)
                } else {
                    Poll::Ready(Some(Ok(Frame::data(prefix.take()))))
                }
            }
            InnerProj::Broken {
                prefix,
                error,
                left,
                flushed,
            } => {
                if !prefix.is_empty() {
                    let data = prefix.take();
                    *left = left.map(|left| left.saturating_sub(data.len() as u64));
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                // A server that is given the failure right behind the data drops both, and the head with them. This
                // gives it a moment to send what it has, as it would have had without us.
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
            Inner::Original { body } | Inner::Watched { body, .. } => body.is_end_stream(),
            Inner::Held { data, trailers } => data.is_empty() && trailers.is_none(),
            Inner::Resumed { prefix, rest } => prefix.is_empty() && rest.is_end_stream(),
            // What is missing is noticed by whoever asks for it.
            Inner::Broken {
                prefix,
                error,
                left,
                ..
            } => prefix.is_empty() && error.is_none() && *left == Some(0),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Original { body } | Inner::Watched { body, .. } => body.size_hint(),
            Inner::Held {
                data,
                trailers: None,
            } => SizeHint::with_exact(data.len()),
            // An exact length makes HTTP/1 servers announce it, and then there is no place for trailers.
            Inner::Held {
                data,
                trailers: Some(_),
            } => at_least(data.len()),
            Inner::Resumed { prefix, rest } => {
                let (prefix, rest) = (prefix.len(), rest.size_hint());
                let mut hint = at_least(rest.lower().saturating_add(prefix));
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(prefix)) {
                    hint.set_upper(upper);
                }
                hint
            }
            Inner::Broken { prefix, left, .. } => match left {
                Some(left) if *left >= prefix.len() => SizeHint::with_exact(*left),
                Some(_) | None => at_least(prefix.len()),
            },
        }
    }
}

/// Shows the kind of body, never its bytes.
impl<B: http_body::Body> fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.inner {
            Inner::Original { .. } | Inner::Watched { .. } => "Body::Original",
            Inner::Held { .. } => "Body::Held",
            Inner::Resumed { .. } => "Body::Resumed",
            Inner::Broken { .. } => "Body::Broken",
        })
    }
}

/// A frame as `Bytes`: free of charge where the data are `Bytes` already.
fn poll_bytes<B: http_body::Body>(
    body: Pin<&mut B>,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
    body.poll_frame(cx).map(|frame| {
        frame.map(|frame| {
            frame.map(|frame| frame.map_data(|mut data| data.copy_to_bytes(data.remaining())))
        })
    })
}

fn at_least(lower: u64) -> SizeHint {
    let mut hint = SizeHint::new();
    hint.set_lower(lower);
    hint
}

/// Large enough to cost nothing, small enough for a connection to hold.
const PIECE: usize = 64 * 1024;
