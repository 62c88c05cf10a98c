//! The state of the store and its clients at one moment.

use crate::{
    clients::{Client, Phase},
    history::History,
    store::{Caller, Entry, State as EntryState},
    tiers::{PROCESSES, Tier, TierRecord},
};

/// The largest number of requests.
pub(crate) const CLIENTS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) entry: Option<Entry>,
    pub(crate) clients: [Client; CLIENTS],
    pub(crate) tiers: [Tier; PROCESSES],
    pub(crate) history: History,
}

impl State {
    pub(crate) fn caller(&self, at: usize) -> Caller {
        Caller {
            token: u8::try_from(at).expect("a few clients"),
            fingerprint: self.clients[at].fingerprint,
        }
    }

    pub(crate) fn tier(&mut self, at: usize) -> &mut Tier {
        &mut self.tiers[usize::from(self.clients[at].process)]
    }

    /// Ends a life of the key: earlier replies and effects no longer count.
    pub(crate) fn end_of_life(&mut self) {
        self.history.end_of_life();
        for client in &mut self.clients {
            client.current = false;
        }
    }

    /// Registers that the record of the entry disappears before its expiry. Its request may find no record and commit again.
    pub(crate) fn lose_record(&mut self) {
        if let Some(Entry {
            state: EntryState::Completed { record, .. },
            ..
        }) = self.entry
            && let Some(client) = self.clients.get_mut(usize::from(record))
        {
            client.committed = false;
        }
    }

    /// Registers that client `at` executes.
    pub(crate) fn runs(&mut self, at: usize, takeover: bool) {
        self.history.executes(self.clients[at].fingerprint);
        if !self.clients[at].current {
            self.clients[at].current = true;
            self.history.takeovers += u8::from(takeover);
        }
    }

    /// Registers that client `at` gets the response of client `of`.
    pub(crate) fn answered(&mut self, at: usize, of: usize) {
        // A response of an operator is always for the request of the entry.
        if of < CLIENTS && self.clients[at].fingerprint != self.clients[of].fingerprint {
            self.history.leaked = true;
        }
        self.history
            .response(u8::try_from(of).expect("a few clients"));
    }

    /// Returns one representative of all equivalent states. The clients are sorted, so that one state stands for up to
    /// 24. A generation is reduced to the first or a later one, because the rules distinguish no more. Unanswered
    /// requests may take over from each other indefinitely.
    pub(crate) fn canonical(mut self) -> Self {
        // A finished request commits no more.
        for client in &mut self.clients {
            client.committed &= client.phase != Phase::Finished;
        }
        let is = |number: Option<u8>, at: usize| number.map(usize::from) == Some(at);
        let token = self.entry.and_then(|held| held.token);
        let record = match self.entry.map(|held| held.state) {
            Some(EntryState::Completed { record, .. }) => Some(record),
            Some(EntryState::Leased { .. }) | None => None,
        };
        let answered = self.history.answered;
        let tiers = self.tiers;
        let is_in_tier = |kept: Option<TierRecord>, at: usize| is(kept.map(|kept| kept.record), at);
        let mut order: [usize; CLIENTS] = std::array::from_fn(|at| at);
        // Clients with equal keys are equivalent.
        order.sort_unstable_by_key(|&at| {
            (
                self.clients[at],
                is(token, at),
                is(record, at),
                is(answered, at),
                tiers.map(|tier| [tier.kept, tier.pending].map(|kept| is_in_tier(kept, at))),
            )
        });
        let moved = |number: u8| {
            let to = order.iter().position(|&at| at == usize::from(number));
            to.map_or(number, |to| u8::try_from(to).expect("a few clients"))
        };
        self.clients = order.map(|at| self.clients[at]);
        self.history.answered = answered.map(moved);
        for tier in &mut self.tiers {
            for kept in [&mut tier.kept, &mut tier.pending].into_iter().flatten() {
                kept.record = moved(kept.record);
            }
        }
        // One excess effect is as wrong as several. After a loss of data any number is possible.
        self.history.effects = self.history.effects.min(self.history.takeovers + 2);
        if let Some(held) = &mut self.entry {
            held.token = token.map(moved);
            match &mut held.state {
                EntryState::Leased { generation, .. } => *generation = (*generation).min(2),
                EntryState::Completed { record, .. } => *record = moved(*record),
            }
        }
        self
    }
}
