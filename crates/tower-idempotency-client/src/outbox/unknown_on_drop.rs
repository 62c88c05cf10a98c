//! The outcome of a call that is dropped while its request is stored.

use crate::operation::{Operation, Outcome};

/// Marks an operation as unknown when it is dropped, because its entry may be stored and sent by a recovery.
///
/// The response of a definite operation is marked as lost, because its entry may be removed.
pub(super) struct UnknownOnDrop {
    operation: Option<Operation>,
    /// The call has a response that its caller does not have yet.
    pub(super) has_response: bool,
}

impl UnknownOnDrop {
    pub(super) fn new(operation: &Operation) -> Self {
        Self {
            operation: Some(operation.clone()),
            has_response: false,
        }
    }

    /// Leaves the operation unchanged.
    pub(super) fn disarm(mut self) {
        self.operation = None;
    }
}

impl Drop for UnknownOnDrop {
    fn drop(&mut self) {
        if let Some(operation) = &self.operation {
            if self.has_response && operation.outcome() == Outcome::Definite {
                operation.set_response_lost();
            } else {
                operation.open_attempt();
            }
        }
    }
}
