//! Digests over length-prefixed fields, and the secret that keys them.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::{
    error::ConfigError,
    store::{Fingerprint, KeyId, ScopeDigest},
};

/// Version of IDs and fingerprints. Increase it with every change that gives a request another ID or fingerprint.
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

/// Scope of the keys of one caller.
pub(crate) struct Scope {
    /// Digest to which a key is added.
    pub(crate) hash: FieldDigest,
    /// Digest by which the store and the limits of the layer account for the caller.
    pub(crate) digest: ScopeDigest,
}

/// Digest over length-prefixed fields. Two different lists of fields never hash the same bytes.
#[derive(Clone)]
pub(crate) struct FieldDigest(Hasher);

#[derive(Clone)]
enum Hasher {
    Plain(Sha256),
    Keyed(Hmac<Sha256>),
}

impl FieldDigest {
    pub(crate) fn new(secret: Option<&Secret>) -> Self {
        Self(secret.map_or_else(
            || Hasher::Plain(Sha256::new()),
            |secret| Hasher::Keyed(secret.0.clone()),
        ))
    }

    /// Adds one field.
    pub(crate) fn field(&mut self, bytes: &[u8]) -> &mut Self {
        let len = (bytes.len() as u64).to_le_bytes();
        match &mut self.0 {
            Hasher::Plain(hash) => {
                hash.update(len);
                hash.update(bytes);
            }
            Hasher::Keyed(hash) => {
                hash.update(&len);
                hash.update(bytes);
            }
        }
        self
    }

    /// Returns the digest of a scope. It differs from the ID of any key in the scope.
    pub(crate) fn scope_digest(&self) -> ScopeDigest {
        let mut scope = self.clone();
        scope.field(b"scope");
        let digest = scope.finish();
        ScopeDigest::from_bytes(std::array::from_fn(|at| digest[at]))
    }

    /// Returns the digest of all fields.
    pub(crate) fn finish(self) -> [u8; 32] {
        match self.0 {
            Hasher::Plain(hash) => hash.finalize().into(),
            Hasher::Keyed(hash) => hash.finalize().into_bytes().into(),
        }
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
