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
use http::{Extensions, HeaderMap, Request, Response, header, request};
use tower_service::Service;

use crate::{
    body::{Body, CountedData, Data},
    error::Error,
    execution::{
        Execution, Finished, HandlerOutcome, PendingRecord,
        acquire::{AcquireOutcome, Attempt},
        detach::Detach,
        rules::StoreFailure,
        shared::Context,
    },
    lease::{Lease, commits::CommitOutcome, state::LeaseState},
    limits::InFlightPermit,
    panics::catch_panic,
    record::{NeedsAttention, Record, StoredResponse, not_kept},
    request::{
        build_claim, can_have_key, find_key,
        fingerprint::FingerprintMethod,
        is_covered,
        key::IdempotencyKey,
        principal::PrincipalError,
        read_body::{BodyError, expected_length, read_body},
        rules::MissingKey,
    },
    response::{
        directives::strip_control_headers,
        disposition::{Disposition, decide_disposition},
        reject::{
            CompleteResponse, admission_error, in_progress, into_response, key_reused,
            outcome_pending, outcome_unknown, reject, store_unavailable, without_trailers,
        },
        replay::{has_body, replay, respond_without_marker},
    },
    telemetry,
};

/// Decision about a request, made from its head.
pub(crate) enum Admission {
    /// The inner service responds.
    PassThrough,
    /// The layer responds.
    Rejected(Box<CompleteResponse>),
    /// The request is executed under a lease. The key is `None` if it is derived from the content.
    Execute(Option<IdempotencyKey>, InFlightPermit),
}

/// Returns `true` if an outer layer already holds a lease for the request. The inner service then responds, and the outer
/// layer reads and removes the control headers.
pub(crate) fn is_nested(extensions: &Extensions) -> bool {
    extensions.get::<Lease>().is_some()
}

/// Returns `true` if the request carries no key and needs none. This is the only check for most requests.
pub(crate) fn is_keyless(context: &Context, headers: &HeaderMap) -> bool {
    let rules = &context.config.request;
    rules.missing_key == MissingKey::PassThrough && !can_have_key(rules, headers)
}

/// Decides about a request from its head, without waiting.
pub(crate) fn admit(context: &Context, head: &request::Parts) -> Admission {
    let config = &*context.config;
    if !is_covered(&config.request, head) {
        return Admission::PassThrough;
    }
    let rejected = |error: &Error| Admission::Rejected(Box::new(reject(&config.response, error)));
    let key = match find_key(&config.request, head) {
        Ok(key) => key,
        Err(error) => return rejected(&error),
    };
    if key.is_none() && config.request.missing_key == MissingKey::PassThrough {
        return Admission::PassThrough;
    }
    match context.shared.limits.admit(config.limits.max_in_flight) {
        Ok(permit) => Admission::Execute(key, permit),
        Err(error) => rejected(&admission_error(&config.response, &error)),
    }
}

/// Executes a request, from its body to its response: first [`acquire_lease`], then [`run_handler`].
pub(crate) fn execute_request<S, B, R>(
    context: Arc<Context>,
    mut inner: S,
    head: request::Parts,
    body: B,
    key: Option<IdempotencyKey>,
    permit: InFlightPermit,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<Response<Body<R>>, S::Error>>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    let acquiring = acquire_lease(context, head, body, key, permit, detach);
    async move {
        match acquiring.await {
            Ok((req, Admitted::Protected(execution))) => {
                let call = pin!(async move { inner.call(req).await });
                run_handler(execution, call).await
            }
            Ok((req, Admitted::Unprotected(context, attempt))) => {
                Box::pin(run_unprotected(context, inner, req, attempt)).await
            }
            Err(response) => Ok(into_response(*response)),
        }
    }
}

/// A request that is executed under its lease, or without one if the settings say so.
enum Admitted {
    Protected(Execution),
    Unprotected(Arc<Context>, Attempt),
}

/// Reads the body and acquires the lease. The error is the response of a request that is not executed.
///
/// A function that returns its future, here and below, since an `async fn` stores every argument twice.
fn acquire_lease<B: http_body::Body>(
    context: Arc<Context>,
    mut head: request::Parts,
    body: B,
    key: Option<IdempotencyKey>,
    mut permit: InFlightPermit,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<(Request<Body<B>>, Admitted), Box<CompleteResponse>>> {
    let scope = {
        let rules = &context.config.request;
        let (secret, namespace) = (rules.secret.as_ref(), &rules.namespace);
        rules.principal.scope_digest(secret, namespace, &head)
    };
    async move {
        let config = &*context.config;
        let rejected = |error: &Error| Box::new(reject(&config.response, error));

        let scope = scope.map_err(|error| match error {
            PrincipalError::Missing(error) => rejected(&error),
            PrincipalError::Rejected(res) => Box::new(without_trailers(*res)),
        })?;
        let mut body_aborted = None;
        let (content, body) = match config.request.fingerprint {
            FingerprintMethod::HeadOnly => {
                let aborted = body_aborted.insert(Arc::default());
                let expected = expected_length(&head.headers, &body);
                let body = Body::monitored(body, expected, Arc::clone(aborted));
                (Bytes::new(), body)
            }
            FingerprintMethod::RawBody
            | FingerprintMethod::CanonicalJson
            | FingerprintMethod::Custom(_) => {
                let (rules, limits) = (&config.request, &config.limits);
                let read = read_body(rules, limits, &mut permit.buffer, &head, body).await;
                let (data, trailers) = read.map_err(|error| match error {
                    BodyError::Rejected(error) => rejected(&error),
                    BodyError::OverBudget(error) => {
                        rejected(&admission_error(&config.response, &error))
                    }
                })?;
                (data.clone(), Body::buffered(data, trailers))
            }
        };
        let terms = config.lease_terms(context.shared.owner);
        let claim = build_claim(&config.request, terms, scope, &head, &content, key.as_ref())
            .map_err(|error| rejected(&store_unavailable(&config.response, error)))?;
        drop(content);
        if let Some(key) = key {
            head.extensions.insert(key);
        }
        // From here on the request may have an effect. A dropped future continues in a background task.
        detach.arm();

        let id = claim.id;
        let outcome = Attempt { claim, permit }
            .acquire(&context, Some(&detach))
            .await;
        outcome.log(&id);
        let admitted = match outcome {
            AcquireOutcome::Granted(grant) => {
                let execution = grant.begin(&context, body_aborted).await;
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
                return Err(Box::new(replay(&config.response, &id, &record)));
            }
            AcquireOutcome::Failed(failed) => match failed.policy {
                StoreFailure::Refuse => {
                    let error = failed.release_in_background(&context);
                    let error = store_unavailable(&config.response, error.into_source());
                    return Err(rejected(&error));
                }
                StoreFailure::DangerouslyExecuteUnprotected => {
                    Admitted::Unprotected(Arc::clone(&context), failed.into_attempt())
                }
            },
        };
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
                let started = telemetry::start();
                let res = match call.await {
                    Ok(res) => res,
                    Err(error) => return HandlerOutcome::Release(Err(error), "error"),
                };
                telemetry::handler_time(started);
                let Execution { lease, permit } = execution;
                if let CommitOutcome::Committed(record) = lease.close() {
                    return HandlerOutcome::Committed(Ok(res.map(Body::original)), record);
                }
                let (rules, limits) = (&lease.config().response, &lease.config().limits);
                let incomplete = lease.request_body_incomplete();
                let buffer = &mut permit.buffer;
                let (res, disposition) =
                    decide_disposition(rules, limits, buffer, lease.id(), res, incomplete).await;
                match disposition {
                    Disposition::Record { record, retention } => {
                        let pending = PendingRecord {
                            status: Some(res.status()),
                            record,
                            retention,
                        };
                        HandlerOutcome::Record(Ok(res), pending)
                    }
                    Disposition::Release(reason) => HandlerOutcome::Release(Ok(res), reason.name()),
                }
            })
            .await;
        into_http_response(&lease.0, result, finished)
    }
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

/// Returns the response that is valid for the key: that of the handler, or another one.
fn into_http_response<R: http_body::Body, E>(
    lease: &LeaseState,
    result: Result<Response<Body<R>>, E>,
    finished: Finished,
) -> Result<Response<Body<R>>, E> {
    let (rules, id) = (&lease.config().response, lease.id());
    Ok(into_response(match (finished, result) {
        (Finished::Own, result) => return result,
        (
            Finished::Committed {
                record,
                before_return: true,
            },
            Ok(res),
        ) => return Ok(committed_response(lease, &record, res)),
        (Finished::Committed { record, .. }, _) => respond_without_marker(rules, id, &record),
        (Finished::Stored(record), _) => replay(rules, id, &record),
        (Finished::Unknown { retryable: true }, _) => reject(rules, &outcome_pending(rules)),
        (Finished::Unknown { retryable: false }, _) => reject(rules, &outcome_unknown()),
    }))
}

/// Returns the response of a handler that committed `record`, whatever the handler returned afterwards: a key has one answer.
/// Headers that are never recorded, such as session cookies, come from `res`.
fn committed_response<R: http_body::Body>(
    lease: &LeaseState,
    record: &Bytes,
    mut res: Response<Body<R>>,
) -> Response<Body<R>> {
    let (rules, id) = (&lease.config().response, lease.id());
    strip_control_headers(res.headers_mut());
    if let Some(late) = res.extensions_mut().remove::<NeedsAttention>() {
        telemetry::attention_ignored(id, late.code(), "a response was committed");
    }
    match rules.codec().decode(id, record) {
        Ok(Record::Response(stored)) => merge_unrecorded_headers(lease, stored, res),
        // The record has no body. The handler returned the response that belongs to it.
        Ok(Record::Tombstone { .. } | Record::Attention { .. }) => res,
        Ok(Record::Value(_)) | Err(_) => into_response(respond_without_marker(rules, id, record)),
    }
}

/// Returns the stored response with those headers of `res` that are never recorded.
fn merge_unrecorded_headers<R: http_body::Body>(
    lease: &LeaseState,
    stored: StoredResponse,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    let StoredResponse {
        status,
        mut headers,
        body,
        trailers,
        ..
    } = stored;
    let (mut head, _) = res.into_parts();
    let mut unrecorded = HeaderMap::new();
    let replayed = &*lease.config().response.replayed_headers;
    for (name, value) in not_kept(&head.headers, replayed) {
        unrecorded.append(name, value.clone());
    }
    unrecorded.remove(header::TRANSFER_ENCODING);
    // The length must be that of the stored body, not that of the body of `res`.
    if unrecorded.remove(header::CONTENT_LENGTH).is_some() && trailers.is_none() && has_body(status)
    {
        unrecorded.insert(header::CONTENT_LENGTH, body.len().into());
    }
    headers.extend(unrecorded);
    head.status = status;
    head.headers = headers;
    let data = if head.extensions.remove::<CountedData>().is_some() {
        let unsent = lease.grant.limits.buffer().unsent();
        let unsent = unsent.reserve_unchecked(body.len());
        Data::with_unsent(body, unsent)
    } else {
        body.into()
    };
    Response::from_parts(head, Body::buffered(data, trailers))
}
