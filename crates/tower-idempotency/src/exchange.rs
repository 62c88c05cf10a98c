//! One request's whole life, in order. The only file that knows the order.
//!
//! Read it from the top: [`admit`] decides whether the layer applies, [`exchange`] does the rest. At every await, ask
//! what happens if we are dropped there: before `detach.arm()` nothing has happened yet and a drop is a drop; after it
//! the whole future moves to a task and goes on; and where a waiter waits, it is disarmed again.

use std::{panic::resume_unwind, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header, request,
    response,
};
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;

use crate::{
    body::Body,
    collect::{self, Collected},
    config::{Config, InFlight, KeyFrom, Mismatch, MissingKey, StoreFailure, Unretained},
    control::{self, Wish},
    engine::{Completion, Engine, Failure},
    error::{Error, ErrorKind},
    fingerprint::{By, KeyPart, key_id, path_and_query},
    future::{Detach, catch_panic},
    key::{IdempotencyKey, KeyError},
    lease::{Kept, Lease},
    limits::Place,
    record::{NotRetained, Record, StoredResponse},
    scope::NoPrincipal,
    store::{Acquired, Claim, KeyId, OrphanPolicy, Token, Ttl},
    telemetry,
    waiters::{Found, Woken},
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
    Refused(Response<Bytes>),
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
        Err(error) => return Admission::Refused(refuse(config, &error)),
    };
    if key.is_none() && config.missing_key == MissingKey::PassThrough {
        return Admission::PassThrough;
    }
    let limits = &shared.engine.limits;
    if limits.is_draining() {
        let error = Error::new(ErrorKind::Draining, "the service is shutting down")
            .with_retry_after(config.retry_after);
        return Admission::Refused(refuse(config, &error));
    }
    match limits.enter(config.max_in_flight) {
        Some(place) => Admission::Exchange(key, place),
        None => {
            let error = Error::new(ErrorKind::Overloaded, "too many requests are in flight")
                .with_retry_after(config.retry_after);
            Admission::Refused(refuse(config, &error))
        }
    }
}

/// Everything from the body to the answer.
pub(crate) async fn exchange<S, B, R>(
    shared: Arc<Shared>,
    inner: S,
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

    let (content, body) = match config.fingerprint {
        By::HeadOnly => (Bytes::new(), Body::original(body)),
        By::RawBody | By::CanonicalJson | By::Custom(_) => {
            match collect::request(config, &mut place, &head.headers, body).await {
                Ok((data, trailers)) => (data.clone(), Body::held(data, trailers)),
                Err(error) => return Ok(answer(refuse(config, &error))),
            }
        }
    };
    // From here on the request may have an effect: whoever drops this future leaves it to run to its end.
    detach.arm();
    let claim = match claim(config, engine, &head, &content, key.as_ref()) {
        Ok(claim) => claim,
        Err(NoPrincipal::Missing(error)) => return Ok(answer(refuse(config, &error))),
        Err(NoPrincipal::Refused(res)) => return Ok(answer(*res)),
    };
    drop(content);
    if let Some(key) = key {
        head.extensions.insert(key);
    }

    let lease = match acquire(&shared, &claim, &detach).await {
        Ok(Asked::Granted(lease)) => lease,
        Ok(Asked::Answer(res)) => return Ok(answer(res)),
        Ok(Asked::Replay(replay)) => return Ok(replay.into_response()),
        Err(failure) => {
            let deadline = Instant::now() + config.lease.as_duration();
            // The store may hold a lease for us all the same; nothing runs under it, so the key is freed.
            let lease = claim.lease_ref(1);
            return match config.store_failure {
                StoreFailure::Refuse => {
                    engine.release_later(lease, deadline, config.store_timeout, place);
                    Ok(answer(refuse(config, &unavailable(config, failure))))
                }
                StoreFailure::DangerouslyExecuteUnprotected => {
                    telemetry::unprotected(&claim.id);
                    let res = call(inner, Request::from_parts(head, body)).await;
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

    let run = execute(config, &mut place, inner, Request::from_parts(head, body));
    let produced = match catch_panic(run).await {
        Ok(produced) => produced,
        Err(panic) => {
            end(&shared, lease, place, "panic").await;
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
                end(&shared, lease, place, "not_retained").await;
                Ok(res)
            }
        },
        Ok(Produced::Unkept { res, reason }) => {
            end(&shared, lease, place, reason).await;
            Ok(res)
        }
        Err(error) => {
            end(&shared, lease, place, "error").await;
            Err(error)
        }
    }
}

// ---- Does the layer apply, and under which key? ----

fn applies(config: &Config, head: &request::Parts) -> bool {
    // Whatever the setting says: there is no body to keep for HEAD, and nothing to replay for a tunnel.
    head.method != Method::HEAD
        && head.method != Method::CONNECT
        && (config.methods)(&head.method)
        && !is_upgrade(&head.headers)
        && !is_grpc(&head.headers)
        && !config.skip.as_ref().is_some_and(|skip| skip(head))
}

/// `Upgrade: h2c` is not one: servers ignore it, and clients send it with ordinary requests.
fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.get_all(header::UPGRADE).iter().any(|value| {
        value
            .as_bytes()
            .split(|byte| *byte == b',')
            .any(|protocol| !protocol.trim_ascii().eq_ignore_ascii_case(b"h2c"))
    })
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.as_bytes().get(..16))
        .is_some_and(|start| start.eq_ignore_ascii_case(b"application/grpc"))
}

/// The key, or `None` when the request carries none and that is allowed.
fn find_key(config: &Config, head: &request::Parts) -> Result<Option<IdempotencyKey>, Error> {
    let key = match &config.key_from {
        KeyFrom::Header { name, alias } => {
            let mut lines = head.headers.get_all(name).iter();
            let mut line = lines.next();
            if line.is_none()
                && let Some(alias) = alias
            {
                lines = head.headers.get_all(alias).iter();
                line = lines.next();
            }
            if lines.next().is_some() {
                return Err(Error::new(
                    ErrorKind::MalformedKey,
                    "expected one idempotency key header line, found several",
                ));
            }
            line.map(|line| config.key_rules.parse(line.as_bytes()))
                .transpose()
        }
        KeyFrom::Head(find) => find(head)
            .map(|key| config.key_rules.check(key))
            .transpose(),
    };
    let key = key.map_err(|error| match error {
        KeyError::Malformed(detail) => Error::new(ErrorKind::MalformedKey, detail),
        KeyError::TooLong { found, limit } => Error::new(
            ErrorKind::KeyTooLong,
            format!("expected a key of at most {limit} bytes, found {found}"),
        ),
        KeyError::TooShort { found, limit } => Error::new(
            ErrorKind::MalformedKey,
            format!("expected a key of at least {limit} bytes, found {found}"),
        ),
    })?;
    match key {
        Some(key)
            if config
                .key_check
                .as_ref()
                .is_some_and(|check| !check(key.as_str())) =>
        {
            Err(Error::new(
                ErrorKind::MalformedKey,
                "the key is not of the form this service expects",
            ))
        }
        Some(key) => Ok(Some(key)),
        None if config.missing_key == MissingKey::Reject => Err(Error::new(
            ErrorKind::MissingKey,
            "expected an idempotency key, found none",
        )),
        None => Ok(None),
    }
}

/// What this request asks of the store.
fn claim(
    config: &Config,
    engine: &Engine,
    head: &request::Parts,
    content: &[u8],
    key: Option<&IdempotencyKey>,
) -> Result<Claim, NoPrincipal> {
    let secret = config.secret.as_ref();
    let fingerprint = config.fingerprint.fingerprint(secret, head, content);
    let part = match (key, config.mismatch) {
        (Some(key), Mismatch::Refuse(_)) => KeyPart::Sent(key),
        (Some(key), Mismatch::Separate) => KeyPart::Separate(key, fingerprint),
        (None, Mismatch::Refuse(_) | Mismatch::Separate) => KeyPart::Derived(fingerprint),
    };
    let id = key_id(
        secret,
        &config.namespace,
        |hash| config.principal.feed(head, hash),
        &part,
    )?;
    let token = Token::random().map_err(|error| {
        let error = Error::new(
            ErrorKind::StoreUnavailable,
            "no randomness to hold a lease under",
        )
        .with_source(error);
        NoPrincipal::Missing(Box::new(error))
    })?;
    Ok(Claim {
        id,
        fingerprint,
        token,
        lease: config.lease,
        orphans: config.orphans,
        keep: config.orphans_kept.unwrap_or(config.retention),
        owner: Arc::clone(&engine.owner),
        operation: operation(head),
    })
}

/// Method and path without the query, which may hold secrets; at most 128 bytes.
fn operation(head: &request::Parts) -> Box<str> {
    let path = path_and_query(head);
    let path = path.split('?').next().unwrap_or(path);
    let method = head.method.as_str();
    let mut operation = String::with_capacity(128.min(method.len() + 1 + path.len()));
    let text = [method, " ", path].into_iter().flat_map(str::chars);
    operation.extend(text.scan(128_usize, |room, char| {
        *room = room.checked_sub(char.len_utf8())?;
        Some(char)
    }));
    operation.into()
}

// ---- Asking the store ----

/// The answer to a claim, as far as the exchange is concerned.
enum Asked {
    Granted(Kept),
    Replay(Replay),
    Answer(Response<Bytes>),
}

async fn acquire(shared: &Shared, claim: &Claim, detach: &Detach) -> Result<Asked, Failure> {
    let (config, engine) = (&*shared.config, &shared.engine);
    let (mut acquired, mut sent) = engine.acquire(claim, config.store_timeout).await?;
    if let (Acquired::InProgress { fingerprint, .. }, InFlight::Wait(_)) =
        (&acquired, config.in_flight)
        && *fingerprint == claim.fingerprint
    {
        (acquired, sent) = wait(shared, claim, detach, acquired, sent).await?;
    }
    // Another request under the same key is judged first, whatever has become of the first one.
    if let Acquired::InProgress { fingerprint, .. }
    | Acquired::Orphaned { fingerprint, .. }
    | Acquired::Completed { fingerprint, .. } = &acquired
        && *fingerprint != claim.fingerprint
    {
        telemetry::mismatch(&claim.id);
        let status = match config.mismatch {
            Mismatch::Refuse(status) => status,
            Mismatch::Separate => ErrorKind::KeyReused.status(),
        };
        let error = Error::new(
            ErrorKind::KeyReused,
            "the key was used with another request; use a new key for a new request",
        );
        return Ok(Asked::Answer(refuse(config, &error.with_status(status))));
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
            Asked::Answer(refuse(config, &in_progress(config)))
        }
        Acquired::Orphaned { .. } => {
            telemetry::orphaned(&claim.id);
            Asked::Answer(refuse(config, &outcome_unknown()))
        }
        Acquired::Completed { record, .. } => replay(config, &claim.id, &record),
    })
}

/// Waits until the first request has an answer, this one may take over, or the time is up: then it is still in progress.
async fn wait(
    shared: &Shared,
    claim: &Claim,
    detach: &Detach,
    mut acquired: Acquired,
    mut sent: Instant,
) -> Result<(Acquired, Instant), Failure> {
    let (config, engine) = (&*shared.config, &shared.engine);
    let InFlight::Wait(max) = config.in_flight else {
        return Ok((acquired, sent));
    };
    let deadline = Instant::now() + max;
    if detach.caller_left() {
        return Ok((acquired, sent));
    }
    let Some(mut waiting) = engine
        .waiters
        .join(claim.id, config.waiters_per_key, config.waiters)
    else {
        return Ok((acquired, sent));
    };
    telemetry::waiting(&claim.id);
    // A waiter has nothing to lose: when its client leaves, its place is free.
    detach.disarm();
    let woken = timeout_at(deadline, waiting.woken()).await;
    detach.arm();
    let turn = match woken {
        Ok(Woken::Turn(turn)) => turn,
        Ok(Woken::Found(Found {
            fingerprint,
            record,
        })) => {
            return Ok((
                Acquired::Completed {
                    fingerprint,
                    record,
                },
                sent,
            ));
        }
        Err(_elapsed) => return Ok((acquired, sent)),
    };
    let mut pause = MIN_PAUSE;
    while let Acquired::InProgress {
        fingerprint,
        expires_in,
    } = &acquired
    {
        let now = Instant::now();
        if *fingerprint != claim.fingerprint || now >= deadline || detach.caller_left() {
            break;
        }
        // The store's push is a hint: we look again however it ends, and no later than the lease may be over.
        let within = pause
            .min(deadline - now)
            .min(*expires_in)
            .max(Duration::from_millis(1));
        detach.disarm();
        let _ = timeout(within, engine.store.changed(&claim.id, within)).await;
        // Asking may take the lease: whoever drops us meanwhile leaves it in good hands.
        detach.arm();
        (acquired, sent) = engine.acquire(claim, config.store_timeout).await?;
        pause = (pause * 8 / 5).min(MAX_PAUSE);
    }
    if let Acquired::Completed {
        fingerprint,
        record,
    } = &acquired
    {
        waiting.deliver(Found {
            fingerprint: *fingerprint,
            record: record.clone(),
        });
    }
    drop(turn);
    Ok((acquired, sent))
}

// ---- Answering from a record ----

/// A replay is as good as the response it repeats; its size would burden every other answer.
struct Replay(Box<StoredResponse>, Option<(HeaderName, HeaderValue)>);

fn replay(config: &Config, id: &KeyId, record: &Bytes) -> Asked {
    match config.codec().decode(id, record) {
        Ok(Record::Response(stored)) => {
            telemetry::replayed(id, Some(stored.recorded_at));
            Asked::Replay(Replay(Box::new(stored), config.replay_marker.clone()))
        }
        Ok(Record::Tombstone { status, reason }) => {
            telemetry::tombstone(id, status, reason);
            let what = match reason {
                NotRetained::TooLarge => "too large",
                NotRetained::Streamed => "streamed",
            };
            let detail = format!(
                "the first request was executed and answered {}, but its response was {what} and was not retained",
                status.as_u16(),
            );
            Asked::Answer(refuse(
                config,
                &Error::new(ErrorKind::ResponseNotRetained, detail),
            ))
        }
        // It was executed once, whatever this is: it must not be executed again.
        Ok(Record::Value(_)) => {
            let error = Error::new(
                ErrorKind::StoreUnavailable,
                "the stored record is not of an HTTP response and cannot be replayed",
            );
            Asked::Answer(refuse(config, &error))
        }
        Err(error) => {
            telemetry::bad_record(id, &error);
            let error = Error::new(
                ErrorKind::StoreUnavailable,
                "the stored record cannot be read",
            )
            .with_source(error);
            Asked::Answer(refuse(config, &error))
        }
    }
}

impl Replay {
    fn into_response<R: http_body::Body>(self) -> Response<Body<R>> {
        let Self(stored, marker) = self;
        let StoredResponse {
            status,
            headers,
            body,
            trailers,
            ..
        } = *stored;
        let announce = match &trailers {
            // HTTP/1 sends only the trailers that are announced, and only where no length is.
            Some(trailers) => announced_trailers(trailers).map(|names| (header::TRAILER, names)),
            None if has_body(status) => {
                Some((header::CONTENT_LENGTH, HeaderValue::from(body.len())))
            }
            None => None,
        };
        let mut res = Response::new(Body::held(body, trailers));
        *res.status_mut() = status;
        *res.headers_mut() = headers;
        for (name, value) in announce.into_iter().chain(marker) {
            res.headers_mut().insert(name, value);
        }
        res
    }
}

fn has_body(status: StatusCode) -> bool {
    !status.is_informational()
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

fn announced_trailers(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).ok()
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

/// Runs the handler and collects its response within limits.
async fn execute<S, B, R>(
    config: &Config,
    place: &mut Place,
    inner: S,
    req: Request<Body<B>>,
) -> Result<Produced<R>, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>>,
    B: http_body::Body,
    R: http_body::Body,
{
    let (mut head, body) = call(inner, req).await?.into_parts();
    let retention = match control::take_wish(&mut head, config.retention, config.max_retention) {
        Wish::Keep(retention) => retention,
        Wish::NoStore => {
            let res = Response::from_parts(head, Body::original(body));
            return Ok(Produced::Unkept {
                res,
                reason: "no_store",
            });
        }
    };
    // A status that announces another answer to come is not one.
    if head.status.is_informational() || !(config.recorded)(head.status) {
        let res = Response::from_parts(head, Body::original(body));
        return Ok(Produced::Unkept {
            res,
            reason: "status",
        });
    }
    Ok(
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
        },
    )
}

async fn call<S: Service<Req>, Req>(mut inner: S, req: Req) -> Result<S::Response, S::Error> {
    let started = Instant::now();
    let res = inner.call(req).await;
    telemetry::handler_time(started.elapsed());
    res
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
            end(shared, lease, place, "not_retained").await;
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
            answer_what_is_stored(shared, claim, record, retention, res).await
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
        )) if fingerprint == claim.fingerprint => match replay(config, &claim.id, &record) {
            Asked::Replay(replay) => replay.into_response(),
            Asked::Answer(res) => answer(res),
            Asked::Granted(_) => unreachable!("a record grants nothing"),
        },
        // Whoever had it released it without an answer to keep: ours is the only one.
        Ok((Acquired::Granted { generation, .. }, _)) => {
            let lease = claim.lease_ref(generation);
            match engine
                .complete(&lease, &record, retention, config.store_timeout)
                .await
            {
                Completion::Stored => res,
                Completion::LeaseLost | Completion::TooLarge { .. } | Completion::Failing => {
                    answer(refuse(config, &outcome_unknown()))
                }
            }
        }
        Ok((
            Acquired::InProgress { .. } | Acquired::Orphaned { .. } | Acquired::Completed { .. },
            _,
        ))
        | Err(_) => answer(refuse(config, &outcome_unknown())),
    }
}

/// Frees the key: there is nothing to keep.
async fn end(shared: &Shared, lease: Kept, place: Place, reason: &'static str) {
    let (config, engine) = (&*shared.config, &shared.engine);
    telemetry::released(&lease.reference().id, reason);
    if !engine
        .release(lease.reference(), config.store_timeout)
        .await
    {
        let deadline = lease.deadline();
        engine.release_later(*lease.reference(), deadline, config.store_timeout, place);
    }
}

// ---- Refusing ----

fn refuse(config: &Config, error: &Error) -> Response<Bytes> {
    telemetry::refused(error.kind());
    config.refusal(error)
}

fn answer<R: http_body::Body>(res: Response<Bytes>) -> Response<Body<R>> {
    res.map(|body| Body::held(body, None))
}

fn in_progress(config: &Config) -> Error {
    let status = match config.in_flight {
        InFlight::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
        InFlight::Conflict | InFlight::Wait(_) => StatusCode::CONFLICT,
    };
    Error::new(
        ErrorKind::InProgress,
        "the first request with this key is still being executed",
    )
    .with_status(status)
    .with_retry_after(config.retry_after)
}

fn outcome_unknown() -> Error {
    Error::new(
        ErrorKind::OutcomeUnknown,
        "an execution of this request ended without an outcome; it may or may not have had its effect",
    )
}

fn unavailable(config: &Config, failure: Failure) -> Error {
    Error::new(
        ErrorKind::StoreUnavailable,
        "the store failed, so nothing was executed",
    )
    .with_retry_after(config.retry_after)
    .with_source(failure.into_source())
}

/// How often a waiter looks at the store however quiet it is: from the first pause to the last.
const MIN_PAUSE: Duration = Duration::from_millis(25);
const MAX_PAUSE: Duration = Duration::from_secs(1);
