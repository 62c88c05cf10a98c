//! The items of a batch and their results.

use std::{fmt, sync::Arc, time::Duration};

use http::StatusCode;

use crate::{
    config::Config,
    error::{Error, ErrorKind},
    response::reject::{
        in_progress, key_reused, needs_attention, outcome_pending, outcome_unknown,
    },
    run_once::Outcome,
    store::KeyId,
};

/// Item of a batch request.
pub struct Item<P> {
    pub(super) key: String,
    pub(super) fingerprint: Vec<u8>,
    pub(super) input: P,
}

impl<P> Item<P> {
    /// Creates an item with its key, its fingerprint and the input of its work.
    ///
    /// The client chooses the key. The layer checks its length and
    /// [`with_key_check`](crate::IdempotencyLayer::with_key_check), as for requests. It may have any characters except control
    /// characters.
    ///
    /// The fingerprint contains the content of the item, such as its JSON. The layer stores only a digest of it. If it omits
    /// a member, two items that differ only there count as one.
    pub fn new(key: impl Into<String>, fingerprint: impl Into<Vec<u8>>, input: P) -> Self {
        Self {
            key: key.into(),
            fingerprint: fingerprint.into(),
            input,
        }
    }
}

impl<P> fmt::Debug for Item<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key and the content belong to the client.
        f.debug_struct("Item").finish_non_exhaustive()
    }
}

/// Outcome of one item.
#[derive(Debug)]
#[non_exhaustive]
pub enum ItemOutcome<T, E> {
    /// The item returned like a [`run_once`](crate::IdempotencyLayer::run_once) with its key.
    Returned(Outcome<T, E>),
    /// The layer returned an error: the key is malformed, a limit is reached, the service is shutting down, or the store
    /// failed. The work did not run, except for [`UnfinishedTransaction`](ErrorKind::UnfinishedTransaction),
    /// [`OutcomeUnknown`](ErrorKind::OutcomeUnknown) and a record that cannot be read.
    Rejected(Error),
    /// The work panicked. Its key was treated as [`with_failure`](crate::IdempotencyLayer::with_failure) says.
    Panicked,
}

/// Result of one item, for its entry in the response.
///
/// Duplicates in a batch share one result. Clones are handles to it.
#[must_use = "the item may have failed: without a check it is lost"]
pub struct ItemResult<T, E> {
    result: Arc<SharedResult<T, E>>,
    is_duplicate: bool,
}

pub(super) struct SharedResult<T, E> {
    outcome: ItemOutcome<T, E>,
    /// The error that a request with this outcome would get. `None` for values, failures, unfinished batches and panics, and for
    /// rejected items, which have their own.
    error: Option<Error>,
    /// `true` if a retry may get another outcome.
    can_change: bool,
}

impl<T, E> SharedResult<T, E> {
    pub(super) fn new(
        config: &Config,
        id: &KeyId,
        outcome: ItemOutcome<T, E>,
        can_change: bool,
    ) -> Self {
        let error = match &outcome {
            ItemOutcome::Returned(outcome) => error_of(config, outcome, can_change),
            ItemOutcome::Rejected(_) | ItemOutcome::Panicked => None,
        };
        let error = error.map(|error| error.with_entry(id));
        Self {
            outcome,
            error,
            can_change,
        }
    }

    /// Creates the result of an item that has no entry.
    pub(super) fn rejected(error: Error) -> Self {
        Self {
            outcome: ItemOutcome::Rejected(error),
            error: None,
            can_change: false,
        }
    }

    /// Returns the result of the first item, or of a duplicate of it.
    pub(super) fn share(self: &Arc<Self>, is_duplicate: bool) -> ItemResult<T, E> {
        ItemResult {
            result: Arc::clone(self),
            is_duplicate,
        }
    }
}

/// Returns the error that a request with this outcome would get.
fn error_of<T, E>(config: &Config, outcome: &Outcome<T, E>, can_change: bool) -> Option<Error> {
    let rules = &config.response;
    Some(match outcome {
        Outcome::Executed(_)
        | Outcome::Replayed(_)
        | Outcome::UnfinishedBatch(_)
        | Outcome::Failed(_) => return None,
        Outcome::ValueNotRecorded => {
            let detail =
                "the first item with this key was executed, but its value was not recorded";
            Error::new(ErrorKind::ResponseNotRetained, detail)
        }
        Outcome::NeedsAttention { code } => needs_attention(code),
        Outcome::InProgress { .. } => {
            in_progress(rules, config.execution.concurrent_requests.status())
        }
        Outcome::Mismatch => key_reused(config.request.key_reuse.status()),
        Outcome::Orphaned { .. } => outcome_unknown(),
        Outcome::LeaseLost(_) | Outcome::Unknown(_) if can_change => outcome_pending(rules),
        // The record may have expired: a retry would repeat the effect.
        Outcome::LeaseLost(_) | Outcome::Unknown(_) => outcome_unknown(),
    })
}

impl<T, E> ItemResult<T, E> {
    /// Returns the outcome of the item.
    #[must_use]
    pub fn outcome(&self) -> &ItemOutcome<T, E> {
        &self.result.outcome
    }

    /// Returns the value if the item was executed, now or before.
    #[must_use]
    pub fn value(&self) -> Option<&T> {
        match self.outcome() {
            ItemOutcome::Returned(Outcome::Executed(value) | Outcome::Replayed(value)) => {
                Some(value)
            }
            _ => None,
        }
    }

    /// Returns the error that a request with this outcome would get: its code, its status, and a sentence for the client.
    ///
    /// `None` for an item with a value, and for work that failed, panicked or ran an
    /// [unfinished batch](Outcome::UnfinishedBatch).
    #[must_use]
    pub fn error(&self) -> Option<&Error> {
        match self.outcome() {
            ItemOutcome::Rejected(error) => Some(error),
            ItemOutcome::Returned(_) | ItemOutcome::Panicked => self.result.error.as_ref(),
        }
    }

    /// Returns the status of the item for the body of a 207. It is 200 for a value, and the status of [`error`](Self::error) for
    /// an error. It is 500 for work that failed, panicked or ran an [unfinished batch](Outcome::UnfinishedBatch).
    ///
    /// The preset and the settings of the layer choose the statuses of errors, as for requests.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.error() {
            Some(error) => error.status(),
            None if self.value().is_some() => StatusCode::OK,
            None => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns how long the client should wait before it sends the item again, or `None` if waiting does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.error().and_then(Error::retry_after)
    }

    /// Returns `true` if a retry of the batch would not run this item, and would get no better result for it.
    ///
    /// Final are a value, a value that was not recorded, and a malformed key. A mismatch is final if the other item was
    /// executed or is in the batch. All other results can change: work that failed runs again, and an operator may resolve a
    /// key. The value of this execution is final even if it is too large for a record. A retry then gets 409
    /// [`ResponseNotRetained`](ErrorKind::ResponseNotRetained).
    #[must_use]
    pub fn is_final(&self) -> bool {
        match self.outcome() {
            ItemOutcome::Returned(outcome) => {
                matches!(
                    outcome,
                    Outcome::Executed(_) | Outcome::Replayed(_) | Outcome::ValueNotRecorded
                ) || (matches!(outcome, Outcome::Mismatch) && !self.result.can_change)
            }
            ItemOutcome::Rejected(error) => matches!(
                error.kind(),
                ErrorKind::MalformedKey | ErrorKind::KeyTooLong
            ),
            ItemOutcome::Panicked => false,
        }
    }

    /// Returns `true` if an earlier item of the batch has the same key and fingerprint, and this one got its result.
    #[must_use]
    pub fn is_duplicate(&self) -> bool {
        self.is_duplicate
    }
}

impl<T, E> Clone for ItemResult<T, E> {
    fn clone(&self) -> Self {
        self.result.share(self.is_duplicate)
    }
}

impl<T: fmt::Debug, E: fmt::Debug> fmt::Debug for ItemResult<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ItemResult")
            .field("outcome", self.outcome())
            .field("is_duplicate", &self.is_duplicate)
            .finish_non_exhaustive()
    }
}
