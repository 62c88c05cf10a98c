//! Deciding what is to become of the handler's response.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
};

use bytes::Bytes;
use http::{Response, StatusCode};
use serde::Serialize;

use crate::{
    body::Body,
    config::Config,
    limits::Buffer,
    record::{Codec, NeedsAttention, TombstoneReason},
    request::read_body::{self, Collected},
    response::directives::{self, Wish},
    response::rules::Unrecordable,
    store::{KeyId, Ttl},
    telemetry,
};

/// What is to become of the lease once the handler has answered.
pub(crate) enum Then {
    /// The record is stored, which ends it.
    Keep { record: Bytes, retention: Ttl },
    /// There is nothing to keep: the key is freed, for this reason.
    Free(NotRecordedReason),
}

/// Why a response is not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NotRecordedReason {
    /// Its status is not one that the layer records, such as a 5xx.
    Status,
    /// The handler opted out.
    NoStore,
    /// It is an error, and the request had broken off as the handler read it.
    BrokenRequest,
    /// Its body broke off, or is not as long as it says.
    BrokenBody,
    /// It is too large or goes on for too long, and the layer leaves no tombstone.
    Unrecordable,
}

impl NotRecordedReason {
    /// The word for it in events and counters.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::NoStore => "no_store",
            Self::BrokenRequest => "broken_request",
            Self::BrokenBody => "broken_body",
            Self::Unrecordable => "unrecordable",
        }
    }
}

/// Decides what is to become of the handler's response, and collects it within limits if it is to be kept. `half` says
/// that the handler found the request broken off.
pub(crate) fn receive<R: http_body::Body>(
    config: &Config,
    buffer: &mut Buffer,
    id: &KeyId,
    res: Response<R>,
    half: bool,
) -> impl Future<Output = (Response<Body<R>>, Then)> {
    let (mut head, body) = res.into_parts();
    let wish = directives::take_wish(
        &mut head,
        config.response.retention,
        config.response.max_retention,
    );
    async move {
        let retention = match wish {
            // A status that announces another answer to come is not one to keep.
            Wish::Keep(retention)
                if !head.status.is_informational() && (config.response.recorded)(head.status) =>
            {
                retention
            }
            Wish::Keep(_) => {
                return (
                    Response::from_parts(head, Body::original(body)),
                    Then::Free(NotRecordedReason::Status),
                );
            }
            Wish::NoStore => {
                return (
                    Response::from_parts(head, Body::original(body)),
                    Then::Free(NotRecordedReason::NoStore),
                );
            }
            // Whatever the status, whatever became of the request: what was done must not be done again.
            Wish::Attention(attention) => {
                let record = Codec::encode_attention(id, Some(head.status), &attention);
                let then = Then::Keep {
                    record,
                    retention: Ttl::MAX,
                };
                return (Response::from_parts(head, Body::original(body)), then);
            }
        };
        // The handler refused half a request. Whoever sends the whole one must not be told so.
        if half && (head.status.is_client_error() || head.status.is_server_error()) {
            return (
                Response::from_parts(head, Body::original(body)),
                Then::Free(NotRecordedReason::BrokenRequest),
            );
        }
        match read_body::response(config, buffer, &head, body).await {
            Collected::Whole(data, trailers) => {
                let (headers, replayed) = (&head.headers, &*config.response.replayed);
                let record = config.response.codec().encode_response(
                    id,
                    head.status,
                    headers,
                    replayed,
                    data.bytes(),
                    trailers.as_ref(),
                );
                let res = Response::from_parts(head, Body::held(data, trailers));
                (res, Then::Keep { record, retention })
            }
            Collected::GivenUp(body, reason) => {
                let then = tombstone_or_release(config, id, head.status, reason, retention);
                (Response::from_parts(head, body), then)
            }
            Collected::Broken(body) => (
                Response::from_parts(head, body),
                Then::Free(NotRecordedReason::BrokenBody),
            ),
        }
    }
}

/// What becomes of a response that cannot be kept.
pub(crate) fn tombstone_or_release(
    config: &Config,
    id: &KeyId,
    status: StatusCode,
    reason: TombstoneReason,
    retention: Ttl,
) -> Then {
    match config.response.unrecordable {
        Unrecordable::Tombstone => {
            telemetry::tombstone_stored(id, reason);
            let record = config.response.codec().encode_tombstone(id, status, reason);
            Then::Keep { record, retention }
        }
        Unrecordable::Release => Then::Free(NotRecordedReason::Unrecordable),
    }
}

/// What is kept of what needs attention where a store cannot keep its reason: the code. Nothing, of any other record.
pub(crate) fn code_alone(id: &KeyId, status: Option<StatusCode>, record: &[u8]) -> Option<Bytes> {
    let attention = NeedsAttention::in_record(record)?.with_reason("");
    Some(Codec::encode_attention(id, status, &attention))
}

/// The record of a value of `run_once`.
pub(crate) fn value(config: &Config, id: &KeyId, value: &impl Serialize) -> Bytes {
    // The work is done, so that a value which panics is one more that cannot be serialised.
    match catch_unwind(AssertUnwindSafe(|| rmp_serde::to_vec_named(value))) {
        Ok(Ok(bytes)) if bytes.len() <= config.response.body_limit => {
            config.response.codec().encode_value(id, &bytes)
        }
        Ok(Ok(_)) => too_large(config, id),
        // The message is the value's own, and may say anything of it.
        Ok(Err(_)) | Err(_) => {
            tracing::error!(%id, "a value cannot be serialised; its retries are told so");
            too_large(config, id)
        }
    }
}

/// The record of a value that cannot be kept.
pub(crate) fn too_large(config: &Config, id: &KeyId) -> Bytes {
    let reason = TombstoneReason::TooLarge;
    telemetry::tombstone_stored(id, reason);
    config
        .response
        .codec()
        .encode_tombstone(id, StatusCode::OK, reason)
}
