//! Identifiers and digests that stores compare as opaque bytes.

use std::fmt;

use super::StoreError;

/// Identifier of an entry: a digest of the key in its scope, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 32]);

/// Digest of the content of a request: 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

/// Proof of the right to execute: 128 bits from the operating system's generator.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

/// Digest of the namespace and the caller: 16 bytes. Stores and limits account for the caller by it.
///
/// If a principal combines several credentials, only the first one counts. The host does not count. The digest cannot be
/// linked to a [`KeyId`] without the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScopeDigest([u8; 16]);

/// Adds the conversions from and to bytes.
macro_rules! convert_bytes {
    ($($name:ident: $length:literal),*) => {$(
        impl $name {
            /// Creates the value from its bytes.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; $length]) -> Self {
                Self(bytes)
            }

            /// Returns the bytes, as a store stores them.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; $length] {
                &self.0
            }
        }
    )*};
}

convert_bytes!(KeyId: 32, Fingerprint: 32, Token: 16, ScopeDigest: 16);

impl Token {
    /// Creates a random token.
    ///
    /// The bytes come directly from the operating system, not from a generator seeded in the process. A forked
    /// process, or a machine that is resumed twice from one snapshot, must not create the same token twice.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] if the operating system provides no randomness.
    pub fn random() -> Result<Self, StoreError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(StoreError::backend)?;
        Ok(Self(bytes))
    }
}

/// Shows the first four bytes in hexadecimal. They are enough to follow an entry through a log and too few to identify
/// it elsewhere.
impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "{a:02x}{b:02x}{c:02x}{d:02x}")
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "Fingerprint({a:02x}{b:02x}{c:02x}{d:02x})")
    }
}

impl fmt::Debug for ScopeDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "ScopeDigest({a:02x}{b:02x}{c:02x}{d:02x})")
    }
}

/// Shows no bytes, because any caller that knows the token holds the lease.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
