//! Files of a test.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::servers::directory;

/// A throwaway directory without a server; gone when this is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new one.
    ///
    /// # Panics
    ///
    /// When none can be made.
    #[must_use]
    pub fn new() -> Self {
        Self(directory("scratch"))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A file in it, whether or not it is there.
    #[must_use]
    pub fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
