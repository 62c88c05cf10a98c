//! The outermost layer: access, security headers, and the rendering of errors.

use std::sync::Arc;

use askama::Template;
use axum::{
    body::Body,
    extract::{FromRequestParts, OriginalUri, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use http::{
    HeaderName, HeaderValue, StatusCode,
    header::{self, CONTENT_TYPE},
    request::Parts,
};
use serde_json::json;

use crate::{
    access::Access,
    assets,
    console::{Shared, base},
    describe::json_text,
    error::PageError,
    pages::html,
};

/// The visitor and the place of the console, for templates.
#[derive(Clone, Debug)]
pub(crate) struct Visit {
    /// Relative path to the root of the console.
    pub(crate) base: String,
    pub(crate) actor: Box<str>,
    /// `true` if the visitor has the right and the console an audit log.
    pub(crate) may_resolve: bool,
    pub(crate) has_audit: bool,
    pub(crate) title: String,
    pub(crate) store: String,
    pub(crate) style: &'static str,
    pub(crate) script: &'static str,
    pub(crate) icon: &'static str,
    /// Seconds after which a page without scripts reloads. 0 for never.
    pub(crate) reload: u32,
}

impl<S: Sync> FromRequestParts<S> for Visit {
    type Rejection = PageError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, PageError> {
        let visit = parts.extensions.get::<Self>();
        visit
            .cloned()
            .ok_or_else(|| PageError::forbidden("You have no access to this console."))
    }
}

impl Visit {
    /// Returns the URL of the counts. Links of their fragment are relative to this page.
    pub(crate) fn events(&self) -> String {
        let segment = self.base.trim_start_matches("./").trim_end_matches('/');
        match segment {
            "" => format!("{}events", self.base),
            segment => format!("{}events?from={segment}", self.base),
        }
    }

    /// Returns an error unless the visitor may resolve entries.
    pub(crate) fn check_resolve(&self) -> Result<(), PageError> {
        if !self.has_audit {
            return Err(PageError::forbidden(
                "This console has no audit log, so nothing can be resolved.",
            ));
        }
        if !self.may_resolve {
            return Err(PageError::forbidden(
                "You may read these pages, but not resolve entries. Nothing was changed.",
            ));
        }
        Ok(())
    }
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage<'a> {
    visit: &'a Visit,
    status: StatusCode,
    message: &'a str,
}

pub(crate) async fn guard(
    State(shared): State<Arc<Shared>>,
    OriginalUri(original): OriginalUri,
    req: Request,
    next: Next,
) -> Response {
    let inner = req.uri().clone();
    if inner.path() == "/healthz" {
        return with_headers("ok\n".into_response());
    }
    let (mut parts, body) = req.into_parts();
    let access = (shared.access)(&parts);
    let (actor, may_resolve) = match access {
        Access::None => (None, false),
        Access::Read { actor } => (Some(actor), false),
        Access::Resolve { actor } => (Some(actor), true),
    };
    let is_allowed = actor.is_some();
    let refresh = inner.query().unwrap_or_default();
    let reload = refresh.split('&').any(|pair| pair == "reload=1");
    let seconds = u32::try_from(shared.refresh.as_secs()).unwrap_or(u32::MAX);
    let visit = Visit {
        base: base(&original, &inner),
        actor: actor.unwrap_or_default(),
        may_resolve: may_resolve && shared.audit.is_some(),
        has_audit: shared.audit.is_some(),
        title: shared.title.clone(),
        store: shared.store_name.clone(),
        style: assets::style_name(),
        script: assets::script_name(),
        icon: assets::icon_name(),
        reload: if reload { seconds.max(1) } else { 0 },
    };
    let res = if is_allowed {
        parts.extensions.insert(visit.clone());
        next.run(Request::from_parts(parts, body)).await
    } else {
        PageError::forbidden("You have no access to this console.").into_response()
    };
    let is_api = inner.path().starts_with("/api/");
    let res = match res.extensions().get::<PageError>() {
        Some(error) if is_api => json_error(error.status, &error.message),
        Some(error) if !is_allowed => plain_text(error),
        Some(error) => {
            let page = ErrorPage {
                visit: &visit,
                status: error.status,
                message: &error.message,
            };
            html(error.status, &page)
        }
        None if is_api => with_json_error(res),
        None => res,
    };
    shared.counters.count_response(res.status());
    with_headers(res)
}

fn plain_text(error: &PageError) -> Response {
    let plain = [(CONTENT_TYPE, "text/plain; charset=utf-8")];
    let text = format!("{}\n", error.message);
    (error.status, plain, text).into_response()
}

/// Replaces an error of the framework, such as 413, so that each error of the API is JSON.
fn with_json_error(res: Response) -> Response {
    let status = res.status();
    let media_type = res.headers().get(CONTENT_TYPE);
    let is_json = media_type.is_some_and(|it| it.as_bytes().starts_with(b"application/json"));
    if is_json || !(status.is_client_error() || status.is_server_error()) {
        return res;
    }
    let reason = status.canonical_reason().unwrap_or("error");
    json_error(status, reason)
}

fn json_error(status: StatusCode, message: &str) -> Response {
    let body = json_text(&json!({ "error": message }));
    (status, [(CONTENT_TYPE, "application/json")], body).into_response()
}

/// Adds the headers that every response has. A response may have a stricter policy of its own.
fn with_headers(mut res: Response<Body>) -> Response {
    let headers = res.headers_mut();
    for (name, value) in HEADERS {
        if !headers.contains_key(&name) {
            headers.insert(name, HeaderValue::from_static(value));
        }
    }
    res
}

const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "same-origin"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];
