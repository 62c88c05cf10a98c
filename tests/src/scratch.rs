//! Files of a test.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::servers::directory;

/// A throwaway directory without a server. It is deleted when this is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates the directory.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be created.
    #[must_use]
    pub fn new() -> Self {
        Self(directory("scratch"))
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a file in the directory. The file need not exist.
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
