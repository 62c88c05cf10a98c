//! Metrics, events and spans.

mod alarms;
mod drain;
mod layer_names;
mod observability;
mod outages;
mod registration;
mod tier;
