//! Counters from the text format of Prometheus.

use std::{collections::HashMap, fmt, mem};

/// The counters of the chart: executions, replays and refusals.
const COUNTERS: [&str; 3] = [
    "idempotency_granted_total",
    "idempotency_replayed_total",
    "idempotency_refused_total",
];

/// Largest response, in bytes.
pub(super) const MAX_BYTES: usize = 16 * 1024 * 1024;
/// Longest line, in bytes.
const MAX_LINE: usize = 64 * 1024;
/// Largest number of series of all counters of the chart.
pub(super) const MAX_SERIES: usize = 10_000;
/// Largest value of a counter, 2^53: a float represents each integer up to it.
pub(super) const MAX_VALUE: f64 = 9_007_199_254_740_992.0;

/// The counters of requests in one response of an endpoint: executions, replays and refusals, with the values of their series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestCounters {
    /// The values of each counter, by the labels of the series.
    pub(super) series: [Series; 3],
}

/// The values of the series of a counter, by their labels.
pub(super) type Series = HashMap<Box<[u8]>, f64>;

/// Reads the counters of requests from a response in the text format of Prometheus, part by part.
///
/// Other lines are skipped. The memory is bounded, whatever the endpoint sends. A response has at most 16 MiB, and a line has
/// at most 64 KiB. The counters of requests have at most 10,000 series.
#[derive(Clone, Debug, Default)]
pub struct CounterReader {
    /// The line that the next part continues.
    line: Vec<u8>,
    bytes: usize,
    counters: RequestCounters,
}

/// Error of a response that is too large, damaged, or without a counter of requests. Its text contains nothing of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterTextError(&'static str);

impl CounterTextError {
    /// There is no text: the function that renders the metrics of this process panicked.
    pub(crate) const PANICKED: Self = Self("the function that renders them panicked");
}

impl CounterReader {
    /// Creates a reader for one response.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the next part of the response. A part may end within a line.
    ///
    /// # Errors
    ///
    /// [`CounterTextError`] if the response exceeds a limit, or if a line of a counter of requests is damaged. The rest of the
    /// response need not be read.
    pub fn read(&mut self, part: &[u8]) -> Result<(), CounterTextError> {
        self.bytes = self.bytes.saturating_add(part.len());
        if self.bytes > MAX_BYTES {
            return Err(CounterTextError("the metrics are larger than 16 MiB"));
        }
        for (number, piece) in part.split(|byte| *byte == b'\n').enumerate() {
            if number > 0 {
                self.end_line()?;
            }
            if self.line.len() + piece.len() > MAX_LINE {
                return Err(CounterTextError("a line is longer than 64 KiB"));
            }
            self.line.extend_from_slice(piece);
        }
        Ok(())
    }

    /// Returns the counters at the end of the response.
    ///
    /// # Errors
    ///
    /// [`CounterTextError`] if the last line is incomplete, or if the response has no counter of requests.
    pub fn finish(self) -> Result<RequestCounters, CounterTextError> {
        if !self.line.is_empty() {
            return Err(CounterTextError("the last line is incomplete"));
        }
        if self.counters.series.iter().all(HashMap::is_empty) {
            return Err(CounterTextError(
                "the response has none of the counters of requests",
            ));
        }
        Ok(self.counters)
    }

    fn end_line(&mut self) -> Result<(), CounterTextError> {
        let mut line = mem::take(&mut self.line);
        self.counters.read_line(&line)?;
        // The next line uses the same memory.
        line.clear();
        self.line = line;
        Ok(())
    }
}

impl RequestCounters {
    /// Reads a whole text.
    pub(crate) fn parse(text: &str) -> Result<Self, CounterTextError> {
        let mut reader = CounterReader::new();
        reader.read(text.as_bytes())?;
        reader.finish()
    }

    /// Returns the sum of the series of each counter: 0 for a counter without series.
    pub(crate) fn totals(&self) -> [f64; 3] {
        let counters = self.series.each_ref();
        counters.map(|series| series.values().sum::<f64>())
    }

    /// Reads a line. Only series of the counters are read.
    fn read_line(&mut self, line: &[u8]) -> Result<(), CounterTextError> {
        let line = line.trim_ascii_start();
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_:".contains(byte);
        let (name, rest) = line.split_at(line.iter().take_while(|byte| is_name(byte)).count());
        let counter = COUNTERS.iter().position(|it| it.as_bytes() == name);
        let Some(counter) = counter else {
            return Ok(());
        };
        let damaged = CounterTextError("a line of a counter is damaged");
        let (labels, value) = parse_series(rest).ok_or(damaged)?;
        if self.series.iter().map(HashMap::len).sum::<usize>() >= MAX_SERIES {
            return Err(CounterTextError("the counters have over 10,000 series"));
        }
        match self.series[counter].insert(labels, value) {
            None => Ok(()),
            Some(_) => Err(CounterTextError("a series of a counter occurs twice")),
        }
    }
}

/// Parses the labels of a series, sorted, and its value. Returns `None` if the text is damaged.
fn parse_series(text: &[u8]) -> Option<(Box<[u8]>, f64)> {
    let Some(mut rest) = text.trim_ascii_start().strip_prefix(b"{") else {
        // Without labels, a space separates the name from the value.
        let is_separate = text.first().is_some_and(|byte| b" \t".contains(byte));
        return is_separate.then_some((Box::default(), parse_value(text)?));
    };
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_ascii_start();
        if let Some(value) = rest.strip_prefix(b"}") {
            labels.sort_unstable();
            return Some((labels.join(&b',').into_boxed_slice(), parse_value(value)?));
        }
        let (label, after) = split_label(rest)?;
        labels.push(label);
        rest = after.trim_ascii_start();
        match rest.strip_prefix(b",") {
            Some(after) => rest = after,
            None if rest.starts_with(b"}") => {}
            None => return None,
        }
    }
}

/// Splits a label with its value from the rest. Returns `None` if there is no whole label.
fn split_label(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let name = text.iter().take_while(|byte| is_name(byte)).count();
    if name == 0 {
        return None;
    }
    let after = text[name..].trim_ascii_start().strip_prefix(b"=")?;
    let value = after.trim_ascii_start().strip_prefix(b"\"")?;
    let mut bytes = value.iter();
    loop {
        match *bytes.next()? {
            b'"' => return Some(text.split_at(text.len() - bytes.as_slice().len())),
            b'\\' => {
                let is_escape = b"\\\"n".contains(bytes.next()?);
                if !is_escape {
                    return None;
                }
            }
            _ => {}
        }
    }
}

/// Parses the value of a series. A time and an example may follow it.
fn parse_value(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text).ok()?;
    // OpenMetrics permits an example of a counted event.
    let text = text.split_once(" # ").map_or(text, |(value, _)| value);
    let mut words = text.split([' ', '\t']).filter(|word| !word.is_empty());
    let value = words.next()?.parse::<f64>().ok()?;
    let has_valid_time = words
        .next()
        .is_none_or(|time| time.parse::<f64>().is_ok_and(f64::is_finite));
    let is_valid = has_valid_time && words.next().is_none() && (0.0..=MAX_VALUE).contains(&value);
    is_valid.then_some(value)
}

impl fmt::Display for CounterTextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for CounterTextError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> &'static str {
        RequestCounters::parse(text).expect_err("it is rejected").0
    }

    #[test]
    fn series_are_added() {
        let text = "# HELP idempotency_granted_total text\n# TYPE idempotency_granted_total counter\n\
                    idempotency_granted_total{code=\"x} 9\"} 2\n\
                    \tidempotency_granted_total { a = \"\\\"\\\\\\n\" , code=\"y\", } 3e0 1700000000000\n\
                    idempotency_granted_total_more 7\nidempotency_granted_total: 8\nidempotency_granted what\n\n\
                    idempotency_refused_total 4 # {trace_id=\"z\"} 1\n# EOF\n";
        let counters = RequestCounters::parse(text).expect("valid text");
        assert_eq!(counters.totals(), [5.0, 0.0, 4.0]);
    }

    #[test]
    fn damaged_lines_are_rejected() {
        for end in [
            "",
            " ",
            "{} ",
            "+5",
            " five",
            " 5 5 5",
            " 5 soon",
            " 5 #",
            " 5\r",
            " -1",
            " NaN",
            " +Inf",
            " 9007199254740994",
            "{ 5",
            "{a} 5",
            "{=\"b\"} 5",
            "{a=b} 5",
            "{a=\"b} 5",
            "{a=\"b\\",
            "{a=\"\\x\"} 5",
            "{a=\"b\" c=\"d\"} 5",
            "{a=\"b\"",
            "{,} 5",
            " \u{e9}",
        ] {
            let text = format!("idempotency_granted_total{end}\n");
            assert_eq!(error(&text), "a line of a counter is damaged", "{end:?}");
        }
        let twice = "idempotency_granted_total{a=\"1\",b=\"2\"} 1\nidempotency_granted_total{b=\"2\",a=\"1\"} 1\n";
        assert_eq!(error(twice), "a series of a counter occurs twice");
        let incomplete = "idempotency_granted_total 1\nidempotency_replayed_total 12";
        assert_eq!(error(incomplete), "the last line is incomplete");
        for other in ["", "a_total 1\n", "<h1>idempotency_granted_total 1</h1>\n"] {
            let expected = "the response has none of the counters of requests";
            assert_eq!(error(other), expected);
        }
    }

    #[test]
    fn parts_end_anywhere() {
        let text =
            "a_total 1\nidempotency_granted_total{code=\"x\"} 12\nidempotency_replayed_total 3\n";
        let whole = RequestCounters::parse(text);
        for end in 0..=text.len() {
            let mut reader = CounterReader::new();
            for part in [&text[..end], &text[end..]] {
                reader.read(part.as_bytes()).expect("valid text");
            }
            assert_eq!(reader.finish(), whole, "{end}");
        }
    }

    #[test]
    fn response_is_limited() {
        let comment = format!("#{}\n", "x".repeat(64 * 1024 - 2));
        let mut reader = CounterReader::new();
        for _ in 0..256 {
            reader.read(comment.as_bytes()).expect("16 MiB");
        }
        let error_of_bytes = reader.read(b"#").expect_err("it is too large");
        assert_eq!(error_of_bytes.0, "the metrics are larger than 16 MiB");
        let mut reader = CounterReader::new();
        let half = "#".repeat(32 * 1024);
        reader.read(half.as_bytes()).expect("a short line");
        reader.read(half.as_bytes()).expect("64 KiB");
        let error_of_line = reader.read(b"#").expect_err("it is too long");
        assert_eq!(error_of_line.0, "a line is longer than 64 KiB");
        let series = |count: u32| {
            let lines = (0..count).map(|n| format!("idempotency_granted_total{{a=\"{n}\"}} 1\n"));
            lines.collect::<String>()
        };
        let most = RequestCounters::parse(&series(10_000)).expect("few series");
        assert_eq!(most.totals(), [10_000.0, 0.0, 0.0]);
        assert_eq!(
            error(&series(10_001)),
            "the counters have over 10,000 series"
        );
    }
}
