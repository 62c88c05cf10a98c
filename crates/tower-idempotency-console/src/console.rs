use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use axum::Router;
use http::{Uri, request::Parts};
use tower_http::csrf::CsrfLayer;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    inspect::{InspectError, Inspector},
};

use tokio::sync::watch;

use crate::{
    access::{Access, Hook},
    audit::AuditLog,
    error::PageError,
    live::Live,
    metrics::Counters,
    routes,
    scrape::ScrapedMetrics,
    source::{MetricsSource, ProcessMetrics},
};

/// Settings of a console. [`into_router`](Self::into_router) turns them into a router.
#[must_use = "a console does nothing until it is a router"]
pub struct Console {
    shared: Shared,
    csrf: CsrfLayer,
    shutdown: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

/// Returns the layer of the service.
type LayerSource = Box<dyn Fn() -> Option<IdempotencyLayer> + Send + Sync>;

/// State of the console, which all requests share.
pub(crate) struct Shared {
    pub(crate) inspector: Inspector,
    pub(crate) access: Hook,
    pub(crate) audit: Option<AuditLog>,
    /// The layer of the service, which finds entries by their keys.
    pub(crate) layer: Option<LayerSource>,
    pub(crate) title: String,
    pub(crate) store_name: String,
    pub(crate) refresh: Duration,
    pub(crate) window: Duration,
    pub(crate) timeout: Duration,
    pub(crate) metrics: Option<MetricsSource>,
    pub(crate) live: Live,
    pub(crate) counters: Counters,
    pub(crate) changes: Changes,
}

/// The running changes of a console, from [`Console::changes`].
#[derive(Clone, Debug)]
pub struct Changes(watch::Sender<usize>);

/// Counts a change as running until it is dropped.
pub(crate) struct RunningChange(Changes);

impl Changes {
    /// Counts a change that begins.
    pub(crate) fn begin(&self) -> RunningChange {
        self.0.send_modify(|running| *running += 1);
        RunningChange(self.clone())
    }

    /// Waits until no change is running.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, there are no effects.
    pub async fn finished(&self) {
        // The sender is alive, so the wait cannot fail.
        self.0
            .subscribe()
            .wait_for(|running| *running == 0)
            .await
            .ok();
    }
}

impl Drop for RunningChange {
    fn drop(&mut self) {
        self.0.0.send_modify(|running| *running -= 1);
    }
}

impl Console {
    /// Creates a console for the entries of a store.
    ///
    /// `access` decides for each request what its sender may do. It sees the head of the request with the extensions that
    /// the authentication of the application has set, and runs before anything else. It must not block. Without an [audit
    /// log](Self::with_audit_log) nothing can be resolved, whatever it returns.
    pub fn new(
        inspector: Inspector,
        access: impl Fn(&Parts) -> Access + Send + Sync + 'static,
    ) -> Self {
        Self {
            shared: Shared {
                inspector,
                access: Box::new(access),
                audit: None,
                layer: None,
                title: "Idempotency".to_owned(),
                store_name: "store".to_owned(),
                refresh: Duration::from_secs(5),
                window: Duration::from_secs(60 * 60),
                timeout: Duration::from_secs(10),
                metrics: None,
                live: Live::default(),
                counters: Counters::default(),
                changes: Changes(watch::Sender::new(0)),
            },
            csrf: CsrfLayer::new(),
            shutdown: None,
        }
    }

    /// Sets the log to which each change is written, before and after it: a file, a table of a SQL store, or both. Default:
    /// none, and nothing can be resolved.
    ///
    /// Calls for the table have the [timeout of the log](AuditLog::with_timeout). A timeout that is too short rejects each
    /// change.
    pub fn with_audit_log(mut self, log: AuditLog) -> Self {
        self.shared.audit = Some(log);
        self
    }

    /// Sets the layer of the service, so that entries can be found by a key and its principal. Default: entries are found by
    /// their ids.
    ///
    /// With the settings of another service, each key seems to have no entry.
    pub fn with_layer(self, layer: IdempotencyLayer) -> Self {
        self.with_current_layer(move || Some(layer.clone()))
    }

    /// Sets a function that returns the layer of the service, for a service whose settings change. See
    /// [`with_layer`](Self::with_layer). While it returns `None`, entries are found by their ids.
    pub fn with_current_layer(
        mut self,
        layer: impl Fn() -> Option<IdempotencyLayer> + Send + Sync + 'static,
    ) -> Self {
        self.shared.layer = Some(Box::new(layer));
        self
    }

    /// Sets the heading of each page. Default: `Idempotency`. Name the service, so that operators do not mistake one console
    /// for another.
    pub fn with_title(mut self, title: impl Into<String>) -> Self {
        self.shared.title = title.into();
        self
    }

    /// Sets the name of the store that pages show, such as `postgres`. Default: `store`. It must not contain a password.
    pub fn with_store_name(mut self, name: impl Into<String>) -> Self {
        self.shared.store_name = name.into();
        self
    }

    /// Sets the time between two queries of the store while browsers watch, from 100 ms. Default: 5 s.
    ///
    /// All browsers share one query. A short time loads the store; a long one shows old counts.
    pub fn with_refresh(mut self, period: Duration) -> Self {
        self.shared.refresh = period.max(Duration::from_millis(100));
        self
    }

    /// Sets the time that the charts show, from one minute. Default: 1 h.
    ///
    /// The console takes 60 samples in this time, also while no browser watches. With
    /// [`with_scraped_metrics`](Self::with_scraped_metrics), request the metrics at least once between two samples. With fewer
    /// requests, the points alternate between zero and a rate that is too high.
    pub fn with_chart_window(mut self, window: Duration) -> Self {
        self.shared.window = window.max(Duration::from_secs(60));
        self
    }

    /// Sets the longest time of one call of the store. Default: 10 s. A resolution that takes longer has an unknown outcome.
    pub fn with_store_timeout(mut self, timeout: Duration) -> Self {
        self.shared.timeout = timeout;
        self
    }

    /// Sets the source of the counters for the chart of requests: the metrics of this process in the text format of Prometheus.
    /// Default: none, and the chart shows that there is no data.
    ///
    /// A text without these counters, or with a damaged line of them, is a gap in the chart, and the page shows the reason. If
    /// `render` panics, the page shows that.
    ///
    /// Counters that fall and series that come and go count as described at [`ScrapedMetrics`].
    /// Replaces [`with_scraped_metrics`](Self::with_scraped_metrics).
    pub fn with_metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.shared.metrics = Some(MetricsSource::Process(Box::new(ProcessMetrics::new(
            render,
        ))));
        self
    }

    /// Sets the source of the counters for the chart of requests: the metrics of other processes, such as all replicas of a
    /// service. Default: none. Replaces [`with_metrics`](Self::with_metrics).
    ///
    /// The program requests the metrics. See [`scrape`](crate::scrape).
    pub fn with_scraped_metrics(mut self, metrics: ScrapedMetrics) -> Self {
        self.shared.metrics = Some(MetricsSource::Scraped(metrics));
        self
    }

    /// Accepts changes that another origin sends, such as `https://ops.example.com`. Default: none.
    ///
    /// A proxy that changes `Host` needs its own origin here, unless browsers send `Sec-Fetch-Site`. Every page of a trusted
    /// origin can resolve entries in the name of an operator.
    ///
    /// # Errors
    ///
    /// [`OriginError`] if the text is not `http://` or `https://`, a host and at most a port.
    pub fn with_trusted_origin(mut self, origin: &str) -> Result<Self, OriginError> {
        self.csrf = self
            .csrf
            .add_trusted_origin(origin)
            .map_err(|_| OriginError(()))?;
        Ok(self)
    }

    /// Ends the event streams of all browsers when the future completes. Default: they end with their connections.
    ///
    /// A server that shuts down gracefully waits for open responses. Without this it waits for browsers.
    pub fn with_shutdown(mut self, shutdown: impl Future<Output = ()> + Send + 'static) -> Self {
        self.shutdown = Some(Box::pin(shutdown));
        self
    }

    /// Returns the changes of this console that are running, to wait for them before the process ends.
    ///
    /// A change continues in a task after its browser has disconnected. If the process ends before, the audit log has an
    /// intent without an outcome.
    #[must_use]
    pub fn changes(&self) -> Changes {
        self.shared.changes.clone()
    }

    /// Creates the router, and starts the task that samples the store for the charts. The task ends with the router.
    ///
    /// Nest it with [`Router::nest_service`], which also accepts the prefix with a slash at its end, or with
    /// [`Router::nest`]. All links are relative, so a proxy may change the prefix.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    pub fn into_router(self) -> Router {
        let shared = Arc::new(self.shared);
        Live::spawn(&shared);
        if let Some(shutdown) = self.shutdown {
            let shared = Arc::downgrade(&shared);
            tokio::spawn(async move {
                shutdown.await;
                if let Some(shared) = shared.upgrade() {
                    shared.live.close();
                }
            });
        }
        routes::router(shared, self.csrf)
    }
}

impl Shared {
    /// Makes a call of the store, within the timeout.
    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, PageError> {
        match tokio::time::timeout(self.timeout, call).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(PageError::timeout(self.timeout)),
        }
    }

    /// Returns the layer of the service, if it is known.
    pub(crate) fn layer(&self) -> Option<IdempotencyLayer> {
        self.layer.as_ref().and_then(|layer| layer())
    }

    /// Returns the layer that encodes responses.
    pub(crate) fn encoder(&self) -> IdempotencyLayer {
        self.layer()
            .unwrap_or_else(|| IdempotencyLayer::new(MemoryStore::new()))
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console")
            .field("title", &self.shared.title)
            .field("store", &self.shared.store_name)
            .field("audit", &self.shared.audit)
            .finish_non_exhaustive()
    }
}

/// Error of a text that is no origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OriginError(());

impl fmt::Display for OriginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected an origin as in https://ops.example.com, found something else")
    }
}

impl std::error::Error for OriginError {}

/// Returns the relative path from the page of a request to the root of the console: `./`, `../` or the last segment of the
/// prefix.
///
/// `original` is the path that the client sent, `inner` the path below the prefix.
pub(crate) fn base(original: &Uri, inner: &Uri) -> String {
    let (original, inner) = (original.path(), inner.path());
    if inner == "/" && !original.ends_with('/') {
        let segment = original.rsplit('/').next().unwrap_or_default();
        return format!("./{segment}/");
    }
    match inner.matches('/').count() {
        0 | 1 => "./".to_owned(),
        depth => "../".repeat(depth - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_leads_to_root() {
        for (original, inner, expected) in [
            ("/", "/", "./"),
            ("/entries", "/entries", "./"),
            ("/ops/console", "/", "./console/"),
            ("/ops/console/", "/", "./"),
            ("/ops/console/entries", "/entries", "./"),
            ("/ops/console/entries/ab", "/entries/ab", "../"),
            ("/ops/entries/ab/resolve", "/entries/ab/resolve", "../../"),
            ("/ops/entries/", "/entries/", "../"),
        ] {
            let uri = |path: &'static str| Uri::from_static(path);
            assert_eq!(base(&uri(original), &uri(inner)), expected, "{original}");
        }
    }
}
