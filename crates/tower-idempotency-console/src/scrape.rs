//! Counters of requests from the metrics of other processes, such as the replicas of a service.
//!
//! The program requests the metrics, with a client and limits of its own. [`CounterReader`] reads the counters from a response
//! in the text format of Prometheus, and [`Endpoint::record`] adds them to the chart of requests. `idempotency serve --metrics`
//! does so.
//!
//! ```
//! use tower_idempotency_console::scrape::{CounterReader, ScrapedMetrics};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let metrics = ScrapedMetrics::new();
//! let replica = metrics.add_endpoint("http://10.0.0.7:9464");
//! // The parts of a response, as they arrive.
//! let mut reader = CounterReader::new();
//! for part in ["idempotency_granted_to", "tal 7\n"] {
//!     reader.read(part.as_bytes())?;
//! }
//! replica.record(Ok(reader.finish()?));
//! // A request that failed.
//! replica.record(Err("no connection".to_owned()));
//! # Ok(())
//! # }
//! ```

mod text;

use std::{
    array,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

pub use self::text::{CounterReader, CounterTextError, RequestCounters};
use crate::{
    describe::{printable, time},
    source::Totals,
};

/// Number of failures in a row after which an endpoint has no data. The increase until its next response is unknown.
const MAX_FAILURES: u32 = 3;
/// Longest reason of a failure, in characters.
const MAX_REASON: usize = 200;
/// Limit of a total: that of one counter.
const MAX_TOTAL: f64 = text::MAX_VALUE;

/// The counters of all endpoints of a service, for [`Console::with_scraped_metrics`](crate::Console::with_scraped_metrics).
/// Clones share them.
///
/// The chart shows the sum of the endpoints:
///
/// - The first response of an endpoint has no increase, since its time is unknown.
/// - If a counter of an endpoint fell, a restart has reset all of them, and each has increased by its value.
/// - After three failures in a row the endpoint has no data. Its next response counts as the first one.
/// - The page names each endpoint whose last request failed, since when, and why. It also shows the number of points that are
///   without an endpoint. While no endpoint has data, the chart has a gap.
#[derive(Clone, Debug, Default)]
pub struct ScrapedMetrics(Arc<Mutex<Scraped>>);

/// An endpoint of [`ScrapedMetrics`], for the responses to its requests.
#[derive(Clone, Debug)]
pub struct Endpoint {
    metrics: ScrapedMetrics,
    index: usize,
}

#[derive(Debug, Default)]
struct Scraped {
    endpoints: Vec<ScrapedEndpoint>,
    /// Increases of the counters of all endpoints. A total that reaches [`MAX_TOTAL`] begins at zero again.
    totals: [f64; 3],
    /// `true` if an endpoint has lost its data since the last sample.
    has_lost: bool,
}

#[derive(Debug)]
struct ScrapedEndpoint {
    name: String,
    /// The last response. `None` before the first one, and after [`MAX_FAILURES`].
    last: Option<RequestCounters>,
    /// Number of failures since the last response.
    failures: u32,
    /// The failures since the last response, if there are any.
    outage: Option<Outage>,
}

/// The failures of an endpoint since its last response.
#[derive(Debug)]
struct Outage {
    since: SystemTime,
    /// The reason of the last failure.
    reason: String,
}

/// The beginning or the end of an outage, for the log.
enum Event {
    Began { endpoint: String, reason: String },
    Ended { endpoint: String },
}

impl ScrapedMetrics {
    /// Creates metrics without endpoints.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an endpoint. The chart has no data until each endpoint has a [result](Endpoint::record).
    ///
    /// Pages and events show the name, so it must not contain credentials. Add each process once: the requests of an endpoint
    /// that is added twice are counted twice. An address at which several processes respond in turn has no meaningful counters.
    ///
    /// An endpoint stays until all clones of the metrics are dropped. For replicas that come and go, create a new
    /// `ScrapedMetrics` and router.
    #[must_use]
    pub fn add_endpoint(&self, name: &str) -> Endpoint {
        let mut scraped = self.lock();
        scraped.endpoints.push(ScrapedEndpoint {
            name: printable(name),
            last: None,
            failures: 0,
            outage: None,
        });
        Endpoint {
            metrics: self.clone(),
            index: scraped.endpoints.len() - 1,
        }
    }

    /// Returns the totals for a sample of the chart.
    pub(crate) fn take_totals(&self) -> Totals {
        let mut scraped = self.lock();
        if !scraped.is_ready() {
            return Totals::default();
        }
        let endpoints = scraped.endpoints.iter();
        let known: Vec<_> = endpoints
            .filter_map(|it| Some(it.last.as_ref()?.totals()))
            .collect();
        let values = array::from_fn(|at| {
            let is_known = known.iter().any(|totals| totals[at].is_some());
            is_known.then_some(scraped.totals[at])
        });
        let is_missing = scraped.endpoints.iter().any(|it| it.outage.is_some());
        let is_partial = scraped.has_lost || is_missing;
        scraped.has_lost = false;
        Totals { values, is_partial }
    }

    /// Returns `true` if each endpoint has responded or failed.
    pub(crate) fn is_ready(&self) -> bool {
        self.lock().is_ready()
    }

    /// Returns a sentence for each endpoint whose last request failed.
    pub(crate) fn notes(&self) -> Vec<String> {
        let scraped = self.lock();
        let notes = scraped.endpoints.iter().filter_map(|endpoint| {
            let Outage { since, reason } = endpoint.outage.as_ref()?;
            let (name, since) = (&endpoint.name, time(*since));
            Some(format!("No metrics of {name} since {since}: {reason}."))
        });
        notes.collect()
    }

    fn lock(&self) -> MutexGuard<'_, Scraped> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scraped {
    fn is_ready(&self) -> bool {
        let mut endpoints = self.endpoints.iter();
        endpoints.all(|it| it.last.is_some() || it.outage.is_some())
    }

    /// Records a result of the endpoint `index`. Returns an event if an outage begins or ends.
    fn record(&mut self, index: usize, response: Result<RequestCounters, String>) -> Option<Event> {
        let endpoint = &mut self.endpoints[index];
        match response {
            Ok(counters) => {
                if let Some(last) = &endpoint.last {
                    let increases = counters.increases_since(last);
                    for (total, increase) in self.totals.iter_mut().zip(increases) {
                        *total += increase;
                        // From 2^53 on, a float does not count single requests. A total that falls is a gap in the chart.
                        if *total >= MAX_TOTAL {
                            *total = 0.0;
                        }
                    }
                }
                endpoint.last = Some(counters);
                endpoint.failures = 0;
                endpoint.outage.take().map(|_| Event::Ended {
                    endpoint: endpoint.name.clone(),
                })
            }
            Err(reason) => {
                endpoint.failures = endpoint.failures.saturating_add(1);
                if endpoint.failures >= MAX_FAILURES {
                    self.has_lost |= endpoint.last.take().is_some();
                }
                let reason: String = printable(&reason).chars().take(MAX_REASON).collect();
                if let Some(outage) = &mut endpoint.outage {
                    outage.reason = reason;
                    return None;
                }
                endpoint.outage = Some(Outage {
                    since: SystemTime::now(),
                    reason: reason.clone(),
                });
                Some(Event::Began {
                    endpoint: endpoint.name.clone(),
                    reason,
                })
            }
        }
    }
}

impl Endpoint {
    /// Records the counters of a response, or the reason why there are none, such as `no connection`.
    ///
    /// Pages and events show the first 200 characters of the reason, so it must not contain credentials. The first failure is
    /// an event, and so is the response that follows.
    pub fn record(&self, response: Result<RequestCounters, String>) {
        let event = self.metrics.lock().record(self.index, response);
        // A subscriber may be slow, or read the metrics itself. The lock is free while it handles the event.
        match event {
            Some(Event::Began { endpoint, reason }) => {
                tracing::warn!(%endpoint, %reason, "metrics of an endpoint cannot be read");
            }
            Some(Event::Ended { endpoint }) => {
                tracing::info!(%endpoint, "metrics of an endpoint are read again");
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tracing::{
        Dispatch, Metadata, Subscriber,
        span::{Attributes, Id, Record},
        subscriber::{NoSubscriber, with_default},
    };

    use super::*;

    /// Counts the events during which the metrics can be read.
    struct ReadsMetrics {
        metrics: ScrapedMetrics,
        events: Arc<AtomicUsize>,
    }

    impl Subscriber for ReadsMetrics {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            if self.metrics.0.try_lock().is_ok() {
                self.events.fetch_add(1, Ordering::Relaxed);
            }
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    fn counters(text: &str) -> Result<RequestCounters, String> {
        RequestCounters::parse(text).map_err(|error| error.to_string())
    }

    /// Records a number of executions.
    fn record(endpoint: &Endpoint, executions: u32) {
        endpoint.record(counters(&format!(
            "idempotency_granted_total {executions}\n"
        )));
    }

    fn fail(endpoint: &Endpoint) {
        endpoint.record(Err("no connection".to_owned()));
    }

    /// Returns the total of executions in a sample, and `true` if the sample is partial.
    fn sample(metrics: &ScrapedMetrics) -> (Option<f64>, bool) {
        let totals = metrics.take_totals();
        (totals.values[0], totals.is_partial)
    }

    #[test]
    fn increases_of_endpoints_are_added() {
        let metrics = ScrapedMetrics::new();
        let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
        record(&a, 500);
        // The other endpoint has no result.
        assert_eq!(sample(&metrics), (None, false));
        record(&b, 70);
        assert_eq!(sample(&metrics), (Some(0.0), false));
        record(&a, 503);
        record(&b, 80);
        assert_eq!(sample(&metrics), (Some(13.0), false));
        assert!(metrics.notes().is_empty());
    }

    #[test]
    fn reset_counter_begins_at_zero() {
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("a");
        let refused = |a, b| {
            let name = "idempotency_refused_total";
            let text = format!("{name}{{code=\"a\"}} {a}\n{name}{{code=\"b\"}} {b}\n");
            endpoint.record(counters(&text));
            metrics.take_totals().values
        };
        assert_eq!(refused(100, 100), [None, None, Some(0.0)]);
        assert_eq!(refused(100, 105), [None, None, Some(5.0)]);
        // The process has restarted, so the other series began at zero too.
        assert_eq!(refused(2, 300), [None, None, Some(5.0 + 302.0)]);
        let text =
            "idempotency_refused_total{code=\"a\"} 2\nidempotency_refused_total{code=\"c\"} 4\n";
        endpoint.record(counters(text));
        assert_eq!(metrics.take_totals().values[2], Some(311.0));
    }

    #[test]
    fn reset_applies_to_all_counters() {
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("a");
        for (granted, replayed, expected) in [(9, 4, [0.0, 0.0]), (1, 4, [1.0, 4.0])] {
            let text = format!(
                "idempotency_granted_total {granted}\nidempotency_replayed_total {replayed}\n"
            );
            endpoint.record(counters(&text));
            assert_eq!(metrics.take_totals().values[..2], expected.map(Some));
        }
    }

    #[test]
    fn total_beyond_limit_is_gap() {
        let metrics = ScrapedMetrics::new();
        let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
        record(&a, 0);
        record(&b, 0);
        // One less than the limit.
        a.record(counters("idempotency_granted_total 9007199254740991\n"));
        assert_eq!(sample(&metrics), (Some(MAX_TOTAL - 1.0), false));
        record(&b, 1);
        assert_eq!(sample(&metrics), (Some(0.0), false));
        record(&b, 2);
        assert_eq!(sample(&metrics), (Some(1.0), false));
    }

    #[test]
    fn short_outage_loses_no_requests() {
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("a");
        record(&endpoint, 10);
        fail(&endpoint);
        fail(&endpoint);
        assert_eq!(sample(&metrics), (Some(0.0), true));
        assert_eq!(metrics.notes().len(), 1);
        record(&endpoint, 14);
        assert_eq!(sample(&metrics), (Some(4.0), false));
        assert!(metrics.notes().is_empty());
    }

    #[test]
    fn long_outage_is_gap() {
        let metrics = ScrapedMetrics::new();
        let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
        record(&a, 10);
        record(&b, 10);
        for _ in 0..3 {
            fail(&a);
            record(&b, 11);
        }
        assert_eq!(sample(&metrics), (Some(1.0), true));
        for _ in 0..3 {
            fail(&b);
        }
        assert_eq!(sample(&metrics), (None, true));
        // The time of the requests in between is unknown.
        record(&a, 1000);
        record(&b, 1000);
        assert_eq!(sample(&metrics), (Some(1.0), false));
        record(&a, 1002);
        // An outage between two samples.
        for _ in 0..3 {
            fail(&b);
        }
        record(&b, 2000);
        assert_eq!(sample(&metrics), (Some(3.0), true));
        assert_eq!(sample(&metrics), (Some(3.0), false));
    }

    #[test]
    fn events_are_logged_without_lock() {
        // With one subscriber in the program, a thread without a subscriber could disable the events for all threads.
        let _another = Dispatch::new(NoSubscriber::new());
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("a");
        let events = Arc::new(AtomicUsize::new(0));
        let subscriber = ReadsMetrics {
            metrics,
            events: Arc::clone(&events),
        };
        with_default(subscriber, || {
            fail(&endpoint);
            fail(&endpoint);
            record(&endpoint, 1);
            record(&endpoint, 2);
        });
        // The first failure, and the response after it.
        assert_eq!(events.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn notes_have_reason_and_time() {
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("http://a\u{1b}:1");
        assert!(metrics.notes().is_empty());
        let before = time(SystemTime::now());
        fail(&endpoint);
        let after = time(SystemTime::now());
        endpoint.record(Err(format!("status 500\n{}", "x".repeat(1000))));
        let notes = metrics.notes();
        let text = "No metrics of http://a\u{fffd}:1 since ";
        let (since, reason) = notes[0]
            .strip_prefix(text)
            .and_then(|rest| rest.split_once(": "))
            .expect("a time and a reason");
        assert!(
            *before <= *since && *since <= *after,
            "{before} {since} {after}"
        );
        assert_eq!(reason, format!("status 500\u{fffd}{}.", "x".repeat(189)));
        assert_eq!(sample(&metrics), (None, true));
    }
}
