//! The outbox of one process, in a file.

use std::{
    fmt, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::SystemTime,
};

use tokio::sync::{mpsc, oneshot};

use super::{Outbox, OutboxError, entry::Entry, log::Log};
use crate::{telemetry::catch_report_panic, warning::WarningLimit};

/// Outbox of one process, in a file that only its user may read.
///
/// An entry is on the disk (fdatasync) before its request is sent. Calls that arrive at the same time share one write. The file
/// is a log with a checksum for each record. If a crash damages records that were not synced, the earlier ones are read. After a
/// failed sync a new file replaces it, and until then the outbox acknowledges no call.
///
/// The bytes of a removed entry stay in the file until a new one without them replaces it. This happens when the outbox is
/// opened, and when it is dropped with a file of at most 1 MiB. It also happens when the file is larger and consists mostly of
/// removed entries. The disk has the bytes of the old file until it overwrites them.
///
/// The entries are in memory, too. A lock on an adjacent file with the suffix `.lock` prevents a second process from opening
/// the outbox. The path is resolved once: a symbolic link stays, and the adjacent files are next to its target. Do not put the
/// file on a network file system, because locks and fsync are unreliable there. Dropping the outbox blocks the thread until
/// started calls are written, removed entries are erased from a small file, and the file is closed.
///
/// ```
/// use tower_idempotency_client::{Entry, FileOutbox, Operation, Outbox};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = std::env::temp_dir().join(format!("outbox-example-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// # let path = directory.join("orders.outbox");
/// let outbox = FileOutbox::open(&path)?;
/// let request = http::Request::post("https://api.example.com/orders").body("one espresso".into())?;
/// outbox.store(&Entry::new(&Operation::with_key("order-7")?, &request)).await?;
///
/// let pending = outbox.pending(0, 10).await?;
/// assert_eq!(pending[0].1.key(), "order-7");
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok(())
/// # }
/// ```
pub struct FileOutbox {
    /// `None` once the outbox is dropped.
    commands: Option<mpsc::Sender<Command>>,
    thread: Option<thread::JoinHandle<()>>,
    settings: Arc<FileSettings>,
}

struct FileSettings {
    is_synced: AtomicBool,
    max_bytes: AtomicU64,
}

/// Call of the outbox. The thread that owns the file executes it.
enum Command {
    Store(Box<Entry>, Reply<Option<Entry>>),
    Resume(String, SystemTime, Option<u64>, Reply<Option<Entry>>),
    Discard(String, SystemTime, Reply<bool>),
    Remove(String, Reply<()>),
    Pending(u64, u32, Reply<Vec<(u64, Entry)>>),
}

type Reply<T> = oneshot::Sender<Result<T, OutboxError>>;

/// Sends the reply of a call, once its records are written or have failed.
type Acknowledge = Box<dyn FnOnce(Result<(), &io::Error>) + Send>;

impl FileOutbox {
    /// Opens or creates the file, reads its entries, and erases removed ones. Blocks the thread meanwhile.
    ///
    /// A crash may leave a damaged end of the file. It is cut off with a warning. If the disk has damaged the record that was
    /// synced last, the outbox cannot distinguish this from a crash.
    ///
    /// # Errors
    ///
    /// - The outbox is already open, in this or another process.
    /// - The file is not that of an outbox, or has a record of another version. Nothing is changed then.
    /// - A record is damaged, and a later one shows that it was synced. Nothing is changed then.
    /// - The file cannot be read or written.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OutboxError> {
        let mut log = Log::open(path.as_ref()).map_err(OutboxError::new)?;
        // The former process may have been killed.
        warn_if_failed(log.erase_removed(), &WarningLimit::default());
        let (mut outbox, received) = Self::without_thread();
        let settings = outbox.settings.clone();
        let thread = thread::Builder::new().name("outbox".to_owned());
        let writer = move || execute_all(log, received, &settings);
        outbox.thread = Some(thread.spawn(writer).map_err(OutboxError::new)?);
        Ok(outbox)
    }

    /// Creates the outbox, and the queue of its thread.
    fn without_thread() -> (Self, mpsc::Receiver<Command>) {
        let (commands, received) = mpsc::channel(MAX_BATCH);
        let outbox = Self {
            commands: Some(commands),
            thread: None,
            settings: Arc::new(FileSettings {
                is_synced: AtomicBool::new(true),
                max_bytes: AtomicU64::new(DEFAULT_MAX_BYTES),
            }),
        };
        (outbox, received)
    }

    /// Makes calls return before their entries are on the disk.
    ///
    /// Entries then survive the end of the process, also by `kill -9`. A crash of the machine loses the last entries. Their
    /// requests may have been executed, and are not sent again. Only a discard waits for the disk. Otherwise a recovery could
    /// execute a request after its call has reported [`NotExecuted`](crate::Outcome::NotExecuted).
    #[must_use]
    pub fn without_fsync(self) -> Self {
        self.settings.is_synced.store(false, Ordering::Relaxed);
        self
    }

    /// Sets the maximum size of all entries in bytes. Default: 64 MiB. Maximum: 1 GiB.
    ///
    /// If the outbox is full, further requests fail before they are sent. The entries are in memory. The file grows to at
    /// most twice their size, or 1 MiB. While the disk hangs, copies of the entries of at most 512 calls (2 x 256) are in memory,
    /// too.
    #[must_use]
    pub fn with_max_bytes(self, bytes: u64) -> Self {
        let bytes = bytes.min(MAX_BYTES);
        self.settings.max_bytes.store(bytes, Ordering::Relaxed);
        self
    }

    async fn call<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, OutboxError> {
        let ended = || OutboxError::with_message("the thread of the outbox has ended");
        let commands = self.commands.as_ref().ok_or_else(ended)?;
        // While the disk hangs, calls wait here. A call that is dropped meanwhile leaves no copy of its entry.
        let permit = commands.reserve().await.map_err(|_| ended())?;
        let (reply, received) = oneshot::channel();
        permit.send(command(reply));
        received.await.map_err(|_| ended())?
    }
}

impl Outbox for FileOutbox {
    async fn store(&self, entry: &Entry) -> Result<Option<Entry>, OutboxError> {
        self.call(|reply| Command::Store(Box::new(entry.clone()), reply))
            .await
    }

    async fn resume(
        &self,
        key: &str,
        first_sent: SystemTime,
        provider: Option<u64>,
    ) -> Result<Option<Entry>, OutboxError> {
        self.call(|reply| Command::Resume(key.to_owned(), first_sent, provider, reply))
            .await
    }

    async fn discard(&self, key: &str, first_sent: SystemTime) -> Result<bool, OutboxError> {
        self.call(|reply| Command::Discard(key.to_owned(), first_sent, reply))
            .await
    }

    async fn remove(&self, key: &str) -> Result<(), OutboxError> {
        self.call(|reply| Command::Remove(key.to_owned(), reply))
            .await
    }

    async fn pending(&self, after: u64, limit: u32) -> Result<Vec<(u64, Entry)>, OutboxError> {
        self.call(|reply| Command::Pending(after, limit, reply))
            .await
    }
}

/// Executes calls until the outbox is dropped.
fn execute_all(mut log: Log, mut received: mpsc::Receiver<Command>, settings: &FileSettings) {
    let failures = WarningLimit::default();
    while let Some(command) = received.blocking_recv() {
        let mut batch = vec![command];
        while batch.len() < MAX_BATCH
            && let Ok(command) = received.try_recv()
        {
            batch.push(command);
        }
        execute(&mut log, batch, settings, &failures);
    }
    // The thread that drops the outbox waits, and may be one of a runtime.
    if log.is_small() {
        warn_if_failed(log.erase_removed(), &failures);
    }
}

/// Executes calls with one write, and replies to them afterwards.
fn execute(log: &mut Log, batch: Vec<Command>, settings: &FileSettings, failures: &WarningLimit) {
    let mut acknowledge: Vec<Acknowledge> = Vec::with_capacity(batch.len());
    let max_bytes = settings.max_bytes.load(Ordering::Relaxed);
    let repaired = log.repair();
    for command in batch {
        acknowledge.push(apply(log, command, max_bytes));
    }
    let written = repaired.and_then(|()| log.flush(settings.is_synced.load(Ordering::Relaxed)));
    for reply in acknowledge {
        reply(written.as_ref().copied());
    }
    warn_if_failed(written.and_then(|()| log.compact()), failures);
}

/// Reports a failed write of the file, at most once a second.
fn warn_if_failed(written: io::Result<()>, failures: &WarningLimit) {
    if let Err(error) = written
        && let Some(count) = failures.count()
    {
        catch_report_panic(|| {
            tracing::warn!(%error, count, "file of the outbox cannot be written");
        });
    }
}

fn apply(log: &mut Log, command: Command, max_bytes: u64) -> Acknowledge {
    match command {
        // The call has ended, and its request was not sent. While the disk is slow, such calls would fill the outbox.
        Command::Store(_, reply) if reply.is_closed() => Box::new(|_| {}),
        Command::Store(entry, reply) => reply_later(reply, log.store(&entry, max_bytes)),
        Command::Resume(key, at, provider, reply) => {
            reply_later(reply, Ok(log.resume(&key, Some(at), provider)))
        }
        // The call has ended with an unknown outcome, and relies on a recovery.
        Command::Discard(.., reply) if reply.is_closed() => Box::new(|_| {}),
        Command::Discard(key, at, reply) => reply_later(reply, Ok(log.discard(&key, at))),
        Command::Remove(key, reply) => {
            log.remove(&key);
            reply_later(reply, Ok(()))
        }
        Command::Pending(after, limit, reply) => reply_later(reply, Ok(log.pending(after, limit))),
    }
}

fn reply_later<T: Send + 'static>(reply: Reply<T>, result: Result<T, OutboxError>) -> Acknowledge {
    Box::new(move |written| {
        let written = written.map_err(|error| OutboxError::new(error.to_string()));
        // Fails if the caller was dropped.
        let _ = reply.send(written.and(result));
    })
}

impl Drop for FileOutbox {
    fn drop(&mut self) {
        self.commands = None;
        // A thread that panicked has closed the file, too.
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

impl fmt::Debug for FileOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileOutbox").finish_non_exhaustive()
    }
}

const DEFAULT_MAX_BYTES: u64 = 64 * 1024 * 1024;
const MAX_BYTES: u64 = 1024 * 1024 * 1024;
/// Maximum number of calls that share one write, and of calls in the queue.
const MAX_BATCH: usize = 256;

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Waker},
        time::Duration,
    };

    use ::tests::{observed::observed, scratch::Scratch};
    use bytes::Bytes;
    use tokio::time::advance;
    use tracing::{
        Dispatch,
        subscriber::{NoSubscriber, with_default},
    };

    use super::*;
    use crate::operation::Operation;

    fn settings(is_synced: bool) -> FileSettings {
        FileSettings {
            is_synced: AtomicBool::new(is_synced),
            max_bytes: AtomicU64::new(DEFAULT_MAX_BYTES),
        }
    }

    fn entry(body: impl Into<Bytes>) -> Entry {
        let req = http::Request::post("https://api.example.com/").body(body.into());
        Entry::new(&Operation::new(), &req.unwrap())
    }

    /// The request of a dropped call is not sent.
    #[test]
    fn dropped_call_stores_nothing() {
        let scratch = Scratch::new();
        let mut log = Log::open(&scratch.file("orders.outbox")).unwrap();
        let (settings, failures) = (settings(true), WarningLimit::default());
        let entry = entry("espresso");
        for (is_dropped, stored) in [(true, 0), (false, 1)] {
            let (reply, received) = oneshot::channel();
            let received = (!is_dropped).then_some(received);
            let command = Command::Store(Box::new(entry.clone()), reply);
            execute(&mut log, vec![command], &settings, &failures);
            assert_eq!(log.pending(0, 10).len(), stored);
            drop(received);
        }
    }

    /// A call that is dropped reports that its entry stays for a recovery.
    #[test]
    fn dropped_discard_keeps_entry() {
        let scratch = Scratch::new();
        let mut log = Log::open(&scratch.file("orders.outbox")).unwrap();
        let (settings, failures) = (settings(true), WarningLimit::default());
        let at = SystemTime::now();
        let entry = entry("espresso").or_first_sent(at);
        let (reply, stored) = oneshot::channel();
        let command = Command::Store(Box::new(entry.clone()), reply);
        execute(&mut log, vec![command], &settings, &failures);
        drop(stored);
        for (is_dropped, left) in [(true, 1), (false, 0)] {
            let (reply, received) = oneshot::channel();
            let received = (!is_dropped).then_some(received);
            let command = Command::Discard(entry.key().to_owned(), at, reply);
            execute(&mut log, vec![command], &settings, &failures);
            assert_eq!(log.pending(0, 10).len(), left);
            drop(received);
        }
    }

    /// The disk hangs, so the thread reads no call. Each caller waits until its deadline.
    #[test]
    fn hanging_disk_queues_few_calls() {
        let (outbox, received) = FileOutbox::without_thread();
        let entry = entry("espresso");
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..1000 {
            let mut call = pin!(outbox.store(&entry));
            assert!(call.as_mut().poll(&mut cx).is_pending());
        }
        assert_eq!(received.len(), MAX_BATCH);
    }

    /// The writer of `tracing_subscriber::fmt` panics if standard error is closed.
    #[tokio::test]
    async fn thread_survives_panic_of_subscriber() {
        // If the program has only one subscriber, a thread without one can disable the event for all threads.
        let _other = Dispatch::new(NoSubscriber::new());
        let panics = Arc::new(AtomicU64::new(0));
        let count = panics.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || -> io::Sink {
                count.fetch_add(1, Ordering::Relaxed);
                panic!("the subscriber cannot write")
            })
            .finish();
        let scratch = Scratch::new();
        let log = Log::open(&scratch.file("orders.outbox")).unwrap();
        // No new file can replace a directory.
        std::fs::create_dir(scratch.file("orders.outbox.new")).unwrap();
        let (mut outbox, received) = FileOutbox::without_thread();
        let settings = outbox.settings.clone();
        let writer = move || execute_all(log, received, &settings);
        outbox.thread = Some(thread::spawn(move || with_default(subscriber, writer)));
        let large = entry(vec![b'x'; 1024 * 1024]);
        outbox.store(&large).await.unwrap();
        outbox.remove(large.key()).await.unwrap();
        let stored = outbox.store(&entry("espresso")).await;
        assert_eq!(panics.load(Ordering::Relaxed), 1);
        assert_eq!(stored.unwrap(), None);
    }

    /// The file has more than 1 MiB of removed entries after each call, and no new file can replace a directory.
    #[test]
    fn failed_writes_warn_once_per_second() {
        let scratch = Scratch::new();
        let mut log = Log::open(&scratch.file("orders.outbox")).unwrap();
        std::fs::create_dir(scratch.file("orders.outbox.new")).unwrap();
        let (settings, failures) = (settings(false), WarningLimit::default());
        let mut fail = || {
            let entry = entry(vec![b'x'; 1024 * 1024]);
            let ((stored, _stored), (removed, _removed)) = (oneshot::channel(), oneshot::channel());
            let key = entry.key().to_owned();
            let batch = vec![
                Command::Store(Box::new(entry), stored),
                Command::Remove(key, removed),
            ];
            execute(&mut log, batch, &settings, &failures);
        };
        let (_, text) = observed("warn", async {
            for calls in [1, 4, 1] {
                for _ in 0..calls {
                    fail();
                }
                advance(Duration::from_millis(600)).await;
            }
            fail();
        });
        let event = "file of the outbox cannot be written";
        let lines = text.lines().filter(|line| line.contains(event));
        let counts: Vec<_> = lines
            .filter_map(|line| Some(line.split_once("count=")?.1))
            .collect();
        assert_eq!(counts, ["1", "5"], "{text}");
    }
}
