//! Answering from a record.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::{
    config::Config,
    error::{Error, ErrorKind},
    record::{Record, StoredResponse, TombstoneReason},
    response::reject::{Answer, refuse, unreadable, unresolved},
    store::KeyId,
    telemetry,
};

/// `Idempotent-Replayed`, the header that marks replays unless
/// [`with_replay_marker`](crate::IdempotencyLayer::with_replay_marker) sets another: for the list of those that a browser
/// may show to its scripts.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// A replay of the answer that a record holds, or a refusal that says why there is none. Never a reason to execute again.
pub(crate) fn replay(config: &Config, id: &KeyId, record: &Bytes) -> Answer {
    answered(config, id, record, true)
}

/// The same, for the request that left the record itself: nothing is counted or marked as a replay.
pub(crate) fn answer(config: &Config, id: &KeyId, record: &Bytes) -> Answer {
    answered(config, id, record, false)
}

fn answered(config: &Config, id: &KeyId, record: &Bytes, again: bool) -> Answer {
    match config.response.codec().decode(id, record) {
        Ok(Record::Response(stored)) => {
            if !again {
                return respond(stored);
            }
            telemetry::replayed(id, Some(stored.recorded_at));
            let mut res = respond(stored);
            if let Some((name, value)) = config.response.replay_marker.clone() {
                res.headers_mut().insert(name, value);
            }
            res
        }
        Ok(Record::Tombstone { status, reason }) => {
            if again {
                telemetry::tombstone(id, status, reason);
            }
            let what = match reason {
                TombstoneReason::TooLarge => "too large",
                TombstoneReason::Streamed => "streamed",
            };
            let detail = format!(
                "the first request was executed and answered {}, but its response was {what} and was not retained",
                status.as_u16(),
            );
            refuse(config, &Error::new(ErrorKind::ResponseNotRetained, detail))
        }
        Ok(Record::Attention { status, attention }) => {
            if again {
                telemetry::unresolved(id, status, attention.code());
            }
            refuse(config, &unresolved(attention.code()))
        }
        Ok(Record::Value(_)) => refuse(config, &unreadable("it is not of an HTTP response")),
        Err(error) => {
            telemetry::bad_record(id, &error);
            refuse(config, &unreadable(error))
        }
    }
}

fn respond(stored: StoredResponse) -> Answer {
    let StoredResponse {
        status,
        headers,
        body,
        trailers,
        ..
    } = stored;
    let announce = match &trailers {
        // HTTP/1 sends only the trailers that are announced, and only where no length is.
        Some(trailers) => announced_trailers(trailers).map(|names| (header::TRAILER, names)),
        None if has_body(status) => Some((header::CONTENT_LENGTH, HeaderValue::from(body.len()))),
        None => None,
    };
    let mut res = Response::new((body, trailers));
    *res.status_mut() = status;
    *res.headers_mut() = headers;
    if let Some((name, value)) = announce {
        res.headers_mut().insert(name, value);
    }
    res
}

/// Whether an answer of this status has a body, and a length.
pub(crate) fn has_body(status: StatusCode) -> bool {
    !status.is_informational()
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

fn announced_trailers(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).ok()
}
