//! The connections of a store.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions, Connection, Database};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit},
    time::sleep,
};

use crate::line::{Line, Turn};

/// Connections that belong to a store alone, each made when it is first needed.
///
/// A pool of sqlx asks a connection whether it is alive before it lends it and after it is given back: three round trips
/// for one statement. These are given back after an answer and closed after anything else, so they need no asking; one
/// that died while nobody used it fails the call that finds out, and takes all that were idle with it.
pub(crate) struct Connections<DB: Database> {
    options: <DB::Connection as Connection>::Options,
    idle: Mutex<Vec<Idle<DB::Connection>>>,
    places: Semaphore,
    /// Those who [ask](Purpose::Ask) need a turn before they wait for a place: there is one turn less than places, so that
    /// one place is never theirs, and that whoever keeps a lease waits behind few of them.
    asking: Line,
    /// For so long the server is taken to be busy with a call that was cut off.
    lingering: Duration,
}

/// What a connection is for: under a flood of requests, leases are kept before others are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To take a lease, or to look whether it can be taken. To release one, too: after acquires that failed there are as many
    /// releases, and a lease that is not released ends by itself.
    Ask,
    /// To renew or complete a lease that is held; and what is seldom and waits without end, such as purging.
    Keep,
}

struct Idle<C> {
    connection: C,
    made: Instant,
    since: Instant,
}

/// A connection for one call. Closed when it is dropped, unless it is [given back](Lent::give_back).
pub(crate) struct Lent<'a, DB: Database> {
    pub(crate) connection: DB::Connection,
    made: Instant,
    // The place is free when the connection is back.
    out: Out<'a, DB>,
}

/// What is known of a connection while it is lent.
struct Out<'a, DB: Database> {
    connections: &'a Connections<DB>,
    since: Instant,
    has_answered: bool,
    asking: Option<Turn>,
    _place: SemaphorePermit<'a>,
}

impl<DB: Database> Connections<DB> {
    pub(crate) fn new(
        options: <DB::Connection as Connection>::Options,
        most: usize,
        lingering: Duration,
    ) -> Self {
        let most = most.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            // Their text holds records.
            options: options.disable_statement_logging(),
            idle: Mutex::new(Vec::new()),
            places: Semaphore::new(most),
            asking: Line::new((most - 1).max(1)),
            lingering,
        }
    }

    /// Waits for a place, and connects if nothing is idle; `true` if this connection is new.
    pub(crate) async fn lend(&self, purpose: Purpose) -> Result<(Lent<'_, DB>, bool), sqlx::Error> {
        let closed = || sqlx::Error::PoolClosed;
        let asking = match purpose {
            Purpose::Ask => Some(self.asking.turn().await.ok_or_else(closed)?),
            Purpose::Keep => None,
        };
        let place = self.places.acquire().await;
        let place = place.map_err(|_closed| closed())?;
        let mut out = Out {
            connections: self,
            since: Instant::now(),
            has_answered: false,
            asking,
            _place: place,
        };
        let (connection, made, is_new) = match self.freshest() {
            Some(idle) => (idle.connection, idle.made, false),
            None => {
                // Cut off here, it was without an answer as well.
                let connected = self.connect().await;
                out.has_answered = connected.is_err();
                let made = Instant::now();
                out.since = made;
                (connected?, made, true)
            }
        };
        let lent = Lent {
            connection,
            made,
            out,
        };
        Ok((lent, is_new))
    }

    /// A connection. It is tried for where SQLite does not wait by itself: in putting a file into WAL mode while somebody
    /// writes to it, or does the same.
    async fn connect(&self) -> Result<DB::Connection, sqlx::Error> {
        let since = Instant::now();
        loop {
            match self.options.connect().await {
                Err(error) if is_busy(&error) && since.elapsed() < BUSY => sleep(AGAIN).await,
                connected => return connected,
            }
        }
    }

    /// Closes what is idle: the server it leads to is gone.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn forget(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    fn forget_those_before(&self, since: Instant) {
        let mut idle = self.idle();
        let before: Vec<_> = idle.extract_if(.., |idle| idle.since <= since).collect();
        drop(idle);
        drop(before);
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
        let Self {
            connection,
            made,
            mut out,
        } = self;
        out.has_answered = true;
        let since = Instant::now();
        if !is_old(since, made) {
            out.connections.idle().push(Idle {
                connection,
                made,
                since,
            });
        }
    }

    /// It was an error, and the connection is not to be used again: it is closed, and says nothing of the others.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn close(mut self) {
        self.out.has_answered = true;
    }
}

impl<DB: Database> Drop for Out<'_, DB> {
    /// Whoever was cut off, by the layer's timeout above all, knows that there was no answer for a while.
    fn drop(&mut self) {
        let silent = self.since.elapsed();
        if self.has_answered || silent < SILENCE {
            return;
        }
        // The way may have fallen silent, and then for all that were idle at that time.
        self.connections.forget_those_before(self.since);
        // Or the server is stalled: it goes on with what it was asked, and does not know that nobody waits. If it were asked
        // on another connection at once, and so on, it would be full in the end.
        let lingering = self.connections.lingering;
        if silent >= STALL
            && !lingering.is_zero()
            && let (Some(asking), Ok(runtime)) = (self.asking.take(), Handle::try_current())
        {
            runtime.spawn(async move {
                sleep(lingering).await;
                drop(asking);
            });
        }
    }
}

/// `SQLITE_BUSY`, which is the code of no server's error.
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.as_deref() == Some("5")
}

fn is_old(since: Instant, made: Instant) -> bool {
    since.elapsed() > IDLE || made.elapsed() > LIFE
}

/// As long as sqlx has SQLite wait for everything else.
const BUSY: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(10);
/// Idle for longer than this, it may have been closed on the way without either end being told.
const IDLE: Duration = Duration::from_secs(60);
/// So that the connections move to where the name of the server leads now.
const LIFE: Duration = Duration::from_secs(30 * 60);
/// Without an answer for so long, a call that is dropped says something of the connection. Whoever leaves sooner has lost
/// little, and may be somebody who comes and goes.
const SILENCE: Duration = Duration::from_millis(250);
/// Without an answer for so long, the server may be stalled. A statement that is slow is not.
const STALL: Duration = Duration::from_secs(1);
/// Of a server. Short enough for the layer's three tries, of two seconds by default: if it was the way, a request is late and
/// not refused, though its turn was the only one.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) const LINGERING: Duration = Duration::from_millis(1_500);
