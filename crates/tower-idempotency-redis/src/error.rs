//! The error of a failed connection attempt.

use std::{error::Error, fmt};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::connection::no_reply_in_time;

/// The reason why a [`RedisStore`](crate::RedisStore) could not connect.
///
/// The error contains neither the URL, which may include a password, nor any data that a server stores.
#[derive(Debug)]
pub struct ConnectError {
    kind: ConnectErrorKind,
    message: String,
    source: Option<RedisError>,
}

/// The kind of a [`ConnectError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectErrorKind {
    /// The address is invalid, or requires a crate feature that is not enabled.
    Address,
    /// The server is unreachable, did not reply in time, rejected the connection or `INFO`, or is temporarily unavailable,
    /// for example while it loads its data.
    Unreachable,
    /// The server is too old, is a replica, or does not accept scripts. In a cluster also an option that it does not support:
    /// [`with_wait`](crate::RedisOptions::with_wait), or a [prefix](crate::RedisOptions::with_prefix) with `{` and no hash tag.
    Unusable,
    /// The server may evict live leases, and [`Eviction::Refuse`](crate::Eviction::Refuse) is set.
    EvictionPolicy,
}

impl ConnectError {
    /// Returns the kind of this error.
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

    pub(crate) fn invalid_address(source: RedisError) -> Self {
        Self::new(
            ConnectErrorKind::Address,
            "expected an address of the form redis://:PASSWORD@HOST:PORT/DB",
        )
        .with_source(source)
    }

    pub(crate) fn unreachable(source: RedisError) -> Self {
        // The client library has a deadline, too. Either of the two may pass first.
        let source = if source.is_timeout() {
            no_reply_in_time()
        } else {
            source
        };
        Self::new(ConnectErrorKind::Unreachable, "cannot reach the server").with_source(source)
    }

    /// Returns `true` if the user lacks the right to run a command.
    pub(crate) fn is_denied(&self) -> bool {
        let denied = ErrorKind::Server(ServerErrorKind::NoPerm);
        self.source.as_ref().is_some_and(|it| it.kind() == denied)
    }

    pub(crate) fn with_source(mut self, source: RedisError) -> Self {
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
