//! A bank in one process and one file. A deposit and its response are committed together, so that a client may retry it any
//! number of times, and the process may be killed at any instruction.

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
