//! The text of each kind. A new kind does not compile without a text in this list.

use std::iter::successors;

use super::{Kind, SqlError};

#[test]
fn kinds_have_these_texts() {
    let next = |kind: &Kind| {
        let error = match kind {
            Kind::Reported { code, .. } if code == "42P01" => {
                SqlError::from_reported("23505", "a duplicate of hunter2")
            }
            Kind::Reported { .. } => SqlError::from_driver("the cause"),
            Kind::Driver(_) => SqlError::contended(),
            Kind::Contended => SqlError::transaction_ended(),
            Kind::TransactionEnded => SqlError::unreadable("no record"),
            Kind::Unreadable(_) => SqlError::refused("expected a name, found none"),
            Kind::Refused(_) => return None,
        };
        Some(error.kind)
    };
    let first = SqlError::from_reported("42P01", "relation \"keys\" does not exist");
    let texts: Vec<_> = successors(Some(first.kind), next)
        .map(|kind| SqlError { kind }.to_string())
        .collect();
    let expected = [
        "the database reported 42P01: relation \"keys\" does not exist",
        "the database reported 23505",
        "the call to the database failed",
        "the entry changed during every attempt",
        "the transaction had already ended",
        "the database returned no record",
        "expected a name, found none",
    ];
    assert_eq!(texts, expected);
}

#[cfg(feature = "sqlx")]
#[test]
fn value_of_other_type_is_not_quoted() {
    let error = SqlError::from(sqlx::Error::Decode("hunter2".into()));
    let expected = "the database returned a value of an unexpected type";
    assert_eq!(error.to_string(), expected);
    assert!(!format!("{error:?}").contains("hunter2"));
}
