//! The attempts of one call: limits, delays and the outcome.

use std::{future::Future, sync::Arc, time::Duration};

use http::{Extensions, HeaderMap, Response, StatusCode};
use http_body::Body;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    body::{AwaitedStatus, ResponseBody},
    budget::cost,
    error::{BoxError, Error, Reason},
    first_sent::FirstSent,
    keys::Keyed,
    operation::{Operation, Outcome},
    problem::{Code, Form, MAX_BYTES, is_encoded},
    settings::Settings,
    telemetry,
    verdict::{Attempt, Cause, Fate, Head, Judgement, Verdict, depends_on_code},
};

/// Sends the attempts of one call.
pub(crate) trait Transport: Send {
    type Body: Body;

    /// Waits until the inner service accepts a request.
    fn ready(&mut self) -> impl Future<Output = Result<(), BoxError>> + Send;

    /// Sends the request again. Must not be called if [`can_send`](Self::can_send) returns `false`.
    fn send(&mut self) -> impl Future<Output = Result<Response<Self::Body>, BoxError>> + Send;

    /// Returns `true` if the request can be sent again.
    fn can_send(&self) -> bool;

    /// Returns `true` if no byte of the last attempt was sent.
    fn is_not_sent(&self, error: &BoxError) -> bool;

    /// Returns `true` if a rejection of the last attempt proves that it was not executed.
    fn is_rejection_final(&self) -> bool {
        true
    }
}

/// Limits of a call whose request is in an outbox.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    /// Time since which another process may have sent the request.
    pub(crate) first_sent: FirstSent,
    /// Deadline of the call, which includes the calls of the outbox.
    pub(crate) deadline: Instant,
}

/// Attempts of one call.
pub(crate) struct Series {
    settings: Arc<Settings>,
    operation: Operation,
    has_key: bool,
    is_safe: bool,
    /// `None` if no outbox has the request.
    stored: Option<Stored>,
    began: Instant,
    deadline: Instant,
    /// `true` after the first attempt has begun.
    has_begun: bool,
    /// Attempts that count against the maximum.
    counted: u32,
    resends: u32,
    /// Tokens of the last retry that took any.
    cost: u32,
    /// The status of the last attempt is in the trailers of its response.
    is_awaited: bool,
}

impl Series {
    /// Begins a call, with the limits of its outbox, if it has one.
    pub(crate) fn new(
        settings: Arc<Settings>,
        keyed: Keyed,
        is_safe: bool,
        stored: Option<Stored>,
    ) -> Self {
        telemetry::began(&settings.registration);
        let now = Instant::now();
        Self {
            began: now,
            deadline: stored.map_or_else(|| settings.deadline_from(now), |stored| stored.deadline),
            stored,
            has_begun: false,
            settings,
            has_key: keyed.has_key,
            operation: keyed.operation.unwrap_or_else(Operation::without_key),
            is_safe,
            counted: 0,
            resends: 0,
            cost: 0,
            is_awaited: false,
        }
    }

    /// Takes over an attempt that was counted before the call began.
    pub(crate) fn adopt_attempt(&self) {
        self.operation.adopt_attempt();
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Begins the first attempt, if the limits allow it. Nothing may be awaited between this call and the attempt.
    pub(crate) fn begin(&mut self) -> Result<(), Reason> {
        self.begin_attempt(self.began)
    }

    /// Begins an attempt, as [`begin`](Self::begin) does.
    fn begin_attempt(&mut self, now: Instant) -> Result<(), Reason> {
        if self.expires_within(Duration::ZERO) {
            if self.is_first_attempt_in_future() {
                return Err(Reason::WrongClock);
            }
            telemetry::expired(&self.settings.expired);
            return Err(Reason::Expired);
        }
        if now >= self.deadline {
            return Err(Reason::Deadline);
        }
        self.has_begun = true;
        self.operation.begin_attempt(now);
        Ok(())
    }

    /// Returns the judgement of a response from its head. Returns `None` if the body can change the judgement, or if the
    /// response is retried.
    pub(crate) fn judge_head<B>(&self, res: &Response<B>) -> Option<Judgement> {
        let (status, headers) = (res.status(), res.headers());
        if self.settings.verdict.is_some() || depends_on_code(status, headers) {
            return None;
        }
        let head = Head {
            status,
            headers,
            code: &Code::Missing,
        };
        let judgement = Judgement::of_response(head, self.settings.keys.protocol());
        let judgement = self.with_inner_outcome(judgement, res.extensions());
        (!matches!(judgement.verdict, Verdict::Retry { .. })).then_some(judgement)
    }

    /// Returns the judgement of a response after the outcome of the inner series that returned it, if there is one.
    ///
    /// A rejection of the last inner attempt does not show that no earlier one was executed.
    fn with_inner_outcome(&self, mut judgement: Judgement, extensions: &Extensions) -> Judgement {
        let inner = self.inner_operation(extensions);
        if judgement.fate == Fate::Rejected && inner.is_some_and(Operation::is_open) {
            judgement.fate = Fate::Open;
        }
        judgement
    }

    /// Returns the operation of the inner series that returned a response, if there is one.
    fn inner_operation<'a>(&self, extensions: &'a Extensions) -> Option<&'a Operation> {
        let inner = extensions.get::<Operation>();
        inner.filter(|inner| !inner.is_same(&self.operation))
    }

    /// Records the judgement of an attempt. Returns the delay before the next one, or `None` if the call ends.
    pub(crate) fn conclude(&mut self, judgement: Judgement, can_send: bool) -> Option<Duration> {
        match judgement.fate {
            Fate::Definite => self.operation.set_response(),
            Fate::Rejected => self.operation.close_attempt(),
            Fate::Open => {}
            Fate::Awaited => self.is_awaited = true,
        }
        let (after, cause) = match judgement.verdict {
            Verdict::Retry { after, cause } => (after, cause),
            Verdict::Definite => {
                self.settings.budget.refill(self.cost.max(1));
                return None;
            }
            Verdict::Unknown => return None,
        };
        let is_allowed = self.has_key || self.is_safe || cause == Cause::NotSent;
        if cause != Cause::InProgress {
            self.counted += 1;
        }
        if !is_allowed || !can_send || self.counted >= self.settings.max_attempts {
            return None;
        }
        let delay = self.settings.delay(self.resends, cause, after);
        let time_left = self.deadline.saturating_duration_since(Instant::now());
        if delay >= time_left || self.expires_within(delay) {
            return None;
        }
        let cost = cost(cause);
        if !self.settings.budget.take(cost) {
            telemetry::budget_spent(cause);
            return None;
        }
        // A retry that takes no tokens keeps the refund of an earlier one.
        if cost > 0 {
            self.cost = cost;
        }
        self.resends += 1;
        telemetry::retrying(self.resends, cause, delay);
        Some(delay)
    }

    /// Returns `true` if no attempt is allowed after this delay. The server may then have deleted the record of an earlier
    /// attempt, of this call or of a recovery.
    fn expires_within(&self, delay: Duration) -> bool {
        let age = self.settings.lifetime.saturating_sub(delay);
        let is_expired = self.has_key
            && self.operation.outcome() != Outcome::NotExecuted
            && self.operation.is_older_than(age);
        is_expired || self.is_stored_for(age)
    }

    /// Returns `true` if the restored time of the first attempt was in the future, so that the age of the operation is unknown.
    fn is_first_attempt_in_future(&self) -> bool {
        let stored = self.stored.map(|stored| stored.first_sent);
        stored.is_some_and(|first_sent| first_sent.was_in_future())
            || self.operation.was_sent_in_future()
    }

    /// Returns `true` if an outbox has had the request for this long. A recovery may have sent it at once and removed its
    /// entry, also if the server rejected the attempts of this call.
    ///
    /// With a lifetime of zero, the first attempt is still permitted.
    fn is_stored_for(&self, age: Duration) -> bool {
        let is_permitted = !self.has_begun && self.settings.lifetime.is_zero();
        let stored = self.stored.filter(|_| !is_permitted);
        stored.is_some_and(|stored| stored.first_sent.is_older_than(age))
    }

    /// Finishes the call with a response.
    pub(crate) fn respond<B: Body>(
        self,
        res: Response<ResponseBody<B>>,
    ) -> Response<ResponseBody<B>> {
        if self.is_awaited {
            return self.respond_before_status(res);
        }
        let outcome = self.operation.outcome();
        telemetry::finished(outcome);
        if !self.has_key {
            return res;
        }
        if outcome == Outcome::Definite {
            return res.map(|body| body.with_operation(self.operation));
        }
        let mut res = res;
        res.extensions_mut().insert(self.operation);
        res
    }

    /// Finishes the call with a response whose trailers decide on the outcome.
    fn respond_before_status<B: Body>(
        self,
        res: Response<ResponseBody<B>>,
    ) -> Response<ResponseBody<B>> {
        let awaited = AwaitedStatus {
            operation: self.operation.clone(),
            inner: self.inner_operation(res.extensions()).cloned(),
            budget: self.settings.budget.clone(),
            refund: self.cost.max(1),
        };
        let mut res = res.map(|body| body.with_awaited(awaited));
        if self.has_key {
            res.extensions_mut().insert(self.operation);
        }
        res
    }

    /// Finishes the call with an error.
    pub(crate) fn fail(self, reason: Reason, source: Option<BoxError>) -> Error {
        let outcome = self.operation.outcome();
        telemetry::finished(outcome);
        let operation = self.has_key.then_some(self.operation);
        Error::new(reason, operation, outcome, source)
    }

    /// Judges a response or an error by the caller's function, or by the rules of the layer if that function does not
    /// decide.
    fn judge(&self, result: Result<Head<'_>, &BoxError>, is_sent: bool) -> Judgement {
        let result = result.map_err(AsRef::as_ref);
        let by_caller = self
            .settings
            .verdict
            .as_ref()
            .and_then(|verdict| verdict(&Attempt { result }));
        match (by_caller, result) {
            (Some(verdict), Err(_)) if is_sent => Judgement::of_error_by_caller(verdict),
            (Some(verdict), _) => Judgement::of(verdict),
            (None, Ok(head)) => {
                // The caller's function gets the codes of all errors. Without it, the layer does not read all of them.
                let code = match depends_on_code(head.status, head.headers) {
                    true => head.code,
                    false => &Code::Missing,
                };
                let head = Head { code, ..head };
                Judgement::of_response(head, self.settings.keys.protocol())
            }
            (None, Err(_)) => Judgement::of_error(is_sent),
        }
    }
}

/// Judges the result of an attempt, and sends the request again until the call ends.
pub(crate) async fn drive<T: Transport>(
    mut series: Series,
    mut transport: T,
    mut result: Result<Response<T::Body>, BoxError>,
) -> Result<Response<ResponseBody<T::Body>>, Error> {
    loop {
        let (judgement, result_read) = match result {
            Ok(res) => {
                let (head, body) = res.into_parts();
                let (body, code) = read_code(&series, head.status, &head.headers, body).await;
                let judged = Head {
                    status: head.status,
                    headers: &head.headers,
                    code: &code,
                };
                let judgement = series.judge(Ok(judged), true);
                let mut judgement = series.with_inner_outcome(judgement, &head.extensions);
                if judgement.fate == Fate::Rejected && !transport.is_rejection_final() {
                    judgement.fate = Fate::Open;
                }
                (judgement, Ok(Response::from_parts(head, body)))
            }
            Err(error) => {
                let is_sent = !transport.is_not_sent(&error);
                (series.judge(Err(&error), is_sent), Err(error))
            }
        };
        let Some(delay) = series.conclude(judgement, transport.can_send()) else {
            return match result_read {
                Ok(res) => Ok(series.respond(res)),
                Err(error) => Err(series.fail(Reason::Failed, Some(error))),
            };
        };
        // The response is dropped before the delay, so that its connection is free.
        let last_error = result_read.err();
        sleep(delay).await;
        match timeout_at(series.deadline, transport.ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(series.fail(Reason::NotReady, Some(error))),
            Err(_) => return Err(series.fail(Reason::Deadline, last_error)),
        }
        if let Err(reason) = series.begin_attempt(Instant::now()) {
            return Err(series.fail(reason, last_error));
        }
        result = match timeout_at(series.deadline, transport.send()).await {
            Ok(result) => result,
            Err(_) => return Err(series.fail(Reason::Deadline, last_error)),
        };
    }
}

/// Reads the body of an error response if it may contain a code.
async fn read_code<B: Body>(
    series: &Series,
    status: StatusCode,
    headers: &HeaderMap,
    body: B,
) -> (ResponseBody<B>, Code) {
    let body = ResponseBody::new(body);
    let is_read = depends_on_code(status, headers) || series.settings.verdict.is_some();
    let Some(form) = Form::of(status, headers).filter(|_| is_read) else {
        return (body, Code::Missing);
    };
    if is_encoded(headers) {
        return (body, Code::Unreadable);
    }
    let (body, bytes) = body.peek(MAX_BYTES, series.deadline).await;
    let code = match bytes {
        Some(bytes) => Code::parse(form, &bytes),
        None => Code::Unreadable,
    };
    (body, code)
}
