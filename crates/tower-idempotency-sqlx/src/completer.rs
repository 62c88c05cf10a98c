use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use http::Response;
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{MissedTickBehavior, interval},
};
use tower_idempotency::{
    Error, ErrorKind, IdempotencyLayer, Lease, TakeOverOutcome,
    store::{Claim, Fingerprint, KeyId, Ttl},
};

use crate::{Checkpoint, SqlError, SqlStore, bounded::bounded};

/// Finishes what was abandoned: finds orphans, and executes each again without its client.
///
/// An orphan is left behind by a process that died, and by an execution that ended without a record after it had written a
/// checkpoint. Its client may come back and take it over; a completer does not wait for that. What its work answers is
/// recorded as a handler's answer would be, and is what the client is told then.
///
/// Safe on every replica at once: one of them takes an orphan over. What fails is left an orphan, and tried again after a
/// pause that doubles with each takeover, up to 64 times [`with_older_than`](Self::with_older_than): so what cannot be
/// finished is not hammered. It is looked at for as long as orphans are kept, and that starts anew with each attempt.
///
/// Entries of [`run_once`](IdempotencyLayer::run_once) are passed over: a response would be no value to whoever asks for
/// them.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn completing(store: tower_idempotency_sqlx::PostgresStore, layer: tower_idempotency::IdempotencyLayer, pool: tower_idempotency_sqlx::sqlx::PgPool) {
/// use std::time::Duration;
///
/// use http::Response;
/// use tower_idempotency_sqlx::{Completer, Orphan};
///
/// let rides = store.clone();
/// let completer = Completer::new(&store, &layer, move |orphan: Orphan| {
///     let (store, pool) = (rides.clone(), pool.clone());
///     async move {
///         if orphan.operation() != "POST /rides" {
///             return Err("not one of ours".into());
///         }
///         let tx = store.begin(orphan.lease(), &pool).await?;
///         // What is left to do after orphan.checkpoint().
///         let res = tx.commit(Response::new("ride".to_owned())).await?;
///         Ok::<_, Box<dyn std::error::Error + Send + Sync>>(res)
///     }
/// });
/// let completing = completer.spawn(Duration::from_secs(30)); // until it is dropped
/// # std::mem::forget(completing);
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a completer does nothing until it sweeps"]
pub struct Completer<S> {
    store: S,
    finish: Arc<Finish>,
    older_than: Duration,
    at_a_time: usize,
}

type Finish = dyn Fn(Found, Claim) -> Finishing + Send + Sync;
type Finishing = Pin<Box<dyn Future<Output = Result<Ended, Error>> + Send>>;

/// How one orphan ended.
enum Ended {
    Executed,
    Failed,
    Gone,
}

/// What a completer's work is given: an orphan that was taken over.
#[derive(Debug)]
pub struct Orphan {
    lease: Lease,
    operation: String,
    checkpoint: Option<Checkpoint>,
}

impl Orphan {
    /// The lease that it was taken over under; [`derive`](Lease::derive) gives the keys that it gave to the first execution.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// What was asked, as in `POST /rides`: method and path without the query, cut at 128 bytes.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }

    /// How far it came.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sweep {
    /// Orphans that were due.
    pub found: u64,
    /// The work answered. Where the layer records no such answer, as a 5xx, it is an orphan still.
    pub executed: u64,
    /// The work failed or panicked, or the store did.
    pub failed: u64,
    /// Somebody else had it meanwhile.
    pub gone: u64,
}

impl<S: SqlStore> Completer<S> {
    /// Finishes the orphans in `store` with `work`, under leases of `layer`.
    ///
    /// `layer` is the one that serves the routes, for it says how long leases and records last and what is recorded.
    /// `work` answers as a handler does, and may commit in a transaction as a handler does; an error leaves the orphan to
    /// a later sweep, and is not logged. It is given everything that is under the layer's store: several services that
    /// share a table need a completer each that leaves alone what it does not know.
    pub fn new<W, F, B, E>(store: &S, layer: &IdempotencyLayer, work: W) -> Self
    where
        W: Fn(Orphan) -> F + Send + Sync + 'static,
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: http_body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Send,
        E: Send + 'static,
    {
        let (at, layer, work) = (store.clone(), layer.clone(), Arc::new(work));
        let finish = move |found: Found, claim: Claim| -> Finishing {
            let (store, layer, work) = (at.clone(), layer.clone(), Arc::clone(&work));
            Box::pin(async move {
                let work = move |lease: Lease| async move {
                    // Somebody took it over since it was found, and left it: that was not for nothing.
                    if lease.generation() != found.generation.unsigned_abs() + 1 {
                        return Err(Ended::Gone);
                    }
                    let checkpoint = Checkpoint::last(&store, &lease).await;
                    let orphan = Orphan {
                        lease,
                        operation: found.operation,
                        checkpoint: checkpoint.map_err(|_| Ended::Failed)?,
                    };
                    work(orphan).await.map_err(|_| Ended::Failed)
                };
                Ok(match layer.take_over(claim, work).await? {
                    TakeOverOutcome::Executed(_) => Ended::Executed,
                    TakeOverOutcome::Failed(ended) => ended,
                    _ => Ended::Gone,
                })
            })
        };
        Self {
            store: store.clone(),
            finish: Arc::new(finish),
            older_than: Duration::from_secs(60),
            at_a_time: 4,
        }
    }

    /// For how long a lease has to be over; 1 minute by default.
    ///
    /// Too short, and it takes away from clients what they would have finished themselves, with an answer they see at
    /// once; too long, and what was abandoned stays half done.
    pub fn with_older_than(self, older_than: Duration) -> Self {
        let older_than = older_than.min(Ttl::MAX.as_duration());
        Self { older_than, ..self }
    }

    /// How many are executed at a time, by each process; 4 by default, at least 1.
    pub fn with_concurrency(self, at_a_time: usize) -> Self {
        let at_a_time = at_a_time.max(1);
        Self { at_a_time, ..self }
    }

    /// Executes all orphans that are due as it begins, oldest first, and says what became of them. Ends early where the layer takes
    /// nothing on, as while it drains.
    ///
    /// # Errors
    ///
    /// When the store cannot say which they are.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Cancellation
    ///
    /// Dropped, it takes no more over; what it has taken over goes on in tasks of its own, for which
    /// [`drain`](IdempotencyLayer::drain) waits.
    pub async fn sweep(&self) -> Result<Sweep, SqlError> {
        let mut page = Page {
            older_than: self.older_than,
            until: None,
            after: None,
            limit: PAGE,
        };
        let mut sweep = Sweep::default();
        let mut running = JoinSet::new();
        loop {
            let orphans = bounded(self.store.orphans(&page)).await?;
            // What fails meanwhile may be due again at once: it is left to the next sweep, or this one would not end.
            page.until = page.until.or(orphans.first().map(|first| first.seen));
            page.after = orphans.last().map(|last| (last.lease_ends, last.id));
            let is_last = orphans.len() < PAGE as usize;
            for orphan in orphans {
                sweep.found += 1;
                if running.len() >= self.at_a_time && !sweep.add(running.join_next().await) {
                    return Ok(sweep);
                }
                let (completer, page) = (self.clone(), page.clone());
                running.spawn(async move { completer.finish(orphan, &page).await });
            }
            if is_last {
                break;
            }
        }
        while !running.is_empty() && sweep.add(running.join_next().await) {}
        Ok(sweep)
    }

    /// Sweeps every so often, until what it returns is dropped.
    ///
    /// What fails is logged and tried again next time. Each sweep costs a search of an index.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn spawn(self, every: Duration) -> CompleterTask {
        let task = tokio::spawn(async move {
            let mut ticks = interval(every.max(SHORTEST));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                match self.sweep().await {
                    Ok(sweep) if sweep.failed > 0 => {
                        tracing::warn!(failed = sweep.failed, "orphans stay for now");
                    }
                    Ok(_) => {}
                    Err(error) => {
                        let error = &error as &(dyn std::error::Error + 'static);
                        tracing::warn!(error, "orphans cannot be looked for");
                    }
                }
            }
        });
        CompleterTask { task }
    }

    async fn finish(&self, orphan: Found, page: &Page) -> Result<Ended, Error> {
        // It was found a while ago. Another replica may have tried since, and failed: then it is to have its pause.
        match bounded(self.store.is_due(&orphan, page)).await {
            Ok(true) => {}
            Ok(false) => return Ok(Ended::Gone),
            Err(_) => return Ok(Ended::Failed),
        }
        let Ok(mut claim) = Claim::new(orphan.id, orphan.fingerprint) else {
            return Ok(Ended::Failed);
        };
        claim.operation = orphan.operation.clone().into();
        (self.finish)(orphan, claim).await
    }
}

impl Sweep {
    /// False where it makes no sense to go on.
    fn add(&mut self, ended: Option<Result<Result<Ended, Error>, tokio::task::JoinError>>) -> bool {
        match ended {
            None => {}
            Some(Ok(Ok(Ended::Executed))) => self.executed += 1,
            Some(Ok(Ok(Ended::Gone))) => self.gone += 1,
            Some(Ok(Ok(Ended::Failed))) => self.failed += 1,
            Some(Ok(Err(error))) => {
                self.failed += 1;
                return !matches!(error.kind(), ErrorKind::Draining | ErrorKind::Overloaded);
            }
            Some(Err(_panic)) => {
                tracing::error!("finishing an orphan panicked");
                self.failed += 1;
            }
        }
        true
    }
}

impl<S> fmt::Debug for Completer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completer")
            .field("older_than", &self.older_than)
            .field("at_a_time", &self.at_a_time)
            .finish_non_exhaustive()
    }
}

/// Sweeps in the background for as long as it is kept.
///
/// Dropped, it sweeps no more; what was taken over goes on.
#[must_use = "a completer stops when this is dropped"]
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

/// Which orphans are looked for.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Page {
    /// For how long the lease is over at least; twice as long for each takeover, up to a limit.
    pub older_than: Duration,
    /// Before which its lease ended, by the store's clock.
    pub until: Option<i64>,
    /// The last of the page before.
    pub after: Option<(i64, KeyId)>,
    /// How many at most.
    pub limit: u32,
}

/// An orphan as it was found.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Found {
    pub id: KeyId,
    pub fingerprint: Fingerprint,
    pub generation: i64,
    pub lease_ends: i64,
    /// When it was found, by the store's clock.
    pub seen: i64,
    pub operation: String,
}

/// An orphan that was taken over ever so often is taken over again after 64 times as long.
pub(crate) const MOST_DOUBLINGS: u32 = 6;
const PAGE: u32 = 100;
const SHORTEST: Duration = Duration::from_millis(10);
