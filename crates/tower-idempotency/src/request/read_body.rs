//! Reads the request body within limits.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Version, request};
use pin_project_lite::pin_project;
use tokio::task::yield_now;

use crate::{
    body::chunks::{Chunks, FrameContent, content_length},
    error::{Error, ErrorKind},
    limits::{AdmissionError, Buffer},
    request::{body_incomplete, message_check::MessageCheck, rules::Rules},
    retry::{LazyTimer, from_now},
    telemetry::Warnings,
};

/// Reason why the layer did not read a request body.
pub(crate) enum BodyError {
    /// The body is too large, too slow or incomplete.
    Rejected(Error),
    /// The bytes of request bodies are at their limit.
    OverLimit(AdmissionError),
}

impl From<Error> for BodyError {
    fn from(error: Error) -> Self {
        Self::Rejected(error)
    }
}

pin_project! {
    /// A request body that is read, with its trailers. If that fails, the request has had no effect.
    pub(crate) struct ReadBody<B> {
        #[pin]
        body: B,
        announced: u64,
        expected: u64,
        buffer: Option<Buffer>,
        chunks: Chunks,
        // `Some` once the body is read.
        trailers: Option<Option<Box<HeaderMap>>>,
        timer: LazyTimer,
        yielding: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
        // `Some` for a gRPC call.
        message: Option<MessageCheck>,
    }
}

impl<B: http_body::Body> ReadBody<B> {
    /// Creates the reader of a body whose bytes count in `buffer`.
    pub(crate) fn new(
        rules: &Rules,
        warnings: &Arc<Warnings>,
        head: &request::Parts,
        body: B,
        buffer: Buffer,
    ) -> Self {
        Self {
            message: MessageCheck::new(rules, warnings),
            announced: announced_length(&head.headers, &body),
            expected: expected_length(&head.headers, &body),
            body,
            buffer: Some(buffer),
            chunks: Chunks::default(),
            trailers: None,
            timer: LazyTimer::default(),
            yielding: None,
        }
    }

    /// Reads the body. Returns its bytes, which count until the last of their slices is dropped, and its trailers.
    pub(crate) fn poll(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        rules: &Rules,
        version: Version,
    ) -> Poll<Result<(Bytes, Option<HeaderMap>), BodyError>> {
        // Rejected before the first byte is read. A client that sent `Expect: 100-continue` then never sends the body.
        if self.announced > rules.body_limit as u64 {
            return Poll::Ready(Err(body_too_large(rules.body_limit).into()));
        }
        if self.trailers.is_none() {
            match self.as_mut().poll_frames(cx, rules) {
                Poll::Ready(trailers) => {
                    *self.as_mut().project().trailers = Some(trailers?.map(Box::new));
                }
                Poll::Pending => {
                    let deadline = || from_now(rules.body_timeout);
                    let timer = self.as_mut().project().timer;
                    ready!(timer.poll_after_second(cx, deadline));
                    return Poll::Ready(Err(body_too_slow(rules).into()));
                }
            }
        }
        let this = self.project();
        // hyper reports an HTTP/2 stream that a proxy reset with NO_ERROR as the end of the body.
        if (this.chunks.len() as u64) < *this.expected {
            return Poll::Ready(Err(body_incomplete().into()));
        }
        if let Some(message) = this.message {
            message.end().map_err(BodyError::Rejected)?;
        }
        // Without a length, only the server can detect such a reset. It does so, and drops this future, if the future yields.
        if *this.expected == 0 && version == Version::HTTP_2 && !this.body.is_end_stream() {
            let yielding = this.yielding.get_or_insert_with(|| Box::pin(yield_now()));
            ready!(yielding.as_mut().poll(cx));
        }
        let data = std::mem::take(this.chunks).into_bytes();
        let data = match this.buffer.take() {
            Some(buffer) => buffer.hold(data),
            None => data,
        };
        let trailers = this.trailers.take().flatten();
        Poll::Ready(Ok((data, trailers.map(|trailers| *trailers))))
    }

    /// Reads frames until the body ends. Returns its trailers.
    fn poll_frames(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        rules: &Rules,
    ) -> Poll<Result<Option<HeaderMap>, BodyError>> {
        let mut this = self.project();
        while let Some(frame) = ready!(this.body.as_mut().poll_frame(cx)) {
            match FrameContent::from_frame(frame.map_err(|_| body_incomplete())?) {
                FrameContent::Data(data) => {
                    if data.len() > rules.body_limit - this.chunks.len() {
                        return Poll::Ready(Err(body_too_large(rules.body_limit).into()));
                    }
                    if let Some(message) = this.message {
                        message.read(&data).map_err(BodyError::Rejected)?;
                    }
                    if let Some(buffer) = this.buffer {
                        buffer.reserve(data.len()).map_err(BodyError::OverLimit)?;
                    }
                    this.chunks.push(data);
                }
                FrameContent::Trailers(trailers) => {
                    let unary = this.message.as_ref().filter(|_| !trailers.is_empty());
                    if let Some(message) = unary {
                        return Poll::Ready(Err(BodyError::Rejected(message.reject_trailers())));
                    }
                    return Poll::Ready(Ok(Some(trailers)));
                }
            }
        }
        Poll::Ready(Ok(None))
    }
}

/// Returns the length that a request body must have to be complete, or a lower bound of it.
///
/// The exact length that the body itself states takes precedence over `Content-Length`: an outer layer may have replaced a
/// longer body.
pub(crate) fn expected_length(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
    let exact = body.size_hint().exact();
    exact.unwrap_or_else(|| announced_length(headers, body))
}

/// Returns the lower bound of the length that the headers and the body state.
pub(crate) fn announced_length(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
    content_length(headers)
        .unwrap_or(0)
        .max(body.size_hint().lower())
}

fn body_too_large(limit: usize) -> Error {
    Error::new(
        ErrorKind::BodyTooLarge,
        format!("expected a request body of at most {limit} bytes, found a larger one"),
    )
}

fn body_too_slow(rules: &Rules) -> Error {
    Error::new(
        ErrorKind::BodyTimeout,
        format!(
            "expected the complete request body within {:?}",
            rules.body_timeout
        ),
    )
}
