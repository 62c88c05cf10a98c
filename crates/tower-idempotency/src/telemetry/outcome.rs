//! The outcome of a request, as a field of the span in which the future of the layer is polled.

use http::Response;
use tracing::{Span, level_filters::LevelFilter};

use crate::layer_name::LayerName;

/// The field with the outcome. Subscribers get it if the span declares it.
const FIELD: &str = "idempotency.outcome";

/// The field with the name of the layer.
const LAYER_FIELD: &str = "idempotency.layer";

/// The outcome of a request, on its way to the span of the caller. No caller sees it.
#[derive(Clone, Copy)]
struct Outcome(&'static str);

/// Sets the outcome of a request that the layer rejects. The span of the caller may be another one than the current one.
pub(crate) fn set_rejected<B>(res: &mut Response<B>, outcome: &'static str) {
    res.extensions_mut().insert(Outcome(outcome));
}

/// Sets the outcome of a request that gets a recorded response.
pub(crate) fn set_replayed<B>(res: &mut Response<B>) {
    // Without a span, the response needs no memory for extensions.
    if current_span().is_some() {
        res.extensions_mut().insert(Outcome("replayed"));
    }
}

/// Records the outcome and the name of the layer in the current span. A response without another outcome is that of the
/// handler.
pub(crate) fn record_outcome<B>(layer: &LayerName, res: &mut Response<B>) {
    let outcome = res.extensions_mut().remove::<Outcome>();
    let Some(span) = current_span() else {
        return;
    };
    let Outcome(outcome) = outcome.unwrap_or(Outcome("executed"));
    span.record(FIELD, outcome);
    if let Some(layer) = layer.as_str() {
        span.record(LAYER_FIELD, layer);
    }
}

/// Returns the current span, if there is one. Without a subscriber, there is none to query.
fn current_span() -> Option<Span> {
    let has_subscriber = LevelFilter::current() > LevelFilter::OFF;
    has_subscriber
        .then(Span::current)
        .filter(|span| !span.is_disabled())
}
