//! A store that was opened from a URL passes the conformance suite.

use tower_idempotency::conformance::{Subject, every_case};
use tower_idempotency_any::AnyStore;

/// `AnyStore` only passes calls on. The suites of the stores have faults and threads.
#[tokio::test(start_paused = true)]
async fn memory_passes_every_case() {
    let store = AnyStore::open("memory").await.expect("memory");
    every_case(Subject::new(store)).await;
}

tower_idempotency::inspect_conformance_tests! {
    mod operators_of_memory,
    start_paused = true,
    store = || async { AnyStore::open("memory").await.expect("memory") },
}
