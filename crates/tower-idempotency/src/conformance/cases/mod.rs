//! The cases, grouped by the part of the contract that they test. The number at the start of a case's documentation is
//! its rule in [`Store`](crate::store::Store).

pub(super) mod cancellation;
mod leases;
mod orphans;
pub(super) mod races;
mod records;
mod releases;
mod replies;
pub(super) mod waiters;

pub use self::{
    cancellation::*, leases::*, orphans::*, races::*, records::*, releases::*, waiters::*,
};
use crate::store::Acquired;

/// Grant of an absent entry.
pub(super) const FIRST: Acquired = Acquired::Granted {
    generation: 1,
    takeover: false,
};
/// Grant of the first takeover.
pub(super) const SECOND: Acquired = Acquired::Granted {
    generation: 2,
    takeover: true,
};
/// Grant of the second takeover.
pub(super) const THIRD: Acquired = Acquired::Granted {
    generation: 3,
    takeover: true,
};
