use std::{fmt, str::FromStr};

use super::{
    State,
    text::{self, ParseTokenError, VERSION},
};
use crate::{
    digest::FieldDigest,
    store::{KeyId, Token},
};

/// Identification of an entry as an operator has seen it: ID, state, generation and version.
///
/// [`Inspect::resolve`](super::Inspect::resolve) applies a decision only if the entry is still the same. Its text form is
/// for a form field or a command-line argument. It contains no secret.
///
/// ```
/// use tower_idempotency::{inspect::{Seen, State}, store::KeyId};
///
/// let seen = Seen::new(KeyId::from_bytes([7; 32]), State::Orphaned, 2, 42);
/// assert_eq!(seen.to_string().parse::<Seen>()?, seen);
/// assert!("elsewhere".parse::<Seen>().is_err());
/// # Ok::<(), tower_idempotency::inspect::ParseTokenError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    id: KeyId,
    state: State,
    generation: u64,
    version: u64,
}

impl Seen {
    /// Identifies an entry. For implementors, who compute `version` with [`Seen::version_of`].
    #[must_use]
    pub const fn new(id: KeyId, state: State, generation: u64, version: u64) -> Self {
        Self {
            id,
            state,
            generation,
            version,
        }
    }

    /// Computes a version from the token that holds or completed the entry, and the expiry of its lease.
    ///
    /// Pass the lease expiry for an [orphan](State::Orphaned) only, in the form in which it is stored. A renewal by the
    /// lease holder then changes the version of an orphan, but not the version of an entry in progress. The token cannot be
    /// computed from the version.
    #[must_use]
    pub fn version_of(token: Option<&Token>, lease_expiry: Option<u64>) -> u64 {
        let token = token.map_or(&b""[..], |token| token.as_bytes());
        let expiry = lease_expiry.map(u64::to_le_bytes);
        Self::version_of_parts(&[token, expiry.as_ref().map_or(&[], <[u8; 8]>::as_slice)])
    }

    /// Computes a version from the contents of an [unreadable](State::Unreadable) entry. For implementors.
    #[must_use]
    pub fn version_of_parts(parts: &[&[u8]]) -> u64 {
        let mut hash = FieldDigest::new(None);
        hash.field(b"seen");
        for part in parts {
            hash.field(part);
        }
        let [a, b, c, d, e, f, g, h, ..] = hash.finish();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns the ID of the entry.
    #[must_use]
    pub const fn id(&self) -> &KeyId {
        &self.id
    }

    /// Returns the state in which the entry was seen.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Returns the generation of the lease; 0 if the entry was unreadable.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the version of the entry.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend([VERSION, self.state.code()]);
        bytes.extend(self.id.as_bytes());
        bytes.extend(self.generation.to_be_bytes());
        bytes.extend(self.version.to_be_bytes());
        f.write_str(&text::encode(&bytes))
    }
}

impl FromStr for Seen {
    type Err = ParseTokenError;

    fn from_str(text: &str) -> Result<Self, ParseTokenError> {
        let error =
            ParseTokenError::new("an entry as it was seen, in the text form of this version");
        let bytes = text::decode(text).ok_or(error)?;
        let bytes: [u8; LENGTH] = bytes.try_into().map_err(|_| error)?;
        let [version, state, rest @ ..] = bytes;
        let state = State::from_code(state).filter(|_| version == VERSION);
        let (id, rest) = rest.split_first_chunk().ok_or(error)?;
        let (generation, rest) = rest.split_first_chunk().ok_or(error)?;
        let (version, _) = rest.split_first_chunk().ok_or(error)?;
        Ok(Self {
            id: KeyId::from_bytes(*id),
            state: state.ok_or(error)?,
            generation: u64::from_be_bytes(*generation),
            version: u64::from_be_bytes(*version),
        })
    }
}

/// Version of the format, state, ID, generation and version of the entry.
const LENGTH: usize = 1 + 1 + 32 + 8 + 8;
