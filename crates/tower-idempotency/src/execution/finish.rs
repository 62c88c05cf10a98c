//! Ending the lease with what was produced under it: stored first, then told.

use std::{future::Future, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode, header};

use crate::{
    body::{Body, Counted, Data},
    config::Config,
    execution::reconcile::{Found, look, look_once_more},
    execution::shared::{Completion, Engine, Pause},
    lease::commits::Committed,
    lease::{Held, Kept},
    limits::Place,
    record::{NeedsAttention, Record, StoredResponse, TombstoneReason, not_kept},
    response::directives,
    response::disposition::{Then, code_alone, tombstone_or_release, too_large},
    response::reject::{into_response, not_known_yet, outcome_unknown, refuse},
    response::replay::{answer, has_body, replay},
    store::{KeyId, LeaseRef, Ttl},
    telemetry,
};

/// What was produced under a lease, as it is to be stored.
#[derive(Clone)]
pub(crate) struct Produced {
    /// That of a response; none, of a value.
    pub(crate) status: Option<StatusCode>,
    pub(crate) record: Bytes,
    pub(crate) retention: Ttl,
}

/// What is to be told instead of what was produced.
pub(crate) enum Instead {
    /// This is stored, by a commit of the handler's own: it is what the handler has answered, and no replay.
    Committed(Bytes),
    /// This is stored, by somebody else.
    Record(Bytes),
    /// Nobody knows; the same request may be told `later`, or not even then.
    Unknown { later: bool },
}

/// Ends the lease with the record; `None` when what it was made of is what to tell.
pub(crate) fn settle(
    config: &Config,
    engine: &Arc<Engine>,
    lease: Kept,
    place: Place,
    mut produced: Produced,
) -> impl Future<Output = Option<Instead>> {
    lease.about_to_end(true);
    async move {
        let completed = complete(&lease, &lease.reference, &mut produced).await;
        let completion = match completed {
            Ok(completion) => completion,
            Err(reason) => return Box::pin(let_go(config, engine, lease, place, reason)).await,
        };
        match completion {
            // A commit that nobody has heard of may have been there before us, and then nothing was changed.
            Completion::Stored if lease.is_in_doubt() => {
                Box::pin(whose_is_stored(config, engine, &lease, place, &produced)).await
            }
            Completion::Stored => {
                telemetry::recorded(lease.id(), &produced.record);
                None
            }
            Completion::LeaseLost => {
                lease.lose();
                lease.end();
                let instead = Box::pin(theirs_or_ours(&lease, place, &produced)).await;
                match instead {
                    None => telemetry::recorded(lease.id(), &produced.record),
                    Some(_) => telemetry::not_stored(lease.id(), &produced.record),
                }
                instead
            }
            // The effect has happened and only we know: say so, and keep trying. A retry is told that it is in progress
            // while the lease lasts.
            Completion::Failing | Completion::TooLarge { .. } => {
                // A renewal has heard that somebody else has the lease: then ours is not the answer.
                let unknown = lease.is_in_doubt() || lease.is_lost();
                complete_later(&lease, lease.reference, produced, place, !unknown);
                unknown.then(|| nobody_knows(&lease))
            }
        }
    }
}

/// Completes with the record, or with what is kept of one that the store refuses for its size. `Err` says why there is
/// nothing to keep.
async fn complete(
    lease: &Held,
    reference: &LeaseRef,
    produced: &mut Produced,
) -> Result<Completion, &'static str> {
    let Produced {
        status,
        ref mut record,
        retention,
    } = *produced;
    if may_be_untrue(lease, record) {
        return Err("outcome_unknown");
    }
    let (config, engine, id) = (&*lease.grant.config, &lease.grant.engine, lease.id());
    let limit = config.execution.store_timeout;
    let completion = engine.complete(reference, record, retention, limit).await;
    let Completion::TooLarge { limit: largest } = completion else {
        return Ok(completion);
    };
    let bytes = record.len();
    tracing::warn!(bytes, largest, "the store cannot keep a record this large");
    *record = match (code_alone(id, status, record), status) {
        (Some(code), _) => code,
        (None, Some(status)) => {
            match tombstone_or_release(config, id, status, TombstoneReason::TooLarge, retention) {
                Then::Keep { record, .. } => record,
                Then::Free(reason) => return Err(reason.name()),
            }
        }
        (None, None) => too_large(config, id),
    };
    Ok(engine.complete(reference, record, retention, limit).await)
}

/// Whether a commit of the handler's may have come through of which the record is over by now. Then what the handler has said
/// since, that nothing was done, may be untrue, and nothing that is stored contradicts it. What needs attention claims nothing.
fn may_be_untrue(lease: &Held, record: &[u8]) -> bool {
    lease.commit.may_be_over() && NeedsAttention::in_record(record).is_none()
}

/// Keeps trying to complete in a task of its own, until it has an answer or one more lease would be over. The lease is not
/// renewed meanwhile, or a store that renews leases and refuses records would keep the key for ever. `place` keeps
/// [`drain`](crate::IdempotencyLayer::drain) waiting for it. `told` says whether the caller is given what was produced.
fn complete_later(
    lease: &Kept,
    reference: LeaseRef,
    mut produced: Produced,
    mut place: Place,
    told: bool,
) {
    let (lease, deadline) = (lease.handle(), lease.last_try());
    place.buffer.keep(produced.record.len());
    tokio::spawn(async move {
        let held = &*lease.0;
        let (config, engine) = (&*held.grant.config, &held.grant.engine);
        let mut pause = Pause::new();
        while pause.before(deadline).await {
            match complete(held, &reference, &mut produced).await {
                Ok(Completion::Failing) => {}
                Ok(Completion::Stored) if held.commit.has_begun() => {
                    // Whoever asked has had its answer: this is for operators.
                    whose_is_stored(config, engine, held, place, &produced).await;
                    return;
                }
                Ok(Completion::Stored) => {
                    return telemetry::recorded(held.id(), &produced.record);
                }
                Ok(Completion::LeaseLost | Completion::TooLarge { .. }) => break,
                Err(reason) => {
                    telemetry::released(held.id(), reason);
                    let limit = config.execution.store_timeout;
                    engine.release_until(&reference, deadline, limit).await;
                    if held.commit.has_begun() {
                        engine.give_back_later(config, &held.grant.claim, place);
                    }
                    return;
                }
            }
        }
        telemetry::not_stored(held.id(), &produced.record);
        if told {
            telemetry::unrecorded(held.id());
        }
    });
}

/// The store took our completion, which changes nothing where the handler's own commit has come through.
async fn whose_is_stored(
    config: &Config,
    engine: &Arc<Engine>,
    lease: &Held,
    place: Place,
    Produced { record, .. }: &Produced,
) -> Option<Instead> {
    // Theirs was not there before ours, unless it was over by then.
    let untrue = may_be_untrue(lease, record);
    match look_once_more(config, engine, lease, place).await {
        Found::Record(stored) if stored == *record => {
            telemetry::recorded(lease.id(), record);
            untrue.then(|| nobody_knows(lease))
        }
        Found::Record(stored) => {
            telemetry::not_stored(lease.id(), record);
            let is_theirs = lease.commit.has_begun_with(&stored);
            Some(if is_theirs {
                committed(lease, stored)
            } else {
                Instead::Record(stored)
            })
        }
        Found::Held(_) | Found::Orphan | Found::Lost => {
            telemetry::not_stored(lease.id(), record);
            Some(nobody_knows(lease))
        }
        // It took ours, as far as it has said anything: somebody looks once too often, and not never.
        Found::Unknown => {
            telemetry::recorded(lease.id(), record);
            Some(nobody_knows(lease))
        }
    }
}

/// The handler's own commit is what is stored, and nobody has counted it so far.
fn committed(lease: &Held, record: Bytes) -> Instead {
    telemetry::recorded(lease.id(), &record);
    Instead::Committed(record)
}

/// After a lost lease what was produced is worth nothing unless it is what is stored: nobody must be told what others are
/// not.
async fn theirs_or_ours(lease: &Kept, place: Place, produced: &Produced) -> Option<Instead> {
    let (config, engine) = (&*lease.grant.config, &lease.grant.engine);
    if lease.is_in_doubt() {
        // Nothing to complete: a commit that is still on its way would find its lease again.
        return Some(match look_once_more(config, engine, lease, place).await {
            Found::Record(stored) => Instead::Record(stored),
            Found::Held(_) | Found::Orphan | Found::Lost | Found::Unknown => nobody_knows(lease),
        });
    }
    let claim = &lease.grant.claim;
    let generation = match look(config, engine, claim).await {
        Found::Record(stored) => return Some(Instead::Record(stored)),
        Found::Held(generation) => generation,
        // If it is still held, completing it is refused.
        Found::Orphan => 1,
        Found::Lost => return Some(nobody_knows(lease)),
        // As with an orphan, once the store is back: what may be ours by then, or nobody's, is completed.
        Found::Unknown => {
            complete_later(lease, claim.lease_ref(1), produced.clone(), place, false);
            return Some(nobody_knows(lease));
        }
    };
    // Whoever had it may have released it without an outcome to keep: then ours is the only one.
    let reference = claim.lease_ref(generation);
    let limit = config.execution.store_timeout;
    let (record, retention) = (&produced.record, produced.retention);
    match engine.complete(&reference, record, retention, limit).await {
        Completion::Stored => None,
        Completion::LeaseLost => Some(nobody_knows(lease)),
        // Nobody else's is there so far, and ours is not either: no retry is to execute for want of it.
        Completion::Failing | Completion::TooLarge { .. } => {
            complete_later(lease, reference, produced.clone(), place, false);
            Some(nobody_knows(lease))
        }
    }
}

/// A retry is told what is stored by then, or executes what nobody else has. Not so where a commit of the handler's may have come
/// through of which the record is over: that would be done again.
fn nobody_knows(lease: &Held) -> Instead {
    let later = !lease.commit.may_be_over();
    Instead::Unknown { later }
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
        Committed::Record(record) => return Some(committed(&lease, record)),
        Committed::Unknown => {
            return Box::pin(let_go_in_doubt(config, engine, lease, place, reason)).await;
        }
    }
    engine
        .end(lease, config.execution.store_timeout, place, reason)
        .await;
    None
}

/// Ends the lease first, and looks then: the other way round, a commit that is still on its way to the store might come
/// through after the look.
async fn let_go_in_doubt(
    config: &Config,
    engine: &Arc<Engine>,
    lease: Kept,
    place: Place,
    reason: &'static str,
) -> Option<Instead> {
    lease.about_to_end(true);
    let ended = engine
        .release(&lease.reference, config.execution.store_timeout)
        .await;
    let found = if ended {
        look_once_more(config, engine, &lease, place.beside()).await
    } else {
        Found::Unknown
    };
    if ended && !matches!(found, Found::Record(_)) {
        // Whoever commits may ask the store yet, and take what is free by now.
        engine.give_back_later(config, &lease.grant.claim, place);
    }
    match found {
        Found::Record(record) if lease.commit.has_begun_with(&record) => {
            Some(committed(&lease, record))
        }
        Found::Record(record) => {
            lease.lose();
            Some(Instead::Record(record))
        }
        // Somebody took over, as the commit has heard, and may answer yet.
        Found::Orphan | Found::Lost if lease.is_lost() => {
            if !lease.commit.may_be_over() {
                lease.lose();
            }
            Some(nobody_knows(&lease))
        }
        // Whoever has the key now took it when our lease was over. The record was there and is over, or it never was, and
        // never will be: a commit finds no lease of ours any more.
        Found::Held(_) | Found::Orphan | Found::Lost => {
            telemetry::released(lease.id(), reason);
            let unknown = lease.commit.may_be_over();
            unknown.then(|| nobody_knows(&lease))
        }
        Found::Unknown => {
            telemetry::held(lease.id());
            Some(nobody_knows(&lease))
        }
    }
}

/// What HTTP tells instead of a response.
pub(crate) fn told<R: http_body::Body>(
    config: &Config,
    id: &KeyId,
    instead: Instead,
) -> Response<Body<R>> {
    into_response(match instead {
        Instead::Committed(record) => answer(config, id, &record),
        Instead::Record(record) => replay(config, id, &record),
        Instead::Unknown { later: true } => refuse(config, &not_known_yet(config)),
        Instead::Unknown { later: false } => refuse(config, &outcome_unknown()),
    })
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
    directives::strip_only(res.headers_mut());
    if let Some(late) = res.extensions_mut().remove::<NeedsAttention>() {
        // One key, one answer.
        telemetry::attention_ignored(lease.id(), late.code(), "an answer was committed");
    }
    match config.response.codec().decode(lease.id(), record) {
        Ok(Record::Response(stored)) => complemented(config, lease, stored, res),
        // What was committed with it was not kept, and is on its way.
        Ok(Record::Tombstone { .. } | Record::Attention { .. }) => res,
        Ok(Record::Value(_)) | Err(_) => into_response(answer(config, lease.id(), record)),
    }
}

fn complemented<R: http_body::Body>(
    config: &Config,
    lease: &Kept,
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
    for (name, value) in not_kept(&head.headers, &*config.response.replayed) {
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
    let data = if head.extensions.remove::<Counted>().is_some() {
        let unsent = lease.grant.engine.limits.buffer().unsent();
        let unsent = unsent.keeping(body.len());
        Data::counted(body, unsent)
    } else {
        body.into()
    };
    Response::from_parts(head, Body::held(data, trailers))
}
