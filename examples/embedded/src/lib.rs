//! A bank in one process and one file. A deposit and its response are committed together. So a client may retry it any
//! number of times, and the process may be killed at any instruction.

mod bank;
mod batch;
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
