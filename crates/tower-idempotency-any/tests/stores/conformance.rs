//! Stores that were opened from a URL pass the conformance suite.

use std::{path::PathBuf, process::Command, sync::OnceLock, time::Instant};

use tests::{
    HANG_GUARD,
    conformance::run_all_inspect_cases,
    conformance_modes,
    servers::{Guard, directory},
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_any::AnyStore;

tower_idempotency::conformance_tests! {
    mod memory,
    start_paused = true,
    store = || async { AnyStore::open("memory").await.expect("memory") },
}

tower_idempotency::inspect_conformance_tests! {
    mod operators_of_memory,
    start_paused = true,
    store = || async { AnyStore::open("memory").await.expect("memory") },
}

#[cfg(feature = "sqlite")]
#[test]
fn sqlite_passes_cases_about_operators() {
    run_all_inspect_cases(async || sqlite_file().await.with_inspector());
}

#[cfg(feature = "sqlite")]
conformance_modes! { mod sqlite, subject = sqlite_file }

#[cfg(feature = "sqlite")]
async fn sqlite_file() -> Subject<AnyStore> {
    let url = format!("sqlite:{}", file().display());
    let began = Instant::now();
    // If the machine stalls, the writers of other cases can hold the file for longer than the busy timeout.
    let opened = loop {
        let opened = AnyStore::open(&url).await;
        let error = opened.as_ref().err().map(ToString::to_string);
        let is_locked = error.is_some_and(|error| error.contains("database is locked"));
        if !is_locked || began.elapsed() > HANG_GUARD {
            break opened;
        }
    };
    Subject::new(opened.expect("a file that can be written")).with_push(false)
}

/// Returns the path of the file that all cases share. The guard deletes it when the process ends.
#[cfg(feature = "sqlite")]
fn file() -> PathBuf {
    static GUARD: OnceLock<Guard> = OnceLock::new();
    let guard = GUARD.get_or_init(|| {
        let mut nothing = Command::new("sleep");
        Guard::start(&directory("sqlite"), nothing.arg("infinity"), "KILL")
    });
    guard.directory().join("keys.db")
}
