//! Observation: judges requests that pass through, as if they were enforced.
//!
//! Nothing here changes a request or a response. Bodies are observed as they pass: no frame is delayed, and none is
//! requested that the handler or the server does not read. A request is not judged if this leaves its treatment unknown.
//! Store calls run in tasks, concurrently with the handler. [`Observer`] bounds their number, and the bytes that
//! observations store.
//!
//! 1. [`observe`] judges the head. The body of the request is then watched.
//! 2. When the body is complete, [`Observation`] acquires a lease under an ID of its own.
//! 3. [`ObservedCall`] gets the response, and its body is watched too.
//! 4. When both are known, [`Observation`] ends the lease, or compares the response with that of the first execution.

mod call;
mod observation;
mod observer;
mod outcome;
mod request;

pub(crate) use self::{call::ObservedCall, observer::Observer, request::observe};
