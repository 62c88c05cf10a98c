//! Metrics and events of a test, captured apart from those of other tests.

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tokio::runtime::Runtime;
use tracing::{
    Dispatch, Subscriber,
    span::{Attributes, Id, Record},
    subscriber::NoSubscriber,
};
use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan, util::SubscriberInitExt};

/// Values of metrics, under `name` or `name{label=value}`. The value of a histogram is the number of its samples. A
/// layer registers all counters and histograms; those without a count are omitted.
pub type Metrics = BTreeMap<String, f64>;

/// If the program has only one subscriber, a thread without a subscriber that reaches an event first disables the event for
/// all threads. This second one prevents that.
static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// A recorder of these counters, by the names of their metrics. It omits all other metrics.
pub struct Counters<const N: usize>(pub [(&'static str, Counter); N]);

impl<const N: usize> Recorder for Counters<N> {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let counter = self.0.iter().find(|(name, _)| *name == key.name());
        counter.map_or_else(Counter::noop, |(_, counter)| counter.clone())
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Runs a future on a paused clock. Returns the metrics that it changed, and everything that it logged from this level on.
///
/// # Panics
///
/// Panics if the log is not text.
pub fn observed(level: &str, run: impl Future<Output = ()>) -> (Metrics, String) {
    observed_on(paused(), level, run)
}

/// Runs a future on a runtime of one thread, like [`observed`]. Drops the runtime.
///
/// # Panics
///
/// Panics if the log is not text.
pub fn observed_on(
    runtime: Runtime,
    level: &str,
    run: impl Future<Output = ()>,
) -> (Metrics, String) {
    observed_with_log(runtime, level, async move |_: &Log| run.await)
}

/// Runs a future like [`observed_on`]. The future gets the log, which grows while it runs.
///
/// # Panics
///
/// Panics if the log is not text.
pub fn observed_with_log(
    runtime: Runtime,
    level: &str,
    run: impl AsyncFnOnce(&Log),
) -> (Metrics, String) {
    LazyLock::force(&ANOTHER);
    let (recorder, log) = (DebuggingRecorder::new(), Log::default());
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_span_events(FmtSpan::FULL)
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let guard = subscriber.set_default();
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(run(&log));
        // Its tasks may log and count when they are dropped.
        drop(runtime);
    });
    drop(guard);
    (read(&recorder), log.text())
}

/// Runs a future on a paused clock, and returns the metrics that it changed.
pub fn counted(run: impl Future<Output = ()>) -> Metrics {
    observed("off", run).0
}

/// Runs a future on a runtime of one thread, with a recorder and a subscriber that panic at each metric and at each event.
/// Only events of this project count. The future gets the number of panics. Drops the runtime.
pub fn with_panicking_reports<T>(runtime: Runtime, run: impl AsyncFnOnce(&AtomicU64) -> T) -> T {
    LazyLock::force(&ANOTHER);
    let panicking = PanickingReports::default();
    let guard = tracing::subscriber::set_default(panicking.clone());
    let panics: &AtomicU64 = &panicking.0;
    let output = metrics::with_local_recorder(&panicking, || {
        let output = runtime.block_on(run(panics));
        // Its tasks may log and count when they are dropped.
        drop(runtime);
        output
    });
    drop(guard);
    output
}

/// A recorder and a subscriber that count their calls and panic.
#[derive(Clone, Default)]
struct PanickingReports(Arc<AtomicU64>);

impl PanickingReports {
    fn panic(&self) -> ! {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("the intended panic");
    }
}

impl CounterFn for PanickingReports {
    fn increment(&self, value: u64) {
        // A registration adds 0.
        if value > 0 {
            self.panic();
        }
    }

    fn absolute(&self, _: u64) {
        self.panic();
    }
}

impl GaugeFn for PanickingReports {
    fn increment(&self, value: f64) {
        if value != 0.0 {
            self.panic();
        }
    }

    fn decrement(&self, _: f64) {
        self.panic();
    }

    fn set(&self, _: f64) {
        self.panic();
    }
}

impl HistogramFn for PanickingReports {
    fn record(&self, _: f64) {
        self.panic();
    }
}

impl Recorder for PanickingReports {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(self.clone()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(self.clone()))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(self.clone()))
    }
}

impl Subscriber for PanickingReports {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("tower_idempotency")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.panic();
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Returns the values of a recorder, which it then counts from 0 again.
#[must_use]
pub fn read(recorder: &DebuggingRecorder) -> Metrics {
    let mut counted = Metrics::new();
    for (key, _, _, value) in recorder.snapshotter().snapshot().into_vec() {
        let (name, labels) = (key.key().name(), key.key().labels());
        let labels: Vec<_> = labels
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        let name = match labels.is_empty() {
            true => name.to_owned(),
            false => format!("{name}{{{}}}", labels.join(",")),
        };
        let value = match value {
            DebugValue::Counter(0) => continue,
            DebugValue::Histogram(samples) if samples.is_empty() => continue,
            DebugValue::Counter(count) => count as f64,
            DebugValue::Gauge(value) => value.into_inner(),
            DebugValue::Histogram(samples) => samples.len() as f64,
        };
        counted.insert(name, value);
    }
    counted
}

/// Returns the sum of a counter over all its labels.
#[must_use]
pub fn total(metrics: &Metrics, name: &str) -> f64 {
    let of_name = metrics
        .iter()
        .filter(|(metric, _)| metric.split('{').next() == Some(name));
    of_name.map(|(_, value)| value).sum()
}

/// Creates a runtime of one thread with a paused clock.
///
/// # Panics
///
/// Panics if the operating system refuses.
#[must_use]
pub fn paused() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
}

/// The lines that were logged. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns the lines that were logged until now.
    ///
    /// # Panics
    ///
    /// Panics if the log is not text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8(self.lock().clone()).expect("text")
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
