//! Converts the result of an execution into the response that is valid for the key.

use bytes::Bytes;
use http::{HeaderMap, Response, header};

use crate::{
    body::Body,
    execution::Finished,
    lease::state::LeaseState,
    record::{NeedsAttention, Record, StoredResponse, unrecorded_lines},
    response::{
        directives::{Directives, strip_control_headers},
        reject::{into_response, outcome_pending, outcome_unknown, reject},
        replay::{has_body, hold_executed, replay, respond_without_marker},
    },
    telemetry,
};

/// Returns the response that is valid for the key, from the handler or from the store.
pub(super) fn into_http_response<R: http_body::Body, E>(
    lease: &LeaseState,
    result: Result<Response<Body<R>>, E>,
    finished: Finished,
) -> Result<Response<Body<R>>, E> {
    let (rules, id) = (&lease.config().response, lease.id());
    Ok(into_response(match (finished, result) {
        (Finished::Own, result) => return result,
        (
            Finished::Committed {
                record,
                is_reported: true,
            },
            Ok(res),
        ) => return Ok(committed_response(lease, &record, res)),
        (Finished::Committed { record, .. }, _) => {
            respond_without_marker(rules, lease.response_bytes(), id, &record)
        }
        (Finished::Stored(record), _) => replay(rules, lease.response_bytes(), id, &record),
        (Finished::Unknown { retryable: true }, _) => {
            reject(rules, &outcome_pending(rules).with_entry(id))
        }
        (Finished::Unknown { retryable: false }, _) => {
            reject(rules, &outcome_unknown().with_entry(id))
        }
    }))
}

/// Returns the response of a handler that committed `record`. A key has one response, so the handler's later response does
/// not count. Headers that are never recorded, such as session cookies, come from `res`.
fn committed_response<R: http_body::Body>(
    lease: &LeaseState,
    record: &Bytes,
    mut res: Response<Body<R>>,
) -> Response<Body<R>> {
    let (rules, id) = (&lease.config().response, lease.id());
    // An outer layer follows the instructions of the handler.
    let directives = lease.grant.is_nested.then(|| Directives::of(&res));
    strip_control_headers(res.headers_mut());
    if let Some(late) = res.extensions_mut().remove::<NeedsAttention>()
        && directives.is_none()
    {
        let reason = "a response was committed";
        telemetry::attention_ignored(lease.layer(), id, late.code(), reason);
    }
    let mut res = match rules.codec().decode(id, record) {
        Ok(Record::Response(stored)) => merge_unrecorded_headers(lease, stored, res),
        // The record has no body. The handler returned the response that belongs to it.
        Ok(Record::Tombstone { .. } | Record::Attention { .. }) => res,
        Ok(Record::Value(_)) | Err(_) => into_response(respond_without_marker(
            rules,
            lease.response_bytes(),
            id,
            record,
        )),
    };
    if let Some(directives) = directives {
        directives.restore(&mut res);
    }
    res
}

/// Returns the stored response with those headers of `res` that are never recorded.
fn merge_unrecorded_headers<R: http_body::Body>(
    lease: &LeaseState,
    stored: StoredResponse,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    // The body of `res` may count already. The client gets the stored body, so this one is dropped first.
    let (mut head, handler_body) = res.into_parts();
    drop(handler_body);
    let StoredResponse {
        status,
        mut headers,
        body,
        trailers,
        ..
    } = hold_executed(stored, lease.response_bytes());
    let mut unrecorded = HeaderMap::new();
    let replayed = &*lease.config().response.replayed_headers;
    for (name, value) in unrecorded_lines(&head.headers, replayed) {
        unrecorded.append(name, value.clone());
    }
    unrecorded.remove(header::TRANSFER_ENCODING);
    // The length must be that of the stored body, not that of the body of `res`.
    if unrecorded.remove(header::CONTENT_LENGTH).is_some() && trailers.is_none() && has_body(status)
    {
        unrecorded.insert(header::CONTENT_LENGTH, body.len().into());
    }
    headers.extend(unrecorded);
    head.status = status;
    head.headers = headers;
    Response::from_parts(head, Body::chunked(body, trailers))
}
