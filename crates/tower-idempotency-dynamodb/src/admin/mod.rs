//! Operations for operators.

mod list;
mod resolve;

pub use self::{
    list::{Entry, Listing},
    resolve::Resolution,
};
