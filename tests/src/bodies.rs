//! Bodies that consist of pieces.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};

/// The next step of a [`Pieces`].
#[derive(Debug)]
pub enum Piece {
    /// Yields data.
    Data(Bytes),
    /// Is pending once.
    Wait,
    /// Stays pending.
    Stall,
    /// Fails.
    Break,
}

/// A body that gets its pieces from a closure, and counts the bytes that were read from it.
#[derive(Debug)]
pub struct Pieces<F> {
    next: F,
    progress: BodyProgress,
}

/// Counts the bytes that were read from a body.
#[derive(Clone, Debug, Default)]
pub struct BodyProgress(Arc<AtomicU64>);

impl BodyProgress {
    /// Returns the number of bytes so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl<F: FnMut() -> Option<Piece> + Unpin> Pieces<F> {
    /// Creates a body of the pieces that `next` returns, until `None`.
    pub fn new(next: F) -> Self {
        Self {
            next,
            progress: BodyProgress::default(),
        }
    }

    /// Returns a counter that stays valid after the body has moved.
    pub fn progress(&self) -> BodyProgress {
        self.progress.clone()
    }
}

impl<F: FnMut() -> Option<Piece> + Unpin> Body for Pieces<F> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match (self.next)() {
            None => Poll::Ready(None),
            Some(Piece::Data(data)) => {
                self.progress
                    .0
                    .fetch_add(data.len() as u64, Ordering::SeqCst);
                Poll::Ready(Some(Ok(Frame::data(data))))
            }
            Some(Piece::Wait) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(Piece::Stall) => Poll::Pending,
            Some(Piece::Break) => Poll::Ready(Some(Err(io::ErrorKind::BrokenPipe.into()))),
        }
    }
}

/// Creates a body of these pieces.
pub fn pieces(
    pieces: impl IntoIterator<Item = Piece, IntoIter: Send + Unpin + 'static>,
) -> axum::body::Body {
    let mut pieces = pieces.into_iter();
    axum::body::Body::new(Pieces::new(move || pieces.next()))
}
