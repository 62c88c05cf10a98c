//! `/entries/{id}/body`: the recorded body as a file, never as a page.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    response::{IntoResponse as _, Response},
};
use http::header::{CONTENT_DISPOSITION, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use tower_idempotency::inspect::RecordContents;

use super::{entry::MAX_RECORD, find_details, parse_id};
use crate::{console::Shared, error::PageError, guard::Visit, panics::catch_report_panic};

pub(crate) async fn body(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    Path(id): Path<String>,
) -> Result<Response, PageError> {
    let id = parse_id(&id)?;
    let details = find_details(&shared, &id).await?;
    let Some(RecordContents::Response(response)) = details.contents(MAX_RECORD) else {
        return Err(PageError::not_found("The entry has no recorded response."));
    };
    catch_report_panic(|| {
        tracing::info!(
            target: "tower_idempotency::audit",
            entry = %id,
            actor = &*visit.actor,
            "recorded body read by an operator"
        );
    });
    let name = format!("attachment; filename=\"body-{}.txt\"", &id.to_hex()[..8]);
    let headers = [
        (CONTENT_TYPE, "text/plain; charset=utf-8".to_owned()),
        (CONTENT_DISPOSITION, name),
        (
            CONTENT_SECURITY_POLICY,
            "sandbox; default-src 'none'; frame-ancestors 'none'".to_owned(),
        ),
    ];
    Ok((headers, response.into_body()).into_response())
}
