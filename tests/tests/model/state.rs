//! The state of the store and its clients at one moment.

use crate::{
    clients::Client,
    history::History,
    store::{Entry, State as EntryState, Who},
};

/// At most so many requests.
pub(crate) const CLIENTS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) entry: Option<Entry>,
    pub(crate) clients: [Client; CLIENTS],
    pub(crate) history: History,
}

impl State {
    pub(crate) fn who(&self, at: usize) -> Who {
        Who {
            token: u8::try_from(at).expect("a few clients"),
            fingerprint: self.clients[at].fingerprint,
        }
    }

    /// The key is as if it had never been used: what was said and done under it counts no more.
    pub(crate) fn end_of_life(&mut self) {
        self.history.end_of_life();
        for client in &mut self.clients {
            client.current = false;
        }
    }

    /// Client `at` executes.
    pub(crate) fn runs(&mut self, at: usize, takeover: bool) {
        self.history.executes(self.clients[at].fingerprint);
        if !self.clients[at].current {
            self.clients[at].current = true;
            self.history.takeovers += u8::from(takeover);
        }
    }

    /// Client `at` is answered with what `of` produced.
    pub(crate) fn told(&mut self, at: usize, of: usize) {
        if self.clients[at].fingerprint != self.clients[of].fingerprint {
            self.history.leaked = true;
        }
        self.history.tell(u8::try_from(of).expect("a few clients"));
    }

    /// Returns one representative of all equivalent states. The clients are sorted, so that one state stands for up to
    /// 24. A generation is reduced to the first or a later one, because the rules distinguish no more. Unanswered
    /// requests may take over from each other indefinitely.
    pub(crate) fn in_order(mut self) -> Self {
        let is = |number: Option<u8>, at: usize| number.map(usize::from) == Some(at);
        let token = self.entry.and_then(|held| held.token);
        let record = match self.entry.map(|held| held.state) {
            Some(EntryState::Completed { record, .. }) => Some(record),
            Some(EntryState::Leased { .. }) | None => None,
        };
        let told = self.history.told;
        let mut order: [usize; CLIENTS] = std::array::from_fn(|at| at);
        // Those that are equal in all this are alike.
        order.sort_unstable_by_key(|&at| {
            (
                self.clients[at],
                is(token, at),
                is(record, at),
                is(told, at),
            )
        });
        let moved = |number: u8| {
            let to = order.iter().position(|&at| at == usize::from(number));
            u8::try_from(to.unwrap_or(CLIENTS)).expect("a few clients")
        };
        self.clients = order.map(|at| self.clients[at]);
        self.history.told = told.map(moved);
        // One too many is as wrong as many, and a store that loses its data allows any number.
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
