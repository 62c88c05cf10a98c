//! The completed records that a process keeps in front of the store.

use crate::{
    mutant::Mutant,
    store::{Call, Caller, ModelReply, Times},
    system::System,
};

/// The number of processes. Each has its own tier.
pub(crate) const PROCESSES: usize = 2;

/// Settings of the tiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierRules {
    /// The maximum age, in ticks.
    pub(crate) age: u8,
    /// `true` if time may pass between the step of the store and the moment at which the tier keeps the record.
    pub(crate) is_delayed: bool,
}

/// The tier of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Tier {
    pub(crate) kept: Option<TierRecord>,
    /// A record that the store has accepted or reported, and that the tier does not have yet.
    pub(crate) pending: Option<TierRecord>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TierRecord {
    pub(crate) fingerprint: u8,
    pub(crate) record: u8,
    /// The time until the record expires at the store.
    pub(crate) life: u8,
    /// The remaining age.
    age: u8,
}

impl Tier {
    /// Returns the reply to an acquire, if the tier has a record.
    pub(crate) fn response(&self) -> Option<ModelReply> {
        self.kept.map(|kept| ModelReply::Completed {
            fingerprint: kept.fingerprint,
            record: kept.record,
            left: kept.life,
        })
    }

    /// Keeps the pending record, unless the tier has one.
    pub(crate) fn keep(&mut self) {
        let pending = self.pending.take();
        self.kept = self.kept.or(pending);
    }

    /// Advances the time by one tick.
    pub(crate) fn tick(&mut self, system: &System) {
        self.kept = self.kept.and_then(TierRecord::after_tick);
        if !system.rules.has(Mutant::LifeCountsFromReply) {
            self.pending = self.pending.and_then(TierRecord::after_tick);
        }
    }
}

impl TierRecord {
    fn after_tick(mut self) -> Option<Self> {
        self.life -= 1;
        self.age -= 1;
        (self.life > 0 && self.age > 0).then_some(self)
    }
}

impl System {
    /// Returns the record that a tier keeps after this reply. `is_first` is `true` for the first completion of a client.
    pub(crate) fn record_to_store(
        &self,
        rules: TierRules,
        (caller, call, response): (Caller, Call, ModelReply),
        is_first: bool,
    ) -> Option<TierRecord> {
        let Times { retention, .. } = self.rules.times;
        let is_first = is_first || self.rules.has(Mutant::RepeatedCompletionIsKept);
        let (fingerprint, record, life) = match (call, response) {
            (
                Call::Acquire(_),
                ModelReply::Completed {
                    fingerprint,
                    record,
                    left,
                },
            ) => (fingerprint, record, left),
            (Call::Complete, ModelReply::Done) if is_first => {
                (caller.fingerprint, caller.token, retention)
            }
            (Call::Complete, ModelReply::LeaseLost)
                if self.rules.has(Mutant::RefusedCompletionIsKept) =>
            {
                (caller.fingerprint, caller.token, retention)
            }
            _ => return None,
        };
        let life = if self.rules.has(Mutant::AgeAloneCounts) {
            u8::MAX
        } else {
            life
        };
        Some(TierRecord {
            fingerprint,
            record,
            life,
            age: rules.age,
        })
    }
}
