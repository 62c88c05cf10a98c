//! The store behind timeouts, bounded retries and counters: every call goes through here.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{Arc, OnceLock},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use crate::{
    clock::jittered,
    config::Config,
    execution::waiters::Waiters,
    future::catch_panic,
    lease::{Kept, Renewer},
    limits::{Limits, Place},
    store::{Acquired, Claim, LeaseRef, StoreError, Ttl, erased::ErasedStore},
    telemetry,
};

/// What all clones of a layer share while they run.
pub(crate) struct Engine {
    pub(crate) store: Arc<dyn ErasedStore>,
    pub(crate) renewer: Arc<Renewer>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) waiters: Waiters,
    pub(crate) owner: &'static str,
}

/// The store did not do what it was asked within the tries and the time it was given.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It said so.
    Store(StoreError),
    /// It did not answer.
    TimedOut,
}

/// How a completion ended.
#[derive(Debug)]
pub(crate) enum Completion {
    Stored,
    LeaseLost,
    TooLarge {
        limit: usize,
    },
    /// The store kept failing; what it said has been reported.
    Failing,
}

const TRIES: u32 = 3;
/// Until a release is made again that was answered and may have come too early. Four of them in a lease of 15 s.
const FIRST_PAUSE_AFTER_ANSWER: Duration = Duration::from_secs(1);

impl Engine {
    pub(crate) fn new(store: Arc<dyn ErasedStore>) -> Arc<Self> {
        Arc::new(Self {
            renewer: Renewer::new(Arc::clone(&store)),
            store,
            limits: Arc::default(),
            waiters: Waiters::default(),
            owner: owner(),
        })
    }

    /// Asks for the lease, at most three times and always under the claim's one token: a lost reply finds its own lease.
    ///
    /// Also says when the call that was answered was sent: a granted lease lasts from then.
    pub(crate) async fn acquire(
        &self,
        claim: &Claim,
        limit: Duration,
    ) -> Result<(Acquired, Instant), Failure> {
        let mut tries = Tries::new(limit);
        loop {
            let sent = Instant::now();
            let started = telemetry::start();
            let answer = tries.call(async { self.store.acquire(claim).await }).await;
            telemetry::store_time("acquire", started);
            let failure = match answer {
                // Over before we heard of it, so it may be somebody else's: the same token asks again, and is told.
                Some(Ok(Acquired::Granted { .. }))
                    if tries.waited() && sent.elapsed() >= claim.lease.as_duration() =>
                {
                    Failure::TimedOut
                }
                Some(Ok(acquired)) => return Ok((acquired, sent)),
                Some(Err(error)) => Failure::Store(error),
                None => Failure::TimedOut,
            };
            telemetry::store_error("acquire", &claim.id, failure.error());
            if !tries.again().await {
                return Err(failure);
            }
        }
    }

    /// Stores the record and ends the lease, at most three times.
    pub(crate) async fn complete(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
        limit: Duration,
    ) -> Completion {
        let mut tries = Tries::new(limit);
        loop {
            let started = telemetry::start();
            let call = async { self.store.complete(lease, record.clone(), retention).await };
            let answer = tries.call(call).await;
            telemetry::store_time("complete", started);
            let failure = match answer {
                Some(Ok(())) => return Completion::Stored,
                Some(Err(StoreError::LeaseLost)) => return Completion::LeaseLost,
                Some(Err(StoreError::RecordTooLarge { limit })) => {
                    return Completion::TooLarge { limit };
                }
                Some(Err(error)) => Failure::Store(error),
                None => Failure::TimedOut,
            };
            telemetry::store_error("complete", &lease.id, failure.error());
            if !tries.again().await {
                return Completion::Failing;
            }
        }
    }

    /// Frees the key, or leaves the orphan that was taken over, at most three times; false when the store kept failing.
    pub(crate) async fn release(&self, lease: &LeaseRef, limit: Duration) -> bool {
        let mut tries = Tries::new(limit);
        loop {
            let started = telemetry::start();
            let answer = tries.call(async { self.store.release(lease).await }).await;
            telemetry::store_time("release", started);
            let failure = match answer {
                Some(Ok(()) | Err(StoreError::LeaseLost)) => return true,
                Some(Err(error)) => Failure::Store(error),
                None => Failure::TimedOut,
            };
            telemetry::store_error("release", &lease.id, failure.error());
            if !tries.again().await {
                return false;
            }
        }
    }

    /// Frees the key of a lease that ended without anything to keep. When the store keeps failing, a task goes on trying
    /// for as long as a lease.
    pub(crate) async fn end(
        self: &Arc<Self>,
        lease: Kept,
        limit: Duration,
        place: Place,
        reason: &'static str,
    ) {
        lease.about_to_end(true);
        let ended = Box::pin(self.release(&lease.reference, limit)).await;
        if lease.is_in_doubt() {
            // Whoever commits may ask the store yet, and take what is free by then.
            self.give_back_later(&lease.grant.config, &lease.grant.claim, place);
            return;
        }
        telemetry::released(lease.id(), reason);
        if !ended {
            self.release_later(lease.reference, lease.last_try(), limit, place);
        }
    }

    /// Keeps trying to free the key of a lease that ended without anything to keep, until `deadline`.
    pub(crate) fn release_later(
        self: &Arc<Self>,
        lease: LeaseRef,
        deadline: Instant,
        limit: Duration,
        mut place: Place,
    ) {
        place.buffer.keep(0);
        let engine = Arc::clone(self);
        tokio::spawn(async move {
            let _place = place;
            engine.release_until(&lease, deadline, limit).await;
        });
    }

    /// As [`release_later`](Self::release_later), of the lease that an acquire may have taken of which nobody hears, or may take
    /// yet: the store may be busy with it for longer than anybody waits, and a release that comes before it finds nothing. So it is
    /// made again, less and less often, until the lease would be over. [`drain`](crate::IdempotencyLayer::drain) waits for
    /// the first only.
    ///
    /// Of as many as may be in flight at once. Of more, the release is made once, in the place that the request had.
    pub(crate) fn give_back_later(
        self: &Arc<Self>,
        config: &Config,
        claim: &Claim,
        mut place: Place,
    ) {
        // Of a takeover too: what a release does goes by the generation that the store knows.
        let lease = claim.lease_ref(1);
        let deadline = Instant::now() + claim.lease.as_duration();
        let limit = config.execution.store_timeout;
        // The request is gone, and only its place is needed, if that.
        place.buffer.keep(0);
        let giving_back = place.give_back(config.limits.max_in_flight);
        let engine = Arc::clone(self);
        tokio::spawn(async move {
            let mut giving_back = match giving_back {
                Ok(giving_back) => giving_back,
                Err(_place) => {
                    engine.release(&lease, limit).await;
                    return;
                }
            };
            engine.release_until(&lease, deadline, limit).await;
            giving_back.answered();
            let mut pause = FIRST_PAUSE_AFTER_ANSWER;
            while Instant::now() < deadline {
                sleep_until(deadline.min(Instant::now() + jittered(pause))).await;
                pause *= 2;
                engine.release(&lease, limit).await;
            }
        });
    }

    /// Until it has an answer.
    pub(crate) async fn release_until(&self, lease: &LeaseRef, deadline: Instant, limit: Duration) {
        let mut pause = Pause::new();
        while pause.before(deadline).await {
            if self.release(lease, limit).await {
                return;
            }
        }
    }
}

impl Failure {
    pub(crate) fn error(&self) -> Option<&StoreError> {
        match self {
            Self::Store(error) => Some(error),
            Self::TimedOut => None,
        }
    }

    pub(crate) fn into_source(self) -> Box<dyn std::error::Error + Send + Sync> {
        match self {
            Self::Store(error) => error.into(),
            Self::TimedOut => "the store did not answer in time".into(),
        }
    }
}

/// Three tries under one deadline: twice what a single call may take.
struct Tries {
    left: u32,
    limit: Duration,
    // Counted from the first moment that a call does not answer at once: most of them do, and need no clock.
    deadline: Option<Instant>,
}

impl Tries {
    fn new(limit: Duration) -> Self {
        Self {
            left: TRIES,
            limit,
            deadline: None,
        }
    }

    fn deadline(&mut self) -> Instant {
        *self
            .deadline
            .get_or_insert_with(|| from_now(self.limit.saturating_mul(2)))
    }

    /// Whether a call did not answer at once.
    const fn waited(&self) -> bool {
        self.deadline.is_some()
    }

    async fn call<T>(
        &mut self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<Result<T, StoreError>> {
        let call = pin!(unless_it_panics(call));
        within(|| from_now(self.limit).min(self.deadline()), call).await
    }

    /// Pauses, unless the tries or the time are used up.
    async fn again(&mut self) -> bool {
        self.left -= 1;
        if self.left == 0 {
            return false;
        }
        let pause = jittered(Duration::from_millis(if self.left == 2 { 10 } else { 40 }));
        if Instant::now() + pause >= self.deadline() {
            return false;
        }
        Box::pin(sleep(pause)).await;
        true
    }
}

/// A store that panics, as it is called or later, has failed like any other: it must not take a lease or a record out of our
/// hands.
pub(crate) async fn unless_it_panics<T>(
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let caught = catch_panic(pin!(call)).await;
    caught.unwrap_or_else(|_| Err(StoreError::backend("the store panicked")))
}

/// The future's output, or `None` when `deadline` passes first. One that is ready at once costs neither a look at the clock
/// nor a timer.
pub(crate) async fn within<F: Future + Unpin>(
    deadline: impl FnMut() -> Instant,
    future: F,
) -> Option<F::Output> {
    watch(deadline, future, false).await
}

/// As [`within`], for what comes from a server's connection: that is asked once more before there is a timer, since servers
/// hand over a body that has arrived only when they see that somebody wants it.
pub(crate) async fn within_or_asked_again<F: Future + Unpin>(
    deadline: impl FnMut() -> Instant,
    future: F,
) -> Option<F::Output> {
    watch(deadline, future, true).await
}

async fn watch<F: Future + Unpin>(
    mut deadline: impl FnMut() -> Instant,
    mut future: F,
    mut ask_again: bool,
) -> Option<F::Output> {
    let mut timer: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|cx| {
        if let Poll::Ready(output) = Pin::new(&mut future).poll(cx) {
            return Poll::Ready(Some(output));
        }
        if std::mem::take(&mut ask_again) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline())));
        timer.as_mut().poll(cx).map(|()| None)
    })
    .await
}

/// The instant so long from now; a setting without end, such as `Duration::MAX`, is as good as a hundred years.
pub(crate) fn from_now(duration: Duration) -> Instant {
    Instant::now() + duration.min(Ttl::MAX.as_duration())
}

/// Pauses that grow from 50 ms to 1 s.
pub(crate) struct Pause(Duration);

impl Pause {
    pub(crate) fn new() -> Self {
        Self(Duration::from_millis(50))
    }

    /// Pauses; false once `deadline` has passed.
    pub(crate) async fn before(&mut self, deadline: Instant) -> bool {
        sleep(jittered(self.0)).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(1));
        Instant::now() < deadline
    }
}

/// Host and process, for operators: the same for every request, so found once.
fn owner() -> &'static str {
    static OWNER: OnceLock<String> = OnceLock::new();
    OWNER.get_or_init(|| {
        let host = std::env::var("HOSTNAME")
            .or_else(|_| std::fs::read_to_string("/etc/hostname"))
            .unwrap_or_default();
        format!("{}:{}", host.trim(), std::process::id())
    })
}
