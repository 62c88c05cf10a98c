//! The JSON API, for scripts. Its objects are those of the tool `idempotency` with `--json`.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::{Path, RawQuery, State},
    response::{IntoResponse as _, Response},
};
use http::{HeaderMap, StatusCode, header::CONTENT_TYPE};
use serde_json::{Map, Value, json};

use crate::{
    act::{self, Decision},
    console::Shared,
    describe::{details_json, entry_json, json_text, time},
    error::PageError,
    guard::Visit,
    pages::{audit_lines, entries::page, find_details, parse_id, parse_seen},
    params::{Filters, Params},
};

fn json_response(status: StatusCode, value: &Value) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    (status, json, json_text(value)).into_response()
}

pub(crate) async fn summary(State(shared): State<Arc<Shared>>) -> Result<Response, PageError> {
    let snapshot = shared.live.current(&shared).await;
    let states = snapshot.states.as_ref();
    let states = states.map_err(|error| PageError::new(StatusCode::BAD_GATEWAY, error))?;
    let counts = states.iter().map(|it| {
        let count = it
            .count
            .map(|it| json!({"count": it.value, "is_exact": it.is_exact}));
        (it.state.name().to_owned(), json!(count))
    });
    let counts: Map<_, _> = counts.collect();
    let value = json!({"at": time(snapshot.at), "store": shared.store_name, "states": counts});
    Ok(json_response(StatusCode::OK, &value))
}

pub(crate) async fn entries(
    State(shared): State<Arc<Shared>>,
    RawQuery(query): RawQuery,
) -> Result<Response, PageError> {
    let params = Params::parse(query.unwrap_or_default().as_bytes());
    // A filter that is ignored would list other entries than the script expects.
    params.check_names(&Filters::NAMES)?;
    let filters = Filters::parse(&params)?;
    let (entries, next) = page(&shared, &filters).await?;
    let entries: Vec<_> = entries.iter().map(entry_json).collect();
    let next = next.map(|next| next.to_string());
    Ok(json_response(
        StatusCode::OK,
        &json!({"entries": entries, "next": next}),
    ))
}

pub(crate) async fn entry(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
) -> Result<Response, PageError> {
    let details = find_details(&shared, &parse_id(&id)?).await?;
    Ok(json_response(StatusCode::OK, &details_json(&details)))
}

/// Resolves an entry. Only a JSON body is accepted, because a form of another site cannot send one without a preflight.
pub(crate) async fn resolve(
    State(shared): State<Arc<Shared>>,
    visit: Visit,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, PageError> {
    visit.check_resolve()?;
    let media_type = headers.get(CONTENT_TYPE).map(|it| it.as_bytes());
    if !media_type.is_some_and(|it| it.starts_with(b"application/json")) {
        return Err(PageError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "Expected a body of application/json. Nothing was changed.",
        ));
    }
    let object: Map<String, Value> = serde_json::from_slice(&body).map_err(|_| {
        PageError::bad_request(
            "Expected a JSON object with seen, how and reason. Nothing was changed.",
        )
    })?;
    let params = Params::from_json(&object)?;
    let members = match params.get("how") {
        Some("complete") => &MEMBERS[..],
        _ => &MEMBERS[..3],
    };
    params.check_names(members)?;
    let seen = parse_seen(params.get("seen").unwrap_or_default())?;
    if seen.id() != &parse_id(&id)? {
        return Err(PageError::bad_request(
            "The value of seen is that of another entry. Nothing was changed.",
        ));
    }
    let request = act::Request {
        actor: visit.actor,
        source: "api",
        seen,
        decision: Decision::parse(&params)?,
        reason: act::reason(&params)?,
    };
    let outcome = act::resolve(&shared, request).await?;
    let status = if outcome.is_applied {
        StatusCode::OK
    } else {
        StatusCode::CONFLICT
    };
    Ok(json_response(status, &outcome.json()))
}

/// Members of a request that resolves an entry. The last four are those of the response of `complete`.
const MEMBERS: [&str; 7] = [
    "seen",
    "how",
    "reason",
    "status",
    "headers",
    "body",
    "retention",
];

pub(crate) async fn audit(State(shared): State<Arc<Shared>>) -> Result<Response, PageError> {
    let lines = audit_lines(&shared).await?;
    Ok(json_response(StatusCode::OK, &json!({ "lines": lines })))
}
