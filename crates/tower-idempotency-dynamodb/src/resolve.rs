//! What an operator decides about what needs attention.

use std::{fmt, time::UNIX_EPOCH};

use bytes::Bytes;
use tower_idempotency::store::{Token, Ttl};

use crate::{
    DynamoDbError, DynamoDbStore, Entry,
    clock::{millis, seconds},
    expression,
    item::{COMPLETED, IN_PROGRESS, NEEDS_ATTENTION, binary, n, s},
    list::partition,
    store::{NOTHING, Written},
};

/// What is to become of an entry that needs attention. Its `Debug` shows no bytes of a record.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// There was no effect, or it has been undone: the key is as if it had never been used.
    Free,
    /// The execution may go on: the entry is an orphan. A retry of the same request takes it over and is told so, as its
    /// first execution may have had an effect; another request under the key stays refused. Where the layer refuses
    /// orphans a retry is refused too, and only
    /// [`take_over`](tower_idempotency::IdempotencyLayer::take_over) executes it.
    Retry,
    /// The matter is settled: every retry is answered with this from now on.
    Answer {
        /// As [`IdempotencyLayer::encode_response_record`](tower_idempotency::IdempotencyLayer::encode_response_record) makes it, or `encode_value_record`.
        record: Bytes,
        /// How long it is kept.
        retention: Ttl,
    },
}

impl fmt::Debug for Resolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("Free"),
            Self::Retry => f.write_str("Retry"),
            Self::Answer { record, retention } => f
                .debug_struct("Answer")
                .field("bytes", &record.len())
                .field("retention", retention)
                .finish(),
        }
    }
}

impl DynamoDbStore {
    /// Carries out what an operator has decided about an entry of [`needs_attention`](Self::needs_attention): one write,
    /// under the condition that the entry is as it was listed.
    ///
    /// False if it is not, and this write did not happen: somebody has resolved it meanwhile. Or this very call has, whose
    /// answer was lost, and which the SDK made again: list it anew to know.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] when the service does not answer, or refuses a record that is too large for an item; the entry may
    /// be resolved all the same.
    ///
    /// # Cancellation
    ///
    /// A call that is dropped may or may not reach the service, where it happens as a whole or not at all.
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
        let condition = expression::UNRESOLVED;
        // No expression here names anything after a token.
        let (id, token) = (&entry.id, &Token::from_bytes([0; 16]));
        let update = match resolution {
            Resolution::Free => {
                let deleted = inner.delete(id, token, condition, values).await?;
                return Ok(matches!(deleted, Written::Done(_)));
            }
            Resolution::Retry => {
                values.extend([
                    (":in_progress", s(IN_PROGRESS)),
                    (":listed", s(partition(IN_PROGRESS, entry.shard))),
                    (":now", n(moment.now)),
                    (":over", n(moment.over)),
                    (":ttl", n(seconds(moment.now))),
                    (":keep", n(KEEP.as_millis())),
                    (":keep_seconds", n(seconds(KEEP.as_millis()))),
                ]);
                expression::RETRY
            }
            Resolution::Answer { record, retention } => {
                let expires = moment.now.saturating_add(retention.as_millis());
                values.extend([
                    (":completed", s(COMPLETED)),
                    (":now", n(moment.now)),
                    (":expires", n(expires)),
                    (":ttl", n(seconds(expires))),
                    (":record", binary(record)),
                ]);
                expression::ANSWER
            }
        };
        let updated = inner.update(id, token, condition, update, NOTHING, values);
        Ok(matches!(updated.await?, Written::Done(_)))
    }
}

/// How long an orphan is remembered whose entry does not say: it was completed after its data had been lost.
const KEEP: Ttl = Ttl::from_secs(24 * 60 * 60);
