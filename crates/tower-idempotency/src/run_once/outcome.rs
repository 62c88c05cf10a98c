//! The outcome of work for its caller.

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{Outcome, WorkError};
use crate::{
    error::Error,
    execution::Finished,
    record::{NeedsAttention, Record},
    response::{
        self,
        reject::{outcome_pending, outcome_unknown, unfinished_transaction, unreadable_record},
    },
    store::KeyId,
    telemetry,
};

/// Result of work that did not panic.
pub(super) enum WorkResult<T, E> {
    Value(T),
    /// The work returned a value, but a result of its batch is not final.
    UnfinishedBatch(T),
    NeedsAttention(NeedsAttention, E),
    Failed(E),
    /// The work returned a value, but neither committed nor rolled back a transaction.
    Unfinished,
}

/// Outcome of [`execute`](super::execute).
pub(crate) struct RunOutcome<T, E> {
    pub(crate) outcome: Outcome<T, E>,
    /// `true` if a retry may get another outcome.
    pub(crate) can_change: bool,
}

impl<T, E> RunOutcome<T, E> {
    pub(super) fn changeable(outcome: Outcome<T, E>) -> Self {
        Self {
            outcome,
            can_change: true,
        }
    }
}

/// Returns the outcome of a run, from its result and from the way in which its lease finished.
pub(super) fn outcome_of_run<T: DeserializeOwned, E>(
    rules: &response::rules::Rules,
    id: &KeyId,
    result: WorkResult<T, E>,
    finished: Finished,
) -> Result<RunOutcome<T, E>, Error> {
    let outcome = match finished {
        Finished::Own => match result {
            WorkResult::Value(value) => Ok(Outcome::Executed(value)),
            WorkResult::UnfinishedBatch(value) => Ok(Outcome::UnfinishedBatch(value)),
            WorkResult::NeedsAttention(_, error) | WorkResult::Failed(error) => {
                Ok(Outcome::Failed(error))
            }
            WorkResult::Unfinished => Err(unfinished_transaction().with_entry(id)),
        },
        Finished::Committed {
            record,
            is_reported,
        } => {
            if is_reported && let WorkResult::NeedsAttention(late, _) = &result {
                let reason = "a value was committed";
                telemetry::attention_ignored(rules.layer(), id, late.code(), reason);
            }
            outcome_of_commit(rules, id, &record, result)
        }
        Finished::Stored(record)
            if matches!(
                result,
                WorkResult::UnfinishedBatch(_) | WorkResult::Failed(_) | WorkResult::Unfinished
            ) =>
        {
            outcome_of_record(rules, id, &record)
        }
        Finished::Stored(_) => outcome_of_unconfirmed_run(rules, id, result, true),
        Finished::Unknown { retryable } => {
            let outcome = outcome_of_unconfirmed_run(rules, id, result, retryable)?;
            return Ok(RunOutcome {
                outcome,
                can_change: retryable,
            });
        }
    };
    outcome.map(RunOutcome::changeable)
}

impl<T, E> From<Result<T, WorkError<E>>> for WorkResult<T, E> {
    fn from(result: Result<T, WorkError<E>>) -> Self {
        match result {
            Ok(value) => Self::Value(value),
            Err(WorkError::NeedsAttention(attention, error)) => {
                Self::NeedsAttention(attention, error)
            }
            Err(WorkError::Release(error) | WorkError::Orphan(error)) => Self::Failed(error),
        }
    }
}

/// Returns the outcome of a run whose recorded outcome is unknown, or differs from its own result.
fn outcome_of_unconfirmed_run<T, E>(
    rules: &response::rules::Rules,
    id: &KeyId,
    result: WorkResult<T, E>,
    retryable: bool,
) -> Result<Outcome<T, E>, Error> {
    match result {
        WorkResult::Value(value) | WorkResult::UnfinishedBatch(value) => {
            Ok(Outcome::LeaseLost(value))
        }
        WorkResult::NeedsAttention(_, error) | WorkResult::Failed(error) => {
            Ok(Outcome::Unknown(error))
        }
        WorkResult::Unfinished if retryable => Err(outcome_pending(rules).with_entry(id)),
        WorkResult::Unfinished => Err(outcome_unknown().with_entry(id)),
    }
}

/// Returns the outcome of a run that committed `record` itself: the value in the record, or that of `result` if the record
/// is a tombstone.
fn outcome_of_commit<T: DeserializeOwned, E>(
    rules: &response::rules::Rules,
    id: &KeyId,
    record: &Bytes,
    result: WorkResult<T, E>,
) -> Result<Outcome<T, E>, Error> {
    let outcome = recorded_outcome(rules, id, decode(rules, id, record)?)?;
    Ok(match (outcome, result) {
        (Outcome::Replayed(value), _)
        | (
            Outcome::ValueNotRecorded,
            WorkResult::Value(value) | WorkResult::UnfinishedBatch(value),
        ) => Outcome::Executed(value),
        (other, _) => other,
    })
}

/// Returns the outcome of an earlier run from its record.
pub(super) fn outcome_of_record<T: DeserializeOwned, E>(
    rules: &response::rules::Rules,
    id: &KeyId,
    record: &Bytes,
) -> Result<Outcome<T, E>, Error> {
    let (layer, record) = (rules.layer(), decode(rules, id, record)?);
    match &record {
        Record::Tombstone { status, reason } => {
            telemetry::tombstone(layer, id, *status, *reason, None);
        }
        Record::Attention { status, attention } => {
            telemetry::unresolved(layer, id, *status, attention.code(), None);
        }
        Record::Value(_) | Record::Response(_) => {}
    }
    let outcome = recorded_outcome(rules, id, record)?;
    if let Outcome::Replayed(_) = &outcome {
        telemetry::replayed(layer, id, None, None);
    }
    Ok(outcome)
}

fn decode(rules: &response::rules::Rules, id: &KeyId, record: &Bytes) -> Result<Record, Error> {
    let decoded = rules.codec().decode(id, record);
    decoded.map_err(|error| unreadable_record(rules, id, error))
}

fn recorded_outcome<T: DeserializeOwned, E>(
    rules: &response::rules::Rules,
    id: &KeyId,
    record: Record,
) -> Result<Outcome<T, E>, Error> {
    Ok(match record {
        // The parser's message may quote the value. It is replaced by a fixed text.
        Record::Value(value) => {
            let source = "expected a value of another type";
            let value = rmp_serde::from_slice(&value);
            Outcome::Replayed(value.map_err(|_| unreadable_record(rules, id, source))?)
        }
        Record::Tombstone { .. } => Outcome::ValueNotRecorded,
        Record::Attention { attention, .. } => Outcome::NeedsAttention {
            code: attention.code().to_owned(),
        },
        Record::Response(_) => {
            let source = "expected the record of a value, found that of a response";
            return Err(unreadable_record(rules, id, source));
        }
    })
}
