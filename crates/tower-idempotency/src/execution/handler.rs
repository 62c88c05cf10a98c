//! Runs the handler of an HTTP request, and finishes its execution with the response.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context as TaskContext, Poll, ready},
};

use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    body::Body,
    execution::{
        Execution, Failure, HandlerOutcome, PendingRecord, acquire::Attempt,
        respond::into_http_response, shared::Context,
    },
    lease::{
        commits::{CommitOutcome, CommittedResponse},
        state::LeaseState,
    },
    panics::{POLLED_AGAIN, Panic, catch_panic},
    record::NeedsAttention,
    response::{
        directives::{Directives, Retention, strip_control_headers},
        disposition::{Decided, Disposition, NotRecordedReason, Recording},
        reject::{into_response, reject, unfinished_transaction},
    },
    telemetry,
};

/// Returns the future of a handler, or the panic of a service that returned no future.
pub(crate) fn call_handler<S, B>(inner: &mut S, req: Request<B>) -> Result<S::Future, Panic>
where
    S: Service<Request<B>>,
{
    // Unwind safe: the service is not called again.
    catch_unwind(AssertUnwindSafe(|| inner.call(req)))
}

/// Runs the handler under the lease. The future returns the response once the outcome is stored.
///
/// # Panics
///
/// If the handler panics or has panicked, after the key was treated as the settings say.
pub(crate) fn run_handler<F, R, E>(
    execution: Execution,
    call: Result<F, Panic>,
) -> HandlerRun<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: http_body::Body + Send + 'static,
    R::Data: Send,
    R::Error: Send,
    E: Send + 'static,
{
    let (execution, stage) = match call {
        Ok(call) => {
            let timer = telemetry::HandlerTimer::start(execution.lease.layer());
            let timer = Some(timer);
            let call = Some(call);
            (Some(execution), RunStage::Calling { call, timer })
        }
        Err(panic) => {
            let finishing = Box::pin(conclude_response(execution, Err(panic)));
            (None, RunStage::Finishing { finishing })
        }
    };
    HandlerRun { execution, stage }
}

pin_project! {
    /// The future of a handler under its lease, and of the response that finishes the lease.
    ///
    /// Written by hand: an `async` block would store the response several times. Parts that few requests need are boxed.
    pub(crate) struct HandlerRun<F, R, E>
    where
        R: http_body::Body,
    {
        execution: Option<Execution>,
        #[pin]
        stage: RunStage<F, R, E>,
    }
}

pin_project! {
    #[project = RunStageProj]
    enum RunStage<F, R, E>
    where
        R: http_body::Body,
    {
        // `None` after completion, so that the handler's future is dropped before the lease ends.
        Calling { #[pin] call: Option<F>, timer: Option<telemetry::HandlerTimer> },
        // The body of the response is buffered.
        Recording { recording: Recording<R>, directives: Option<Box<Directives>> },
        Finishing { finishing: Finishing<R, E> },
    }
}

/// Outcome of a handler, with its response or its error.
type HttpOutcome<R, E> = HandlerOutcome<Result<Response<Body<R>>, E>>;
type Finishing<R, E> = Pin<Box<dyn Future<Output = Result<Response<Body<R>>, E>> + Send>>;

impl<F, R, E> Future for HandlerRun<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: http_body::Body + Send + 'static,
    R::Data: Send,
    R::Error: Send,
    E: Send + 'static,
{
    type Output = Result<Response<Body<R>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (execution, mut stage) = (this.execution, this.stage);
        loop {
            if let RunStageProj::Finishing { finishing } = stage.as_mut().project() {
                return finishing.as_mut().poll(cx);
            }
            let running = execution.as_ref().expect(POLLED_AGAIN);
            // Unwind safe: the stage is not polled again, and it shares only atomics with its caller.
            let step = catch_unwind(AssertUnwindSafe(|| poll_stage(stage.as_mut(), running, cx)));
            let ran = match step {
                Ok(Poll::Pending) => return Poll::Pending,
                Ok(Poll::Ready(ExecutionStep::Confirm(result))) => {
                    let execution = execution.take().expect(POLLED_AGAIN);
                    let finishing = Box::pin(finish_unconfirmed(execution, result));
                    stage.set(RunStage::Finishing { finishing });
                    continue;
                }
                Ok(Poll::Ready(ExecutionStep::Finish(HandlerOutcome::Record(
                    result,
                    mut pending,
                )))) => {
                    if running.complete_now(&mut pending) {
                        *execution = None;
                        return Poll::Ready(result);
                    }
                    Ok(HandlerOutcome::Record(result, pending))
                }
                Ok(Poll::Ready(ExecutionStep::Finish(outcome))) => Ok(outcome),
                Err(panic) => {
                    if let RunStageProj::Calling { mut call, .. } = stage.as_mut().project() {
                        // A second panic changes nothing.
                        let _ = catch_unwind(AssertUnwindSafe(|| call.set(None)));
                    }
                    Err(panic)
                }
            };
            let execution = execution.take().expect(POLLED_AGAIN);
            let finishing = Box::pin(conclude_response(execution, ran));
            stage.set(RunStage::Finishing { finishing });
        }
    }
}

/// Next step of an execution whose handler has responded.
enum ExecutionStep<R: http_body::Body, E> {
    /// The handler reported a commit, but returned another response or an error.
    Confirm(Result<Response<R>, E>),
    Finish(HttpOutcome<R, E>),
}

/// Polls the handler, then the body of its response.
fn poll_stage<F, R, E>(
    mut stage: Pin<&mut RunStage<F, R, E>>,
    execution: &Execution,
    cx: &mut TaskContext<'_>,
) -> Poll<ExecutionStep<R, E>>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: http_body::Body,
{
    let lease = &execution.lease;
    let rules = &lease.config().response;
    if let RunStageProj::Calling { mut call, timer } = stage.as_mut().project() {
        let Some(running) = call.as_mut().as_pin_mut() else {
            return Poll::Pending;
        };
        let mut result = ready!(running.poll(cx));
        call.set(None);
        drop(timer.take());
        let is_committed = match &mut result {
            Ok(res) => res.extensions_mut().remove::<CommittedResponse>().is_some(),
            Err(_) => false,
        };
        let result = match (lease.close(), result) {
            (CommitOutcome::Committed(record), Ok(res)) if is_committed => {
                let res = Ok(res.map(Body::original));
                let outcome = HandlerOutcome::Committed(res, record);
                return Poll::Ready(ExecutionStep::Finish(outcome));
            }
            (CommitOutcome::Committed(_), result) => {
                return Poll::Ready(ExecutionStep::Confirm(result));
            }
            (CommitOutcome::NotAttempted | CommitOutcome::Unacknowledged, result) => result,
        };
        let (mut recording, directives) = match begin_recording(lease, result) {
            Ok(begun) => begun,
            Err(outcome) => return Poll::Ready(ExecutionStep::Finish(*outcome)),
        };
        // The bodies of most responses are complete. Such a recording is not moved into the stage.
        return match recording.poll(cx, rules, lease.origin()) {
            Poll::Ready(decided) => {
                let outcome = outcome_of(lease, directives, decided);
                Poll::Ready(ExecutionStep::Finish(outcome))
            }
            Poll::Pending => {
                stage.set(RunStage::Recording {
                    recording,
                    directives,
                });
                Poll::Pending
            }
        };
    }
    let RunStageProj::Recording {
        recording,
        directives,
    } = stage.project()
    else {
        return Poll::Pending;
    };
    let decided = ready!(recording.poll(cx, rules, lease.origin()));
    let outcome = outcome_of(lease, directives.take(), decided);
    Poll::Ready(ExecutionStep::Finish(outcome))
}

/// Begins to record the response. Returns the outcome if it does not depend on the body.
fn begin_recording<R: http_body::Body, E>(
    lease: &LeaseState,
    result: Result<Response<R>, E>,
) -> Result<(Recording<R>, Option<Box<Directives>>), Box<HttpOutcome<R, E>>> {
    let mut res = match result {
        Ok(res) => res,
        Err(error) => {
            let failed = HandlerOutcome::Failed(Err(error), Failure::Error);
            return Err(Box::new(failed));
        }
    };
    // The effect is lost, whether the layer records the response or not. A transaction that the body of the response holds is
    // not lost. The code of a gRPC response is not known yet.
    if lease.has_lost_transaction()
        && !lease.config().response.is_grpc()
        && !res.status().is_client_error()
        && !res.status().is_server_error()
        && res.extensions().get::<NeedsAttention>().is_none()
    {
        return Err(Box::new(lost_effect(lease)));
    }
    if lease.has_unfinished_batch() {
        // Before the instructions are copied: an outer layer must not record the response either.
        res.extensions_mut().insert(Retention::NoStore);
    }
    // An outer layer follows the same instructions of the handler.
    let is_nested = lease.grant.is_nested;
    let directives = is_nested.then(|| Box::new(Directives::of(&res)));
    if lease.is_released_by_client_error() && res.status().is_client_error() {
        // Clients cannot choose another key for the corrected request.
        res.extensions_mut().insert(Retention::NoStore);
    }
    let (rules, buffer) = (&lease.config().response, lease.response_bytes());
    let incomplete = lease.request_body_incomplete();
    match Recording::new(rules, buffer, lease.origin(), res, incomplete) {
        Ok(recording) => Ok((recording, directives)),
        Err(decided) => Err(Box::new(outcome_of(lease, directives, *decided))),
    }
}

/// Returns the outcome of a handler whose response is decided.
fn outcome_of<R: http_body::Body, E>(
    lease: &LeaseState,
    directives: Option<Box<Directives>>,
    (mut res, disposition): Decided<R>,
) -> HttpOutcome<R, E> {
    if let Some(directives) = directives {
        directives.restore(&mut res);
    }
    let (record, retention, class) = match disposition {
        Disposition::Record {
            record,
            retention,
            class,
        } => (record, retention, class),
        Disposition::Release(NotRecordedReason::BrokenBody) => {
            let failure = Failure::BrokenBody(res.status());
            return HandlerOutcome::Failed(Ok(res), failure);
        }
        Disposition::Release(reason) => return HandlerOutcome::Release(Ok(res), reason.name()),
    };
    // A record that needs attention is stored in any case. The checks below apply to the others.
    if NeedsAttention::in_record(&record).is_none() {
        // The body ran a batch, or the handler did not wait for one.
        if lease.has_unfinished_batch() {
            res.extensions_mut().insert(Retention::NoStore);
            return HandlerOutcome::Release(Ok(res), NotRecordedReason::NoStore.name());
        }
        // As for HTTP in `begin_recording`. Here the code is known.
        if lease.config().response.is_grpc()
            && lease.is_released_by_client_error()
            && class.is_client_error()
        {
            return HandlerOutcome::Release(Ok(res), NotRecordedReason::NoStore.name());
        }
        if reports_failed_commit(lease, class) {
            res.extensions_mut().insert(Retention::NoStore);
            return HandlerOutcome::Release(Ok(res), "commit_failed");
        }
        // No record may claim a success while a transaction is open.
        if reports_lost_effect(lease, class) {
            return lost_effect(lease);
        }
    }
    let pending = PendingRecord {
        status: Some(res.status()),
        record,
        retention,
    };
    HandlerOutcome::Record(Ok(res), pending)
}

/// Finishes an execution whose handler reported a commit, but returned another response or an error.
async fn finish_unconfirmed<R: http_body::Body, E>(
    execution: Execution,
    result: Result<Response<R>, E>,
) -> Result<Response<Body<R>>, E> {
    let ran = catch_panic(pin!(decide_unconfirmed(&execution, result))).await;
    conclude_response(execution, ran).await
}

async fn decide_unconfirmed<R: http_body::Body, E>(
    execution: &Execution,
    result: Result<Response<R>, E>,
) -> HttpOutcome<R, E> {
    let lease = &execution.lease;
    if let Some(record) = execution.confirm_commit().await {
        return HandlerOutcome::Committed(result.map(|res| res.map(Body::original)), record);
    }
    match begin_recording(lease, result) {
        Ok((mut recording, directives)) => {
            let (rules, origin) = (&lease.config().response, lease.origin());
            let decided = poll_fn(|cx| recording.poll(cx, rules, origin)).await;
            outcome_of(lease, directives, decided)
        }
        Err(outcome) => *outcome,
    }
}

/// Finishes the lease. Returns the response that is valid for the key.
async fn conclude_response<R: http_body::Body, E>(
    execution: Execution,
    ran: Result<HttpOutcome<R, E>, Panic>,
) -> Result<Response<Body<R>>, E> {
    let lease = execution.lease.handle();
    let (result, finished) = execution.conclude(ran).await;
    into_http_response(&lease.0, result, finished)
}

/// Returns `true` if the response is a 4xx after a transaction that failed. The failure may be temporary, so the response is
/// no outcome.
fn reports_failed_commit(lease: &LeaseState, status: StatusCode) -> bool {
    (lease.has_unacknowledged_commit() || lease.commits.has_failed()) && status.is_client_error()
}

/// Returns `true` if the response is a success although a transaction was neither committed nor rolled back.
fn reports_lost_effect(lease: &LeaseState, status: StatusCode) -> bool {
    lease.has_open_transaction() && !status.is_client_error() && !status.is_server_error()
}

/// Returns the outcome of a success without its effect: an error response, and a free key.
fn lost_effect<R: http_body::Body, E>(lease: &LeaseState) -> HttpOutcome<R, E> {
    telemetry::transaction_unfinished(lease.layer(), lease.id());
    let rules = &lease.config().response;
    let error = unfinished_transaction().with_entry(lease.id());
    let res = into_response(reject(rules, &error));
    HandlerOutcome::Release(Ok(res), "unfinished_transaction")
}

/// Runs the handler without a lease, as the settings say.
pub(super) async fn run_unprotected<S, B, R>(
    context: Arc<Context>,
    mut inner: S,
    req: Request<Body<B>>,
    attempt: Attempt,
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    let (id, is_nested) = (attempt.claim.id, attempt.is_nested);
    context.config.warnings().unprotected(&id);
    let ran = catch_panic(pin!(async move { inner.call(req).await })).await;
    // The store failed, but may have granted the lease nevertheless. Nothing is recorded under it.
    attempt.release_in_background(&context);
    let res = ran.unwrap_or_else(|panic| resume_unwind(panic));
    res.map(|mut res| {
        if is_nested {
            // An outer layer follows the same instructions of the handler.
            return res.map(Body::original);
        }
        strip_control_headers(res.headers_mut());
        if let Some(attention) = res.extensions_mut().remove::<NeedsAttention>() {
            let (layer, code) = (context.config.layer(), attention.code());
            telemetry::attention_ignored(layer, &id, code, "no lease");
        }
        res.map(Body::original)
    })
}
