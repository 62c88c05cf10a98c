//! Runs a case.

use std::time::Duration;

use tokio::{runtime::Builder, time::timeout};

use super::{Subject, cases};
use crate::store::Store;

/// The runtime of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Threads {
    /// One thread; its clock may be paused.
    One {
        /// Whether it is.
        start_paused: bool,
    },
    /// Four threads, so that a race is one.
    Four,
}

/// Runs a case on a runtime of its own.
///
/// # Panics
///
/// When the case does, or has not ended after ten minutes of its clock.
pub fn run(threads: Threads, case: impl Future<Output = ()>) {
    let runtime = match threads {
        Threads::One { start_paused } => Builder::new_current_thread()
            .enable_all()
            .start_paused(start_paused)
            .build(),
        Threads::Four => Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build(),
    };
    let runtime = runtime.expect("a test can have a runtime");
    let ended = runtime.block_on(async { timeout(PATIENCE, case).await });
    ended.expect("a case ends");
}

macro_rules! call_in_turn {
    ({ $subject:ident } paced [$($paced:ident)*] threaded [$($threaded:ident)*]) => {
        $( cases::$paced($subject).await; )*
        $( cases::$threaded($subject).await; )*
    };
}

/// Runs every case on one store, one after the other, up to the first that panics.
///
/// [`conformance_tests!`](crate::conformance_tests) says more: it names each failure, and runs the cases through faults
/// and on several threads too.
///
/// # Panics
///
/// When the store breaks the contract.
pub async fn every_case<S: Store>(subject: &Subject<S>) {
    crate::__conformance_cases! { [call_in_turn] subject }
}

const PATIENCE: Duration = Duration::from_secs(600);
