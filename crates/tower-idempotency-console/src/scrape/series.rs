//! The series of one process, over its responses.

use std::mem;

use super::text::{MAX_BYTES, MAX_SERIES, MAX_VALUE, RequestCounters, Series};

/// Limit of a total: that of one counter.
pub(super) const MAX_TOTAL: f64 = MAX_VALUE;

/// The series of the last response of a process, and the last values of series that it lacked.
#[derive(Debug)]
pub(crate) struct SeriesHistory {
    last: RequestCounters,
    /// Series of earlier responses that the last one lacked. All of them together have the limits of one response.
    absent: RequestCounters,
}

impl SeriesHistory {
    /// Creates the history of a process from its first response.
    pub(crate) fn new(first: RequestCounters) -> Self {
        Self {
            last: first,
            absent: RequestCounters::default(),
        }
    }

    /// Records the next response, and returns the increase of each counter since the last one.
    ///
    /// All series are of one process: if one of them fell, a restart has reset each of them. A series that was reset has
    /// increased by its value, and so has a series that is new.
    ///
    /// A series that a response lacks keeps its value until it returns. If it returns with a lower value, it alone was reset:
    /// the process has removed it, for example because it had been idle.
    pub(crate) fn record(&mut self, response: RequestCounters) -> [f64; 3] {
        let last = mem::replace(&mut self.last, response);
        let is_reset = has_fallen(&last, &self.last);
        if is_reset {
            self.absent = RequestCounters::default();
            return self.last.totals();
        }
        let mut increases = [0.0; 3];
        for (counter, increase) in increases.iter_mut().enumerate() {
            for (labels, value) in &self.last.series[counter] {
                let before = last.series[counter].get(labels).copied().or_else(|| {
                    let returned = self.absent.series[counter].remove(labels);
                    returned.filter(|before| before <= value)
                });
                *increase += value - before.unwrap_or_default();
            }
        }
        self.add_absent(last);
        increases
    }

    /// Adds the series of an earlier response that the last one lacks.
    fn add_absent(&mut self, mut earlier: RequestCounters) {
        for (earlier, last) in earlier.series.iter_mut().zip(&self.last.series) {
            earlier.retain(|labels, _| !last.contains_key(labels));
        }
        // The series of one response are within the limits. If both are too many, those that were absent before are dropped.
        let (present, added) = (Size::of(&self.absent), Size::of(&earlier));
        if present.series + added.series > MAX_SERIES || present.bytes + added.bytes > MAX_BYTES {
            self.absent = RequestCounters::default();
        }
        for (absent, earlier) in self.absent.series.iter_mut().zip(earlier.series) {
            absent.extend(earlier);
        }
    }
}

/// Number of series, and of the bytes of their labels.
struct Size {
    series: usize,
    bytes: usize,
}

impl Size {
    fn of(counters: &RequestCounters) -> Self {
        let labels = counters.series.iter().flat_map(Series::keys);
        Self {
            series: counters.series.iter().map(Series::len).sum(),
            bytes: labels.map(|it| it.len()).sum(),
        }
    }
}

/// Returns `true` if a series of both responses has a lower value in the second one.
fn has_fallen(earlier: &RequestCounters, later: &RequestCounters) -> bool {
    let mut counters = earlier.series.iter().zip(&later.series);
    counters.any(|(earlier, later)| {
        later.iter().any(|(labels, value)| {
            let before = earlier.get(labels);
            before.is_some_and(|before| before > value)
        })
    })
}

/// Adds increases to totals. A total that reaches [`MAX_TOTAL`] begins at zero again.
pub(crate) fn add_increases(totals: &mut [f64; 3], increases: [f64; 3]) {
    for (total, increase) in totals.iter_mut().zip(increases) {
        *total += increase;
        // From 2^53 on, a float does not count single requests. A total that falls is a gap in the chart.
        if *total >= MAX_TOTAL {
            *total = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a response with this number of series, whose labels begin with the name and have the length.
    fn response(name: &str, series: usize, length: usize) -> RequestCounters {
        let mut response = RequestCounters::default();
        for number in 0..series {
            let labels = format!("{name}{number:0>width$}", width = length - name.len());
            response.series[0].insert(labels.into_bytes().into_boxed_slice(), 100.0);
        }
        response
    }

    /// Each response of the endpoint has other labels.
    #[test]
    fn absent_series_are_limited() {
        for (series, length) in [(6000, 8), (10_000, 8), (200, 60_000)] {
            let mut history = SeriesHistory::new(response("a", series, length));
            for name in ["b", "c", "d"] {
                let increases = history.record(response(name, series, length));
                assert_eq!(increases[0], 100.0 * series as f64);
                assert_eq!(Size::of(&history.absent).series, series, "{name}");
            }
            // The series of the response before the last one are still known, and those of the first one are not.
            let returned = response("c", 1, length);
            assert_eq!(history.record(returned), [0.0; 3]);
            let dropped = response("a", 1, length);
            assert_eq!(history.record(dropped), [100.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn few_absent_series_are_all_kept() {
        let mut history = SeriesHistory::new(response("a", 10, 8));
        for name in ["b", "c", "d"] {
            history.record(response(name, 10, 8));
        }
        assert_eq!(Size::of(&history.absent).series, 30);
        assert_eq!(history.record(response("a", 10, 8)), [0.0; 3]);
        assert_eq!(Size::of(&history.absent).series, 30);
    }
}
