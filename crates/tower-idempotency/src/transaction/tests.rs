//! The text of each output that cannot be committed.

use std::iter::successors;

use super::{NotRecordable, NotRecordedReason};

#[test]
fn reasons_have_these_texts() {
    let next = |reason: &NotRecordedReason| {
        Some(match reason {
            NotRecordedReason::Status => NotRecordedReason::NoStore,
            NotRecordedReason::NoStore => NotRecordedReason::BrokenRequest,
            NotRecordedReason::BrokenRequest => NotRecordedReason::BrokenBody,
            NotRecordedReason::BrokenBody => NotRecordedReason::Unrecordable,
            NotRecordedReason::Unrecordable => return None,
        })
    };
    let lines: Vec<_> = successors(Some(NotRecordedReason::Status), next)
        .map(|reason| NotRecordable { reason, output: () }.to_string())
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    expected a response that is recorded, found one that is not: status
    expected a response that is recorded, found one that is not: no_store
    expected a response that is recorded, found one that is not: broken_request
    expected a response that is recorded, found one that is not: broken_body
    expected a response that is recorded, found one that is not: unrecordable
    ");
}
