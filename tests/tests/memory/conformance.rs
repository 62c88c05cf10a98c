//! The memory store passes the suite.

use tower_idempotency::store::MemoryStore;

tower_idempotency::conformance_tests! {
    mod memory,
    start_paused = true,
    store = || async { MemoryStore::new() },
}
