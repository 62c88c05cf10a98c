//! Connections to one upstream, and requests on them.
//!
//! The pool sends a request a second time only if hyper returned it unsent. Everything else is an unknown outcome.

use std::{
    collections::VecDeque,
    error::Error,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use h2::Reason;
use http::{Request, Response, StatusCode, Version};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{sync::Mutex as AsyncMutex, time::timeout};

use super::connect::Target;
use crate::{
    body::{Progress, RequestBody},
    config::{ConfigError, Upstream},
};

/// The reason why a request got no response.
#[derive(Debug)]
pub(crate) enum SendError {
    /// No byte of the request was sent, or the upstream stated that it has not processed it.
    Unsent(Cause),
    /// The request was sent, completely or in part.
    Broken(Cause),
    /// The request was sent, and the head of the response did not arrive in time.
    Timeout,
}

pub(crate) type Cause = Box<dyn Error + Send + Sync>;

/// The connections to one upstream.
pub(crate) struct Pool {
    pub(crate) target: Target,
    connect_timeout: Duration,
    timeout: Duration,
    keep_alive: Duration,
    max_idle: usize,
    idle: Mutex<VecDeque<Idle>>,
    /// The one connection to an upstream with HTTP/2.
    shared: AsyncMutex<Option<http2::SendRequest<RequestBody>>>,
}

/// A connection without a request.
struct Idle {
    sender: http1::SendRequest<RequestBody>,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(upstream: &Upstream) -> Result<Self, ConfigError> {
        Ok(Self {
            target: Target::new(upstream)?,
            connect_timeout: upstream.connect_timeout.get_ref().get(),
            timeout: upstream.timeout.get_ref().get(),
            keep_alive: upstream.keep_alive.get(),
            max_idle: upstream.max_idle,
            idle: Mutex::default(),
            shared: AsyncMutex::default(),
        })
    }

    /// Sends a request and returns the head of its response.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the request may have been sent.
    pub(crate) async fn send(
        self: &Arc<Self>,
        req: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        if self.target.http2 {
            self.send_http2(req).await
        } else {
            self.send_http1(req).await
        }
    }

    async fn send_http1(
        self: &Arc<Self>,
        mut req: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        *req.version_mut() = Version::HTTP_11;
        while let Some(mut sender) = self.take_idle() {
            match self
                .attempt(req.body().progress(), sender.try_send_request(req))
                .await
            {
                Ok(res) => return Ok(self.received(sender, res)),
                // The upstream closed the connection before hyper wrote a byte of the request.
                Err(AttemptError::Unsent(unsent, _)) => req = *unsent,
                Err(AttemptError::Failed(error)) => return Err(error),
            }
        }
        let mut sender = self.connect_http1().await.map_err(SendError::Unsent)?;
        match self
            .attempt(req.body().progress(), sender.try_send_request(req))
            .await
        {
            Ok(res) => Ok(self.received(sender, res)),
            Err(error) => Err(error.into()),
        }
    }

    async fn send_http2(
        &self,
        mut req: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        *req.version_mut() = Version::HTTP_2;
        let (mut sender, is_fresh) = self.shared_sender().await.map_err(SendError::Unsent)?;
        let sent = self
            .attempt(req.body().progress(), sender.try_send_request(req))
            .await;
        let unsent = match sent {
            Err(AttemptError::Unsent(unsent, _)) if !is_fresh => *unsent,
            sent => return sent.map_err(SendError::from),
        };
        self.shared.lock().await.take();
        let (mut sender, _) = self.shared_sender().await.map_err(SendError::Unsent)?;
        let sent = self.attempt(unsent.body().progress(), sender.try_send_request(unsent));
        sent.await.map_err(SendError::from)
    }

    /// Waits for the head of a response. The timeout restarts if the upstream has read more of the request.
    async fn attempt(
        &self,
        progress: Arc<Progress>,
        sent: impl Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>>,
    ) -> Result<Response<Incoming>, AttemptError> {
        let mut sent = std::pin::pin!(sent);
        loop {
            match timeout(self.timeout, sent.as_mut()).await {
                Ok(Ok(res)) => return Ok(res),
                Ok(Err(mut error)) => {
                    return Err(match error.take_message() {
                        Some(unsent) => AttemptError::Unsent(Box::new(unsent), error.into_error()),
                        None => AttemptError::Failed(failure(error.into_error())),
                    });
                }
                Err(_) if progress.take() => {}
                Err(_) => return Err(AttemptError::Failed(SendError::Timeout)),
            }
        }
    }

    /// Returns the response. The connection returns to the pool when the response has been read.
    fn received(
        self: &Arc<Self>,
        mut sender: http1::SendRequest<RequestBody>,
        res: Response<Incoming>,
    ) -> Response<Incoming> {
        if res.status() == StatusCode::SWITCHING_PROTOCOLS || self.keep_alive.is_zero() {
            return res;
        }
        if sender.is_ready() {
            self.put_idle(sender);
        } else {
            let pool = Arc::downgrade(self);
            tokio::spawn(async move {
                if sender.ready().await.is_ok()
                    && let Some(pool) = pool.upgrade()
                {
                    pool.put_idle(sender);
                }
            });
        }
        res
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connection that was used last, unless it is closed or has been idle for too long.
    fn take_idle(&self) -> Option<http1::SendRequest<RequestBody>> {
        let mut idle = self.idle();
        while let Some(last) = idle.pop_back() {
            if last.since.elapsed() >= self.keep_alive {
                // The other connections have been idle for longer.
                idle.clear();
                return None;
            }
            if last.sender.is_ready() {
                return Some(last.sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: http1::SendRequest<RequestBody>) {
        let mut idle = self.idle();
        while let Some(first) = idle.front()
            && (first.since.elapsed() >= self.keep_alive || idle.len() >= self.max_idle)
        {
            idle.pop_front();
        }
        if self.max_idle > 0 {
            let since = Instant::now();
            idle.push_back(Idle { sender, since });
        }
    }

    async fn connect_http1(&self) -> Result<http1::SendRequest<RequestBody>, Cause> {
        let connecting = async {
            let io = TokioIo::new(self.target.connect().await?);
            let (sender, connection) = http1::Builder::new().handshake(io).await?;
            tokio::spawn(async move {
                // The request on the connection reports the error.
                let _ = connection.with_upgrades().await;
            });
            Ok::<_, Cause>(sender)
        };
        timeout(self.connect_timeout, connecting).await?
    }

    /// Returns a handle to the shared connection, and `true` if it was opened now.
    async fn shared_sender(&self) -> Result<(http2::SendRequest<RequestBody>, bool), Cause> {
        let mut shared = self.shared.lock().await;
        if let Some(sender) = shared.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok((sender.clone(), false));
        }
        let connecting = async {
            let io = TokioIo::new(self.target.connect().await?);
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.timer(TokioTimer::new()).adaptive_window(true);
            let (sender, connection) = builder.handshake(io).await?;
            tokio::spawn(async move {
                let _ = connection.await;
            });
            Ok::<_, Cause>(sender)
        };
        let sender = timeout(self.connect_timeout, connecting).await??;
        *shared = Some(sender.clone());
        Ok((sender, true))
    }
}

/// The failure of one attempt.
enum AttemptError {
    /// hyper returned the request and has sent no byte of it.
    Unsent(Box<Request<RequestBody>>, hyper::Error),
    Failed(SendError),
}

impl From<AttemptError> for SendError {
    fn from(attempt: AttemptError) -> Self {
        match attempt {
            AttemptError::Unsent(_, error) => Self::Unsent(error.into()),
            AttemptError::Failed(error) => error,
        }
    }
}

/// Returns the failure of a request that hyper has begun to send.
fn failure(error: hyper::Error) -> SendError {
    if is_refused_stream(&error) {
        return SendError::Unsent(error.into());
    }
    SendError::Broken(error.into())
}

/// Returns `true` if the upstream reset the stream before it processed the request (RFC 9113, section 8.7).
fn is_refused_stream(error: &hyper::Error) -> bool {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(cause) = cause.downcast_ref::<h2::Error>() {
            return cause.is_reset()
                && cause.is_remote()
                && cause.reason() == Some(Reason::REFUSED_STREAM);
        }
        source = cause.source();
    }
    false
}
