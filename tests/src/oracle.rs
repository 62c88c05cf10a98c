//! Whether what happened may happen, as far as it can be seen from outside: by clients, by whoever counts effects, and by
//! whoever makes things go wrong.

pub use self::{
    history::{Attempt, Effect, History, Occasion, Outcome, Strike},
    judge::Sums,
};

mod doubles;
mod history;
mod judge;
