//! Identifiers and digests that stores compare as opaque bytes.

use std::{cell::Cell, fmt, str::FromStr};

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
    /// First eight bytes of a token that [allows a retry](Self::allows_retry).
    pub const RETRY_ALLOWED: [u8; 8] = *b"retry-ok";

    /// Creates a random token, which does not allow a retry.
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
        if bytes.starts_with(&Self::RETRY_ALLOWED) {
            // This prefix occurs in one of 2^64 random tokens. Every policy would let a claim take over an orphan with such
            // a token.
            bytes[0] = !bytes[0];
        }
        Ok(Self(bytes))
    }

    /// Creates the token of an orphan whose retry an operator allows: [`RETRY_ALLOWED`](Self::RETRY_ALLOWED), and eight
    /// random bytes. No execution has such a token.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] if the operating system provides no randomness.
    pub fn retry_allowed() -> Result<Self, StoreError> {
        let Self(mut bytes) = Self::random()?;
        bytes[..8].copy_from_slice(&Self::RETRY_ALLOWED);
        Ok(Self(bytes))
    }

    /// Creates a token that differs from all others of this process, without a call of the operating system.
    ///
    /// Use it only for a store in the memory of this process. A forked process has another copy of that store, and so has a
    /// machine that is resumed from the same snapshot. An equal token holds nothing there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Backend`] if the operating system provides no randomness for the first token of a thread.
    pub(crate) fn of_process() -> Result<Self, StoreError> {
        thread_local! {
            // Each thread counts from a random number of 128 bits, so the tokens of two threads differ.
            static NEXT: Cell<Option<u128>> = const { Cell::new(None) };
        }
        let token = match NEXT.get() {
            Some(next) => Self(next.to_le_bytes()),
            None => Self::random()?,
        };
        NEXT.set(Some(u128::from_le_bytes(token.0).wrapping_add(1)));
        Ok(token)
    }

    /// Returns `true` if an orphan with this token may be taken over under
    /// [`OrphanPolicy::Refuse`](super::OrphanPolicy::Refuse) too.
    #[must_use]
    pub fn allows_retry(&self) -> bool {
        self.0.starts_with(&Self::RETRY_ALLOWED)
    }
}

impl KeyId {
    /// Returns all 64 hexadecimal digits, in lower case. It is no secret: without the key, no request finds the entry.
    #[must_use]
    pub fn to_hex(&self) -> String {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = self.0.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits
            .map(|digit| char::from(DIGITS[usize::from(digit)]))
            .collect()
    }
}

/// Parses the 64 hexadecimal digits of [`KeyId::to_hex`].
impl FromStr for KeyId {
    type Err = KeyIdError;

    fn from_str(text: &str) -> Result<Self, KeyIdError> {
        let digits: &[u8; 64] = text.as_bytes().try_into().map_err(|_| KeyIdError(()))?;
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(KeyIdError(()));
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "two digits are at most 255"
            )]
            let value = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
            *byte = value;
        }
        Ok(Self(bytes))
    }
}

/// Error of a text that is not the 64 hexadecimal digits of a [`KeyId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyIdError(());

impl fmt::Display for KeyIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 64 hexadecimal digits, found something else")
    }
}

impl std::error::Error for KeyIdError {}

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

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, thread};

    use super::*;

    #[test]
    fn tokens_of_process_differ_between_threads() {
        let draw = || -> Vec<Token> { (0..1000).map(|_| Token::of_process().unwrap()).collect() };
        let threads: Vec<_> = (0..4).map(|_| thread::spawn(draw)).collect();
        let mut tokens: HashSet<Token> = draw().into_iter().collect();
        for thread in threads {
            tokens.extend(thread.join().unwrap());
        }
        assert_eq!(tokens.len(), 5000);
    }
}
