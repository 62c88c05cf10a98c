//! An operator's decisions about entries that need attention.

use std::{fmt, time::UNIX_EPOCH};

use bytes::Bytes;
use tower_idempotency::store::{Token, Ttl};

use super::list::Entry;
use crate::{
    clock::{ceil_seconds, millis},
    error::DynamoDbError,
    expression,
    item::{COMPLETED, IN_PROGRESS, NEEDS_ATTENTION, binary, index_partition, n, s},
    store::DynamoDbStore,
    writes::{RETURN_NOTHING, WriteOutcome},
};

/// A decision about an entry that needs attention.
///
/// The `Debug` output omits the bytes of a record.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// The execution had no effect, or the effect has been undone. Deletes the entry, as if the key had never been used.
    Free,
    /// The execution may continue. Turns the entry into an orphan.
    ///
    /// A retry of the same request takes the orphan over. Its handler sees a takeover, because the first execution may have
    /// had an effect. The layer still rejects another request under the key. If the layer refuses orphans, it rejects
    /// retries too, and only [`take_over`](tower_idempotency::IdempotencyLayer::take_over) executes the request.
    Retry,
    /// The outcome is settled. Completes the entry with this record, and every retry gets it from then on.
    Complete {
        /// Record from [`IdempotencyLayer::encode_response_record`] or [`IdempotencyLayer::encode_value_record`].
        ///
        /// [`IdempotencyLayer::encode_response_record`]: tower_idempotency::IdempotencyLayer::encode_response_record
        /// [`IdempotencyLayer::encode_value_record`]: tower_idempotency::IdempotencyLayer::encode_value_record
        record: Bytes,
        /// Time after which the record expires.
        retention: Ttl,
    },
}

impl fmt::Debug for Resolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("Free"),
            Self::Retry => f.write_str("Retry"),
            Self::Complete { record, retention } => f
                .debug_struct("Complete")
                .field("bytes", &record.len())
                .field("retention", retention)
                .finish(),
        }
    }
}

impl DynamoDbStore {
    /// Applies an operator's decision about an entry from [`needs_attention`](Self::needs_attention), with one write.
    ///
    /// Returns `false` if the entry has changed since it was listed. This call then had no effect, because another operator
    /// has resolved the entry. Alternatively this call did resolve it, but the reply was lost and the retry of the SDK
    /// failed: list the entries again to find out.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] if the service does not reply, or rejects a record that is too large for an item. The entry may be
    /// resolved nevertheless.
    ///
    /// # Cancellation
    ///
    /// A dropped call may or may not reach the service. The service executes it completely or not at all.
    pub async fn resolve(
        &self,
        entry: &Entry,
        resolution: Resolution,
    ) -> Result<bool, DynamoDbError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        let since = entry.since.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut values = vec![
            (":needs_attention", s(NEEDS_ATTENTION)),
            (":generation", n(entry.generation)),
            (":since", n(millis(since))),
        ];
        let condition = expression::IS_UNRESOLVED;
        // No expression here uses `#mine`, so any token will do.
        let (id, token) = (&entry.id, &Token::from_bytes([0; 16]));
        let update = match resolution {
            Resolution::Free => {
                let outcome = inner.delete(id, token, condition, values).await?;
                return Ok(matches!(outcome, WriteOutcome::Applied(_)));
            }
            Resolution::Retry => {
                values.extend([
                    (":in_progress", s(IN_PROGRESS)),
                    (":listed", s(index_partition(IN_PROGRESS, entry.shard))),
                    (":now", n(moment.now)),
                    (":over", n(moment.passed)),
                    (":ttl", n(ceil_seconds(moment.now))),
                    (":keep", n(DEFAULT_ORPHAN_RETENTION.as_millis())),
                    (
                        ":keep_seconds",
                        n(ceil_seconds(DEFAULT_ORPHAN_RETENTION.as_millis())),
                    ),
                ]);
                expression::RESOLVE_AS_ORPHAN
            }
            Resolution::Complete { record, retention } => {
                let expires = moment.now.saturating_add(retention.as_millis());
                values.extend([
                    (":completed", s(COMPLETED)),
                    (":now", n(moment.now)),
                    (":expires", n(expires)),
                    (":ttl", n(ceil_seconds(expires))),
                    (":record", binary(record)),
                ]);
                expression::RESOLVE_AS_COMPLETED
            }
        };
        let write = inner.update(id, token, condition, update, RETURN_NOTHING, values);
        Ok(matches!(write.await?, WriteOutcome::Applied(_)))
    }
}

/// Retention of an orphan whose entry has none: the entry was completed after the table had lost its data.
const DEFAULT_ORPHAN_RETENTION: Ttl = Ttl::from_secs(24 * 60 * 60);
