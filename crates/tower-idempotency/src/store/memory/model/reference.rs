//! The model: a map of entries and a clock.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;

use super::{
    Caller, Decision, Millis, OPERATOR, RETRY, Reply, fingerprint, granted, record_by, token,
};
use crate::store::{Acquired, OrphanPolicy, memory::budget::ENTRY_BYTES};

#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) now: Millis,
    entries: BTreeMap<u8, Entry>,
    pub(super) reply: Option<Reply>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// `None` once a takeover was released.
    token: Option<u8>,
    fingerprint: u8,
    generation: u64,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Leased {
        lease_expires: Millis,
        orphan_retention: Millis,
    },
    Completed {
        record: Bytes,
        expires: Millis,
    },
}

impl Model {
    fn present(&mut self, id: u8) -> Option<&mut Entry> {
        let now = self.now;
        self.entries.retain(|_, entry| match entry.state {
            State::Leased {
                lease_expires,
                orphan_retention,
            } => now < lease_expires + orphan_retention,
            State::Completed { expires, .. } => now < expires,
        });
        self.entries.get_mut(&id)
    }

    pub(super) fn acquire(
        &mut self,
        caller: Caller,
        lease: Millis,
        orphan_retention: Millis,
        orphans: OrphanPolicy,
    ) -> Acquired {
        let now = self.now;
        let leased = State::Leased {
            lease_expires: now + lease,
            orphan_retention,
        };
        let generation = match self.present(caller.id) {
            None => 1,
            Some(entry) => {
                let fingerprint = fingerprint(entry.fingerprint);
                match &entry.state {
                    State::Completed { record, expires } => {
                        return Acquired::Completed {
                            fingerprint,
                            record: record.clone(),
                            expires_in: Duration::from_millis(expires - now),
                            token: entry.token.map(token),
                        };
                    }
                    State::Leased { .. } if entry.token == Some(caller.token) => {
                        entry.state = leased;
                        return granted(entry.generation);
                    }
                    State::Leased { lease_expires, .. } if now < *lease_expires => {
                        return Acquired::InProgress {
                            fingerprint,
                            expires_in: Duration::from_millis(lease_expires - now),
                        };
                    }
                    State::Leased { lease_expires, .. } => {
                        let same = entry.fingerprint == caller.fingerprint;
                        let may_take_over = match orphans {
                            OrphanPolicy::TakeOver => true,
                            OrphanPolicy::Refuse => entry.token == Some(RETRY),
                            OrphanPolicy::Never => false,
                        };
                        if !same || !may_take_over {
                            return Acquired::Orphaned {
                                fingerprint,
                                since: Duration::from_millis(now - lease_expires),
                            };
                        }
                        entry.generation + 1
                    }
                }
            }
        };
        let entry = Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            generation,
            state: leased,
        };
        self.entries.insert(caller.id, entry);
        granted(generation)
    }

    pub(super) fn renew(&mut self, caller: Caller, ttl: Millis) -> Reply {
        let now = self.now;
        let Some(entry) = self.present(caller.id) else {
            return Reply::Lost;
        };
        match &mut entry.state {
            State::Leased { lease_expires, .. } if entry.token == Some(caller.token) => {
                *lease_expires = now + ttl;
                Reply::Done
            }
            State::Leased { .. } | State::Completed { .. } => Reply::Lost,
        }
    }

    pub(super) fn complete(&mut self, caller: Caller, record: Bytes, retention: Millis) -> Reply {
        let expires = self.now + retention;
        let generation = match self.present(caller.id) {
            Some(entry) if entry.token.is_some_and(|token| token != caller.token) => {
                return Reply::Lost;
            }
            Some(Entry {
                state: State::Completed { .. },
                ..
            }) => return Reply::Done,
            Some(held) if held.token.is_some() => held.generation,
            Some(_) | None => caller.generation,
        };
        let completed = Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            generation,
            state: State::Completed { record, expires },
        };
        self.entries.insert(caller.id, completed);
        Reply::Done
    }

    pub(super) fn release(&mut self, caller: Caller) {
        let now = self.now;
        if let Some(entry) = self.present(caller.id)
            && entry.token == Some(caller.token)
            && let State::Leased { lease_expires, .. } = &mut entry.state
        {
            if entry.generation > 1 {
                *lease_expires = now;
                entry.token = None;
            } else {
                self.entries.remove(&caller.id);
            }
        }
    }

    pub(super) fn resolve(&mut self, id: u8, decision: Decision) -> Reply {
        let now = self.now;
        let Some(entry) = self.present(id) else {
            return Reply::Lost;
        };
        match decision {
            Decision::Delete => {
                self.entries.remove(&id);
            }
            Decision::Orphan { token, retention } => {
                entry.token = Some(token);
                let orphan_retention = match entry.state {
                    State::Leased {
                        orphan_retention, ..
                    } => orphan_retention,
                    State::Completed { .. } => retention,
                };
                entry.state = State::Leased {
                    lease_expires: now,
                    orphan_retention,
                };
            }
            Decision::Complete { len, retention } => {
                entry.token = Some(OPERATOR);
                entry.state = State::Completed {
                    record: record_by(OPERATOR, len),
                    expires: now + retention,
                };
            }
        }
        Reply::Done
    }

    /// Returns the counters of the groups: completed entries, their bytes, and leases and orphans.
    pub(super) fn usage(&self) -> (usize, usize, usize) {
        let mut live = self.clone();
        let _ = live.present(0);
        let records = live
            .entries
            .values()
            .filter_map(|entry| match &entry.state {
                State::Leased { .. } => None,
                State::Completed { record, .. } => Some(record.len()),
            });
        let lens: Vec<usize> = records.collect();
        let bytes = lens.len() * ENTRY_BYTES + lens.iter().sum::<usize>();
        (lens.len(), bytes, live.entries.len() - lens.len())
    }

    pub(super) fn size(&self) -> (usize, usize) {
        let (records, bytes, leases) = self.usage();
        (records + leases, bytes + leases * ENTRY_BYTES)
    }
}
