//! The texts of errors, and their sources. A new reason or outcome does not compile without a text in these lists.

use std::{error::Error as StdError, fmt, io, iter::successors};

use super::{Error, Reason, is_not_sent};
use crate::operation::{Operation, Outcome};

fn text(reason: Reason, outcome: Outcome) -> String {
    Error::new(reason, None, outcome, None).to_string()
}

#[test]
fn reasons_have_these_texts() {
    let next = |reason: &Reason| {
        Some(match reason {
            Reason::Failed => Reason::Attempt,
            Reason::Attempt => Reason::OtherKey,
            Reason::OtherKey => Reason::NotReady,
            Reason::NotReady => Reason::Deadline,
            Reason::Deadline => Reason::Expired,
            Reason::Expired => Reason::WrongClock,
            Reason::WrongClock => Reason::NotStored,
            Reason::NotStored => return None,
        })
    };
    let lines: Vec<_> = successors(Some(Reason::Failed), next)
        .map(|reason| text(reason, Outcome::NotExecuted))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    no response to the last attempt, the operation was not executed
    no response to the last attempt, the operation was not executed
    request not sent, because its header and its operation have different keys, or the header cannot be read, the operation was not executed
    no further request sent, because the inner service is not ready, the operation was not executed
    deadline of the call passed without a response, the operation was not executed
    lifetime of the key ended without a response, the operation was not executed
    no further request sent, because a clock is wrong: the first attempt is in the future, the operation was not executed
    request not sent, because the outbox did not store it, the operation was not executed
    ");
}

#[test]
fn outcomes_have_these_texts() {
    let next = |outcome: &Outcome| {
        Some(match outcome {
            Outcome::NotExecuted => Outcome::Definite,
            Outcome::Definite => Outcome::ResponseLost,
            Outcome::ResponseLost => Outcome::Unknown,
            Outcome::Unknown => return None,
        })
    };
    let lines: Vec<_> = successors(Some(Outcome::NotExecuted), next)
        .map(|outcome| text(Reason::Failed, outcome))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    no response to the last attempt, the operation was not executed
    no response to the last attempt, the operation has a response
    no response to the last attempt, the operation has a response, which was lost
    no response to the last attempt, the operation may have been executed
    ");
}

/// Error of another crate that returns the source of its error as its own.
#[derive(Debug)]
struct Transparent(Error);

impl fmt::Display for Transparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl StdError for Transparent {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

/// Returns an error after a last attempt whose connection was refused.
fn refused(reason: Reason, outcome: Outcome) -> Error {
    let source = io::Error::from(io::ErrorKind::ConnectionRefused);
    Error::new(reason, Some(Operation::new()), outcome, Some(source.into()))
}

/// An earlier attempt may have been executed.
#[test]
fn hidden_error_keeps_outcome() {
    for reason in [
        Reason::Failed,
        Reason::NotReady,
        Reason::Deadline,
        Reason::NotStored,
    ] {
        for (outcome, is_proof) in [
            (Outcome::NotExecuted, true),
            (Outcome::Unknown, false),
            (Outcome::ResponseLost, false),
        ] {
            assert_eq!(is_not_sent(&refused(reason, outcome)), is_proof);
            // Without the feature, the type that hides the error may be that of an open connection.
            let is_proof = is_proof && cfg!(feature = "hyper-util");
            let hidden = Transparent(refused(reason, outcome));
            assert_eq!(is_not_sent(&hidden), is_proof, "{hidden:?}");
        }
        let stored = refused(reason, Outcome::NotExecuted).with_outcome(Outcome::Unknown);
        assert!(!is_not_sent(&Transparent(stored)), "{reason:?}");
    }
}

#[test]
fn sources_contain_error_of_inner_service() {
    for outcome in [Outcome::NotExecuted, Outcome::Unknown] {
        let error = refused(Reason::Failed, outcome);
        let sources: Vec<_> = successors(error.source(), |source| (*source).source()).collect();
        let last = sources.last().unwrap();
        assert!(last.is::<io::Error>(), "{last:?}");
        assert_eq!(sources[0].to_string(), last.to_string());
        assert_eq!(sources.len() > 1, outcome == Outcome::Unknown);
    }
}

/// A layer that sends each attempt of an outer one once is outside of another series.
#[test]
fn error_of_series_stays_in_error_of_attempt() {
    for (outcome, is_proof) in [(Outcome::NotExecuted, true), (Outcome::Unknown, false)] {
        let mut error = refused(Reason::Failed, outcome);
        for _ in 0..2 {
            error = Error::new(Reason::Attempt, None, Outcome::Unknown, Some(error.into()));
            assert_eq!(is_not_sent(&error), is_proof, "{error:?}");
        }
    }
}
