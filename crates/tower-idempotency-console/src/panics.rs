//! Panics of a subscriber.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Reports an event to the subscriber. Ignores its panic.
///
/// A subscriber is foreign code. Many events follow a change: a panic must not lose the outcome of the change.
pub(crate) fn catch_report_panic(report: impl FnOnce()) {
    // Unwind safe: a report changes nothing that the console reads.
    let _ = catch_unwind(AssertUnwindSafe(report));
}
