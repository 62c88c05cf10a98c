//! Conformance suite for stores.
//!
//! Feature `conformance`. **Not a stable part of the API**: a release may add cases and may change any name in this module.
//! A store that violates the contract may pass today, and fail a new case later.
//!
//! Each rule of the [contract](crate::store::Store) that affects replies has cases in [`cases`], except rule 10. No case tests
//! transactions, checkpoints, or the cost of a listing. A case is a plain `async fn` over a [`Subject`].
//! [`conformance_tests!`](crate::conformance_tests) defines a test for each case. It also runs the cases through
//! [`FaultInjector`], which loses calls and replies: a retried call must have the same result as a single call.
//!
//! A store that passes follows the rules on the server under test, as far as a few seconds of races can show. With one
//! client, the races do not show if calls of several processes are atomic: test a store on a server with [`Processes`]. The
//! suite does not test a server that loses acknowledged writes, or fails over to a replica that lacks them.
//!
//! Two rules depend on limits of the store:
//!
//! - No case exceeds the limit of one scope (rule 10).
//! - If the store accepts a record of 1 MiB, the suite sees no rejection for size (rule 9). If the limit is a setting, also run
//!   the case [`large_record_is_stored_or_rejected_for_size`](cases::large_record_is_stored_or_rejected_for_size) with a lower
//!   limit.
//!
//! # Operators
//!
//! A store that implements [`Inspect`](crate::inspect::Inspect) also passes [`inspect_cases`].
//! [`inspect_conformance_tests!`](crate::inspect_conformance_tests) defines a test for each of them.
//!
//! # Custom stores
//!
//! The smallest store that passes is a map under a lock in one process, without limits and without removal of expired
//! entries. `docs/stores/writing-a-store.md` applies the same rules to a server.
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
pub mod inspect_cases;
mod inspect_macros;
mod macros;
mod processes;
mod runner;
mod subject;

pub use self::{
    any_store::AnyStore,
    clock::ManualClock,
    processes::Processes,
    runner::{Case, CaseRuntime, every_case, run},
    subject::Subject,
};
/// Hook of the simulation.
#[doc(hidden)]
pub use crate::clock::seeded::seed_jitter;
#[doc(no_inline)]
pub use crate::faults::{Fault, FaultInjector, Hold, InjectedFault, Operation, Plan};
