//! The sources of the counters for the chart of requests.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::scrape::{
    CounterTextError, RequestCounters, ScrapedMetrics, SeriesHistory, add_increases,
};

/// The source of the counters for the chart of requests.
pub(crate) enum MetricsSource {
    /// The metrics of this process.
    Process(Box<ProcessMetrics>),
    /// The metrics of other processes.
    Scraped(ScrapedMetrics),
}

/// The metrics of this process, in the text format of Prometheus.
pub(crate) struct ProcessMetrics {
    render: Box<dyn Fn() -> String + Send + Sync>,
    state: Mutex<ProcessState>,
}

/// The counters of this process so far.
#[derive(Default)]
struct ProcessState {
    /// The error of the last text. `None` if the counters could be read.
    error: Option<CounterTextError>,
    /// The texts so far. `None` before the first one.
    history: Option<SeriesHistory>,
    /// Increases of the counters since the first text.
    totals: [f64; 3],
}

/// Totals of the requests at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Executions, replays and refusals. Each is `None` without data.
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
                let error = metrics.state().error;
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
            state: Mutex::default(),
        }
    }

    fn take_totals(&self) -> Totals {
        // Unwind safe: a text that was not returned is not used, and the closure is shared by reference.
        let text = catch_unwind(AssertUnwindSafe(|| (self.render)()));
        let counters = match text {
            Ok(mut text) => {
                // The last line need not have an end.
                text.push('\n');
                RequestCounters::parse(&text)
            }
            Err(_panic) => Err(CounterTextError::PANICKED),
        };
        let mut state = self.state();
        Totals {
            values: state.record(counters),
            is_partial: false,
        }
    }

    fn state(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessState {
    /// Records the counters of a text, and returns the totals.
    ///
    /// The totals are `None` if this text cannot be read. The total of a counter without a series is 0.
    fn record(&mut self, counters: Result<RequestCounters, CounterTextError>) -> [Option<f64>; 3] {
        self.error = counters.as_ref().err().copied();
        let Ok(counters) = counters else {
            return [None; 3];
        };
        match &mut self.history {
            Some(history) => add_increases(&mut self.totals, history.record(counters)),
            None => self.history = Some(SeriesHistory::new(counters)),
        }
        self.totals.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[test]
    fn unreadable_metrics_have_reason() {
        let text = Arc::new(Mutex::new(String::new()));
        let rendered = Arc::clone(&text);
        let metrics = ProcessMetrics::new(move || rendered.lock().expect("no panic").clone());
        let source = MetricsSource::Process(Box::new(metrics));
        for (line, values, notes) in [
            (
                "a_total 1",
                [None; 3],
                &["No metrics of this process: the response has none of the counters of requests."]
                    [..],
            ),
            (
                "idempotency_granted_total <b>",
                [None; 3],
                &["No metrics of this process: a line of a counter is damaged."],
            ),
            ("idempotency_granted_total 1", [0.0; 3].map(Some), &[]),
            (
                "idempotency_granted_total 4",
                [3.0, 0.0, 0.0].map(Some),
                &[],
            ),
            (
                "idempotency_granted_total five",
                [None; 3],
                &["No metrics of this process: a line of a counter is damaged."],
            ),
            // The first series of a counter is new.
            (
                "idempotency_granted_total 4\nidempotency_refused_total 2",
                [3.0, 0.0, 2.0].map(Some),
                &[],
            ),
        ] {
            line.clone_into(&mut text.lock().expect("no panic"));
            assert_eq!(source.take_totals().values, values, "{line}");
            assert_eq!(source.notes(), notes, "{line}");
        }
    }

    #[test]
    fn panic_of_render_is_gap() {
        let texts = AtomicUsize::new(0);
        let metrics = ProcessMetrics::new(move || {
            let text = texts.fetch_add(1, Ordering::Relaxed);
            assert_ne!(text, 1, "the intended panic");
            format!("idempotency_granted_total {text}\n")
        });
        let source = MetricsSource::Process(Box::new(metrics));
        assert_eq!(source.take_totals().values, [0.0; 3].map(Some));
        assert_eq!(source.take_totals().values, [None; 3]);
        let note = "No metrics of this process: the function that renders them panicked.";
        assert_eq!(source.notes(), [note]);
        assert_eq!(source.take_totals().values, [2.0, 0.0, 0.0].map(Some));
        assert!(source.notes().is_empty());
    }

    #[test]
    fn returned_series_of_process_has_no_peak() {
        let samples = AtomicUsize::new(0);
        let source = ProcessMetrics::new(move || {
            let sample = samples.fetch_add(1, Ordering::Relaxed);
            let first = "idempotency_granted_total{name=\"a\"} 900\n";
            let first = if sample == 1 { "" } else { first };
            format!("{first}idempotency_granted_total{{name=\"b\"}} {sample}\n")
        });
        for expected in [0.0, 1.0, 2.0] {
            assert_eq!(source.take_totals().values[0], Some(expected));
        }
    }
}
