//! Waiting for one's turn, the last one first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A number of turns. Who came last gets the next one that is free.
///
/// Whoever waits does so for a limited time. In a flood whoever came first has the least of it left: served in that order,
/// all would be cut off in the middle of what they asked, and everything be done for nothing.
pub(crate) struct Line(Arc<Mutex<State>>);

struct State {
    free: usize,
    waiting: Vec<oneshot::Sender<Turn>>,
}

/// Free for the next one when it is dropped.
pub(crate) struct Turn(Option<Arc<Mutex<State>>>);

impl Line {
    pub(crate) fn new(turns: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            free: turns,
            waiting: Vec::new(),
        })))
    }

    /// `None` is impossible: the line outlives who waits in it.
    pub(crate) async fn turn(&self) -> Option<Turn> {
        let waiting = {
            let mut state = lock(&self.0);
            if state.free > 0 {
                state.free -= 1;
                return Some(Turn(Some(Arc::clone(&self.0))));
            }
            if state.waiting.len() == state.waiting.capacity() {
                state.waiting.retain(|waiting| !waiting.is_closed());
            }
            let (next, waiting) = oneshot::channel();
            state.waiting.push(next);
            waiting
        };
        // Dropped with the turn in it, it passes that on.
        waiting.await.ok()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(line) = self.0.take() else {
            return;
        };
        let mut state = lock(&line);
        while let Some(next) = state.waiting.pop() {
            match next.send(Self(Some(Arc::clone(&line)))) {
                Ok(()) => return,
                // Who waited has left.
                Err(mut turn) => drop(turn.0.take()),
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

    #[test]
    fn who_came_last_is_next_and_who_left_is_passed_over() {
        let cx = &mut Context::from_waker(Waker::noop());
        let line = Line::new(1);
        let Poll::Ready(Some(first)) = pin!(line.turn()).poll(cx) else {
            panic!("it is free");
        };
        let (mut second, mut third) = (pin!(line.turn()), pin!(line.turn()));
        let mut fourth = Box::pin(line.turn());
        assert!(second.as_mut().poll(cx).is_pending());
        assert!(third.as_mut().poll(cx).is_pending());
        assert!(fourth.as_mut().poll(cx).is_pending());
        drop(fourth);
        drop(first);
        assert!(second.as_mut().poll(cx).is_pending());
        let Poll::Ready(Some(turn)) = third.as_mut().poll(cx) else {
            panic!("it is the last one's turn");
        };
        drop(turn);
        assert!(second.as_mut().poll(cx).is_ready());
    }

    #[test]
    fn a_turn_is_not_lost_with_whom_it_was_given_to() {
        let cx = &mut Context::from_waker(Waker::noop());
        let line = Line::new(1);
        let Poll::Ready(Some(first)) = pin!(line.turn()).poll(cx) else {
            panic!("it is free");
        };
        let mut second = Box::pin(line.turn());
        assert!(second.as_mut().poll(cx).is_pending());
        drop(first);
        drop(second);
        assert!(pin!(line.turn()).poll(cx).is_ready());
    }

    #[test]
    fn who_left_is_not_remembered() {
        let cx = &mut Context::from_waker(Waker::noop());
        let line = Line::new(0);
        for _ in 0..1_000 {
            assert!(pin!(line.turn()).poll(cx).is_pending());
        }
        assert!(lock(&line.0).waiting.capacity() < 10);
    }
}
