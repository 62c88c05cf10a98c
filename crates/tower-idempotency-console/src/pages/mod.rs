//! The pages, one module each.

pub(crate) mod audit;
pub(crate) mod body;
pub(crate) mod bulk;
pub(crate) mod entries;
pub(crate) mod entry;
pub(crate) mod events;
pub(crate) mod find;
pub(crate) mod overview;
pub(crate) mod resolve;

use askama::Template;
use axum::response::{IntoResponse as _, Response};
use http::{StatusCode, header::CONTENT_TYPE};
use serde_json::Value;
use tower_idempotency::{
    inspect::{Entry, EntryDetails, Inspect as _, Seen, State},
    store::KeyId,
};

use crate::{
    console::Shared,
    describe::{duration, printable, time},
    error::PageError,
    panics::catch_report_panic,
};

/// Renders a page.
pub(crate) fn html(status: StatusCode, page: &impl Template) -> Response {
    match page.render() {
        Ok(text) => {
            let html = [(CONTENT_TYPE, "text/html; charset=utf-8")];
            (status, html, text).into_response()
        }
        Err(error) => {
            catch_report_panic(|| tracing::error!(%error, "page not rendered"));
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

pub(crate) fn parse_id(id: &str) -> Result<KeyId, PageError> {
    id.parse()
        .map_err(|_| PageError::not_found("Expected the 64 hexadecimal digits of an id."))
}

pub(crate) fn parse_seen(seen: &str) -> Result<Seen, PageError> {
    seen.parse().map_err(|_| {
        PageError::bad_request("Expected the value of seen from the page or the JSON of the entry. Nothing was changed.")
    })
}

pub(crate) async fn find_details(shared: &Shared, id: &KeyId) -> Result<EntryDetails, PageError> {
    let details = shared.call(shared.inspector.get(id)).await?;
    details.ok_or_else(|| {
        PageError::not_found("The store has no such entry. It was deleted, or has expired.")
    })
}

/// Number of lines of the audit log that its page and the API show.
const AUDIT_LINES: usize = 100;

/// Returns the last lines of the audit log, the last one first.
pub(crate) async fn audit_lines(shared: &Shared) -> Result<Vec<Value>, PageError> {
    let (lines, _) = audit_tail(shared, AUDIT_LINES).await?;
    Ok(lines)
}

/// Returns the last lines of the audit log, and `true` if the log has no older ones.
pub(crate) async fn audit_tail(
    shared: &Shared,
    limit: usize,
) -> Result<(Vec<Value>, bool), PageError> {
    let Some(log) = &shared.audit else {
        return Ok((Vec::new(), true));
    };
    log.tail(limit)
        .await
        .map_err(|error| PageError::of_audit(StatusCode::INTERNAL_SERVER_ERROR, &error))
}

/// The last lines of the audit log, for a page that is useful without them.
pub(crate) struct AuditTail {
    pub(crate) lines: Vec<Value>,
    /// `true` if the log has no older lines.
    pub(crate) is_whole: bool,
    /// The reason why the log cannot be read, or empty.
    pub(crate) error: String,
}

/// Returns the last lines of the audit log, or the reason why it cannot be read.
pub(crate) async fn audit_tail_or_error(shared: &Shared, limit: usize) -> AuditTail {
    match audit_tail(shared, limit).await {
        Ok((lines, is_whole)) => AuditTail {
            lines,
            is_whole,
            error: String::new(),
        },
        Err(error) => AuditTail {
            lines: Vec::new(),
            is_whole: true,
            error: error.message,
        },
    }
}

/// An entry as a template shows it.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) id: String,
    pub(crate) short: String,
    pub(crate) state: State,
    pub(crate) mark: &'static str,
    pub(crate) age: String,
    pub(crate) since: String,
    pub(crate) generation: u64,
    pub(crate) owner: String,
    pub(crate) operation: String,
    pub(crate) remark: String,
    pub(crate) lease_expires: String,
    pub(crate) expires: String,
    pub(crate) seen: String,
}

impl From<&Entry> for Row {
    fn from(entry: &Entry) -> Self {
        let or_dash = |text: &str| match text {
            "" => "–".to_owned(),
            text => printable(text),
        };
        let id = entry.id().to_hex();
        let is_readable = entry.state() != State::Unreadable;
        let remark = match entry.state() {
            State::Unreadable => or_dash(entry.problem.as_deref().unwrap_or_default()),
            _ if entry.is_observed() => "observed: stops no retry".to_owned(),
            State::Orphaned if entry.retry_allowed => "retry allowed".to_owned(),
            State::NeedsAttention => or_dash(entry.attention_code.as_deref().unwrap_or_default()),
            _ => "–".to_owned(),
        };
        Self {
            short: id[..8].to_owned(),
            id,
            state: entry.state(),
            mark: mark(entry.state()),
            age: if is_readable {
                duration(entry.age)
            } else {
                "–".to_owned()
            },
            since: if is_readable {
                time(entry.since)
            } else {
                "–".to_owned()
            },
            generation: entry.generation(),
            owner: or_dash(&entry.owner),
            operation: or_dash(&entry.operation),
            remark,
            lease_expires: entry.lease_expires.map(time).unwrap_or_default(),
            expires: entry.expires.map(time).unwrap_or_default(),
            seen: entry.seen().to_string(),
        }
    }
}

/// Returns the sign of a state, so that no state shows by its colour alone.
pub(crate) const fn mark(state: State) -> &'static str {
    match state {
        State::InProgress => "▶",
        State::Orphaned => "◆",
        State::NeedsAttention => "▲",
        State::Completed => "✓",
        _ => "?",
    }
}

/// Returns the name of a state for people.
pub(crate) const fn label(state: State) -> &'static str {
    match state {
        State::InProgress => "in progress",
        State::Orphaned => "orphaned",
        State::NeedsAttention => "needs attention",
        State::Completed => "completed",
        _ => "unreadable",
    }
}

/// A decision as a template shows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) name: &'static str,
    pub(crate) label: &'static str,
    pub(crate) when: &'static str,
    pub(crate) consequence: &'static str,
    pub(crate) is_dangerous: bool,
}

/// Returns the choices of these decisions, the safest one first.
pub(crate) fn choices(mut names: Vec<&'static str>) -> Vec<Choice> {
    // A retry runs the handler, which can find out what happened. Free repeats an effect blindly.
    names.sort_by_key(|name| CHOICES.iter().position(|it| it.0 == *name));
    names.into_iter().filter_map(choice).collect()
}

/// Returns the decision of this name.
pub(crate) fn choice(name: &str) -> Option<Choice> {
    let (name, label, when) = *CHOICES.iter().find(|it| it.0 == name)?;
    Some(Choice {
        name,
        label,
        when,
        consequence: crate::describe::consequence(name),
        is_dangerous: crate::act::needs_confirmation(name),
    })
}

const CHOICES: [(&str, &str, &str); 6] = [
    (
        "retry",
        "Allow one retry",
        "The handler may run once more, and finds out what the first execution did.",
    ),
    (
        "complete",
        "Record a response",
        "The execution had its effect, and you know the response.",
    ),
    (
        "needs-attention",
        "Keep for another operator",
        "Nothing may execute until the entry is examined.",
    ),
    (
        "free",
        "Free the key",
        "The execution had no effect, or the effect is undone.",
    ),
    (
        "break-lease",
        "Break the lease",
        "The handler never ends. Stop it first, if you can.",
    ),
    (
        "delete-record",
        "Delete the record",
        "The recorded response must not be sent again.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::describe::decisions_in;

    #[test]
    fn retry_is_offered_before_free() {
        let names = |state| {
            let choices = choices(decisions_in(state));
            choices.iter().map(|it| it.name).collect::<Vec<_>>()
        };
        assert_eq!(
            names(State::Orphaned),
            ["retry", "complete", "needs-attention", "free"]
        );
        assert_eq!(names(State::InProgress), ["break-lease"]);
        assert_eq!(names(State::Completed), ["delete-record"]);
    }
}
