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
//! // The replica no longer exists. The chart keeps its requests.
//! drop(replica);
//! # Ok(())
//! # }
//! ```

mod series;
mod text;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

pub(crate) use self::series::{SeriesHistory, add_increases};
pub use self::text::{CounterReader, CounterTextError, RequestCounters};
use crate::{
    describe::{printable, time},
    panics::catch_report_panic,
    source::Totals,
};

/// Number of failures in a row after which an endpoint has no data. The increase until its next response is unknown.
const MAX_FAILURES: u32 = 3;
/// Longest reason of a failure, in characters.
const MAX_REASON: usize = 200;

/// The counters of all endpoints of a service, for [`Console::with_scraped_metrics`](crate::Console::with_scraped_metrics).
/// Clones share them.
///
/// The chart shows the sum of the endpoints:
///
/// - The first response of an endpoint has no increase, since its time is unknown.
/// - If a counter of an endpoint fell, a restart has reset all of them, and each has increased by its value.
/// - A series that a response lacks keeps its value until it returns, so the chart has no false peak. If it returns with a
///   lower value, it alone began at zero. The console stores at most 10,000 such series of an endpoint, with 16 MiB of labels.
///   With more, it drops the older ones, and they count as new.
/// - A series that is new has increased by its value. If a process renames the labels of a series, its value counts again.
///   A counter without a series is zero, so its first series is drawn too.
/// - After three failures in a row the endpoint has no data. Its next response counts as the first one.
/// - An endpoint that is added later counts from its first response. Until then the chart shows the others.
/// - An endpoint is [removed](Endpoint) with its last clone. Its requests stay in the chart.
/// - The page names each endpoint whose last request failed, since when, and why. It also shows the number of points that are
///   without an endpoint. While no endpoint has data, the chart has a gap.
#[derive(Clone, Debug, Default)]
pub struct ScrapedMetrics(Arc<Mutex<Scraped>>);

/// An endpoint of [`ScrapedMetrics`], for the responses to its requests. Clones are the same endpoint.
///
/// The endpoint is removed when its last clone is dropped. Let the task that requests the metrics own it: if the task ends, is
/// aborted or panics, the endpoint is removed with it. So no endpoint without a task remains in the chart, and no task has an
/// endpoint that was removed.
///
/// The requests of a removed endpoint stay in the chart, except for those since its last response. The chart does not wait for
/// the endpoint, and the page no longer names it. There is no event.
#[derive(Clone, Debug)]
pub struct Endpoint {
    registration: Arc<Registration>,
}

/// The registration of an endpoint, which all its clones share.
#[derive(Debug)]
struct Registration {
    metrics: ScrapedMetrics,
    id: u64,
}

#[derive(Debug, Default)]
struct Scraped {
    /// The endpoints, in the order in which they were added.
    endpoints: BTreeMap<u64, ScrapedEndpoint>,
    /// Number of the endpoint that is added next.
    next_id: u64,
    /// Increases of the counters of all endpoints, also of those that were removed.
    totals: [f64; 3],
    /// `true` from the moment at which each endpoint has a result: the chart has begun.
    has_begun: bool,
    /// `true` if an endpoint has lost its data since the last sample.
    has_lost: bool,
}

#[derive(Debug)]
struct ScrapedEndpoint {
    name: String,
    /// The responses so far. `None` before the first one, and after [`MAX_FAILURES`].
    history: Option<SeriesHistory>,
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

    /// Adds an endpoint, which is [removed](Endpoint) when the last clone of the returned value is dropped.
    ///
    /// The chart begins when each endpoint has a [result](Endpoint::record), so add the first endpoints before you record a
    /// result. An endpoint that is added later does not interrupt the chart. So replicas may come and go, and an endpoint costs
    /// memory only while it exists.
    ///
    /// Pages and events show the name, so it must not contain credentials. Add each process once: the requests of an endpoint
    /// that is added twice are counted twice. An address at which several processes respond in turn has no meaningful counters.
    #[must_use = "the endpoint is removed when it is dropped"]
    pub fn add_endpoint(&self, name: &str) -> Endpoint {
        let endpoint = ScrapedEndpoint {
            name: printable(name),
            history: None,
            failures: 0,
            outage: None,
        };
        let id = self.lock().add(endpoint);
        let metrics = self.clone();
        Endpoint {
            registration: Arc::new(Registration { metrics, id }),
        }
    }

    /// Returns the totals for a sample of the chart.
    pub(crate) fn take_totals(&self) -> Totals {
        let mut scraped = self.lock();
        if !scraped.has_begun {
            return Totals::default();
        }
        let has_data = scraped.endpoints.values().any(|it| it.history.is_some());
        let values = if has_data {
            scraped.totals.map(Some)
        } else {
            [None; 3]
        };
        let is_missing = scraped.endpoints.values().any(|it| it.outage.is_some());
        let is_partial = scraped.has_lost || is_missing;
        scraped.has_lost = false;
        Totals { values, is_partial }
    }

    /// Returns `true` from the moment at which each endpoint has responded or failed.
    pub(crate) fn is_ready(&self) -> bool {
        self.lock().has_begun
    }

    /// Returns a sentence for each endpoint whose last request failed.
    pub(crate) fn notes(&self) -> Vec<String> {
        let scraped = self.lock();
        let notes = scraped.endpoints.values().filter_map(|endpoint| {
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
    /// Adds an endpoint, and returns its number.
    fn add(&mut self, endpoint: ScrapedEndpoint) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.endpoints.insert(id, endpoint);
        id
    }

    /// Removes an endpoint, and returns it.
    fn remove(&mut self, id: u64) -> Option<ScrapedEndpoint> {
        let removed = self.endpoints.remove(&id);
        self.begin_if_ready();
        removed
    }

    /// Begins the chart if each endpoint has a result.
    fn begin_if_ready(&mut self) {
        let mut endpoints = self.endpoints.values();
        let have_results = endpoints.all(|it| it.history.is_some() || it.outage.is_some());
        self.has_begun |= have_results && !self.endpoints.is_empty();
    }

    /// Records a result of the endpoint `id`. Returns an event if an outage begins or ends.
    fn record(&mut self, id: u64, response: Result<RequestCounters, String>) -> Option<Event> {
        let event = self.record_result(id, response);
        self.begin_if_ready();
        event
    }

    fn record_result(
        &mut self,
        id: u64,
        response: Result<RequestCounters, String>,
    ) -> Option<Event> {
        let endpoint = self.endpoints.get_mut(&id)?;
        match response {
            Ok(counters) => {
                match &mut endpoint.history {
                    Some(history) => add_increases(&mut self.totals, history.record(counters)),
                    None => endpoint.history = Some(SeriesHistory::new(counters)),
                }
                endpoint.failures = 0;
                endpoint.outage.take().map(|_| Event::Ended {
                    endpoint: endpoint.name.clone(),
                })
            }
            Err(reason) => {
                endpoint.failures = endpoint.failures.saturating_add(1);
                if endpoint.failures >= MAX_FAILURES {
                    self.has_lost |= endpoint.history.take().is_some();
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
        let Registration { metrics, id } = &*self.registration;
        let event = metrics.lock().record(*id, response);
        // A subscriber may be slow, or read the metrics itself. The lock is free while it handles the event.
        match event {
            Some(Event::Began { endpoint, reason }) => catch_report_panic(|| {
                tracing::warn!(%endpoint, %reason, "metrics of an endpoint cannot be read");
            }),
            Some(Event::Ended { endpoint }) => catch_report_panic(|| {
                tracing::info!(%endpoint, "metrics of an endpoint are read again");
            }),
            None => {}
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The lock is free again before the memory of the endpoint is.
        let _removed = self.metrics.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests;
