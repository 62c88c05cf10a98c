//! The console on the admin port.

use std::{sync::Arc, time::Duration};

use axum::{Extension, Router, extract::ConnectInfo, middleware};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::time::timeout;
use tower_idempotency::inspect::Inspector;
use tower_idempotency_console::{
    Access, Changes, Console,
    audit::{AuditError, AuditLog},
};
use tower_idempotency_proxy::{ConsoleConfig, Proxy};

use crate::commands::serve::authentication::{self, Authentication, ListenerKind, Operator, Peer};

/// A console that is served until its proxy has drained.
pub(super) struct AdminConsole {
    /// The routes below `/console`.
    pub(super) router: Router,
    changes: Changes,
}

impl AdminConsole {
    /// Creates the console of a proxy. The rules of access are those of `idempotency serve`.
    ///
    /// Returns an error only if a setting of the audit log is wrong. Makes no call of the store.
    pub(super) async fn new(
        config: &ConsoleConfig,
        proxy: &Proxy,
        recorder: PrometheusHandle,
    ) -> Result<Self, AuditError> {
        let store = proxy.store();
        let can_resolve = config.can_resolve();
        let console = Console::new(Inspector::new(store.clone()), move |head| {
            match head.extensions.get::<Operator>() {
                None => Access::None,
                Some(operator) if can_resolve => Access::resolve(&*operator.0),
                Some(operator) => Access::read(&*operator.0),
            }
        });
        let mut console = console
            .with_current_layer(proxy.current_layer())
            .with_title(config.title())
            .with_store_name(store.name())
            .with_store_timeout(STORE_TIMEOUT)
            .with_metrics(move || recorder.render())
            .with_shutdown(proxy.drained());
        let log = match (config.has_audit_table(), config.audit_file()) {
            (true, None) => Some(AuditLog::in_table(store)?.with_timeout(STORE_TIMEOUT)),
            (true, Some(file)) => {
                let table = AuditLog::in_table(store)?.with_timeout(STORE_TIMEOUT);
                Some(table.with_file(file))
            }
            (false, file) => file.map(AuditLog::new),
        };
        if let Some(log) = log {
            // A file that cannot be written would reject each decision.
            if can_resolve {
                log.check().await?;
            }
            console = console.with_audit_log(log);
        }
        let changes = console.changes();
        // The socket of systemd may have another address than the configuration.
        let listener = match proxy.admin_address() {
            Some(address) if address.ip().is_loopback() => ListenerKind::Loopback,
            Some(_) | None => ListenerKind::Network,
        };
        let token = config.token().map(|token| token.as_bytes().to_vec());
        let authentication = Arc::new(Authentication::new(token, "unknown", listener));
        let console = console
            .into_router()
            .layer(middleware::from_fn_with_state(
                authentication,
                authentication::check,
            ))
            .layer(Extension(ConnectInfo(Peer(None))));
        Ok(Self {
            router: Router::new().nest_service("/console", console),
            changes,
        })
    }

    /// Returns a future that waits for the changes that are running, so that the audit log gets their outcomes.
    pub(super) fn changes(&self) -> impl Future<Output = ()> + Send + use<> {
        let changes = self.changes.clone();
        async move {
            let _ = timeout(CHANGE_LIMIT, changes.finished()).await;
        }
    }
}

/// Longest time of one call of the store.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
/// A change makes two calls of the store, and two of the audit table. It takes the lock of the audit file twice, for at most five
/// seconds each.
const CHANGE_LIMIT: Duration = Duration::from_secs(51);
