//! Setters about metrics, events and spans.

use std::sync::Arc;

use crate::{
    error::ConfigError, layer::IdempotencyLayer, layer_name::LayerName, telemetry::Warnings,
};

/// Signals: metrics, events and spans for operators.
impl IdempotencyLayer {
    /// Sets the name of the layer in its metrics and events. Default: none.
    ///
    /// If a service has several layers, the name shows which one counted:
    ///
    /// - Each metric of the layer has the label `layer` with the name. With the feature `metrics`, the setter registers all
    ///   of them with value 0.
    /// - Each event of the layer, and the span `idempotency`, has the field `layer`.
    /// - The span of the caller gets the field `idempotency.layer` together with `idempotency.outcome`, if it declares it.
    ///
    /// The name also applies to [`run_once`](Self::run_once), [`items`](Self::items), [`take_over`](Self::take_over) and
    /// calls of [`with_grpc`](Self::with_grpc). It is not stored, and no client sees it.
    ///
    /// A clone keeps the name until it gets another one. Clones with other names share the limits of the layer, and each
    /// logs its own warnings. The gauge `idempotency_in_flight` of a name counts the requests of its clones only.
    ///
    /// The metrics of stores and tiers have no name, and neither has a change of an
    /// [`EnforcementSwitch`](crate::EnforcementSwitch): several layers may share them.
    ///
    /// Each name adds about 200 series to a scrape of Prometheus. Do not derive names from requests, or the series grow without
    /// a bound. If two layers have one name, their metrics are added up.
    ///
    /// # Errors
    ///
    /// Returns an error unless the name has 1 to 64 characters of `a-z`, `A-Z`, `0-9`, `_`, `.` and `-`.
    ///
    /// ```
    /// use axum::{Router, routing::post};
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let app: Router = Router::new()
    ///     .route("/payments", post(async || "paid"))
    ///     .route_layer(layer.clone().with_name("payments")?)
    ///     .merge(
    ///         Router::new()
    ///             .route("/refunds", post(async || "refunded"))
    ///             .route_layer(layer.with_name("refunds")?),
    ///     );
    /// # drop(app);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_name(self, name: &str) -> Result<Self, ConfigError> {
        let layer = LayerName::new(name)?;
        Ok(self.set(|config| config.response.warnings = Arc::new(Warnings::new(layer))))
    }
}
