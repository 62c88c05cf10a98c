//! Bodies of requests to the upstream, and of responses to the client.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use pin_project_lite::pin_project;

pin_project! {
    /// The body of a request to the upstream.
    pub(crate) struct RequestBody {
        #[pin]
        source: Source,
        progress: Arc<Progress>,
    }
}

pin_project! {
    #[project = SourceProj]
    enum Source {
        Layered { #[pin] body: tower_idempotency::Body<Incoming> },
        Plain { #[pin] body: Incoming },
    }
}

/// Signals that the upstream has read more of a request body.
#[derive(Debug, Default)]
pub(crate) struct Progress(AtomicBool);

impl Progress {
    /// Returns `true` if the body has advanced since the last call.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl From<tower_idempotency::Body<Incoming>> for RequestBody {
    fn from(body: tower_idempotency::Body<Incoming>) -> Self {
        Self {
            source: Source::Layered { body },
            progress: Arc::default(),
        }
    }
}

impl From<Incoming> for RequestBody {
    fn from(body: Incoming) -> Self {
        Self {
            source: Source::Plain { body },
            progress: Arc::default(),
        }
    }
}

impl RequestBody {
    pub(crate) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.project();
        let frame = ready!(match this.source.project() {
            SourceProj::Layered { body } => body.poll_frame(cx),
            SourceProj::Plain { body } => body.poll_frame(cx),
        });
        this.progress.0.store(true, Ordering::Relaxed);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Layered { body } => body.is_end_stream(),
            Source::Plain { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Layered { body } => body.size_hint(),
            Source::Plain { body } => body.size_hint(),
        }
    }
}

pin_project! {
    /// The body of a response, from the upstream or from the proxy itself.
    #[project = UpstreamBodyProj]
    pub(crate) enum UpstreamBody {
        Upstream { #[pin] body: Incoming },
        Own { #[pin] body: Full<Bytes> },
    }
}

impl UpstreamBody {
    pub(crate) fn own(data: Bytes) -> Self {
        Self::Own {
            body: Full::new(data),
        }
    }
}

impl From<Incoming> for UpstreamBody {
    fn from(body: Incoming) -> Self {
        Self::Upstream { body }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.project() {
            UpstreamBodyProj::Upstream { body } => body.poll_frame(cx),
            UpstreamBodyProj::Own { body } => body.poll_frame(cx).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Upstream { body } => body.is_end_stream(),
            Self::Own { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Upstream { body } => body.size_hint(),
            Self::Own { body } => body.size_hint(),
        }
    }
}

pin_project! {
    /// The body of a response to the client.
    #[project = ResponseBodyProj]
    pub(crate) enum ResponseBody {
        Layered { #[pin] body: tower_idempotency::Body<UpstreamBody> },
        Plain { #[pin] body: UpstreamBody },
    }
}

impl From<tower_idempotency::Body<UpstreamBody>> for ResponseBody {
    fn from(body: tower_idempotency::Body<UpstreamBody>) -> Self {
        Self::Layered { body }
    }
}

impl From<UpstreamBody> for ResponseBody {
    fn from(body: UpstreamBody) -> Self {
        Self::Plain { body }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.project() {
            ResponseBodyProj::Layered { body } => body.poll_frame(cx),
            ResponseBodyProj::Plain { body } => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Layered { body } => body.is_end_stream(),
            Self::Plain { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Layered { body } => body.size_hint(),
            Self::Plain { body } => body.size_hint(),
        }
    }
}
