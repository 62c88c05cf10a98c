//! A builder of histories, for tests of the judgments.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use http::{HeaderMap, StatusCode};

use super::{Attempt, Effect, History, Occasion, Outcome, Strike};
use tests::TestResponse;

pub(super) const LEASE: Duration = Duration::from_millis(100);
const REQUEST: &str = "POST /slow/40";

/// The start and the history so far. There are two members: the first is process 10 and later process 11, the second is
/// process 20. Times are milliseconds since the start.
pub(super) struct HistoryBuilder(pub(super) Instant, pub(super) History);

impl HistoryBuilder {
    pub(super) fn new() -> Self {
        let history = History {
            effects: Vec::new(),
            attempts: Vec::new(),
            strikes: Vec::new(),
            occasions: Vec::new(),
            processes: BTreeMap::from([(10, 0), (11, 0), (20, 1)]),
            lease: LEASE,
            max_reply_age: Duration::ZERO,
            retention: None,
            problems: &[],
        };
        Self(Instant::now(), history)
    }

    fn at(&self, ms: u64) -> Instant {
        self.0 + Duration::from_millis(ms)
    }

    pub(super) fn effect(mut self, pid: u32, n: u64) -> Self {
        self.1.effects.push(Effect {
            pid,
            n,
            request: REQUEST.to_owned(),
            key: "k".to_owned(),
        });
        self
    }

    pub(super) fn attempt(mut self, member: usize, from: u64, to: u64, outcome: Outcome) -> Self {
        let attempt = Attempt {
            key: "k".to_owned(),
            request: REQUEST.to_owned(),
            member,
            began: self.at(from),
            ended: self.at(to),
            outcome,
        };
        self.1.attempts.push(attempt);
        self
    }

    /// Changes the request of execution `n`, in its effect and in the attempts with its response.
    pub(super) fn mark_other_request(mut self, n: u64) -> Self {
        let effects = self.1.effects.iter_mut().filter(|it| it.n == n);
        effects.for_each(|it| it.request = OTHER.to_owned());
        let attempts = self.1.attempts.iter_mut();
        let attempts = attempts.filter(|it| it.execution() == Some(n));
        attempts.for_each(|it| it.request = OTHER.to_owned());
        self
    }

    pub(super) fn data_loss(self, from: u64, until: u64) -> Self {
        self.occasion(from, until, None, false)
    }

    pub(super) fn takeover(self, at: u64) -> Self {
        self.occasion(at, at, Some("k"), true)
    }

    /// Adds an occasion for the given key, or for each key.
    pub(super) fn occasion(
        mut self,
        from: u64,
        until: u64,
        key: Option<&str>,
        takeover: bool,
    ) -> Self {
        let (from, until) = (self.at(from), self.at(until));
        self.1.occasions.push(Occasion {
            key: key.map(str::to_owned),
            from,
            until,
            takeover,
        });
        self
    }

    pub(super) fn strike(mut self, member: usize, pid: u32, at: u64, resumed: Option<u64>) -> Self {
        let strike = Strike {
            member,
            pid,
            ordered: self.at(at),
            down: self.at(at + 1),
            resumed: resumed.map(|at| self.at(at)),
        };
        self.1.strikes.push(strike);
        self
    }
}

pub(super) fn response(n: u64) -> Outcome {
    let mut headers = HeaderMap::new();
    headers.insert("x-execution", n.into());
    Outcome::Answered(TestResponse {
        status: StatusCode::CREATED,
        headers,
        body: format!("execution {n}").into(),
    })
}

pub(super) fn in_progress() -> Outcome {
    Outcome::NotYet("in-progress".to_owned())
}

const OTHER: &str = "POST /slow/50";
