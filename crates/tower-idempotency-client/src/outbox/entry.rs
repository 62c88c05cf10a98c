//! A stored request, and its form as bytes.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, request::Parts, uri};
use serde_json::{Value, json};

use super::OutboxError;
use crate::operation::Operation;

/// Request of an [`Outbox`](crate::Outbox): key, method, URL, allowed headers and body, in the clear.
///
/// Its `Debug` output contains nothing but the method and the size of the body.
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    pub(crate) key: String,
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Milliseconds since 1970.
    pub(crate) first_sent: Option<u64>,
    pub(crate) provider: Option<u64>,
}

impl Entry {
    /// Creates the entry of a request that is sent later, for example to store it in a transaction of the application.
    ///
    /// It contains the headers that [`OutboxLayer`](crate::OutboxLayer) stores by default, which do not include credentials.
    /// [`with_headers_of`](Self::with_headers_of) adds others. A user name and a password in the URL are left out.
    #[must_use]
    pub fn new(operation: &Operation, req: &Request<Bytes>) -> Self {
        let (head, body) = req.clone().into_parts();
        Self {
            body,
            ..Self::of_head(operation, &head, &[])
        }
    }

    /// Returns the entry with these headers of a request, too, like
    /// [`OutboxLayer::with_headers`](crate::OutboxLayer::with_headers).
    ///
    /// If the server compares a header that is not stored, it rejects the recovered request with 422. Without a header that the
    /// server needs, the server may execute the request differently, or reject it with a definite response such as 400. The
    /// outbox removes the entry after both. A header with a credential is stored in the clear.
    #[must_use]
    pub fn with_headers_of<B>(
        mut self,
        req: &Request<B>,
        names: impl IntoIterator<Item = HeaderName>,
    ) -> Self {
        for name in names {
            self.headers.remove(&name);
            for value in req.headers().get_all(&name) {
                self.headers.append(name.clone(), value.clone());
            }
        }
        self
    }

    /// Creates the entry of a request without its body. It has the default headers and those in `allowed`.
    pub(super) fn of_head(operation: &Operation, head: &Parts, allowed: &[HeaderName]) -> Self {
        let is_allowed =
            |name: &HeaderName| DEFAULT_HEADERS.contains(&name.as_str()) || allowed.contains(name);
        let mut headers = HeaderMap::new();
        for (name, value) in &head.headers {
            if is_allowed(name) {
                headers.append(name.clone(), value.clone());
            }
        }
        Self {
            key: operation.key().to_owned(),
            method: head.method.clone(),
            uri: without_credentials(&head.uri),
            headers,
            body: Bytes::new(),
            first_sent: operation.first_sent().map(millis),
            provider: operation.provider(),
        }
    }

    /// Returns the key. Do not log it: a caller that knows the key may be able to request the recorded response.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the method.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Returns the URL, without a user name and a password.
    #[must_use]
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Returns the headers that were stored. The key is one of them only if the caller set its header in another form.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Returns the body.
    #[must_use]
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// Returns the time of the first attempt in milliseconds, or `None` if no attempt began.
    #[must_use]
    pub fn first_sent(&self) -> Option<SystemTime> {
        let millis = Duration::from_millis(self.first_sent?);
        SystemTime::UNIX_EPOCH.checked_add(millis)
    }

    /// Returns the provider that was chosen before the first attempt, or `None`.
    #[must_use]
    pub fn provider(&self) -> Option<u64> {
        self.provider
    }

    /// Returns the entry with the time of the first attempt, unless it has one.
    #[must_use]
    pub fn or_first_sent(mut self, at: SystemTime) -> Self {
        self.first_sent.get_or_insert(millis(at));
        self
    }

    /// Returns the entry with this provider, unless it has one.
    #[must_use]
    pub fn or_provider(mut self, provider: u64) -> Self {
        self.provider.get_or_insert(provider);
        self
    }

    /// Returns an error if the entry cannot be read once it is stored. The parts of a URL can be valid although the whole URL
    /// is too long.
    pub(super) fn check(&self) -> Result<(), OutboxError> {
        let read = Self::from_head(&self.head(), Bytes::new());
        let is_readable = read.is_some_and(|read| read.uri == self.uri);
        is_readable
            .then_some(())
            .ok_or_else(|| OutboxError::with_message(UNREADABLE))
    }

    fn head(&self) -> Value {
        json!({
            "key": self.key,
            "method": self.method.as_str(),
            "url": self.uri.to_string(),
            "headers": headers_to_json(&self.headers),
            "first_sent": self.first_sent,
            "provider": self.provider,
        })
    }

    /// Returns the entry as bytes, for implementations of [`Outbox`](crate::Outbox).
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let head = self.head().to_string();
        let mut bytes = Vec::with_capacity(4 + head.len() + self.body.len());
        bytes.extend_from_slice(&u32::try_from(head.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Returns the entry from the bytes of [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// If the bytes are not those of an entry.
    pub fn decode(bytes: &[u8]) -> Result<Self, OutboxError> {
        Self::parse(bytes).ok_or_else(|| OutboxError::with_message(DAMAGED))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (length, rest) = bytes.split_first_chunk()?;
        let (head, body) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        let head: Value = serde_json::from_slice(head).ok()?;
        Self::from_head(&head, Bytes::copy_from_slice(body))
    }

    fn from_head(head: &Value, body: Bytes) -> Option<Self> {
        let text = |name: &str| head.get(name)?.as_str();
        let number = |name: &str| match head.get(name)? {
            Value::Null => Some(None),
            number => number.as_u64().map(Some),
        };
        Some(Self {
            key: text("key")?.to_owned(),
            method: text("method")?.parse().ok()?,
            uri: text("url")?.parse().ok()?,
            headers: headers_from_json(head.get("headers")?)?,
            body,
            first_sent: number("first_sent")?,
            provider: number("provider")?,
        })
    }

    /// Returns `true` if a server gets the same request from both entries.
    pub(super) fn is_same_request(&self, other: &Self) -> bool {
        (&self.key, &self.method, &self.uri, &self.body)
            == (&other.key, &other.method, &other.uri, &other.body)
    }

    /// Restores the state of an operation that may have been sent before.
    pub(super) fn restore(&self, operation: &Operation) {
        if let Some(at) = self.first_sent() {
            let _ = operation.clone().with_first_sent(at);
        }
        if let Some(provider) = self.provider {
            let _ = operation.clone().with_provider(provider);
        }
    }

    /// Returns the request, with a body of the client's type.
    pub(super) fn request<B: From<Bytes>>(&self) -> Request<B> {
        let mut req = Request::new(B::from(self.body.clone()));
        *req.method_mut() = self.method.clone();
        *req.uri_mut() = self.uri.clone();
        *req.headers_mut() = self.headers.clone();
        req
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("method", &self.method)
            .field("body", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// Returns the headers as pairs of texts. Each byte of a value is one character.
pub(super) fn headers_to_json(headers: &HeaderMap) -> Value {
    let text = |value: &HeaderValue| -> String {
        let bytes = value.as_bytes().iter();
        bytes.map(|&byte| char::from(byte)).collect()
    };
    headers
        .iter()
        .map(|(name, value)| json!([name.as_str(), text(value)]))
        .collect()
}

/// Returns the headers of [`headers_to_json`]. A header that the application has added may be a credential, and is marked as
/// sensitive.
pub(super) fn headers_from_json(pairs: &Value) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for pair in pairs.as_array()? {
        let name = pair.get(0)?.as_str()?;
        let value = pair.get(1)?.as_str()?;
        let value: Vec<u8> = value
            .chars()
            .map(|char| u8::try_from(char).ok())
            .collect::<Option<_>>()?;
        let mut value = HeaderValue::from_bytes(&value).ok()?;
        value.set_sensitive(!DEFAULT_HEADERS.contains(&name));
        headers.append(HeaderName::from_bytes(name.as_bytes()).ok()?, value);
    }
    Some(headers)
}

/// Returns the URL without the part before `@` in its authority.
fn without_credentials(uri: &Uri) -> Uri {
    let Some((_, host)) = uri
        .authority()
        .and_then(|authority| authority.as_str().rsplit_once('@'))
    else {
        return uri.clone();
    };
    let mut parts = uri.clone().into_parts();
    parts.authority = host.parse::<uri::Authority>().ok();
    Uri::from_parts(parts).unwrap_or_default()
}

pub(super) fn millis(at: SystemTime) -> u64 {
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) const DAMAGED: &str = "an entry of the outbox is damaged";
const UNREADABLE: &str =
    "an outbox cannot read this request once it is stored, for example because its URL is too long";

/// Headers that describe the content or the target, conditions, and headers that select the account on which a server acts. A
/// server may compare them in retries.
///
/// `PayPal-Auth-Assertion` names a merchant. It has no effect without the token of the client, which is not stored.
const DEFAULT_HEADERS: &[&str] = &[
    "accept",
    "accept-language",
    "as-user",
    "callerobjectid",
    "content-digest",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-md5",
    "content-range",
    "content-type",
    "destination",
    "digest",
    "dropbox-api-select-admin",
    "dropbox-api-select-user",
    "grpc-accept-encoding",
    "grpc-encoding",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-unmodified-since",
    "impersonate-user",
    "login-customer-id",
    "mscrmcallerid",
    "on-behalf-of",
    "openai-organization",
    "openai-project",
    "paypal-auth-assertion",
    "prefer",
    "stripe-account",
    "stripe-context",
    "stripe-version",
    "sudo",
    "te",
    "tenant-id",
    "upload-offset",
    "user-agent",
    "x-account-id",
    "x-customer-id",
    "x-goog-user-project",
    "x-grafana-org-id",
    "x-http-method",
    "x-http-method-override",
    "x-impersonate-user",
    "x-merchant-id",
    "x-method-override",
    "x-on-behalf-of",
    "x-org-id",
    "x-organization",
    "x-organization-id",
    "x-project-id",
    "x-scope-orgid",
    "x-tenant",
    "x-tenant-id",
    "x-workspace-id",
    "xero-tenant-id",
    "zuora-entity-ids",
];

#[cfg(test)]
mod tests {
    use http::header;

    use super::*;

    fn request() -> Request<Bytes> {
        Request::post("https://user:password@api.example.com/orders?x=1")
            .header("content-type", "text/plain")
            .header("x-tenant-id", HeaderValue::from_bytes(b"caf\xe9").unwrap())
            .header(header::AUTHORIZATION, "Bearer secret")
            .header(header::COOKIE, "session=secret")
            .body(Bytes::from_static(b"one \0 espresso"))
            .unwrap()
    }

    #[test]
    fn encoded_entry_decodes_to_itself() {
        let operation = Operation::with_key("key \"7\"").unwrap();
        for operation in [
            operation.clone(),
            operation
                .with_first_sent(SystemTime::now())
                .with_provider(u64::MAX),
        ] {
            let entry = Entry::new(&operation, &request());
            let bytes = entry.encode();
            assert_eq!(Entry::decode(&bytes).unwrap(), entry);
            assert_eq!(entry.key(), operation.key());
            assert_eq!(entry.provider(), operation.provider());
        }
    }

    #[test]
    fn entry_cut_in_its_head_is_damaged() {
        let bytes = Entry::new(&Operation::new(), &request()).encode();
        let head = bytes.len() - request().body().len();
        for length in 0..head {
            let error = Entry::decode(&bytes[..length]).unwrap_err();
            assert_eq!(error.to_string(), "an entry of the outbox is damaged");
        }
    }

    #[test]
    fn entry_contains_no_credentials() {
        let entry = Entry::new(&Operation::new(), &request());
        let text = String::from_utf8_lossy(&entry.encode()).into_owned();
        assert!(
            !text.contains("secret") && !text.contains("password"),
            "{text}"
        );
        assert_eq!(entry.uri(), "https://api.example.com/orders?x=1");
        assert_eq!(entry.headers().len(), 2);
    }

    /// Each part of the URL is short enough, and the whole is not.
    #[test]
    fn entry_that_cannot_be_read_is_found() {
        let operation = Operation::new();
        for (length, is_readable) in [(65_500, true), (65_530, false)] {
            let mut parts = uri::Parts::default();
            parts.scheme = Some(uri::Scheme::HTTPS);
            parts.authority = Some("api.example.com".parse().unwrap());
            parts.path_and_query = Some(format!("/{}", "x".repeat(length)).parse().unwrap());
            let uri = Uri::from_parts(parts).unwrap();
            let req = Request::post(uri).body(Bytes::new()).unwrap();
            let entry = Entry::new(&operation, &req);
            assert_eq!(Entry::decode(&entry.encode()).is_ok(), is_readable);
            assert_eq!(entry.check().is_ok(), is_readable);
        }
        for req in [request(), Request::new(Bytes::new())] {
            Entry::new(&operation, &req).check().unwrap();
        }
    }

    /// Headers outside of the default list may be credentials.
    #[test]
    fn added_header_is_read_as_sensitive() {
        let names = [header::AUTHORIZATION, header::IF_RANGE];
        let entry = Entry::new(&Operation::new(), &request()).with_headers_of(&request(), names);
        assert_eq!(entry.headers().len(), 3);
        let entry = Entry::decode(&entry.encode()).unwrap();
        assert_eq!(entry.headers()["authorization"], "Bearer secret");
        for (name, value) in entry.headers() {
            assert_eq!(value.is_sensitive(), name == "authorization", "{name}");
        }
    }

    /// A server of this project compares these headers.
    #[test]
    fn default_headers_include_those_of_server() {
        let acting = tower_idempotency::ACTING_HEADERS;
        let selecting = "content-range destination upload-offset x-http-method x-http-method-override \
            x-method-override";
        let selecting = selecting.split(' ');
        for name in acting.iter().map(HeaderName::as_str).chain(selecting) {
            assert!(DEFAULT_HEADERS.contains(&name), "{name}");
        }
        assert!(DEFAULT_HEADERS.is_sorted());
    }

    #[test]
    fn debug_output_hides_request() {
        let operation = Operation::with_key("secret-17").unwrap();
        let text = format!("{:?}", Entry::new(&operation, &request()));
        for hidden in ["secret", "orders", "espresso"] {
            assert!(!text.contains(hidden), "{text}");
        }
    }
}
