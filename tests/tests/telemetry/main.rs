//! Metrics, events and spans.

mod alarms;
mod observability;
mod outages;
mod registration;
mod tier;
