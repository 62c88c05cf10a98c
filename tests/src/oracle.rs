//! Whether what happened may happen, as far as it can be seen from outside: by clients, by whoever counts effects, and by
//! whoever makes things go wrong.
//!
//! ```text
//! a fleet under load, in tests and campaigns ─┐
//!                                             ├─> History -> what may not be in it, key by key
//! a run of the simulation, when it is over ───┘
//! ```
//!
//! It sees no lease, no token and nothing of the store, so it can judge real servers, and knows moments only as spans. For
//! what it cannot see, such as who holds a lease, what is stored, and what a handler is told of a takeover, the simulation
//! has an [oracle inside](crate::simulation) besides.

pub use self::{
    history::{Attempt, Effect, History, Occasion, Outcome, Strike},
    sums::Sums,
};

mod doubles;
mod history;
mod judge;
mod sums;
#[cfg(test)]
mod told;
