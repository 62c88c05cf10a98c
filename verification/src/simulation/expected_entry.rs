//! The expected state of each entry, by which the oracle judges the store's replies.
//!
//! The expected state follows from the calls alone, and not from the state of the store. It contains lease holders,
//! expiries of leases, stored records and retained orphans. A reply that does not fit is a violation.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    inspect::{DEFAULT_ORPHAN_RETENTION, Resolution, State as SeenState},
    store::{Acquired, Claim, Fingerprint, LeaseRef, OrphanPolicy, Token},
};

use super::Millis;

/// The expected entry of a key.
#[derive(Debug, Default)]
pub(super) struct ExpectedEntry {
    state: ExpectedState,
    /// The number of times that the key became free. Each time, a new life of the key begins.
    pub(super) life: u64,
    /// The number of times a lease was taken over.
    pub(super) takeovers: u64,
    /// Every lease that was ever granted.
    pub(super) leases: Vec<Granted>,
    /// The last life that an operator ended.
    freed_by_operator: Option<u64>,
}

/// A lease that was granted, and the life in which it was granted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) token: Token,
    pub(super) life: u64,
    pub(super) ends: Millis,
    pub(super) stored: bool,
    /// The expiry that the lease had when an operator broke it.
    broken: Option<Millis>,
}

/// The author of the current state of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Author {
    /// The execution under this token holds or completed the entry.
    Execution(Token),
    /// An operator's decision of this number. The store chose the token.
    Operator { decision: usize, allows_retry: bool },
    /// A takeover was released, and left an orphan without a holder.
    Released,
}

impl Author {
    fn is(self, token: Token) -> bool {
        self == Self::Execution(token)
    }

    fn token(self) -> Option<Token> {
        match self {
            Self::Execution(token) => Some(token),
            Self::Operator { .. } | Self::Released => None,
        }
    }
}

/// An entry as an operator sees it. Two equal ones are the same entry, so a decision about the first applies to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedView {
    pub(super) state: SeenState,
    pub(super) generation: u64,
    author: Author,
    /// The expiry of the lease of an orphan.
    ends: Option<Millis>,
}

#[derive(Clone, Debug, Default)]
enum ExpectedState {
    #[default]
    Free,
    Leased(Lease),
    Stored {
        author: Author,
        fingerprint: Fingerprint,
        generation: u64,
        record: Bytes,
        expires: Millis,
    },
}

#[derive(Clone, Debug)]
struct Lease {
    author: Author,
    fingerprint: Fingerprint,
    generation: u64,
    ends: Millis,
    orphan_retention: Millis,
}

/// The violation in a reply, if there is one.
pub(super) type Verdict = Result<(), &'static str>;

impl ExpectedEntry {
    /// Deletes an expired state.
    fn expire(&mut self, now: Millis) {
        let over = match &self.state {
            ExpectedState::Free => false,
            ExpectedState::Leased(lease) => now >= lease.ends + lease.orphan_retention,
            ExpectedState::Stored { expires, .. } => now >= *expires,
        };
        if over {
            self.free();
        }
    }

    fn free(&mut self) {
        self.state = ExpectedState::Free;
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
            ExpectedState::Leased(lease) => lease.author.token(),
            ExpectedState::Free | ExpectedState::Stored { .. } => None,
        }
    }

    pub(super) fn holds(&self, token: Token, now: Millis) -> bool {
        matches!(&self.state, ExpectedState::Leased(lease) if lease.author.is(token) && now < lease.ends)
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
                ExpectedState::Leased(lease) if lease.author.is(claim.token) => {
                    Err("the lease holder is rejected for its own lease")
                }
                ExpectedState::Leased(lease) if now < lease.ends => {
                    if lease.fingerprint != *fingerprint {
                        return Err("the entry in progress has another fingerprint than its lease");
                    }
                    if now + millis(*expires_in) != lease.ends {
                        return Err("the reply has a wrong time to the expiry of the lease");
                    }
                    Ok(())
                }
                ExpectedState::Leased(_) | ExpectedState::Free | ExpectedState::Stored { .. } => {
                    Err("in progress, but no token holds a lease")
                }
            },
            Acquired::Orphaned { fingerprint, since } => match &self.state {
                ExpectedState::Leased(lease)
                    if !lease.author.is(claim.token) && now >= lease.ends =>
                {
                    let same = lease.fingerprint == claim.fingerprint;
                    if lease.may_be_taken_over(claim.orphans) && same {
                        return Err("an orphan is not taken over");
                    }
                    if lease.fingerprint != *fingerprint || now - millis(*since) != lease.ends {
                        return Err("an orphan of another request or of another time");
                    }
                    Ok(())
                }
                ExpectedState::Leased(_) | ExpectedState::Free | ExpectedState::Stored { .. } => {
                    Err("orphaned, though there is no orphan")
                }
            },
            Acquired::Completed {
                fingerprint,
                record,
                expires_in,
                token,
            } => match &self.state {
                ExpectedState::Stored {
                    fingerprint: stored_for,
                    record: stored,
                    expires,
                    author,
                    ..
                } => {
                    if stored != record || stored_for != fingerprint {
                        return Err("another record than the one that was stored");
                    }
                    let is_author = match author {
                        Author::Execution(stored_by) => *token == Some(*stored_by),
                        // The store chose a token that no execution has.
                        _ => !self.leases.iter().any(|it| *token == Some(it.token)),
                    };
                    if !is_author || now + millis(*expires_in) != *expires {
                        return Err("a record of another token, or another expiry");
                    }
                    Ok(())
                }
                ExpectedState::Leased(_) | ExpectedState::Free => {
                    Err("a record, though none is stored")
                }
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
        let fingerprint = match &self.state {
            ExpectedState::Leased(lease) if lease.author.is(claim.token) => lease.fingerprint,
            ExpectedState::Leased(_) | ExpectedState::Free | ExpectedState::Stored { .. } => {
                claim.fingerprint
            }
        };
        let expected = match &self.state {
            ExpectedState::Stored { .. } => return Err("granted, though a record is stored"),
            ExpectedState::Free => 1,
            ExpectedState::Leased(lease) if lease.author.is(claim.token) => lease.generation,
            ExpectedState::Leased(lease) if now < lease.ends => {
                return Err("two leases on one key at once");
            }
            ExpectedState::Leased(lease) => {
                if !lease.may_be_taken_over(claim.orphans) {
                    return Err("an orphan is taken over though the policy refuses");
                }
                if lease.fingerprint != claim.fingerprint {
                    return Err("an orphan is taken over by another request");
                }
                self.takeovers += 1;
                lease.generation + 1
            }
        };
        self.state = ExpectedState::Leased(Lease {
            author: Author::Execution(claim.token),
            fingerprint,
            generation: expected,
            ends,
            orphan_retention: claim.orphan_retention.as_millis(),
        });
        let life = self.life;
        match self.granted(claim.token) {
            Some(known) if known.life == life => (known.ends, known.broken) = (ends, None),
            Some(_) | None => self.leases.push(Granted {
                token: claim.token,
                life,
                ends,
                stored: false,
                broken: None,
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
            ExpectedState::Leased(held) if held.author.is(lease.token) => {
                held.ends = now + ttl;
                true
            }
            ExpectedState::Leased(_) | ExpectedState::Free | ExpectedState::Stored { .. } => false,
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
            ExpectedState::Free => (!fenced, !fenced),
            ExpectedState::Leased(held) => match held.author {
                Author::Released => (!fenced, !fenced),
                author => (author.is(lease.token), author.is(lease.token)),
            },
            ExpectedState::Stored { author, .. } => (author.is(lease.token) && !fenced, false),
        };
        if stores {
            self.state = ExpectedState::Stored {
                author: Author::Execution(lease.token),
                fingerprint: lease.fingerprint,
                generation: lease.generation,
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
        let ExpectedState::Leased(held) = &mut self.state else {
            return;
        };
        if !held.author.is(lease.token) {
            return;
        }
        held.ends = now;
        if held.generation > 1 {
            held.author = Author::Released;
        } else {
            self.free();
        }
        if let Some(granted) = self.granted(lease.token) {
            granted.ends = now;
        }
    }
}

/// The acts of an operator.
impl ExpectedEntry {
    /// Returns the entry as an operator must see it, or `None` if there is none.
    pub(super) fn view(&mut self, now: Millis) -> Option<ExpectedView> {
        self.expire(now);
        match &self.state {
            ExpectedState::Free => None,
            ExpectedState::Leased(lease) => {
                let is_orphan = now >= lease.ends;
                Some(ExpectedView {
                    state: if is_orphan {
                        SeenState::Orphaned
                    } else {
                        SeenState::InProgress
                    },
                    generation: lease.generation,
                    author: lease.author,
                    ends: is_orphan.then_some(lease.ends),
                })
            }
            ExpectedState::Stored {
                author,
                generation,
                record,
                ..
            } => Some(ExpectedView {
                state: SeenState::of_record(record),
                generation: *generation,
                author: *author,
                ends: None,
            }),
        }
    }

    /// Returns `true` if an operator broke the lease of this token, which would not have expired yet. Its holder may not
    /// know.
    pub(super) fn was_broken(&self, token: Token, now: Millis) -> bool {
        let mut leases = self.leases.iter().filter(|it| it.token == token);
        leases.any(|it| it.broken.is_some_and(|expiry| now < expiry))
    }

    /// Returns `true` if an operator ended this life of the key, or a later one.
    pub(super) fn was_freed_by_operator(&self, life: u64) -> bool {
        self.freed_by_operator.is_some_and(|freed| freed >= life)
    }

    /// Judges the reply to a resolution: it is applied if the entry is as the operator saw it, and only then.
    pub(super) fn resolved(
        &mut self,
        seen: &ExpectedView,
        resolution: &Resolution,
        decision: usize,
        now: Millis,
        is_applied: bool,
    ) -> Verdict {
        if self.view(now).as_ref() != Some(seen) {
            return match is_applied {
                true => Err("a resolution is applied to an entry that has changed"),
                false => Ok(()),
            };
        }
        let (generation, fingerprint, orphan_retention) = match &self.state {
            ExpectedState::Leased(lease) => {
                (lease.generation, lease.fingerprint, lease.orphan_retention)
            }
            ExpectedState::Stored {
                generation,
                fingerprint,
                ..
            } => {
                let orphan_retention = DEFAULT_ORPHAN_RETENTION.as_millis();
                (*generation, *fingerprint, orphan_retention)
            }
            ExpectedState::Free => return Err("an operator has seen an entry that is free"),
        };
        let holder = self.holder();
        let author = Author::Operator {
            decision,
            allows_retry: matches!(resolution, Resolution::Retry),
        };
        match resolution {
            Resolution::Complete { record, retention } => {
                self.state = ExpectedState::Stored {
                    author,
                    fingerprint,
                    generation,
                    record: record.clone(),
                    expires: now + retention.as_millis(),
                };
            }
            Resolution::Retry | Resolution::BreakLease => {
                self.state = ExpectedState::Leased(Lease {
                    author,
                    fingerprint,
                    generation,
                    ends: now,
                    orphan_retention,
                });
            }
            _ => {
                self.freed_by_operator = Some(self.life);
                self.free();
            }
        }
        if let Resolution::BreakLease = resolution
            && let Some(broken) = holder.and_then(|holder| self.granted(holder))
        {
            broken.broken = Some(broken.ends);
            broken.ends = now;
        }
        match is_applied {
            true => Ok(()),
            false => Err("a resolution of an unchanged entry is refused"),
        }
    }
}

impl Lease {
    /// Returns `true` if the same request may take the orphan over.
    fn may_be_taken_over(&self, policy: OrphanPolicy) -> bool {
        match policy {
            OrphanPolicy::TakeOver => true,
            OrphanPolicy::Refuse => matches!(
                self.author,
                Author::Operator {
                    allows_retry: true,
                    ..
                }
            ),
            OrphanPolicy::Never => false,
        }
    }
}

fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).expect("a simulation is short")
}
