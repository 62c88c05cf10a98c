use std::{fmt, str::FromStr};

use super::text::{self, MAX_TEXT, ParseTokenError, VERSION};

/// Position in a listing, from which the next page continues.
///
/// A token belongs to one store and one query: the next page has the same state and the same filters. It is opaque, at most
/// 1,024 bytes of text, and contains no secret. It does not expire.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PageToken {
    /// Digest of the store and the query.
    pub(super) origin: [u8; 8],
    pub(super) position: Box<[u8]>,
}

impl PageToken {
    /// The maximum length of a position in bytes.
    pub const MAX_POSITION: usize = 512;
}

#[cfg(feature = "conformance")]
impl PageToken {
    /// Returns the token with another position, as an operator could write it.
    pub(crate) fn with_position(&self, position: &[u8]) -> Self {
        Self {
            position: position.into(),
            ..self.clone()
        }
    }

    pub(crate) fn raw_position(&self) -> &[u8] {
        &self.position
    }
}

impl fmt::Display for PageToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = Vec::with_capacity(1 + self.origin.len() + self.position.len());
        bytes.push(VERSION);
        bytes.extend(self.origin);
        bytes.extend(&self.position);
        f.write_str(&text::encode(&bytes))
    }
}

impl FromStr for PageToken {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        let error = ParseTokenError::new("a page token of this version");
        let bytes = text::decode(text).ok_or(error)?;
        match bytes.split_first() {
            Some((&VERSION, rest)) => {
                let (origin, position) = rest.split_first_chunk().ok_or(error)?;
                if position.len() > Self::MAX_POSITION {
                    return Err(error);
                }
                Ok(Self {
                    origin: *origin,
                    position: position.into(),
                })
            }
            Some(_) | None => Err(error),
        }
    }
}

const _: () = assert!((1 + 8 + PageToken::MAX_POSITION).div_ceil(3) * 4 <= MAX_TEXT);
