//! Judges if an observed history is allowed. The observers are outside: clients, the counter of effects, and the fault
//! injectors.
//!
//! ```text
//! a fleet under load, in tests and campaigns ─┐
//!                                             ├─> History -> violations, key by key
//! a run of the simulation, at its end ────────┘
//! ```
//!
//! The oracle sees no lease, no token and nothing of the store. It can therefore judge real servers. It knows the time
//! of most events only as a span. Some facts are invisible to the oracle: the lease holder, the stored record, and the
//! takeover that is reported to a handler. The simulation judges these with an additional [inside
//! oracle](crate::simulation).

pub use self::{
    history::{Attempt, Effect, History, Occasion, Outcome, Strike},
    sums::Sums,
};

#[cfg(test)]
mod builder;
mod excess_effects;
mod history;
mod judge;
mod sums;
