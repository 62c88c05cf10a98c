//! The requests of each row.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, header};
use http_body_util::Full;
use serde_json::Value;

use super::client::Call;
use crate::failure::Failure;

/// A request without its key.
#[derive(Clone)]
pub(super) struct Shape {
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Shape {
    /// Returns the request of a row. `User-Agent` names the row, so that the log of the server shows it.
    pub(super) fn call(&self, row: &str, key: Option<HeaderValue>) -> Call {
        let mut call = Request::new(Full::new(self.body.clone()));
        *call.method_mut() = self.method.clone();
        // Path and query were parts of a valid URL.
        *call.uri_mut() = self.target.parse().unwrap_or_default();
        *call.headers_mut() = self.headers.clone();
        let agent = format!("idempotency-conform/{} ({row})", env!("CARGO_PKG_VERSION"));
        if let Ok(agent) = HeaderValue::from_str(&agent) {
            call.headers_mut()
                .entry(header::USER_AGENT)
                .or_insert(agent);
        }
        if let Some(key) = key {
            call.headers_mut().insert("idempotency-key", key);
        }
        call
    }

    pub(super) fn with_body(&self, body: &Bytes) -> Self {
        Self {
            body: body.clone(),
            ..self.clone()
        }
    }
}

/// The requests of all rows.
pub(super) struct Plan {
    pub(super) shape: Shape,
    pub(super) other_body: Bytes,
    pub(super) other_path: Option<Shape>,
    pub(super) other_method: Option<Shape>,
    pub(super) other_caller: Option<Shape>,
    pub(super) has_bare_keys: bool,
    pub(super) requires_key: bool,
}

/// The number of concurrent duplicates of the row `many`.
pub(super) const MANY: usize = 8;

impl Plan {
    /// Returns the least number of requests, and how many of them a server executes that refuses another request under a used
    /// key. Not counted are retries of refused duplicates, and further requests after another response than a refusal.
    pub(super) fn requests(&self) -> (usize, usize) {
        let others = [&self.other_path, &self.other_method];
        let others = others.iter().filter(|shape| shape.is_some()).count();
        let caller = usize::from(self.other_caller.is_some());
        let missing = usize::from(self.requires_key);
        let concurrent = 2 + 1 + MANY + 1;
        // The 7 are fresh twice, retry, other-body twice, case and quoting. Then there are 4 malformed keys, and 3 requests of
        // disconnect.
        let sent = 7 + 2 * others + 2 * caller + missing + 4 + concurrent + 3;
        // The 7 are fresh twice, other-body with a new key, case, concurrent, many and disconnect.
        (sent, 7 + others + 2 * caller)
    }

    /// Returns the value of `Idempotency-Key` for a key.
    pub(super) fn header(&self, key: &str) -> HeaderValue {
        spell(key, self.has_bare_keys)
    }
}

/// Returns a key as the value of a header: quoted, as the draft requires, or bare.
pub(super) fn spell(key: &str, is_bare: bool) -> HeaderValue {
    let spelled = if is_bare {
        key.to_owned()
    } else {
        format!("\"{key}\"")
    };
    // A UUID is always a valid value.
    HeaderValue::from_str(&spelled).unwrap_or(HeaderValue::from_static("\"\""))
}

/// Returns a random UUID of version 4.
pub(super) fn fresh_key() -> Result<String, Failure> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Failure::failed(format!(
            "the operating system provides no random numbers: {error}"
        ))
    })?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    // A letter, so that the key has two spellings that differ in their letter case.
    bytes[0] |= 0xa0;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    Ok(parts.join("-"))
}

/// Returns a body that differs from `body`: a JSON object with another member, or longer text.
pub(super) fn other_body(body: &Bytes) -> Bytes {
    if let Ok(Value::Object(mut object)) = serde_json::from_slice(body) {
        object.insert("conform_other".to_owned(), Value::Bool(true));
        return Value::Object(object).to_string().into();
    }
    [body, b"2".as_slice()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_random_uuids_with_letters() {
        let keys = [fresh_key().unwrap(), fresh_key().unwrap()];
        assert_ne!(keys[0], keys[1]);
        for key in keys {
            assert_eq!(key.len(), 36);
            assert_eq!(key.as_bytes()[14], b'4');
            assert_ne!(key, key.to_ascii_uppercase());
        }
    }

    #[test]
    fn other_body_differs() {
        let json = Bytes::from_static(b"{\"a\":1}");
        assert_eq!(other_body(&json), "{\"a\":1,\"conform_other\":true}");
        assert_eq!(other_body(&Bytes::from_static(b"a=1")), "a=12");
    }
}
