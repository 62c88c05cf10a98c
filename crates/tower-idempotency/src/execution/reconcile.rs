//! What the store holds of a lease of which we do not know.

use std::sync::Arc;

use bytes::Bytes;

use crate::{
    config::Config,
    execution::shared::Engine,
    lease::Held,
    limits::Place,
    store::{Acquired, Claim, OrphanPolicy, Token},
};

/// What has become of the lease.
pub(crate) enum Found {
    /// There is a record of this request: ours, or that of whoever took over.
    Record(Bytes),
    /// There was nothing, and now it is ours, at this generation.
    Held(u64),
    /// Somebody took over, and left nothing so far.
    Orphan,
    /// Somebody else has it.
    Lost,
    /// The store does not say.
    Unknown,
}

/// Asks the store. Asking is acquiring, under the lease's own token; it must not take over from whoever took over from us.
pub(crate) async fn look(config: &Config, engine: &Engine, claim: &Claim) -> Found {
    let claim = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    match engine.acquire(&claim, config.execution.store_timeout).await {
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

/// As [`look`], once the lease is over. Under a token of its own: under that of the lease a commit that is still on its way
/// would find its lease again. What asking has taken, or may have, is given back.
pub(crate) async fn look_once_more(
    config: &Config,
    engine: &Arc<Engine>,
    lease: &Held,
    place: Place,
) -> Found {
    let Ok(token) = Token::random() else {
        return Found::Unknown;
    };
    let limit = config.execution.store_timeout;
    let claim = Claim {
        token,
        ..lease.grant.claim.clone()
    };
    let found = look(config, engine, &claim).await;
    let taken = match found {
        Found::Held(generation) => !engine.release(&claim.lease_ref(generation), limit).await,
        Found::Unknown => true,
        Found::Record(_) | Found::Orphan | Found::Lost => false,
    };
    if taken {
        engine.give_back_later(config, &claim, place);
        return Found::Unknown;
    }
    found
}
