mod attempt;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Once},
    time::Duration,
};

use http::Response;
use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, interval},
};
use tower_idempotency::{
    Error, ExecutionFailure, IdempotencyLayer, Lease, TakeOverOutcome,
    store::{Claim, Ttl},
};

pub use self::attempt::SweepStats;
use self::attempt::{OrphanOutcome, Running, Tally, catch_panic};
use crate::{
    Checkpoint, SqlError, SqlStore,
    backend::{OrphanQuery, OrphanRow},
    timeout::with_timeout,
    warning::{WarningLimit, catch_report_panic},
};

/// Finishes abandoned requests: finds orphans and executes each one again, without its client.
///
/// A process that died leaves orphans. So does an execution that wrote a checkpoint and ended without a record. The
/// client may retry and take the orphan over; a completer does not wait for that. The response of the completer's work
/// is recorded like a handler's response. A later retry of the client gets it. A gRPC response is judged by its HTTP
/// status, which is always 200: return an error for a call that may succeed later.
///
/// A completer may run on every replica: only one of them takes an orphan over. If the work fails, the entry remains an
/// orphan and is retried after a delay. The delay doubles with each takeover, from
/// [`with_min_age`](Self::with_min_age) up to 64 times that, so a request that always fails causes little load. It is at most
/// half of the orphan retention of the entry, or the minimum age if that is longer. Each attempt restarts the orphan retention,
/// and does not change its length. So an orphan does not expire between two attempts if a sweep begins in the rest of it.
///
/// Entries of [`run_once`](IdempotencyLayer::run_once) and of the items of a batch are skipped: their callers expect a value,
/// and not a response. Entries of observed requests are skipped too. So are orphans whose
/// [retry](tower_idempotency::inspect::Resolution::Retry) an operator allows: it is for the next request of the client. Use
/// [`take_over`](IdempotencyLayer::take_over) if that client does not retry: otherwise the orphan expires.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn completing(store: tower_idempotency_sqlx::PostgresStore, layer: tower_idempotency::IdempotencyLayer, pool: tower_idempotency_sqlx::sqlx::PgPool) {
/// use std::time::Duration;
///
/// use http::Response;
/// use tower_idempotency_sqlx::{CommitError, Completer, Orphan};
///
/// let ride_store = store.clone();
/// let completer = Completer::new(&store, &layer, move |orphan: Orphan| {
///     let (store, pool) = (ride_store.clone(), pool.clone());
///     async move {
///         if orphan.operation() != "POST /rides" {
///             return Err("an operation of another service".into());
///         }
///         let finish = async {
///             let tx = store.begin(orphan.lease(), &pool).await?;
///             // Execute the phases after orphan.checkpoint().
///             let committed = tx.commit(Response::new("ride".to_owned())).await;
///             // With `?`, each sweep would repeat the statements of a transaction that had ended.
///             let res = committed.unwrap_or_else(CommitError::into_response);
///             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(res)
///         };
///         tokio::time::timeout(Duration::from_secs(30), finish).await?
///     }
/// });
/// let task = completer.spawn(Duration::from_secs(30)); // runs until the drop of `task`
/// # std::mem::forget(task);
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a completer does nothing until it sweeps"]
pub struct Completer<S> {
    store: S,
    layer: IdempotencyLayer,
    take_over: Arc<TakeOver>,
    min_age: Duration,
    concurrency: usize,
    panics: Arc<WarningLimit>,
    retention_check: Arc<Once>,
}

type TakeOver = dyn Fn(IdempotencyLayer, OrphanRow, Claim) -> TakeOverFuture + Send + Sync;
type TakeOverFuture = Pin<Box<dyn Future<Output = Result<OrphanOutcome, Error>> + Send>>;

/// An orphan that the completer has taken over. The work gets it as its argument.
#[derive(Debug)]
pub struct Orphan {
    lease: Lease,
    age: Duration,
    operation: String,
    checkpoint: Option<Checkpoint>,
}

impl Orphan {
    /// Returns the lease of the takeover. [`Lease::derive`] returns the same keys as in the first execution.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the time since the first lease of the request, by the store's clock when the sweep read the orphan.
    ///
    /// Attempts do not change it, and restart the orphan retention. So compare it with the time for which the work is useful,
    /// and then return a response that is recorded. Otherwise an orphan that cannot be finished may never expire.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age
    }

    /// Returns the method and the route of the request, such as `POST /rides/{id}`, cut at 128 bytes. Without a route, the
    /// path without the query.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }

    /// Returns the last checkpoint, if there is one.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }
}

impl<S: SqlStore> Completer<S> {
    /// Creates a completer that finishes the orphans in `store` with `work`, under leases of `layer`.
    ///
    /// Pass the layer that serves the routes: its settings decide how long leases and records last and which responses
    /// are recorded. `work` returns a response and may commit in a transaction, like a handler.
    ///
    /// If `work` panics, returns an error, or returns a response that the layer does not record, a later sweep retries the
    /// orphan. [`with_failure`](IdempotencyLayer::with_failure) does not change that. Log the error in `work`: the completer logs
    /// only the entry and a reason such as `error`. If only a person can finish the orphan, return a response with
    /// [`NeedsAttention`](tower_idempotency::NeedsAttention).
    ///
    /// Limit the time of `work`, for example by `tokio::time::timeout`. Work that never ends holds its lease, and counts for
    /// [`with_concurrency`](Self::with_concurrency).
    ///
    /// `work` gets all orphans of the store. If several services or layers share a table, each needs a completer that returns
    /// an error for the operations of others. Such an attempt keeps the orphan retention of the entry. But it counts as a
    /// takeover, which delays the right completer, and operators see this process as the owner. A table for each service
    /// avoids that.
    pub fn new<W, F, B, E>(store: &S, layer: &IdempotencyLayer, work: W) -> Self
    where
        W: Fn(Orphan) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: http_body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Send,
        E: Send + 'static,
    {
        // An error may mean that the orphan belongs to another service. An operator cannot decide about it.
        let layer = layer.clone().with_failure(ExecutionFailure::Release);
        let (orphan_store, work) = (store.clone(), Arc::new(work));
        let take_over =
            move |mut layer: IdempotencyLayer, row: OrphanRow, claim: Claim| -> TakeOverFuture {
                let (store, work) = (orphan_store.clone(), Arc::clone(&work));
                // The orphan may be that of another layer, which needs it for longer.
                if let Some(retention) = row.orphan_retention() {
                    layer = layer.with_orphan_retention(retention);
                }
                Box::pin(async move {
                    let work = move |lease: Lease| async move {
                        // Another execution took the orphan over after the query and ended without an outcome. Its delay
                        // must pass before the next attempt.
                        if lease.generation() != row.generation.unsigned_abs() + 1 {
                            return Err(OrphanOutcome::TakenElsewhere);
                        }
                        let checkpoint = Checkpoint::last(&store, &lease).await;
                        let orphan = Orphan {
                            lease,
                            age: row.age(),
                            operation: row.operation,
                            checkpoint: checkpoint.map_err(|_| OrphanOutcome::Failed("store"))?,
                        };
                        let worked = work(orphan).await;
                        worked.map_err(|_| OrphanOutcome::Failed("error"))
                    };
                    Ok(match layer.take_over(claim, work).await? {
                        TakeOverOutcome::Executed(_) => OrphanOutcome::Executed,
                        TakeOverOutcome::Failed(outcome) => outcome,
                        _ => OrphanOutcome::TakenElsewhere,
                    })
                })
            };
        Self {
            store: store.clone(),
            layer,
            take_over: Arc::new(take_over),
            min_age: Duration::from_secs(60),
            concurrency: 4,
            panics: Arc::default(),
            retention_check: Arc::new(Once::new()),
        }
    }

    /// Sets the time for which a lease must have expired before its orphan is executed. Default: 1 minute.
    ///
    /// If the value is too short, the completer takes orphans from clients that would have retried and seen the
    /// response at once. If it is too long, abandoned requests stay unfinished for that time. If the
    /// [orphan retention](IdempotencyLayer::with_orphan_retention) is not longer, orphans expire before they are due.
    ///
    /// The first call of [`sweep`](Self::sweep) or [`spawn`](Self::spawn) logs a warning if orphans may expire before a sweep.
    pub fn with_min_age(self, min_age: Duration) -> Self {
        let min_age = min_age.min(Ttl::MAX.as_duration());
        Self { min_age, ..self }
    }

    /// Sets the maximum number of orphans that this process executes at the same time. Default: 4; at least 1.
    pub fn with_concurrency(self, concurrency: usize) -> Self {
        let concurrency = concurrency.max(1);
        Self {
            concurrency,
            ..self
        }
    }

    /// Executes all orphans that are due when the sweep begins, oldest first, and returns their counts.
    ///
    /// Ends early if the layer rejects new executions, for example while it drains.
    ///
    /// # Errors
    ///
    /// If the store fails to list the orphans.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the sweep takes over no further orphans. Executions that have begun continue in tasks of
    /// their own; [`drain`](IdempotencyLayer::drain) waits for them.
    pub async fn sweep(&self) -> Result<SweepStats, SqlError> {
        self.check_retention(Duration::ZERO);
        let (mut running, mut tally) = (Running::new(), Tally::default());
        let mut continues = self.start_due(&mut running, &mut tally).await?;
        while continues && !running.is_empty() {
            continues = tally.add(running.join_next().await, &self.panics);
        }
        Ok(tally.stats)
    }

    /// Logs a warning if orphans of the layer may expire before a sweep finds them due. Sweeps begin at intervals of `period`.
    ///
    /// Only the first call checks.
    fn check_retention(&self, period: Duration) {
        let check = || {
            let orphan_retention = self.layer.policy().orphan_retention;
            let longest_delay = self.min_age.saturating_mul(1 << MAX_DOUBLINGS);
            let longest_delay = longest_delay.min(self.min_age.max(orphan_retention / 2));
            if orphan_retention.saturating_sub(longest_delay) <= period {
                let min_age = self.min_age;
                tracing::warn!(
                    ?orphan_retention,
                    ?min_age,
                    ?period,
                    "orphan retention too short for the completer: orphans may expire before they are due"
                );
            }
        };
        // The policy calls closures of the settings.
        self.retention_check.call_once(|| catch_report_panic(check));
    }

    /// Starts the work of all orphans that are due now, oldest first. Adds the outcomes of work that ends meanwhile.
    ///
    /// Returns `false` if the sweep must end early.
    async fn start_due(&self, running: &mut Running, tally: &mut Tally) -> Result<bool, SqlError> {
        let mut query = OrphanQuery {
            min_age: self.min_age,
            ended_before: None,
            after: None,
            limit: PAGE_SIZE,
        };
        loop {
            let orphans = with_timeout(self.store.orphans(&query)).await?;
            // An orphan whose work fails may be due again at once. The next sweep retries it, so that this one ends.
            query.ended_before = query
                .ended_before
                .or(orphans.first().map(|first| first.read_at));
            query.after = orphans.last().map(|last| (last.lease_ends, last.id));
            let is_last = orphans.len() < PAGE_SIZE as usize;
            for orphan in orphans {
                tally.stats.due += 1;
                if running.len() >= self.concurrency
                    && !tally.add(running.join_next().await, &self.panics)
                {
                    return Ok(false);
                }
                let (completer, query) = (self.clone(), query.clone());
                running.spawn(async move {
                    let id = orphan.id;
                    (id, catch_panic(completer.finish(orphan, &query)).await)
                });
            }
            if is_last {
                return Ok(true);
            }
        }
    }

    /// Starts a task that sweeps in intervals of `period`. The drop of the returned value stops it.
    ///
    /// Failures, and responses that the layer does not record, are logged at most once a second. A later sweep retries their
    /// orphans. Each sweep costs one index search. Each attempt costs at most three queries in addition to its execution.
    ///
    /// A sweep starts the work of the orphans that are due, and does not wait for its end. Work that takes longer than `period`,
    /// or never ends, delays later sweeps only if [`with_concurrency`](Self::with_concurrency) allows no more work.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    pub fn spawn(self, period: Duration) -> CompleterTask {
        self.check_retention(period);
        let (failed_orphans, failed_queries) = (WarningLimit::default(), WarningLimit::default());
        let task = tokio::spawn(async move {
            let mut ticks = interval(period.max(MIN_INTERVAL));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let (mut running, mut tally) = (Running::new(), Tally::default());
            loop {
                let swept = tokio::select! {
                    biased;
                    outcome = running.join_next(), if !running.is_empty() => {
                        tally.add(outcome, &self.panics);
                        if !running.is_empty() {
                            continue;
                        }
                        Ok(true)
                    }
                    _ = ticks.tick() => self.start_due(&mut running, &mut tally).await,
                };
                match swept {
                    Ok(_) => {
                        let Tally { stats, last_failed } = std::mem::take(&mut tally);
                        let failures = stats.failed + stats.not_recorded;
                        if let Some((id, reason)) = last_failed
                            && let Some(count) = failed_orphans.add(failures)
                        {
                            catch_report_panic(|| {
                                tracing::warn!(%id, reason, count, "orphan recovery failed, will retry");
                            });
                        }
                    }
                    Err(error) => {
                        if let Some(count) = failed_queries.add(1) {
                            let error = &error as &(dyn std::error::Error + 'static);
                            catch_report_panic(|| {
                                tracing::warn!(error, count, "orphan query failed, will retry");
                            });
                        }
                    }
                }
            }
        });
        CompleterTask { task }
    }

    async fn finish(&self, orphan: OrphanRow, query: &OrphanQuery) -> Result<OrphanOutcome, Error> {
        // The orphan was read a while ago. If another replica has tried it since and failed, its delay must pass first.
        match with_timeout(self.store.is_due(&orphan, query)).await {
            Ok(true) => {}
            Ok(false) => return Ok(OrphanOutcome::TakenElsewhere),
            Err(_) => return Ok(OrphanOutcome::Failed("store")),
        }
        let Ok(mut claim) = Claim::new(orphan.id, orphan.fingerprint) else {
            return Ok(OrphanOutcome::Failed("store"));
        };
        claim.operation = orphan.operation.clone().into();
        let outcome = (self.take_over)(self.layer.clone(), orphan.clone(), claim).await?;
        let is_executed = matches!(outcome, OrphanOutcome::Executed);
        if is_executed && self.is_orphan_again(orphan).await {
            return Ok(OrphanOutcome::NotRecorded);
        }
        Ok(outcome)
    }

    /// Returns `true` if the attempt on this orphan has ended without a record. Returns `false` if the store fails.
    async fn is_orphan_again(&self, mut orphan: OrphanRow) -> bool {
        orphan.generation += 1;
        let query = OrphanQuery {
            min_age: Duration::ZERO,
            ended_before: None,
            after: None,
            limit: 1,
        };
        let is_orphan = with_timeout(self.store.is_due(&orphan, &query)).await;
        is_orphan.unwrap_or(false)
    }
}

impl<S> fmt::Debug for Completer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completer")
            .field("min_age", &self.min_age)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// A background task that sweeps. Its drop stops the sweeps; executions that have begun continue.
#[must_use = "the completer stops when its task is dropped"]
pub struct CompleterTask {
    task: JoinHandle<()>,
}

impl Drop for CompleterTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for CompleterTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompleterTask").finish_non_exhaustive()
    }
}

/// Condition that the entry is that of an executed request. The records of `run_once` and of the items of a batch are values.
/// The response of an observed request is not replayed.
pub(crate) const IS_OF_REQUEST: &str =
    "operation <> 'run_once' and operation not like 'item: %' and operation not like 'observed: %'";

/// Maximum number of doublings of the delay between attempts: 64 times the minimum age.
pub(crate) const MAX_DOUBLINGS: u32 = 6;
const PAGE_SIZE: u32 = 100;
const MIN_INTERVAL: Duration = Duration::from_millis(10);
