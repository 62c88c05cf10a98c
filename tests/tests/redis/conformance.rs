//! The Redis store passes the suite, on a separate server.

use tests::servers::redis::shared;

tower_idempotency::conformance_tests! {
    mod redis,
    store = || shared().store(),
}
