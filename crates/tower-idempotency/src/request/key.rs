//! Idempotency keys: parsing, limits, and a type that never displays the key.

use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use http::HeaderName;
use sfv::{BareItemFromInput, Parser};

/// `Idempotency-Key`, the header that carries the key unless [`with_header`](crate::IdempotencyLayer::with_header) sets
/// another one.
///
/// List it in `Access-Control-Allow-Headers`, so that browsers can send it.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Valid idempotency key, decoded: without the quotes and escapes of the header.
///
/// A caller that knows a key may be able to request the recorded response. To prevent keys in logs, the type has no
/// `Display`, and its `Debug` output does not contain the key. Use [`as_str`](Self::as_str) to read it.
#[derive(Clone)]
pub struct IdempotencyKey(KeyText);

/// Text of a key. A short one, such as a UUID, takes no allocation.
#[derive(Clone)]
enum KeyText {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Arc<str>),
}

/// Longest key in bytes that takes no allocation.
const SHORT: usize = 46;

impl IdempotencyKey {
    fn new(key: Cow<'_, str>) -> Self {
        let text = key.as_bytes();
        Self(match (u8::try_from(text.len()), text.len() <= SHORT) {
            (Ok(len), true) => {
                let mut bytes = [0; SHORT];
                bytes[..text.len()].copy_from_slice(text);
                KeyText::Short { len, bytes }
            }
            _ => KeyText::Long(Arc::from(key)),
        })
    }

    /// Returns the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("the bytes of a text")
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            KeyText::Short { len, bytes } => &bytes[..usize::from(*len)],
            KeyText::Long(key) => key.as_bytes(),
        }
    }
}

impl PartialEq for IdempotencyKey {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for IdempotencyKey {}

impl Hash for IdempotencyKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl AsRef<str> for IdempotencyKey {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(..)")
    }
}

/// Callers for which a key of the service names the same operation. See
/// [`with_key_from`](crate::IdempotencyLayer::with_key_from).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyScope {
    /// The key belongs to the [principal](crate::Principal): the same key of two callers is two operations.
    ///
    /// If two operators refund one payment, the refund executes twice.
    EachCaller,
    /// The key belongs to all callers: the operation is executed once, for the first caller that requests it.
    ///
    /// The [principal](crate::Principal) is still determined, and may reject the request, but it does not separate callers.
    /// Every caller whose request has the same fingerprint gets the response. So place the layer inside the authorization,
    /// and respond with nothing that another authorized caller may not see.
    AllCallers,
}

/// Key of a request, by its source. Keys of two sources are never the same.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum RequestKey {
    /// The client sent the key.
    Sent(IdempotencyKey),
    /// The service made the key.
    Named(IdempotencyKey, KeyScope),
    /// The fingerprint is the key.
    Derived,
}

/// Syntax of the key header.
///
/// In every syntax, spaces and tabs around the value are ignored, and an empty value or `""` is rejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeySyntax {
    /// An RFC 9651 String if the value begins with a quote; its parameters are ignored. Otherwise the value itself: visible
    /// ASCII without `"`, `,`, `;` and `\`. So `"abc"` and `abc` are the same key.
    #[default]
    Lenient,
    /// An RFC 9651 Item that is a String, as the IETF draft requires. Its parameters are ignored.
    Strict,
    /// The value itself: visible ASCII. Quotes are part of the key.
    Verbatim,
    /// The value without one pair of quotes around it: ASCII without control characters.
    Unquoted,
}

/// Syntax and length that a key must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRules {
    pub(crate) syntax: KeySyntax,
    /// Shortest length of the decoded key in bytes. An empty key is rejected even if this is 0.
    pub(crate) min: usize,
    /// Longest length of the decoded key in bytes.
    pub(crate) max: usize,
}

/// Reason why a value is not a key. Reveals only the length of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyError {
    Malformed(&'static str),
    /// If the raw value is already too long, `length` includes quotes and escapes.
    TooLong {
        length: usize,
        max: usize,
    },
    TooShort {
        length: usize,
        min: usize,
    },
}

impl KeyRules {
    /// Parses the value of a key header.
    pub(crate) fn parse(&self, raw: &[u8]) -> Result<IdempotencyKey, KeyError> {
        let raw = trim(raw);
        // Decoding at most halves a value. A value that is too long even then is rejected before it is parsed.
        let max_raw = self.max.saturating_mul(2).saturating_add(SYNTAX_ALLOWANCE);
        if raw.len() > max_raw {
            return Err(KeyError::TooLong {
                length: raw.len(),
                max: self.max,
            });
        }
        // Checked first, because each syntax would report another error.
        if raw.is_empty() || raw == b"\"\"" {
            return Err(EMPTY_KEY);
        }
        let key = match self.syntax {
            KeySyntax::Lenient if raw.starts_with(b"\"") => parse_string(raw)?,
            KeySyntax::Lenient => parse_plain(
                raw,
                is_plain,
                "expected a quoted string, or visible ASCII characters without quote, comma, semicolon and backslash",
            )?,
            KeySyntax::Strict => parse_string(raw)?,
            KeySyntax::Verbatim => parse_plain(
                raw,
                |byte| byte.is_ascii_graphic(),
                "expected visible ASCII characters",
            )?,
            KeySyntax::Unquoted => parse_plain(
                unquote(raw),
                |byte| byte.is_ascii_graphic() || byte == b' ',
                "expected ASCII characters without control characters",
            )?,
        };
        self.check_length(key)
    }

    /// Validates a key from the application: any text without control characters.
    ///
    /// The syntax describes the header and does not apply.
    pub(crate) fn validate(&self, key: String) -> Result<IdempotencyKey, KeyError> {
        if key.chars().any(char::is_control) {
            return Err(KeyError::Malformed(
                "expected text without control characters",
            ));
        }
        self.check_length(Cow::Owned(key))
    }

    fn check_length(&self, key: Cow<'_, str>) -> Result<IdempotencyKey, KeyError> {
        let length = key.len();
        if length == 0 {
            return Err(EMPTY_KEY);
        }
        if length > self.max {
            return Err(KeyError::TooLong {
                length,
                max: self.max,
            });
        }
        if length < self.min {
            return Err(KeyError::TooShort {
                length,
                min: self.min,
            });
        }
        Ok(IdempotencyKey::new(key))
    }
}

/// Parses an RFC 9651 Item that is a String. The parser validates the parameters, as the RFC requires, and then drops them.
fn parse_string(raw: &[u8]) -> Result<Cow<'_, str>, KeyError> {
    let malformed = KeyError::Malformed("expected a quoted string in the syntax of RFC 9651");
    // Only a String begins with a quote. All other values are rejected without parsing.
    if !raw.starts_with(b"\"") {
        return Err(malformed);
    }
    match Parser::new(raw).parse_item::<BareItemFromInput<'_>>() {
        Ok(BareItemFromInput::String(Cow::Borrowed(key))) => Ok(Cow::Borrowed(key.as_str())),
        Ok(BareItemFromInput::String(Cow::Owned(key))) => Ok(Cow::Owned(key.into())),
        Ok(_) | Err(_) => Err(malformed),
    }
}

fn parse_plain<'a>(
    raw: &'a [u8],
    allowed: impl Fn(u8) -> bool,
    expected: &'static str,
) -> Result<Cow<'a, str>, KeyError> {
    if raw.is_empty() {
        return Err(EMPTY_KEY);
    }
    // Without an early exit, the compiler checks several bytes at once.
    if !raw.iter().fold(true, |all, &byte| all & allowed(byte)) {
        return Err(KeyError::Malformed(expected));
    }
    std::str::from_utf8(raw)
        .map(Cow::Borrowed)
        .map_err(|_| KeyError::Malformed(expected))
}

/// Returns `true` for the bytes of a key without quotes in [`KeySyntax::Lenient`]: visible ASCII without the delimiters.
fn is_plain(byte: u8) -> bool {
    let is_delimiter = (byte == b'"') | (byte == b',') | (byte == b';') | (byte == b'\\');
    byte.is_ascii_graphic() & !is_delimiter
}

fn unquote(raw: &[u8]) -> &[u8] {
    match raw {
        [b'"', inner @ .., b'"'] => inner,
        _ => raw,
    }
}

fn trim(mut raw: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = raw {
        raw = rest;
    }
    raw
}

const EMPTY_KEY: KeyError = KeyError::Malformed("the key is empty");

/// Bytes that a raw value may have in addition to its key, for quotes and parameters.
const SYNTAX_ALLOWANCE: usize = 256;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
