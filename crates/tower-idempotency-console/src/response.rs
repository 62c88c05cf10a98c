//! The response that an operator records with the decision `complete`: its status and its headers, as text.
//!
//! The console and the tool `idempotency` accept the same texts.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};
use tower_idempotency::{
    IdempotencyLayer,
    inspect::{Entry, EntryDetails, RecordContents, Seen, State},
    store::KeyId,
};

/// Parses the status of a response that retries get: 200 to 599.
///
/// Returns `None` for other texts. A status of 1xx is not the status of a response, and clients do not know a class above
/// 5xx.
///
/// ```
/// use tower_idempotency_console::response::parse_status;
///
/// assert_eq!(parse_status("201").unwrap(), 201);
/// assert!(parse_status("101").is_none());
/// assert!(parse_status("600").is_none());
/// ```
#[must_use]
pub fn parse_status(text: &str) -> Option<StatusCode> {
    let status: StatusCode = text.trim().parse().ok()?;
    (200..600).contains(&status.as_u16()).then_some(status)
}

/// Parses a header of the form `name: value`.
///
/// Returns `None` for other texts.
///
/// ```
/// use tower_idempotency_console::response::parse_header;
///
/// let (name, value) = parse_header("Location: /orders/1").unwrap();
/// assert_eq!((name.as_str(), value.to_str().unwrap()), ("location", "/orders/1"));
/// assert!(parse_header("location").is_none());
/// ```
#[must_use]
pub fn parse_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':')?;
    Some((name.trim().parse().ok()?, value.trim().parse().ok()?))
}

/// The statuses that [`parse_status`] accepts, for messages.
pub const STATUSES: &str = "200 to 599";

/// Encodes the response as the record of an entry, like [`IdempotencyLayer::encode_response_record`].
///
/// # Errors
///
/// A sentence for the operator if a replay would lack a part of the response. Such a part is a header that the layer does
/// not replay, or a body that the status does not permit. Also if the response is too large for a record, or a gRPC
/// response that clients cannot read without trailers.
pub fn encode(
    layer: &IdempotencyLayer,
    id: &KeyId,
    response: &Response<Bytes>,
) -> Result<Bytes, String> {
    if is_grpc(response.headers()) && !is_grpc_error(response) {
        return Err(
            "a record of an operator has no trailers, so a gRPC response needs a grpc-status of 1 to 16 and no body"
                .to_owned(),
        );
    }
    let record = layer.encode_response_record(id, response);
    let mut details = EntryDetails::new(Entry::new(Seen::new(*id, State::Completed, 1, 1)));
    details.record = Some(record.clone());
    let Some(RecordContents::Response(recorded)) = details.contents(usize::MAX) else {
        return Err(
            "expected at most 128 header lines, and a body that fits into a record".to_owned(),
        );
    };
    let dropped = dropped_headers(response.headers(), recorded.headers());
    if !dropped.is_empty() {
        let dropped = dropped.join(", ");
        return Err(format!("a replay would not have these headers: {dropped}"));
    }
    if response.body() != recorded.body() {
        let status = response.status().as_u16();
        return Err(format!("a response with status {status} has no body"));
    }
    Ok(record)
}

/// Returns `true` if the media type is one of gRPC. Those of grpc-web are not, because its trailers are in the body.
fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_TYPE).iter().any(|value| {
        let essence = value.as_bytes().split(|byte| *byte == b';').next();
        let essence = essence.unwrap_or_default().trim_ascii();
        let essence = essence.to_ascii_lowercase();
        let format = essence.strip_prefix(b"application/grpc");
        format.is_some_and(|format| matches!(format.first(), None | Some(b'+')))
    })
}

/// Returns `true` if the response is an error of gRPC that consists of headers alone.
fn is_grpc_error(response: &Response<Bytes>) -> bool {
    let code = response.headers().get("grpc-status");
    let code = code.and_then(|it| it.to_str().ok()?.parse::<u8>().ok());
    code.is_some_and(|code| (1..=16).contains(&code)) && response.body().is_empty()
}

/// Returns the names of the headers that have another number of lines in the record.
fn dropped_headers(given: &HeaderMap, recorded: &HeaderMap) -> Vec<String> {
    let lines = |headers: &HeaderMap, name| headers.get_all(name).iter().count();
    let names = given.keys();
    let dropped = names.filter(|name| lines(given, *name) != lines(recorded, *name));
    dropped.map(|name| name.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use tower_idempotency::MemoryStore;

    use super::*;

    fn encoded(
        status: u16,
        headers: &[(&'static str, &str)],
        body: &'static str,
    ) -> Result<Bytes, String> {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let response = response.body(Bytes::from(body)).unwrap();
        let layer = IdempotencyLayer::new(MemoryStore::new());
        encode(&layer, &KeyId::from_bytes([1; 32]), &response)
    }

    #[test]
    fn dropped_parts_are_rejected() {
        assert!(encoded(201, &[("location", "/orders/1"), ("x-total", "3")], "paid").is_ok());
        assert!(encoded(204, &[], "").is_ok());
        for (status, headers, body, expected) in [
            (
                201,
                &[("set-cookie", "a=b"), ("x-request-id", "1")][..],
                "",
                "set-cookie, x-request-id",
            ),
            (
                201,
                &[("access-control-allow-origin", "*")],
                "",
                "access-control-allow-origin",
            ),
            (204, &[], "paid", "status 204 has no body"),
            (304, &[], "paid", "status 304 has no body"),
            (
                201,
                &[("x-total", "3"); 129],
                "",
                "at most 128 header lines",
            ),
        ] {
            let error = encoded(status, headers, body).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// The trailers of grpc-web are in its body.
    #[test]
    fn grpc_response_without_trailers_is_error() {
        let grpc = ("content-type", "Application/gRPC+proto; a=b");
        let [success, error] = ["0", "9"].map(|code| ("grpc-status", code));
        assert!(encoded(200, &[grpc, error], "").is_ok());
        let web = ("content-type", "application/grpc-web+proto");
        assert!(encoded(200, &[web], "paid").is_ok());
        for (headers, body) in [
            (&[("content-type", "application/grpc")][..], "paid"),
            (&[grpc], ""),
            (&[grpc, success], ""),
            (&[grpc, ("grpc-status", "x")], ""),
            (&[grpc, error], "paid"),
        ] {
            let error = encoded(200, headers, body).unwrap_err();
            assert!(error.contains("needs a grpc-status"), "{error}");
        }
    }
}
