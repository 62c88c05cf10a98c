//! Decides if the layer handles an HTTP request, and if it is executed: first from the head, then from the reply of the store.

use std::sync::{Arc, atomic::AtomicBool};

use http::{Extensions, HeaderMap, Method, request};

use crate::{
    digest::ScopedKey,
    enforcement::Enforcement,
    error::Error,
    execution::{
        Execution,
        acquire::{
            AcquireFailure, AcquireOutcome, Attempt, FailedAttempt, GrantedAttempt, PendingBegin,
        },
        detach::DetachSwitch,
        rules::StoreFailure,
        shared::Context,
    },
    lease::Lease,
    limits::{Caller, InFlightPermit},
    record::ExecutionTrace,
    request::{
        build_claim, caller_scope, coverage_of,
        credentials::{Identity, PrincipalError},
        find_key, has_key_header, is_key_optional,
        key::RequestKey,
        operation, pass_reason, scope_key,
    },
    response::reject::{
        CompleteResponse, admission_error, in_progress, key_reused, outcome_unknown, reject,
        rejection, store_unavailable,
    },
    store::{KeyId, Token},
    telemetry::{self, Coverage, catch_setting_panic},
};
#[cfg(feature = "grpc")]
use crate::{grpc::GrpcMethods, request::not_unary};

/// Decision about a request, made from its head.
pub(crate) enum Admission {
    /// The inner service responds.
    PassThrough,
    /// The layer responds.
    Rejected(Box<CompleteResponse>),
    /// The layer acquires a lease for the request.
    Execute(Arrival),
}

/// A request that is about to be executed, unless it turns out to be a duplicate.
pub(crate) struct Arrival {
    pub(super) key: RequestKey,
    pub(super) scoped: ScopedKey,
    pub(super) permit: InFlightPermit,
}

/// Returns `true` if an outer layer holds a lease for the request.
///
/// If the request passes through this layer, the outer layer reads and removes the control headers of its response.
pub(crate) fn is_nested(extensions: &Extensions) -> bool {
    extensions.get::<Lease>().is_some()
}

/// Returns `true` if an outer layer already holds a lease for the same key. If the keys differ, this layer protects its own
/// key.
pub(super) fn has_outer_lease(extensions: &Extensions, key: &RequestKey) -> bool {
    let outer = extensions.get::<Lease>();
    outer.is_some_and(|outer| outer.0.grant.key.as_ref() == Some(key))
}

/// Returns `true` if the request carries no key and needs none. This is the only check for most requests.
pub(crate) fn is_keyless(context: &Context, headers: &HeaderMap) -> bool {
    let rules = &context.config.request;
    is_key_optional(rules) && !has_key_header(rules, headers)
}

/// Counts a request that carries no key and needs none, by the reason why it is not protected.
pub(crate) fn count_keyless(context: &Context, head: &request::Parts) {
    let (rules, layer) = (&context.config.request, context.config.layer());
    context.shared.registration.at_request(layer);
    let reason = catch_setting_panic(layer, "with_skip", || pass_reason(rules, head)).flatten();
    let coverage = reason.unwrap_or(Coverage::NoKey);
    telemetry::unsafe_request(layer, &head.method, coverage);
}

/// Returns the enforcement of a request. Only a rollout to a share of the callers depends on the caller. A caller that the
/// layer would reject belongs to the rest.
pub(crate) fn enforcement(context: &Context, head: &request::Parts) -> Enforcement {
    let rollout = context.config.enforcement.get();
    let of_all = rollout.of_all();
    if of_all != Some(Enforcement::Enforce) {
        context.config.warnings().not_enforced(rollout);
    }
    of_all.unwrap_or_else(|| {
        let (rules, layer) = (&context.config.request, context.config.layer());
        let caller = catch_setting_panic(layer, "with_principal", || caller_scope(rules, head));
        let caller = caller.flatten();
        caller.map_or(rollout.rest(), |caller| rollout.of(&caller))
    })
}

/// Counts a request that the layer does not cover. Returns `true` if it has a key.
pub(super) fn count_uncovered(
    context: &Context,
    method: &Method,
    headers: &HeaderMap,
    reason: Coverage,
) -> bool {
    let layer = context.config.layer();
    telemetry::unsafe_request(layer, method, reason);
    let has_key = has_key_header(&context.config.request, headers);
    if has_key {
        telemetry::passed_through(layer, reason.name());
    }
    has_key
}

/// Counts a call of a gRPC method that is not protected.
#[cfg(feature = "grpc")]
pub(crate) fn count_unprotected_call(context: &Context, method: &Method, headers: &HeaderMap) {
    let layer = context.config.layer();
    context.shared.registration.at_request(layer);
    count_uncovered(context, method, headers, Coverage::Grpc);
}

/// Decides about a request from its head, without waiting.
pub(crate) fn admit(context: &Context, head: &request::Parts) -> Admission {
    let config = &*context.config;
    let (layer, warnings) = (config.layer(), config.warnings());
    context.shared.registration.at_request(layer);
    if let Some(reason) = pass_reason(&config.request, head) {
        let has_key = count_uncovered(context, &head.method, &head.headers, reason);
        if has_key && reason == Coverage::Grpc {
            warnings.grpc_unprotected();
        }
        return Admission::PassThrough;
    }
    let rejected = |error: &Error| Admission::Rejected(Box::new(reject(&config.response, error)));
    let found = find_key(&config.request, head);
    telemetry::unsafe_request(layer, &head.method, coverage_of(&found));
    let key = match found {
        Ok(Some(key)) if !has_outer_lease(&head.extensions, &key) => key,
        Ok(_) => return Admission::PassThrough,
        Err(error) => return rejected(&error),
    };
    #[cfg(feature = "grpc")]
    if config.request.is_grpc()
        && let Some(defect) = GrpcMethods::defect(head)
    {
        return rejected(&not_unary(defect));
    }
    let scoped = match scope_key(&config.request, head, &key) {
        Ok((scoped, identity)) => {
            if identity == Identity::Anonymous {
                warnings.anonymous();
            }
            scoped
        }
        Err(PrincipalError::Missing(error)) => {
            warnings.principal_missing();
            return rejected(&error);
        }
        Err(PrincipalError::Ambiguous(error)) => return rejected(&error),
        Err(PrincipalError::Rejected(res)) => {
            let mut res = rejection(*res);
            telemetry::set_rejected(&mut res, "rejected");
            return Admission::Rejected(Box::new(res));
        }
    };
    let caller = context.shared.limits.caller(scoped.scope);
    match caller.admit(config.limits.max_in_flight, layer) {
        Ok(permit) => Admission::Execute(Arrival {
            key,
            scoped,
            permit,
        }),
        Err(error) => rejected(&admission_error(&config.response, error)),
    }
}

/// A request that is executed under its lease, or without one if the settings say so.
pub(super) enum Admitted {
    Protected(Execution),
    Unprotected(Box<Attempt>),
}

/// Result of a request for the lease without waiting.
#[expect(
    clippy::large_enum_variant,
    reason = "most requests that are not executed are replays, which a box would slow down"
)]
pub(super) enum Progress {
    Execute(Execution),
    Continue(Unadmitted),
    Respond(CompleteResponse),
}

/// Work that is left before a request is admitted.
pub(super) enum Unadmitted {
    /// The lease is not acquired yet.
    Acquire(Box<Attempt>),
    /// The lease is acquired. The last step of the begin is left.
    Begin(PendingBegin),
}

/// Outcome of the acquire: the lease, the failure of the store, or the response of a request that is not executed.
enum Decision {
    Granted(GrantedAttempt),
    Failed(FailedAttempt),
    Respond(CompleteResponse),
}

/// Requests the lease without waiting.
pub(super) fn acquire_now(
    context: &Context,
    caller: &Arc<Caller>,
    arrival: Arrival,
    head: &request::Parts,
    content: &[u8],
    body_aborted: &Option<Arc<AtomicBool>>,
) -> Progress {
    let Arrival {
        key,
        scoped,
        permit,
    } = arrival;
    let (config, shared) = (&*context.config, &context.shared);
    let (rules, principal) = (&config.request, scoped.principal);
    let fingerprint = rules
        .fingerprint
        .fingerprint(rules.secret.as_ref(), &key, head, content);
    let operation = if shared.store.has_operations() {
        operation(head)
    } else {
        Box::default()
    };
    let mut found = None;
    let new_token = |id: &KeyId| {
        found = shared.store.find_completed(id, config.layer());
        if found.is_some() {
            // A replay holds no lease: this token never reaches a store.
            return Ok(Token::from_bytes([0; 16]));
        }
        shared.store.new_token()
    };
    let terms = config.lease_terms(shared.owner);
    let claim = build_claim(terms, scoped, &key, fingerprint, operation, new_token);
    let claim = match claim {
        Ok(claim) => claim,
        Err(error) => {
            let error = store_unavailable(&config.response, error);
            return Progress::Respond(reject(&config.response, &error));
        }
    };
    if let RequestKey::Sent(key) = &key
        && shared
            .recent_requests
            .has_other_principal(key, &claim.fingerprint, &principal)
    {
        config.warnings().principal_changed(&claim.id);
    }
    let id = claim.id;
    let attempt = Attempt {
        claim,
        key: Some(key),
        principal: Some(principal),
        is_nested: is_nested(&head.extensions),
        permit,
    };
    // From here on the request may have an effect.
    let outcome = match attempt.acquire_now(context, found) {
        Ok(outcome) => outcome,
        Err(attempt) => return Progress::Continue(Unadmitted::Acquire(attempt)),
    };
    match decide(context, caller, &id, outcome) {
        Decision::Granted(grant) => {
            let traceparent = context.config.response.trace(&head.headers);
            match grant.begin_now(context, body_aborted.clone(), traceparent) {
                Ok(execution) => Progress::Execute(execution),
                Err(pending) => Progress::Continue(Unadmitted::Begin(pending)),
            }
        }
        Decision::Failed(failed) => {
            let attempt = Box::new(failed.into_attempt());
            Progress::Continue(Unadmitted::Acquire(attempt))
        }
        Decision::Respond(res) => Progress::Respond(res),
    }
}

/// Completes the admission of a request. The error is the response of a request that is not executed.
pub(super) async fn acquire(
    context: Arc<Context>,
    caller: Arc<Caller>,
    switch: Arc<DetachSwitch>,
    unadmitted: Unadmitted,
    body_aborted: Option<Arc<AtomicBool>>,
    traceparent: Option<ExecutionTrace>,
) -> Result<Admitted, Box<CompleteResponse>> {
    let config = &*context.config;
    let rules = &config.response;
    let over_limit =
        |id: &KeyId, error| Box::new(reject(rules, &admission_error(rules, error).with_entry(id)));
    let attempt = match unadmitted {
        Unadmitted::Acquire(attempt) => attempt,
        Unadmitted::Begin(pending) => {
            let id = *pending.id();
            let execution = pending.wait(&context).await;
            return execution
                .map(Admitted::Protected)
                .map_err(|error| over_limit(&id, error));
        }
    };
    let id = attempt.claim.id;
    let outcome = attempt.acquire(&context, Some(&switch)).await;
    match decide(&context, &caller, &id, outcome) {
        Decision::Respond(res) => Err(Box::new(res)),
        Decision::Granted(grant) => {
            let execution = grant.begin(&context, body_aborted, traceparent).await;
            execution
                .map(Admitted::Protected)
                .map_err(|error| over_limit(&id, error))
        }
        Decision::Failed(failed) => match failed.policy {
            StoreFailure::Refuse => {
                let error = AcquireFailure::Store(failed).into_error(&context);
                Err(Box::new(reject(rules, &error.with_entry(&id))))
            }
            StoreFailure::DangerouslyExecuteUnprotected => {
                let mut attempt = failed.into_attempt();
                let admitted = attempt.permit.begin_execution(config.limits.max_in_flight);
                if let Err(error) = admitted {
                    attempt.release_in_background(&context);
                    return Err(over_limit(&id, error));
                }
                Ok(Admitted::Unprotected(Box::new(attempt)))
            }
        },
    }
}

/// Decides by the outcome of the acquire. A request that is not executed gets a replay or a rejection.
fn decide(
    context: &Context,
    caller: &Arc<Caller>,
    id: &KeyId,
    outcome: AcquireOutcome,
) -> Decision {
    let config = &*context.config;
    let rules = &config.response;
    outcome.log(&rules.warnings, id);
    let error = match outcome {
        AcquireOutcome::Granted(grant) => return Decision::Granted(grant),
        AcquireOutcome::Failed(AcquireFailure::Store(failed)) => return Decision::Failed(failed),
        AcquireOutcome::Completed(record) => {
            let unread = &context.shared.unread_replays;
            let max = config.limits.max_response_bytes;
            let res = unread.replay(rules, caller, max, id, &record);
            return Decision::Respond(res);
        }
        AcquireOutcome::Mismatch { .. } => key_reused(config.request.key_reuse.status()),
        AcquireOutcome::InProgress { .. } => {
            in_progress(rules, config.execution.concurrent_requests.status())
        }
        AcquireOutcome::Orphaned { .. } => outcome_unknown(),
        AcquireOutcome::Failed(failure) => failure.into_error(context),
    };
    Decision::Respond(reject(rules, &error.with_entry(id)))
}
