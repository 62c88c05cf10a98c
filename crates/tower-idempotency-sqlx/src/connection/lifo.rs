//! A semaphore that serves the newest waiter first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A fixed number of permits. A free permit goes to the waiter that came last.
///
/// Each waiter has a timeout. In a flood, the waiter that came first has the least time left. In first-come order,
/// every waiter would time out in the middle of its call, and all the work would be wasted.
pub(crate) struct LifoSemaphore(Arc<Mutex<State>>);

struct State {
    free: usize,
    waiters: Vec<oneshot::Sender<LifoPermit>>,
}

/// A permit. Its drop passes it to the newest waiter.
pub(crate) struct LifoPermit(Option<Arc<Mutex<State>>>);

impl LifoSemaphore {
    pub(crate) fn new(permits: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            free: permits,
            waiters: Vec::new(),
        })))
    }

    /// Waits for a permit. `None` is impossible: the semaphore outlives its waiters.
    pub(crate) async fn acquire(&self) -> Option<LifoPermit> {
        let permit = {
            let mut state = lock(&self.0);
            if state.free > 0 {
                state.free -= 1;
                return Some(LifoPermit(Some(Arc::clone(&self.0))));
            }
            if state.waiters.len() == state.waiters.capacity() {
                state.waiters.retain(|waiter| !waiter.is_closed());
            }
            let (waiter, permit) = oneshot::channel();
            state.waiters.push(waiter);
            permit
        };
        // If this future is dropped with the permit in the channel, the permit's drop passes it on.
        permit.await.ok()
    }
}

impl Drop for LifoPermit {
    fn drop(&mut self) {
        let Some(semaphore) = self.0.take() else {
            return;
        };
        let mut state = lock(&semaphore);
        while let Some(waiter) = state.waiters.pop() {
            match waiter.send(Self(Some(Arc::clone(&semaphore)))) {
                Ok(()) => return,
                // The waiter was cancelled. The permit is emptied first, because its drop would lock the state again.
                Err(mut permit) => drop(permit.0.take()),
            }
        }
        state.free += 1;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    // F-164
    #[test]
    fn serves_waiters_lifo_and_skips_cancelled() {
        let cx = &mut Context::from_waker(Waker::noop());
        let semaphore = LifoSemaphore::new(1);
        let Poll::Ready(Some(first)) = pin!(semaphore.acquire()).poll(cx) else {
            panic!("the permit is free");
        };
        let (mut second, mut third) = (pin!(semaphore.acquire()), pin!(semaphore.acquire()));
        let mut fourth = Box::pin(semaphore.acquire());
        assert!(second.as_mut().poll(cx).is_pending());
        assert!(third.as_mut().poll(cx).is_pending());
        assert!(fourth.as_mut().poll(cx).is_pending());
        drop(fourth);
        drop(first);
        assert!(second.as_mut().poll(cx).is_pending());
        let Poll::Ready(Some(permit)) = third.as_mut().poll(cx) else {
            panic!("the newest waiter gets the permit");
        };
        drop(permit);
        assert!(second.as_mut().poll(cx).is_ready());
    }

    #[test]
    fn permit_passes_on_if_receiver_was_dropped() {
        let cx = &mut Context::from_waker(Waker::noop());
        let semaphore = LifoSemaphore::new(1);
        let Poll::Ready(Some(first)) = pin!(semaphore.acquire()).poll(cx) else {
            panic!("the permit is free");
        };
        let mut second = Box::pin(semaphore.acquire());
        assert!(second.as_mut().poll(cx).is_pending());
        drop(first);
        drop(second);
        assert!(pin!(semaphore.acquire()).poll(cx).is_ready());
    }

    #[test]
    fn cancelled_waiters_free_memory() {
        let cx = &mut Context::from_waker(Waker::noop());
        let semaphore = LifoSemaphore::new(0);
        for _ in 0..1_000 {
            assert!(pin!(semaphore.acquire()).poll(cx).is_pending());
        }
        assert!(lock(&semaphore.0).waiters.capacity() < 10);
    }
}
