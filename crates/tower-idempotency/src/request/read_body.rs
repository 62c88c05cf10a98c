//! Bodies read whole, within limits.

use std::future::poll_fn;

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, StatusCode, Version, header, request, response};
use http_body::Frame;
use tokio::task::yield_now;

use crate::{
    body::{Body, Data},
    config::Config,
    error::{Error, ErrorKind},
    execution::shared::{from_now, within_or_asked_again},
    limits::{Buffer, NoPlace, Unsent},
    record::{MAX_LINES, TombstoneReason},
    response::reject::turned_away,
};

/// The whole request body and its trailers; nothing of the request has had an effect yet.
pub(crate) async fn request<B: http_body::Body>(
    config: &Config,
    buffer: &mut Buffer,
    head: &request::Parts,
    body: B,
) -> Result<(Bytes, Option<HeaderMap>), Error> {
    let limit = config.request.body_limit;
    let too_large = || {
        Error::new(
            ErrorKind::BodyTooLarge,
            format!("expected a request body of at most {limit} bytes, found a larger one"),
        )
    };
    let broke_off = || {
        Error::new(
            ErrorKind::BodyUnreadable,
            "the request body broke off before its end",
        )
    };
    // Refused unread: a client that sent `Expect: 100-continue` then never sends it.
    if announced(&head.headers, &body) > limit as u64 {
        return Err(too_large());
    }
    let whole = whole(&head.headers, &body);
    let mut body = std::pin::pin!(body);
    let mut chunks = Chunks::default();
    let read = async {
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            match split(frame.map_err(|_| broke_off())?) {
                Part::Data(data) => {
                    if data.len() > limit - chunks.len() {
                        return Err(too_large());
                    }
                    // Whoever uploads slowly must not use up what other clients' answers need.
                    let most = config.limits.max_buffered - config.limits.max_buffered / 4;
                    if !buffer.take(data.len(), most) {
                        return Err(turned_away(config, &NoPlace::TooManyBytes));
                    }
                    chunks.push(data);
                }
                Part::Trailers(trailers) => return Ok(Some(trailers)),
            }
        }
        Ok(None)
    };
    let read = std::pin::pin!(read);
    let trailers = match within_or_asked_again(|| from_now(config.request.body_timeout), read).await
    {
        Some(read) => read?,
        None => {
            return Err(Error::new(
                ErrorKind::BodyTimeout,
                format!(
                    "expected the whole request body within {:?}",
                    config.request.body_timeout
                ),
            ));
        }
    };
    // hyper takes a stream that was reset with NO_ERROR, as proxies do, for one that ended.
    if (chunks.len() as u64) < whole {
        return Err(broke_off());
    }
    // Where no length tells, the server looks for a reset, and drops us for it, as soon as it is our turn to wait.
    if whole == 0 && head.version == Version::HTTP_2 && !body.is_end_stream() {
        yield_now().await;
    }
    Ok((chunks.join(), trailers))
}

/// How much of a request body has to come before it is whole, by what was said of it before. The body itself knows best: a layer
/// outside of this one may have put it in place of one that was longer.
pub(crate) fn whole(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
    let exact = body.size_hint().exact();
    exact.unwrap_or_else(|| announced(headers, body))
}

/// How long a request body is, at the least, by what was said of it before it came.
fn announced(headers: &HeaderMap, body: &impl http_body::Body) -> u64 {
    content_length(headers)
        .unwrap_or(0)
        .max(body.size_hint().lower())
}

/// What came of collecting a response body.
pub(crate) enum Collected<B: http_body::Body> {
    Whole(Data, Option<HeaderMap>),
    /// Too large, or it goes on for too long: what was collected, and the rest to come.
    GivenUp(Body<B>, TombstoneReason),
    /// It failed, or has not the length it announced: what was collected, and the failure.
    Broken(Body<B>),
}

/// The whole response body, or what can be passed on of it.
pub(crate) async fn response<B: http_body::Body>(
    config: &Config,
    buffer: &mut Buffer,
    head: &response::Parts,
    body: B,
) -> Collected<B> {
    let limit = config.response.body_limit;
    let exact = body.size_hint().exact();
    // A 304 tells the length of what it does not send.
    let announced = (head.status != StatusCode::NOT_MODIFIED)
        .then(|| content_length(&head.headers))
        .flatten()
        .or(exact);
    if announced.unwrap_or(0).max(body.size_hint().lower()) > limit as u64
        || head.headers.len() > MAX_LINES
    {
        return Collected::GivenUp(Body::original(body), TombstoneReason::TooLarge);
    }
    if is_event_stream(&head.headers) {
        return Collected::GivenUp(Body::original(body), TombstoneReason::Streamed);
    }
    // What a handler would have made, or passed on, only once its client had taken what came before, we hold. What it has in
    // one piece, and knows to be all, it holds without us as well.
    let mut unsent = buffer.unsent();
    let join = |chunks: Chunks, unsent: Unsent| {
        if exact.is_none() || chunks.are_several() {
            Data::counted(chunks.join(), unsent)
        } else {
            chunks.join().into()
        }
    };
    let mut deadline = None;
    let mut body = Box::pin(body);
    let mut chunks = Chunks::default();
    let mut trailers = None;
    while trailers.is_none() {
        // A body of unknown length may go on for ever: it has so long in all. One that told its length may only stall.
        if announced.is_some() {
            deadline = None;
        }
        let give_up = || *deadline.get_or_insert_with(|| from_now(config.response.collect_timeout));
        let frame = poll_fn(|cx| body.as_mut().poll_frame(cx));
        let Some(frame) = within_or_asked_again(give_up, frame).await else {
            let body = Body::resumed(join(chunks, unsent), body);
            return Collected::GivenUp(body, TombstoneReason::Streamed);
        };
        let frame = match frame {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                let data = join(chunks, unsent);
                return Collected::Broken(Body::broken(data, Some(error), exact));
            }
            None => break,
        };
        match split(frame) {
            Part::Data(data) => {
                let most = config.limits.max_buffered;
                let fits = data.len() <= limit - chunks.len()
                    && if exact == Some(data.len() as u64) {
                        buffer.take(data.len(), most)
                    } else {
                        unsent.take(data.len(), most)
                    };
                chunks.push(data);
                if !fits {
                    let body = Body::resumed(join(chunks, unsent), body);
                    return Collected::GivenUp(body, TombstoneReason::TooLarge);
                }
            }
            Part::Trailers(found) => trailers = Some(found),
        }
    }
    let data = join(chunks, unsent);
    // A body cut short by whoever produced it must not be kept as if it were whole.
    if announced.is_some_and(|announced| announced != data.bytes().len() as u64) {
        return Collected::Broken(Body::broken(data, None, exact));
    }
    if trailers
        .as_ref()
        .is_some_and(|lines| lines.len() > MAX_LINES)
    {
        return Collected::GivenUp(Body::held(data, trailers), TombstoneReason::TooLarge);
    }
    Collected::Whole(data, trailers)
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers
        .get(header::CONTENT_LENGTH)?
        .to_str()
        .ok()?
        .parse()
        .ok()
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

enum Part {
    Data(Bytes),
    Trailers(HeaderMap),
}

fn split<D: Buf>(frame: Frame<D>) -> Part {
    match frame.into_data() {
        Ok(mut data) => Part::Data(data.copy_to_bytes(data.remaining())),
        Err(frame) => Part::Trailers(frame.into_trailers().unwrap_or_default()),
    }
}

/// Data as they come: one chunk stays as it is, several are joined. Keeping many small ones apart would let a client
/// that sends a byte at a time cost us forty.
#[derive(Default)]
struct Chunks {
    first: Bytes,
    joined: BytesMut,
}

impl Chunks {
    fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    fn are_several(&self) -> bool {
        !self.joined.is_empty()
    }

    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        if !self.first.is_empty() {
            self.joined.reserve(self.first.len() + data.len());
            self.joined
                .extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&data);
    }

    fn join(self) -> Bytes {
        if self.first.is_empty() {
            self.joined.freeze()
        } else {
            self.first
        }
    }
}
