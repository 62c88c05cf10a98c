//! The cases, grouped by the part of the contract that they test. The number at the start of a case's documentation is
//! its rule in [`Store`](crate::store::Store).

pub(super) mod cancellation;
mod leases;
mod orphans;
pub(super) mod races;
mod records;
mod releases;
pub(super) mod waiters;

pub use self::{
    cancellation::*, leases::*, orphans::*, races::*, records::*, releases::*, waiters::*,
};
