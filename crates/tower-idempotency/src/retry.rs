//! Deadlines, retries and backoff.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::{clock::jittered, store::Ttl};

/// Number of attempts of one store call.
const MAX_ATTEMPTS: u32 = 3;

/// Three attempts under one deadline of 2 x the timeout of a single call.
pub(crate) struct RetryBudget {
    attempts_left: u32,
    timeout: Duration,
    // Set when a call first returns `Pending`. Most calls are ready at once and need no clock.
    deadline: Option<Instant>,
}

impl RetryBudget {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self {
            attempts_left: MAX_ATTEMPTS,
            timeout,
            deadline: None,
        }
    }

    fn deadline(&mut self) -> Instant {
        *self
            .deadline
            .get_or_insert_with(|| from_now(self.timeout.saturating_mul(2)))
    }

    /// Returns `true` if a call or a delay has taken any time.
    pub(crate) const fn has_waited(&self) -> bool {
        self.deadline.is_some()
    }

    /// Makes one attempt. Returns `None` if it exceeds its timeout or the deadline; the call is then dropped.
    pub(crate) async fn attempt<F: Future>(&mut self, call: F) -> Option<F::Output> {
        let call = pin!(call);
        with_deadline(|| from_now(self.timeout).min(self.deadline()), call).await
    }

    /// Waits before the next attempt. Returns `false` if no attempt or no time is left.
    pub(crate) async fn backoff(&mut self) -> bool {
        self.attempts_left -= 1;
        if self.attempts_left == 0 {
            return false;
        }
        let millis = if self.attempts_left == 2 { 10 } else { 40 };
        let delay = jittered(Duration::from_millis(millis));
        if Instant::now() + delay >= self.deadline() {
            return false;
        }
        Box::pin(sleep(delay)).await;
        true
    }
}

/// Delays that grow from 50 ms to 1 s.
pub(crate) struct Backoff(Duration);

impl Backoff {
    pub(crate) fn new() -> Self {
        Self(Duration::from_millis(50))
    }

    /// Waits for the next delay. Returns `false` if `deadline` has passed.
    pub(crate) async fn wait_until(&mut self, deadline: Instant) -> bool {
        sleep(jittered(self.0)).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(1));
        Instant::now() < deadline
    }
}

/// Returns the output of the future, or `None` if `deadline` passes first. A future that is ready at once needs neither a
/// clock reading nor a timer.
async fn with_deadline<F: Future>(
    mut deadline: impl FnMut() -> Instant,
    mut future: Pin<&mut F>,
) -> Option<F::Output> {
    let mut timer = LazyTimer::default();
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => timer.poll(cx, &mut deadline).map(|()| None),
    })
    .await
}

/// Timer that is created when a future first waits.
#[derive(Default)]
pub(crate) struct LazyTimer {
    sleep: Option<Pin<Box<Sleep>>>,
    polled_again: bool,
}

impl LazyTimer {
    /// Returns `Ready` once the deadline has passed. Call it while the future is pending.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        deadline: impl FnOnce() -> Instant,
    ) -> Poll<()> {
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(sleep_until(deadline())));
        sleep.as_mut().poll(cx)
    }

    /// Like [`poll`](Self::poll), but has the future polled a second time before it creates a timer.
    ///
    /// Some servers return a request body that has already arrived only at the second poll.
    pub(crate) fn poll_after_second(
        &mut self,
        cx: &mut Context<'_>,
        deadline: impl FnOnce() -> Instant,
    ) -> Poll<()> {
        if !std::mem::replace(&mut self.polled_again, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.poll(cx, deadline)
    }
}

/// Returns the instant `duration` from now. A longer duration than [`Ttl::MAX`], such as `Duration::MAX`, counts as
/// [`Ttl::MAX`].
pub(crate) fn from_now(duration: Duration) -> Instant {
    Instant::now() + duration.min(Ttl::MAX.as_duration())
}
