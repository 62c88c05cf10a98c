//! Buffers the response body within limits.

#[cfg(feature = "grpc")]
use std::sync::Arc;
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, header};
use tokio::time::Instant;

use crate::{
    body::{
        Body,
        chunks::{Chunks, FrameContent, content_length},
    },
    header_lines::lines_of,
    limits::Buffer,
    record::{MAX_LINES, TombstoneReason},
    response::{replay::has_body, rules::Rules},
    retry::{LazyTimer, from_now},
};
#[cfg(feature = "grpc")]
use crate::{
    grpc::{MessageReader, Side},
    telemetry::{self, Warnings},
};

/// Result of buffering a response body.
pub(crate) enum Buffered<B: http_body::Body> {
    Complete(Bytes, Option<HeaderMap>),
    /// The body cannot be recorded: it is too large, or it counts as streamed. The client gets the buffered data and then
    /// the rest as it arrives.
    Unrecordable(Body<B>, TombstoneReason),
    /// The body failed, or it does not have the length that it announced. The client gets the buffered data and then the
    /// error.
    Failed(Body<B>),
}

/// A response body that is buffered until it is complete, fails or exceeds a limit.
///
/// The bytes count in the buffer until the client has read them.
pub(crate) struct BufferedBody<B> {
    body: Option<Pin<Box<B>>>,
    buffer: Option<Buffer>,
    limit: usize,
    timeout: Duration,
    announced: Option<u64>,
    exact: Option<u64>,
    chunks: Chunks,
    deadline: Option<Instant>,
    timer: LazyTimer,
    /// `Some` for a gRPC call.
    #[cfg(feature = "grpc")]
    messages: Option<(MessageReader, Arc<Warnings>)>,
}

impl<B: http_body::Body> BufferedBody<B> {
    /// Creates a body that is buffered within limits. Returns it unread if its head shows that it cannot be recorded.
    pub(crate) fn new(
        rules: &Rules,
        buffer: Buffer,
        head: &Response<()>,
        body: B,
    ) -> Result<Self, Box<Buffered<B>>> {
        let exact = body.size_hint().exact();
        let announced = announced_length(head.status(), head.headers()).or(exact);
        let unrecordable =
            |body, reason| Box::new(Buffered::Unrecordable(Body::original(body), reason));
        if announced.unwrap_or(0).max(body.size_hint().lower()) > rules.body_limit as u64
            || head.headers().len() > MAX_LINES
        {
            return Err(unrecordable(body, TombstoneReason::TooLarge));
        }
        if is_event_stream(head.headers()) {
            return Err(unrecordable(body, TombstoneReason::Streamed));
        }
        Ok(Self {
            body: Some(Box::pin(body)),
            buffer: Some(buffer),
            limit: rules.body_limit,
            timeout: rules.collect_timeout,
            announced,
            exact,
            chunks: Chunks::default(),
            deadline: None,
            timer: LazyTimer::default(),
            #[cfg(feature = "grpc")]
            messages: rules
                .is_grpc()
                .then(|| (MessageReader::default(), Arc::clone(&rules.warnings))),
        })
    }

    /// Buffers the body. Must not be called again after it has returned `Ready`.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Buffered<B>> {
        let Some(mut body) = self.body.take() else {
            return Poll::Pending;
        };
        let polled = self.poll_body(cx, &mut body);
        match polled {
            Poll::Ready(Ok(buffered)) => Poll::Ready(buffered),
            Poll::Ready(Err(reason)) => {
                let body = Body::with_prefix(self.hold(), body);
                Poll::Ready(Buffered::Unrecordable(body, reason))
            }
            Poll::Pending => {
                self.body = Some(body);
                Poll::Pending
            }
        }
    }

    /// Returns the reason if the body cannot be recorded. The client then gets the data so far, and the rest as it arrives.
    fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
        body: &mut Pin<Box<B>>,
    ) -> Poll<Result<Buffered<B>, TombstoneReason>> {
        let mut trailers = None;
        while trailers.is_none() {
            let Poll::Ready(frame) = body.as_mut().poll_frame(cx) else {
                let (timeout, deadline) = (self.timeout, &mut self.deadline);
                let deadline = || *deadline.get_or_insert_with(|| from_now(timeout));
                ready!(self.timer.poll_after_second(cx, deadline));
                return Poll::Ready(Err(TombstoneReason::Streamed));
            };
            self.timer = LazyTimer::default();
            // A body of unknown length may never end: the timeout covers all of it. With a known length, the timeout restarts
            // with each frame and covers only a stall.
            if self.announced.is_some() {
                self.deadline = None;
            }
            match frame {
                Some(Ok(frame)) => match FrameContent::from_frame(frame) {
                    FrameContent::Data(data) => {
                        #[cfg(feature = "grpc")]
                        if let Some((messages, warnings)) = &mut self.messages
                            && !messages.read(&data)
                        {
                            telemetry::grpc_stream(warnings, Side::Response);
                            self.chunks.push(data);
                            return Poll::Ready(Err(TombstoneReason::Streamed));
                        }
                        let fits = data.len() <= self.limit - self.chunks.len()
                            && self.reserve(data.len());
                        self.chunks.push(data);
                        if !fits {
                            return Poll::Ready(Err(TombstoneReason::TooLarge));
                        }
                    }
                    FrameContent::Trailers(lines) => trailers = Some(lines),
                },
                Some(Err(error)) => {
                    let body = Body::failed(self.hold(), Some(error), self.exact);
                    return Poll::Ready(Ok(Buffered::Failed(body)));
                }
                None => break,
            }
        }
        let data = self.hold();
        // An incomplete body must not be recorded as a complete one.
        let is_complete = self
            .announced
            .is_none_or(|announced| announced == data.len() as u64);
        Poll::Ready(Ok(if is_complete {
            Buffered::Complete(data, trailers)
        } else {
            Buffered::Failed(Body::failed(data, None, self.exact))
        }))
    }

    fn reserve(&mut self, bytes: usize) -> bool {
        let buffer = self.buffer.as_mut();
        buffer.is_none_or(|buffer| buffer.reserve(bytes).is_ok())
    }

    /// Returns the data so far, which count until the client has read them.
    fn hold(&mut self) -> Bytes {
        let data = std::mem::take(&mut self.chunks).into_bytes();
        match self.buffer.take() {
            Some(buffer) => buffer.hold_until_sent(data),
            None => data,
        }
    }
}

/// Returns the length that the head of a response announces for its body.
///
/// The `Content-Length` of a 204 or a 304 describes a body that is not sent. Servers and clients of HTTP ignore it.
pub(crate) fn announced_length(status: StatusCode, headers: &HeaderMap) -> Option<u64> {
    content_length(headers).filter(|_| has_body(status))
}

pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    let name = "text/event-stream";
    let line = lines_of(headers, &header::CONTENT_TYPE).next();
    line.and_then(|line| line.as_bytes().get(..name.len()))
        .is_some_and(|start| start.eq_ignore_ascii_case(name.as_bytes()))
}
