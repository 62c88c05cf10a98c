//! Points at which a test holds a handler or a store call, and time limits for tests.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Semaphore, task::unconstrained};
use tower_idempotency::conformance::Hold;

/// Blocks each caller that passes it until the test lets the caller through, and notifies the test of each arrival.
#[derive(Clone, Debug)]
pub struct Barrier(Arc<(Semaphore, Semaphore)>);

impl Barrier {
    /// Creates a barrier that is closed.
    #[must_use]
    pub fn closed() -> Self {
        Self(Arc::new((Semaphore::new(0), Semaphore::new(0))))
    }

    /// Creates a barrier that is open.
    #[must_use]
    pub fn open() -> Self {
        let barrier = Self::closed();
        barrier.open_for_good();
        barrier
    }

    /// Announces the caller's arrival, and waits to be let through. Callers are let through in the order of their arrival.
    pub async fn pass(&self) {
        let (arrivals, tickets) = &*self.0;
        // Queues before it announces its arrival. Otherwise a caller that reacts to the announcement would be let through
        // first.
        let mut ticket = pin!(unconstrained(tickets.acquire()));
        let mut announced = false;
        let ticket = poll_fn(|cx| {
            let ticket = ticket.as_mut().poll(cx);
            if !announced {
                arrivals.add_permits(1);
                announced = true;
            }
            ticket
        });
        // After `open_for_good` the semaphore is closed, and callers pass without a ticket.
        if let Ok(ticket) = ticket.await {
            ticket.forget();
        }
    }

    /// Waits for the next arrival that no earlier call has returned for.
    ///
    /// # Panics
    ///
    /// Never: arrivals do not close.
    pub async fn arrival(&self) {
        let arrival = self.0.0.acquire().await;
        arrival.expect("arrivals do not close").forget();
    }

    /// Returns the number of arrivals that no call of `arrival` has returned for.
    #[must_use]
    pub fn arrivals(&self) -> usize {
        self.0.0.available_permits()
    }

    /// Lets the next `n` callers through, including future ones.
    pub fn release(&self, n: usize) {
        self.0.1.add_permits(n);
    }

    /// Lets all callers through from now on.
    pub fn open_for_good(&self) {
        self.0.1.close();
    }
}

/// Holds store calls at the barrier.
impl From<Barrier> for Hold {
    fn from(barrier: Barrier) -> Self {
        Self::new(move || {
            let barrier = barrier.clone();
            async move { barrier.pass().await }
        })
    }
}

/// Returns the output of the future, which may take up to 30 s on a paused clock, or two minutes on a real one.
///
/// # Panics
///
/// Panics if the future takes longer.
pub async fn bounded<T>(future: impl Future<Output = T>) -> T {
    let limits = [Duration::from_secs(30), Duration::from_secs(90)];
    let began = std::time::Instant::now();
    // Boxed: the bodies of tests are large.
    let mut future = Box::pin(future);
    for limit in limits {
        if let Ok(output) = tokio::time::timeout(limit, &mut future).await {
            return output;
        }
        if began.elapsed() < limit {
            panic!("timed out after {limit:?} on a paused clock");
        }
    }
    panic!("timed out after two minutes");
}

/// Returns the output of the future, which must finish within `limit` of tokio's clock.
///
/// # Panics
///
/// Panics if the future takes longer.
pub async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> T {
    // Boxed: the bodies of tests are large.
    match tokio::time::timeout(limit, Box::pin(future)).await {
        Ok(output) => output,
        Err(_elapsed) => panic!("timed out after {limit:?}"),
    }
}

/// Waits until `condition` holds.
///
/// # Panics
///
/// Panics if it does not hold within ten seconds on a paused clock, or a minute on a real one.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    const PAUSED: Duration = Duration::from_secs(10);
    const REAL: Duration = Duration::from_secs(60);
    let (began, real) = (tokio::time::Instant::now(), std::time::Instant::now());
    while !condition() {
        // Only a paused clock is faster than real time.
        let waited = began.elapsed();
        let limit = if real.elapsed() < PAUSED {
            PAUSED
        } else {
            REAL
        };
        assert!(waited < limit, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Generates a test of each function for each kind of runtime.
#[macro_export]
macro_rules! on_both_runtimes {
    ($($test:ident),* $(,)?) => {
        mod multi_thread {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                $crate::barrier::bounded(super::$test()).await;
            })*
        }
        mod current_thread {
            $(#[tokio::test]
            async fn $test() {
                $crate::barrier::bounded(super::$test()).await;
            })*
        }
    };
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        task::{Context, Poll, Wake, Waker},
    };

    use super::*;

    /// A waker that provides one ticket on the first arrival, and tries to pass the barrier with it.
    struct Pusher(Barrier, AtomicBool);

    impl Wake for Pusher {
        fn wake(self: Arc<Self>) {
            self.0.release(1);
            let passed = pin!(self.0.pass()).poll(&mut Context::from_waker(Waker::noop()));
            self.1.store(passed.is_ready(), Ordering::SeqCst);
        }
    }

    #[test]
    fn first_arrival_passes_first() {
        let barrier = Barrier::closed();
        let pusher = Arc::new(Pusher(barrier.clone(), AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&pusher));
        let mut arrival = pin!(barrier.arrival());
        let arrival = arrival.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(arrival, Poll::Pending);
        let mut first = pin!(barrier.pass());
        let mut poll = || first.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let _ = poll();
        assert!(!pusher.1.load(Ordering::SeqCst), "the later caller passed");
        assert_eq!(poll(), Poll::Ready(()));
    }
}
