use std::future::pending;

use clap::ValueEnum;

/// A point in the handler at which a test can make the process stop, in order to kill it exactly there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[expect(clippy::exhaustive_enums, reason = "of an example")]
pub enum StopPoint {
    /// The deposit is written, and its transaction is open.
    BeforeCommit,
    /// The commit has ended, and the handler has not returned.
    AfterCommit,
}

impl StopPoint {
    /// Returns at once unless `chosen` is this point. Otherwise prints `stopped`, and never returns.
    pub(crate) async fn reach(self, chosen: Option<Self>) {
        if chosen == Some(self) {
            println!("stopped");
            pending::<()>().await;
        }
    }
}
