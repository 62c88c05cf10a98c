//! The Redis store passes the suite, on a server of its own.

use tests::servers::redis::shared;
use tower_idempotency_redis::RedisStore;

tower_idempotency::conformance_tests! {
    mod redis,
    store = || async {
        let url = shared().url();
        RedisStore::connect(&url).await.expect("the server runs")
    },
}
