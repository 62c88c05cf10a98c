//! Execution of HTTP requests.
//!
//! [`admit`] decides if the layer handles a request. [`execute_request`] reads its body, acquires the lease, runs the inner
//! service and returns the response.

use std::{
    future::Future,
    panic::resume_unwind,
    pin::{Pin, pin},
    sync::Arc,
};

use bytes::Bytes;
use http::{Extensions, HeaderMap, Request, Response, StatusCode, request};
use tower_service::Service;

use crate::{
    body::Body,
    digest::Scope,
    error::Error,
    execution::{
        Execution, Failure, HandlerOutcome, PendingRecord,
        acquire::{AcquireOutcome, Attempt},
        detach::Detach,
        respond::into_http_response,
        rules::StoreFailure,
        sequence::{Next, Sequence},
        shared::Context,
    },
    lease::{Lease, commits::CommittedResponse, state::LeaseState},
    limits::{Caller, InFlightPermit},
    panics::catch_panic,
    record::{NeedsAttention, Traceparent},
    request::{
        build_claim, find_key, find_scope, has_key_header,
        key::{IdempotencyKey, RequestKey},
        pass_reason,
        principal::{Identity, PrincipalError},
        read_body::{BodyError, expected_length, read_body},
        rules::{KeyFrom, MissingKey},
    },
    response::{
        directives::{Directives, Retention, strip_control_headers},
        disposition::{Disposition, NotRecordedReason, decide_disposition},
        reject::{
            CompleteResponse, admission_error, in_progress, into_response, key_reused,
            outcome_unknown, reject, store_unavailable, unfinished_transaction, without_trailers,
        },
    },
    telemetry,
};

/// Decision about a request, made from its head.
pub(crate) enum Admission {
    /// The inner service responds.
    PassThrough,
    /// The layer responds.
    Rejected(Box<CompleteResponse>),
    /// The request is executed under a lease.
    Execute(Arrival),
}

/// A request that is about to be executed, unless it turns out to be a duplicate.
pub(crate) struct Arrival {
    key: RequestKey,
    scope: Scope,
    permit: InFlightPermit,
}

impl Arrival {
    pub(crate) fn caller(&self) -> Arc<Caller> {
        Arc::clone(self.permit.caller())
    }
}

/// Returns `true` if an outer layer holds a lease for the request. The outer layer then reads and removes the control headers
/// of a request that passes through this one.
pub(crate) fn is_nested(extensions: &Extensions) -> bool {
    extensions.get::<Lease>().is_some()
}

/// Returns `true` if an outer layer already holds a lease for the same key. A key of this layer's own is protected here.
fn has_outer_lease(extensions: &Extensions, key: &RequestKey) -> bool {
    let outer = extensions.get::<Lease>();
    outer.is_some_and(|outer| outer.0.grant.key.as_ref() == Some(key))
}

/// Returns `true` if the request carries no key and needs none. This is the only check for most requests.
pub(crate) fn is_keyless(context: &Context, headers: &HeaderMap) -> bool {
    let rules = &context.config.request;
    rules.missing_key == MissingKey::PassThrough
        && matches!(rules.key_from, KeyFrom::Header { .. })
        && !has_key_header(rules, headers)
}

/// Decides about a request from its head, without waiting.
pub(crate) fn admit(context: &Context, head: &request::Parts) -> Admission {
    let config = &*context.config;
    if let Some(reason) = pass_reason(&config.request, head) {
        if has_key_header(&config.request, &head.headers) {
            telemetry::passed_through(reason.name());
        }
        return Admission::PassThrough;
    }
    let rejected = |error: &Error| Admission::Rejected(Box::new(reject(&config.response, error)));
    let key = match find_key(&config.request, head) {
        Ok(Some(key)) if !has_outer_lease(&head.extensions, &key) => key,
        Ok(_) => return Admission::PassThrough,
        Err(error) => return rejected(&error),
    };
    let scope = match find_scope(&config.request, head, &key) {
        Ok((scope, identity)) => {
            if identity == Identity::Anonymous {
                context.shared.warnings.anonymous();
            }
            scope
        }
        Err(PrincipalError::Missing(error)) => {
            context.shared.warnings.principal_missing();
            return rejected(&error);
        }
        Err(PrincipalError::Ambiguous(error)) => return rejected(&error),
        Err(PrincipalError::Rejected(res)) => {
            return Admission::Rejected(Box::new(without_trailers(*res)));
        }
    };
    let caller = context.shared.limits.caller(scope.digest);
    match caller.admit(config.limits.max_in_flight) {
        Ok(permit) => Admission::Execute(Arrival { key, scope, permit }),
        Err(error) => rejected(&admission_error(&config.response, error)),
    }
}

/// Executes a request, from its body to its response: first [`acquire_lease`], then [`run_admitted`].
pub(crate) fn execute_request<S, B, R>(
    context: Arc<Context>,
    inner: S,
    head: request::Parts,
    body: B,
    arrival: Arrival,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<Response<Body<R>>, S::Error>>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    Sequence::new(
        acquire_lease(context, head, body, arrival, detach),
        move |acquired| match acquired {
            Ok((req, admitted)) => Next::Future(run_admitted(inner, req, admitted)),
            Err(response) => Next::Output(Ok(into_response(*response))),
        },
    )
}

/// Runs the handler of a request that acquired its lease, or that needs none.
async fn run_admitted<S, B, R>(
    mut inner: S,
    req: Request<Body<B>>,
    admitted: Admitted,
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    match admitted {
        Admitted::Protected(execution) => {
            let call = pin!(async move { inner.call(req).await });
            run_handler(execution, call).await
        }
        Admitted::Unprotected(context, attempt) => {
            Box::pin(run_unprotected(context, inner, req, attempt)).await
        }
    }
}

/// A request that is executed under its lease, or without one if the settings say so.
enum Admitted {
    Protected(Execution),
    Unprotected(Arc<Context>, Attempt),
}

/// Reads the body and acquires the lease. The error is the response of a request that is not executed.
#[expect(
    clippy::manual_async_fn,
    reason = "an `async fn` stores every argument twice"
)]
fn acquire_lease<B: http_body::Body>(
    context: Arc<Context>,
    mut head: request::Parts,
    body: B,
    arrival: Arrival,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<(Request<Body<B>>, Admitted), Box<CompleteResponse>>> {
    async move {
        let Arrival { key, scope, permit } = arrival;
        let config = &*context.config;
        let rejected = |error: &Error| Box::new(reject(&config.response, error));
        let over_limit = |error| rejected(&admission_error(&config.response, error));

        let mut body_aborted = None;
        let (content, body) = if config.request.fingerprint.is_head_only() {
            let aborted = body_aborted.insert(Arc::default());
            let expected = expected_length(&head.headers, &body);
            let body = Body::monitored(body, expected, Arc::clone(aborted));
            (Bytes::new(), body)
        } else {
            let max = config.limits.max_request_bytes;
            let mut buffer = permit.caller().request_bytes(max);
            let read = read_body(&config.request, &mut buffer, &head, body).await;
            let (data, trailers) = read.map_err(|error| match error {
                BodyError::Rejected(error) => rejected(&error),
                BodyError::OverLimit(error) => over_limit(error),
            })?;
            let data = buffer.hold(data);
            (data.clone(), Body::whole(data, trailers))
        };
        let terms = config.lease_terms(context.shared.owner);
        let claim = build_claim(&config.request, terms, scope, &head, &content, &key)
            .map_err(|error| rejected(&store_unavailable(&config.response, error)))?;
        drop(content);
        let shared = &context.shared;
        let handler_key = match &key {
            RequestKey::Sent(key) | RequestKey::Named(key, _) => Some(key.clone()),
            RequestKey::Derived => None,
        };
        if let RequestKey::Sent(key) = &key
            && shared.recent_requests.has_other_principal(key, &claim)
        {
            shared.warnings.principal_changed(&claim.id);
        }
        // From here on the request may have an effect. A dropped future continues in a background task.
        detach.arm();

        let id = claim.id;
        let outcome = Attempt {
            claim,
            key: Some(key),
            is_nested: is_nested(&head.extensions),
            permit,
        }
        .acquire(&context, Some(&detach))
        .await;
        outcome.log(&id);
        let admitted = match outcome {
            AcquireOutcome::Granted(grant) => {
                let traceparent = Traceparent::from_headers(&head.headers);
                let execution = grant.begin(&context, body_aborted, traceparent).await;
                let execution = execution.map_err(over_limit)?;
                head.extensions.insert(execution.lease.handle());
                Admitted::Protected(execution)
            }
            AcquireOutcome::Mismatch => {
                return Err(rejected(&key_reused(config.request.key_reuse.status())));
            }
            AcquireOutcome::InProgress { .. } => {
                let status = config.execution.concurrent_requests.status();
                return Err(rejected(&in_progress(&config.response, status)));
            }
            AcquireOutcome::Orphaned { .. } => return Err(rejected(&outcome_unknown())),
            AcquireOutcome::Completed(record) => {
                let max = config.limits.max_response_bytes;
                let buffer = detach.caller().response_bytes(max);
                let unread = &context.shared.unread_replays;
                let replayed = unread.replay(&config.response, buffer, &id, &record);
                return Err(Box::new(replayed));
            }
            AcquireOutcome::Failed(failed) => match failed.policy {
                StoreFailure::Refuse => {
                    let error = failed.release_in_background(&context);
                    let error = store_unavailable(&config.response, error.into_source());
                    return Err(rejected(&error));
                }
                StoreFailure::DangerouslyExecuteUnprotected => {
                    let mut attempt = failed.into_attempt();
                    let admitted = attempt.permit.begin_execution(config.limits.max_in_flight);
                    if let Err(error) = admitted {
                        attempt.release_in_background(&context);
                        return Err(over_limit(error));
                    }
                    Admitted::Unprotected(Arc::clone(&context), attempt)
                }
            },
        };
        match handler_key {
            Some(key) => drop(head.extensions.insert(key)),
            None => drop(head.extensions.remove::<IdempotencyKey>()),
        }
        Ok((Request::from_parts(head, body), admitted))
    }
}

/// Runs the handler under the lease. Returns the response once the outcome is stored.
#[expect(
    clippy::manual_async_fn,
    reason = "an `async fn` stores every argument twice"
)]
pub(crate) fn run_handler<R: http_body::Body, E>(
    execution: Execution,
    call: Pin<&mut impl Future<Output = Result<Response<R>, E>>>,
) -> impl Future<Output = Result<Response<Body<R>>, E>> {
    async move {
        let lease = execution.lease.handle();
        let (result, finished) = execution
            .run(async |execution| {
                let result = {
                    let _timer = telemetry::HandlerTimer::start();
                    call.await
                };
                let mut res = match result {
                    Ok(res) => res,
                    Err(error) => {
                        let closed = execution.lease.close();
                        return match execution.committed(closed, false).await {
                            Some(record) => HandlerOutcome::Committed(Err(error), record),
                            None => HandlerOutcome::Failed(Err(error), Failure::Error),
                        };
                    }
                };
                let is_committed = res.extensions_mut().remove::<CommittedResponse>().is_some();
                let closed = execution.lease.close();
                if let Some(record) = execution.committed(closed, is_committed).await {
                    return HandlerOutcome::Committed(Ok(res.map(Body::original)), record);
                }
                let lease = &execution.lease;
                // An outer layer follows the same instructions of the handler.
                let directives = lease.grant.is_nested.then(|| Directives::of(&res));
                if matches!(lease.grant.key, Some(RequestKey::Named(..)))
                    && res.status().is_client_error()
                {
                    // Clients cannot choose another key for the corrected request.
                    res.extensions_mut().insert(Retention::NoStore);
                }
                let (rules, buffer) = (&lease.config().response, lease.response_bytes());
                let incomplete = lease.request_body_incomplete();
                let (mut res, disposition) =
                    decide_disposition(rules, buffer, lease.origin(), res, incomplete).await;
                if let Some(directives) = directives {
                    directives.restore(&mut res);
                }
                match disposition {
                    Disposition::Record { record, .. }
                        if reports_failed_commit(lease, res.status(), &record) =>
                    {
                        HandlerOutcome::Release(Ok(res), "commit_failed")
                    }
                    Disposition::Record { record, .. }
                        if reports_lost_effect(lease, res.status(), &record) =>
                    {
                        telemetry::transaction_unfinished(lease.id());
                        let res = into_response(reject(rules, &unfinished_transaction()));
                        HandlerOutcome::Release(Ok(res), "unfinished_transaction")
                    }
                    Disposition::Record { record, retention } => {
                        let pending = PendingRecord {
                            status: Some(res.status()),
                            record,
                            retention,
                        };
                        HandlerOutcome::Record(Ok(res), pending)
                    }
                    Disposition::Release(NotRecordedReason::BrokenBody) => {
                        let failure = Failure::BrokenBody(res.status());
                        HandlerOutcome::Failed(Ok(res), failure)
                    }
                    Disposition::Release(reason) => HandlerOutcome::Release(Ok(res), reason.name()),
                }
            })
            .await;
        into_http_response(&lease.0, result, finished)
    }
}

/// Returns `true` if the response is a 4xx after a commit that failed. The failure may be temporary, so the response is no
/// outcome.
fn reports_failed_commit(lease: &LeaseState, status: StatusCode, record: &[u8]) -> bool {
    lease.has_unacknowledged_commit()
        && status.is_client_error()
        && NeedsAttention::in_record(record).is_none()
}

/// Returns `true` if the response is a success although a transaction was neither committed nor rolled back.
fn reports_lost_effect(lease: &LeaseState, status: StatusCode, record: &[u8]) -> bool {
    lease.has_open_transaction()
        && !status.is_client_error()
        && !status.is_server_error()
        && NeedsAttention::in_record(record).is_none()
}

/// Runs the handler without a lease, as the settings say.
async fn run_unprotected<S, B, R>(
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
    let id = attempt.claim.id;
    telemetry::unprotected(&id);
    let ran = catch_panic(pin!(async move { inner.call(req).await })).await;
    // The store failed, but may have granted the lease all the same. Nothing is recorded under it.
    attempt.release_in_background(&context);
    let res = ran.unwrap_or_else(|panic| resume_unwind(panic));
    res.map(|mut res| {
        strip_control_headers(res.headers_mut());
        if let Some(attention) = res.extensions_mut().remove::<NeedsAttention>() {
            telemetry::attention_ignored(&id, attention.code(), "no lease");
        }
        res.map(Body::original)
    })
}
