//! The file that a SQLite store creates.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use tests::{scratch::Scratch, sql::claim};
use tower_idempotency::store::Store as _;
use tower_idempotency_sqlx::SqliteStore;

/// Returns the permissions of the file, and of the two files of its write-ahead log.
fn modes(file: &Path) -> [u32; 3] {
    ["", "-wal", "-shm"].map(|suffix| {
        let mut path = file.as_os_str().to_owned();
        path.push(suffix);
        let metadata = fs::metadata(path).expect("the file exists");
        metadata.permissions().mode() & 0o777
    })
}

/// Recorded responses are in the file without encryption.
#[tokio::test]
async fn new_file_is_private() {
    let scratch = Scratch::new();
    let [by_url, by_path] = ["url.db", "path.db"].map(|name| scratch.file(name));
    let url = format!("sqlite:{}", by_url.display());
    for (store, file) in [
        (SqliteStore::from_url(&url).unwrap(), by_url),
        (SqliteStore::in_file(&by_path), by_path),
    ] {
        // The first use creates the file.
        store.check().await.expect_err("no table");
        store.migrate().await.unwrap();
        store.acquire(&claim()).await.unwrap();
        assert_eq!(modes(&file), [0o600; 3], "{file:?}");
    }
}

#[tokio::test]
async fn target_of_link_is_private() {
    let scratch = Scratch::new();
    let link = scratch.file("link.db");
    symlink("current.db", &link).unwrap();
    symlink("keys.db", scratch.file("current.db")).unwrap();
    let store = SqliteStore::in_file(&link);
    store.migrate().await.unwrap();
    store.acquire(&claim()).await.unwrap();
    assert_eq!(modes(&scratch.file("keys.db")), [0o600; 3]);
}

/// An operator has given a group the right to read the file.
#[tokio::test]
async fn mode_of_existing_file_is_unchanged() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.db");
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let store = SqliteStore::in_file(&file);
    store.migrate().await.unwrap();
    store.acquire(&claim()).await.unwrap();
    assert_eq!(modes(&file), [0o640; 3]);
}

#[tokio::test]
async fn url_of_existing_file_creates_none() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.db");
    for path in [
        file.display().to_string(),
        format!("file:{}", file.display()),
    ] {
        for mode in ["ro", "rw"] {
            let url = format!("sqlite:{path}?mode={mode}");
            SqliteStore::connect(&url).await.expect_err("no file");
            assert!(!file.exists(), "{url}");
        }
    }
}

#[tokio::test]
async fn file_of_uri_is_created() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.db");
    let store = SqliteStore::in_file(format!("file:{}?cache=private", file.display()));
    store.migrate().await.unwrap();
    store.check().await.unwrap();
    assert!(file.exists());
}
