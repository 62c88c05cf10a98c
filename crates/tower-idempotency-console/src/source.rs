//! The sources of the counters for the chart of requests.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::scrape::{CounterTextError, RequestCounters, ScrapedMetrics};

/// The source of the counters for the chart of requests.
pub(crate) enum MetricsSource {
    /// The metrics of this process.
    Process(ProcessMetrics),
    /// The metrics of other processes.
    Scraped(ScrapedMetrics),
}

/// The metrics of this process, in the text format of Prometheus.
pub(crate) struct ProcessMetrics {
    render: Box<dyn Fn() -> String + Send + Sync>,
    /// The error of the last text. `None` if the counters could be read.
    error: Mutex<Option<CounterTextError>>,
}

/// Totals of the requests at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Executions, replays and refusals. `None` without data.
    pub(crate) values: [Option<f64>; 3],
    /// `true` if requests of an endpoint are missing.
    pub(crate) is_partial: bool,
}

impl MetricsSource {
    /// Returns the totals for a sample of the chart.
    pub(crate) fn take_totals(&self) -> Totals {
        match self {
            Self::Process(metrics) => metrics.take_totals(),
            Self::Scraped(metrics) => metrics.take_totals(),
        }
    }

    /// Returns `true` once a sample can have data.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Process(_) => true,
            Self::Scraped(metrics) => metrics.is_ready(),
        }
    }

    /// Returns sentences about data that is missing now.
    pub(crate) fn notes(&self) -> Vec<String> {
        match self {
            Self::Process(metrics) => {
                let error = *metrics.error();
                let note = error.map(|error| format!("No metrics of this process: {error}."));
                note.into_iter().collect()
            }
            Self::Scraped(metrics) => metrics.notes(),
        }
    }
}

impl ProcessMetrics {
    /// Creates a source from a function that returns the text.
    pub(crate) fn new(render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self {
            render: Box::new(render),
            error: Mutex::new(None),
        }
    }

    fn take_totals(&self) -> Totals {
        let mut text = (self.render)();
        // The last line need not have an end.
        text.push('\n');
        let counters = RequestCounters::parse(&text);
        *self.error() = counters.as_ref().err().copied();
        Totals {
            values: counters.map_or([None; 3], |it| it.totals()),
            is_partial: false,
        }
    }

    fn error(&self) -> MutexGuard<'_, Option<CounterTextError>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn unreadable_metrics_have_reason() {
        let text = Arc::new(Mutex::new(String::new()));
        let rendered = Arc::clone(&text);
        let source = MetricsSource::Process(ProcessMetrics::new(move || {
            rendered.lock().expect("no panic").clone()
        }));
        for (line, value, notes) in [
            (
                "a_total 1",
                None,
                &["No metrics of this process: the response has none of the counters of requests."]
                    [..],
            ),
            (
                "idempotency_granted_total <b>",
                None,
                &["No metrics of this process: a line of a counter is damaged."],
            ),
            ("idempotency_granted_total 1", Some(1.0), &[]),
        ] {
            line.clone_into(&mut text.lock().expect("no panic"));
            assert_eq!(source.take_totals().values[0], value, "{line}");
            assert_eq!(source.notes(), notes, "{line}");
        }
    }
}
