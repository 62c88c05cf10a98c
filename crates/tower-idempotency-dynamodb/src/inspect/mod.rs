//! Operations for operators: [`Inspect`] for the store.
//!
//! A listing reads the index, page by page. A resolution reads the item, and writes it under the condition that nothing has
//! changed since.

mod entry;
mod list;
mod resolve;

use tower_idempotency::{
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, State, Summary,
    },
    store::KeyId,
};

use crate::{
    error::{DynamoDbError, DynamoDbErrorKind},
    item::{COMPLETED, IN_PROGRESS, NEEDS_ATTENTION},
    store::DynamoDbStore,
};

/// Lists entries in progress, orphans and entries that need attention, unless the table has [no
/// index](crate::DynamoDbOptions::with_index_shards). The index lags slightly behind the table. A page takes one `Query` for
/// each partition of the index, or a few, and never a `Scan`.
///
/// Completed entries are listed only if [the index has them](crate::DynamoDbOptions::with_completed_index), in the order of
/// their expiry in each partition. `get` reads each entry.
///
/// A lease counts as expired when it has expired on every clock within the allowed skew. A resolution fails if the clock of
/// the process differs from that of the service by more: see [`with_clock_skew`](crate::DynamoDbOptions::with_clock_skew).
///
/// The service deletes expired items itself, so [`purge`](Inspect::purge) deletes none.
impl Inspect for DynamoDbStore {
    fn abilities(&self) -> Abilities {
        let mut abilities = Abilities::all().without_purge();
        if !self.inner.options.has_completed_index {
            let setting = "DynamoDbOptions::with_completed_index(true)";
            abilities = abilities.without_list_unless(State::Completed, setting);
        }
        // `with_completed_index` has no effect without an index.
        if self.inner.options.shards == 0 {
            let setting = "DynamoDbOptions::with_index_shards(8)";
            for state in [
                State::InProgress,
                State::Orphaned,
                State::NeedsAttention,
                State::Completed,
            ] {
                abilities = abilities.without_list_unless(state, setting);
            }
        }
        abilities
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.abilities().check(query)?;
        self.inner.list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        let inner = &*self.inner;
        let moment = inner.options.clock.read();
        let item = inner.conflicting_item(None, id).await?;
        Ok(item.and_then(|item| entry::details(*id, item, moment)))
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        let mut summary = Summary::default();
        for &state in State::ALL {
            if self.abilities().can_list(state) {
                summary.set(state, self.inner.count(state, limit).await?);
            }
        }
        Ok(summary)
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        resolution.check(seen)?;
        self.inner.resolve(seen, resolution).await
    }

    async fn purge(&self, _batch: u32) -> Result<u64, InspectError> {
        Ok(0)
    }
}

impl From<DynamoDbError> for InspectError {
    /// Reports a skew of the clocks as a refusal, because a resolution compares them before it writes.
    fn from(error: DynamoDbError) -> Self {
        if error.kind() == DynamoDbErrorKind::ClockSkew {
            Self::refused(error)
        } else {
            Self::backend(error)
        }
    }
}

/// Returns the `status` of entries in this state.
const fn status_of(state: State) -> &'static str {
    match state {
        State::InProgress | State::Orphaned => IN_PROGRESS,
        State::NeedsAttention => NEEDS_ATTENTION,
        _ => COMPLETED,
    }
}

#[cfg(test)]
mod tests {
    use tower_idempotency::inspect::InspectErrorKind;

    use super::*;

    #[test]
    fn only_refused_clock_changes_nothing() {
        for (kind, expected) in [
            (DynamoDbErrorKind::ClockSkew, InspectErrorKind::Refused),
            (DynamoDbErrorKind::Refused, InspectErrorKind::Backend),
            (DynamoDbErrorKind::Unreachable, InspectErrorKind::Backend),
        ] {
            let error = InspectError::from(DynamoDbError::new(kind, "the reason"));
            assert_eq!(error.kind(), expected, "{kind:?}");
            let source = std::error::Error::source(&error).map(ToString::to_string);
            assert_eq!(source.as_deref(), Some("the reason"));
        }
    }
}
