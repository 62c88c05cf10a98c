//! The SQL stores on servers of the tests, claims for them, and trials that do not fail on a stalled machine.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer,
    store::{Claim, Fingerprint, KeyId, Store, StoreError, Token, Ttl},
};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore, SqliteStore};

use crate::{
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};

/// Creates a store and its table with this name.
///
/// # Panics
///
/// Panics if the server does not reply.
pub async fn postgres(server: &PostgresServer, table: &str) -> PostgresStore {
    let store = PostgresStore::from_url(&server.url()).expect("an URL");
    let store = store.with_table(table).expect("an identifier");
    store.migrate().await.expect("the test server runs");
    store
}

/// Creates a store and its table with this name.
///
/// # Panics
///
/// Panics if the server does not reply.
pub async fn mariadb(server: &MariaDbServer, table: &str) -> MySqlStore {
    let store = MySqlStore::from_url(&server.url()).expect("an URL");
    let store = store.with_table(table).expect("an identifier");
    store.migrate().await.expect("the test server runs");
    store
}

/// Creates a store in a file in this directory.
///
/// # Panics
///
/// Panics if the file cannot be written.
pub async fn sqlite(scratch: &Scratch) -> SqliteStore {
    let store = SqliteStore::in_file(scratch.file("keys.db"));
    store.migrate().await.expect("a file that can be written");
    store
}

/// Creates a claim on an unused key.
///
/// # Panics
///
/// Panics if the system has no random numbers.
#[must_use]
pub fn claim() -> Claim {
    let random = Token::random().expect(RANDOM);
    let mut id = [0; 32];
    id[..16].copy_from_slice(random.as_bytes());
    let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes([7; 32]));
    claim.expect(RANDOM)
}

/// Creates a claim of the same request with a new token.
///
/// # Panics
///
/// Panics if the system has no random numbers.
#[must_use]
pub fn duplicate(claim: &Claim) -> Claim {
    let mut duplicate = claim.clone();
    duplicate.token = Token::random().expect(RANDOM);
    duplicate
}

/// Returns a layer that a stall of a few seconds does not disturb. Its calls have 20 s, and its leases of 10 minutes
/// need no renewal during a test.
pub fn layer(store: impl Store) -> IdempotencyLayer {
    IdempotencyLayer::new(store)
        .with_store_timeout(Duration::from_secs(20))
        .with_lease_ttl(Ttl::from_secs(600))
}

/// Makes a call, and repeats it while the database cancels it.
///
/// A database cancels a call that waits too long for a row that another transaction has locked. A stall can cause this.
/// The call must be safe to repeat.
///
/// # Errors
///
/// Returns an error if the call returns another error, or the database still cancels it after a minute.
pub async fn retried<T, F>(call: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let began = Instant::now();
    loop {
        match call().await {
            Err(StoreError::Backend(_)) if began.elapsed() < Duration::from_secs(60) => {
                sleep(Duration::from_millis(10)).await;
            }
            result => return result,
        }
    }
}

/// Repeats a trial that depends on time until it passes, or fails although nothing stalled.
///
/// A trial that fails while this process or the server was stalled proves nothing. `probe` calls the server over a
/// separate connection. If that takes long, the server counts as stalled.
///
/// # Panics
///
/// Panics if a trial panics without a stall, or all trials of three minutes were disturbed.
pub async fn until_undisturbed(probe: impl AsyncFn(), trial: impl AsyncFn()) {
    let began = Instant::now();
    loop {
        let heartbeat = Heartbeat::start();
        let (sent, slowest) = (Cell::new(None::<Instant>), Cell::new(Duration::ZERO));
        let note = || {
            let took = sent.take().map_or(Duration::ZERO, |sent| sent.elapsed());
            slowest.set(slowest.get().max(took));
        };
        let probing = async {
            loop {
                sent.set(Some(Instant::now()));
                probe().await;
                note();
                sleep(Duration::from_millis(100)).await;
            }
        };
        let outcome = tokio::select! {
            biased;
            outcome = Box::pin(caught(trial())) => outcome,
            () = probing => return,
        };
        let Err(panic) = outcome else { return };
        note();
        let stalled = heartbeat.longest().max(slowest.get());
        if stalled < STALL {
            resume_unwind(panic);
        }
        eprintln!("repeats a trial that was disturbed for {stalled:?}");
        let left = began.elapsed() < Duration::from_secs(180);
        assert!(left, "each trial was disturbed");
    }
}

/// Returns the panic of a future as an error.
async fn caught(future: impl Future<Output = ()>) -> thread::Result<()> {
    let mut future = pin!(future);
    poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx)));
        match polled {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    })
    .await
}

/// A thread that measures the time during which this process did not run. It ends when this is dropped.
struct Heartbeat {
    began: Instant,
    beats: Arc<Beats>,
    ended: Arc<AtomicBool>,
}

/// Times in milliseconds.
#[derive(Default)]
struct Beats {
    /// The last beat, since the first one.
    last: AtomicU64,
    /// The longest time between two beats.
    longest: AtomicU64,
}

impl Heartbeat {
    fn start() -> Self {
        let began = Instant::now();
        let heartbeat = Self {
            began,
            beats: Arc::default(),
            ended: Arc::default(),
        };
        let beats = Arc::clone(&heartbeat.beats);
        let ended = Arc::clone(&heartbeat.ended);
        thread::spawn(move || {
            while !ended.load(SeqCst) {
                thread::sleep(Duration::from_millis(5));
                let (last, now) = (beats.last.load(SeqCst), millis_since(began));
                // In this order, so that `longest` misses no interruption.
                beats.longest.fetch_max(now - last, SeqCst);
                beats.last.store(now, SeqCst);
            }
        });
        heartbeat
    }

    /// Returns the longest interruption, including one after which the thread has not run yet.
    fn longest(&self) -> Duration {
        let last = self.beats.last.load(SeqCst);
        let since_last = millis_since(self.began).saturating_sub(last);
        Duration::from_millis(self.beats.longest.load(SeqCst).max(since_last))
    }
}

fn millis_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.ended.store(true, SeqCst);
    }
}

/// The shortest interruption that makes a failed trial worthless.
const STALL: Duration = Duration::from_millis(250);
const RANDOM: &str = "the system has random numbers";
