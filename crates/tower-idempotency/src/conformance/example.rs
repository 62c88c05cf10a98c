use std::{collections::HashMap, sync::Mutex, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Token, Ttl,
};

#[derive(Default)]
struct MapStore {
    entries: Mutex<HashMap<KeyId, Entry>>,
}

struct Entry {
    /// Who holds it; nobody, once a takeover was released.
    token: Option<Token>,
    fingerprint: Fingerprint,
    generation: u64,
    state: State,
}

enum State {
    Leased { ends: Instant, keep: Ttl },
    Completed { record: Bytes, expires: Instant },
}

impl Entry {
    /// Granted to `claim` at this generation.
    fn leased(claim: &Claim, generation: u64, now: Instant) -> Self {
        Self {
            token: Some(claim.token),
            fingerprint: claim.fingerprint,
            generation,
            state: State::Leased {
                ends: now + claim.lease.as_duration(),
                keep: claim.orphan_retention,
            },
        }
    }

    /// Whether the entry is absent, though it is still there.
    fn is_over(&self, now: Instant) -> bool {
        match self.state {
            State::Leased { ends, keep } => now >= ends + keep.as_duration(),
            State::Completed { expires, .. } => now >= expires,
        }
    }

    fn granted(&self) -> Acquired {
        Acquired::Granted {
            generation: self.generation,
            takeover: self.generation > 1,
        }
    }
}

impl MapStore {
    /// The one atomic step of a call: looks at the entry and changes it under one lock.
    fn step<T>(&self, id: KeyId, step: impl FnOnce(&mut Option<Entry>, Instant) -> T) -> T {
        let now = Instant::now();
        let mut entries = self.entries.lock().unwrap();
        let mut entry = entries.remove(&id).filter(|entry| !entry.is_over(now));
        let answer = step(&mut entry, now);
        entries.extend(entry.map(|entry| (id, entry)));
        answer
    }
}

impl Store for MapStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        Ok(self.step(claim.id, |found, now| {
            let Some(entry) = found else {
                return found.insert(Entry::leased(claim, 1, now)).granted();
            };
            let fingerprint = entry.fingerprint;
            let ends = match &entry.state {
                State::Completed { record, .. } => {
                    let record = record.clone();
                    return Acquired::Completed {
                        fingerprint,
                        record,
                    };
                }
                State::Leased { ends, .. } => *ends,
            };
            // The own token first: the reply that granted it may have been lost.
            if entry.token == Some(claim.token) {
                entry.state = Entry::leased(claim, entry.generation, now).state;
                return entry.granted();
            }
            if ends > now {
                let expires_in = ends - now;
                return Acquired::InProgress {
                    fingerprint,
                    expires_in,
                };
            }
            if claim.orphans == OrphanPolicy::TakeOver && fingerprint == claim.fingerprint {
                *entry = Entry::leased(claim, entry.generation + 1, now);
                return entry.granted();
            }
            let since = now - ends;
            Acquired::Orphaned { fingerprint, since }
        }))
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.step(lease.id, |found, now| match found {
            Some(Entry {
                token,
                state: State::Leased { ends, .. },
                ..
            }) if *token == Some(lease.token) => {
                *ends = now + ttl.as_duration();
                Ok(())
            }
            _ => Err(StoreError::LeaseLost),
        })
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.step(lease.id, |found, now| {
            match found {
                Some(Entry {
                    token: Some(token), ..
                }) if *token != lease.token => return Err(StoreError::LeaseLost),
                Some(Entry {
                    state: State::Completed { .. },
                    ..
                }) => return Ok(()),
                Some(Entry {
                    state: State::Leased { .. },
                    ..
                })
                | None => {}
            }
            *found = Some(Entry {
                token: Some(lease.token),
                fingerprint: lease.fingerprint,
                generation: lease.generation,
                state: State::Completed {
                    record,
                    expires: now + retention.as_duration(),
                },
            });
            Ok(())
        })
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.step(lease.id, |found, now| {
            if let Some(entry) = found
                && entry.token == Some(lease.token)
                && let State::Leased { ends, .. } = &mut entry.state
            {
                // What a takeover took over may have had its effect: it stays an orphan.
                if entry.generation > 1 {
                    *ends = now;
                    entry.token = None;
                } else {
                    *found = None;
                }
            }
            Ok(())
        })
    }

    async fn wait_for_change(&self, _id: &KeyId, within: Duration) {
        // A store without push lets its waiters look again from time to time.
        sleep(within.min(Duration::from_millis(100))).await;
    }
}
