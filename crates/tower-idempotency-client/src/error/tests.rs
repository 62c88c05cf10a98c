//! The texts of errors. A new reason or outcome does not compile without a text in these lists.

use std::iter::successors;

use super::{Error, Reason};
use crate::operation::Outcome;

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
            Reason::Expired => Reason::NotStored,
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
