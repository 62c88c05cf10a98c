//! `/entries/{id}/resolve`: the confirmation of a decision, and its outcome.

use std::sync::Arc;

use askama::Template;
use axum::{
    body::Bytes,
    extract::{Path, RawQuery, State},
    response::Response,
};
use http::StatusCode;
use tower_idempotency::{
    NeedsAttention,
    inspect::{Entry, Seen},
};

use super::{Choice, Row, choice, choices, find_details, html, label, parse_id, parse_seen};
use crate::{
    act::{self, Decision},
    console::Shared,
    describe::{decisions, next_request, next_request_of, printable},
    error::PageError,
    filters,
    guard::Visit,
    params::Params,
};

#[derive(Template)]
#[template(path = "confirm.html")]
struct Confirmation {
    visit: Visit,
    row: Row,
    label: &'static str,
    choice: Choice,
    back: String,
    next_request: &'static str,
    /// Code and reason of an entry that needs attention.
    code: String,
    reason: String,
}

#[derive(Template)]
#[template(path = "outcome.html")]
pub(crate) struct Outcome {
    visit: Visit,
    id: String,
    short: String,
    choice: Choice,
    is_applied: bool,
    before: Side,
    after: Side,
    next_request: &'static str,
    back: String,
}

/// The entry before or after a decision.
struct Side {
    label: &'static str,
    mark: &'static str,
    generation: String,
    since: String,
}

impl Side {
    fn of(entry: Option<&Entry>) -> Self {
        match entry {
            None => Self {
                label: "absent",
                mark: "–",
                generation: "–".to_owned(),
                since: "–".to_owned(),
            },
            Some(entry) => {
                let row = Row::from(entry);
                Self {
                    label: label(row.state),
                    mark: row.mark,
                    generation: row.generation.to_string(),
                    since: row.since,
                }
            }
        }
    }

    fn seen(seen: &Seen) -> Self {
        Self {
            label: label(seen.state()),
            mark: super::mark(seen.state()),
            generation: seen.generation().to_string(),
            since: "–".to_owned(),
        }
    }
}

pub(crate) async fn confirm(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    visit.check_resolve()?;
    let params = Params::parse(query.unwrap_or_default().as_bytes());
    let details = find_details(&shared, &parse_id(&id)?).await?;
    let entry = &details.entry;
    let how = params.get("how").unwrap_or_default();
    // The page of the entry sends the state that it has shown.
    if let Some(seen) = params.get("seen") {
        let seen = parse_seen(seen)?;
        if seen.id() != entry.id() {
            return Err(PageError::bad_request(
                "The value of seen is that of another entry.",
            ));
        }
        if &seen != entry.seen() {
            let Some(choice) = choice(how) else {
                return Err(PageError::bad_request("There is no such decision."));
            };
            let row = Row::from(entry);
            let page = Outcome {
                id: row.id,
                short: row.short,
                choice,
                is_applied: false,
                before: Side::seen(&seen),
                after: Side::of(Some(entry)),
                next_request: next_request_of(&details),
                back: params.back(),
                visit,
            };
            return Ok(html(StatusCode::CONFLICT, &page));
        }
    }
    let applying = choices(decisions(entry))
        .into_iter()
        .find(|it| it.name == how);
    let Some(choice) = applying else {
        let state = label(entry.state());
        return Err(PageError::bad_request(format!(
            "This decision does not apply to an entry in the state {state}."
        )));
    };
    let record = details.record.as_deref();
    let attention = record.and_then(NeedsAttention::in_record);
    let page = Confirmation {
        row: Row::from(entry),
        label: label(entry.state()),
        choice,
        back: params.back(),
        next_request: next_request_of(&details),
        code: attention
            .as_ref()
            .map_or_else(String::new, |it| printable(it.code())),
        reason: attention.map_or_else(String::new, |it| printable(it.reason())),
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}

pub(crate) async fn resolve(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    Path(id): Path<String>,
    body: Bytes,
) -> Result<Response, PageError> {
    visit.check_resolve()?;
    let params = Params::parse(&body).with_line_feeds("body");
    let seen = parse_seen(params.get("seen").unwrap_or_default())?;
    if seen.id() != &parse_id(&id)? {
        return Err(PageError::bad_request(
            "The form is that of another entry. Nothing was changed.",
        ));
    }
    let decision = Decision::parse(&params)?;
    check_confirmation(&decision, &params)?;
    let Some(choice) = choice(decision.name()) else {
        return Err(PageError::bad_request("There is no such decision."));
    };
    let request = act::Request {
        actor: visit.actor.clone(),
        source: "console",
        seen,
        decision,
        reason: act::reason(&params)?,
    };
    let outcome = act::resolve(&shared, request).await?;
    let id = seen.id().to_hex();
    let page = Outcome {
        short: id[..8].to_owned(),
        id,
        choice,
        is_applied: outcome.is_applied,
        before: match &outcome.before {
            Some(entry) => Side::of(Some(entry)),
            None => Side::seen(&seen),
        },
        after: Side::of(outcome.after.as_ref()),
        next_request: outcome.after.as_ref().map_or(
            "The next request with the key executes as the first one.",
            next_request,
        ),
        back: params.back(),
        visit,
    };
    let status = if outcome.is_applied {
        StatusCode::OK
    } else {
        StatusCode::CONFLICT
    };
    Ok(html(status, &page))
}

/// Returns an error if the decision needs a confirmation that the form lacks.
pub(crate) fn check_confirmation(decision: &Decision, params: &Params) -> Result<(), PageError> {
    if act::needs_confirmation(decision.name()) && params.get("confirm") != Some("yes") {
        return Err(PageError::bad_request(
            "Tick the confirmation. Nothing was changed.",
        ));
    }
    Ok(())
}
