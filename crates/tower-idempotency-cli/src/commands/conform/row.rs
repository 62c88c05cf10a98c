//! The rows: the name, the level, the source and the rule of each.

/// The weight of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Without it a retry can execute twice, or a client gets a wrong response. Decides the exit code.
    Must,
    /// The draft recommends it.
    Should,
    /// Servers differ, and both ways are right.
    Report,
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Must => "must",
            Self::Should => "should",
            Self::Report => "report",
        }
    }
}

/// The judgement of a row, with its reason.
#[derive(Clone, Debug)]
pub(super) enum Verdict {
    Holds(String),
    Fails(String),
    Unjudged(String),
}

impl Verdict {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Holds(_) => "holds",
            Self::Fails(_) => "does not hold",
            Self::Unjudged(_) => "not judged",
        }
    }

    pub(super) fn reason(&self) -> &str {
        match self {
            Self::Holds(reason) | Self::Fails(reason) | Self::Unjudged(reason) => reason,
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) level: Level,
    pub(super) source: &'static str,
    pub(super) rule: &'static str,
}

const fn row(name: &'static str, level: Level, source: &'static str, rule: &'static str) -> Row {
    Row {
        name,
        level,
        source,
        rule,
    }
}

use Level::{Must, Report, Should};

const RETRY: &str = "\"The resource SHOULD respond with the result of the previously completed operation, success or an error.\"";
const SYNTAX: &str =
    "\"Idempotency-Key is an Item Structured Header. Its value MUST be a String.\"";
const CONCURRENT: &str =
    "Concurrent duplicates execute once: no two of them get different successful responses.";

/// The rows in the order in which they are judged and printed.
pub(super) const ROWS: &[Row] = &[
    row(
        "fresh",
        Must,
        "draft 2.6; S-083",
        "\"The resource SHOULD process the request normally and respond with an appropriate response and status code.\"",
    ),
    row("retry", Must, "draft 2.6; S-101", RETRY),
    row(
        "retry-headers",
        Must,
        "draft 2.6; S-104",
        "A retry gets the headers that describe the representation: type, encoding, language, location, validators.",
    ),
    row(
        "marked",
        Report,
        "S-101",
        "A replay has a header that marks it.",
    ),
    row(
        "other-body",
        Must,
        "draft 2.2; S-038",
        "\"The idempotency key MUST be unique and MUST NOT be reused with another request with a different request payload.\"",
    ),
    row(
        "other-body-422",
        Should,
        "draft 2.7; S-038",
        "\"the resource SHOULD reply with a HTTP 422 status code\"",
    ),
    row(
        "other-path",
        Must,
        "S-039",
        "The key with another path is refused, or is another key.",
    ),
    row(
        "other-method",
        Must,
        "S-040",
        "The key with another method is refused, or is another key.",
    ),
    row(
        "other-caller",
        Must,
        "S-053",
        "The key of another caller is another key.",
    ),
    row(
        "case",
        Should,
        "draft 2.1; S-045",
        "Keys are strings: two keys that differ in their letter case are two keys.",
    ),
    row(
        "quoting",
        Report,
        "S-013",
        "The quoted and the unquoted spelling are one key.",
    ),
    row(
        "missing-key",
        Must,
        "draft 2.7; S-002",
        "\"the resource SHOULD reply with an HTTP 400 status code\" if a key is required and missing.",
    ),
    row("key-empty", Should, "draft 2.1; S-004", SYNTAX),
    row(
        "key-long",
        Should,
        "S-006",
        "A key of 1,024 characters gets 400.",
    ),
    row("key-control", Should, "draft 2.1; S-005", SYNTAX),
    row("key-list", Should, "draft 2.1; S-005", SYNTAX),
    row("concurrent", Must, "draft 2.6; S-124", CONCURRENT),
    row("many", Must, "draft 2.6; S-133", CONCURRENT),
    row(
        "concurrent-409",
        Should,
        "draft 2.7; S-124",
        "\"the resource SHOULD reply with an HTTP 409 status code with body containing problem description.\"",
    ),
    row(
        "disconnect",
        Must,
        "S-142",
        "A client that disconnects gets the response of its request with a retry.",
    ),
    row(
        "problem",
        Should,
        "draft 2.7; S-296",
        "Error responses are application/problem+json, or have a Link with rel=\"describedby\".",
    ),
];
