//! The page at `/`, and the console at `/console`.

use std::{env, net::IpAddr, path::PathBuf, process, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{header, request::Parts, uri::Authority},
    response::IntoResponse,
    routing::get,
};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::Notify;
use tower_idempotency::{IdempotencyLayer, inspect::Inspector};
use tower_idempotency_any::AnyStore;
use tower_idempotency_console::{Access, Console, audit::AuditLog};

/// Returns the routes of the page.
pub(crate) fn routes() -> Router {
    let html = include_str!("../page/index.html");
    let style = include_str!("../page/playground.css");
    let script = include_str!("../page/playground.js");
    Router::new()
        .route("/", get(async || file("text/html; charset=utf-8", html)))
        .route(
            "/page/playground.css",
            get(async || file("text/css; charset=utf-8", style)),
        )
        .route(
            "/page/playground.js",
            get(async || file("text/javascript; charset=utf-8", script)),
        )
}

fn file(media_type: &'static str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, media_type),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, text)
}

/// Returns the console. On loopback each visitor is an operator; elsewhere the console is read-only.
pub(crate) fn console(
    store: AnyStore,
    layer: IdempotencyLayer,
    recorder: PrometheusHandle,
    listens_on: IpAddr,
    stop: Arc<Notify>,
) -> Router {
    let name = store.name();
    let console = Console::new(Inspector::new(store), move |head| {
        if !listens_on.is_loopback() {
            Access::read("visitor")
        } else if has_loopback_host(head) {
            Access::resolve("playground")
        } else {
            // The name of another site may lead to loopback.
            Access::None
        }
    });
    let console = console
        .with_title("Playground")
        .with_store_name(name)
        .with_layer(layer)
        .with_audit_log(AuditLog::new(audit_file()))
        .with_refresh(Duration::from_secs(2))
        .with_chart_window(Duration::from_secs(600))
        .with_metrics(move || recorder.render())
        .with_shutdown(async move { stop.notified().await });
    Router::new().nest_service("/console", console.into_router())
}

/// Returns the audit log of this process, which it deletes at its end.
pub(crate) fn audit_file() -> PathBuf {
    env::temp_dir().join(format!("playground-audit-{}.jsonl", process::id()))
}

fn has_loopback_host(head: &Parts) -> bool {
    let host = head.headers.get(header::HOST);
    let host = host.and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    let host = host.or_else(|| head.uri.authority().cloned());
    host.is_some_and(|authority| {
        let host = authority.host().trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|it| it.is_loopback())
    })
}
