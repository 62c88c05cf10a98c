//! Verification on real servers: fleets of processes, and clients with an outbox, under faults that are injected repeatedly.
//!
//! The oracle that judges the fleets is in the package `verification`, because it also judges the simulation.

pub mod campaign;
pub mod exactly_once;
pub mod fleet;
pub mod outbox_clients;
