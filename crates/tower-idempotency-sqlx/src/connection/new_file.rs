//! The file of a SQLite store that does not exist yet.

use std::{
    fs::{self, OpenOptions},
    io,
    path::Path,
};

use tower_idempotency::store::Token;

/// Creates an empty file that only its owner can read, unless the file exists. SQLite gives `-wal` and `-shm` the mode of the
/// file.
///
/// SQLite itself would create a file that every user of the machine can read.
///
/// # Errors
///
/// If the file cannot be created, or if another process creates it at the same time.
pub(super) fn create_private(path: &Path) -> io::Result<()> {
    // SQLite follows links, also if the last target is missing.
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = path.with_file_name(target),
            Err(_) => break,
        }
    }
    if path.try_exists()? {
        return Ok(());
    }
    // Closing a file releases all locks of this process on it, also those of other connections. So the file has another name
    // until it is closed.
    let token = Token::random().map_err(io::Error::other)?;
    let suffix = u128::from_be_bytes(*token.as_bytes());
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{suffix:032x}"));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    drop(options.open(&draft)?);
    let linked = fs::hard_link(&draft, &path);
    fs::remove_file(&draft).ok();
    // Some file systems have no hard links.
    linked.or_else(|_| options.open(path).map(drop))
}

/// The number of links that systems follow.
const MAX_LINKS: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_file_is_unchanged() {
        let name = format!("tower-idempotency-new-file-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir_all(&directory).expect("a directory for throwaway files");
        let (file, missing) = (directory.join("keys.db"), directory.join("other.db"));
        fs::write(&file, "rows").expect("the file can be written");
        create_private(&file).expect("the file exists");
        assert_eq!(
            fs::read(&file).expect("the file can be read"),
            b"rows".as_slice()
        );
        create_private(&missing).expect("the file can be created");
        assert!(fs::read(&missing).expect("the file can be read").is_empty());
        // No draft stays.
        let files = fs::read_dir(&directory).expect("the directory can be read");
        assert_eq!(files.count(), 2);
        fs::remove_dir_all(&directory).ok();
    }
}
