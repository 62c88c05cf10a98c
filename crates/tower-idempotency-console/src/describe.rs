//! Sentences and JSON about entries, which the pages and the tool `idempotency` have in common.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tower_idempotency::{
    NeedsAttention,
    inspect::{Entry, EntryDetails, Resolution, State},
};

/// Returns a sentence about the next request with the key.
#[must_use]
pub fn next_request(entry: &Entry) -> &'static str {
    match entry.state() {
        State::InProgress => "A retry waits or is rejected while the lease lasts.",
        State::Orphaned if entry.retry_allowed => {
            "The next equal request executes once more, unless the service never takes over."
        }
        State::Orphaned => {
            "A retry executes again under the policy that takes over, and is rejected under the policy that refuses."
        }
        State::NeedsAttention => "Each retry is rejected until an operator resolves the entry.",
        State::Completed => "Each retry gets the recorded response.",
        _ => "A retry may be rejected: this version cannot read the entry.",
    }
}

/// Returns a sentence about the requests after this decision, by its [name](Resolution::name).
#[must_use]
pub fn consequence(decision: &str) -> &'static str {
    match decision {
        "free" => {
            "The next request with the key executes as the first one: an effect that did happen would happen twice."
        }
        "retry" => {
            "The next equal request executes once more under TakeOver and Refuse, and its handler sees a takeover. Under Never it is still rejected."
        }
        "complete" => "Each retry gets this response from now on.",
        "needs-attention" => "Each retry is rejected with the code from now on.",
        "break-lease" => {
            "The handler is not stopped and may still have an effect, but its response is not recorded. The entry is an orphan."
        }
        "delete-record" => {
            "The next request with the key executes again, although an execution has had its effect."
        }
        _ => "Nothing is known about the next request.",
    }
}

/// Returns the JSON object of an entry. Its members never change their meaning.
#[must_use]
pub fn entry_json(entry: &Entry) -> Value {
    json!({
        "id": entry.id().to_hex(),
        "state": entry.state().name(),
        "generation": entry.generation(),
        "owner": &*entry.owner,
        "operation": &*entry.operation,
        "since": time(entry.since),
        "age_ms": u64::try_from(entry.age.as_millis()).unwrap_or(u64::MAX),
        "lease_expires": entry.lease_expires.map(time),
        "expires": entry.expires.map(time),
        "attention_code": entry.attention_code.as_deref(),
        "retry_allowed": entry.retry_allowed,
        "record_bytes": entry.record_bytes,
        "problem": entry.problem.as_deref(),
        "seen": entry.seen().to_string(),
    })
}

/// Returns the JSON object of an entry with the reason of its record. Contains no part of a response.
#[must_use]
pub fn details_json(details: &EntryDetails) -> Value {
    let mut value = entry_json(&details.entry);
    let record = details.record.as_deref();
    let attention = record.and_then(NeedsAttention::in_record);
    value["reason"] = json!(attention.map(|attention| attention.reason().to_owned()));
    value["has_checkpoint"] = json!(details.has_checkpoint);
    value
}

/// Returns the names of the decisions that apply to an entry in its present state.
///
/// A response cannot be recorded for the work of `run_once` and for the items of a batch: their records are values.
#[must_use]
pub fn decisions(entry: &Entry) -> Vec<&'static str> {
    let mut names = decisions_in(entry.state());
    names.retain(|name| *name != "complete" || !entry.is_of_run_once());
    names
}

/// Returns the names of the decisions that apply to entries in this state.
pub(crate) fn decisions_in(state: State) -> Vec<&'static str> {
    let complete = Resolution::Complete {
        record: bytes::Bytes::new(),
        retention: tower_idempotency::Ttl::MAX,
    };
    let all = [
        Resolution::Free,
        Resolution::Retry,
        complete,
        Resolution::NeedsAttention(NeedsAttention::new("code")),
        Resolution::BreakLease,
        Resolution::DeleteRecord,
    ];
    let applying = all.iter().filter(|it| it.applies_to(state));
    applying.map(Resolution::name).collect()
}

/// Returns the text without control characters. A client chooses the operation, and terminals and browsers obey them.
#[must_use]
pub fn printable(text: &str) -> String {
    let is_plain = |c: char| {
        !c.is_control() && !matches!(c, '\u{200e}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let plain = |c| if is_plain(c) { c } else { '\u{fffd}' };
    text.chars().map(plain).collect()
}

/// Returns the two largest units of a duration, such as `3h 12m`.
#[must_use]
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let units = [
        (seconds / 86_400, "d"),
        (seconds / 3600 % 24, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
    ];
    let mut parts = units.iter().skip_while(|(count, _)| *count == 0).take(2);
    match (parts.next(), parts.next()) {
        (None, _) => format!("{}ms", duration.as_millis()),
        (Some((count, unit)), Some((second, next))) if *second > 0 => {
            format!("{count}{unit} {second}{next}")
        }
        (Some((count, unit)), _) => format!("{count}{unit}"),
    }
}

/// Returns the time in RFC 3339, with milliseconds.
#[must_use]
pub fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units() {
        for (seconds, text) in [
            (1, "1s"),
            (61, "1m 1s"),
            (3600, "1h"),
            (3661, "1h 1m"),
            (90_000, "1d 1h"),
            (86_400 * 400, "400d"),
        ] {
            assert_eq!(duration(Duration::from_secs(seconds)), text);
        }
        assert_eq!(duration(Duration::from_millis(7)), "7ms");
    }

    #[test]
    fn control_characters_are_not_printed() {
        assert_eq!(
            printable("a\x1b[2Jb\n\u{202e}c"),
            "a\u{fffd}[2Jb\u{fffd}\u{fffd}c"
        );
        assert_eq!(printable("POST /café"), "POST /café");
    }

    #[test]
    fn each_decision_has_consequence() {
        for state in State::ALL {
            for name in decisions_in(state) {
                assert!(!consequence(name).starts_with("Nothing"), "{name}");
            }
        }
    }
}
