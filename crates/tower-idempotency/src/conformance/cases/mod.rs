//! The cases, grouped by the part of the contract that they test. The number at the start of a case's documentation is
//! its rule in [`Store`](crate::store::Store).

mod cancellation;
mod leases;
mod orphans;
mod races;
mod records;
mod releases;
mod waiters;

pub use self::{
    cancellation::*, leases::*, orphans::*, races::*, records::*, releases::*, waiters::*,
};
