//! The counts of all states: one query of the store for all browsers, and the samples of the charts.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::{Instant, sleep},
};
use tower_idempotency::inspect::{Count, Inspect as _, Query, State, Summary};

use crate::{
    console::Shared,
    error::PageError,
    source::{MetricsSource, Totals},
};

/// Counts at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    taken: Instant,
    /// Number of changes that were made before the query.
    changes: u64,
    pub(crate) at: SystemTime,
    pub(crate) states: Result<Vec<StateCount>, String>,
}

/// A state, its entries, and the oldest of them.
#[derive(Clone, Debug)]
pub(crate) struct StateCount {
    pub(crate) state: State,
    /// `None` if the store does not list the state.
    pub(crate) count: Option<Count>,
    pub(crate) oldest: Option<Oldest>,
}

/// Age of the oldest listed entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Oldest {
    pub(crate) age: Duration,
    /// `false` if entries beyond the first page may be older.
    pub(crate) is_exact: bool,
}

/// A sample of the charts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) taken: Instant,
    /// In progress, orphaned and needing attention. `None` if the store failed or does not list the state.
    pub(crate) keys: [Option<Count>; 3],
    pub(crate) totals: Totals,
}

/// States that the overview shows, most urgent first.
pub(crate) const STATES: [State; 4] = [
    State::NeedsAttention,
    State::Orphaned,
    State::InProgress,
    State::Completed,
];

/// Counts beyond this number are shown as `1000+`.
pub(crate) const COUNT_LIMIT: u32 = 1_000;
/// Number of points of a chart.
pub(crate) const POINTS: usize = 60;
/// Largest number of browsers that watch.
const MAX_WATCHERS: usize = 100;

pub(crate) struct Live {
    snapshot: watch::Sender<Option<Arc<Snapshot>>>,
    query: AsyncMutex<()>,
    /// Number of changes by this console. Counts from before the last one are not fresh.
    changes: AtomicU64,
    samples: Mutex<VecDeque<Sample>>,
    closed: watch::Sender<bool>,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            snapshot: watch::Sender::new(None),
            query: AsyncMutex::new(()),
            changes: AtomicU64::new(0),
            samples: Mutex::default(),
            closed: watch::Sender::new(false),
        }
    }
}

impl Live {
    /// Starts the task that samples the store. It ends with the router.
    pub(crate) fn spawn(shared: &Arc<Shared>) {
        let (weak, refresh) = (Arc::downgrade(shared), shared.refresh);
        let period = shared.window / u32::try_from(POINTS).unwrap_or(1);
        tokio::spawn(async move {
            let mut sampled: Option<Instant> = None;
            let mut is_ready = false;
            while let Some(shared) = weak.upgrade() {
                // The first sample with data need not wait for the next period.
                let source = shared.metrics.as_ref();
                let is_first = !is_ready && source.is_some_and(MetricsSource::is_ready);
                is_ready |= is_first;
                let is_due = is_first || sampled.is_none_or(|at| at.elapsed() >= period);
                if is_due {
                    sampled = Some(Instant::now());
                }
                if is_due || shared.live.snapshot.receiver_count() > 0 {
                    let snapshot = shared.live.current(&shared).await;
                    if is_due {
                        shared.live.sample(&shared, &snapshot);
                    }
                }
                drop(shared);
                sleep(refresh.min(period)).await;
            }
        });
    }

    /// Returns the counts of the last query if it ended less than half of the refresh period ago. Otherwise makes a new query,
    /// which concurrent callers share.
    pub(crate) async fn current(&self, shared: &Shared) -> Arc<Snapshot> {
        if let Some(snapshot) = self.fresh(shared) {
            return snapshot;
        }
        let _query = self.query.lock().await;
        if let Some(snapshot) = self.fresh(shared) {
            return snapshot;
        }
        let changes = self.changes.load(Ordering::Acquire);
        let states = count(shared).await.map_err(|error| error.message);
        // After the query, so that callers who waited for a slow one share it.
        let snapshot = Arc::new(Snapshot {
            changes,
            taken: Instant::now(),
            at: SystemTime::now(),
            states,
        });
        self.snapshot.send_replace(Some(Arc::clone(&snapshot)));
        snapshot
    }

    fn fresh(&self, shared: &Shared) -> Option<Arc<Snapshot>> {
        let snapshot = self.snapshot.borrow().clone();
        let changes = self.changes.load(Ordering::Acquire);
        snapshot.filter(|it| it.changes == changes && it.taken.elapsed() < shared.refresh / 2)
    }

    /// Makes the next reader query the store, after a change.
    pub(crate) fn invalidate(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Returns a receiver of the counts and one of the end, or `None` if too many browsers watch.
    pub(crate) fn watch(&self) -> Option<Watch> {
        (self.snapshot.receiver_count() < MAX_WATCHERS).then(|| Watch {
            snapshot: self.snapshot.subscribe(),
            closed: self.closed.subscribe(),
        })
    }

    /// Ends all event streams.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Returns `true` once the console shuts down.
    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    pub(crate) fn samples(&self) -> Vec<Sample> {
        let samples = self.samples.lock();
        let samples = samples.unwrap_or_else(PoisonError::into_inner);
        samples.iter().copied().collect()
    }

    fn sample(&self, shared: &Shared, snapshot: &Snapshot) {
        let value = |state| {
            let states = snapshot.states.as_ref().ok()?;
            let count = states.iter().find(|it| it.state == state)?.count?;
            Some(count).filter(|it| it.is_exact || it.value > 0)
        };
        let source = shared.metrics.as_ref();
        let sample = Sample {
            taken: Instant::now(),
            keys: [State::InProgress, State::Orphaned, State::NeedsAttention].map(value),
            totals: source.map(MetricsSource::take_totals).unwrap_or_default(),
        };
        let samples = self.samples.lock();
        let mut samples = samples.unwrap_or_else(PoisonError::into_inner);
        // One more than there are points, because a rate is the difference of two samples.
        if samples.len() > POINTS {
            samples.pop_front();
        }
        samples.push_back(sample);
    }
}

/// Receivers of a browser.
pub(crate) struct Watch {
    pub(crate) snapshot: watch::Receiver<Option<Arc<Snapshot>>>,
    pub(crate) closed: watch::Receiver<bool>,
}

async fn count(shared: &Shared) -> Result<Vec<StateCount>, PageError> {
    let abilities = shared.inspector.abilities();
    let summary: Summary = shared.call(shared.inspector.summary(COUNT_LIMIT)).await?;
    let mut states = Vec::with_capacity(STATES.len());
    for state in STATES {
        let count = summary.count(state);
        let oldest = if state == State::Completed || !abilities.can_list(state) {
            None
        } else {
            let page = shared
                .call(shared.inspector.list(&Query::new(state)))
                .await?;
            let ages = page.entries.iter().filter(|it| it.state() == state);
            let age = ages.map(|entry| entry.age).max();
            age.map(|age| Oldest {
                age,
                is_exact: page.next.is_none(),
            })
        };
        states.push(StateCount {
            state,
            count,
            oldest,
        });
    }
    Ok(states)
}
