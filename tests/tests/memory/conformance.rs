//! The memory store passes the suite.

use tower_idempotency::store::MemoryStore;

tower_idempotency::conformance_tests! {
    mod memory,
    start_paused = true,
    store = || async { MemoryStore::new() },
}

tower_idempotency::inspect_conformance_tests! {
    mod inspect,
    start_paused = true,
    store = || async { MemoryStore::new().with_details() },
}

tower_idempotency::inspect_conformance_tests! {
    mod inspect_without_details,
    start_paused = true,
    store = || async { MemoryStore::new() },
}
