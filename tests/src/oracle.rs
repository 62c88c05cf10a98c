//! Whether what happened may happen, as far as it can be seen from outside: by clients, by whoever counts effects, and by
//! whoever makes things go wrong.
//!
//! ```text
//! a fleet under load, in tests and campaigns ─┐
//!                                             ├─> History -> what may not be in it, key by key
//! a run of the simulation, when it is over ───┘
//! ```
//!
//! It sees no lease, no token and nothing of the store, so it can judge real servers, and knows moments only as spans. What
//! it cannot see (who holds a lease, what is stored, whether a handler was told of a takeover, who waits for nothing) the
//! simulation has an oracle of its own for,.

pub use self::{
    history::{Attempt, Effect, History, Occasion, Outcome, Strike},
    judge::Sums,
};

mod doubles;
mod history;
mod judge;
#[cfg(test)]
mod told;
