//! The DynamoDB store passes the suite on dynoxide.

use std::time::Duration;

use tests::{
    conformance_at_once,
    servers::dynamodb::{StandIn, shared},
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_dynamodb::{DynamoDbOptions, DynamoDbStore};

const UNIT: Duration = Duration::from_millis(150);

async fn with_skew(skew: Duration) -> Subject<DynamoDbStore> {
    let options = DynamoDbOptions::new()
        .with_clock_skew(skew)
        .with_timeout(Duration::from_secs(10));
    let store = shared(StandIn::Dynoxide).store(options).await;
    Subject::new(store).with_unit(UNIT).with_push(false)
}

conformance_at_once! { mod dynoxide, subject = async || with_skew(Duration::ZERO).await }

/// An allowance for skew delays what is over, and changes nothing else.
mod with_an_allowance_for_skew {
    use super::*;

    conformance_at_once! { mod suite, subject = async || with_skew(UNIT / 2).await }
}
