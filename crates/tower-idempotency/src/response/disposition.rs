//! Decides if the layer records the response of the handler.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, response};
use serde::{Serialize, de::DeserializeOwned};

#[cfg(feature = "grpc")]
use crate::grpc::{GRPC_STATUS, GrpcCode, is_grpc_response};
use crate::{
    body::Body,
    limits::Buffer,
    panics::catch_report_panic,
    record::{Codec, MAX_LINES, NeedsAttention, Origin, Record, TombstoneReason},
    response::{
        buffer::{Buffered, BufferedBody},
        directives::{Directive, take_directive},
        rules::{Rules, Unrecordable},
    },
    store::{KeyId, Ttl},
    telemetry::{self, catch_setting_panic},
};

/// Action that finishes the lease after the handler has responded.
pub(crate) enum Disposition {
    /// Store this record.
    Record {
        record: Bytes,
        retention: Ttl,
        /// Class of the outcome: the status, or for gRPC 200 or 400 by the code.
        class: StatusCode,
    },
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

/// A response that is recorded once its body is buffered.
pub(crate) struct Recording<R> {
    head: Response<()>,
    body: BufferedBody<R>,
    retention: Ttl,
}

/// A response, and the action that finishes its lease.
pub(crate) type Decided<R> = (Response<Body<R>>, Disposition);

impl<R: http_body::Body> Recording<R> {
    /// Decides if the response is recorded. Returns the disposition if it does not depend on the body.
    ///
    /// `request_incomplete` is `true` if the handler read a request body that was aborted.
    pub(crate) fn new(
        rules: &Rules,
        buffer: Buffer,
        origin: Origin<'_>,
        res: Response<R>,
        request_incomplete: bool,
    ) -> Result<Self, Box<Decided<R>>> {
        let (mut head, body) = res.into_parts();
        let retention = match decide_by_head(rules, origin, &mut head, request_incomplete) {
            Ok(retention) => retention,
            Err(disposition) => {
                let res = Response::from_parts(head, Body::original(body));
                return Err(Box::new((res, disposition)));
            }
        };
        let head = Response::from_parts(head, ());
        match BufferedBody::new(rules, buffer, &head, body) {
            Ok(body) => Ok(Self {
                head,
                body,
                retention,
            }),
            Err(buffered) => Err(Box::new(record(rules, origin, head, *buffered, retention))),
        }
    }

    /// Buffers the body within limits and encodes the record. Must not be called again after it has returned `Ready`.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        rules: &Rules,
        origin: Origin<'_>,
    ) -> Poll<Decided<R>> {
        let buffered = ready!(self.body.poll(cx));
        let head = std::mem::take(&mut self.head);
        Poll::Ready(record(rules, origin, head, buffered, self.retention))
    }
}

/// Decides if the response is recorded. Buffers its body within limits if so.
pub(crate) async fn decide_disposition<R: http_body::Body>(
    rules: &Rules,
    buffer: Buffer,
    origin: Origin<'_>,
    res: Response<R>,
    request_incomplete: bool,
) -> Decided<R> {
    match Recording::new(rules, buffer, origin, res, request_incomplete) {
        Ok(mut recording) => poll_fn(|cx| recording.poll(cx, rules, origin)).await,
        Err(decided) => *decided,
    }
}

/// Decides without the body: returns the retention of the record, or the disposition of a response whose body does not
/// matter.
fn decide_by_head(
    rules: &Rules,
    origin: Origin<'_>,
    head: &mut response::Parts,
    request_incomplete: bool,
) -> Result<Ttl, Disposition> {
    let (default, max) = (rules.retention, rules.max_retention);
    let retention = match take_directive(rules.layer(), head, default, max) {
        // The status is in the trailers.
        Directive::Record(retention) if rules.is_grpc() => retention,
        Directive::Record(retention) => match rules.is_recorded(head.status) {
            Some(true) => retention,
            Some(false) => return Err(Disposition::Release(NotRecordedReason::Status)),
            None => {
                let record = tombstone(rules, origin, head.status, TombstoneReason::Panicked);
                return Err(Disposition::Record {
                    record,
                    retention,
                    class: head.status,
                });
            }
        },
        Directive::NoStore => return Err(Disposition::Release(NotRecordedReason::NoStore)),
        // Recorded with any status and any request: the work must not be repeated.
        Directive::NeedsAttention(attention) => {
            return Err(Disposition::Record {
                record: Codec::encode_attention(origin, Some(head.status), &attention),
                retention: Ttl::MAX,
                class: head.status,
            });
        }
    };
    // The handler rejected an incomplete request. A retry with the complete request must not get this response.
    if request_incomplete && (head.status.is_client_error() || head.status.is_server_error()) {
        return Err(Disposition::Release(NotRecordedReason::BrokenRequest));
    }
    Ok(retention)
}

/// Returns the response whose body was buffered, and encodes its record.
fn record<R: http_body::Body>(
    rules: &Rules,
    origin: Origin<'_>,
    head: Response<()>,
    buffered: Buffered<R>,
    retention: Ttl,
) -> Decided<R> {
    let status = head.status();
    match buffered {
        Buffered::Complete(data, trailers) => {
            let class = match class_of(rules, &head, trailers.as_ref()) {
                Ok(class) => class,
                Err(reason) => {
                    let disposition = match reason {
                        Some(reason) => Disposition::Release(reason),
                        None => Disposition::Record {
                            record: tombstone(rules, origin, status, TombstoneReason::Panicked),
                            retention,
                            class: status,
                        },
                    };
                    return (head.map(|()| Body::chunked(data, trailers)), disposition);
                }
            };
            if trailers
                .as_ref()
                .is_some_and(|lines| lines.len() > MAX_LINES)
            {
                let reason = TombstoneReason::TooLarge;
                let disposition = tombstone_or_release(rules, origin, status, reason, retention);
                return (head.map(|()| Body::chunked(data, trailers)), disposition);
            }
            let encode = || {
                rules.codec().encode_response(
                    origin,
                    status,
                    head.headers(),
                    &*rules.replayed_headers,
                    &data,
                    trailers.as_ref(),
                )
            };
            let record = catch_setting_panic(rules.layer(), "with_replayed_headers", encode)
                .unwrap_or_else(|| tombstone(rules, origin, status, TombstoneReason::Panicked));
            let res = head.map(|()| Body::chunked(data, trailers));
            let disposition = Disposition::Record {
                record,
                retention,
                class,
            };
            (res, disposition)
        }
        Buffered::Unrecordable(body, reason) => {
            let disposition = match code_of_head(rules, &head) {
                Err(Some(reason)) => Disposition::Release(reason),
                Ok(()) | Err(None) => {
                    tombstone_or_release(rules, origin, status, reason, retention)
                }
            };
            (head.map(|()| body), disposition)
        }
        Buffered::Failed(body) => {
            let disposition = Disposition::Release(NotRecordedReason::BrokenBody);
            (head.map(|()| body), disposition)
        }
    }
}

/// Returns the class of the outcome of a complete response: its status, or for gRPC 200 or 400 by its code. The error is the
/// reason why the response is not recorded, or `None` if the setting panics.
fn class_of(
    rules: &Rules,
    head: &Response<()>,
    trailers: Option<&HeaderMap>,
) -> Result<StatusCode, Option<NotRecordedReason>> {
    let _ = trailers;
    if !rules.is_grpc() {
        return Ok(head.status());
    }
    // A layer inside of this one may respond without gRPC, and so does an HTTP route.
    #[cfg_attr(
        not(feature = "grpc"),
        expect(unused_mut, reason = "only gRPC changes them")
    )]
    let (mut is_recorded, mut class) = (rules.is_recorded(head.status()), head.status());
    #[cfg(feature = "grpc")]
    if let Some(methods) = &rules.grpc
        && is_grpc_response(head.headers(), trailers)
    {
        // Without a status the response is incomplete.
        let code = GrpcCode::of_response(head.status(), head.headers(), trailers);
        let code = code.ok_or(NotRecordedReason::BrokenBody)?;
        is_recorded = catch_setting_panic(rules.layer(), "with_recorded_codes", || {
            methods.is_recorded(code)
        });
        class = if code == GrpcCode::Ok {
            StatusCode::OK
        } else {
            StatusCode::BAD_REQUEST
        };
    }
    match is_recorded {
        Some(true) => Ok(class),
        Some(false) => Err(Some(NotRecordedReason::Status)),
        None => Err(None),
    }
}

/// Decides by the gRPC status in the head of a response without messages, or by the HTTP status of a response without gRPC.
/// Other responses pass.
fn code_of_head(rules: &Rules, head: &Response<()>) -> Result<(), Option<NotRecordedReason>> {
    #[cfg(feature = "grpc")]
    if rules.is_grpc()
        && (head.headers().contains_key(GRPC_STATUS) || !is_grpc_response(head.headers(), None))
    {
        return class_of(rules, head, None).map(drop);
    }
    let _ = (rules, head);
    Ok(())
}

/// Returns the disposition of a response that cannot be recorded.
pub(crate) fn tombstone_or_release(
    rules: &Rules,
    origin: Origin<'_>,
    status: StatusCode,
    reason: TombstoneReason,
    retention: Ttl,
) -> Disposition {
    match rules.unrecordable {
        Unrecordable::Tombstone => Disposition::Record {
            record: tombstone(rules, origin, status, reason),
            retention,
            class: status,
        },
        Unrecordable::Release => Disposition::Release(NotRecordedReason::Unrecordable),
    }
}

/// Encodes a tombstone and counts it.
fn tombstone(
    rules: &Rules,
    origin: Origin<'_>,
    status: StatusCode,
    reason: TombstoneReason,
) -> Bytes {
    telemetry::tombstone_stored(rules.layer(), origin.id, reason);
    rules.codec().encode_tombstone(origin, status, reason)
}

/// Returns the [`NeedsAttention`] record without its reason, for a store that rejects the complete record as too large.
/// Returns `None` for any other record.
pub(crate) fn strip_reason(
    origin: Origin<'_>,
    status: Option<StatusCode>,
    record: &[u8],
) -> Option<Bytes> {
    let attention = NeedsAttention::in_record(record)?.with_reason("");
    Some(Codec::encode_attention(origin, status, &attention))
}

/// Encodes the record of a value of `run_once`, or a tombstone if the value cannot be recorded.
pub(crate) fn encode_value(rules: &Rules, id: &KeyId, value: &impl Serialize) -> Bytes {
    encode_value_if(rules, id, value, |_| true)
}

/// Encodes the record of a value like [`encode_value`], or a tombstone also if no retry could read the value.
///
/// Serde does not promise that it reads what it has written. The buffer of tagged types, for example, has no 128-bit integers.
pub(crate) fn encode_readable_value<T: Serialize + DeserializeOwned>(
    rules: &Rules,
    id: &KeyId,
    value: &T,
) -> Bytes {
    encode_value_if(rules, id, value, |bytes| {
        let read = catch_unwind(|| rmp_serde::from_slice::<T>(bytes).is_ok());
        read.unwrap_or(false)
    })
}

fn encode_value_if(
    rules: &Rules,
    id: &KeyId,
    value: &impl Serialize,
    is_readable: impl Fn(&[u8]) -> bool,
) -> Bytes {
    // The work is done. A value that panics is treated like one that returns an error.
    let encoded = catch_unwind(AssertUnwindSafe(|| rmp_serde::to_vec_named(value)));
    let layer = rules.layer();
    // The messages of serde are not logged: they come from the value and may quote any of its data.
    match encoded {
        Ok(Ok(bytes)) if bytes.len() > rules.body_limit => {}
        Ok(Ok(bytes)) if is_readable(&bytes) => return rules.codec().encode_value(id, &bytes),
        Ok(Ok(_)) => catch_report_panic(|| {
            tracing::error!(%id, layer = layer.as_str(), "value cannot be read back, retries get no value");
        }),
        Ok(Err(_)) | Err(_) => catch_report_panic(|| {
            tracing::error!(%id, layer = layer.as_str(), "value cannot be serialized, retries get no value");
        }),
    }
    encode_oversized_value(rules, id)
}

/// Returns `true` if the record contains this value. A tombstone contains none.
pub(crate) fn has_value(record: &Bytes, rules: &Rules, id: &KeyId, value: &impl Serialize) -> bool {
    let Ok(Record::Value(committed)) = rules.codec().decode(id, record) else {
        return false;
    };
    let bytes = catch_unwind(AssertUnwindSafe(|| rmp_serde::to_vec_named(value)));
    matches!(bytes, Ok(Ok(bytes)) if committed == bytes)
}

/// Encodes the tombstone of a value that cannot be recorded.
pub(crate) fn encode_oversized_value(rules: &Rules, id: &KeyId) -> Bytes {
    tombstone(rules, id.into(), StatusCode::OK, TombstoneReason::TooLarge)
}
