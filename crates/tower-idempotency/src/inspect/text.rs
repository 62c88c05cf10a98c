//! Text forms of page tokens and of [`Seen`](super::Seen): base64url without padding.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

/// The maximum length of a token as text.
pub(super) const MAX_TEXT: usize = 1024;

/// First byte of every token. Increase it with every change of a format.
pub(super) const VERSION: u8 = 1;

/// Error of a text that is not a [`PageToken`](super::PageToken) or a [`Seen`](super::Seen) of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseTokenError {
    expected: &'static str,
}

impl ParseTokenError {
    pub(super) const fn new(expected: &'static str) -> Self {
        Self { expected }
    }
}

impl fmt::Display for ParseTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, found something else", self.expected)
    }
}

impl std::error::Error for ParseTokenError {}

pub(super) fn encode(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Decodes a text of at most [`MAX_TEXT`] bytes. Returns `None` for any other text.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    if text.len() > MAX_TEXT {
        return None;
    }
    URL_SAFE_NO_PAD.decode(text).ok()
}
