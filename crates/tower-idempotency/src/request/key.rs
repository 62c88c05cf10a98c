//! The key a client sent: parsed, limited, and never shown.

use std::{borrow::Cow, fmt, sync::Arc};

use http::HeaderName;
use sfv::{BareItemFromInput, Parser};

/// `Idempotency-Key`, the header that carries the key unless
/// [`with_header`](crate::IdempotencyLayer::with_header) names another: for the list of those that a browser may send.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A valid idempotency key, as the client meant it: without the quotes and escapes it may have travelled in.
///
/// Whoever knows a key can ask for the answer it names, so it has no `Display` and its `Debug` shows nothing;
/// [`as_str`](Self::as_str) says plainly that the key leaves our hands.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(Arc<str>);

impl IdempotencyKey {
    /// The key itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
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

/// How the value of the key header is read.
///
/// Whatever the syntax, spaces and tabs around the value are ignored, and an empty value or `""` is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeySyntax {
    /// A value that begins with a quote is an RFC 9651 String, its parameters ignored; any other is taken as it is:
    /// visible ASCII without `"`, `,`, `;` and `\`. So `"abc"` and `abc` are the same key.
    #[default]
    Lenient,
    /// An RFC 9651 Item that is a String, as the IETF draft asks; its parameters are ignored.
    Strict,
    /// Visible ASCII, taken as it is: quotes are part of the key.
    Verbatim,
    /// One pair of quotes around the value is taken off, and the rest is the key: ASCII without control characters.
    Unquoted,
}

/// What a key must look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRules {
    pub(crate) syntax: KeySyntax,
    /// The shortest key, in bytes once decoded; an empty one is refused even at 0.
    pub(crate) min: usize,
    /// The longest, counted the same way.
    pub(crate) max: usize,
}

/// Why a value is not a key; says nothing of the value but its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyError {
    Malformed(&'static str),
    /// `found` counts what was sent, quotes and escapes included, when that alone rules the value out.
    TooLong {
        found: usize,
        limit: usize,
    },
    TooShort {
        found: usize,
        limit: usize,
    },
}

impl KeyRules {
    /// Reads the value of a key header.
    pub(crate) fn parse(&self, raw: &[u8]) -> Result<IdempotencyKey, KeyError> {
        let raw = trim(raw);
        // Decoding at most halves a value. What could not fit even so is refused before it is looked at.
        let longest = self.max.saturating_mul(2).saturating_add(ALLOWANCE);
        if raw.len() > longest {
            return Err(KeyError::TooLong {
                found: raw.len(),
                limit: self.max,
            });
        }
        // Before it is found malformed.
        if raw.is_empty() || raw == b"\"\"" {
            return Err(EMPTY);
        }
        let key = match self.syntax {
            KeySyntax::Lenient if raw.starts_with(b"\"") => string(raw)?,
            KeySyntax::Lenient => plain(
                raw,
                |byte| byte.is_ascii_graphic() && !b"\",;\\".contains(&byte),
                "expected a quoted string, or visible ASCII characters without quote, comma, semicolon and backslash",
            )?,
            KeySyntax::Strict => string(raw)?,
            KeySyntax::Verbatim => plain(
                raw,
                |byte| byte.is_ascii_graphic(),
                "expected visible ASCII characters",
            )?,
            KeySyntax::Unquoted => plain(
                unquote(raw),
                |byte| byte.is_ascii_graphic() || byte == b' ',
                "expected ASCII characters without control characters",
            )?,
        };
        self.measure(key)
    }

    /// Accepts a key that the application made: any text without control characters.
    ///
    /// The syntax is about how a key travels in a header, so it does not apply here.
    pub(crate) fn check(&self, key: String) -> Result<IdempotencyKey, KeyError> {
        if key.chars().any(char::is_control) {
            return Err(KeyError::Malformed(
                "expected text without control characters",
            ));
        }
        self.measure(Cow::Owned(key))
    }

    fn measure(&self, key: Cow<'_, str>) -> Result<IdempotencyKey, KeyError> {
        let found = key.len();
        if found == 0 {
            return Err(EMPTY);
        }
        if found > self.max {
            return Err(KeyError::TooLong {
                found,
                limit: self.max,
            });
        }
        if found < self.min {
            return Err(KeyError::TooShort {
                found,
                limit: self.min,
            });
        }
        Ok(IdempotencyKey(Arc::from(key)))
    }
}

/// The String of an RFC 9651 Item. The parser checks the parameters too, as the RFC asks, and then drops them.
fn string(raw: &[u8]) -> Result<Cow<'_, str>, KeyError> {
    let malformed = KeyError::Malformed("expected a quoted string as RFC 9651 writes it");
    // Only a String begins with a quote: nothing else needs to be parsed to be refused.
    if !raw.starts_with(b"\"") {
        return Err(malformed);
    }
    match Parser::new(raw).parse_item::<BareItemFromInput<'_>>() {
        Ok(BareItemFromInput::String(Cow::Borrowed(key))) => Ok(Cow::Borrowed(key.as_str())),
        Ok(BareItemFromInput::String(Cow::Owned(key))) => Ok(Cow::Owned(key.into())),
        Ok(_) | Err(_) => Err(malformed),
    }
}

fn plain<'a>(
    raw: &'a [u8],
    allowed: impl Fn(u8) -> bool,
    expected: &'static str,
) -> Result<Cow<'a, str>, KeyError> {
    if raw.is_empty() {
        return Err(EMPTY);
    }
    if !raw.iter().all(|&byte| allowed(byte)) {
        return Err(KeyError::Malformed(expected));
    }
    std::str::from_utf8(raw)
        .map(Cow::Borrowed)
        .map_err(|_| KeyError::Malformed(expected))
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

const EMPTY: KeyError = KeyError::Malformed("the key is empty");

/// Quotes and parameters around a key of the longest kind.
const ALLOWANCE: usize = 256;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
