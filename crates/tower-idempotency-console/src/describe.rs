//! Sentences and JSON about entries, which the pages and the tool `idempotency` have in common.

use std::{
    fmt::Display,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tower_idempotency::{
    ExecutionTrace, IdempotencyLayer, NeedsAttention,
    inspect::{Entry, EntryDetails, RecordContents, Resolution, State},
    store::KeyId,
};

/// Largest record that is inflated to describe it, in bytes.
const MAX_RECORD: usize = 64 * 1024 * 1024;

/// Returns the IDs that the entry of a key can have, like [`IdempotencyLayer::key_ids`]. The key may be the value of its
/// header. A quoted value then counts both with its quotes and without them (RFC 9651, section 3.3.3).
///
/// # Errors
///
/// The error of the key if no form of it is valid.
pub fn ids_of_key(
    layer: &IdempotencyLayer,
    key: &str,
    principal: &[&[u8]],
) -> Result<Vec<KeyId>, tower_idempotency::Error> {
    let text = key.trim();
    let ids = layer.key_ids(text, principal);
    let quoted = text.strip_prefix('"').and_then(|it| it.strip_suffix('"'));
    let Some(quoted) = quoted else {
        return ids;
    };
    let mut content = String::with_capacity(quoted.len());
    let mut characters = quoted.chars();
    while let Some(character) = characters.next() {
        let escaped = (character == '\\').then(|| characters.next()).flatten();
        content.push(escaped.unwrap_or(character));
    }
    // A service may use the key with its quotes.
    match (ids, layer.key_ids(&content, principal)) {
        (Ok(ids), Ok(of_content)) => Ok([ids, of_content].concat()),
        (Ok(ids), Err(_)) | (Err(_), Ok(ids)) => Ok(ids),
        (Err(error), Err(_)) => Err(error),
    }
}

/// Returns a sentence about the next request with the key.
#[must_use]
pub fn next_request(entry: &Entry) -> &'static str {
    if entry.is_observed() {
        return "The request was only observed, so this entry stops no retry: each executes while the service observes.";
    }
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

/// Returns a sentence about the next request with the key, like [`next_request`]. Reads the record of the entry, because not
/// each record is a response, and a record may be damaged.
#[must_use]
pub fn next_request_of(details: &EntryDetails) -> &'static str {
    let state = details.entry.state();
    let has_record = matches!(state, State::Completed | State::NeedsAttention);
    if !has_record || details.entry.is_observed() {
        return next_request(&details.entry);
    }
    match details.contents(MAX_RECORD) {
        Some(RecordContents::Unreadable(_)) if state == State::NeedsAttention => {
            "Each retry is rejected until an operator resolves the entry. Its record cannot be read: do not trust its code, its reason and its trace."
        }
        Some(RecordContents::Tombstone { .. }) => {
            "Each retry is rejected with 409 response-not-retained: the execution ended, and its response is not recorded."
        }
        Some(RecordContents::Unreadable(_)) => {
            "Each retry gets the recorded response if the service can read the record. This program cannot."
        }
        _ => next_request(&details.entry),
    }
}

/// Returns the problem of the entry: this program cannot read the entry, or the record of an entry that needs attention.
///
/// Stores read the code of such a record without its checksum. The code, the reason and the trace may then be damaged.
#[must_use]
pub fn problem(details: &EntryDetails) -> Option<String> {
    if details.entry.state() == State::NeedsAttention
        && let Some(RecordContents::Unreadable(problem)) = details.contents(MAX_RECORD)
    {
        return Some(problem);
    }
    details.entry.problem.as_deref().map(str::to_owned)
}

/// Returns the failure that the decision `needs-attention` stores in an entry.
///
/// The code of the entry stays, unless `code` replaces it. The reason follows the reason of the entry, after `; `. Both
/// together are cut at 1,024 bytes. An entry without a failure gets the code `operator`. The new record has a checksum, so the
/// reason of a damaged record is marked as `(damaged)`.
#[must_use]
pub fn kept_for_operator(
    details: &EntryDetails,
    code: Option<&'static str>,
    reason: &str,
) -> NeedsAttention {
    let record = details.record.as_deref();
    let present = record.and_then(NeedsAttention::in_record);
    let present = present.unwrap_or(const { NeedsAttention::new("operator") });
    let present = match code {
        Some(code) => present.with_code(code),
        None => present,
    };
    let reason = match present.reason() {
        "" => reason.to_owned(),
        earlier if problem(details).is_some() => format!("{earlier} (damaged); {reason}"),
        earlier => format!("{earlier}; {reason}"),
    };
    present.with_reason(reason)
}

/// Returns a sentence about the requests after this decision, by its [name](Resolution::name).
#[must_use]
pub fn consequence(decision: &str) -> &'static str {
    match decision {
        "free" => {
            "The next request with the key executes as the first one: an effect that did happen would happen twice."
        }
        "retry" => {
            "The next equal request executes once more, and its handler sees a takeover. Under the orphan policy Never it is still rejected."
        }
        "complete" => {
            "Each retry gets this response for the retention. Afterwards, the next request with the key executes as the first one."
        }
        "needs-attention" => {
            "Each retry is rejected with the code. Your reason is added to the reason of the entry, which stays."
        }
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

/// Returns the JSON object of an entry with the reason and the trace of its record, and its [`problem`]. Contains no part of a
/// response.
#[must_use]
pub fn details_json(details: &EntryDetails) -> Value {
    let mut value = entry_json(&details.entry);
    let record = details.record.as_deref();
    let attention = record.and_then(NeedsAttention::in_record);
    value["reason"] = json!(attention.map(|attention| attention.reason().to_owned()));
    value["problem"] = json!(problem(details));
    value["has_checkpoint"] = json!(details.has_checkpoint);
    let trace = details.record.as_ref();
    let trace = trace.and_then(|record| ExecutionTrace::in_record(details.entry.id(), record));
    value["traceparent"] = json!(trace.map(|trace| trace.as_str().to_owned()));
    value
}

/// Returns the names of the decisions that apply to an entry in its present state.
///
/// A response cannot be recorded for the work of `run_once` and for the items of a batch: their records are values. `retry`,
/// `complete` and `needs-attention` do not apply to the entry of an observed request, because this entry stops no retry.
#[must_use]
pub fn decisions(entry: &Entry) -> Vec<&'static str> {
    let mut names = decisions_in(entry.state());
    names.retain(|name| match *name {
        "complete" => !entry.is_of_run_once() && !entry.is_observed(),
        "retry" | "needs-attention" => !entry.is_observed(),
        _ => true,
    });
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

/// Returns the text without control characters: a client chooses the operation, and terminals and browsers obey such
/// characters.
#[must_use]
pub fn printable(text: &str) -> String {
    let plain = |c| if is_plain(c) { c } else { '\u{fffd}' };
    text.chars().map(plain).collect()
}

/// Returns `false` for a character that a terminal obeys, or that changes the direction of a text.
fn is_plain(c: char) -> bool {
    let changes_direction = matches!(
        c,
        '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    !c.is_control() && !changes_direction
}

/// Returns the JSON without control characters. Those that JSON permits in a string are escaped too, because terminals obey
/// some of them. Line breaks between two values stay.
#[must_use]
pub fn json_text(json: &impl Display) -> String {
    // A line break in a string is escaped already.
    let is_plain = |c| is_plain(c) || c == '\n';
    let text = json.to_string();
    if text.chars().all(is_plain) {
        return text;
    }
    // JSON has such a character only in a string. All of them are below U+10000.
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_plain(c) {
            escaped.push(c);
        } else {
            let digits = format!("{:04x}", u32::from(c));
            escaped.push_str("\\u");
            escaped.push_str(&digits);
        }
    }
    escaped
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

/// Returns the time in RFC 3339, with milliseconds. A time before 1970 or after 9999 is shown as the nearest of these.
#[must_use]
pub fn time(time: SystemTime) -> String {
    let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH);
    let since_1970 = since_1970.unwrap_or_default().min(END_OF_9999);
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since_1970).to_string()
}

/// The last millisecond that RFC 3339 can write, since 1970.
const END_OF_9999: Duration = Duration::from_millis(253_402_300_799_999);

#[cfg(test)]
mod tests {
    use tower_idempotency::inspect::Seen;

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
        assert_eq!(printable("POST /café – “x”"), "POST /café – “x”");
    }

    #[test]
    fn json_has_no_control_characters() {
        let value = json!({"operation": "POST /café\u{9b}2J\u{202e}\u{61c}\x1b\u{7f}"});
        let text = json_text(&value);
        assert_eq!(
            text,
            r#"{"operation":"POST /café\u009b2J\u202e\u061c\u001b\u007f"}"#
        );
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn extreme_times_are_clamped() {
        let epoch = SystemTime::UNIX_EPOCH;
        for (at, text) in [
            (epoch - Duration::from_secs(1), "1970-01-01T00:00:00.000Z"),
            (epoch + END_OF_9999, "9999-12-31T23:59:59.999Z"),
            (
                epoch + Duration::from_secs(1 << 40),
                "9999-12-31T23:59:59.999Z",
            ),
        ] {
            assert_eq!(time(at), text);
        }
    }

    #[test]
    fn retries_of_observed_request_execute() {
        for &state in State::ALL {
            let mut entry = Entry::new(Seen::new(KeyId::from_bytes([7; 32]), state, 1, 1));
            entry.operation = "observed: POST /orders".into();
            assert!(next_request(&entry).contains("each executes"), "{state}");
            for name in decisions(&entry) {
                let is_harmless = matches!(name, "free" | "break-lease" | "delete-record");
                assert!(is_harmless, "{state}: {name}");
            }
            assert!(!decisions(&entry).is_empty(), "{state}");
            let mut details = EntryDetails::new(entry);
            // No version can read this record.
            for record in [None, Some("?".into())] {
                details.record = record;
                let next = next_request_of(&details);
                assert_eq!(next, next_request(&details.entry), "{state}");
            }
        }
    }

    #[test]
    fn each_decision_has_consequence() {
        for &state in State::ALL {
            for name in decisions_in(state) {
                assert!(!consequence(name).starts_with("Nothing"), "{name}");
            }
        }
    }
}
