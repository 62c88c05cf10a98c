//! Owner and operation of entries, for operators.

use super::budget::Cost;
use crate::store::Claim;

/// Memory of the details of an entry without the bytes of the operation: its share of the map and the allocator overhead.
/// Measured, then rounded up.
const DETAILS_BYTES: usize = 96;

/// Owner and operation of an entry.
pub(super) struct Details {
    pub(super) owner: &'static str,
    pub(super) operation: Box<str>,
}

impl Details {
    pub(super) fn of(claim: &Claim) -> Self {
        Self {
            owner: claim.owner,
            operation: claim.operation.clone(),
        }
    }

    pub(super) const fn cost(&self) -> Cost {
        Self::cost_of(&self.operation)
    }

    pub(super) const fn cost_of(operation: &str) -> Cost {
        Cost {
            entries: 0,
            bytes: DETAILS_BYTES + operation.len(),
        }
    }
}
