//! Ending the lease with what the handler produced: stored first, then answered.

use std::{future::Future, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Response, header};

use crate::{
    body::Body,
    commit::Committed,
    config::Config,
    control,
    engine::{Completion, Engine},
    lease::Kept,
    limits::Place,
    receive::{Then, code_alone, unretained},
    record::{NeedsAttention, NotRetained, Record, StoredResponse, not_kept},
    refusal::{Answer, into_response, outcome_unknown, refuse},
    replay::{has_body, replay},
    store::{Acquired, Claim, OrphanPolicy, Token, Ttl},
    telemetry,
};

/// Stores the record, and only then answers: with `res` when it is what the store holds.
pub(crate) fn settle<R: http_body::Body>(
    config: &Config,
    engine: &Arc<Engine>,
    lease: Kept,
    place: Place,
    mut record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> impl Future<Output = Response<Body<R>>> {
    let limit = config.store_timeout;
    lease.about_to_end(true);
    async move {
        let mut completion = engine
            .complete(&lease.reference, &record, retention, limit)
            .await;
        if let Completion::TooLarge { limit: largest } = completion {
            let bytes = record.len();
            tracing::warn!(bytes, largest, "the store cannot keep a record this large");
            let (status, reason) = (res.status(), NotRetained::TooLarge);
            let then = match code_alone(lease.id(), Some(status), &record) {
                Some(record) => Then::Keep { record, retention },
                None => unretained(config, lease.id(), status, reason, retention),
            };
            match then {
                Then::Keep {
                    record: smaller, ..
                } => record = smaller,
                Then::Free(reason) => {
                    let freed = free(config, engine, lease, place, reason.name());
                    return Box::pin(freed)
                        .await
                        .map_or(res, |answer| into_response(*answer));
                }
            }
            completion = engine
                .complete(&lease.reference, &record, retention, limit)
                .await;
        }
        match completion {
            // A commit that nobody has heard of may have been there before us, and then nothing was changed.
            Completion::Stored if lease.is_in_doubt() => {
                Box::pin(answer_if_stored(config, engine, &lease, record, res)).await
            }
            Completion::Stored => {
                telemetry::recorded(lease.id(), &record);
                res
            }
            Completion::LeaseLost => {
                lease.lose();
                lease.end();
                Box::pin(answer_what_is_stored(
                    config, engine, &lease, record, retention, res,
                ))
                .await
            }
            // The effect has happened and only we know: say so, and keep trying while the lease lasts. A retry
            // meanwhile is told that it is in progress.
            Completion::Failing | Completion::TooLarge { .. } => {
                engine.complete_later(&lease, record, retention, limit, place);
                // A renewal has heard that somebody else has the lease: then ours is not the answer.
                if lease.is_in_doubt() || lease.is_lost() {
                    return into_response(refuse(config, &outcome_unknown()));
                }
                res
            }
        }
    }
}

/// As [`let_go`], for HTTP: the answer instead of the one that was not to be kept.
pub(crate) async fn free(
    config: &Config,
    engine: &Arc<Engine>,
    lease: Kept,
    place: Place,
    reason: &'static str,
) -> Option<Box<Answer>> {
    let id = *lease.id();
    let instead = let_go(config, engine, lease, place, reason).await?;
    Some(Box::new(match instead {
        Instead::Record(record) => replay(config, &id, &record),
        Instead::Unknown => refuse(config, &outcome_unknown()),
    }))
}

/// Ends a lease that leaves nothing to keep, unless its handler committed or may have: then that was not for us to say.
pub(crate) async fn let_go(
    config: &Config,
    engine: &Arc<Engine>,
    lease: Kept,
    place: Place,
    reason: &'static str,
) -> Option<Instead> {
    match lease.close() {
        Committed::Nothing => {}
        Committed::Record(record) => return Some(Instead::Record(record)),
        Committed::Unknown => {
            match Box::pin(ended_or_found(config, engine, &lease)).await {
                Found::Record(record) => return Some(Instead::Record(record)),
                // The record was there and is over, or it never was.
                Found::Held(_) if lease.commit.may_be_over() => {
                    engine.end(lease, config.store_timeout, place, reason).await;
                    return Some(Instead::Unknown);
                }
                Found::Held(_) => {}
                // Of a takeover that we have ended, or of somebody else's after us.
                Found::Orphan if !lease.is_lost() && !lease.commit.may_be_over() => return None,
                Found::Orphan | Found::Lost => {
                    lease.lose();
                    return Some(Instead::Unknown);
                }
                Found::Unknown => {
                    telemetry::held(lease.id());
                    return Some(Instead::Unknown);
                }
            }
        }
    }
    engine.end(lease, config.store_timeout, place, reason).await;
    None
}

/// Ends the lease first, and looks then: the other way round, a commit that is still on its way to the store might come
/// through after the look.
async fn ended_or_found(config: &Config, engine: &Engine, lease: &Kept) -> Found {
    lease.about_to_end(true);
    if !engine.release(&lease.reference, config.store_timeout).await {
        return Found::Unknown;
    }
    look_once_more(config, engine, &lease.grant.claim).await
}

/// What is to be told instead of that there was nothing to keep.
pub(crate) enum Instead {
    /// This is stored.
    Record(Bytes),
    /// Nobody knows.
    Unknown,
}

/// The answer of a handler that committed `record`, whatever it has returned since: one key, one answer. What replays never
/// carry, such as the cookies of a session, is that of `res`.
pub(crate) fn first_answer<R: http_body::Body>(
    config: &Config,
    lease: &Kept,
    record: &Bytes,
    mut res: Response<Body<R>>,
) -> Response<Body<R>> {
    telemetry::recorded(lease.id(), record);
    control::strip_only(res.headers_mut());
    if let Some(late) = res.extensions_mut().remove::<NeedsAttention>() {
        // One key, one answer.
        telemetry::attention_ignored(lease.id(), late.code(), "an answer was committed");
    }
    match config.codec().decode(lease.id(), record) {
        Ok(Record::Response(stored)) => complemented(config, stored, res),
        // What was committed with it was not kept, and is on its way.
        Ok(Record::Tombstone { .. } | Record::Attention { .. }) => res,
        Ok(Record::Value(_)) | Err(_) => into_response(replay(config, lease.id(), record)),
    }
}

fn complemented<R: http_body::Body>(
    config: &Config,
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
    let mut own = HeaderMap::new();
    for (name, value) in not_kept(&head.headers, &*config.replayed) {
        own.append(name, value.clone());
    }
    own.remove(header::TRANSFER_ENCODING);
    // Of the body that is sent, not of the one that came with it.
    if own.remove(header::CONTENT_LENGTH).is_some() && trailers.is_none() && has_body(status) {
        own.insert(header::CONTENT_LENGTH, body.len().into());
    }
    headers.extend(own);
    head.status = status;
    head.headers = headers;
    Response::from_parts(head, Body::held(body, trailers))
}

/// After a lost lease our own answer is worth nothing unless it is the stored one: two clients must not be told
/// different things.
async fn answer_what_is_stored<R: http_body::Body>(
    config: &Config,
    engine: &Engine,
    lease: &Kept,
    record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    let claim = &lease.grant.claim;
    let generation = match look(config, engine, claim).await {
        Found::Record(record) => return into_response(replay(config, &claim.id, &record)),
        Found::Held(generation) => Some(generation),
        // If it is still held, completing it is refused.
        Found::Orphan => Some(1),
        Found::Lost | Found::Unknown => None,
    };
    // Whoever had it may have released it without an answer to keep: then ours is the only one.
    if let Some(generation) = generation {
        let lease = claim.lease_ref(generation);
        let limit = config.store_timeout;
        let completion = engine.complete(&lease, &record, retention, limit).await;
        if let Completion::Stored = completion {
            telemetry::recorded(&claim.id, &record);
            return res;
        }
    }
    into_response(refuse(config, &outcome_unknown()))
}

/// The store took our completion, which changes nothing where the handler's own commit has come through.
async fn answer_if_stored<R: http_body::Body>(
    config: &Config,
    engine: &Engine,
    lease: &Kept,
    record: Bytes,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    let found = look_once_more(config, engine, &lease.grant.claim).await;
    into_response(match found {
        Found::Record(stored) if stored == record => {
            telemetry::recorded(lease.id(), &record);
            return res;
        }
        Found::Record(stored) => replay(config, lease.id(), &stored),
        Found::Held(_) | Found::Orphan | Found::Lost | Found::Unknown => {
            refuse(config, &outcome_unknown())
        }
    })
}

/// What has become of a lease of which we do not know.
pub(crate) enum Found {
    /// There is a record of this request: ours, or that of whoever took over.
    Record(Bytes),
    /// There was nothing, and now it is ours, at this generation.
    Held(u64),
    /// Somebody took over, and left nothing so far.
    Orphan,
    Lost,
    /// The store does not say.
    Unknown,
}

/// As [`look`], once the lease is over. Under a token of its own: under that of the lease a commit that is still on its way
/// would find its lease again. What asking has taken is given back.
pub(crate) async fn look_once_more(config: &Config, engine: &Engine, claim: &Claim) -> Found {
    let Ok(token) = Token::random() else {
        return Found::Unknown;
    };
    let claim = Claim {
        token,
        ..claim.clone()
    };
    let found = look(config, engine, &claim).await;
    if let Found::Held(generation) = found {
        let lease = claim.lease_ref(generation);
        if !engine.release(&lease, config.store_timeout).await {
            return Found::Unknown;
        }
    }
    found
}

/// Asks the store. Asking is acquiring, under the lease's own token; it must not take over from whoever took over from us.
pub(crate) async fn look(config: &Config, engine: &Engine, claim: &Claim) -> Found {
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
        )) if fingerprint == claim.fingerprint => Found::Record(record),
        Ok((Acquired::Granted { generation, .. }, _)) => Found::Held(generation),
        Ok((Acquired::Orphaned { .. }, _)) => Found::Orphan,
        Ok((Acquired::InProgress { .. } | Acquired::Completed { .. }, _)) => Found::Lost,
        Err(_) => Found::Unknown,
    }
}
