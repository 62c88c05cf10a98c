//! The sources of the counters for the chart of requests.

use crate::scrape::{RequestCounters, ScrapedMetrics};

/// The source of the counters for the chart of requests.
pub(crate) enum MetricsSource {
    /// The metrics of this process, in the text format of Prometheus.
    Process(Box<dyn Fn() -> String + Send + Sync>),
    /// The metrics of other processes.
    Scraped(ScrapedMetrics),
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
            Self::Process(render) => {
                let mut text = render();
                // The last line need not have an end.
                text.push('\n');
                let counters = RequestCounters::parse(&text);
                Totals {
                    values: counters.map_or([None; 3], |it| it.totals()),
                    is_partial: false,
                }
            }
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
            Self::Process(_) => Vec::new(),
            Self::Scraped(metrics) => metrics.notes(),
        }
    }
}
