//! The cases, by the part of the contract they check. The number in a case's first line is the rule's in
//! [`Store`](crate::store::Store).

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
