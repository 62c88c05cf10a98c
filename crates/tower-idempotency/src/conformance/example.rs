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
    /// The token that holds the entry; `None` once a takeover was released.
    token: Option<Token>,
    fingerprint: Fingerprint,
    generation: u64,
    state: State,
}

enum State {
    Leased {
        lease_expires: Instant,
        orphan_retention: Ttl,
    },
    Completed {
        record: Bytes,
        expires: Instant,
    },
}

impl Entry {
    /// Creates the entry that `claim` holds at this generation.
    fn leased(claim: &Claim, generation: u64, now: Instant) -> Self {
        Self {
            token: Some(claim.token),
            fingerprint: claim.fingerprint,
            generation,
            state: State::Leased {
                lease_expires: now + claim.lease.as_duration(),
                orphan_retention: claim.orphan_retention,
            },
        }
    }

    /// Returns `true` if the entry is expired and thus counts as absent.
    fn is_expired(&self, now: Instant) -> bool {
        match self.state {
            State::Leased {
                lease_expires,
                orphan_retention,
            } => now >= lease_expires + orphan_retention.as_duration(),
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
    /// Runs the atomic step of a call: reads and changes the entry under one lock.
    fn step<T>(&self, id: KeyId, step: impl FnOnce(&mut Option<Entry>, Instant) -> T) -> T {
        let now = Instant::now();
        let mut entries = self.entries.lock().unwrap();
        let mut entry = entries.remove(&id).filter(|entry| !entry.is_expired(now));
        let reply = step(&mut entry, now);
        entries.extend(entry.map(|entry| (id, entry)));
        reply
    }
}

impl Store for MapStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        Ok(self.step(claim.id, |found, now| {
            let Some(entry) = found else {
                return found.insert(Entry::leased(claim, 1, now)).granted();
            };
            let fingerprint = entry.fingerprint;
            let lease_expires = match &entry.state {
                State::Completed { record, expires } => {
                    return Acquired::Completed {
                        fingerprint,
                        record: record.clone(),
                        expires_in: *expires - now,
                        token: entry.token,
                    };
                }
                State::Leased { lease_expires, .. } => *lease_expires,
            };
            // The claim's own token comes first, because the reply that granted it may have been lost.
            if entry.token == Some(claim.token) {
                entry.state = Entry::leased(claim, entry.generation, now).state;
                return entry.granted();
            }
            if lease_expires > now {
                let expires_in = lease_expires - now;
                return Acquired::InProgress {
                    fingerprint,
                    expires_in,
                };
            }
            if claim.orphans == OrphanPolicy::TakeOver && fingerprint == claim.fingerprint {
                *entry = Entry::leased(claim, entry.generation + 1, now);
                return entry.granted();
            }
            let since = now - lease_expires;
            Acquired::Orphaned { fingerprint, since }
        }))
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.step(lease.id, |found, now| match found {
            Some(Entry {
                token,
                state: State::Leased { lease_expires, .. },
                ..
            }) if *token == Some(lease.token) => {
                *lease_expires = now + ttl.as_duration();
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
            let generation = match found {
                Some(Entry {
                    token: Some(token), ..
                }) if *token != lease.token => return Err(StoreError::LeaseLost),
                Some(Entry {
                    token,
                    state: State::Completed { .. },
                    ..
                }) => return token.map(drop).ok_or(StoreError::LeaseLost),
                // This token holds the entry, which keeps its generation.
                Some(Entry {
                    token: Some(_),
                    generation,
                    ..
                }) => *generation,
                // An orphan without a holder accepts the record, like an absent entry.
                Some(Entry { token: None, .. }) | None => lease.generation,
            };
            *found = Some(Entry {
                token: Some(lease.token),
                fingerprint: lease.fingerprint,
                generation,
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
                && let State::Leased { lease_expires, .. } = &mut entry.state
            {
                // The execution that was taken over may have had its effect, so the entry stays an orphan.
                if entry.generation > 1 {
                    *lease_expires = now;
                    entry.token = None;
                } else {
                    *found = None;
                }
            }
            Ok(())
        })
    }

    async fn wait_for_change(&self, _id: &KeyId, timeout: Duration) {
        // A store without push lets its waiters poll.
        sleep(timeout.min(Duration::from_millis(100))).await;
    }
}
