//! Metrics, events and spans.

mod observability;
