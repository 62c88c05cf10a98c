//! A connection that all calls share, made again once it is no longer good.

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
use tokio::time::{Instant, sleep_until, timeout_at};

pub(crate) struct Redial<C: Clone> {
    dial: Box<dyn Fn() -> BoxFuture<'static, RedisResult<C>> + Send + Sync>,
    current: Mutex<Current<C>>,
    /// Whether the connection leads to several servers, of which one can be silent while the others answer.
    leads_to_many: bool,
    /// When the last answer came, or the connection was replaced; like all times here in microseconds since this was made.
    answered: AtomicU64,
    /// When the first of the calls began that came since, and found the connection made.
    asked: AtomicU64,
    made: Instant,
}

type Dialled<C> = Shared<BoxFuture<'static, RedisResult<C>>>;

struct Current<C: Clone> {
    number: u64,
    connection: Dialled<C>,
    /// How often in a row it could not be made.
    failures: u32,
    /// What takes its place once it is made: until then those servers that answer go on to be asked.
    next: Option<Dialled<C>>,
}

impl<C: Clone + Send + Sync + 'static> Redial<C> {
    /// Nothing is dialled before the first call. What takes longer than a call is waited for by the next ones: `dial` has to
    /// end by itself.
    pub(crate) fn new<F>(dial: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<C>> + Send + 'static,
    {
        let dial = Box::new(move || dial().boxed());
        Self {
            current: Mutex::new(Current {
                number: 0,
                connection: in_a_task(dial(), Duration::ZERO),
                failures: 0,
                next: None,
            }),
            dial,
            leads_to_many: false,
            answered: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            made: Instant::now(),
        }
    }

    /// As [`new`](Self::new), of a connection to several servers. It finds out which of them has what as it is made, and
    /// does not look again because one has fallen silent, whose place another has taken: so one call that times out is
    /// enough for making it anew.
    #[cfg(feature = "cluster")]
    pub(crate) fn to_many<F>(dial: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<C>> + Send + 'static,
    {
        Self {
            leads_to_many: true,
            ..Self::new(dial)
        }
    }

    /// Makes a call on the connection. Callers that come while it is being made wait for the one attempt; it goes on
    /// if they are dropped.
    pub(crate) async fn with<T, F>(
        &self,
        deadline: Instant,
        call: impl FnOnce(C) -> F,
    ) -> RedisResult<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let mut current = self.current();
        let is_spent = match current.1.clone().now_or_never() {
            Some(Ok(_)) => !self.leads_to_many && self.is_silent(deadline),
            // That was another's failure, who had left by then.
            Some(Err(_)) => true,
            // One that is still being made was not asked anything yet, and whoever makes it gives up by itself.
            None => false,
        };
        if is_spent {
            self.replace(current.0);
            current = self.current();
        }
        let (number, connection, next) = current;
        let connection = match in_time(deadline, connection).await {
            Ok(connection) => connection,
            // Still being made.
            Err(error) if error.is_timeout() && Instant::now() >= deadline => return Err(error),
            Err(error) => {
                self.try_again(number);
                return Err(error);
            }
        };
        let began = self.now();
        let result = in_time(deadline, beside(next, call(connection))).await;
        match &result {
            Ok(_) => self.answered.store(self.now(), Relaxed),
            Err(error) if is_final(error) => self.replace(number),
            // A server that is gone without a word never closes the connection. One that is slow answers somebody.
            Err(error) if error.is_timeout() => {
                if self.leads_to_many || self.answered.load(Relaxed) < began {
                    self.replace(number);
                }
            }
            // An error is an answer too.
            Err(_) => self.answered.store(self.now(), Relaxed),
        }
        result
    }

    /// Whether nothing was answered for as long as a call may take, though something was asked. Callers with less patience
    /// leave before a call of theirs times out, so that the next one has to notice.
    fn is_silent(&self, deadline: Instant) -> bool {
        let now = self.now();
        let asked = self.asked.load(Relaxed);
        if asked <= self.answered.load(Relaxed) {
            self.asked.store(now, Relaxed);
            return false;
        }
        let patience = deadline.saturating_duration_since(Instant::now());
        Duration::from_micros(now.saturating_sub(asked)) >= patience
    }

    fn now(&self) -> u64 {
        u64::try_from(self.made.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn current(&self) -> (u64, Dialled<C>, Option<Dialled<C>>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = current.next.take_if(|next| next.peek().is_some())
            && matches!(made.peek(), Some(Ok(_)))
        {
            current.number += 1;
            current.connection = made;
        }
        (
            current.number,
            current.connection.clone(),
            current.next.clone(),
        )
    }

    /// Makes the connection anew, unless somebody else did since, or is about to.
    fn replace(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        let is_made = matches!(current.connection.peek(), Some(Ok(_)));
        if self.leads_to_many && is_made {
            let next = || in_a_task((self.dial)(), Duration::ZERO);
            current.next.get_or_insert_with(next);
        } else {
            let failures = if is_made { 0 } else { current.failures };
            self.begin(&mut current, failures, Duration::ZERO);
        }
    }

    /// As [`replace`](Self::replace), of one that could not be made a moment ago. A server that turns away whoever comes is
    /// not asked as often as there are calls, by each of its clients.
    fn try_again(&self, number: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        let pause = MIN_PAUSE.saturating_mul(2_u32.saturating_pow(current.failures));
        let failures = current.failures.saturating_add(1);
        self.begin(&mut current, failures, jittered(pause.min(MAX_PAUSE)));
    }

    fn begin(&self, current: &mut Current<C>, failures: u32, pause: Duration) {
        self.answered.store(self.now(), Relaxed);
        *current = Current {
            number: current.number + 1,
            connection: in_a_task((self.dial)(), pause),
            failures,
            next: None,
        };
    }
}

/// Dials after a pause; in a task: a caller that gives up and has no successor would keep what it dialled with from all others,
/// and one whose runtime ends would leave them its timers, which nobody may wait for any more.
fn in_a_task<C: Clone + Send + Sync + 'static>(
    dial: BoxFuture<'static, RedisResult<C>>,
    pause: Duration,
) -> Dialled<C> {
    let end = Instant::now() + pause;
    let dial = async move {
        if !pause.is_zero() {
            sleep_until(end).await;
        }
        dial.await
    };
    async { tokio::spawn(dial).await.map_err(io::Error::other)? }
        .boxed()
        .shared()
}

/// Between three quarters of `pause` and all of it, so that those who were turned away together do not come back together.
fn jittered(pause: Duration) -> Duration {
    // The seeds of hashes are random.
    let [drawn, ..] = RandomState::new().hash_one(()).to_be_bytes();
    pause * 3 / 4 + pause / 4 * u32::from(drawn) / 255
}

/// Makes a call, and a connection on the way: nobody waits for that yet.
async fn beside<C: Clone, T>(next: Option<Dialled<C>>, call: impl Future<Output = T>) -> T {
    let Some(mut next) = next else {
        return call.await;
    };
    let mut call = std::pin::pin!(call);
    let mut is_made = false;
    poll_fn(|cx| {
        is_made = is_made || next.poll_unpin(cx).is_ready();
        call.as_mut().poll(cx)
    })
    .await
}

/// The call's result, or a timeout.
pub(crate) async fn in_time<T>(
    deadline: Instant,
    call: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    match timeout_at(deadline, call).await {
        Ok(result) => result,
        Err(_elapsed) => {
            let message = "the server did not answer in time";
            Err(io::Error::new(io::ErrorKind::TimedOut, message).into())
        }
    }
}

/// Whether no later call on this connection will fare better. A server that has become read-only is one that another has
/// taken over from: only dialling again finds that one.
pub(crate) fn is_final(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => true,
        // Before Redis 7 what a script runs into has no code but in the text.
        ErrorKind::Server(ServerErrorKind::ResponseError) => error
            .detail()
            .is_some_and(|detail| detail.contains(": -READONLY ")),
        _ => error.is_unrecoverable_error(),
    }
}

/// Between a connection that could not be made and the next attempt: twice as long each time.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::{
        collections::HashSet,
        sync::{
            Arc,
            atomic::{AtomicBool, AtomicUsize, Ordering},
        },
    };

    use tokio::time::{sleep, timeout};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    /// A connection that takes longer to make than three calls may take, and how often it was made.
    fn slow() -> (Redial<()>, Arc<AtomicUsize>) {
        let made = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&made);
        let redial = Redial::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            async {
                // In steps: the second does not wait for somebody to come.
                sleep(PATIENCE * 7 / 4).await;
                sleep(PATIENCE * 7 / 4).await;
                Ok(())
            }
        });
        (redial, made)
    }

    /// A connection that nobody takes, and how often it was tried.
    fn refused() -> (Redial<()>, Arc<AtomicUsize>) {
        let tried = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&tried);
        let redial = Redial::new(move || {
            let counted = Arc::clone(&counted);
            async move {
                counted.fetch_add(1, Ordering::Relaxed);
                Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())
            }
        });
        (redial, tried)
    }

    async fn call(redial: &Redial<()>) -> RedisResult<()> {
        redial
            .with(Instant::now() + PATIENCE, |()| async { Ok(()) })
            .await
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_takes_longer_to_make_than_calls_may_take_is_made_once() {
        let (redial, made) = slow();
        for n in 0..4 {
            assert_eq!(call(&redial).await.is_ok(), n == 3, "call {n}");
        }
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_could_not_be_made_when_everybody_had_left_is_nobody_elses_failure() {
        let made = AtomicUsize::default();
        let redial = Redial::new(move || {
            let is_first = made.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                if is_first {
                    sleep(PATIENCE * 3 / 2).await;
                    return Err(io::Error::other("no").into());
                }
                Ok(())
            }
        });
        assert!(call(&redial).await.is_err(), "it takes too long");
        sleep(PATIENCE).await;
        assert!(call(&redial).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_was_made_when_everybody_had_left_is_kept() {
        let (redial, made) = slow();
        for _ in 0..3 {
            let left = timeout(PATIENCE / 10, call(&redial)).await;
            assert!(left.is_err());
        }
        sleep(PATIENCE * 5).await;
        assert!(call(&redial).await.is_ok());
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_cannot_be_made_is_tried_after_ever_longer_pauses() {
        let (redial, tried) = refused();
        assert!(call(&redial).await.is_err());
        for (n, longest) in [100, 200, 400, 800, 1_000, 1_000].into_iter().enumerate() {
            let began = Instant::now();
            let end = began + PATIENCE * 2;
            let refused = redial.with(end, |()| async { Ok(()) });
            assert!(refused.await.is_err());
            // A clock is as fine as a millisecond.
            let pause = began.elapsed().as_millis();
            let expected = longest * 3 / 4..=longest + 1;
            assert!(expected.contains(&pause), "{pause} ms, {n} times before");
            assert_eq!(tried.load(Ordering::Relaxed), n + 2);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_was_made_is_made_again_at_once_and_the_pauses_begin_anew() {
        let turns_away = Arc::new(AtomicBool::new(true));
        let told = Arc::clone(&turns_away);
        let redial = Redial::new(move || {
            let told = Arc::clone(&told);
            async move {
                match told.load(Ordering::Relaxed) {
                    true => Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()),
                    false => Ok(()),
                }
            }
        });
        for _ in 0..4 {
            assert!(call(&redial).await.is_err());
        }
        turns_away.store(false, Ordering::Relaxed);
        assert!(call(&redial).await.is_ok());
        let breaks =
            async || -> RedisResult<()> { Err(io::Error::from(io::ErrorKind::BrokenPipe).into()) };
        let broken = redial.with(Instant::now() + PATIENCE, |()| breaks());
        assert!(broken.await.is_err());
        turns_away.store(true, Ordering::Relaxed);
        let began = Instant::now();
        assert!(call(&redial).await.is_err());
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(call(&redial).await.is_err());
        assert!(began.elapsed() <= Duration::from_millis(101));
    }

    #[test]
    fn pauses_differ() {
        let pauses: HashSet<_> = (0..100).map(|_| jittered(MAX_PAUSE)).collect();
        assert!(pauses.len() > 10, "{pauses:?}");
    }

    #[test]
    fn a_runtime_that_ends_leaves_no_pause_that_another_would_have_to_wait_for() {
        let runtime = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().build().unwrap()
        };
        let (redial, tried) = refused();
        let one = runtime();
        assert!(one.block_on(call(&redial)).is_err());
        let left = async { timeout(Duration::from_millis(10), call(&redial)).await };
        assert!(one.block_on(left).is_err());
        drop(one);
        let other = runtime();
        for _ in 0..2 {
            assert!(other.block_on(call(&redial)).is_err());
        }
        assert!(tried.load(Ordering::Relaxed) > 1);
    }
}
