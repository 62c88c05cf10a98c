//! Requests of an outbox that are sent again.

use std::{
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    time::SystemTime,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use super::{
    Outbox, OutboxError,
    entry::{DAMAGED, Entry},
    layer::{LATE, OutboxService},
    unknown_on_drop::UnknownOnDrop,
};
use crate::{
    body::ResponseBody,
    error::{BoxError, Error, Reason},
    first_sent::FirstSent,
    operation::{Operation, Outcome},
    series::Stored,
    settings::Settings,
};

impl<S: Clone, O: Outbox> OutboxService<S, O> {
    /// Returns the pending requests, to send them again under the same keys.
    ///
    /// Call it at the start of the process, and whenever failed or cancelled requests should be sent again. If another call
    /// or process sends a request at the same time, it is sent twice under one key and has one effect.
    ///
    /// After a start of the machine, call it once the wall clock is synchronized. If the clock is behind, recent entries are
    /// not sent: the error of their [`result`](Recovered::result) names the clock. Expired entries can be sent, and the server
    /// then executes them again.
    #[must_use]
    pub fn recover(&self) -> Recovery<S, O> {
        Recovery::new(self.clone())
    }
}

/// Pending requests of an outbox, oldest first. Created by [`OutboxService::recover`].
pub struct Recovery<S, O> {
    service: OutboxService<S, O>,
    page: VecDeque<(u64, Entry)>,
    position: u64,
    /// Position of the last entry to send, or a later one. `None` before the first call of [`next`](Self::next).
    end: Option<u64>,
}

/// Request of an outbox that was sent again, or whose key has expired.
#[derive(Debug)]
#[non_exhaustive]
pub struct Recovered<R: Body> {
    /// The stored request.
    pub entry: Entry,
    /// The operation, with its outcome.
    pub operation: Operation,
    /// The result of the call. If [`Error::is_expired`] returns `true`, nothing was sent: the server may have deleted its
    /// record. The application reports the operation to an operator, and calls [`Outbox::remove`].
    pub result: Result<Response<ResponseBody<R>>, Error>,
}

impl<S, O: Outbox> Recovery<S, O> {
    fn new(service: OutboxService<S, O>) -> Self {
        Self {
            service,
            page: VecDeque::new(),
            position: 0,
            end: None,
        }
    }

    /// Sends the next request under its key, with retries. Returns `None` after the last one.
    ///
    /// The first call sets the end of the recovery, so a recovery ends although other calls store entries meanwhile. A later
    /// recovery sends the entries after that end.
    ///
    /// `prepare` gets the request before it is sent, to add the credentials. By default, a server of `tower-idempotency`
    /// treats a new token as another caller, and executes the request again: see `docs/guide/clients.md` in the repository. Any
    /// other change can make the server reject the request.
    ///
    /// The entry is removed after a definite response, as after any call. After another outcome it stays, even if no
    /// attempt was executed, and a later recovery sends it again.
    ///
    /// [`RetryLayer::with_deadline`](crate::RetryLayer::with_deadline) limits each call of the outbox, and the wait for an inner
    /// service that is not ready. After that wait, [`result`](Recovered::result) is an error. The attempts then have the same
    /// time again.
    ///
    /// # Errors
    ///
    /// If the outbox cannot be read or written, or a reply takes longer than the deadline. No request was sent. If the call had
    /// read an entry, the next call continues after this entry.
    ///
    /// # Panics
    ///
    /// If it is polled outside a Tokio runtime whose time is enabled.
    ///
    /// # Cancellation
    ///
    /// The entry of a call that is dropped stays in the outbox, unless the call is dropped during the removal. The next call
    /// continues after it.
    pub async fn next<B, R>(
        &mut self,
        prepare: impl FnOnce(&mut Request<B>),
    ) -> Result<Option<Recovered<R>>, OutboxError>
    where
        S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
        S::Error: Into<BoxError>,
        S::Future: Send,
        B: From<Bytes> + Send + 'static,
        R: Body<Data: Send, Error: Send> + Send + 'static,
    {
        let shared = self.service.shared.clone();
        let settings = self.service.inner.settings();
        let end = match self.end {
            Some(end) => end,
            None => find_end(&*shared.outbox, settings).await?,
        };
        self.end = Some(end);
        let entry = loop {
            if self.page.is_empty() {
                let page = shared.outbox.pending(self.position, PAGE);
                let mut page = await_reply(settings, page).await?;
                page.retain(|(position, _)| *position <= end);
                self.page = page.into();
            }
            let Some((position, entry)) = self.page.pop_front() else {
                return Ok(None);
            };
            self.position = position;
            // Another call may have removed the entry since the page was read.
            let provider = entry.provider.or_else(|| shared.choose_provider());
            let resumed = shared
                .outbox
                .resume(entry.key(), SystemTime::now(), provider);
            if let Some(entry) = await_reply(settings, resumed).await? {
                break entry;
            }
        };
        let operation =
            Operation::with_key(entry.key()).map_err(|_| OutboxError::with_message(DAMAGED))?;
        entry.restore(&operation);
        let first_sent = entry.first_sent().unwrap_or_else(SystemTime::now);
        let first_sent = FirstSent::restored(first_sent);
        let unknown_on_drop = UnknownOnDrop::new(&operation);
        let mut req = entry.request::<B>();
        req.extensions_mut().insert(operation.clone());
        entry.restore_key(&settings.keys, &mut req);
        prepare(&mut req);
        let mut inner = self.service.inner.clone();
        let deadline = settings.deadline_from(Instant::now());
        let ready = timeout_at(deadline, poll_fn(|cx| inner.poll_ready(cx))).await;
        let result = match ready.unwrap_or_else(|_| Err(unready(&operation))) {
            Ok(()) => {
                let stored = Stored {
                    first_sent,
                    deadline: inner.settings().deadline_from(Instant::now()),
                };
                shared
                    .send(inner, req, operation.clone(), unknown_on_drop, stored)
                    .await
            }
            Err(error) => {
                drop(unknown_on_drop);
                Err(error.with_outcome(operation.outcome()))
            }
        };
        Ok(Some(Recovered {
            entry,
            operation,
            result,
        }))
    }
}

/// Waits for one reply of the outbox, for at most the time of [`RetryLayer::with_deadline`](crate::RetryLayer::with_deadline).
async fn await_reply<T>(
    settings: &Settings,
    reply: impl Future<Output = Result<T, OutboxError>>,
) -> Result<T, OutboxError> {
    timeout_at(settings.deadline_from(Instant::now()), reply)
        .await
        .unwrap_or_else(|_| Err(OutboxError::with_message(LATE)))
}

/// Returns the error of an operation that was not sent, because the inner service was not ready before the deadline.
fn unready(operation: &Operation) -> Error {
    let operation = Some(operation.clone());
    Error::new(Reason::Deadline, operation, Outcome::Unknown, None)
}

/// Returns a position after which the outbox has no entry. It may be higher than that of the last entry.
///
/// Other calls may store entries meanwhile. The distance between two queries doubles, so that these calls cannot keep up.
async fn find_end<O: Outbox>(outbox: &O, settings: &Settings) -> Result<u64, OutboxError> {
    let mut end = 0;
    for doublings in 0..u64::BITS {
        let page = await_reply(settings, outbox.pending(end, PAGE)).await?;
        let Some((position, _)) = page.into_iter().next() else {
            break;
        };
        end = position.saturating_add((1 << doublings) - 1);
    }
    Ok(end)
}

impl<S, O> fmt::Debug for Recovery<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recovery")
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// Number of entries that are read at a time, with their bodies.
const PAGE: u32 = 8;
