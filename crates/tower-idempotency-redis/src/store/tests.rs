//! The text of each reply that the store cannot use. None quotes the reply.

use std::error::Error;

use redis::Value;
use tower_idempotency::store::StoreError;

use super::{
    COMPLETED, GRANTED, IN_PROGRESS, NOT_GRANTED, ORPHANED, UNREADABLE, parse_acquire_reply,
    parse_holder_reply,
};

fn source(error: &StoreError) -> String {
    let source = error.source().expect("an error with a source");
    source.to_string()
}

fn bytes(bytes: &[u8]) -> Value {
    Value::BulkString(bytes.to_vec())
}

#[test]
fn replies_to_acquire_have_these_texts() {
    let fingerprint = || bytes(&[7; 32]);
    let completed = |rest: Vec<Value>| -> Vec<Value> {
        let record = [Value::Int(COMPLETED), fingerprint(), bytes(b"record")];
        record.into_iter().chain(rest).collect()
    };
    let unreadable: [(Vec<Value>, &str); 6] = [
        (
            vec![Value::Int(IN_PROGRESS), Value::Nil, Value::Int(1)],
            "expected a fingerprint, found something else",
        ),
        (
            vec![Value::Int(ORPHANED), bytes(b"short"), Value::Int(1)],
            "expected a fingerprint of 32 bytes, found something else",
        ),
        (
            vec![Value::Int(COMPLETED), fingerprint(), Value::Nil],
            "expected a record, found something else",
        ),
        (
            completed(vec![Value::Int(1), bytes(b"short")]),
            "expected a token of 16 bytes, or none, found something else",
        ),
        (
            completed(vec![Value::Int(1), Value::Int(1)]),
            "expected a token of 16 bytes, or none, found something else",
        ),
        (vec![Value::Int(UNREADABLE)], NOT_OF_THIS_VERSION),
    ];
    for (reply, expected) in unreadable {
        let error = parse_acquire_reply(Value::Array(reply)).unwrap_err();
        assert!(matches!(error, StoreError::Unreadable(_)), "{expected}");
        assert_eq!(source(&error), expected);
    }
    let unexpected: [(Vec<Value>, &str); 5] = [
        (
            vec![Value::Int(NOT_GRANTED)],
            "expected maxmemory-policy noeviction, found another one since the store connected",
        ),
        // The lease is granted.
        (
            vec![Value::Int(GRANTED), Value::Int(-1)],
            "expected a generation of 1 or more, found something else",
        ),
        (
            completed(vec![Value::Int(1)]),
            "expected the expiry and the token of a record, found something else",
        ),
        (
            vec![bytes(b"hunter2")],
            "expected a reply of the acquire script, found something else",
        ),
        (
            vec![],
            "expected a reply of the acquire script, found something else",
        ),
    ];
    for (reply, expected) in unexpected {
        let error = parse_acquire_reply(Value::Array(reply)).unwrap_err();
        assert!(matches!(error, StoreError::Backend(_)), "{expected}");
        assert_eq!(source(&error), expected);
    }
    let error = parse_acquire_reply(Value::Nil).unwrap_err();
    let expected = "expected an array, found something else";
    assert_eq!(source(&error), expected);
}

const NOT_OF_THIS_VERSION: &str = "expected an entry of this version, found something else";

#[test]
fn replies_to_lease_holder_have_these_texts() {
    for (reply, expected) in [
        (-1, NOT_OF_THIS_VERSION),
        (2, "expected 1, 0 or -1, found something else"),
    ] {
        let error = parse_holder_reply(&Value::Int(reply)).unwrap_err();
        assert_eq!(source(&error), expected);
    }
}
