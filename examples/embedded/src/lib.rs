//! A bank in one process and one file: what a deposit writes and what it answers are committed together, so that a client
//! may send it again and again, and the process may be killed at any instruction.

mod bank;
mod careless;
mod failure;
mod serve;
mod stop;

pub use self::{
    bank::{Bank, app},
    careless::careless,
    failure::Failure,
    serve::{GRACE, serve},
    stop::StopPoint,
};
