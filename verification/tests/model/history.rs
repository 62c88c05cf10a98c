//! The replies and actions under the key, as far as the properties need them.

use crate::{
    store::{Entry, State},
    system::Action,
};

/// The history of one life of the key. A life begins when the key becomes free: its record or orphan expired, or the
/// lease of a first execution was released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct History {
    /// The number of executions that were marked as takeovers.
    pub(crate) takeovers: u8,
    /// The number of effects of executions that began in this life.
    pub(crate) effects: u8,
    /// The client whose response was returned, after the store had reported or accepted its record.
    pub(crate) answered: Option<u8>,
    /// The request of the first execution.
    pub(crate) request: Option<u8>,
    pub(crate) overwritten: bool,
    pub(crate) disagreed: bool,
    pub(crate) locked_out: bool,
    /// `true` if a client received the response to another request.
    pub(crate) leaked: bool,
    /// `true` if another request was executed as well.
    pub(crate) mixed: bool,
    /// `true` if a request committed again although its first record was neither lost nor deleted.
    pub(crate) recommitted: bool,
}

impl History {
    pub(crate) fn end_of_life(&mut self) {
        self.takeovers = 0;
        self.effects = 0;
        self.answered = None;
        self.request = None;
    }

    pub(crate) fn executes(&mut self, fingerprint: u8) {
        let first = *self.request.get_or_insert(fingerprint);
        self.mixed |= first != fingerprint;
    }

    pub(crate) fn response(&mut self, of: u8) {
        self.disagreed |= self.answered.is_some_and(|answered| answered != of);
        self.answered = Some(of);
    }

    /// Checks that a record disappears only when it expires or when the store loses its data.
    pub(crate) fn check_record(
        &mut self,
        before: Option<Entry>,
        after: Option<Entry>,
        action: Action,
    ) {
        if let Action::Tick | Action::Sweep | Action::LoseData | Action::Keep(_) = action {
            return;
        }
        if let Some(record) = record(before) {
            self.overwritten |= self::record(after) != Some(record);
        }
    }
}

fn record(entry: Option<Entry>) -> Option<u8> {
    match entry?.state {
        State::Completed { record, .. } => Some(record),
        State::Leased { .. } => None,
    }
}
