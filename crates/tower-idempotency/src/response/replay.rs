//! Creates responses from records.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::{
    error::{Error, ErrorKind},
    record::{Record, StoredResponse, TombstoneReason},
    response::{
        reject::{CompleteResponse, needs_attention, reject, unreadable_record},
        rules::Rules,
    },
    store::KeyId,
    telemetry,
};

/// `Idempotent-Replayed`, the header that marks replays unless
/// [`with_replay_marker`](crate::IdempotencyLayer::with_replay_marker) sets another one.
///
/// List it in `Access-Control-Expose-Headers`, so that browsers show it to scripts.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Returns the recorded response as a replay, or the rejection that says why there is none. A record never leads to an
/// execution.
pub(crate) fn replay(rules: &Rules, id: &KeyId, record: &Bytes) -> CompleteResponse {
    respond(rules, id, record, true)
}

/// Returns the recorded response to the request that produced the record. It is neither counted nor marked as a replay.
pub(crate) fn respond_without_marker(
    rules: &Rules,
    id: &KeyId,
    record: &Bytes,
) -> CompleteResponse {
    respond(rules, id, record, false)
}

fn respond(rules: &Rules, id: &KeyId, record: &Bytes, is_replay: bool) -> CompleteResponse {
    match rules.codec().decode(id, record) {
        Ok(Record::Response(stored)) => {
            if !is_replay {
                return stored_response(stored);
            }
            telemetry::replayed(id, Some(stored.recorded_at));
            let mut res = stored_response(stored);
            if let Some((name, value)) = rules.replay_marker.clone() {
                res.headers_mut().insert(name, value);
            }
            res
        }
        Ok(Record::Tombstone { status, reason }) => {
            if is_replay {
                telemetry::tombstone(id, status, reason);
            }
            let reason = match reason {
                TombstoneReason::TooLarge => "too large",
                TombstoneReason::Streamed => "streamed",
            };
            let detail = format!(
                "the first request was executed with status {}, but its response was {reason} and was not recorded",
                status.as_u16(),
            );
            reject(rules, &Error::new(ErrorKind::ResponseNotRetained, detail))
        }
        Ok(Record::Attention { status, attention }) => {
            if is_replay {
                telemetry::unresolved(id, status, attention.code());
            }
            reject(rules, &needs_attention(attention.code()))
        }
        Ok(Record::Value(_)) => reject(
            rules,
            &unreadable_record("expected the record of a response, found that of a value"),
        ),
        Err(error) => {
            telemetry::bad_record(id, &error);
            reject(rules, &unreadable_record(error))
        }
    }
}

fn stored_response(stored: StoredResponse) -> CompleteResponse {
    let StoredResponse {
        status,
        headers,
        body,
        trailers,
        ..
    } = stored;
    let framing = match &trailers {
        // HTTP/1 servers send only trailers that are announced, and only without a length.
        Some(trailers) => trailer_names(trailers).map(|names| (header::TRAILER, names)),
        None if has_body(status) => Some((header::CONTENT_LENGTH, HeaderValue::from(body.len()))),
        None => None,
    };
    let mut res = Response::new((body, trailers));
    *res.status_mut() = status;
    *res.headers_mut() = headers;
    if let Some((name, value)) = framing {
        res.headers_mut().insert(name, value);
    }
    res
}

/// Returns `true` if a response with this status has a body and a length.
pub(crate) fn has_body(status: StatusCode) -> bool {
    !status.is_informational()
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

fn trailer_names(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).ok()
}
