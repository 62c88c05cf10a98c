//! The Redis store passes the suite, on a server of its own.

use tests::servers::redis::shared;

tower_idempotency::conformance_tests! {
    mod redis,
    store = || shared().store(),
}
