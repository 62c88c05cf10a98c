//! Decides if the layer records the response of the handler.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
};

use bytes::Bytes;
use http::{Response, StatusCode};
use serde::Serialize;

use crate::{
    body::Body,
    limits::{self, Buffer},
    record::{Codec, NeedsAttention, TombstoneReason},
    response::{
        buffer::{Buffered, buffer_body},
        directives::{Directive, take_directive},
        rules::{Rules, Unrecordable},
    },
    store::{KeyId, Ttl},
    telemetry,
};

/// Action that finishes the lease after the handler has responded.
pub(crate) enum Disposition {
    /// Store this record.
    Record { record: Bytes, retention: Ttl },
    /// Release the key without a record.
    Release(NotRecordedReason),
}

/// Reason why the layer does not record a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NotRecordedReason {
    /// The layer does not record responses with this status, such as a 5xx.
    Status,
    /// The handler opted out.
    NoStore,
    /// The response is an error, and the request body was incomplete when the handler read it.
    BrokenRequest,
    /// The response body failed, or its length differs from the announced one.
    BrokenBody,
    /// The response is too large or streamed, and the setting is [`Unrecordable::Release`].
    Unrecordable,
}

impl NotRecordedReason {
    /// Returns the name of the reason in events and counters.
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

/// Decides if the response is recorded. Buffers its body within limits if so.
///
/// `request_incomplete` is `true` if the handler read a request body that was aborted.
pub(crate) fn decide_disposition<R: http_body::Body>(
    rules: &Rules,
    limits: &limits::Rules,
    buffer: &mut Buffer,
    id: &KeyId,
    res: Response<R>,
    request_incomplete: bool,
) -> impl Future<Output = (Response<Body<R>>, Disposition)> {
    let (mut head, body) = res.into_parts();
    let directive = take_directive(&mut head, rules.retention, rules.max_retention);
    async move {
        let retention = match directive {
            // An informational response (1xx) precedes the final one and is never recorded.
            Directive::Record(retention)
                if !head.status.is_informational() && (rules.recorded_statuses)(head.status) =>
            {
                retention
            }
            Directive::Record(_) => {
                return (
                    Response::from_parts(head, Body::original(body)),
                    Disposition::Release(NotRecordedReason::Status),
                );
            }
            Directive::NoStore => {
                return (
                    Response::from_parts(head, Body::original(body)),
                    Disposition::Release(NotRecordedReason::NoStore),
                );
            }
            // Recorded with any status and any request: the work must not be repeated.
            Directive::NeedsAttention(attention) => {
                let record = Codec::encode_attention(id, Some(head.status), &attention);
                let disposition = Disposition::Record {
                    record,
                    retention: Ttl::MAX,
                };
                return (
                    Response::from_parts(head, Body::original(body)),
                    disposition,
                );
            }
        };
        // The handler rejected an incomplete request. A retry with the complete request must not get this response.
        if request_incomplete && (head.status.is_client_error() || head.status.is_server_error()) {
            return (
                Response::from_parts(head, Body::original(body)),
                Disposition::Release(NotRecordedReason::BrokenRequest),
            );
        }
        match buffer_body(rules, limits, buffer, &head, body).await {
            Buffered::Complete(data, trailers) => {
                let record = rules.codec().encode_response(
                    id,
                    head.status,
                    &head.headers,
                    &*rules.replayed_headers,
                    data.bytes(),
                    trailers.as_ref(),
                );
                let res = Response::from_parts(head, Body::buffered(data, trailers));
                (res, Disposition::Record { record, retention })
            }
            Buffered::Unrecordable(body, reason) => {
                let disposition = tombstone_or_release(rules, id, head.status, reason, retention);
                (Response::from_parts(head, body), disposition)
            }
            Buffered::Failed(body) => (
                Response::from_parts(head, body),
                Disposition::Release(NotRecordedReason::BrokenBody),
            ),
        }
    }
}

/// Returns the disposition of a response that cannot be recorded.
pub(crate) fn tombstone_or_release(
    rules: &Rules,
    id: &KeyId,
    status: StatusCode,
    reason: TombstoneReason,
    retention: Ttl,
) -> Disposition {
    match rules.unrecordable {
        Unrecordable::Tombstone => {
            telemetry::tombstone_stored(id, reason);
            let record = rules.codec().encode_tombstone(id, status, reason);
            Disposition::Record { record, retention }
        }
        Unrecordable::Release => Disposition::Release(NotRecordedReason::Unrecordable),
    }
}

/// Returns the [`NeedsAttention`] record without its reason, for a store that rejects the complete record as too large.
/// Returns `None` for any other record.
pub(crate) fn strip_reason(id: &KeyId, status: Option<StatusCode>, record: &[u8]) -> Option<Bytes> {
    let attention = NeedsAttention::in_record(record)?.with_reason("");
    Some(Codec::encode_attention(id, status, &attention))
}

/// Encodes the record of a value of `run_once`, or a tombstone if the value cannot be recorded.
pub(crate) fn encode_value(rules: &Rules, id: &KeyId, value: &impl Serialize) -> Bytes {
    // The work is done. A value that panics is treated like one that returns an error.
    match catch_unwind(AssertUnwindSafe(|| rmp_serde::to_vec_named(value))) {
        Ok(Ok(bytes)) if bytes.len() <= rules.body_limit => rules.codec().encode_value(id, &bytes),
        Ok(Ok(_)) => encode_oversized_value(rules, id),
        // The message is not logged: it comes from the value and may quote any of its data.
        Ok(Err(_)) | Err(_) => {
            tracing::error!(%id, "value cannot be serialized, retries get no value");
            encode_oversized_value(rules, id)
        }
    }
}

/// Encodes the tombstone of a value that cannot be recorded.
pub(crate) fn encode_oversized_value(rules: &Rules, id: &KeyId) -> Bytes {
    let reason = TombstoneReason::TooLarge;
    telemetry::tombstone_stored(id, reason);
    rules.codec().encode_tombstone(id, StatusCode::OK, reason)
}
