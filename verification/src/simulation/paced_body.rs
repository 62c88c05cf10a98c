//! Bodies of requests and of responses that arrive in pieces, with delays.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use super::Millis;

/// The next step of a body.
pub(super) enum Piece {
    Data(Bytes),
    Wait(Millis),
    Break,
}

/// A body of pieces.
pub(super) struct PacedBody {
    pieces: VecDeque<Piece>,
    waiting: Option<Pin<Box<Sleep>>>,
    exact: Option<u64>,
}

/// A body broke off.
#[derive(Debug)]
pub(super) struct BrokenBody;

impl fmt::Display for BrokenBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke off")
    }
}

impl std::error::Error for BrokenBody {}

impl PacedBody {
    pub(super) fn new(pieces: impl IntoIterator<Item = Piece>) -> Self {
        Self {
            pieces: pieces.into_iter().collect(),
            waiting: None,
            exact: None,
        }
    }

    /// Announces the exact length of the body.
    pub(super) fn announced(mut self) -> Self {
        let length = |piece: &Piece| match piece {
            Piece::Data(data) => data.len() as u64,
            Piece::Wait(_) | Piece::Break => 0,
        };
        self.exact = Some(self.pieces.iter().map(length).sum());
        self
    }
}

impl Body for PacedBody {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                if waiting.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                self.waiting = None;
            }
            match self.pieces.pop_front() {
                None => return Poll::Ready(None),
                Some(Piece::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Some(Piece::Break) => return Poll::Ready(Some(Err(BrokenBody))),
                Some(Piece::Wait(0)) => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Some(Piece::Wait(pause)) => {
                    self.waiting = Some(Box::pin(sleep(Duration::from_millis(pause))));
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.exact
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// The response body of a handler: a paced body, or one that was prepared for a commit.
pub(super) enum ResponseBody {
    Plain(PacedBody),
    Prepared(Pin<Box<tower_idempotency::Body<ResponseBody>>>),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BrokenBody;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenBody>>> {
        match self.get_mut() {
            Self::Plain(body) => Pin::new(body).poll_frame(cx),
            Self::Prepared(body) => body.as_mut().poll_frame(cx),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Plain(body) => body.size_hint(),
            Self::Prepared(body) => body.size_hint(),
        }
    }
}
