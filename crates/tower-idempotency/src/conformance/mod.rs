//! The suite that every store passes.
//!
//! Feature `conformance`. **Not a stable part of the API**: a release may add cases, which a store that broke the
//! contract unnoticed then fails, and may change any name in this module.
//!
//! Each rule of the [contract](crate::store::Store) that shows in answers has cases in [`cases`], each a plain `async fn`
//! over a [`Subject`].
//! [`conformance_tests!`](crate::conformance_tests) makes a test of each, and runs the same cases through [`FaultInjector`],
//! which loses calls and replies: whoever makes a call again must end where one call would have.
//!
//! Passing says that the store keeps the rules on the server the tests ran against, as far as a few seconds of racing
//! show. It says nothing about a server that loses acknowledged writes, or fails over to one that lacks them.
//!
//! # A store of your own
//!
//! The smallest store that passes: one process, a map under a lock, no bounds, and nobody takes away what is over.
//! `docs/writing-a-store.md` walks through the same rules for a server.
//!
//! ```
#![doc = include_str!("example.rs")]
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! use tower_idempotency::conformance::{Subject, every_case};
//!
//! every_case(Subject::new(MapStore::default()).with_push(false)).await;
//! # }
//! ```

mod any_store;
pub mod cases;
mod clock;
mod faults;
mod macros;
mod runner;
mod subject;

pub use self::{
    any_store::AnyStore,
    clock::ManualClock,
    faults::{Fault, FaultInjector, InjectedFault, Operation, Plan},
    runner::{Case, Threads, every_case, run},
    subject::Subject,
};
pub use crate::clock::seeded::seed_jitter;
