//! The results of a campaign.

use std::{fmt, time::Duration};

use verification::oracle::Sums;

use super::{Campaign, Round};

/// The sums of all rounds, displayed as a row of a Markdown table with the header [`HEAD`](Self::HEAD).
#[derive(Clone, Debug)]
pub struct Tally {
    campaign: Campaign,
    rounds: usize,
    strikes: usize,
    requests: usize,
    violations: usize,
    sums: Sums,
    took: Duration,
}

impl Tally {
    /// The first two lines of the table.
    pub const HEAD: &str = "| store | what goes wrong | mode | first seed | rounds | times | keys | requests | executed twice | refused, with and without an effect | reply lost, response kept | late responses, another's | longest wait | minutes | violations |\n\
        |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

    pub(super) fn new(campaign: &Campaign) -> Self {
        Self {
            campaign: campaign.clone(),
            rounds: 0,
            strikes: 0,
            requests: 0,
            violations: 0,
            sums: Sums::default(),
            took: Duration::ZERO,
        }
    }

    pub(super) fn add(&mut self, round: &Round, took: Duration) {
        self.rounds += 1;
        self.strikes += round.strikes;
        self.requests += round.requests;
        self.violations += round.violations.len();
        self.sums.add(&round.sums);
        self.took = took;
    }

    /// Returns the number of faults that met a request.
    #[must_use]
    pub fn strikes(&self) -> usize {
        self.strikes
    }

    /// Returns `true` if no violation was found, and a fault met a request. Without such a fault, the campaign proves
    /// nothing.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations == 0 && self.strikes > 0
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Campaign {
            kind,
            fault,
            mode,
            seed,
            ..
        } = &self.campaign;
        let sums = &self.sums;
        write!(
            f,
            "| {} | {} | {} | {seed} | {} | {} | {} | {} | {} | {}, {} | {} | {}, {} | {:.1} s | {:.1} | {} |",
            kind.name(),
            fault.name(),
            mode.name(),
            self.rounds,
            self.strikes,
            sums.keys,
            self.requests,
            sums.executed_twice,
            sums.refused_with_effect,
            sums.refused_without_effect,
            sums.lost_replies,
            sums.late,
            sums.late_and_outrun,
            sums.longest_wait.as_secs_f64(),
            self.took.as_secs_f64() / 60.0,
            self.violations,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::{Fault, Kind, Mode};

    fn tally(strikes: usize, violations: &[&str]) -> Tally {
        let mut tally = Tally::new(&Campaign {
            kind: Kind::Redis,
            fault: Fault::Cut,
            mode: Mode::Refuse,
            seed: 0,
            limit: Duration::ZERO,
            strikes: 1,
        });
        let round = Round {
            seed: 0,
            injected: 20,
            strikes,
            violations: violations.iter().map(|&it| it.to_owned()).collect(),
            sums: Sums::default(),
            requests: 5,
        };
        tally.add(&round, Duration::ZERO);
        tally
    }

    #[test]
    fn campaign_needs_fault_that_met_request() {
        assert!(!tally(0, &[]).is_clean());
        assert!(tally(1, &[]).is_clean());
        assert!(!tally(1, &["key"]).is_clean());
    }
}
