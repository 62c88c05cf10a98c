//! The policy as text for humans.

use std::fmt;

use super::{ConcurrentPolicy, FingerprintPolicy, KeyPolicy, Policy, ScopePolicy, StatusRange};

impl fmt::Display for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_key(f, &self.key)?;
        let methods = self.methods.join(", ");
        let exceptions = if self.has_exceptions {
            ", with exceptions"
        } else {
            ""
        };
        writeln!(f, "methods: {methods}{exceptions}")?;
        if self.enforced_percent < 100 {
            writeln!(
                f,
                "in force: for {} % of the callers",
                self.enforced_percent
            )?;
        }
        write_scope(f, &self.scope)?;
        write_fingerprint(f, &self.fingerprint)?;
        match self.key_reuse {
            Some(status) => writeln!(f, "another request under the key: {status}")?,
            None => writeln!(f, "another request under the key: a request of its own")?,
        }
        write_concurrent_requests(f, &self.concurrent_requests)?;
        writeln!(
            f,
            "execution without an outcome: {}; failed execution: {}",
            self.orphans, self.failure
        )?;
        writeln!(f, "store down: {}", self.store_failure)?;
        let recorded: Vec<_> = self
            .recorded_statuses
            .iter()
            .map(StatusRange::to_string)
            .collect();
        writeln!(
            f,
            "recorded: {}, for {:?}",
            recorded.join(", "),
            self.retention
        )?;
        writeln!(f, "too large or streamed: {} retries", self.unrecordable)?;
        match &self.replay_marker {
            Some(marker) => writeln!(f, "replays have {}: {}", marker.name, marker.value)?,
            None => writeln!(f, "replays have no marker")?,
        }
        write!(f, "errors:")?;
        for error in &self.errors {
            write!(f, " {} {},", error.status, error.code)?;
        }
        let media_type = self.errors.first().map_or("", |error| &error.media_type);
        write!(f, " as {media_type}")
    }
}

fn write_key(f: &mut fmt::Formatter<'_>, key: &KeyPolicy) -> fmt::Result {
    write!(f, "key: ")?;
    match (&key.header, &key.alias) {
        (Some(header), Some(alias)) => write!(f, "header {header}, or {alias}")?,
        (Some(header), None) => write!(f, "header {header}")?,
        (None, _) => write!(f, "made by the service")?,
    }
    write!(f, ", {} if missing", key.missing)?;
    if let Some(syntax) = key.syntax {
        write!(f, ", syntax {syntax}")?;
    }
    match key.max_bytes {
        Some(max) => writeln!(f, ", {} to {max} bytes", key.min_bytes),
        None => writeln!(f, ", {} bytes or more", key.min_bytes),
    }
}

fn write_scope(f: &mut fmt::Formatter<'_>, scope: &ScopePolicy) -> fmt::Result {
    let callers = if scope.is_shared {
        "all callers together".to_owned()
    } else {
        format!("each caller ({})", scope.callers.join(", "))
    };
    let host = if scope.host { ", each host" } else { "" };
    let endpoint = if scope.endpoint {
        ", each endpoint"
    } else {
        ""
    };
    writeln!(f, "another key for: {callers}{host}{endpoint}")
}

fn write_fingerprint(f: &mut fmt::Formatter<'_>, fingerprint: &FingerprintPolicy) -> fmt::Result {
    write!(f, "body of a retry: {}", fingerprint.body)?;
    if fingerprint.numbers_by_value {
        write!(f, ", numbers by value")?;
    }
    if !fingerprint.without.is_empty() {
        write!(f, ", without {}", fingerprint.without.join(", "))?;
    }
    writeln!(f)
}

fn write_concurrent_requests(
    f: &mut fmt::Formatter<'_>,
    concurrent: &ConcurrentPolicy,
) -> fmt::Result {
    write!(f, "duplicate during the execution: {}", concurrent.status)?;
    if !concurrent.wait.is_zero() {
        write!(f, " after {:?}", concurrent.wait)?;
    }
    if let Some(after) = concurrent.retry_after {
        write!(f, ", Retry-After {}", after.as_secs())?;
    }
    writeln!(f)
}
