//! Verification of the whole protocol: a simulation, and the oracle that judges the simulation and the package `fleets`.
//!
//! The model of the lease protocol is in the tests of this package. The tests of the package `tests` do not link any of it.

pub mod oracle;
pub mod simulation;
