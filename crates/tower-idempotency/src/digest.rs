//! Digests over length-prefixed fields, and the secret that keys them.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::{
    error::ConfigError,
    store::{Fingerprint, KeyId, ScopeDigest},
};

/// Version of IDs and fingerprints. Increase it with every change that gives a request another ID or fingerprint.
///
/// Such a change discards all entries: each retry of an earlier request executes again. So it belongs to an incompatible
/// release. `tests/golden/ids-v1.txt` has the values of this version.
pub(crate) const VERSION: &[u8] = &[1];

/// Minimum length of a secret in bytes.
const MIN_SECRET: usize = 16;

/// Secret that keys every digest. Without it, a reader of the store cannot verify guesses of keys or bodies.
#[derive(Clone)]
pub(crate) struct Secret(Hmac<Sha256>);

impl Secret {
    /// Creates a secret of at least 16 bytes.
    pub(crate) fn new(secret: &[u8]) -> Result<Self, ConfigError> {
        let too_short =
            || ConfigError::new("a secret of at least 16 bytes", format!("{}", secret.len()));
        if secret.len() < MIN_SECRET {
            return Err(too_short());
        }
        Hmac::new_from_slice(secret)
            .map(Self)
            .map_err(|_| too_short())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Scope of the service itself: executions without an HTTP request.
pub(crate) const SERVICE_SCOPE: ScopeDigest = ScopeDigest::from_bytes([0; 16]);

/// Scope of all observed requests. Stores account for them as one caller, so they evict no entries of enforced requests.
pub(crate) const OBSERVED_SCOPE: ScopeDigest = ScopeDigest::from_bytes([0xff; 16]);

/// Returns the ID under which a request is observed. It is the ID of no enforced request.
pub(crate) fn observed_id(id: &KeyId) -> KeyId {
    let mut hash = FieldDigest::new(None);
    hash.field(b"observed").field(VERSION).field(id.as_bytes());
    KeyId::from_bytes(hash.finish())
}

/// Key of a request in the scope of its caller.
pub(crate) struct ScopedKey {
    pub(crate) id: EntryId,
    /// Digest by which the store and the limits of the layer account for the caller.
    pub(crate) scope: ScopeDigest,
    /// Digest of the whole principal.
    pub(crate) principal: ScopeDigest,
}

/// ID of the entry of a request.
pub(crate) enum EntryId {
    Known(KeyId),
    /// The fingerprint of the request is added to this digest.
    OfFingerprint(Box<FieldDigest>),
}

impl EntryId {
    pub(crate) fn of(self, fingerprint: &Fingerprint) -> KeyId {
        match self {
            Self::Known(id) => id,
            Self::OfFingerprint(mut hash) => {
                hash.field(fingerprint.as_bytes());
                KeyId::from_bytes(hash.finish())
            }
        }
    }
}

/// Digest over length-prefixed fields. Two different lists of fields never hash the same bytes.
#[derive(Clone)]
pub(crate) struct FieldDigest {
    hasher: Hasher,
    /// Short fields that are not hashed yet. One update hashes several, because each update costs as much as hashing some 20
    /// bytes.
    pending: [u8; PENDING],
    pending_len: usize,
}

const PENDING: usize = 64;

#[derive(Clone)]
enum Hasher {
    Plain(Sha256),
    Keyed(Hmac<Sha256>),
}

impl Hasher {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Plain(hash) => hash.update(bytes),
            Self::Keyed(hash) => hash.update(bytes),
        }
    }
}

impl FieldDigest {
    pub(crate) fn new(secret: Option<&Secret>) -> Self {
        Self {
            hasher: secret.map_or_else(
                || Hasher::Plain(Sha256::new()),
                |secret| Hasher::Keyed(secret.0.clone()),
            ),
            pending: [0; PENDING],
            pending_len: 0,
        }
    }

    /// Adds one field: its length as a [`VarInt`], and its bytes.
    pub(crate) fn field(&mut self, bytes: &[u8]) -> &mut Self {
        // A length below 128 is one byte.
        let size = 1 + bytes.len();
        if size > PENDING {
            // One update hashes the length together with the pending fields.
            let length = VarInt::new(bytes.len());
            self.next_pending(length.len)
                .copy_from_slice(length.as_bytes());
            self.hash_pending();
            self.hasher.update(bytes);
        } else {
            let field = self.next_pending(size);
            #[expect(clippy::cast_possible_truncation, reason = "less than PENDING")]
            let len = bytes.len() as u8;
            field[0] = len;
            field[1..].copy_from_slice(bytes);
        }
        self
    }

    /// Adds a number as one field.
    pub(crate) fn number(&mut self, number: usize) -> &mut Self {
        self.field(VarInt::new(number).as_bytes())
    }

    /// Adds a part of the last field of a digest. The caller adds the length of the field after its last part.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.hash_pending();
        self.hasher.update(bytes);
    }

    /// Returns the next `size` pending bytes, at most [`PENDING`], which the caller fills.
    fn next_pending(&mut self, size: usize) -> &mut [u8] {
        if size > PENDING - self.pending_len {
            self.hash_pending();
        }
        let start = self.pending_len;
        self.pending_len += size;
        &mut self.pending[start..self.pending_len]
    }

    fn hash_pending(&mut self) {
        self.hasher.update(&self.pending[..self.pending_len]);
        self.pending_len = 0;
    }

    /// Returns the digest of a scope. It differs from the ID of any key in the scope.
    pub(crate) fn scope_digest(&mut self) -> ScopeDigest {
        // The caller adds fields to the same digest. The fields so far are hashed once for both.
        self.hash_pending();
        let mut scope = self.clone();
        scope.field(b"scope");
        let digest = scope.finish();
        ScopeDigest::from_bytes(std::array::from_fn(|at| digest[at]))
    }

    /// Returns the digest of all fields.
    pub(crate) fn finish(mut self) -> [u8; 32] {
        self.hash_pending();
        match self.hasher {
            Hasher::Plain(hash) => hash.finalize().into(),
            Hasher::Keyed(hash) => hash.finalize().into_bytes().into(),
        }
    }
}

/// A number in as few bytes as possible: seven bits in each, the lowest first, and the eighth bit set in all but the last.
///
/// Most fields are short. With lengths of eight bytes, SHA-256 would take twice as long for them.
struct VarInt {
    bytes: [u8; 10],
    len: usize,
}

impl VarInt {
    fn new(number: usize) -> Self {
        let mut rest = number as u64;
        let mut bytes = [0; 10];
        let mut len = 0;
        loop {
            let low = (rest & 0x7f) as u8;
            rest >>= 7;
            bytes[len] = if rest == 0 { low } else { low | 0x80 };
            len += 1;
            if rest == 0 {
                return Self { bytes, len };
            }
        }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Returns a stable key for a call that the handler of this entry makes to another service.
pub(crate) fn downstream_key(id: &KeyId, fingerprint: &Fingerprint, name: &str) -> String {
    let mut hash = FieldDigest::new(None);
    hash.field(b"downstream")
        .field(VERSION)
        .field(id.as_bytes())
        .field(fingerprint.as_bytes())
        .field(name.as_bytes());
    hex(&hash.finish())
}

/// Returns the bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        out.push(DIGITS[usize::from(byte >> 4)].into());
        out.push(DIGITS[usize::from(byte & 15)].into());
    }
    out
}

#[cfg(all(test, feature = "axum"))]
mod golden;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_hashed_in_order() {
        let lengths: [(usize, &[u8]); 13] = [
            (1, &[1]),
            (30, &[30]),
            (31, &[31]),
            (0, &[0]),
            (62, &[62]),
            (63, &[63]),
            (64, &[64]),
            (127, &[127]),
            (300, &[0xac, 0x02]),
            (5, &[5]),
            (200, &[0xc8, 0x01]),
            (62, &[62]),
            (300, &[0xac, 0x02]),
        ];
        let (mut hash, mut expected) = (FieldDigest::new(None), Sha256::new());
        for (length, prefix) in lengths {
            let bytes = vec![b'a'; length];
            hash.field(&bytes);
            expected.update([prefix, &bytes].concat());
            let digest: [u8; 32] = expected.clone().finalize().into();
            assert_eq!(hash.clone().finish(), digest, "{length}");
        }
        hash.append(b"the last field");
        hash.number(14);
        expected.update(b"the last field\x01\x0e");
        let digest: [u8; 32] = expected.finalize().into();
        assert_eq!(hash.finish(), digest);
    }

    #[test]
    fn scope_digest_adds_no_field() {
        let (mut hash, mut expected) = (FieldDigest::new(None), FieldDigest::new(None));
        for length in [5, 40, 300, 7] {
            let bytes = vec![b'a'; length];
            hash.field(&bytes);
            expected.field(&bytes);
            let mut scope = expected.clone();
            scope.field(b"scope");
            assert_eq!(hash.scope_digest().as_bytes()[..], scope.finish()[..16]);
            assert_eq!(hash.clone().finish(), expected.clone().finish(), "{length}");
        }
    }
}
