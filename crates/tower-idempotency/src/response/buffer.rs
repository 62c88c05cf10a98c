//! Buffers the response body within limits.

use std::future::poll_fn;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header, response};

use crate::{
    body::{
        Body,
        chunks::{Chunks, FrameContent, content_length},
    },
    limits::Buffer,
    record::{MAX_LINES, TombstoneReason},
    response::rules::Rules,
    retry::{from_now, with_deadline_second_poll},
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

/// Buffers the response body until it is complete, fails or exceeds a limit.
///
/// The bytes count in `buffer` until the client has read them.
pub(crate) async fn buffer_body<B: http_body::Body>(
    rules: &Rules,
    mut buffer: Buffer,
    head: &response::Parts,
    body: B,
) -> Buffered<B> {
    let limit = rules.body_limit;
    let exact = body.size_hint().exact();
    // The `Content-Length` of a 304 is that of a body that is not sent.
    let announced = (head.status != StatusCode::NOT_MODIFIED)
        .then(|| content_length(&head.headers))
        .flatten()
        .or(exact);
    if announced.unwrap_or(0).max(body.size_hint().lower()) > limit as u64
        || head.headers.len() > MAX_LINES
    {
        return Buffered::Unrecordable(Body::original(body), TombstoneReason::TooLarge);
    }
    if is_event_stream(&head.headers) {
        return Buffered::Unrecordable(Body::original(body), TombstoneReason::Streamed);
    }
    let mut deadline = None;
    let mut body = Box::pin(body);
    let mut chunks = Chunks::default();
    let mut trailers = None;
    while trailers.is_none() {
        // A body of unknown length may never end: the timeout covers all of it. With a known length, the timeout restarts
        // with each frame and covers only a stall.
        if announced.is_some() {
            deadline = None;
        }
        let deadline = || *deadline.get_or_insert_with(|| from_now(rules.collect_timeout));
        let frame = poll_fn(|cx| body.as_mut().poll_frame(cx));
        let Some(frame) = with_deadline_second_poll(deadline, frame).await else {
            let body = Body::with_prefix(buffer.hold(chunks.into_bytes()), body);
            return Buffered::Unrecordable(body, TombstoneReason::Streamed);
        };
        let frame = match frame {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                let data = buffer.hold(chunks.into_bytes());
                return Buffered::Failed(Body::failed(data, Some(error), exact));
            }
            None => break,
        };
        match FrameContent::from_frame(frame) {
            FrameContent::Data(data) => {
                let fits = data.len() <= limit - chunks.len() && buffer.reserve(data.len()).is_ok();
                chunks.push(data);
                if !fits {
                    let body = Body::with_prefix(buffer.hold(chunks.into_bytes()), body);
                    return Buffered::Unrecordable(body, TombstoneReason::TooLarge);
                }
            }
            FrameContent::Trailers(lines) => trailers = Some(lines),
        }
    }
    let data = buffer.hold(chunks.into_bytes());
    // An incomplete body must not be recorded as a complete one.
    if announced.is_some_and(|announced| announced != data.len() as u64) {
        return Buffered::Failed(Body::failed(data, None, exact));
    }
    if trailers
        .as_ref()
        .is_some_and(|lines| lines.len() > MAX_LINES)
    {
        return Buffered::Unrecordable(Body::chunked(data, trailers), TombstoneReason::TooLarge);
    }
    Buffered::Complete(data, trailers)
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let name = "text/event-stream";
    headers.get(header::CONTENT_TYPE).is_some_and(|value| {
        value
            .as_bytes()
            .get(..name.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(name.as_bytes()))
    })
}
