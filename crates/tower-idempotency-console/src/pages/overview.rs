//! `/`: counts, charts and the last resolutions.

use std::sync::Arc;

use askama::Template;
use axum::{extract::State, response::Response};
use http::StatusCode;
use serde_json::Value;
use tower_idempotency::inspect::State as EntryState;

use super::{AuditTail, audit_tail_or_error, html, label, mark};
use crate::{
    audit::state_after,
    chart::Chart,
    console::Shared,
    describe::{duration, printable, time},
    error::PageError,
    guard::Visit,
    live::{Snapshot, StateCount},
};

/// The part that browsers replace when the counts change.
#[derive(Template)]
#[template(path = "live.html")]
pub(crate) struct LivePart {
    base: String,
    at: String,
    error: String,
    cards: Vec<Card>,
    charts: [Chart; 2],
}

struct Card {
    name: &'static str,
    label: &'static str,
    mark: &'static str,
    count: String,
    oldest: String,
    is_urgent: bool,
}

impl LivePart {
    pub(crate) fn new(shared: &Shared, snapshot: &Snapshot, base: &str) -> Self {
        let samples = shared.live.samples();
        let (states, error) = match &snapshot.states {
            Ok(states) => (&states[..], String::new()),
            Err(error) => (&[][..], error.clone()),
        };
        Self {
            base: base.to_owned(),
            at: time(snapshot.at),
            error,
            cards: states.iter().map(card).collect(),
            charts: [
                Chart::requests(&samples, shared.window, shared.metrics.as_ref()),
                Chart::keys(&samples, shared.window),
            ],
        }
    }
}

fn card(state: &StateCount) -> Card {
    let count = match state.count {
        None => "not listed".to_owned(),
        Some(count) if count.is_exact => count.value.to_string(),
        // The query stopped before it found an entry.
        Some(count) if count.value == 0 => "unknown".to_owned(),
        Some(count) => format!("{}+", count.value),
    };
    let oldest = state.oldest.map(|oldest| {
        let age = duration(oldest.age);
        if oldest.is_exact {
            age
        } else {
            format!("{age} or more")
        }
    });
    let may_have_entries =
        state.state != EntryState::Completed && state.count.is_some_and(|count| !count.is_exact);
    let oldest = oldest.or_else(|| may_have_entries.then(|| "not found in time".to_owned()));
    let is_unresolved = (state.oldest.is_some() || may_have_entries)
        && matches!(
            state.state,
            EntryState::NeedsAttention | EntryState::Orphaned
        );
    Card {
        name: state.state.name(),
        label: label(state.state),
        mark: mark(state.state),
        count,
        oldest: oldest.unwrap_or_default(),
        is_urgent: is_unresolved,
    }
}

/// A line of the audit log as a template shows it.
pub(crate) struct AuditRow {
    pub(crate) at: String,
    /// The name that the writer of the line gave to the store. Several stores may share a log.
    pub(crate) store: String,
    pub(crate) actor: String,
    pub(crate) what: String,
    pub(crate) why: String,
    pub(crate) id: String,
    pub(crate) short: String,
    pub(crate) outcome: String,
    pub(crate) source: String,
    pub(crate) before: String,
    pub(crate) after: String,
}

impl From<&Value> for AuditRow {
    fn from(line: &Value) -> Self {
        let text = |value: &Value| match value.as_str() {
            Some(text) => printable(text),
            None => "–".to_owned(),
        };
        let id = line["id"].as_str().unwrap_or_default();
        let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        let id = if is_id { id } else { "" };
        let outcome = match line["line"].as_str() {
            Some("intent") => "intent".to_owned(),
            _ => text(&line["outcome"]),
        };
        let after = state_after(&outcome, &line["after"]);
        let after = after.map_or_else(|| "–".to_owned(), printable);
        Self {
            at: text(&line["at"]),
            store: text(&line["store"]),
            actor: text(&line["actor"]),
            what: text(&line["what"]),
            why: text(&line["why"]),
            id: id.to_owned(),
            short: id.get(..8).unwrap_or_default().to_owned(),
            outcome,
            source: text(&line["source"]),
            before: text(&line["before"]["state"]),
            after,
        }
    }
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPage {
    visit: Visit,
    live: String,
    audit: Vec<AuditRow>,
    audit_error: String,
    refresh: String,
}

pub(crate) async fn overview(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
) -> Result<Response, PageError> {
    let snapshot = shared.live.current(&shared).await;
    let part = LivePart::new(&shared, &snapshot, &visit.base);
    let AuditTail { lines, error, .. } = audit_tail_or_error(&shared, 200).await;
    let outcomes = lines.iter().filter(|it| it["line"] == "outcome").take(5);
    let page = OverviewPage {
        live: part.render().map_err(|error| {
            PageError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
        })?,
        audit: outcomes.map(AuditRow::from).collect(),
        audit_error: error,
        refresh: humantime::format_duration(shared.refresh).to_string(),
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}
