//! A body that follows a script.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

/// The next step of a [`Scripted`] body.
#[derive(Clone, Debug)]
pub enum Step {
    /// Yields a chunk.
    Data(Bytes),
    /// Yields trailers.
    Trailers(HeaderMap),
    /// Lets time pass.
    Wait(Duration),
    /// Fails.
    Fail,
}

impl From<&'static str> for Step {
    fn from(data: &'static str) -> Self {
        Self::Data(Bytes::from_static(data.as_bytes()))
    }
}

/// A body of unknown length that follows its steps, and counts the frames taken from it.
#[derive(Debug, Default)]
pub struct Scripted {
    steps: VecDeque<Step>,
    waiting: Option<Pin<Box<Sleep>>>,
    taken: Arc<AtomicU64>,
    exactly: Option<u64>,
}

impl Scripted {
    /// Creates a body of these steps.
    pub fn new<S: Into<Step>>(steps: impl IntoIterator<Item = S>) -> Self {
        Self {
            steps: steps.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Makes the body announce exactly this length.
    #[must_use]
    pub fn of_length(self, bytes: u64) -> Self {
        Self {
            exactly: Some(bytes),
            ..self
        }
    }

    /// Returns a counter of the frames taken, which can be read later.
    #[must_use]
    pub fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                std::task::ready!(waiting.as_mut().poll(cx));
                self.waiting = None;
            }
            let frame = match self.steps.pop_front() {
                None => return Poll::Ready(None),
                Some(Step::Wait(time)) => {
                    self.waiting = Some(Box::pin(sleep(time)));
                    continue;
                }
                Some(Step::Data(data)) => Ok(Frame::data(data)),
                Some(Step::Trailers(trailers)) => Ok(Frame::trailers(trailers)),
                Some(Step::Fail) => {
                    self.steps.clear();
                    Err(Broken)
                }
            };
            self.taken.fetch_add(1, Ordering::SeqCst);
            return Poll::Ready(Some(frame));
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.exactly.map(SizeHint::with_exact).unwrap_or_default()
    }
}

/// The failure of a [`Scripted`] body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke off")
    }
}

impl std::error::Error for Broken {}
