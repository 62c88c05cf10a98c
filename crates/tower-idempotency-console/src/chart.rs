//! Charts as SVG, drawn from samples.

use std::{cmp::Ordering, fmt::Write as _, time::Duration};

use tokio::time::Instant;
use tower_idempotency::inspect::Count;

use crate::{
    live::{POINTS, Sample},
    source::MetricsSource,
};

/// A chart of three lines.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    pub(crate) lines: Vec<Line>,
    /// Reason why the chart has no data. Empty if it has some.
    pub(crate) no_data: &'static str,
    /// Sentences about data that is missing.
    pub(crate) notes: Vec<String>,
    pub(crate) max: f64,
    pub(crate) window: String,
}

/// A line of a chart. A gap in the samples is a gap in the line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    /// Number of the style: each line has its own dashes.
    pub(crate) style: usize,
    pub(crate) path: String,
    pub(crate) latest: String,
    pub(crate) largest: String,
}

/// A value of a line, at the time of its sample. `None` is a gap.
type Point = (Instant, Option<Value>);

/// A value of a line.
#[derive(Clone, Copy, Debug)]
struct Value {
    number: f64,
    /// `false` if the value may be larger, because the count stopped.
    is_exact: bool,
}

impl Value {
    const fn exact(number: f64) -> Self {
        Self {
            number,
            is_exact: true,
        }
    }

    /// Returns the larger value. Of two equal ones, this is the one that may be larger.
    fn max(self, other: Self) -> Self {
        match self.number.total_cmp(&other.number) {
            Ordering::Less => other,
            Ordering::Equal if self.is_exact => other,
            Ordering::Equal | Ordering::Greater => self,
        }
    }

    /// Returns the number, and a `+` if the value may be larger.
    fn text(self) -> String {
        let sign = if self.is_exact { "" } else { "+" };
        format!("{}{sign}", number(self.number))
    }
}

impl From<Count> for Value {
    fn from(count: Count) -> Self {
        Self {
            number: count.value as f64,
            is_exact: count.is_exact,
        }
    }
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 120.0;
const LEFT: f64 = 36.0;
const TOP: f64 = 8.0;

impl Chart {
    /// Draws the rates of the requests: differences of totals.
    pub(crate) fn requests(
        samples: &[Sample],
        window: Duration,
        source: Option<&MetricsSource>,
    ) -> Self {
        let period = window.as_secs_f64() / POINTS as f64;
        let points = |at: usize| {
            let pairs = samples.windows(2);
            let points = pairs.map(|pair| {
                let seconds = (pair[1].taken - pair[0].taken).as_secs_f64();
                let rate = |from: f64, to: f64| (to - from) / seconds.max(period / 2.0) * 60.0;
                let value = match (pair[0].totals.values[at], pair[1].totals.values[at]) {
                    (Some(from), Some(to)) if to >= from => Some(Value::exact(rate(from, to))),
                    // A total that fell has begun at zero again.
                    _ => None,
                };
                (pair[1].taken, value)
            });
            points.collect::<Vec<_>>()
        };
        let no_data = if source.is_some() {
            "No data yet: the first point follows after two samples."
        } else {
            "No data: this console has no metrics of a service."
        };
        let names = ["executions", "replays", "refusals"];
        let lines = [points(0), points(1), points(2)];
        let chart = Self::draw(
            "requests",
            "Requests per minute",
            names,
            &lines,
            window,
            no_data,
        );
        let mut notes = source.map(MetricsSource::notes).unwrap_or_default();
        notes.extend(partial_points(samples));
        Self { notes, ..chart }
    }

    /// Draws the numbers of unresolved keys.
    pub(crate) fn keys(samples: &[Sample], window: Duration) -> Self {
        let points = |at: usize| {
            let points = samples
                .iter()
                .map(|it| (it.taken, it.keys[at].map(Value::from)));
            points.collect::<Vec<_>>()
        };
        let names = ["in progress", "orphans", "need attention"];
        let lines = [points(0), points(1), points(2)];
        let no_data = "No data yet: the store has not replied so far.";
        Self::draw("keys", "Keys in the store", names, &lines, window, no_data)
    }

    fn draw(
        id: &'static str,
        title: &'static str,
        names: [&'static str; 3],
        lines: &[Vec<Point>; 3],
        window: Duration,
        no_data: &'static str,
    ) -> Self {
        let values = lines.iter().flatten().filter_map(|(_, value)| *value);
        let largest = values.clone().map(|it| it.number).fold(0.0, f64::max);
        let has_data = values.count() > 0;
        let max = axis_end(largest);
        let now = Instant::now();
        let drawn = names
            .iter()
            .zip(lines)
            .enumerate()
            .map(|(style, (name, points))| {
                let known = points.iter().filter_map(|(_, value)| *value);
                Line {
                    name,
                    style: style + 1,
                    path: path(points, now, window, max),
                    latest: points
                        .last()
                        .and_then(|it| it.1)
                        .map_or_else(no_data_text, Value::text),
                    largest: known
                        .reduce(Value::max)
                        .map_or_else(no_data_text, Value::text),
                }
            });
        Self {
            id,
            title,
            lines: drawn.collect(),
            no_data: if has_data { "" } else { no_data },
            notes: Vec::new(),
            max,
            window: humantime::format_duration(window).to_string(),
        }
    }

    /// Returns the label of a horizontal line at this fraction of the maximum.
    pub(crate) fn label(&self, fraction: f64) -> String {
        number(self.max * fraction)
    }
}

/// Returns a sentence if some points are without the requests of an endpoint.
fn partial_points(samples: &[Sample]) -> Option<String> {
    let has_value = |pair: &&[Sample]| {
        let mut values = pair[0].totals.values.iter().zip(&pair[1].totals.values);
        values.any(|(from, to)| from.is_some() && to.is_some())
    };
    let points: Vec<_> = samples.windows(2).filter(has_value).collect();
    let is_partial = |pair: &&&[Sample]| pair.iter().any(|it| it.totals.is_partial);
    let partial = points.iter().filter(is_partial).count();
    let all = points.len();
    (partial > 0).then(|| {
        format!("In {partial} of {all} points, the requests of an endpoint are missing: its metrics could not be read.")
    })
}

fn no_data_text() -> String {
    "no data".to_owned()
}

/// Returns the commands of an SVG path.
fn path(points: &[Point], now: Instant, window: Duration, max: f64) -> String {
    let mut path = String::new();
    let mut previous: Option<Instant> = None;
    let gap = window / POINTS as u32 * 5 / 2;
    for (taken, value) in points {
        let age = now.saturating_duration_since(*taken);
        let Some(value) = value.filter(|_| age <= window) else {
            previous = None;
            continue;
        };
        let x = LEFT + WIDTH * (1.0 - age.as_secs_f64() / window.as_secs_f64());
        let y = TOP + HEIGHT * (1.0 - value.number / max);
        let continues = previous.is_some_and(|it| taken.saturating_duration_since(it) <= gap);
        let command = if continues { 'L' } else { 'M' };
        // A point without a neighbour is visible as a dot, because the line has round ends.
        let dot = if continues { "" } else { " h0.01" };
        let _ = write!(path, "{command}{x:.1} {y:.1}{dot} ");
        previous = Some(*taken);
    }
    path
}

/// Returns the next larger of 1, 2 and 5 times a power of ten, and at least 2.
fn axis_end(value: f64) -> f64 {
    let mut step = 1.0;
    loop {
        for factor in [1.0, 2.0, 5.0] {
            let candidate = step * factor;
            if candidate >= value && candidate >= 2.0 {
                return candidate;
            }
        }
        step *= 10.0;
    }
}

fn number(value: f64) -> String {
    if value >= 9.95 || (value - value.round()).abs() < 0.05 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        scrape::{RequestCounters, ScrapedMetrics},
        source::{ProcessMetrics, Totals},
    };

    fn sample(taken: Instant, total: Option<f64>, keys: Option<u64>) -> Sample {
        Sample {
            taken,
            keys: [keys.map(|keys| Count::new(keys, true)); 3],
            totals: Totals {
                values: [total; 3],
                is_partial: false,
            },
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lines_show_rates_and_gaps() {
        let hour = Duration::from_secs(3600);
        let start = Instant::now();
        let minute = |n: u64| start + Duration::from_secs(60 * n);
        tokio::time::advance(Duration::from_secs(60 * 5)).await;
        let samples = [
            sample(minute(0), Some(10.0), Some(1)),
            sample(minute(1), Some(40.0), None),
            // The counter was reset.
            sample(minute(2), Some(0.0), Some(3)),
            sample(minute(3), Some(6.0), Some(4)),
        ];
        let source = MetricsSource::Process(Box::new(ProcessMetrics::new(String::new)));
        let chart = Chart::requests(&samples, hour, Some(&source));
        assert_eq!(chart.lines[0].largest, "30");
        assert_eq!(chart.lines[0].latest, "6");
        assert_eq!(chart.lines[0].path.matches('M').count(), 2);
        assert_eq!(chart.max, 50.0);
        let chart = Chart::keys(&samples, hour);
        assert_eq!(chart.lines[0].path.matches('M').count(), 2);
        assert_eq!(chart.lines[0].path.matches('L').count(), 1);
        assert!(chart.no_data.is_empty());
    }

    /// Returns the chart of an endpoint with one response each minute. A response of `None` lacks all series of refusals.
    async fn chart_of_refusals(responses: [Option<u32>; 3]) -> Chart {
        let start = Instant::now();
        tokio::time::advance(Duration::from_secs(60 * 2)).await;
        let metrics = ScrapedMetrics::new();
        let endpoint = metrics.add_endpoint("a");
        let source = MetricsSource::Scraped(metrics);
        let mut samples = Vec::new();
        for (minute, refused) in (0..).zip(responses) {
            let series = refused.map(|it| format!("idempotency_refused_total {it}\n"));
            let series = series.unwrap_or_default();
            let text = format!("idempotency_granted_total 5\n{series}");
            endpoint.record(Ok(RequestCounters::parse(&text).expect("valid text")));
            samples.push(Sample {
                totals: source.take_totals(),
                ..sample(start + Duration::from_secs(60 * minute), None, None)
            });
        }
        Chart::requests(&samples, Duration::from_secs(3600), Some(&source))
    }

    #[tokio::test(start_paused = true)]
    async fn returned_counter_has_its_increase() {
        let chart = chart_of_refusals([Some(10), None, Some(16)]).await;
        assert_eq!(chart.lines[2].latest, "6");
        assert_eq!(chart.lines[2].path.matches('M').count(), 1);
        assert_eq!(chart.lines[2].path.matches('L').count(), 1);
    }

    /// Some libraries create a counter with its first event.
    #[tokio::test(start_paused = true)]
    async fn new_counter_has_its_increase() {
        let chart = chart_of_refusals([None, None, Some(4)]).await;
        assert_eq!(chart.lines[2].latest, "4");
        assert_eq!(chart.lines[2].path.matches('M').count(), 1);
        assert_eq!(chart.lines[2].path.matches('L').count(), 1);
        // The service has had no replay.
        assert_eq!(chart.lines[1].latest, "0");
    }

    #[test]
    fn count_that_stopped_has_plus() {
        let hour = Duration::from_secs(3600);
        let counted = |value, is_exact| Sample {
            keys: [Some(Count::new(value, is_exact)); 3],
            ..sample(Instant::now(), None, None)
        };
        for (samples, latest, largest) in [
            (&[counted(7, true)][..], "7", "7"),
            (&[counted(7, true), counted(1000, false)], "1000+", "1000+"),
            (
                &[counted(1000, false), counted(1000, true)],
                "1000",
                "1000+",
            ),
            (
                &[counted(1000, true), counted(1000, false)],
                "1000+",
                "1000+",
            ),
            (&[counted(1000, false), counted(7, true)], "7", "1000+"),
            // A query may stop before the limit.
            (&[counted(3, false), counted(7, true)], "7", "7"),
        ] {
            let chart = Chart::keys(samples, hour);
            assert_eq!(chart.lines[0].latest, latest);
            assert_eq!(chart.lines[0].largest, largest);
        }
    }

    #[test]
    fn missing_data_is_no_zero() {
        let hour = Duration::from_secs(3600);
        let samples = [sample(Instant::now(), None, None)];
        let chart = Chart::requests(&samples, hour, None);
        assert!(chart.no_data.starts_with("No data: "));
        assert_eq!(chart.lines[0].latest, "no data");
        assert!(chart.lines[0].path.is_empty());
        let chart = Chart::keys(&samples, hour);
        assert!(chart.no_data.starts_with("No data yet"));
    }

    #[test]
    fn partial_points_are_counted() {
        let hour = Duration::from_secs(3600);
        let taken = |total, is_partial| {
            let mut sample = sample(Instant::now(), total, None);
            sample.totals.is_partial = is_partial;
            sample
        };
        let mut samples = vec![
            taken(Some(1.0), false),
            taken(Some(2.0), false),
            taken(Some(3.0), true),
            taken(Some(4.0), false),
            taken(Some(5.0), false),
            // Without values there is no point.
            taken(None, true),
        ];
        let chart = Chart::requests(&samples, hour, None);
        let expected = "In 2 of 4 points, the requests of an endpoint are missing: its metrics could not be read.";
        assert_eq!(chart.notes, [expected]);
        samples.drain(..4);
        assert!(Chart::requests(&samples, hour, None).notes.is_empty());
    }

    #[test]
    fn axis_ends_at_round_number() {
        for (value, expected) in [(0.0, 2.0), (2.0, 2.0), (3.0, 5.0), (51.0, 100.0)] {
            assert!((axis_end(value) - expected).abs() < f64::EPSILON, "{value}");
        }
    }
}
