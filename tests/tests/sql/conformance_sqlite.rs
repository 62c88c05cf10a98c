//! SQLite passes the suite, on one file that all cases share.

use std::{path::PathBuf, process::Command, sync::OnceLock};

use tests::{
    conformance::run_all_cases,
    conformance_modes,
    servers::{Guard, directory},
};
use tokio::sync::OnceCell;
use tower_idempotency::conformance::{Processes, Subject};
use tower_idempotency_sqlx::SqliteStore;

async fn store() -> SqliteStore {
    static MIGRATED: OnceCell<()> = OnceCell::const_new();
    let store = SqliteStore::in_file(file());
    let migrate = async || store.migrate().await.expect("a file that can be written");
    MIGRATED.get_or_init(migrate).await;
    store
}

async fn on_a_file() -> Subject<SqliteStore> {
    Subject::new(store().await).with_push(false)
}

/// Returns a subject with two stores on the file, which have no lock of a process in common.
async fn in_two_processes() -> Subject<Processes<SqliteStore>> {
    Subject::new(Processes::new([store().await, store().await])).with_push(false)
}

/// Returns the file for all tests of this binary. A guard deletes the file when the test process ends.
fn file() -> PathBuf {
    static GUARD: OnceLock<Guard> = OnceLock::new();
    let guard = GUARD.get_or_init(|| {
        let mut nothing = Command::new("sleep");
        Guard::start(&directory("sqlite"), nothing.arg("infinity"), "KILL")
    });
    guard.directory().join("keys.db")
}

// F-171
conformance_modes! { mod sqlite, subject = on_a_file }

// F-051
#[test]
fn sqlite_in_two_processes() {
    run_all_cases(in_two_processes, |_| None);
}
