//! The connections of a store.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, Database};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Connections that belong to a store alone, each made when it is first needed.
///
/// A pool of sqlx asks a connection whether it is alive before it lends it and after it is given back: three round trips
/// for one statement. These are given back after an answer and closed after anything else, so they need no asking; one
/// that died while nobody used it fails the call that finds out, and takes all that are idle with it.
pub(crate) struct Connections<DB: Database> {
    options: <DB::Connection as Connection>::Options,
    idle: Mutex<Vec<Idle<DB::Connection>>>,
    permits: Semaphore,
}

struct Idle<C> {
    connection: C,
    made: Instant,
    since: Instant,
}

/// A connection for one call. Closed when it is dropped, unless it is [given back](Lent::give_back).
pub(crate) struct Lent<'a, DB: Database> {
    connections: &'a Connections<DB>,
    pub(crate) connection: DB::Connection,
    made: Instant,
    // The place is free when the connection is back.
    _permit: SemaphorePermit<'a>,
}

impl<DB: Database> Connections<DB> {
    pub(crate) fn new(options: <DB::Connection as Connection>::Options, most: usize) -> Self {
        Self {
            // Their text holds records.
            options: options.disable_statement_logging(),
            idle: Mutex::new(Vec::new()),
            permits: Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)),
        }
    }

    /// Waits for a place, and connects if nothing is idle; `true` if this connection is new.
    pub(crate) async fn lend(&self) -> Result<(Lent<'_, DB>, bool), sqlx::Error> {
        let permit = self.permits.acquire().await;
        let permit = permit.map_err(|_closed| sqlx::Error::PoolClosed)?;
        let (connection, made, is_new) = match self.freshest() {
            Some(idle) => (idle.connection, idle.made, false),
            None => (self.options.connect().await?, Instant::now(), true),
        };
        let lent = Lent {
            connections: self,
            connection,
            made,
            _permit: permit,
        };
        Ok((lent, is_new))
    }

    /// Closes what is idle: the server it leads to is gone.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn forget(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    fn freshest(&self) -> Option<Idle<DB::Connection>> {
        let mut idle = self.idle();
        // The last one given back is the one least likely to be closed by somebody on the way.
        let freshest = idle.pop()?;
        let old = if is_old(freshest.since, freshest.made) {
            idle.drain(..).chain([freshest]).collect::<Vec<_>>()
        } else {
            return Some(freshest);
        };
        drop(idle);
        drop(old);
        None
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle<DB::Connection>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<DB: Database> Lent<'_, DB> {
    pub(crate) fn give_back(self) {
        let since = Instant::now();
        if !is_old(since, self.made) {
            self.connections.idle().push(Idle {
                connection: self.connection,
                made: self.made,
                since,
            });
        }
    }
}

fn is_old(since: Instant, made: Instant) -> bool {
    since.elapsed() > IDLE || made.elapsed() > LIFE
}

/// Idle for longer than this, it may have been closed on the way without either end being told.
const IDLE: Duration = Duration::from_secs(60);
/// So that the connections move to where the name of the server leads now.
const LIFE: Duration = Duration::from_secs(30 * 60);
