//! The model and the real store return equal replies. Each call is made on both, on a clock that advances only in
//! ticks.

mod tiers;
mod transitions;
mod walks;

use std::{collections::HashMap, time::Duration};

use tokio::time::advance;
use tower_idempotency::{
    conformance::FaultInjector,
    store::{Acquired, Fingerprint, KeyId, MemoryStore, Ttl},
};

use crate::{
    store::{Call, Caller, Entry, ModelReply, Rules, Times},
    store_calls::{Durations, OBSERVER, QUERY, StoreReply, call_store, record, token},
};

const TICK: Duration = Duration::from_secs(1);

/// An instant just before the end of a tick.
const NEARLY: Duration = Duration::from_millis(999);

/// A description of different replies of store and model.
type Differs = String;

/// The number of equal replies of model and store, by kind of reply.
type Seen = HashMap<&'static str, usize>;

/// A key in the model and in the store.
struct Replay<'a> {
    rules: Rules,
    entry: Option<Entry>,
    store: &'a FaultInjector<MemoryStore>,
    id: KeyId,
    seen: &'a mut Seen,
}

impl Replay<'_> {
    /// Advances both by one tick. Compares them just before its end as well, so that no deadline is early.
    async fn tick(&mut self) -> Result<(), Differs> {
        advance(NEARLY).await;
        self.check_entry(NEARLY).await?;
        advance(TICK - NEARLY).await;
        self.rules.tick(&mut self.entry);
        self.check_entry(Duration::ZERO).await
    }

    /// Compares the entry, at this time within a tick. An absent entry is skipped, because a query would acquire it.
    async fn check_entry(&mut self, into: Duration) -> Result<(), Differs> {
        if self.entry.is_none() {
            return Ok(());
        }
        let response = self.rules.apply(&mut self.entry.clone(), OBSERVER, QUERY);
        self.compare(OBSERVER, QUERY, response, into).await
    }

    /// Compares the entry for the last time. This may acquire an absent entry.
    async fn take(&mut self) -> Result<(), Differs> {
        let response = self.rules.apply(&mut self.entry, OBSERVER, QUERY);
        self.compare(OBSERVER, QUERY, response, Duration::ZERO)
            .await
    }

    async fn compare(
        &mut self,
        caller: Caller,
        call: Call,
        response: ModelReply,
        into: Duration,
    ) -> Result<(), Differs> {
        let found = call_store(
            self.store,
            durations(self.rules.times),
            self.id,
            caller,
            call,
        )
        .await;
        let found = found.map_err(|error| format!("{call:?} of {caller:?} failed: {error}"))?;
        let expected = to_reply(response, into);
        if found != expected {
            return Err(format!(
                "{call:?} of {caller:?} returns {found:?}, in the model {expected:?}"
            ));
        }
        *self.seen.entry(name(response)).or_default() += 1;
        Ok(())
    }
}

/// Converts the times of the model to the clock of the test.
fn durations(times: Times) -> Durations {
    let ticks = |ticks: u8| Ttl::try_from(TICK * ticks.into()).unwrap();
    Durations {
        lease: ticks(times.lease),
        orphan_retention: ticks(times.orphan_retention),
        retention: ticks(times.retention),
    }
}

/// Converts the model's reply to the store's reply, at this time within a tick.
fn to_reply(response: ModelReply, into: Duration) -> StoreReply {
    let fingerprint = |byte| Fingerprint::from_bytes([byte; 32]);
    let acquired = match response {
        ModelReply::LeaseLost => return StoreReply::LeaseLost,
        ModelReply::Done => return StoreReply::Done,
        ModelReply::Granted {
            generation,
            takeover,
        } => Acquired::Granted {
            generation: generation.into(),
            takeover,
        },
        ModelReply::InProgress {
            fingerprint: of,
            left,
        } => Acquired::InProgress {
            fingerprint: fingerprint(of),
            expires_in: (TICK * left.into()).saturating_sub(into),
        },
        ModelReply::Orphaned {
            fingerprint: of,
            since,
        } => Acquired::Orphaned {
            fingerprint: fingerprint(of),
            since: TICK * since.into() + into,
        },
        ModelReply::Completed {
            fingerprint: of,
            record: by,
            left,
        } => Acquired::Completed {
            fingerprint: fingerprint(of),
            record: record(by),
            expires_in: (TICK * left.into()).saturating_sub(into),
            token: Some(token(by)),
        },
    };
    StoreReply::Acquired(acquired)
}

fn name(response: ModelReply) -> &'static str {
    match response {
        ModelReply::Granted {
            takeover: false, ..
        } => "granted",
        ModelReply::Granted { takeover: true, .. } => "granted as a takeover",
        ModelReply::InProgress { .. } => "in progress",
        ModelReply::Orphaned { .. } => "orphaned",
        ModelReply::Completed { .. } => "completed",
        ModelReply::Done => "done",
        ModelReply::LeaseLost => "lease lost",
    }
}
