//! SQLite passes the suite, on one file that all cases share.

use std::{fs, path::PathBuf, sync::OnceLock};

use tests::conformance_at_once;
use tower_idempotency::conformance::Subject;
use tower_idempotency_sqlx::SqliteStore;

async fn on_a_file() -> Subject<SqliteStore> {
    let store = SqliteStore::new(file());
    store.migrate().await.expect("a file that can be written");
    Subject::new(store).with_push(false)
}

/// The tests of this binary do not say when they are over, so the file of those before goes with the next.
fn file() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("conformance_sqlite");
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("a directory for throwaway files");
        directory.join(format!("{}.db", std::process::id()))
    })
}

conformance_at_once! { mod sqlite, subject = on_a_file }
