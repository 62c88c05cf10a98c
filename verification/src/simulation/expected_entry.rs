//! The expected state of each entry, by which the oracle judges the store's replies.
//!
//! The expected state follows from the calls alone, and not from the state of the store. It contains lease holders,
//! expiries of leases, stored records and retained orphans. A reply that does not fit is a violation.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::store::{Acquired, Claim, Fingerprint, LeaseRef, OrphanPolicy, Token};

use super::Millis;

/// The expected entry of a key.
#[derive(Debug, Default)]
pub(super) struct ExpectedEntry {
    state: State,
    /// The number of times that the key became free. Each time, a new life of the key begins.
    pub(super) life: u64,
    /// The number of times a lease was taken over.
    pub(super) takeovers: u64,
    /// Every lease that was ever granted.
    pub(super) leases: Vec<Granted>,
}

/// A lease that was granted, and the life in which it was granted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) token: Token,
    pub(super) life: u64,
    pub(super) ends: Millis,
    pub(super) stored: bool,
}

#[derive(Clone, Debug, Default)]
enum State {
    #[default]
    Free,
    Leased(Lease),
    Stored {
        token: Token,
        fingerprint: Fingerprint,
        record: Bytes,
        expires: Millis,
    },
}

#[derive(Clone, Debug)]
struct Lease {
    /// The token of the lease holder, or `None` after a takeover was released.
    token: Option<Token>,
    fingerprint: Fingerprint,
    generation: u64,
    ends: Millis,
    keep: Millis,
}

/// The violation in a reply, if there is one.
pub(super) type Verdict = Result<(), &'static str>;

impl ExpectedEntry {
    /// Deletes an expired state.
    fn expire(&mut self, now: Millis) {
        let over = match &self.state {
            State::Free => false,
            State::Leased(lease) => now >= lease.ends + lease.keep,
            State::Stored { expires, .. } => now >= *expires,
        };
        if over {
            self.free();
        }
    }

    fn free(&mut self) {
        self.state = State::Free;
        self.life += 1;
    }

    fn granted(&mut self, token: Token) -> Option<&mut Granted> {
        self.leases.iter_mut().rev().find(|it| it.token == token)
    }

    /// Returns the expiry of the last lease that a process may hold.
    pub(super) fn last_end(&self) -> Millis {
        self.leases.iter().map(|it| it.ends).max().unwrap_or(0)
    }

    /// Returns the token of the lease, even if the lease has expired.
    pub(super) fn holder(&self) -> Option<Token> {
        match &self.state {
            State::Leased(lease) => lease.token,
            State::Free | State::Stored { .. } => None,
        }
    }

    pub(super) fn holds(&self, token: Token, now: Millis) -> bool {
        matches!(&self.state, State::Leased(lease) if lease.token == Some(token) && now < lease.ends)
    }

    pub(super) fn acquired(&mut self, claim: &Claim, now: Millis, found: &Acquired) -> Verdict {
        self.expire(now);
        match found {
            Acquired::Granted {
                generation,
                takeover,
            } => self.is_granted(claim, now, *generation, *takeover),
            Acquired::InProgress {
                fingerprint,
                expires_in,
            } => match &self.state {
                State::Leased(lease) if lease.token == Some(claim.token) => {
                    Err("the lease holder is rejected for its own lease")
                }
                State::Leased(lease) if now < lease.ends => {
                    if lease.fingerprint != *fingerprint {
                        return Err("the entry in progress has another fingerprint than its lease");
                    }
                    if now + millis(*expires_in) != lease.ends {
                        return Err("the reply has a wrong time to the expiry of the lease");
                    }
                    Ok(())
                }
                State::Leased(_) | State::Free | State::Stored { .. } => {
                    Err("in progress, but no token holds a lease")
                }
            },
            Acquired::Orphaned { fingerprint, since } => match &self.state {
                State::Leased(lease) if lease.token != Some(claim.token) && now >= lease.ends => {
                    let same = lease.fingerprint == claim.fingerprint;
                    if claim.orphans == OrphanPolicy::TakeOver && same {
                        return Err("an orphan is not taken over");
                    }
                    if lease.fingerprint != *fingerprint || now - millis(*since) != lease.ends {
                        return Err("an orphan of another request or of another time");
                    }
                    Ok(())
                }
                State::Leased(_) | State::Free | State::Stored { .. } => {
                    Err("orphaned, though there is no orphan")
                }
            },
            Acquired::Completed {
                fingerprint,
                record,
                expires_in,
                token,
            } => match &self.state {
                State::Stored {
                    fingerprint: stored_for,
                    record: stored,
                    expires,
                    token: stored_by,
                } => {
                    if stored != record || stored_for != fingerprint {
                        return Err("another record than the one that was stored");
                    }
                    if *token != Some(*stored_by) || now + millis(*expires_in) != *expires {
                        return Err("a record of another token, or another expiry");
                    }
                    Ok(())
                }
                State::Leased(_) | State::Free => Err("a record, though none is stored"),
            },
        }
    }

    fn is_granted(
        &mut self,
        claim: &Claim,
        now: Millis,
        generation: u64,
        takeover: bool,
    ) -> Verdict {
        let ends = now + claim.lease.as_millis();
        let expected = match &self.state {
            State::Stored { .. } => return Err("granted, though a record is stored"),
            State::Free => 1,
            State::Leased(lease) if lease.token == Some(claim.token) => lease.generation,
            State::Leased(lease) if now < lease.ends => {
                return Err("two leases on one key at once");
            }
            State::Leased(lease) => {
                if claim.orphans == OrphanPolicy::Refuse {
                    return Err("an orphan is taken over though the policy refuses");
                }
                if lease.fingerprint != claim.fingerprint {
                    return Err("an orphan is taken over by another request");
                }
                self.takeovers += 1;
                lease.generation + 1
            }
        };
        self.state = State::Leased(Lease {
            token: Some(claim.token),
            fingerprint: claim.fingerprint,
            generation: expected,
            ends,
            keep: claim.orphan_retention.as_millis(),
        });
        let life = self.life;
        match self.granted(claim.token) {
            Some(known) if known.life == life => known.ends = ends,
            Some(_) | None => self.leases.push(Granted {
                token: claim.token,
                life,
                ends,
                stored: false,
            }),
        }
        if generation != expected || takeover != (expected > 1) {
            return Err("the takeover flag of the reply is wrong");
        }
        Ok(())
    }

    pub(super) fn renewed(
        &mut self,
        lease: &LeaseRef,
        ttl: Millis,
        now: Millis,
        ok: bool,
    ) -> Verdict {
        self.expire(now);
        let held = match &mut self.state {
            State::Leased(held) if held.token == Some(lease.token) => {
                held.ends = now + ttl;
                true
            }
            State::Leased(_) | State::Free | State::Stored { .. } => false,
        };
        if held && let Some(granted) = self.granted(lease.token) {
            granted.ends = now + ttl;
        }
        match (held, ok) {
            (true, false) => Err("a lease that is held is reported as lost"),
            (false, true) => Err("a lease is renewed that is not held"),
            (true, true) | (false, false) => Ok(()),
        }
    }

    /// Judges the reply to a completion or a commit. If `fenced`, the rule for commits applies: the token must hold the
    /// lease.
    pub(super) fn completed(
        &mut self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Millis,
        now: Millis,
        fenced: bool,
        ok: bool,
    ) -> Verdict {
        self.expire(now);
        let (may, stores) = match &self.state {
            State::Free => (!fenced, !fenced),
            State::Leased(held) => match held.token {
                Some(token) => (token == lease.token, token == lease.token),
                None => (!fenced, !fenced),
            },
            State::Stored { token, .. } => (*token == lease.token && !fenced, false),
        };
        if stores {
            self.state = State::Stored {
                token: lease.token,
                fingerprint: lease.fingerprint,
                record: record.clone(),
                expires: now + retention,
            };
            match self.granted(lease.token) {
                Some(granted) => {
                    granted.ends = now.min(granted.ends);
                    granted.stored = true;
                }
                None => return Err("a record under a lease that was never granted"),
            }
        }
        match (may, ok) {
            (true, false) => Err("a record of the lease holder is refused"),
            (false, true) => Err("a record is stored without the lease"),
            (true, true) | (false, false) => Ok(()),
        }
    }

    pub(super) fn released(&mut self, lease: &LeaseRef, now: Millis) {
        self.expire(now);
        let State::Leased(held) = &mut self.state else {
            return;
        };
        if held.token != Some(lease.token) {
            return;
        }
        held.ends = now;
        if held.generation > 1 {
            held.token = None;
        } else {
            self.free();
        }
        if let Some(granted) = self.granted(lease.token) {
            granted.ends = now;
        }
    }
}

fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).expect("a simulation is short")
}
