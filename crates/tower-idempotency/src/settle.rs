//! Ending the lease with what the handler produced: stored first, then answered.

use std::{future::Future, sync::Arc};

use bytes::Bytes;
use http::Response;

use crate::{
    body::Body,
    config::Config,
    engine::{Completion, Engine},
    lease::Kept,
    limits::Place,
    receive::{Then, unretained},
    record::NotRetained,
    refusal::{into_response, outcome_unknown, refuse},
    replay::replay,
    store::{Acquired, Claim, OrphanPolicy, Ttl},
    telemetry,
};

/// Stores the record, and only then answers: with `res` when it is what the store holds.
#[expect(
    clippy::too_many_arguments,
    reason = "what is left of the exchange when it ends"
)]
pub(crate) fn settle<R: http_body::Body>(
    config: &Config,
    engine: &Arc<Engine>,
    claim: &Claim,
    lease: Kept,
    place: Place,
    mut record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> impl Future<Output = Response<Body<R>>> {
    let limit = config.store_timeout;
    lease.about_to_end();
    async move {
        let mut completion = engine
            .complete(lease.reference(), &record, retention, limit)
            .await;
        if let Completion::TooLarge { limit: largest } = completion {
            let bytes = record.len();
            tracing::warn!(bytes, largest, "the store cannot keep a record this large");
            match unretained(
                config,
                &claim.id,
                res.status(),
                NotRetained::TooLarge,
                retention,
            ) {
                Then::Keep {
                    record: tombstone, ..
                } => record = tombstone,
                Then::Free(reason) => {
                    engine.end(lease, limit, place, reason).await;
                    return res;
                }
            }
            completion = engine
                .complete(lease.reference(), &record, retention, limit)
                .await;
        }
        match completion {
            Completion::Stored => {
                telemetry::recorded(&claim.id, record.len());
                res
            }
            Completion::LeaseLost => {
                lease.lose();
                drop(lease);
                Box::pin(answer_what_is_stored(
                    config, engine, claim, record, retention, res,
                ))
                .await
            }
            // The effect has happened and only we know: say so, and keep trying while the lease lasts. A retry
            // meanwhile is told that it is in progress.
            Completion::Failing | Completion::TooLarge { .. } => {
                engine.complete_later(&lease, record, retention, limit, place);
                res
            }
        }
    }
}

/// After a lost lease our own answer is worth nothing unless it is the stored one: two clients must not be told
/// different things.
async fn answer_what_is_stored<R: http_body::Body>(
    config: &Config,
    engine: &Engine,
    claim: &Claim,
    record: Bytes,
    retention: Ttl,
    res: Response<Body<R>>,
) -> Response<Body<R>> {
    // Asking is acquiring; it must not take over from whoever took over from us.
    let claim = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    let generation = match engine.acquire(&claim, config.store_timeout).await {
        Ok((
            Acquired::Completed {
                fingerprint,
                record,
            },
            _,
        )) if fingerprint == claim.fingerprint => {
            return into_response(replay(config, &claim.id, &record));
        }
        Ok((Acquired::Granted { generation, .. }, _)) => Some(generation),
        // If it is still held, completing it is refused.
        Ok((Acquired::Orphaned { .. }, _)) => Some(1),
        Ok((Acquired::InProgress { .. } | Acquired::Completed { .. }, _)) | Err(_) => None,
    };
    // Whoever had it may have released it without an answer to keep: then ours is the only one.
    if let Some(generation) = generation {
        let lease = claim.lease_ref(generation);
        let limit = config.store_timeout;
        let completion = engine.complete(&lease, &record, retention, limit).await;
        if let Completion::Stored = completion {
            return res;
        }
    }
    into_response(refuse(config, &outcome_unknown()))
}
