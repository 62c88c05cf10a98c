//! The messages of failed checks.

use tower_idempotency::store::CheckErrorKind;

use super::{ADD_INDEX, MOVE_TTL, RENAME, check_error, part_error};
use crate::error::{DynamoDbError, DynamoDbErrorKind};

const RIGHTS: &str = "check the credentials and the clock, and permit GetItem, PutItem, UpdateItem, DeleteItem, Query, \
                      DescribeTable and DescribeTimeToLive";

#[test]
fn failed_checks_have_these_texts() {
    let reachable = "check the endpoint, the region and the network";
    for (kind, remedy) in [
        (DynamoDbErrorKind::Refused, RIGHTS),
        (
            DynamoDbErrorKind::ClockSkew,
            "synchronize the clock of this machine",
        ),
        (DynamoDbErrorKind::Unreachable, reachable),
        // A reply without a description of the table.
        (DynamoDbErrorKind::Unusable, reachable),
    ] {
        let error = check_error(&DynamoDbError::new(kind, "the problem"));
        assert_eq!(error.to_string(), format!("the problem: {remedy}"));
    }
}

/// Each part of the table has its own remedy. A failed call about a part has that of the call.
#[test]
fn unusable_parts_have_these_texts() {
    for (part, remedy) in [
        (
            RENAME,
            "correct the name of the table, or for a new service call `create_table` with another name",
        ),
        (
            ADD_INDEX,
            "add or replace the index as in docs/stores/dynamodb.md",
        ),
        (
            MOVE_TTL,
            "disable the TTL, wait until it is off (up to an hour), and enable it on `ttl`",
        ),
    ] {
        let unusable = DynamoDbError::new(DynamoDbErrorKind::Unusable, "the problem");
        let error = part_error(&unusable, part);
        assert_eq!(error.kind(), CheckErrorKind::Incomplete);
        assert_eq!(error.to_string(), format!("the problem: {remedy}"));
        let refused = DynamoDbError::new(DynamoDbErrorKind::Refused, "the problem");
        let error = part_error(&refused, part);
        assert_eq!(error.kind(), CheckErrorKind::Denied);
        assert_eq!(error.to_string(), format!("the problem: {RIGHTS}"));
    }
}
