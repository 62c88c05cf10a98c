use std::{fmt, future::Future, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use crate::{SqlError, bounded::bounded};

/// Purges in the background for as long as it is kept.
///
/// Dropped, it purges no more: at once, in the middle of a batch too, which the database then does or does not.
#[must_use = "a purger stops when it is dropped"]
pub struct Purger {
    task: JoinHandle<()>,
}

impl Purger {
    /// `purge` is asked again and again; it answers how many it deleted, or that the store is gone.
    pub(crate) fn spawn<F>(
        every: Duration,
        mut purge: impl FnMut() -> Option<F> + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Result<u64, SqlError>> + Send,
    {
        let task = tokio::spawn(async move {
            let mut ticks = interval(every.max(SHORTEST));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                loop {
                    let Some(purging) = purge() else { return };
                    match bounded(purging).await {
                        Ok(deleted) if deleted >= u64::from(BATCH) => {}
                        Ok(_) => break,
                        Err(error) => {
                            tracing::warn!(
                                error = &error as &(dyn std::error::Error + 'static),
                                "expired entries stay for now"
                            );
                            break;
                        }
                    }
                }
            }
        });
        Self { task }
    }
}

impl Drop for Purger {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Purger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Purger").finish_non_exhaustive()
    }
}

/// How many a purger deletes in one statement.
pub(crate) const BATCH: u32 = 1000;
const SHORTEST: Duration = Duration::from_millis(10);
