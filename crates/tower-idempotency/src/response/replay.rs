//! Creates responses from records.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::{
    error::{Error, ErrorKind},
    limits::{AdmissionError, Buffer, Caller, UNCOUNTED, is_uncounted},
    record::{Record, StoredResponse, TombstoneReason},
    response::{
        reject::{CompleteResponse, admission_error, needs_attention, reject, unreadable_record},
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

/// Replays whose clients have not read them yet. Replays of one record share its body.
#[derive(Default)]
pub(crate) struct UnreadReplays(Mutex<HashMap<KeyId, Weak<UnreadReplay>>>);

/// The response of a record, and the buffer in which its body counts.
struct UnreadReplay {
    id: KeyId,
    record: Bytes,
    stored: StoredResponse,
    all: Arc<UnreadReplays>,
    _buffer: Buffer,
}

/// The body of an unread replay.
struct UnreadBody(Arc<UnreadReplay>);

impl UnreadReplays {
    /// Returns the recorded response as a replay, or a rejection with the reason why there is no replay. A record never
    /// leads to an execution. Unread responses hold at most `max` bytes in the layer.
    pub(crate) fn replay(
        self: &Arc<Self>,
        rules: &Rules,
        caller: &Arc<Caller>,
        max: usize,
        id: &KeyId,
        record: &Bytes,
    ) -> CompleteResponse {
        let inflated = rules.codec().inflated_len(record);
        // The body is a part of the record, so it does not count either.
        if inflated.is_none() && is_uncounted(record.len(), max) {
            return respond(rules, id, record, true, Ok);
        }
        // Only large bodies are shared. A replay of a small record takes no lock, which all replays of the layer would share.
        if inflated.unwrap_or(record.len()) > UNCOUNTED
            && let Some(unread) = self.find(id, record)
        {
            return replayed_response(rules, id, unread.share());
        }
        // A small record may inflate to a large one, so the memory counts before it is used.
        let inflated = inflated.unwrap_or(0);
        let mut buffer = caller.response_bytes(max);
        if let Err(error) = buffer.reserve(inflated) {
            return reject(rules, &over_limit(rules, id, error));
        }
        let hold = |mut stored: StoredResponse, mut buffer: Buffer| {
            buffer.reserve(stored.body.len().saturating_sub(inflated))?;
            if stored.body.len() > UNCOUNTED {
                let unread = Arc::new(UnreadReplay {
                    id: *id,
                    record: record.clone(),
                    stored,
                    all: Arc::clone(self),
                    _buffer: buffer,
                });
                self.lock().insert(*id, Arc::downgrade(&unread));
                stored = unread.share();
            }
            Ok(stored)
        };
        respond(rules, id, record, true, |stored| hold(stored, buffer))
    }

    /// Returns an unread replay of this record.
    fn find(&self, id: &KeyId, record: &Bytes) -> Option<Arc<UnreadReplay>> {
        let unread = self.lock().get(id)?.upgrade()?;
        (unread.record == record).then_some(unread)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KeyId, Weak<UnreadReplay>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnreadReplay {
    /// Returns the response with a body that shares the bytes of this replay.
    fn share(self: Arc<Self>) -> StoredResponse {
        let stored = self.stored.clone();
        StoredResponse {
            body: Bytes::from_owner(UnreadBody(self)),
            ..stored
        }
    }
}

impl AsRef<[u8]> for UnreadBody {
    fn as_ref(&self) -> &[u8] {
        &self.0.stored.body
    }
}

impl Drop for UnreadReplay {
    fn drop(&mut self) {
        let mut unread = self.all.lock();
        // Another record of this key may be replayed by now.
        if unread
            .get(&self.id)
            .is_some_and(|unread| unread.strong_count() == 0)
        {
            unread.remove(&self.id);
        }
    }
}

/// Returns the recorded response as a replay, to the client of an execution that did not produce it.
pub(crate) fn replay(
    rules: &Rules,
    buffer: Buffer,
    id: &KeyId,
    record: &Bytes,
) -> CompleteResponse {
    respond(rules, id, record, true, |stored| {
        Ok(hold_executed(stored, buffer))
    })
}

/// Returns the recorded response to the request that produced the record. It is neither counted nor marked as a replay.
pub(crate) fn respond_without_marker(
    rules: &Rules,
    buffer: Buffer,
    id: &KeyId,
    record: &Bytes,
) -> CompleteResponse {
    respond(rules, id, record, false, |stored| {
        Ok(hold_executed(stored, buffer))
    })
}

/// Counts the body until the client has read it.
///
/// A body over the limit is sent uncounted. The request was executed, and a rejection would suggest the opposite to its
/// client.
pub(crate) fn hold_executed(mut stored: StoredResponse, mut buffer: Buffer) -> StoredResponse {
    let _ = buffer.reserve(stored.body.len());
    stored.body = buffer.hold_until_sent(stored.body);
    stored
}

fn respond(
    rules: &Rules,
    id: &KeyId,
    record: &Bytes,
    is_replay: bool,
    hold: impl FnOnce(StoredResponse) -> Result<StoredResponse, AdmissionError>,
) -> CompleteResponse {
    let mut trace = None;
    let mut res = match rules.codec().decode(id, record) {
        Ok(Record::Response(stored)) => match hold(stored) {
            Ok(stored) if is_replay => replayed_response(rules, id, stored),
            Ok(stored) => stored_response(rules, stored),
            Err(error) => reject(rules, &over_limit(rules, id, error)),
        },
        Ok(Record::Tombstone { status, reason }) => {
            if is_replay {
                trace = rules.trace_in_record(id, record);
                telemetry::tombstone(rules.layer(), id, status, reason, trace.as_ref());
            }
            let reason = match reason {
                TombstoneReason::TooLarge => "was too large and was not recorded",
                TombstoneReason::Streamed => "was streamed and was not recorded",
                TombstoneReason::Panicked => "could not be recorded",
            };
            let detail = format!(
                "the first request was executed with status {}, but its response {reason}",
                status.as_u16(),
            );
            let error = Error::new(ErrorKind::ResponseNotRetained, detail);
            reject(rules, &error.with_entry(id))
        }
        Ok(Record::Attention { status, attention }) => {
            if is_replay {
                trace = rules.trace_in_record(id, record);
                let (layer, code) = (rules.layer(), attention.code());
                telemetry::unresolved(layer, id, status, code, trace.as_ref());
            }
            reject(rules, &needs_attention(attention.code()).with_entry(id))
        }
        Ok(Record::Value(_)) => {
            let source = "expected the record of a response, found that of a value";
            reject(rules, &unreadable_record(rules, id, source))
        }
        Err(error) => reject(rules, &unreadable_record(rules, id, error)),
    };
    if let Some(trace) = trace {
        res.extensions_mut().insert(trace);
    }
    res
}

/// Creates the error of a replay whose bytes are over a limit.
fn over_limit(rules: &Rules, id: &KeyId, error: AdmissionError) -> Error {
    if let AdmissionError::ResponseTooLarge { bytes, limit } = error {
        // Each retry gets this error until the record expires, as with a record that cannot be read.
        let reason = format!("expected a response of at most {limit} bytes, found {bytes}");
        telemetry::bad_record(&rules.warnings, id, &reason);
    }
    admission_error(rules, error).with_entry(id)
}

/// Returns the response, marked and counted as a replay.
fn replayed_response(rules: &Rules, id: &KeyId, stored: StoredResponse) -> CompleteResponse {
    let trace = stored.traceparent.filter(|_| rules.has_trace_links);
    let recorded_at = Some(stored.recorded_at);
    telemetry::replayed(rules.layer(), id, recorded_at, trace.as_ref());
    let mut res = stored_response(rules, stored);
    telemetry::set_replayed(&mut res);
    if let Some(trace) = trace {
        res.extensions_mut().insert(trace);
    }
    if let Some((name, value)) = rules.replay_marker.clone() {
        res.headers_mut().insert(name, value);
    }
    res
}

fn stored_response(rules: &Rules, stored: StoredResponse) -> CompleteResponse {
    let StoredResponse {
        status,
        headers,
        body,
        trailers,
        ..
    } = stored;
    let framing = match &trailers {
        // HTTP/2 needs neither: a replay has the headers of the first response.
        _ if rules.is_grpc() => None,
        // HTTP/1 servers send only trailers that are announced, and only without a length.
        Some(trailers) => trailer_names(trailers).map(|names| (header::TRAILER, names)),
        None if has_body(status) => Some((header::CONTENT_LENGTH, number_value(body.len()))),
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

/// Returns a number as the value of a header. `HeaderValue::from` would allocate twice.
fn number_value(number: usize) -> HeaderValue {
    let (mut digits, mut first, mut rest) = ([b'0'; 20], 19, number);
    while rest > 9 {
        digits[first] = b"0123456789"[rest % 10];
        (first, rest) = (first - 1, rest / 10);
    }
    digits[first] = b"0123456789"[rest];
    HeaderValue::from_bytes(&digits[first..]).unwrap_or_else(|_| HeaderValue::from(number))
}

fn trailer_names(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).ok()
}
