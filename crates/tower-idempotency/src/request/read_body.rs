//! Reads the request body within limits.

use std::{future::poll_fn, pin::pin};

use bytes::Bytes;
use http::{HeaderMap, Version, request};
use tokio::task::yield_now;

use crate::{
    body::chunks::{Chunks, FrameContent, content_length},
    error::{Error, ErrorKind},
    limits::{AdmissionError, Buffer},
    request::rules::Rules,
    retry::{from_now, with_deadline_second_poll},
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

/// Reads the request body and its trailers. If this fails, the request has had no effect.
pub(crate) async fn read_body<B: http_body::Body>(
    rules: &Rules,
    buffer: &mut Buffer,
    head: &request::Parts,
    body: B,
) -> Result<(Bytes, Option<HeaderMap>), BodyError> {
    let limit = rules.body_limit;
    // Rejected before the first byte is read. A client that sent `Expect: 100-continue` then never sends the body.
    if announced_length(&head.headers, &body) > limit as u64 {
        return Err(body_too_large(limit).into());
    }
    let expected = expected_length(&head.headers, &body);
    let mut body = pin!(body);
    let mut chunks = Chunks::default();
    let read = async {
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            match FrameContent::from_frame(frame.map_err(|_| body_incomplete())?) {
                FrameContent::Data(data) => {
                    if data.len() > limit - chunks.len() {
                        return Err(BodyError::Rejected(body_too_large(limit)));
                    }
                    buffer.reserve(data.len()).map_err(BodyError::OverLimit)?;
                    chunks.push(data);
                }
                FrameContent::Trailers(trailers) => return Ok(Some(trailers)),
            }
        }
        Ok(None)
    };
    let deadline = || from_now(rules.body_timeout);
    let Some(trailers) = with_deadline_second_poll(deadline, pin!(read)).await else {
        return Err(body_too_slow(rules).into());
    };
    let trailers = trailers?;
    // hyper reports an HTTP/2 stream that a proxy reset with NO_ERROR as the end of the body.
    if (chunks.len() as u64) < expected {
        return Err(body_incomplete().into());
    }
    // Without a length, only the server can detect such a reset. It does so, and drops this future, if the future yields.
    if expected == 0 && head.version == Version::HTTP_2 && !body.is_end_stream() {
        yield_now().await;
    }
    Ok((chunks.into_bytes(), trailers))
}

/// Returns the length that a request body must have to be complete, or a lower bound of it.
///
/// The exact length that the body itself states goes before `Content-Length`: an outer layer may have replaced a longer
/// body.
pub(crate) fn expected_length(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
    let exact = body.size_hint().exact();
    exact.unwrap_or_else(|| announced_length(headers, body))
}

/// Returns the lower bound of the length that the headers and the body state.
fn announced_length(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
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

fn body_incomplete() -> Error {
    Error::new(
        ErrorKind::BodyUnreadable,
        "the request body ended before it was complete",
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
