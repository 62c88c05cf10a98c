//! Two futures in a row, in the memory of the larger one.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

pin_project! {
    /// A future, and the one that follows it.
    ///
    /// An `async` block keeps the memory of both, because the first one is an argument of the block.
    #[project = SequenceProj]
    pub(super) enum Sequence<A, F, B> {
        First { #[pin] first: A, then: Option<F> },
        Second { #[pin] second: B },
    }
}

/// Continuation of a [`Sequence`] after its first future.
pub(super) enum Next<B, T> {
    Future(B),
    Output(T),
}

impl<A, F, B> Sequence<A, F, B>
where
    A: Future,
    B: Future,
    F: FnOnce(A::Output) -> Next<B, B::Output>,
{
    pub(super) fn new(first: A, then: F) -> Self {
        Self::First {
            first,
            then: Some(then),
        }
    }
}

impl<A, F, B> Future for Sequence<A, F, B>
where
    A: Future,
    B: Future,
    F: FnOnce(A::Output) -> Next<B, B::Output>,
{
    type Output = B::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<B::Output> {
        if let SequenceProj::First { first, then } = self.as_mut().project() {
            let output = ready!(first.poll(cx));
            let then = then
                .take()
                .expect("a future is not polled after it is ready");
            match then(output) {
                Next::Future(second) => self.set(Self::Second { second }),
                Next::Output(output) => return Poll::Ready(output),
            }
        }
        match self.project() {
            SequenceProj::Second { second } => second.poll(cx),
            SequenceProj::First { .. } => unreachable!("replaced above"),
        }
    }
}
