use std::{fmt, future::Future, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};

use crate::{SqlError, timeout::with_timeout};

/// A background task that deletes expired entries. Its drop stops the task.
///
/// The drop takes effect at once, even during a batch. The database then executes that batch completely or not at all.
#[must_use = "a purger stops when it is dropped"]
pub struct Purger {
    task: JoinHandle<()>,
}

impl Purger {
    /// Calls `purge` in each interval, and again at once after a full batch.
    ///
    /// `purge` returns the call that deletes a batch and counts its entries, or [`None`] if the store was dropped.
    pub(crate) fn spawn<F>(
        period: Duration,
        mut purge: impl FnMut() -> Option<F> + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Result<u64, SqlError>> + Send,
    {
        let task = tokio::spawn(async move {
            let mut ticks = interval(period.max(MIN_INTERVAL));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                loop {
                    let Some(batch) = purge() else { return };
                    match with_timeout(batch).await {
                        Ok(deleted) if deleted >= u64::from(BATCH_SIZE) => {}
                        Ok(_) => break,
                        Err(error) => {
                            tracing::warn!(
                                error = &error as &(dyn std::error::Error + 'static),
                                "purge failed, will retry"
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

/// Maximum number of entries that a purger deletes in one statement.
pub(crate) const BATCH_SIZE: u32 = 1000;
const MIN_INTERVAL: Duration = Duration::from_millis(10);
