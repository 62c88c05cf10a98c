//! `/metrics`: the state of the store and the counters of the console, in the text format of Prometheus.
//!
//! No label has a key, a principal, an operation or an owner, so the number of series is bounded. The series of a store that
//! fails are absent: alert on `idempotency_store_up`.

use std::{
    fmt::{Display, Write as _},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::State,
    response::{IntoResponse as _, Response},
};
use http::{StatusCode, header::CONTENT_TYPE};
use tokio::time::timeout;

use crate::{
    console::Shared,
    live::{COUNT_LIMIT, StateCount},
};

/// Largest time that a scrape waits for the store. Prometheus ends a scrape after 10 seconds by default.
const QUERY_LIMIT: Duration = Duration::from_secs(5);

/// Counters of the console since its start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    responses: [AtomicU64; CLASSES.len()],
    resolutions: [[AtomicU64; OUTCOMES.len()]; DECISIONS.len()],
}

/// Classes of the status of a response.
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
/// Decisions, as in the audit log.
const DECISIONS: [&str; 6] = [
    "retry",
    "complete",
    "needs-attention",
    "free",
    "break-lease",
    "delete-record",
];
/// Outcomes of a decision whose intent is in the audit log.
const OUTCOMES: [&str; 4] = ["applied", "changed", "unknown", "failed"];

impl Counters {
    pub(crate) fn count_response(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).saturating_sub(1);
        if let Some(counter) = self.responses.get(class) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a decision. An outcome of the audit log may continue after its first word.
    pub(crate) fn count_resolution(&self, decision: &str, outcome: &str) {
        let decision = DECISIONS.iter().position(|it| *it == decision);
        let outcome = OUTCOMES.iter().position(|it| outcome.starts_with(it));
        if let (Some(decision), Some(outcome)) = (decision, outcome) {
            self.resolutions[decision][outcome].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Responds with all metrics. A store that fails, or does not reply within five seconds, has no counts, and
/// `idempotency_store_up` is 0.
pub(crate) async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let snapshot = timeout(QUERY_LIMIT, shared.live.current(&shared)).await;
    let states = match &snapshot {
        Ok(snapshot) => snapshot.states.as_deref().ok(),
        Err(_elapsed) => None,
    };
    let text = render(states, &shared.counters);
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, content_type)], text).into_response()
}

fn render(states: Option<&[StateCount]>, counters: &Counters) -> String {
    let mut text = Exposition::default();
    text.write_store(states);
    text.write_console(counters);
    text.0
}

/// Metrics in the text format of Prometheus. Label values are names of this crate, which need no escapes.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    /// Writes the gauges of the store. `states` is `None` if the store did not reply.
    fn write_store(&mut self, states: Option<&[StateCount]>) {
        let up = u8::from(states.is_some());
        self.family(
            "store_up",
            "gauge",
            "1 if the store replied to the last query, else 0.",
        );
        self.sample("store_up", &[], up);
        self.family(
            "store_entries_limit",
            "gauge",
            "Number of entries at which the counts of idempotency_store_entries stop.",
        );
        self.sample("store_entries_limit", &[], COUNT_LIMIT);
        let states = states.unwrap_or_default();
        self.family(
            "store_entries",
            "gauge",
            "Entries of the store by state, counted up to a limit.",
        );
        for state in states {
            // A query that stopped before it found an entry does not prove that there is none.
            if let Some(count) = state.count.filter(|it| it.is_exact || it.value > 0) {
                self.sample(
                    "store_entries",
                    &[("state", state.state.name())],
                    count.value,
                );
            }
        }
        self.family(
            "store_entries_is_exact",
            "gauge",
            "1 if the count of a state is exact, else 0: the state may have more entries.",
        );
        for state in states {
            if let Some(count) = state.count {
                self.sample(
                    "store_entries_is_exact",
                    &[("state", state.state.name())],
                    u8::from(count.is_exact),
                );
            }
        }
        self.family(
            "store_oldest_entry_age_seconds",
            "gauge",
            "Age of the oldest entry among the first of the listing of a state.",
        );
        for state in states {
            if let Some(oldest) = state.oldest {
                let labels = [("state", state.state.name())];
                self.sample(
                    "store_oldest_entry_age_seconds",
                    &labels,
                    oldest.age.as_secs_f64(),
                );
            }
        }
        self.family(
            "store_oldest_entry_age_is_exact",
            "gauge",
            "1 if the age of the oldest entry is exact, else 0: the state may have older entries.",
        );
        for state in states {
            if let Some(oldest) = state.oldest {
                let labels = [("state", state.state.name())];
                let is_exact = u8::from(oldest.is_exact);
                self.sample("store_oldest_entry_age_is_exact", &labels, is_exact);
            }
        }
    }

    /// Writes the counters of the console.
    fn write_console(&mut self, counters: &Counters) {
        self.family(
            "console_responses_total",
            "counter",
            "Responses of the console by class of the status.",
        );
        for (class, counter) in CLASSES.iter().zip(&counters.responses) {
            let count = counter.load(Ordering::Relaxed);
            self.sample("console_responses_total", &[("status", class)], count);
        }
        self.family(
            "console_resolutions_total",
            "counter",
            "Decisions of operators by outcome in the audit log.",
        );
        for (decision, counters) in DECISIONS.iter().zip(&counters.resolutions) {
            for (outcome, counter) in OUTCOMES.iter().zip(counters) {
                let labels = [("decision", *decision), ("outcome", *outcome)];
                self.sample(
                    "console_resolutions_total",
                    &labels,
                    counter.load(Ordering::Relaxed),
                );
            }
        }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let written = write!(
            self.0,
            "# HELP idempotency_{name} {help}\n# TYPE idempotency_{name} {kind}\n"
        );
        debug_assert!(written.is_ok(), "a string accepts all text");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{value}\""))
            .collect();
        let labels = match &labels[..] {
            [] => String::new(),
            labels => format!("{{{}}}", labels.join(",")),
        };
        let written = writeln!(self.0, "idempotency_{name}{labels} {value}");
        debug_assert!(written.is_ok(), "a string accepts all text");
    }
}
