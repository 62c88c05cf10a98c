use std::fmt;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::EntryDetails;
use crate::record::{Codec, NeedsAttention, Record};

/// Contents of a record, for display to an operator. Its `Debug` output shows no headers and no body.
#[derive(Clone)]
#[non_exhaustive]
pub enum RecordContents {
    /// The response that each retry gets.
    Response(Response<Bytes>),
    /// A response that was not recorded. Each retry is rejected.
    Tombstone {
        /// Status of the response.
        status: StatusCode,
        /// `too_large`, `streamed` or `panicked`.
        reason: &'static str,
    },
    /// A result of [`run_once`](crate::IdempotencyLayer::run_once), in MessagePack.
    Value(Bytes),
    /// The execution needs attention.
    NeedsAttention(NeedsAttention),
    /// This version cannot read the record. Contains the reason, which quotes nothing of the record.
    Unreadable(String),
}

impl EntryDetails {
    /// Decodes the record. Returns `None` if the entry has none.
    ///
    /// A compressed record is inflated to at most `max_bytes` bytes, which limits the memory. A larger record is
    /// [unreadable](RecordContents::Unreadable).
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::Response;
    /// use tower_idempotency::{
    ///     IdempotencyLayer, MemoryStore,
    ///     inspect::{Entry, EntryDetails, RecordContents, Seen, State},
    ///     store::KeyId,
    /// };
    ///
    /// let id = KeyId::from_bytes([7; 32]);
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let mut details = EntryDetails::new(Entry::new(Seen::new(id, State::Completed, 1, 1)));
    /// assert!(details.contents(1024).is_none());
    ///
    /// details.record = Some(layer.encode_response_record(&id, &Response::new(Bytes::from("paid"))));
    /// let Some(RecordContents::Response(response)) = details.contents(1024) else { panic!("a response") };
    /// assert_eq!(response.body(), "paid");
    /// ```
    #[must_use]
    pub fn contents(&self, max_bytes: usize) -> Option<RecordContents> {
        let record = self.record.as_ref()?;
        let codec = Codec {
            compress_above: usize::MAX,
            max_inflated: max_bytes,
        };
        Some(match codec.decode(self.entry.id(), record) {
            Ok(Record::Response(stored)) => {
                let mut response = Response::new(stored.body);
                *response.status_mut() = stored.status;
                *response.headers_mut() = stored.headers;
                RecordContents::Response(response)
            }
            Ok(Record::Tombstone { status, reason }) => RecordContents::Tombstone {
                status,
                reason: reason.name(),
            },
            Ok(Record::Value(value)) => RecordContents::Value(value),
            Ok(Record::Attention { attention, .. }) => RecordContents::NeedsAttention(attention),
            Err(error) => RecordContents::Unreadable(error.to_string()),
        })
    }
}

impl fmt::Debug for RecordContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Response(response) => f
                .debug_struct("Response")
                .field("status", &response.status())
                .field("headers", &response.headers().len())
                .field("bytes", &response.body().len())
                .finish(),
            Self::Tombstone { status, reason } => f
                .debug_struct("Tombstone")
                .field("status", status)
                .field("reason", reason)
                .finish(),
            Self::Value(value) => f
                .debug_struct("Value")
                .field("bytes", &value.len())
                .finish(),
            Self::NeedsAttention(attention) => {
                f.debug_tuple("NeedsAttention").field(attention).finish()
            }
            Self::Unreadable(problem) => f.debug_tuple("Unreadable").field(problem).finish(),
        }
    }
}
