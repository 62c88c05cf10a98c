//! One request's whole life, in order. The only file that knows the order.
//!
//! Read it from the top: [`admit`] decides whether the layer applies, [`exchange`] does the rest. At every await, ask
//! what happens if we are dropped there: before `detach.arm()` nothing has happened yet and a drop is a drop; after it
//! the whole future moves to a task and goes on; and where a waiter waits, it is disarmed again.

use std::{panic::resume_unwind, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, request, response};
use tokio::time::Instant;
use tower_service::Service;

use crate::{
    admission::{applies, claim, find_key},
    body::Body,
    collect::{self, Collected},
    config::{Config, InFlight, MissingKey, StoreFailure, Unretained},
    control::{self, Wish},
    engine::{Completion, Engine, Failure},
    error::Error,
    fingerprint::By,
    future::{Detach, catch_panic},
    key::IdempotencyKey,
    lease::{Kept, Lease},
    limits::Place,
    record::NotRetained,
    refusal::{
        Answer, draining, in_progress, into_response, key_reused, outcome_unknown, overloaded, own,
        refuse, unavailable,
    },
    replay::replay,
    scope::NoPrincipal,
    store::{Acquired, Claim, OrphanPolicy, Ttl},
    telemetry,
    waiters::wait,
};

/// What an exchange works with: the decisions, and what all clones of the layer share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) engine: Arc<Engine>,
}

/// Whether and how the layer applies to a request.
pub(crate) enum Admission {
    /// The inner service answers; the control headers are taken off its answer.
    PassThrough,
    /// An outer layer already keeps the lease: the inner service answers, and the outer layer reads the control headers.
    Nested,
    /// The layer answers.
    Refused(Box<Answer>),
    /// The exchange answers. `None` is the key that is derived from the content.
    Exchange(Option<IdempotencyKey>, Place),
}

/// The first part, before the body and without waiting.
pub(crate) fn admit(shared: &Shared, head: &request::Parts) -> Admission {
    let config = &*shared.config;
    if head.extensions.get::<Lease>().is_some() {
        return Admission::Nested;
    }
    if !applies(config, head) {
        return Admission::PassThrough;
    }
    let key = match find_key(config, head) {
        Ok(key) => key,
        Err(error) => return Admission::Refused(Box::new(refuse(config, &error))),
    };
    if key.is_none() && config.missing_key == MissingKey::PassThrough {
        return Admission::PassThrough;
    }
    let limits = &shared.engine.limits;
    if limits.is_draining() {
        return Admission::Refused(Box::new(refuse(config, &draining(config))));
    }
    match limits.enter(config.max_in_flight) {
        Some(place) => Admission::Exchange(key, place),
        None => {
            let error = overloaded(config, "too many requests are in flight");
            Admission::Refused(Box::new(refuse(config, &error)))
        }
    }
}

/// Everything from the body to the answer.
pub(crate) async fn exchange<S, B, R>(
    shared: Arc<Shared>,
    mut inner: S,
    req: Request<B>,
    key: Option<IdempotencyKey>,
    mut place: Place,
    detach: Arc<Detach>,
) -> Result<Response<Body<R>>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    let (config, engine) = (&*shared.config, &shared.engine);
    let (mut head, body) = req.into_parts();
    let refused = |error: &Error| Ok(into_response(refuse(config, error)));

    let scope = match config
        .principal
        .scope(config.secret.as_ref(), &config.namespace, &head)
    {
        Ok(scope) => scope,
        Err(NoPrincipal::Missing(error)) => return refused(&error),
        Err(NoPrincipal::Refused(res)) => return Ok(into_response(own(*res))),
    };
    let (content, body) = match config.fingerprint {
        By::HeadOnly => (Bytes::new(), Body::original(body)),
        By::RawBody | By::CanonicalJson | By::Custom(_) => {
            match collect::request(config, &mut place, &head.headers, body).await {
                Ok((data, trailers)) => (data.clone(), Body::held(data, trailers)),
                Err(error) => return refused(&error),
            }
        }
    };
    // From here on the request may have an effect: whoever drops this future leaves it to run to its end.
    detach.arm();
    let claim = match claim(config, engine, scope, &head, &content, key.as_ref()) {
        Ok(claim) => claim,
        Err(error) => return refused(&unavailable(config, Failure::Store(error))),
    };
    drop(content);
    if let Some(key) = key {
        head.extensions.insert(key);
    }

    let lease = match acquire(&shared, &claim, &detach).await {
        Ok(Asked::Granted(lease)) => lease,
        Ok(Asked::Answer(answer)) => return Ok(into_response(*answer)),
        Err(failure) => {
            let deadline = Instant::now() + config.lease.as_duration();
            // The store may hold a lease for us all the same; nothing runs under it, so the key is freed.
            let lease = claim.lease_ref(1);
            return match config.store_failure {
                StoreFailure::Refuse => {
                    engine.release_later(lease, deadline, config.store_timeout, place);
                    refused(&unavailable(config, failure))
                }
                StoreFailure::DangerouslyExecuteUnprotected => {
                    telemetry::unprotected(&claim.id);
                    let res = Box::pin(inner.call(Request::from_parts(head, body))).await;
                    engine.release_later(lease, deadline, config.store_timeout, place);
                    res.map(|mut res| {
                        control::strip_only(res.headers_mut());
                        res.map(Body::original)
                    })
                }
            };
        }
    };
    head.extensions.insert(lease.handle());

    let run = async {
        let started = telemetry::start();
        let res = inner.call(Request::from_parts(head, body)).await?;
        telemetry::handler_time(started);
        Ok(receive(config, &mut place, res).await)
    };
    let produced = match catch_panic(run).await {
        Ok(produced) => produced,
        Err(panic) => {
            engine
                .end(lease, config.store_timeout, place, "panic")
                .await;
            // The future that is unwound here is not polled again: see `Detachable`.
            resume_unwind(panic)
        }
    };
    match produced {
        Ok(Produced::Whole {
            head,
            data,
            trailers,
            retention,
        }) => {
            let record = config.codec().encode_response(
                &claim.id,
                head.status,
                &head.headers,
                &*config.replayed,
                &data,
                trailers.as_ref(),
            );
            let res = Response::from_parts(head, Body::held(data, trailers));
            Ok(settle(&shared, &claim, lease, place, record, retention, res).await)
        }
        Ok(Produced::Unretainable {
            res,
            reason,
            retention,
        }) => match config.unretained {
            Unretained::Tombstone => {
                telemetry::not_retained(&claim.id, reason);
                let tombstone = config
                    .codec()
                    .encode_tombstone(&claim.id, res.status(), reason);
                Ok(settle(&shared, &claim, lease, place, tombstone, retention, res).await)
            }
            Unretained::Release => {
                engine
                    .end(lease, config.store_timeout, place, "not_retained")
                    .await;
                Ok(res)
            }
        },
        Ok(Produced::Unkept { res, reason }) => {
            engine.end(lease, config.store_timeout, place, reason).await;
            Ok(res)
        }
        Err(error) => {
            engine
                .end(lease, config.store_timeout, place, "error")
                .await;
            Err(error)
        }
    }
}

// ---- Asking the store ----

/// The answer to a claim, as far as the exchange is concerned.
enum Asked {
    Granted(Kept),
    Answer(Box<Answer>),
}

async fn acquire(shared: &Shared, claim: &Claim, detach: &Detach) -> Result<Asked, Failure> {
    let (config, engine) = (&*shared.config, &shared.engine);
    let (mut acquired, mut sent) = engine.acquire(claim, config.store_timeout).await?;
    if let (Acquired::InProgress { fingerprint, .. }, InFlight::Wait(_)) =
        (&acquired, config.in_flight)
        && *fingerprint == claim.fingerprint
    {
        (acquired, sent) = Box::pin(wait(config, engine, claim, detach, acquired, sent)).await?;
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
            Asked::Granted(engine.renewer.keep(
                claim.lease_ref(generation),
                takeover,
                claim.lease,
                config.store_timeout,
                sent,
            ))
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

// ---- Executing ----

/// What the handler produced, and what is to become of it.
enum Produced<R: http_body::Body> {
    /// A response to keep, in our hands.
    Whole {
        head: response::Parts,
        data: Bytes,
        trailers: Option<HeaderMap>,
        retention: Ttl,
    },
    /// A response to keep that cannot be kept.
    Unretainable {
        res: Response<Body<R>>,
        reason: NotRetained,
        retention: Ttl,
    },
    /// A response that is not to be kept.
    Unkept {
        res: Response<Body<R>>,
        reason: &'static str,
    },
}

/// Decides what is to become of the handler's response, and collects it within limits if it is to be kept.
async fn receive<R: http_body::Body>(
    config: &Config,
    place: &mut Place,
    res: Response<R>,
) -> Produced<R> {
    let (mut head, body) = res.into_parts();
    let retention = match control::take_wish(&mut head, config.retention, config.max_retention) {
        Wish::Keep(retention) => retention,
        Wish::NoStore => {
            let res = Response::from_parts(head, Body::original(body));
            return Produced::Unkept {
                res,
                reason: "no_store",
            };
        }
    };
    // A status that announces another answer to come is not one.
    if head.status.is_informational() || !(config.recorded)(head.status) {
        let res = Response::from_parts(head, Body::original(body));
        return Produced::Unkept {
            res,
            reason: "status",
        };
    }
    match collect::response(config, place, &head.headers, body).await {
        Collected::Whole(data, trailers) => Produced::Whole {
            head,
            data,
            trailers,
            retention,
        },
        Collected::GivenUp(body, reason) => Produced::Unretainable {
            res: Response::from_parts(head, body),
            reason,
            retention,
        },
        Collected::Broken(body) => Produced::Unkept {
            res: Response::from_parts(head, body),
            reason: "broken_body",
        },
    }
}

// ---- Ending the lease ----

/// Stores the record, and only then answers: with `res` when it is what the store holds.
async fn settle<R: http_body::Body>(
    shared: &Shared,
    claim: &Claim,
    lease: Kept,
    place: Place,
    record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    let (config, engine) = (&*shared.config, &shared.engine);
    let mut record = record;
    let mut completion = engine
        .complete(lease.reference(), &record, retention, config.store_timeout)
        .await;
    if let Completion::TooLarge { limit } = completion {
        tracing::warn!(
            bytes = record.len(),
            limit,
            "the store cannot keep a record this large"
        );
        if config.unretained == Unretained::Release {
            engine
                .end(lease, config.store_timeout, place, "not_retained")
                .await;
            return res;
        }
        telemetry::not_retained(&claim.id, NotRetained::TooLarge);
        record = config
            .codec()
            .encode_tombstone(&claim.id, res.status(), NotRetained::TooLarge);
        completion = engine
            .complete(lease.reference(), &record, retention, config.store_timeout)
            .await;
    }
    match completion {
        Completion::Stored => {
            telemetry::recorded(&claim.id, record.len());
            res
        }
        Completion::LeaseLost => {
            drop(lease);
            Box::pin(answer_what_is_stored(shared, claim, record, retention, res)).await
        }
        // The effect has happened and only we know: say so, and keep trying while the lease lasts. A retry meanwhile is
        // told that it is in progress.
        Completion::Failing | Completion::TooLarge { .. } => {
            engine.complete_later(lease, record, retention, config.store_timeout, place);
            res
        }
    }
}

/// After a lost lease our own answer is worth nothing unless it is the stored one: two clients must not be told
/// different things.
async fn answer_what_is_stored<R: http_body::Body>(
    shared: &Shared,
    claim: &Claim,
    record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    let (config, engine) = (&*shared.config, &shared.engine);
    // Asking is acquiring; it must not take over from whoever took over from us.
    let claim = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    match engine.acquire(&claim, config.store_timeout).await {
        Ok((
            Acquired::Completed {
                fingerprint,
                record,
            },
            _,
        )) if fingerprint == claim.fingerprint => into_response(replay(config, &claim.id, &record)),
        // Whoever had it released it without an answer to keep: ours is the only one.
        Ok((Acquired::Granted { generation, .. }, _)) => {
            let lease = claim.lease_ref(generation);
            match engine
                .complete(&lease, &record, retention, config.store_timeout)
                .await
            {
                Completion::Stored => res,
                Completion::LeaseLost | Completion::TooLarge { .. } | Completion::Failing => {
                    into_response(refuse(config, &outcome_unknown()))
                }
            }
        }
        Ok((
            Acquired::InProgress { .. } | Acquired::Orphaned { .. } | Acquired::Completed { .. },
            _,
        ))
        | Err(_) => into_response(refuse(config, &outcome_unknown())),
    }
}
