//! `/audit`: the last lines of the audit log.

use std::sync::Arc;

use askama::Template;
use axum::{extract::State, response::Response};
use http::StatusCode;

use super::{audit_lines, html, overview::AuditRow};
use crate::{console::Shared, error::PageError, guard::Visit};

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditPage {
    visit: Visit,
    rows: Vec<AuditRow>,
}

pub(crate) async fn audit(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
) -> Result<Response, PageError> {
    let lines = audit_lines(&shared).await?;
    let page = AuditPage {
        rows: lines.iter().map(AuditRow::from).collect(),
        visit,
    };
    Ok(html(StatusCode::OK, &page))
}
