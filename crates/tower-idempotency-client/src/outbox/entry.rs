//! A stored request, and its form as bytes.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, request::Parts, uri};
use serde_json::{Value, json};

use super::OutboxError;
use crate::{keys::IdempotencyKeyLayer, operation::Operation};

/// Request of an [`Outbox`](crate::Outbox): key, method, URL, allowed headers and body, in the clear.
///
/// Its `Debug` output contains nothing but the method and the size of the body.
#[derive(Clone, PartialEq, Eq)]
pub struct Entry {
    pub(crate) key: String,
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    /// Name of the key header in `headers`. `None` if no call has stored it.
    pub(crate) key_header: Option<HeaderName>,
    pub(crate) body: Bytes,
    /// Milliseconds since 1970.
    pub(crate) first_sent: Option<u64>,
    pub(crate) provider: Option<u64>,
}

impl Entry {
    /// Creates the entry of a request that is sent later, for example to store it in a transaction of the application.
    ///
    /// It contains the headers that [`OutboxLayer`](crate::OutboxLayer) stores by default. They include no credentials, except a
    /// signature in the URL of `X-Ms-Copy-Source` or `X-Ms-Rename-Source`. [`with_headers_of`](Self::with_headers_of) adds
    /// others. A user name and a password in the URL are left out. Its query stays.
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
        let is_allowed = |name: &HeaderName| is_default(name.as_str()) || allowed.contains(name);
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
            key_header: None,
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

    /// Returns the headers that were stored. The key header is one of them, unless the application or an earlier version stored
    /// the entry. Without it, the settings of the process that sends the request decide on the header.
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
            "headers": self.headers_to_json(),
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
        let (headers, key_header) = headers_from_json(head.get("headers")?)?;
        Some(Self {
            key: text("key")?.to_owned(),
            method: text("method")?.parse().ok()?,
            uri: text("url")?.parse().ok()?,
            headers,
            key_header,
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

    /// Stores the key header of a request, which has one line.
    pub(super) fn set_key_header(&mut self, name: &HeaderName, headers: &HeaderMap) {
        if let Some(value) = headers.get(name) {
            self.headers.insert(name, value.clone());
            self.key_header = Some(name.clone());
        }
    }

    /// Sets the key header of the first attempt in a request of this entry, if it was stored.
    pub(super) fn restore_key<B>(&self, keys: &IdempotencyKeyLayer, req: &mut Request<B>) {
        if let Some(name) = &self.key_header
            && let Some(value) = self.headers.get(name)
        {
            keys.restore_key(req, &self.key, name, value);
        }
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

    /// Returns the headers as arrays of name and value. Each byte of a value is one character. The array of the key header has a
    /// mark as its third element. Earlier builds ignore the mark, and lose it when they compact a file.
    pub(super) fn headers_to_json(&self) -> Value {
        let text = |value: &HeaderValue| -> String {
            let bytes = value.as_bytes().iter();
            bytes.map(|&byte| char::from(byte)).collect()
        };
        let pair = |(name, value): (&HeaderName, &HeaderValue)| {
            let (is_key, value) = (self.key_header.as_ref() == Some(name), text(value));
            match is_key {
                true => json!([name.as_str(), value, KEY_MARK]),
                false => json!([name.as_str(), value]),
            }
        };
        self.headers.iter().map(pair).collect()
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

/// Returns the headers of [`Entry::headers_to_json`], and the name of the key header. Marks values that may be credentials as
/// sensitive: the key, headers that the application has added, and a URL with a signature.
pub(super) fn headers_from_json(pairs: &Value) -> Option<(HeaderMap, Option<HeaderName>)> {
    let (mut headers, mut key_header) = (HeaderMap::new(), None);
    for pair in pairs.as_array()? {
        let name = HeaderName::from_bytes(pair.get(0)?.as_str()?.as_bytes()).ok()?;
        let value = pair.get(1)?.as_str()?;
        let value: Vec<u8> = value
            .chars()
            .map(|char| u8::try_from(char).ok())
            .collect::<Option<_>>()?;
        let mut value = HeaderValue::from_bytes(&value).ok()?;
        value.set_sensitive(!DEFAULT_HEADERS.contains(&name.as_str()) || may_have_signature(&name));
        if pair.get(2).is_some_and(|mark| mark == KEY_MARK) {
            key_header = Some(name.clone());
        }
        headers.append(name, value);
    }
    Some((headers, key_header))
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

/// Returns `true` if the outbox stores the header by default. Some servers read `_` in a name as `-`, so both spellings count.
fn is_default(name: &str) -> bool {
    DEFAULT_HEADERS.contains(&&*name.replace('_', "-"))
}

/// Returns `true` for headers of Azure with a URL, which may contain a signature.
fn may_have_signature(name: &HeaderName) -> bool {
    ["x-ms-copy-source", "x-ms-rename-source"].contains(&name.as_str())
}

/// Third element of the array of the key header.
const KEY_MARK: &str = "key";

pub(super) const DAMAGED: &str = "an entry of the outbox is damaged";
const UNREADABLE: &str =
    "an outbox cannot read this request once it is stored, for example because its URL is too long";

/// Headers that describe the content or the target, conditions, and headers that select the account on which a server acts. A
/// server may compare them in retries.
///
/// `PayPal-Auth-Assertion` names a merchant. It has no effect without the token of the client, which is not stored. The URL in
/// `X-Ms-Copy-Source` and `X-Ms-Rename-Source` may contain a signature, like that of the request. Without it, the request would
/// be another operation.
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
    "depth",
    "destination",
    "digest",
    "dropbox-api-arg",
    "dropbox-api-select-admin",
    "dropbox-api-select-user",
    "grpc-accept-encoding",
    "grpc-encoding",
    "host",
    "if",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-unmodified-since",
    "impersonate-user",
    "lock-token",
    "login-customer-id",
    "mscrmcallerid",
    "next-action",
    "on-behalf-of",
    "openai-organization",
    "openai-project",
    "overwrite",
    "paypal-auth-assertion",
    "prefer",
    "slug",
    "soapaction",
    "stripe-account",
    "stripe-context",
    "stripe-version",
    "sudo",
    "te",
    "tenant-id",
    "upload-concat",
    "upload-length",
    "upload-metadata",
    "upload-offset",
    "user-agent",
    "x-account-id",
    "x-amz-copy-source",
    "x-amz-target",
    "x-customer-id",
    "x-goog-copy-source",
    "x-goog-upload-command",
    "x-goog-upload-offset",
    "x-goog-user-project",
    "x-grafana-org-id",
    "x-http-method",
    "x-http-method-override",
    "x-impersonate-user",
    "x-merchant-id",
    "x-method-override",
    "x-ms-copy-source",
    "x-ms-range",
    "x-ms-rename-source",
    "x-ms-source-range",
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
mod tests;
