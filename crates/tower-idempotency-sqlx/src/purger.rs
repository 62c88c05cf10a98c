use std::{fmt, future::Future, time::Duration};

use tokio::{
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep},
};

use crate::{
    SqlError,
    timeout::with_timeout,
    warning::{WarningLimit, catch_report_panic},
};

/// A background task that deletes expired entries. Its drop stops the task.
///
/// The drop takes effect at once, even during a batch. The database then executes that batch completely or not at all.
#[must_use = "a purger stops when it is dropped"]
pub struct Purger {
    task: JoinHandle<()>,
}

impl Purger {
    /// Calls `purge` in each interval. If more entries may be left, or after a failure, it pauses and calls `purge` again.
    ///
    /// `purge` takes the maximum number of entries, and returns the call that deletes a batch. The call returns `true` if more
    /// expired entries may be left. `purge` returns [`None`] if the store was dropped.
    pub(crate) fn spawn<F>(
        period: Duration,
        mut purge: impl FnMut(u32) -> Option<F> + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Result<bool, SqlError>> + Send,
    {
        let failures = WarningLimit::default();
        let task = tokio::spawn(async move {
            let mut ticks = interval(period.max(MIN_INTERVAL));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut size = BATCH_SIZE;
            loop {
                ticks.tick().await;
                loop {
                    let Some(batch) = purge(size) else { return };
                    let began = Instant::now();
                    let pause = match with_timeout(batch).await {
                        Ok(has_more) => {
                            size = (size * 2).min(BATCH_SIZE);
                            if !has_more {
                                break;
                            }
                            began.elapsed() * PAUSE
                        }
                        Err(error) => {
                            if let Some(count) = failures.add(1) {
                                catch_report_panic(|| {
                                    tracing::warn!(
                                        error = &error as &(dyn std::error::Error + 'static),
                                        count,
                                        "purge failed, will retry"
                                    );
                                });
                            }
                            if size == 1 {
                                break;
                            }
                            // The server may limit the size of a transaction, or be too slow for this batch.
                            size = (size / 10).max(1);
                            (began.elapsed() * PAUSE).min(period)
                        }
                    };
                    sleep(pause).await;
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
/// A pause is this many times as long as the batch before it. A purger with many entries to delete then uses a fifth of the time,
/// and the calls of requests get the rest.
pub(crate) const PAUSE: u32 = 4;

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn full_batches_use_fifth_of_time() {
        const BATCHES: u32 = 10;
        let batch = Duration::from_millis(50);
        let purged = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&purged);
        let began = Instant::now();
        let _purger = Purger::spawn(HOUR, move |_| {
            let purged = Arc::clone(&counted);
            Some(async move {
                sleep(batch).await;
                let is_last = purged.fetch_add(1, Ordering::SeqCst) + 1 == BATCHES;
                Ok(!is_last)
            })
        });
        while purged.load(Ordering::SeqCst) < BATCHES {
            sleep(Duration::from_millis(1)).await;
        }
        let took = began.elapsed();
        assert!(took >= batch * (BATCHES * 5 - 4), "{took:?}");
        // The next interval has not begun.
        assert!(took < Duration::from_secs(60), "{took:?}");
    }

    /// Runs a purger for an hour and a half. Batches above the limit fail, and more entries are left after each other one.
    /// Returns the sizes of the first batches, and the number of all batches.
    async fn sizes_of_batches(limit: u32) -> (Vec<u32>, usize) {
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&sizes);
        let purger = Purger::spawn(HOUR, move |size| {
            seen.lock().expect("no panic").push(size);
            Some(async move {
                sleep(Duration::from_secs(1)).await;
                if size > limit {
                    return Err(SqlError::unreadable("too many rows"));
                }
                Ok(true)
            })
        });
        sleep(HOUR * 3 / 2).await;
        drop(purger);
        let mut sizes = std::mem::take(&mut *sizes.lock().expect("no panic"));
        let number = sizes.len();
        sizes.truncate(9);
        (sizes, number)
    }

    #[tokio::test(start_paused = true)]
    async fn failed_batch_is_retried_with_fewer_entries() {
        let (sizes, number) = sizes_of_batches(350).await;
        assert_eq!(sizes, [1000, 100, 200, 400, 40, 80, 160, 320, 640]);
        // Each batch takes a second, and a pause four.
        assert!((1_079..=1_081).contains(&number), "{number}");
    }

    #[tokio::test(start_paused = true)]
    async fn failure_of_single_entry_ends_interval() {
        let (sizes, _) = sizes_of_batches(0).await;
        assert_eq!(sizes, [1000, 100, 10, 1, 1]);
    }

    const HOUR: Duration = Duration::from_secs(3600);
}
