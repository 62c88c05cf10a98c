//! Requests that are stored before they are sent, and sent again after a crash.

use std::{error::Error as StdError, fmt, future::Future, time::SystemTime};

use crate::error::BoxError;

mod entry;
mod file;
mod layer;
mod log;
#[cfg(feature = "outbox-postgres")]
mod postgres;
mod recovery;
#[cfg(any(feature = "outbox-postgres", feature = "outbox-sqlite"))]
mod sql;
#[cfg(feature = "outbox-sqlite")]
mod sqlite;
mod unknown_on_drop;

#[cfg(feature = "outbox-postgres")]
pub use self::postgres::PostgresOutbox;
#[cfg(feature = "outbox-sqlite")]
pub use self::sqlite::SqliteOutbox;
pub use self::{
    entry::Entry,
    file::FileOutbox,
    layer::{OutboxLayer, OutboxService},
    recovery::{Recovered, Recovery},
};

/// Storage of requests whose outcome is not known yet.
///
/// [`OutboxLayer`] stores a request before its first byte is sent, and removes it once its outcome is definite. After a
/// crash, [`OutboxService::recover`] sends the remaining requests again under the same keys.
///
/// [`FileOutbox`] is for one process. `SqliteOutbox` and `PostgresOutbox` can be shared.
///
/// # Contract
///
/// - A method that returned `Ok` has taken effect, and a crash does not undo it. Only a removal may be undone: the request
///   is then sent again, and the server replays its response.
/// - A method that returned an error, or whose future was dropped, may have taken effect.
/// - Each method is one atomic step.
pub trait Outbox: Send + Sync + 'static {
    /// Stores the entry, unless there is one under its key. Otherwise the call behaves like [`resume`](Self::resume), and
    /// returns the stored entry.
    ///
    /// # Errors
    ///
    /// If the entry could not be stored. It may be stored nevertheless.
    fn store(
        &self,
        entry: &Entry,
    ) -> impl Future<Output = Result<Option<Entry>, OutboxError>> + Send;

    /// Marks the entry as resumed, and returns it. Sets the time of its first attempt and its provider if it has none.
    /// Returns `None` if there is no entry under this key.
    ///
    /// The provider is the one that the caller would choose. The provider of the returned entry gets the request.
    ///
    /// # Errors
    ///
    /// If the outbox could not be read or written.
    fn resume(
        &self,
        key: &str,
        first_sent: SystemTime,
        provider: Option<u64>,
    ) -> impl Future<Output = Result<Option<Entry>, OutboxError>> + Send;

    /// Removes the entry if it was never resumed and has this time of the first attempt. Returns `true` if it did.
    ///
    /// Then no other call sends the request, and the call that stored the entry may report that nothing was executed. An entry
    /// with another time is that of a later call: another call has sent the request, and removed the entry of this one. An
    /// outbox compares the times in milliseconds.
    ///
    /// # Errors
    ///
    /// If the outbox could not be written.
    fn discard(
        &self,
        key: &str,
        first_sent: SystemTime,
    ) -> impl Future<Output = Result<bool, OutboxError>> + Send;

    /// Removes the entry, if there is one.
    ///
    /// # Errors
    ///
    /// If the outbox could not be written.
    fn remove(&self, key: &str) -> impl Future<Output = Result<(), OutboxError>> + Send;

    /// Returns at most `limit` entries and their positions, in ascending order, from the first one after the position
    /// `after`.
    ///
    /// Positions begin with 1. The position of an entry never changes, and a later entry has a higher position.
    ///
    /// # Errors
    ///
    /// If the outbox could not be read.
    fn pending(
        &self,
        after: u64,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<(u64, Entry)>, OutboxError>> + Send;
}

/// Failure of an [`Outbox`]. Its text contains no key and no body.
///
/// Its [source](StdError::source) is the error of the storage, such as that of sqlx. The text contains that of the source.
#[derive(Debug)]
pub struct OutboxError {
    message: &'static str,
    source: Option<BoxError>,
}

impl OutboxError {
    /// Creates an error from that of the storage.
    pub fn new(source: impl Into<BoxError>) -> Self {
        Self {
            message: "the storage of the outbox failed",
            source: Some(source.into()),
        }
    }

    pub(crate) fn with_message(message: &'static str) -> Self {
        Self {
            message,
            source: None,
        }
    }
}

impl fmt::Display for OutboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for OutboxError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.source.as_deref()?;
        Some(source)
    }
}
