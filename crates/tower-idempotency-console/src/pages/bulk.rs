//! `/resolve`: one decision for the ticked rows of a page, each as it was seen.

use std::sync::Arc;

use askama::Template;
use axum::{
    body::Bytes,
    extract::{RawQuery, State},
    response::Response,
};
use http::StatusCode;
use tower_idempotency::inspect::{Inspect as _, Seen};

use super::{Choice, Row, choice, html, label, mark, parse_seen, resolve::check_confirmation};
use crate::{
    act::{self, Decision},
    console::Shared,
    error::PageError,
    guard::Visit,
    params::{PAGE, Params},
};

#[derive(Template)]
#[template(path = "bulk.html")]
struct BulkConfirmation {
    visit: Visit,
    choice: Choice,
    rows: Vec<Row>,
    /// Ticked rows that have changed since they were seen.
    changed: Vec<Ticked>,
    back: String,
}

#[derive(Template)]
#[template(path = "bulk_outcome.html")]
struct BulkOutcome {
    visit: Visit,
    choice: Choice,
    results: Vec<Ticked>,
    applied: usize,
    /// Number of decisions that may have been applied.
    unknown: usize,
    back: String,
}

/// The result of a ticked row.
struct Ticked {
    id: String,
    short: String,
    label: &'static str,
    mark: &'static str,
    result: String,
}

impl Ticked {
    fn new(seen: &Seen, result: String) -> Self {
        let id = seen.id().to_hex();
        Self {
            short: id[..8].to_owned(),
            id,
            label: label(seen.state()),
            mark: mark(seen.state()),
            result,
        }
    }
}

/// Reads the ticked rows: 1 to 50.
fn ticked(params: &Params) -> Result<Vec<Seen>, PageError> {
    let mut ticked = Vec::new();
    for seen in params.all("seen") {
        let seen = parse_seen(seen)?;
        if ticked.iter().all(|it: &Seen| it.id() != seen.id()) {
            ticked.push(seen);
        }
    }
    if ticked.is_empty() || ticked.len() > usize::from(PAGE) {
        return Err(PageError::bad_request(format!(
            "Expected 1 to {PAGE} ticked rows, found {}. Nothing was changed.",
            ticked.len()
        )));
    }
    Ok(ticked)
}

/// Returns the decision. A recorded response is for one entry.
fn bulk_choice(params: &Params) -> Result<Choice, PageError> {
    let choice = choice(params.get("how").unwrap_or_default());
    choice.filter(|it| it.name != "complete").ok_or_else(|| {
        PageError::bad_request("Expected a decision for the ticked rows. Nothing was changed.")
    })
}

pub(crate) async fn confirm(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    visit.check_resolve()?;
    let params = Params::parse(query.unwrap_or_default().as_bytes());
    let choice = bulk_choice(&params)?;
    let (mut rows, mut changed) = (Vec::new(), Vec::new());
    for seen in ticked(&params)? {
        let details = shared.call(shared.inspector.get(seen.id())).await?;
        match details {
            Some(details) if details.entry.seen() == &seen => rows.push(Row::from(&details.entry)),
            Some(details) => {
                let now = label(details.entry.state());
                changed.push(Ticked::new(&seen, format!("changed: it is {now} now")));
            }
            None => changed.push(Ticked::new(&seen, "changed: it is absent now".to_owned())),
        }
    }
    let page = BulkConfirmation {
        choice,
        rows,
        changed,
        back: params.back(),
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}

pub(crate) async fn resolve(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    body: Bytes,
) -> Result<Response, PageError> {
    visit.check_resolve()?;
    let params = Params::parse(&body);
    let choice = bulk_choice(&params)?;
    let ticked = ticked(&params)?;
    let decision = Decision::parse(&params)?;
    check_confirmation(&decision, &params)?;
    let reason = act::reason(&params)?;
    let actor = visit.actor.clone();
    // A disconnect of the browser does not interrupt the task.
    let running = shared.changes.begin();
    let task = tokio::spawn(async move {
        let results = resolve_all(&shared, ticked, &actor, &decision, &reason).await;
        drop(running);
        results
    });
    let (results, applied, unknown) = task.await.map_err(|error| {
        PageError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("The outcome is unknown, see the audit log: {error}"),
        )
    })?;
    let status = if applied == results.len() {
        StatusCode::OK
    } else {
        StatusCode::CONFLICT
    };
    let page = BulkOutcome {
        choice,
        results,
        applied,
        unknown,
        back: params.back(),
        visit,
    };
    Ok(html(status, &page))
}

/// Resolves the entries one after the other. Returns the result of each, and the numbers of decisions that were applied and
/// that may have been. Changes nothing more once the console shuts down, or the store or the audit log fails.
async fn resolve_all(
    shared: &Arc<Shared>,
    ticked: Vec<Seen>,
    actor: &str,
    decision: &Decision,
    reason: &str,
) -> (Vec<Ticked>, usize, usize) {
    let (mut results, mut applied, mut unknown) = (Vec::new(), 0, 0);
    let mut has_failed = false;
    for seen in ticked {
        let stopped = if shared.live.is_closed() {
            Some("the console shuts down")
        } else {
            // Each further row could take as long as the one that failed.
            has_failed.then_some("an earlier row failed")
        };
        if let Some(reason) = stopped {
            results.push(Ticked::new(&seen, format!("not changed: {reason}")));
            continue;
        }
        let request = act::Request {
            actor: actor.into(),
            source: "console",
            seen,
            decision: decision.clone(),
            reason: reason.to_owned(),
        };
        let resolved = act::resolve(shared, request).await;
        has_failed = matches!(&resolved, Err(error) if error.status.is_server_error());
        let result = match resolved {
            Ok(outcome) if outcome.is_applied => {
                applied += 1;
                "done".to_owned()
            }
            Ok(outcome) => {
                let now = outcome.after.map_or("absent", |entry| label(entry.state()));
                format!("not changed: it is {now} now")
            }
            Err(error) if error.is_unknown => {
                unknown += 1;
                error.message
            }
            Err(error) => format!("not changed: {}", error.message),
        };
        results.push(Ticked::new(&seen, result));
    }
    (results, applied, unknown)
}
