//! Resolves an entry: the audit line, the conditional change, the second audit line.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use tower_idempotency::{
    Ttl,
    inspect::{Entry, EntryDetails, Inspect as _, Resolution, ResolveOutcome, Seen},
};

use crate::{
    audit::{AuditLog, AuditedChange, Intent, change_id, changes_nothing},
    console::Shared,
    describe::{decisions, details_json, entry_json, kept_for_operator},
    error::PageError,
    panics::catch_report_panic,
    params::Params,
    response::{STATUSES, encode, parse_header, parse_status},
};

/// The outcome of a decision.
#[derive(Debug)]
pub(crate) struct DecisionOutcome {
    /// The entry as it was read before the change. `None` if it had already changed since the operator saw it.
    pub(crate) before: Option<Entry>,
    /// The entry afterwards. `None` if the store has none.
    pub(crate) after: Option<Entry>,
    pub(crate) is_applied: bool,
}

/// A decision of an operator, from a form.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) actor: Box<str>,
    pub(crate) source: &'static str,
    pub(crate) seen: Seen,
    pub(crate) decision: Decision,
    pub(crate) reason: String,
}

/// The decision of a form or of an API call, before the entry is read.
#[derive(Clone)]
pub(crate) enum Decision {
    Free,
    Retry,
    Complete(Box<(Response<Bytes>, Ttl)>),
    NeedsAttention,
    BreakLease,
    DeleteRecord,
}

impl Decision {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Retry => "retry",
            Self::Complete(_) => "complete",
            Self::NeedsAttention => "needs-attention",
            Self::BreakLease => "break-lease",
            Self::DeleteRecord => "delete-record",
        }
    }

    /// Reads the decision of a form. The response of `complete` is in `status`, `headers`, `body` and `retention`.
    pub(crate) fn parse(params: &Params) -> Result<Self, PageError> {
        Ok(match params.get("how").unwrap_or_default() {
            "free" => Self::Free,
            "retry" => Self::Retry,
            "complete" => Self::Complete(Box::new((response(params)?, retention(params)?))),
            "needs-attention" => Self::NeedsAttention,
            "break-lease" => Self::BreakLease,
            "delete-record" => Self::DeleteRecord,
            _ => {
                return Err(PageError::bad_request(
                    "Expected retry, complete, needs-attention, free, break-lease or delete-record as the decision.",
                ));
            }
        })
    }

    fn resolution(
        &self,
        shared: &Shared,
        details: &EntryDetails,
        reason: &str,
    ) -> Result<Resolution, PageError> {
        Ok(match self {
            Self::Free => Resolution::Free,
            Self::Retry => Resolution::Retry,
            Self::BreakLease => Resolution::BreakLease,
            Self::DeleteRecord => Resolution::DeleteRecord,
            Self::Complete(output) => Resolution::Complete {
                record: encode(&shared.encoder(), details.entry.id(), &output.0).map_err(|error| {
                    PageError::bad_request(format!(
                        "The response cannot be recorded as it is: {error}. Nothing was changed."
                    ))
                })?,
                retention: output.1,
            },
            Self::NeedsAttention => {
                Resolution::NeedsAttention(kept_for_operator(details, None, reason))
            }
        })
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns `true` if a form has to confirm the decision, because a handler or a client may rely on the lease or the record.
pub(crate) fn needs_confirmation(decision: &str) -> bool {
    matches!(decision, "break-lease" | "delete-record" | "free")
}

/// Reads the reason of a form.
pub(crate) fn reason(params: &Params) -> Result<String, PageError> {
    let reason = params.get("reason").unwrap_or_default().trim();
    if reason.is_empty() {
        return Err(PageError::bad_request(
            "A reason is required. Nothing was changed.",
        ));
    }
    if reason.len() > MAX_REASON {
        return Err(PageError::bad_request(format!(
            "Expected at most {MAX_REASON} bytes as the reason. Nothing was changed."
        )));
    }
    Ok(reason.to_owned())
}

/// Resolves an entry, if it is still as it was seen. A disconnect of the browser does not interrupt it.
pub(crate) async fn resolve(
    shared: &Arc<Shared>,
    request: Request,
) -> Result<DecisionOutcome, PageError> {
    let shared = Arc::clone(shared);
    let running = shared.changes.begin();
    let task = tokio::spawn(async move {
        let outcome = resolve_and_audit(&shared, request).await;
        drop(running);
        outcome
    });
    task.await.unwrap_or_else(|error| {
        Err(PageError::unknown(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("The outcome is unknown, see the audit log: {error}"),
        ))
    })
}

async fn resolve_and_audit(
    shared: &Shared,
    request: Request,
) -> Result<DecisionOutcome, PageError> {
    let Some(log) = &shared.audit else {
        return Err(PageError::forbidden(
            "This console has no audit log, so nothing can be resolved.",
        ));
    };
    let seen = &request.seen;
    let details = match shared.call(shared.inspector.get(seen.id())).await? {
        Some(details) if details.entry.seen() == seen => details,
        changed => {
            return Ok(DecisionOutcome {
                before: None,
                after: changed.map(|it| it.entry),
                is_applied: false,
            });
        }
    };
    let resolution = checked_resolution(shared, &request, &details)?;
    let change = begin(log, &shared.store_name, &request, &details).await?;
    let resolved = apply(shared, seen, &resolution).await;
    shared.live.invalidate();
    finish(shared, change, &request, &resolved).await?;
    let outcome = resolved?;
    let is_applied = outcome.is_applied();
    let (ResolveOutcome::Applied(after) | ResolveOutcome::Changed(after)) = outcome;
    Ok(DecisionOutcome {
        before: Some(details.entry),
        after: after.map(|entry| *entry),
        is_applied,
    })
}

/// Returns the resolution of a request. An error means that it does not apply to the entry.
fn checked_resolution(
    shared: &Shared,
    request: &Request,
    details: &EntryDetails,
) -> Result<Resolution, PageError> {
    let Request { decision, seen, .. } = request;
    let resolution = decision.resolution(shared, details, &request.reason)?;
    if !resolution.applies_to(seen.state()) {
        return Err(PageError::bad_request(format!(
            "The decision {} does not apply to an entry in the state {}. Nothing was changed.",
            resolution.name(),
            seen.state()
        )));
    }
    if matches!(decision, Decision::Complete(_)) && details.entry.is_of_run_once() {
        return Err(PageError::bad_request(
            "A response cannot be recorded, because the record of this entry is a value. Nothing was changed.",
        ));
    }
    if details.entry.is_observed() && !decisions(&details.entry).contains(&resolution.name()) {
        return Err(PageError::bad_request(format!(
            "The decision {} does not apply: the request was only observed, so this entry stops no retry. Nothing was changed.",
            resolution.name()
        )));
    }
    Ok(resolution)
}

/// Counts the outcome of a resolution, and writes it to the audit log.
async fn finish(
    shared: &Shared,
    change: AuditedChange,
    request: &Request,
    resolved: &Result<ResolveOutcome, PageError>,
) -> Result<(), PageError> {
    let (outcome, after) = match resolved {
        Ok(resolved) => {
            let outcome = if resolved.is_applied() {
                "applied"
            } else {
                "changed"
            };
            let after = resolved.entry().map_or(Value::Null, entry_json);
            (outcome.to_owned(), after)
        }
        Err(error) if error.is_unknown => (format!("unknown: {}", error.message), Value::Null),
        Err(error) => (format!("failed: {}", error.message), Value::Null),
    };
    let decision = request.decision.name();
    shared.counters.count_resolution(decision, &outcome);
    change.finish(&outcome, after).await.map_err(|error| {
        catch_report_panic(|| {
            tracing::error!(
                entry = %request.seen.id(),
                outcome,
                %error,
                "outcome of a resolution not written to the audit log"
            );
        });
        PageError {
            is_unknown: true,
            ..PageError::of_audit(StatusCode::INTERNAL_SERVER_ERROR, &error)
        }
    })
}

/// Makes the change. An error shows if the store may have made it nevertheless.
async fn apply(
    shared: &Shared,
    seen: &Seen,
    resolution: &Resolution,
) -> Result<ResolveOutcome, PageError> {
    let call = shared.inspector.resolve(seen, resolution);
    let error = match tokio::time::timeout(shared.timeout, call).await {
        Ok(Ok(outcome)) => return Ok(outcome),
        Ok(Err(error)) if changes_nothing(&error) => {
            let mut error = PageError::from(error);
            error.message = format!("{}. Nothing was changed.", error.message);
            return Err(error);
        }
        Ok(Err(error)) => PageError::from(error),
        Err(_) => PageError::timeout(shared.timeout),
    };
    Err(error.into_unknown())
}

/// Writes the intent to the audit log.
async fn begin(
    log: &AuditLog,
    store: &str,
    request: &Request,
    details: &EntryDetails,
) -> Result<AuditedChange, PageError> {
    let id = request.seen.id().to_hex();
    // The decision may delete the record. Afterwards only the audit log has its reason.
    let before = details_json(details);
    let change = change_id();
    let intent = Intent {
        change: &change,
        store,
        actor: &request.actor,
        source: request.source,
        decision: request.decision.name(),
        reason: &request.reason,
        id: Some(&id),
        before: &before,
    };
    log.begin(&intent).await.map_err(|error| {
        catch_report_panic(|| {
            tracing::error!(%error, "audit log not written, so nothing was resolved");
        });
        PageError::of_audit(StatusCode::SERVICE_UNAVAILABLE, &error)
    })
}

fn response(params: &Params) -> Result<Response<Bytes>, PageError> {
    let status = params.get("status").and_then(parse_status);
    let status = status.ok_or_else(|| {
        PageError::bad_request(format!(
            "Expected a status of {STATUSES}, as in 201. Nothing was changed."
        ))
    })?;
    let body = params.get("body").unwrap_or_default();
    let mut response = Response::new(Bytes::copy_from_slice(body.as_bytes()));
    *response.status_mut() = status;
    for line in params.get("headers").unwrap_or_default().lines() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let (name, value) = parse_header(line).ok_or_else(|| {
            PageError::bad_request(
                "Expected a header on each line, as in location: /orders/1. Nothing was changed.",
            )
        })?;
        response.headers_mut().append(name, value);
    }
    Ok(response)
}

fn retention(params: &Params) -> Result<Ttl, PageError> {
    let text = params.get("retention").unwrap_or("24h");
    let retention = humantime::parse_duration(text.trim()).ok();
    retention
        .and_then(|retention| Ttl::try_from(retention).ok())
        .ok_or_else(|| {
            PageError::bad_request(
                "Expected a duration as in 24h as the retention. Nothing was changed.",
            )
        })
}

impl DecisionOutcome {
    pub(crate) fn json(&self) -> Value {
        json!({
            "outcome": if self.is_applied { "applied" } else { "changed" },
            "before": self.before.as_ref().map(entry_json),
            "entry": self.after.as_ref().map(entry_json),
        })
    }
}

const MAX_REASON: usize = 1_000;
