use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use tracing::{
    Dispatch, Metadata, Subscriber,
    span::{Attributes, Id, Record},
    subscriber::{NoSubscriber, with_default},
};

use super::{series::MAX_TOTAL, *};

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
    assert_eq!(refused(100, 100), [0.0, 0.0, 0.0].map(Some));
    assert_eq!(refused(100, 105), [0.0, 0.0, 5.0].map(Some));
    // The process has restarted, so the other series began at zero too.
    assert_eq!(refused(2, 300), [0.0, 0.0, 5.0 + 302.0].map(Some));
    let text = "idempotency_refused_total{code=\"a\"} 2\nidempotency_refused_total{code=\"c\"} 4\n";
    endpoint.record(counters(text));
    assert_eq!(metrics.take_totals().values[2], Some(311.0));
}

#[test]
fn reset_applies_to_all_counters() {
    let metrics = ScrapedMetrics::new();
    let endpoint = metrics.add_endpoint("a");
    for (granted, replayed, expected) in [(9, 4, [0.0, 0.0]), (1, 4, [1.0, 4.0])] {
        let text =
            format!("idempotency_granted_total {granted}\nidempotency_replayed_total {replayed}\n");
        endpoint.record(counters(&text));
        assert_eq!(metrics.take_totals().values[..2], expected.map(Some));
    }
}

#[test]
fn returned_series_has_no_peak() {
    let metrics = ScrapedMetrics::new();
    let endpoint = metrics.add_endpoint("a");
    for (a, replayed, expected) in [
        (Some(1_000_000), 1, 0.0),
        (None, 1, 0.0),
        (None, 2, 0.0),
        (Some(1_000_003), 2, 3.0),
        (None, 2, 3.0),
        // The process has removed the series, and has not restarted.
        (Some(2), 2, 5.0),
        (Some(3), 3, 6.0),
    ] {
        let series = a.map(|a| format!("idempotency_granted_total{{name=\"a\"}} {a}\n"));
        let series = series.unwrap_or_default();
        endpoint.record(counters(&format!(
            "{series}idempotency_granted_total{{name=\"b\"}} 5\n\
             idempotency_replayed_total {replayed}\n"
        )));
        let values = metrics.take_totals().values;
        let replays = f64::from(replayed - 1_u32);
        assert_eq!(values, [expected, replays, 0.0].map(Some));
    }
}

#[test]
fn restart_drops_absent_series() {
    let metrics = ScrapedMetrics::new();
    let endpoint = metrics.add_endpoint("a");
    for (granted, refused, expected) in [
        (900, Some(10), [0.0, 0.0]),
        // A counter keeps its total while all its series are absent.
        (900, None, [0.0, 0.0]),
        // The process has restarted.
        (7, None, [7.0, 0.0]),
        (7, Some(12), [7.0, 12.0]),
    ] {
        let series = refused.map(|it| format!("idempotency_refused_total {it}\n"));
        let series = series.unwrap_or_default();
        endpoint.record(counters(&format!(
            "{series}idempotency_granted_total {granted}\n"
        )));
        let values = metrics.take_totals().values;
        assert_eq!([values[0], values[2]], expected.map(Some));
    }
}

#[test]
fn removed_endpoint_keeps_its_requests() {
    let metrics = ScrapedMetrics::new();
    let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
    record(&a, 10);
    record(&b, 10);
    record(&a, 15);
    // Another handle of the endpoint keeps it.
    let clone = a.clone();
    drop(a);
    record(&clone, 16);
    assert_eq!(sample(&metrics), (Some(6.0), false));
    drop(clone);
    assert_eq!(sample(&metrics), (Some(6.0), false));
    record(&b, 12);
    assert_eq!(sample(&metrics), (Some(8.0), false));
    drop(b);
    // No endpoint has data.
    assert_eq!(sample(&metrics), (None, false));
    let c = metrics.add_endpoint("c");
    record(&c, 100);
    record(&c, 101);
    assert_eq!(sample(&metrics), (Some(9.0), false));
}

#[test]
fn removed_endpoint_is_not_missing() {
    let metrics = ScrapedMetrics::new();
    assert!(!metrics.is_ready());
    let a = metrics.add_endpoint("a");
    let without_result = metrics.add_endpoint("b");
    record(&a, 10);
    assert_eq!(sample(&metrics), (None, false));
    drop(without_result);
    assert_eq!(sample(&metrics), (Some(0.0), false));
    let failing = metrics.add_endpoint("c");
    fail(&failing);
    assert_eq!(sample(&metrics), (Some(0.0), true));
    assert_eq!(metrics.notes().len(), 1);
    drop(failing);
    assert_eq!(sample(&metrics), (Some(0.0), false));
    assert!(metrics.notes().is_empty());
}

#[test]
fn added_endpoint_does_not_interrupt() {
    let metrics = ScrapedMetrics::new();
    let a = metrics.add_endpoint("a");
    record(&a, 10);
    assert_eq!(sample(&metrics), (Some(0.0), false));
    let b = metrics.add_endpoint("b");
    record(&a, 12);
    assert_eq!(sample(&metrics), (Some(2.0), false));
    record(&b, 100);
    record(&b, 101);
    assert_eq!(sample(&metrics), (Some(3.0), false));
}

/// An endpoint without a result delays the chart only if it is added before the last result of the others.
#[test]
fn chart_begins_with_last_result() {
    let metrics = ScrapedMetrics::new();
    let (a, b) = (metrics.add_endpoint("a"), metrics.add_endpoint("b"));
    record(&a, 10);
    assert!(!metrics.is_ready());
    record(&b, 10);
    let _without_result = metrics.add_endpoint("c");
    assert!(metrics.is_ready());
    assert_eq!(sample(&metrics), (Some(0.0), false));
}

/// Each of the threads adds and removes endpoints while the chart takes samples.
#[test]
fn replicas_come_and_go() {
    let (threads, replicas) = (8_u32, 200_u32);
    let metrics = ScrapedMetrics::new();
    let permanent = metrics.add_endpoint("permanent");
    record(&permanent, 1);
    assert_eq!(sample(&metrics), (Some(0.0), false));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..replicas {
                    let replica = metrics.add_endpoint("replica");
                    let clone = replica.clone();
                    // Either thread may drop the last clone.
                    let removal = thread::spawn(move || drop(clone));
                    record(&replica, 5);
                    assert!(sample(&metrics).0.is_some());
                    record(&replica, 6);
                    drop(replica);
                    removal.join().expect("no panic");
                }
            });
        }
    });
    let expected = f64::from(threads * replicas);
    assert_eq!(sample(&metrics), (Some(expected), false));
    assert_eq!(metrics.lock().endpoints.len(), 1);
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
