//! The routes of the console.

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware,
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use http::StatusCode;
use tower_http::csrf::{CsrfLayer, ProtectionError};

use crate::{
    api, assets,
    console::Shared,
    error::PageError,
    guard::guard,
    metrics,
    pages::{audit, body, bulk, entries, entry, events, find, overview, resolve},
};

pub(crate) fn router(shared: Arc<Shared>, csrf: CsrfLayer) -> Router {
    let csrf = csrf.with_rejection_response(|_: ProtectionError| -> Response {
        PageError::forbidden("The request came from another site. Nothing was changed.")
            .into_response()
    });
    Router::new()
        .route("/", get(overview::overview))
        // A nested router does not accept its prefix with a slash at the end, so links lead here.
        .route("/overview", get(overview::overview))
        .route("/entries", get(entries::entries))
        .route("/entries/{id}", get(entry::entry))
        .route("/entries/{id}/body", get(body::body))
        .route(
            "/entries/{id}/resolve",
            get(resolve::confirm).post(resolve::resolve),
        )
        .route("/resolve", get(bulk::confirm).post(bulk::resolve))
        .route("/find", get(find::form).post(find::find))
        .route("/audit", get(audit::audit))
        .route("/metrics", get(metrics::metrics))
        .route("/events", get(events::events))
        .route("/assets/{name}", get(assets::asset))
        .route("/api/v1/summary", get(api::summary))
        .route("/api/v1/entries", get(api::entries))
        .route("/api/v1/entries/{id}", get(api::entry))
        .route("/api/v1/entries/{id}/resolve", post(api::resolve))
        .route("/api/v1/audit", get(api::audit))
        .fallback(async || PageError::not_found("There is no such page."))
        .method_not_allowed_fallback(async || {
            PageError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "This page does not accept the method.",
            )
        })
        .layer(csrf)
        .layer(DefaultBodyLimit::max(MAX_FORM))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(shared)
}

/// Largest form, in bytes. A recorded response that an operator types is the largest part.
const MAX_FORM: usize = 1024 * 1024;
