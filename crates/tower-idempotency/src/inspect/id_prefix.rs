use std::{fmt, str::FromStr};

use crate::store::KeyId;

/// The first digits of a [`KeyId`]: 8 to 64 hexadecimal digits. Events and problem bodies show eight.
///
/// ```
/// use tower_idempotency::{inspect::IdPrefix, store::KeyId};
///
/// let prefix: IdPrefix = "6f1c0a2b".parse()?;
/// let mut id = [0; 32];
/// id[..5].copy_from_slice(&[0x6f, 0x1c, 0x0a, 0x2b, 0x77]);
/// assert!(prefix.matches(&KeyId::from_bytes(id)));
/// assert!(!prefix.matches(&KeyId::from_bytes([0; 32])));
/// assert!("6f1c0a2".parse::<IdPrefix>().is_err(), "less than eight digits");
/// # Ok::<(), tower_idempotency::inspect::IdPrefixError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IdPrefix {
    /// The digits, followed by zeros.
    first: [u8; 32],
    digits: u8,
}

impl IdPrefix {
    /// Returns `true` if the ID begins with these digits.
    #[must_use]
    pub fn matches(&self, id: &KeyId) -> bool {
        let (first, last) = self.range();
        (first..=last).contains(id)
    }

    /// Returns the first and the last ID with this prefix, for a store that orders its entries by ID.
    #[must_use]
    pub fn range(&self) -> (KeyId, KeyId) {
        let mut last = self.first;
        for digit in usize::from(self.digits)..DIGITS {
            last[digit / 2] |= if digit % 2 == 0 { 0xf0 } else { 0x0f };
        }
        (KeyId::from_bytes(self.first), KeyId::from_bytes(last))
    }

    /// Returns the ID if the prefix has all its digits.
    #[must_use]
    pub fn to_key_id(&self) -> Option<KeyId> {
        (usize::from(self.digits) == DIGITS).then(|| KeyId::from_bytes(self.first))
    }
}

impl From<KeyId> for IdPrefix {
    fn from(id: KeyId) -> Self {
        Self {
            first: *id.as_bytes(),
            digits: DIGITS as u8,
        }
    }
}

impl FromStr for IdPrefix {
    type Err = IdPrefixError;

    fn from_str(text: &str) -> Result<Self, IdPrefixError> {
        let digits = u8::try_from(text.len()).map_err(|_| IdPrefixError(()))?;
        if !(MIN_DIGITS..=DIGITS).contains(&text.len()) {
            return Err(IdPrefixError(()));
        }
        let mut first = [0; 32];
        for (at, digit) in text.chars().enumerate() {
            let value = digit.to_digit(16).ok_or(IdPrefixError(()))?;
            let shift = if at % 2 == 0 { 4 } else { 0 };
            first[at / 2] |= (value as u8) << shift;
        }
        Ok(Self { first, digits })
    }
}

impl fmt::Display for IdPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = KeyId::from_bytes(self.first).to_hex();
        f.write_str(&hex[..usize::from(self.digits)])
    }
}

impl fmt::Debug for IdPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdPrefix({self})")
    }
}

/// Error of a text that is not 8 to 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdPrefixError(());

impl fmt::Display for IdPrefixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 8 to 64 hexadecimal digits, found something else")
    }
}

impl std::error::Error for IdPrefixError {}

const DIGITS: usize = 64;
const MIN_DIGITS: usize = 8;
