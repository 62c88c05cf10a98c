//! The body of a response.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, timeout_at};

use crate::{
    budget::Budget,
    grpc::GrpcStatus,
    operation::Operation,
    telemetry,
    verdict::{Fate, Judgement, Verdict},
};

pin_project! {
    /// Body of a response of [`Retry`](crate::Retry). Wraps the body of the inner service.
    ///
    /// If the body fails or ends before its announced length, the outcome of the operation becomes
    /// [`Outcome::ResponseLost`](crate::Outcome::ResponseLost). The same request under the same key then gets the response
    /// again.
    ///
    /// The status of a gRPC call may be in the trailers. Its outcome is [`Outcome::Unknown`](crate::Outcome::Unknown) until
    /// the caller has read them.
    pub struct ResponseBody<B>
    where
        B: Body,
    {
        #[pin]
        inner: Inner<B>,
        // Frames that were read to find an error code. They are returned first.
        read: VecDeque<Result<Frame<B::Data>, B::Error>>,
        // Announced bytes that the caller has not read yet.
        announced: u64,
        operation: Option<Operation>,
        // Operation whose status is in the trailers.
        awaited: Option<AwaitedStatus>,
    }
}

pin_project! {
    #[project = InnerProjection]
    enum Inner<B> {
        // As the inner service returned it.
        Plain { #[pin] body: B },
        // On the heap, because it is polled before it is returned to the caller.
        Polled { body: Pin<Box<B>>, has_ended: bool },
    }
}

impl<B: Body> ResponseBody<B> {
    pub(crate) fn new(body: B) -> Self {
        // The response to HEAD announces a body that is not sent.
        let announced = match body.is_end_stream() {
            true => 0,
            false => body.size_hint().lower(),
        };
        Self {
            inner: Inner::Plain { body },
            read: VecDeque::new(),
            announced,
            operation: None,
            awaited: None,
        }
    }

    /// Sets the operation whose response this is.
    pub(crate) fn with_operation(self, operation: Operation) -> Self {
        Self {
            operation: Some(operation),
            ..self
        }
    }

    /// Sets the operation whose status is in the trailers.
    pub(crate) fn with_awaited(self, awaited: AwaitedStatus) -> Self {
        Self {
            awaited: Some(awaited),
            ..self
        }
    }

    /// Returns `true` if the outcome depends on trailers that were not read.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.is_some()
    }

    /// Reads the body until its end, more than `max` bytes, [`MAX_FRAMES`] or the deadline. Returns the body, which still
    /// contains all frames, and its bytes. These are `None` if the body is longer, late, broken or cut.
    pub(crate) async fn peek(self, max: usize, deadline: Instant) -> (Self, Option<Bytes>) {
        let mut bytes = BytesMut::new();
        let announced = self.announced;
        let (peeked, complete) = self
            .read_ahead(deadline, |data| {
                // A copy, because the chunks of the data are consumed by reading.
                let fits = data.remaining() <= max - bytes.len();
                fits && copy_chunk(data, &mut bytes)
            })
            .await;
        let is_whole = complete && bytes.len() as u64 >= announced;
        (peeked, is_whole.then(|| bytes.freeze()))
    }

    /// Reads the body until its end, more than `max` bytes, [`MAX_FRAMES`] or the deadline. Returns the body, which still
    /// contains all frames.
    pub(crate) async fn read_to_trailers(self, max: usize, deadline: Instant) -> Self {
        let mut left = max;
        let read = self.read_ahead(deadline, |data| {
            let length = data.remaining();
            let fits = length <= left;
            left = left.saturating_sub(length);
            fits
        });
        read.await.0
    }

    /// Reads the body until its end, the deadline, [`MAX_FRAMES`], or data that do not fit. Returns the body, which still
    /// contains all frames, and `true` if it has ended.
    async fn read_ahead(
        self,
        deadline: Instant,
        mut fits: impl FnMut(&B::Data) -> bool,
    ) -> (Self, bool) {
        let mut body = match self.inner {
            Inner::Plain { body } => Box::pin(body),
            Inner::Polled { body, .. } => body,
        };
        let mut read = self.read;
        let mut awaited = self.awaited;
        let complete = loop {
            let frame = poll_fn(|cx| body.as_mut().poll_frame(cx));
            match timeout_at(deadline, frame).await {
                Err(_) => break false,
                Ok(None) => break true,
                Ok(Some(frame)) => {
                    let fits = match &frame {
                        Ok(frame) => frame.data_ref().is_none_or(&mut fits),
                        Err(_) => false,
                    };
                    AwaitedStatus::observe(&mut awaited, &frame);
                    read.push_back(frame);
                    if !fits || read.len() >= MAX_FRAMES {
                        break false;
                    }
                }
            }
        };
        let peeked = Self {
            inner: Inner::Polled {
                body,
                has_ended: complete,
            },
            read,
            announced: self.announced,
            operation: self.operation,
            awaited,
        };
        (peeked, complete)
    }
}

/// Appends the data if it is contiguous, like the frames of HTTP clients.
fn copy_chunk(data: &impl Buf, bytes: &mut BytesMut) -> bool {
    let chunk = data.chunk();
    bytes.extend_from_slice(chunk);
    chunk.len() == data.remaining()
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let frame = match this.read.pop_front() {
            Some(frame) => Some(frame),
            None => ready!(match this.inner.project() {
                InnerProjection::Plain { body } => body.poll_frame(cx),
                InnerProjection::Polled {
                    has_ended: true, ..
                } => Poll::Ready(None),
                InnerProjection::Polled { body, .. } => body.as_mut().poll_frame(cx),
            }),
        };
        if let Some(frame) = &frame {
            AwaitedStatus::observe(this.awaited, frame);
        }
        let is_lost = match &frame {
            Some(Ok(frame)) => {
                let length = frame.data_ref().map_or(0, |data| data.remaining() as u64);
                *this.announced = this.announced.saturating_sub(length);
                false
            }
            Some(Err(_)) => true,
            // hyper reports an HTTP/2 stream that the server has reset with `NO_ERROR` as complete.
            None => *this.announced > 0,
        };
        if let Some(operation) = this.operation.as_ref().filter(|_| is_lost) {
            operation.set_response_lost();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.inner().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.inner().size_hint();
        let data = self.read.iter().flatten().filter_map(Frame::data_ref);
        let read: u64 = data.map(|data| data.remaining() as u64).sum();
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint.set_lower(hint.lower().saturating_add(read));
        hint
    }
}

impl<B: Body> ResponseBody<B> {
    fn inner(&self) -> &B {
        match &self.inner {
            Inner::Plain { body } => body,
            Inner::Polled { body, .. } => body,
        }
    }
}

/// Maximum number of frames that are read before the caller reads them. A server may send each byte of a body as a frame, and
/// each frame takes some 100 bytes of memory.
const MAX_FRAMES: usize = 16 * 1024;

/// Operation of a gRPC call whose status is in the trailers. Its drop counts the outcome.
pub(crate) struct AwaitedStatus {
    pub(crate) operation: Operation,
    /// Operation of the inner series that returned the response, if there is one. Its trailers are observed first.
    pub(crate) inner: Option<Operation>,
    pub(crate) budget: Budget,
    /// Tokens that a definite status returns.
    pub(crate) refund: u32,
}

impl AwaitedStatus {
    /// Records the status if the frame contains it.
    fn observe<D, E>(awaited: &mut Option<Self>, frame: &Result<Frame<D>, E>) {
        let trailers = frame.as_ref().ok().and_then(Frame::trailers_ref);
        let Some(status) = trailers.and_then(GrpcStatus::of) else {
            return;
        };
        let Some(awaited) = awaited.take() else {
            return;
        };
        let judgement = Judgement::of_grpc(&status);
        match judgement.fate {
            Fate::Definite => awaited.operation.set_response(),
            Fate::Rejected if awaited.inner.as_ref().is_some_and(Operation::is_open) => {}
            Fate::Rejected => awaited.operation.close_attempt(),
            Fate::Open | Fate::Awaited => {}
        }
        if judgement.verdict == Verdict::Definite {
            awaited.budget.refill(awaited.refund);
        }
    }
}

impl Drop for AwaitedStatus {
    fn drop(&mut self) {
        telemetry::finished(self.operation.outcome());
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
