//! One request's whole life, in order. The only file that knows the order.
//!
//! Read it from the top: [`admit`] decides whether the layer applies, [`exchange`] does the rest. At every await, ask
//! what happens if we are dropped there: before `detach.arm()` nothing has happened yet and a drop is a drop; after it
//! the whole future moves to a task and goes on; and where a waiter waits, it is disarmed again.

pub(crate) mod finish;
pub(crate) mod reconcile;
pub(crate) mod rules;
pub(crate) mod shared;
pub(crate) mod waiters;

use std::{
    future::Future,
    panic::resume_unwind,
    pin::{Pin, pin},
    sync::Arc,
};

use bytes::Bytes;
use http::{Extensions, HeaderMap, Request, Response, request};
use tokio::time::Instant;
use tower_service::Service;

use crate::{
    body::Body,
    config::Config,
    error::Error,
    execution::finish::{Produced, first_answer, let_go, settle, told},
    execution::rules::{ConcurrentRequests, StoreFailure},
    execution::shared::{Engine, Failure},
    execution::waiters::wait,
    future::{Detach, catch_panic},
    lease::commits::Committed,
    lease::{Grant, Kept, Lease},
    limits::Place,
    record::NeedsAttention,
    request::fingerprint::By,
    request::key::IdempotencyKey,
    request::principal::NoPrincipal,
    request::read_body,
    request::rules::MissingKey,
    request::{applies, claim, find_key, may_carry_key},
    response::directives,
    response::disposition::{Then, receive},
    response::reject::{
        Answer, in_progress, into_response, key_reused, outcome_unknown, own, refuse, turned_away,
        unavailable,
    },
    response::replay::replay,
    store::{Acquired, Claim},
    telemetry,
};

/// What an exchange works with: the decisions, and what all clones of the layer share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) engine: Arc<Engine>,
}

/// Whether and how the layer applies to a request.
pub(crate) enum Admission {
    /// The inner service answers.
    PassThrough,
    /// The layer answers.
    Refused(Box<Answer>),
    /// The exchange answers. `None` is the key that is derived from the content.
    Exchange(Option<IdempotencyKey>, Place),
}

/// Whether an outer layer already keeps a lease for the request: then the inner service answers, and the control headers
/// of its answer are for the outer layer to read and take off.
pub(crate) fn is_nested(extensions: &Extensions) -> bool {
    extensions.get::<Lease>().is_some()
}

/// Whether the request can be told to carry no key, and needs none. Most requests are like that, and for them this look is
/// all that the layer costs.
pub(crate) fn is_keyless(shared: &Shared, headers: &HeaderMap) -> bool {
    let config = &*shared.config;
    config.request.missing_key == MissingKey::PassThrough && !may_carry_key(config, headers)
}

/// The first part of an exchange, before the body and without waiting.
pub(crate) fn admit(shared: &Shared, head: &request::Parts) -> Admission {
    let config = &*shared.config;
    if !applies(config, head) {
        return Admission::PassThrough;
    }
    let key = match find_key(config, head) {
        Ok(key) => key,
        Err(error) => return Admission::Refused(Box::new(refuse(config, &error))),
    };
    if key.is_none() && config.request.missing_key == MissingKey::PassThrough {
        return Admission::PassThrough;
    }
    match shared.engine.limits.enter(config.limits.max_in_flight) {
        Ok(place) => Admission::Exchange(key, place),
        Err(no_place) => {
            let error = turned_away(config, &no_place);
            Admission::Refused(Box::new(refuse(config, &error)))
        }
    }
}

/// Everything from the body to the answer: first [`ask`] for the lease, then [`execute`] under it.
pub(crate) fn exchange<S, B, R>(
    shared: Arc<Shared>,
    mut inner: S,
    head: request::Parts,
    body: B,
    key: Option<IdempotencyKey>,
    place: Place,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<Response<Body<R>>, S::Error>>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    let asking = ask(Arc::clone(&shared), head, body, key, place, detach);
    async move {
        match asking.await {
            Ok((req, Ok(lease), place)) => {
                let call = pin!(async move { inner.call(req).await });
                execute(shared, lease, place, call).await
            }
            Ok((req, Err(claim), place)) => {
                Box::pin(unprotected(shared, inner, req, claim, place)).await
            }
            Err(answer) => Ok(into_response(*answer)),
        }
    }
}

/// A request that is to be executed under its lease, or under none if all there is is the claim.
type Admitted<B> = (Request<Body<B>>, Result<Kept, Claim>, Place);

/// The first half: reads the body and asks for the lease. `Err` is the answer of whoever does not get it.
///
/// A function that returns its future instead of an `async fn`, here and below: those keep every argument twice.
fn ask<B: http_body::Body>(
    shared: Arc<Shared>,
    mut head: request::Parts,
    body: B,
    key: Option<IdempotencyKey>,
    mut place: Place,
    detach: Arc<Detach>,
) -> impl Future<Output = Result<Admitted<B>, Box<Answer>>> {
    let scope = {
        let config = &*shared.config;
        config.request.principal.scope(
            config.request.secret.as_ref(),
            &config.request.namespace,
            &head,
        )
    };
    async move {
        let (config, engine) = (&*shared.config, &shared.engine);
        let refused = |error: &Error| Box::new(refuse(config, error));

        let scope = scope.map_err(|none| match none {
            NoPrincipal::Missing(error) => refused(&error),
            NoPrincipal::Refused(res) => Box::new(own(*res)),
        })?;
        let mut broke = None;
        let (content, body) = match config.request.fingerprint {
            By::HeadOnly => {
                let broke = broke.insert(Arc::default());
                let whole = read_body::whole(&head.headers, &body);
                let body = Body::watched(body, whole, Arc::clone(broke));
                (Bytes::new(), body)
            }
            By::RawBody | By::CanonicalJson | By::Custom(_) => {
                let read = read_body::request(config, &mut place.buffer, &head, body).await;
                let (data, trailers) = read.map_err(|error| refused(&error))?;
                (data.clone(), Body::held(data, trailers))
            }
        };
        let claim = claim(config, engine, scope, &head, &content, key.as_ref())
            .map_err(|error| refused(&unavailable(config, Failure::Store(error))))?;
        drop(content);
        if let Some(key) = key {
            head.extensions.insert(key);
        }
        // From here on the request may have an effect: whoever drops this future leaves it to run to its end.
        detach.arm();

        let lease = match acquire(config, engine, &claim, &detach).await {
            Ok(Asked::Granted {
                generation,
                takeover,
                sent,
            }) => {
                let grant = Grant {
                    config: Arc::clone(&shared.config),
                    engine: Arc::clone(engine),
                    claim,
                    generation,
                    takeover,
                    broke,
                    sent,
                };
                let lease = engine.renewer.keep(grant).await;
                head.extensions.insert(lease.handle());
                Ok(lease)
            }
            Ok(Asked::Answer(answer)) => return Err(answer),
            Err((failure, policy)) => match policy {
                StoreFailure::Refuse => {
                    engine.give_back_later(config, &claim, place);
                    return Err(refused(&unavailable(config, failure)));
                }
                StoreFailure::DangerouslyExecuteUnprotected => Err(claim),
            },
        };
        let req = Request::from_parts(head, body);
        Ok((req, lease, place))
    }
}

/// The second half: runs `call` under the lease, and answers once its outcome is stored.
pub(crate) fn execute<R: http_body::Body, E>(
    shared: Arc<Shared>,
    lease: Kept,
    mut place: Place,
    call: Pin<&mut impl Future<Output = Result<Response<R>, E>>>,
) -> impl Future<Output = Result<Response<Body<R>>, E>> {
    let limit = shared.config.execution.store_timeout;
    async move {
        let (config, engine) = (&*shared.config, &shared.engine);
        let ran = {
            let run = pin!(async {
                let started = telemetry::start();
                let res = call.await?;
                telemetry::handler_time(started);
                Ok(match lease.close() {
                    Committed::Record(record) => Ran::Committed(res, record),
                    Committed::Nothing | Committed::Unknown => {
                        let (buffer, half) = (&mut place.buffer, lease.found_half());
                        let (res, then) = receive(config, buffer, lease.id(), res, half).await;
                        Ran::Answered(res, then)
                    }
                })
            });
            catch_panic(run).await
        };
        match ran {
            Ok(Ok(Ran::Answered(res, then))) => {
                let id = *lease.id();
                let instead = match then {
                    Then::Keep { record, retention } => {
                        let produced = Produced {
                            status: Some(res.status()),
                            record,
                            retention,
                        };
                        settle(config, engine, lease, place, produced).await
                    }
                    Then::Free(reason) => let_go(config, engine, lease, place, reason.name()).await,
                };
                Ok(instead.map_or(res, |instead| told(config, &id, instead)))
            }
            Ok(Ok(Ran::Committed(res, record))) => Ok(first_answer(
                config,
                &lease,
                &record,
                res.map(Body::original),
            )),
            Ok(Err(error)) => {
                let id = *lease.id();
                let instead = let_go(config, engine, lease, place, "error").await;
                instead.map_or(Err(error), |instead| Ok(told(config, &id, instead)))
            }
            Err(panic) => {
                // What a handler committed before it panicked stays; what it may have committed, a release leaves alone.
                if let Committed::Record(record) = lease.close() {
                    telemetry::recorded(lease.id(), &record);
                } else {
                    engine.end(lease, limit, place, "panic").await;
                }
                // The future that is unwound here is not polled again: see `Detachable`.
                resume_unwind(panic)
            }
        }
    }
}

/// What a handler leaves behind.
enum Ran<R: http_body::Body> {
    /// An answer, and what is to become of it.
    Answered(Response<Body<R>>, Then),
    /// A record that it stored itself.
    Committed(Response<R>, Bytes),
}

/// Runs the handler without a lease, as the operator chose.
async fn unprotected<S, B, R>(
    shared: Arc<Shared>,
    mut inner: S,
    req: Request<Body<B>>,
    claim: Claim,
    place: Place,
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    telemetry::unprotected(&claim.id);
    let ran = catch_panic(pin!(async move { inner.call(req).await })).await;
    // The store failed us, and may hold a lease for us all the same; nothing is recorded under it.
    shared.engine.give_back_later(&shared.config, &claim, place);
    let res = ran.unwrap_or_else(|panic| resume_unwind(panic));
    res.map(|mut res| {
        directives::strip_only(res.headers_mut());
        if let Some(attention) = res.extensions_mut().remove::<NeedsAttention>() {
            telemetry::attention_ignored(&claim.id, attention.code(), "there is no lease");
        }
        res.map(Body::original)
    })
}

// ---- Asking the store ----

/// The answer to a claim, as far as the exchange is concerned.
enum Asked {
    Granted {
        generation: u64,
        takeover: bool,
        sent: Instant,
    },
    Answer(Box<Answer>),
}

/// Also says what to do about a failure.
async fn acquire(
    config: &Config,
    engine: &Engine,
    claim: &Claim,
    detach: &Detach,
) -> Result<Asked, (Failure, StoreFailure)> {
    let asked = engine.acquire(claim, config.execution.store_timeout).await;
    let (mut acquired, mut sent) =
        asked.map_err(|failure| (failure, config.execution.store_failure))?;
    if let (Acquired::InProgress { fingerprint, .. }, ConcurrentRequests::Wait(_)) =
        (&acquired, config.execution.concurrent_requests)
        && *fingerprint == claim.fingerprint
    {
        let waited = Box::pin(wait(config, engine, claim, detach, acquired, sent)).await;
        // A waiter has seen that the first request is being executed: whatever the setting, it does not run beside it.
        (acquired, sent) = waited.map_err(|failure| (failure, StoreFailure::Refuse))?;
    }
    // Another request under the same key is judged first, whatever has become of the first one.
    if let Acquired::InProgress { fingerprint, .. }
    | Acquired::Orphaned { fingerprint, .. }
    | Acquired::Completed { fingerprint, .. } = &acquired
        && *fingerprint != claim.fingerprint
    {
        telemetry::mismatch(&claim.id);
        return Ok(Asked::Answer(Box::new(refuse(config, &key_reused(config)))));
    }
    Ok(match acquired {
        Acquired::Granted {
            generation,
            takeover,
        } => {
            telemetry::granted(&claim.id, generation, takeover);
            Asked::Granted {
                generation,
                takeover,
                sent,
            }
        }
        Acquired::InProgress { .. } => {
            telemetry::in_progress(&claim.id);
            Asked::Answer(Box::new(refuse(config, &in_progress(config))))
        }
        Acquired::Orphaned { .. } => {
            telemetry::orphaned(&claim.id);
            Asked::Answer(Box::new(refuse(config, &outcome_unknown())))
        }
        Acquired::Completed { record, .. } => {
            Asked::Answer(Box::new(replay(config, &claim.id, &record)))
        }
    })
}
