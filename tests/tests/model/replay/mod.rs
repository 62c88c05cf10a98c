//! The model and the real store answer alike: what the one is asked, the other is asked too, on a clock that stands still but
//! for its ticks.

mod transitions;
mod walks;

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use tokio::time::advance;
use tower_idempotency::{
    conformance::Faulty,
    store::{
        Acquired, Claim, Fingerprint, KeyId, MemoryStore, OrphanPolicy, Store, StoreError, Token,
        Ttl,
    },
};

use crate::store::{Answer, Call, Entry, Orphans, Rules, Times, Who};

const TICK: Duration = Duration::from_secs(1);

/// Just before a tick is over.
const NEARLY: Duration = Duration::from_millis(999);

/// Whose request is another one, and who asks only to see what there is.
const ONLOOKER: Who = Who {
    token: 200,
    fingerprint: 200,
};
const LOOK: Call = Call::Acquire(Orphans::Refuse);

/// The store and the model said different things.
type Differs = String;

/// How often the two gave which answer alike.
type Seen = HashMap<&'static str, usize>;

/// One key in the model and in the store.
struct Replay<'a> {
    rules: Rules,
    entry: Option<Entry>,
    store: &'a Faulty<MemoryStore>,
    id: KeyId,
    seen: &'a mut Seen,
}

impl Replay<'_> {
    /// A deadline is not met a moment too early.
    async fn tick(&mut self) -> Result<(), Differs> {
        advance(NEARLY).await;
        self.look(NEARLY).await?;
        advance(TICK - NEARLY).await;
        self.rules.tick(&mut self.entry);
        self.look(Duration::ZERO).await
    }

    /// Compares what is there, so far into a tick, without changing it: to ask is to take what is absent.
    async fn look(&mut self, into: Duration) -> Result<(), Differs> {
        if self.entry.is_none() {
            return Ok(());
        }
        let answer = self.rules.apply(&mut self.entry.clone(), ONLOOKER, LOOK);
        self.compare(ONLOOKER, LOOK, answer, into).await
    }

    async fn compare(
        &mut self,
        who: Who,
        call: Call,
        answer: Answer,
        into: Duration,
    ) -> Result<(), Differs> {
        let found = ask(self.store, self.rules.times, self.id, who, call).await;
        let found = found.map_err(|error| format!("{call:?} of {who:?} failed: {error}"))?;
        let expected = spoken(answer, into);
        if found != expected {
            return Err(format!(
                "{call:?} of {who:?} answers {found:?}, in the model {expected:?}"
            ));
        }
        *self.seen.entry(name(answer)).or_default() += 1;
        Ok(())
    }
}

/// What a store can be seen to say.
#[derive(Debug, PartialEq)]
enum Spoken {
    Acquired(Acquired),
    Done,
    LeaseLost,
}

/// The model's answer as the store gives it, so far into a tick.
fn spoken(answer: Answer, into: Duration) -> Spoken {
    let fingerprint = |byte| Fingerprint::from_bytes([byte; 32]);
    let acquired = match answer {
        Answer::LeaseLost => return Spoken::LeaseLost,
        Answer::Done => return Spoken::Done,
        Answer::Granted {
            generation,
            takeover,
        } => Acquired::Granted {
            generation: generation.into(),
            takeover,
        },
        Answer::InProgress {
            fingerprint: of,
            left,
        } => Acquired::InProgress {
            fingerprint: fingerprint(of),
            expires_in: (TICK * left.into()).saturating_sub(into),
        },
        Answer::Orphaned {
            fingerprint: of,
            since,
        } => Acquired::Orphaned {
            fingerprint: fingerprint(of),
            since: TICK * since.into() + into,
        },
        Answer::Completed {
            fingerprint: of,
            record: by,
        } => Acquired::Completed {
            fingerprint: fingerprint(of),
            record: record(by),
        },
    };
    Spoken::Acquired(acquired)
}

async fn ask<S: Store>(
    store: &S,
    times: Times,
    id: KeyId,
    who: Who,
    call: Call,
) -> Result<Spoken, StoreError> {
    let ticks = |ticks: u8| Ttl::try_from(TICK * ticks.into()).unwrap();
    let fingerprint = Fingerprint::from_bytes([who.fingerprint; 32]);
    let mut claim = Claim::new(id, fingerprint)?;
    claim.token = Token::from_bytes([who.token; 16]);
    claim.lease = ticks(times.lease);
    claim.keep = ticks(times.keep);
    // The generation is for the store to know, not for it to be told.
    let lease = claim.lease_ref(1);
    let done = match call {
        Call::Acquire(orphans) => {
            claim.orphans = match orphans {
                Orphans::TakeOver => OrphanPolicy::TakeOver,
                Orphans::Refuse => OrphanPolicy::Refuse,
            };
            return store.acquire(&claim).await.map(Spoken::Acquired);
        }
        Call::Renew => store.renew(&lease, claim.lease).await,
        Call::Complete => {
            let retention = ticks(times.retention);
            store.complete(&lease, record(who.token), retention).await
        }
        Call::Release => store.release(&lease).await,
        Call::Commit => panic!("a commit is no call of a store: it is the handler's"),
    };
    match done {
        Ok(()) => Ok(Spoken::Done),
        Err(StoreError::LeaseLost) => Ok(Spoken::LeaseLost),
        Err(error) => Err(error),
    }
}

fn record(by: u8) -> Bytes {
    Bytes::from(vec![by])
}

fn name(answer: Answer) -> &'static str {
    match answer {
        Answer::Granted {
            takeover: false, ..
        } => "granted",
        Answer::Granted { takeover: true, .. } => "granted as a takeover",
        Answer::InProgress { .. } => "in progress",
        Answer::Orphaned { .. } => "orphaned",
        Answer::Completed { .. } => "completed",
        Answer::Done => "done",
        Answer::LeaseLost => "lease lost",
    }
}

fn id(number: u64) -> KeyId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    KeyId::from_bytes(bytes)
}
