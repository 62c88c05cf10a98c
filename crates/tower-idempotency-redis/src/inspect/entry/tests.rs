//! The text of each entry that an operator cannot resolve, because it is damaged. None quotes the entry.

use super::*;

/// Returns an entry, read at the time 1,000, whose lease expires at 2,000.
fn leased() -> RawEntry {
    let fields: [&[u8]; 8] = [
        b"L",
        &[1; 16],
        &[2; 32],
        b"1",
        b"2000",
        b"500",
        b"host:1",
        b"POST /orders",
    ];
    RawEntry {
        fields: fields.map(|field| Some(field.to_vec())),
        record: None,
        record_len: None,
        left: 5000,
        now: 1000,
        is_hash: true,
    }
}

fn with(field: usize, value: &[u8]) -> RawEntry {
    let mut entry = leased();
    entry.fields[field] = Some(value.to_vec());
    entry
}

#[test]
fn damaged_entries_have_these_texts() {
    let id = KeyId::from_bytes([7; 32]);
    assert_eq!(leased().entry(id).state(), State::InProgress);
    let other_type = RawEntry {
        is_hash: false,
        ..leased()
    };
    for (entry, expected) in [
        (other_type, "its key has another type than a hash"),
        (with(FINGERPRINT, b"short"), "its fingerprint is damaged"),
        (
            with(LEASE_ENDS, b"soon"),
            "the expiry of its lease is damaged",
        ),
        (with(SINCE, b"now"), "its time is damaged"),
        (with(STATE, b"X"), "another version wrote it"),
        (with(TOKEN, b"short"), "its token is damaged"),
        (with(GENERATION, b"one"), "its generation is damaged"),
        (
            with(STATE, b"D"),
            "the record is of another version, or damaged",
        ),
    ] {
        let entry = entry.entry(id);
        assert_eq!(entry.state(), State::Unreadable, "{expected}");
        assert_eq!(entry.problem.as_deref(), Some(expected));
    }
}

#[test]
fn entry_with_unread_record_counts_as_completed() {
    let entry = RawEntry {
        record_len: Some(1_000_000),
        ..with(STATE, b"D")
    };
    assert_eq!(
        entry.entry(KeyId::from_bytes([7; 32])).state(),
        State::Completed
    );
    assert!(entry.is_in_index(State::Completed));
    assert!(!entry.is_in_index(State::NeedsAttention));
}
