//! Verification of the whole protocol: a simulation, fleets of processes under faults, and the oracle that judges both.
//!
//! The model of the lease protocol is in the tests of this package. The tests of the package `tests` do not link any of it.

pub mod campaign;
pub mod clients;
pub mod exactly_once;
pub mod fleet;
pub mod oracle;
pub mod simulation;
