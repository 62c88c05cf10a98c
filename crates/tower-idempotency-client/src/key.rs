//! Keys as headers transport them.

use std::fmt;

use bytes::Bytes;
use http::HeaderValue;

use crate::protocol::Protocol;

/// Valid key. The bytes include the quotes of an RFC 9651 String, so that both forms of the header share them.
pub(crate) struct Key(Bytes);

/// Reason why a text is not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidKey(&'static str);

impl Key {
    /// Returns the key, if it is valid.
    pub(crate) fn new(key: &[u8]) -> Result<Self, InvalidKey> {
        if key.is_empty() {
            return Err(InvalidKey("expected a key, found an empty text"));
        }
        if key.len() > MAX_LENGTH {
            return Err(InvalidKey("expected a key of at most 255 bytes"));
        }
        if !key.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return Err(InvalidKey("expected printable ASCII characters"));
        }
        if key.starts_with(b" ") || key.ends_with(b" ") {
            return Err(InvalidKey("expected a key without spaces around it"));
        }
        // The owner is shared from the start. Otherwise the first clone would allocate.
        Ok(Self(Bytes::from_owner([b"\"", key, b"\""].concat())))
    }

    /// Returns the empty key, for a request without a key.
    pub(crate) const fn none() -> Self {
        Self(Bytes::from_static(b"\"\""))
    }

    /// Returns the key of 16 bytes as a UUID of this version. Makes one allocation.
    pub(crate) fn uuid(mut bytes: [u8; 16], version: u8) -> Self {
        bytes[6] = bytes[6] & 0x0f | version << 4;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let mut text = [b'"'; 38];
        let mut at = 1;
        for (index, byte) in bytes.into_iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                text[at] = b'-';
                at += 1;
            }
            text[at] = HEX[usize::from(byte >> 4)];
            text[at + 1] = HEX[usize::from(byte & 0x0f)];
            at += 2;
        }
        Self(Bytes::from_owner(text))
    }

    /// Parses the value of a header: an RFC 9651 String without parameters, or the key itself. With a protocol of plain
    /// keys, quotes are part of the key.
    pub(crate) fn parse(value: &HeaderValue, protocol: Protocol) -> Result<Self, InvalidKey> {
        let value = value.as_bytes().trim_ascii();
        if matches!(protocol, Protocol::Stripe | Protocol::Acp) {
            return Self::new(value);
        }
        let Some(quoted) = value
            .strip_prefix(b"\"")
            .and_then(|rest| rest.strip_suffix(b"\""))
        else {
            return Self::new(value);
        };
        let mut key = Vec::with_capacity(quoted.len());
        let mut bytes = quoted.iter();
        while let Some(&byte) = bytes.next() {
            let byte = if byte == b'\\' {
                bytes.next()
            } else {
                Some(&byte)
            };
            key.push(*byte.ok_or(InvalidKey("expected a character after the backslash"))?);
        }
        Self::new(&key)
    }

    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(self.raw()).unwrap_or_default()
    }

    /// Returns the value of the header: an RFC 9651 String if `quoted`, else the key itself.
    ///
    /// `None` cannot occur, because a key contains only printable ASCII.
    pub(crate) fn header(&self, quoted: bool) -> Option<HeaderValue> {
        let value = match quoted {
            false => HeaderValue::from_maybe_shared(self.0.slice(1..self.0.len() - 1)),
            true if !self.raw().iter().any(|byte| b"\"\\".contains(byte)) => {
                HeaderValue::from_maybe_shared(self.0.clone())
            }
            true => {
                let mut text = vec![b'"'];
                for &byte in self.raw() {
                    if b"\"\\".contains(&byte) {
                        text.push(b'\\');
                    }
                    text.push(byte);
                }
                text.push(b'"');
                HeaderValue::from_maybe_shared(Bytes::from(text))
            }
        };
        let mut value = value.ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Returns `true` if the lenient syntax reads the key only from a quoted string.
    pub(crate) fn needs_quotes(&self) -> bool {
        self.raw().iter().any(|byte| b" \",;\\".contains(byte))
    }

    fn raw(&self) -> &[u8] {
        &self.0[1..self.0.len() - 1]
    }
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for InvalidKey {}

/// Maximum length of a key. Servers that follow Stripe's API or this project accept it by default.
const MAX_LENGTH: usize = 255;

const HEX: &[u8; 16] = b"0123456789abcdef";

#[cfg(test)]
mod tests {
    use super::*;

    fn header(key: &str, quoted: bool) -> String {
        let header = Key::new(key.as_bytes()).unwrap().header(quoted).unwrap();
        assert!(header.is_sensitive());
        header.to_str().unwrap().to_owned()
    }

    #[test]
    fn header_is_plain_or_quoted() {
        assert_eq!(header("8e03-40d5", false), "8e03-40d5");
        assert_eq!(header("8e03-40d5", true), "\"8e03-40d5\"");
        assert_eq!(header("a\"b\\c", false), "a\"b\\c");
        assert_eq!(header("a\"b\\c", true), r#""a\"b\\c""#);
    }

    #[test]
    fn parse_inverts_header() {
        for key in ["8e03-40d5", "a\"b\\c", "a b", "\"", "\\", "\"\""] {
            let quoted = HeaderValue::from_str(&header(key, true)).unwrap();
            for protocol in [Protocol::TowerIdempotency, Protocol::Ietf] {
                assert_eq!(Key::parse(&quoted, protocol).unwrap().as_str(), key);
            }
            for protocol in [Protocol::Stripe, Protocol::Acp] {
                let plain = HeaderValue::from_str(&header(key, false)).unwrap();
                assert_eq!(Key::parse(&plain, protocol).unwrap().as_str(), key);
            }
        }
        let plain = HeaderValue::from_static("  8e03 ");
        for protocol in [Protocol::TowerIdempotency, Protocol::Stripe] {
            assert_eq!(Key::parse(&plain, protocol).unwrap().as_str(), "8e03");
        }
    }

    #[test]
    fn invalid_keys_are_rejected() {
        let long = "x".repeat(256);
        let spaces = "expected a key without spaces around it";
        let printable = "expected printable ASCII characters";
        for (key, expected) in [
            ("", "expected a key, found an empty text"),
            (" x", spaces),
            ("x ", spaces),
            ("x\n", printable),
            ("x\u{e9}", printable),
            ("\u{7f}", printable),
            (long.as_str(), "expected a key of at most 255 bytes"),
        ] {
            let error = Key::new(key.as_bytes()).err();
            let text = error.map(|error| error.to_string());
            assert_eq!(text.as_deref(), Some(expected), "{key:?}");
        }
        assert!(Key::new("x".repeat(255).as_bytes()).is_ok());
        let open = HeaderValue::from_static(r#""x\""#);
        let error = Key::parse(&open, Protocol::TowerIdempotency).err();
        let text = error.map(|error| error.to_string());
        let expected = "expected a character after the backslash";
        assert_eq!(text.as_deref(), Some(expected));
    }
}
