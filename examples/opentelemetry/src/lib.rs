//! A service whose traces and metrics show retries: a replay links to the trace of the execution that it repeats.

mod app;
mod serve;
mod telemetry;

pub use self::{
    app::app,
    serve::{GRACE, serve},
    telemetry::{TelemetryError, install_metrics, install_traces},
};
