//! The connections of a store.

use std::{
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, Database};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    time::sleep,
};

use self::{
    lifo::{LifoPermit, LifoSemaphore},
    new_file::create_private,
};

mod lifo;
mod new_file;

/// Connections that belong to one store. Each is opened on demand.
///
/// A pool of sqlx pings a connection before each checkout and after each return: three round trips for one statement. This
/// pool never pings. A connection returns to the pool after a reply. Otherwise it is closed. A connection that died while
/// it was idle fails the next call. That call closes the other idle connections too.
pub(crate) struct Connections<DB: Database> {
    options: <DB::Connection as Connection>::Options,
    /// The file of a SQLite store, if the store creates it.
    new_file: Option<PathBuf>,
    idle: Mutex<Vec<IdleConnection<DB::Connection>>>,
    permits: Semaphore,
    /// A call of [`Priority::Acquire`] needs one of these permits before it waits for a connection permit. There is one
    /// fewer of them than of `permits`, if the store has several connections. So a call that maintains a lease waits behind
    /// few acquires.
    acquire_permits: LifoSemaphore,
    /// Period for which the server is assumed to be busy with a call that was dropped.
    stall_hold: Duration,
}

/// Priority of a call. Under a flood of requests, the store maintains held leases before it grants new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Acquires a lease, or reads if it can be acquired. Releases have this priority too: a flood of failed acquires
    /// causes as many releases, and a lease that is not released expires by itself.
    Acquire,
    /// Renews or completes a held lease. Rare calls without a time limit, such as a purge, have this priority too.
    Maintain,
}

struct IdleConnection<C> {
    connection: C,
    connected_at: Instant,
    idle_since: Instant,
}

/// A connection for one call. Its drop closes it, unless it was [returned](PooledConnection::return_to_pool) before.
pub(crate) struct PooledConnection<'a, DB: Database> {
    pub(crate) connection: DB::Connection,
    connected_at: Instant,
    // Declared after the connection, so that its drop frees the permit after the connection is closed.
    guard: CheckoutGuard<'a, DB>,
}

/// State of a checkout. Its drop decides if the server has stalled.
struct CheckoutGuard<'a, DB: Database> {
    connections: &'a Connections<DB>,
    started_at: Instant,
    has_reply: bool,
    acquire_permit: Option<LifoPermit>,
    _permit: SemaphorePermit<'a>,
}

impl<DB: Database> Connections<DB> {
    pub(crate) fn new(
        options: <DB::Connection as Connection>::Options,
        max: usize,
        stall_hold: Duration,
    ) -> Self {
        let max = max.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            // The text of statements contains records.
            options: options.disable_statement_logging(),
            new_file: None,
            idle: Mutex::new(Vec::new()),
            permits: Semaphore::new(max),
            acquire_permits: LifoSemaphore::new((max - 1).max(1)),
            stall_hold,
        }
    }

    /// Lets the store create this file before a connection opens it.
    #[cfg(feature = "sqlite")]
    pub(crate) fn with_new_file(mut self, path: Option<PathBuf>) -> Self {
        self.new_file = path;
        self
    }

    /// Waits for a permit and returns a connection. Connects if none is idle, and returns `true` with the new
    /// connection.
    pub(crate) async fn checkout(
        &self,
        priority: Priority,
    ) -> Result<(PooledConnection<'_, DB>, bool), sqlx::Error> {
        let closed = || sqlx::Error::PoolClosed;
        let acquire_permit = match priority {
            Priority::Acquire => Some(self.acquire_permits.acquire().await.ok_or_else(closed)?),
            Priority::Maintain => None,
        };
        let permit = self.permits.acquire().await;
        let permit = permit.map_err(|_closed| closed())?;
        let mut guard = CheckoutGuard {
            connections: self,
            started_at: Instant::now(),
            has_reply: false,
            acquire_permit,
            _permit: permit,
        };
        let (connection, connected_at, is_new) = match self.take_freshest() {
            Some(idle) => (idle.connection, idle.connected_at, false),
            None => {
                // If this future is dropped here, the server has not replied either.
                let connected = self.connect().await;
                guard.has_reply = connected.is_err();
                let connected_at = Instant::now();
                guard.started_at = connected_at;
                (connected?, connected_at, true)
            }
        };
        let pooled = PooledConnection {
            connection,
            connected_at,
            guard,
        };
        Ok((pooled, is_new))
    }

    /// Connects. Retries for up to 5 seconds while SQLite reports that the file is busy.
    ///
    /// SQLite needs exclusive access to switch a file to WAL mode, and does not wait for it. Another process may be writing
    /// to the file, or switching its mode too.
    async fn connect(&self) -> Result<DB::Connection, sqlx::Error> {
        if let Some(path) = &self.new_file {
            // If this fails, SQLite reports that it cannot open the file.
            create_private(path).ok();
        }
        let start = Instant::now();
        loop {
            match self.options.connect().await {
                Err(error) if is_busy(&error) && start.elapsed() < BUSY_TIMEOUT => {
                    sleep(BUSY_RETRY_DELAY).await;
                }
                result => return result,
            }
        }
    }

    /// Closes all idle connections after their server failed, shut down or became a replica.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    /// Closes the connections that have been idle since `instant` or longer.
    fn close_idle_before(&self, instant: Instant) {
        let mut idle = self.idle();
        let stale: Vec<_> = idle
            .extract_if(.., |idle| idle.idle_since <= instant)
            .collect();
        drop(idle);
        drop(stale);
    }

    /// Takes the connection that was returned last. A proxy or firewall is least likely to have closed that one.
    ///
    /// Closes all idle connections and returns `None` if that connection is too old.
    fn take_freshest(&self) -> Option<IdleConnection<DB::Connection>> {
        let mut idle = self.idle();
        let freshest = idle.pop()?;
        let stale = if is_stale(freshest.idle_since, freshest.connected_at) {
            idle.drain(..).chain([freshest]).collect::<Vec<_>>()
        } else {
            return Some(freshest);
        };
        drop(idle);
        drop(stale);
        None
    }

    fn idle(&self) -> MutexGuard<'_, Vec<IdleConnection<DB::Connection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<DB: Database> PooledConnection<'_, DB> {
    /// Returns the connection to the pool after a reply. Closes it if it is too old.
    pub(crate) fn return_to_pool(self) {
        let Self {
            connection,
            connected_at,
            mut guard,
        } = self;
        guard.has_reply = true;
        let idle_since = Instant::now();
        if !is_stale(idle_since, connected_at) {
            guard.connections.idle().push(IdleConnection {
                connection,
                connected_at,
                idle_since,
            });
        }
    }

    /// Closes the connection after an error that makes it unusable. The error is not a stall: other idle connections
    /// stay open.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn close(mut self) {
        self.guard.has_reply = true;
    }
}

impl<DB: Database> Drop for CheckoutGuard<'_, DB> {
    /// Handles a call that was dropped without a reply, usually by the layer's timeout.
    fn drop(&mut self) {
        let elapsed = self.started_at.elapsed();
        if self.has_reply || elapsed < SUSPECT_AFTER {
            return;
        }
        // The network path may be broken. If so, it is broken for all connections that were idle when the call started.
        self.connections.close_idle_before(self.started_at);
        // Or the server has stalled. It continues the call, because it does not detect the disconnect. New calls on new
        // connections would overload it, so the acquire permit is held for a while.
        let stall_hold = self.connections.stall_hold;
        if elapsed >= STALLED_AFTER
            && !stall_hold.is_zero()
            && let (Some(permit), Ok(runtime)) = (self.acquire_permit.take(), Handle::try_current())
        {
            runtime.spawn(async move {
                sleep(stall_hold).await;
                drop(permit);
            });
        }
    }
}

/// Returns `true` for `SQLITE_BUSY` and its extended codes. No server reports an error with one of these codes.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| ["5", "261", "517"].contains(&&*code))
}

fn is_stale(idle_since: Instant, connected_at: Instant) -> bool {
    idle_since.elapsed() > MAX_IDLE || connected_at.elapsed() > MAX_LIFETIME
}

/// The default busy timeout of sqlx, for which a connection to SQLite that cannot be opened waits.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(10);
/// A firewall or proxy may drop a connection that is idle for longer, without notice to either end.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// Bounded, so that connections move to the server that the host name resolves to now.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);
/// A connection is suspect if its call was dropped after this time without a reply. After an earlier drop it is not: the
/// client may just have disconnected, and little time was lost.
const SUSPECT_AFTER: Duration = Duration::from_millis(250);
/// A call that is dropped after this time without a reply suggests a stalled server. A slow statement is no stall.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// Time for which a dropped call to a stalled server holds its acquire permit.
///
/// Short enough for the three attempts of the layer, at 2 s each by default. If only the network path failed, a request
/// is late but not refused, even if the permit was the only one.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) const STALLED_TURN_HOLD: Duration = Duration::from_millis(1_500);
