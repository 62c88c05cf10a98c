//! The memory store passes the suite.

use tower_idempotency::{
    conformance::{Case, Processes, Subject},
    store::MemoryStore,
};

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

tower_idempotency::inspect_conformance_tests! {
    mod inspect_of_two_clients,
    start_paused = true,
    store = || async {
        let store = MemoryStore::new().with_details();
        Processes::new([store.clone(), store])
    },
}

/// The store is too small for the record of the case.
#[test]
fn small_store_rejects_large_record() {
    let case = Case::named("large_record_is_stored_or_rejected_for_size");
    let subject = async || Subject::new(MemoryStore::new().with_max_bytes(1 << 19));
    case.run(true, subject, |_| None);
}
