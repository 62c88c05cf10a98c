//! The DynamoDB store passes the suite on moto.

use std::time::Duration;

use tests::servers::dynamodb::{StandIn, shared};
use tower_idempotency::conformance::Subject;
use tower_idempotency_dynamodb::DynamoDbOptions;

tests::conformance_at_once! {
    mod moto,
    subject = async || {
        let options = DynamoDbOptions::new()
            .with_clock_skew(Duration::ZERO)
            .with_timeout(Duration::from_secs(10));
        let store = shared(StandIn::Moto).store(options).await;
        // It makes one call at a time, and each takes milliseconds.
        Subject::new(store)
            .with_unit(Duration::from_millis(300))
            .with_push(false)
    },
}
