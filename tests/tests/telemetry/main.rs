//! Metrics, events and spans.

mod alarms;
mod bad_records;
mod drain;
mod layer_names;
mod observability;
mod outages;
mod panicking_recorder;
mod registration;
mod rejections;
mod tier;
