//! A connection that all calls share and that is replaced when it fails.

use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, poll_fn},
};
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::{Instant, sleep_until};

use super::command::with_deadline;

/// A connection that is shared by all calls and reconnects when it fails.
///
/// Times are stored in microseconds since `created_at`.
pub(crate) struct ReconnectingConnection<C: Clone> {
    connect: Box<dyn Fn() -> BoxFuture<'static, RedisResult<C>> + Send + Sync>,
    current: Mutex<Current<C>>,
    /// `true` if the connection leads to several servers. One of them may be unresponsive while the others reply.
    is_cluster: bool,
    /// `true` if each call that times out replaces the connection, even if the server has replied to other calls meanwhile.
    replaces_on_timeout: bool,
    /// Time of the last reply, or of the last replacement of the connection.
    last_reply: AtomicU64,
    /// Time of the first call after `last_reply` that found the connection established.
    first_pending_call: AtomicU64,
    created_at: Instant,
}

/// A connection that is established or is being established.
type SharedConnection<C> = Shared<BoxFuture<'static, RedisResult<C>>>;

/// The connection in use.
struct Current<C: Clone> {
    /// Increases by one with each replacement.
    number: u64,
    connection: SharedConnection<C>,
    /// Time from which the attempt to connect may begin, after its delay. In a cluster, the time of the last attempt to replace the
    /// connection, or from which the replacement is used.
    start: Instant,
    /// Number of consecutive failed attempts to connect. An attempt that leads to a replica counts as failed. In a cluster, so
    /// does a connection that is replaced while it is new.
    failures: u32,
    /// The next connection, used once it is established. Until then, calls reach the responsive servers of a cluster on the
    /// current one.
    replacement: Option<SharedConnection<C>>,
}

impl<C: Clone> Current<C> {
    /// Returns the delay before the connection to a cluster is replaced, and counts the replacement.
    ///
    /// While a node is unresponsive, each new connection connects to all other nodes, and its calls of that node time out. Without
    /// the delay, every process would reconnect to the whole cluster with each timeout.
    fn delay_of_replacement(&mut self) -> Duration {
        let age = self.start.elapsed();
        // If this attempt fails, the next one has a delay.
        self.start = Instant::now();
        if age >= MIN_AGE_IN_CLUSTER {
            self.failures = 0;
            return Duration::ZERO;
        }
        let delay = MIN_BACKOFF.saturating_mul(2_u32.saturating_pow(self.failures));
        self.failures = self.failures.saturating_add(1);
        add_jitter(delay.min(MAX_BACKOFF_IN_CLUSTER))
    }
}

impl<C: Clone + Send + Sync + 'static> ReconnectingConnection<C> {
    /// Creates a connection that is established on the first call.
    ///
    /// Later calls wait for an attempt that takes longer than one call. `connect` must therefore end by itself.
    pub(crate) fn new<F>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<C>> + Send + 'static,
    {
        let connect = Box::new(move || connect().boxed());
        Self {
            current: Mutex::new(Current {
                number: 0,
                connection: spawn_connect(connect(), Duration::ZERO),
                start: Instant::now(),
                failures: 0,
                replacement: None,
            }),
            connect,
            is_cluster: false,
            replaces_on_timeout: false,
            last_reply: AtomicU64::new(0),
            first_pending_call: AtomicU64::new(0),
            created_at: Instant::now(),
        }
    }

    /// Like [`new`](Self::new), but for a connection to several servers.
    ///
    /// Such a connection reads the map of slots when it is established. It does not read the map again when a node becomes
    /// unresponsive and another node replaces that node. One call that times out is therefore enough to reconnect.
    #[cfg(feature = "cluster")]
    pub(crate) fn new_cluster<F>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<C>> + Send + 'static,
    {
        Self {
            is_cluster: true,
            replaces_on_timeout: true,
            ..Self::new(connect)
        }
    }

    /// Makes each call that times out replace the connection, even if the server has replied to other calls meanwhile.
    ///
    /// A server executes the calls of a connection one after the other. If each takes long, the server would execute a call
    /// long after its timeout. It discards such calls when the replaced connection closes, once the other calls on it end.
    pub(crate) fn replace_on_timeout(mut self) -> Self {
        self.replaces_on_timeout = true;
        self
    }

    /// Makes a call on the connection.
    ///
    /// Calls that arrive during an attempt to connect wait for that attempt. The attempt continues if they are dropped.
    pub(crate) async fn call<T, F>(
        &self,
        deadline: Instant,
        call: impl FnOnce(C) -> F,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut current = self.current();
        let must_replace = match current.1.clone().now_or_never() {
            Some(Ok(_)) => !self.is_cluster && self.is_unresponsive(deadline),
            // The attempt failed after its callers had left. This call starts another one.
            Some(Err(_)) => true,
            // No command was sent on a connection that is being established, and the attempt ends by itself.
            None => false,
        };
        if must_replace {
            self.replace(current.0);
            current = self.current();
        }
        let (number, connection, replacement) = current;
        let connection = match with_deadline(deadline, connection).await {
            Ok(connection) => connection,
            // The connection is still being established.
            Err(error) if error.is_timeout() && Instant::now() >= deadline => return Err(error),
            Err(error) => {
                self.reconnect_after_failure(number);
                return Err(error);
            }
        };
        let started = self.elapsed_micros();
        let call = poll_alongside(replacement, call(connection));
        let result = with_deadline(deadline, call).await;
        match &result {
            Ok(_) => self.last_reply.store(self.elapsed_micros(), Relaxed),
            Err(error) if is_from_replica(error) => self.leave_replica(number),
            Err(error) if error.is_unrecoverable_error() => self.replace(number),
            // A server that disappears without closing the connection sends no more replies. A slow server replies to some
            // of the calls.
            Err(error) if error.is_timeout() => {
                if self.replaces_on_timeout || self.last_reply.load(Relaxed) < started {
                    self.replace(number);
                }
            }
            // An error reply is a reply.
            Err(_) => self.last_reply.store(self.elapsed_micros(), Relaxed),
        }
        result
    }

    /// Returns `true` if calls are pending and the server has sent no reply for as long as this call may take.
    ///
    /// Callers with shorter timeouts drop their calls before these time out here, so the next call has to check.
    fn is_unresponsive(&self, deadline: Instant) -> bool {
        let now = self.elapsed_micros();
        let first_pending_call = self.first_pending_call.load(Relaxed);
        if first_pending_call <= self.last_reply.load(Relaxed) {
            self.first_pending_call.store(now, Relaxed);
            return false;
        }
        let limit = deadline.saturating_duration_since(Instant::now());
        Duration::from_micros(now.saturating_sub(first_pending_call)) >= limit
    }

    fn elapsed_micros(&self) -> u64 {
        u64::try_from(self.created_at.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Returns the number of the current connection, the connection, and its replacement. Switches to the replacement first
    /// if that is established.
    fn current(&self) -> (u64, SharedConnection<C>, Option<SharedConnection<C>>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(replacement) = current.replacement.take_if(|it| it.peek().is_some())
            && matches!(replacement.peek(), Some(Ok(_)))
        {
            current.number += 1;
            current.connection = replacement;
            current.start = Instant::now();
        }
        (
            current.number,
            current.connection.clone(),
            current.replacement.clone(),
        )
    }

    /// Reconnects, unless another call has already replaced the connection or started to.
    fn replace(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        let is_established = matches!(current.connection.peek(), Some(Ok(_)));
        if self.is_cluster && is_established {
            if current.replacement.is_none() {
                let delay = current.delay_of_replacement();
                current.replacement = Some(spawn_connect((self.connect)(), delay));
            }
        } else {
            let failures = if is_established { 0 } else { current.failures };
            self.start_connecting(&mut current, failures, Duration::ZERO);
        }
    }

    /// Like [`replace`](Self::replace), but for a connection to a replica: backs off if that connection is new.
    ///
    /// A replica accepts connections. As long as the address leads to it, each new connection gets the same reply. Without
    /// the backoff, each call of each client would connect to it.
    fn leave_replica(&self, number: u64) {
        let is_new = {
            let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            current.start.elapsed() < MAX_BACKOFF
        };
        // The connection to a cluster leads to other servers too, and stays in use until its replacement is established.
        if is_new && !self.is_cluster {
            self.reconnect_after_failure(number);
        } else {
            self.replace(number);
        }
    }

    /// Like [`replace`](Self::replace), but for an attempt that has just failed: backs off before the next one.
    ///
    /// Without the backoff, each call of each client would connect to a server that rejects connections.
    fn reconnect_after_failure(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        let delay = MIN_BACKOFF.saturating_mul(2_u32.saturating_pow(current.failures));
        let failures = current.failures.saturating_add(1);
        self.start_connecting(&mut current, failures, add_jitter(delay.min(MAX_BACKOFF)));
    }

    fn start_connecting(&self, current: &mut Current<C>, failures: u32, delay: Duration) {
        self.last_reply.store(self.elapsed_micros(), Relaxed);
        *current = Current {
            number: current.number + 1,
            connection: spawn_connect((self.connect)(), delay),
            start: Instant::now() + delay,
            failures,
            replacement: None,
        };
    }
}

/// Connects after a delay, in a task that the first poll spawns.
///
/// Without a task, a caller that times out would stop the attempt for all other callers. A caller whose runtime shuts down
/// would leave timers of that runtime in the shared future, which no other runtime may poll.
fn spawn_connect<C: Clone + Send + Sync + 'static>(
    connect: BoxFuture<'static, RedisResult<C>>,
    delay: Duration,
) -> SharedConnection<C> {
    let start = Instant::now() + delay;
    let connect = async move {
        if !delay.is_zero() {
            sleep_until(start).await;
        }
        connect.await
    };
    async { tokio::spawn(connect).await.map_err(io::Error::other)? }
        .boxed()
        .shared()
}

/// Returns a random delay between 3/4 of `delay` and `delay`, so that clients rejected at the same time do not reconnect at
/// the same time.
fn add_jitter(delay: Duration) -> Duration {
    // The seeds of `RandomState` are random.
    let [random, ..] = RandomState::new().hash_one(()).to_be_bytes();
    delay * 3 / 4 + delay / 4 * u32::from(random) / 255
}

/// Makes a call and polls the replacement alongside it, because no caller waits for the replacement yet.
async fn poll_alongside<C: Clone, T>(
    replacement: Option<SharedConnection<C>>,
    call: impl Future<Output = T>,
) -> T {
    let Some(mut replacement) = replacement else {
        return call.await;
    };
    let mut call = std::pin::pin!(call);
    let mut is_ready = false;
    poll_fn(|cx| {
        is_ready = is_ready || replacement.poll_unpin(cx).is_ready();
        call.as_mut().poll(cx)
    })
    .await
}

/// Returns `true` if the server is a replica.
///
/// It is a former primary: another server has been promoted, and only a new connection reaches that server.
pub(crate) fn is_from_replica(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => true,
        // Before Redis 7, the error code of a command inside a script is only in the text of the reply.
        ErrorKind::Server(ServerErrorKind::ResponseError) => error
            .detail()
            .is_some_and(|detail| detail.contains(": -READONLY ")),
        _ => false,
    }
}

/// Delay between the first failed attempt to connect and the next. It doubles with each further failure.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// Longest delay before an attempt to connect, and the age from which a connection is no longer new.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// Longest delay before the connection to a cluster is replaced. Meanwhile the current one serves the other nodes. A node that was
/// replaced by another one is reached after the delay.
const MAX_BACKOFF_IN_CLUSTER: Duration = Duration::from_secs(4);
/// Age from which a connection to a cluster is replaced without a delay, unless an attempt has failed in that time.
const MIN_AGE_IN_CLUSTER: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
