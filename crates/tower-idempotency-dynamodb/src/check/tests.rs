//! The messages of failed checks.

use super::check_error;
use crate::error::{DynamoDbError, DynamoDbErrorKind};

#[test]
fn failed_checks_have_these_texts() {
    let rights = "check the credentials and the clock, and permit GetItem, PutItem, UpdateItem, DeleteItem, Query, \
                  DescribeTable and DescribeTimeToLive";
    let replace = "add or replace the index as in docs/stores/dynamodb.md, or name another table and call `create_table`";
    for (kind, remedy) in [
        (DynamoDbErrorKind::Refused, rights),
        (DynamoDbErrorKind::Unusable, replace),
        (
            DynamoDbErrorKind::ClockSkew,
            "synchronize the clock of this machine",
        ),
        (
            DynamoDbErrorKind::Unreachable,
            "check the endpoint, the region and the network",
        ),
    ] {
        let error = check_error(&DynamoDbError::new(kind, "the problem"));
        assert_eq!(error.to_string(), format!("the problem: {remedy}"));
    }
}
