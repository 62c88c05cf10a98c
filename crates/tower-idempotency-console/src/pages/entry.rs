//! `/entries/{id}`: an entry, its recorded response without the body, and its audit lines.

use std::sync::Arc;

use askama::Template;
use axum::{
    extract::{Path, RawQuery, State},
    response::Response,
};
use http::{HeaderMap, StatusCode};
use tower_idempotency::inspect::{EntryDetails, RecordContents};

use super::{
    Choice, Row, audit_tail_or_error, choices, find_details, html, label, overview::AuditRow,
    parse_id,
};
use crate::{
    console::Shared,
    describe::{decisions, next_request_of, printable},
    error::PageError,
    filters,
    guard::Visit,
    params::Params,
};

/// Largest record that is inflated for a page, in bytes.
pub(crate) const MAX_RECORD: usize = 64 * 1024 * 1024;

#[derive(Template)]
#[template(path = "entry.html")]
struct EntryPage {
    visit: Visit,
    row: Row,
    label: &'static str,
    next_request: &'static str,
    has_checkpoint: bool,
    record: Record,
    choices: Vec<Choice>,
    audit: Vec<AuditRow>,
    /// `false` if older lines of the audit log were not read.
    is_whole_log: bool,
    audit_error: String,
    back: String,
}

/// A record as a template shows it.
#[derive(Default)]
struct Record {
    /// A sentence about the record. Empty if there is none.
    summary: String,
    reason: String,
    headers: Vec<(String, String)>,
    body_bytes: Option<usize>,
}

impl Record {
    fn new(details: &EntryDetails) -> Self {
        let Some(contents) = details.contents(MAX_RECORD) else {
            return Self::default();
        };
        match contents {
            RecordContents::Response(response) => Self {
                summary: format!("A response with status {}.", response.status()),
                headers: headers(response.headers()),
                body_bytes: Some(response.body().len()),
                ..Self::default()
            },
            RecordContents::Tombstone { status, reason } => Self {
                summary: format!("A response with status {status} was not recorded: {reason}."),
                ..Self::default()
            },
            RecordContents::Value(_) if details.entry.is_observed() => Self {
                summary: "An observed status and a digest of the body. No retry gets them."
                    .to_owned(),
                ..Self::default()
            },
            RecordContents::Value(value) => Self {
                summary: format!("A value of run_once, {} bytes.", value.len()),
                ..Self::default()
            },
            RecordContents::NeedsAttention(attention) => Self {
                summary: format!("The execution ended with the code {}.", attention.code()),
                reason: printable(attention.reason()),
                ..Self::default()
            },
            RecordContents::Unreadable(problem) => Self {
                summary: format!("The record cannot be read: {problem}."),
                ..Self::default()
            },
            _ => Self {
                summary: "A record of a kind that this console does not know.".to_owned(),
                ..Self::default()
            },
        }
    }
}

/// Returns the lines of the headers. The value of a sensitive one is left out.
fn headers(headers: &HeaderMap) -> Vec<(String, String)> {
    let lines = headers.iter().map(|(name, value)| {
        let value = if value.is_sensitive() {
            "(sensitive)".to_owned()
        } else {
            printable(&String::from_utf8_lossy(value.as_bytes()))
        };
        (name.to_string(), value)
    });
    lines.collect()
}

pub(crate) async fn entry(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    let id = parse_id(&id)?;
    let details = find_details(&shared, &id).await?;
    let tail = audit_tail_or_error(&shared, usize::MAX).await;
    let hex = id.to_hex();
    let of_entry = tail
        .lines
        .iter()
        .filter(|it| it["id"] == hex.as_str())
        .take(20);
    let state = details.entry.state();
    let page = EntryPage {
        row: Row::from(&details.entry),
        label: label(state),
        next_request: next_request_of(&details),
        has_checkpoint: details.has_checkpoint,
        record: Record::new(&details),
        choices: choices(decisions(&details.entry)),
        audit: of_entry.map(AuditRow::from).collect(),
        is_whole_log: tail.is_whole,
        audit_error: tail.error,
        back: Params::parse(query.unwrap_or_default().as_bytes()).back(),
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}
