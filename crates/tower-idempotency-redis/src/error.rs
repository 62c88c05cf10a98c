//! Why there is no store.

use std::{error::Error, fmt};

use redis::RedisError;

/// Why a [`RedisStore`](crate::RedisStore) could not connect.
///
/// Says neither the URL, which may hold a password, nor anything a server keeps.
#[derive(Debug)]
pub struct ConnectError {
    kind: ConnectErrorKind,
    message: String,
    source: Option<RedisError>,
}

/// What kind of a [`ConnectError`] it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectErrorKind {
    /// The address is none, or asks for a feature that is off.
    Address,
    /// The server cannot be reached, did not answer in time, refused us, or takes nothing for now, as while it loads its data.
    Unreachable,
    /// The server is too old, is a replica, or runs no scripts.
    Unusable,
    /// The server may evict live leases, and [`Eviction::Refuse`](crate::Eviction::Refuse) is set.
    Evicts,
}

impl ConnectError {
    /// What kind it is.
    #[must_use]
    pub fn kind(&self) -> ConnectErrorKind {
        self.kind
    }

    pub(crate) fn new(kind: ConnectErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    pub(crate) fn address(source: RedisError) -> Self {
        Self::new(
            ConnectErrorKind::Address,
            "expected the address of a server",
        )
        .because(source)
    }

    pub(crate) fn unreachable(source: RedisError) -> Self {
        Self::new(ConnectErrorKind::Unreachable, "cannot reach the server").because(source)
    }

    pub(crate) fn because(mut self, source: RedisError) -> Self {
        self.source = Some(source);
        self
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
