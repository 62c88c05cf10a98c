//! The metrics of a scrape, and those that the documents list.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

use crate::servers::tool;

/// A metric as the documents list it.
#[derive(Debug, PartialEq, Eq)]
pub struct Documented {
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    /// Name of the label, or empty.
    pub label: String,
    /// Values of the label that are present from the start. `None` is a series without the label.
    pub values: BTreeSet<Option<String>>,
}

/// A metric of a scrape.
#[derive(Debug, Default)]
pub struct Metric {
    /// The text after `# TYPE`.
    pub kind: String,
    /// The text after `# HELP`.
    pub help: String,
    /// Its samples. Those of a histogram have the names of their parts.
    pub samples: Vec<Sample>,
}

/// A sample of a scrape.
#[derive(Debug)]
pub struct Sample {
    labels: Vec<(String, String)>,
}

impl Sample {
    /// Returns the value of a label.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<String> {
        let found = self.labels.iter().find(|(label, _)| label == name);
        found.map(|(_, value)| value.clone())
    }

    /// Returns the series in the form `name{label=value}`, without the bounds of buckets.
    #[must_use]
    pub fn series(&self, name: &str) -> String {
        let labels = self.labels.iter().filter(|(label, _)| label != "le");
        let labels: Vec<_> = labels
            .map(|(label, value)| format!("{label}={value}"))
            .collect();
        match labels.is_empty() {
            true => name.to_owned(),
            false => format!("{name}{{{}}}", labels.join(",")),
        }
    }
}

/// Parses a scrape in the text format of Prometheus.
///
/// # Panics
///
/// Panics if a sample belongs to no metric with a type.
#[must_use]
pub fn parse(page: &str) -> BTreeMap<String, Metric> {
    let mut metrics = BTreeMap::<String, Metric>::new();
    for line in page.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').expect("a help text");
            metrics.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else {
            let (series, _value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let parts = ["_bucket", "_sum", "_count"];
            let base = parts.iter().find_map(|part| name.strip_suffix(part));
            let name = if metrics.contains_key(name) {
                name
            } else {
                base.unwrap_or(name)
            };
            let metric = metrics.get_mut(name).expect("a type before the sample");
            metric.samples.push(Sample {
                labels: parse_labels(labels.trim_end_matches('}')),
            });
        }
    }
    // Metrics without a sample are left out.
    metrics.retain(|_, metric| !metric.samples.is_empty());
    metrics
}

fn parse_labels(labels: &str) -> Vec<(String, String)> {
    let labels = labels.split(',').filter(|label| !label.is_empty());
    labels
        .map(|label| {
            let (name, value) = label.split_once('=').expect("a value of the label");
            (name.to_owned(), value.trim_matches('"').to_owned())
        })
        .collect()
}

/// Returns the table of metrics in `docs/operations/metrics-and-alarms.md`.
///
/// The values of a label are in the last cell, or in the table that the cell links to. A metric whose values come from
/// handlers has a series without the label.
///
/// # Panics
///
/// Panics if the page has another form.
#[must_use]
pub fn documented() -> BTreeMap<String, Documented> {
    let page = read("docs/operations/metrics-and-alarms.md");
    let mut codes = first_column(&read("docs/guide/clients.md"), "| status, `code` |");
    codes.retain(|code| code != "Retry-After");
    let reasons = first_column(&page, "| `reason` |");
    let rows = page
        .lines()
        .filter(|line| line.starts_with("| `idempotency_"));
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let ["", name, kind, label, text, ""] = cells[..] else {
            panic!("expected four cells: {row}");
        };
        let label = label.trim_matches('`');
        let values: BTreeSet<_> = match name.trim_matches('`') {
            "idempotency_refused_total" => codes.iter().cloned().map(Some).collect(),
            "idempotency_released_total" => reasons.iter().cloned().map(Some).collect(),
            "idempotency_needs_attention_total" | "idempotency_unresolved_total" => [None].into(),
            _ if label.is_empty() => [None].into(),
            _ => {
                let (text, _feature) = text.split_once("; feature").unwrap_or((text, ""));
                quoted(text).map(Some).collect()
            }
        };
        let metric = Documented {
            kind: kind.to_owned(),
            label: label.to_owned(),
            values,
        };
        (name.trim_matches('`').to_owned(), metric)
    })
    .collect()
}

fn read(path: &str) -> String {
    let path = format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn quoted(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// Returns the words in backticks in the first column of the table with this heading.
fn first_column(page: &str, heading: &str) -> Vec<String> {
    let (_, table) = page
        .split_once(&format!("\n{heading}"))
        .unwrap_or_else(|| panic!("no table {heading}"));
    let rows = table.lines().skip(2);
    rows.take_while(|row| row.starts_with('|'))
        .flat_map(|row| {
            let cell = row.split('|').nth(1).unwrap_or_default();
            quoted(cell).collect::<Vec<_>>()
        })
        .collect()
}

/// Passes a scrape to `promtool check metrics`, which prints its findings.
///
/// # Panics
///
/// Panics if it finds anything.
pub fn check(page: &str) {
    let tool = tool("promtool", "prometheus", &[]);
    let mut promtool = Command::new(tool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    let mut stdin = promtool.stdin.take().expect("a piped stdin");
    stdin.write_all(page.as_bytes()).expect("it reads");
    drop(stdin);
    let output = promtool.wait_with_output().expect("it ends");
    let found = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && found.is_empty(), "{found}");
}
