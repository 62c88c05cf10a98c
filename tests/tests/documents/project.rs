//! A project outside of the workspace, made of the code blocks of a document.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tests::playground::cargo;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Arguments of Cargo. The layer and tokio are built again for the features of each document. Simulations need them
/// optimized, the documents do not. Crates with the same features in each document are not built again.
pub(crate) const NOT_OPTIMIZED: [&str; 4] = [
    "--config",
    "profile.dev.package.tower-idempotency.opt-level=0",
    "--config",
    "profile.dev.package.tokio.opt-level=0",
];

/// Code blocks of a document after a heading.
pub(crate) struct Blocks(String);

impl Blocks {
    /// Reads the document, and leaves out the part before the heading.
    pub(crate) fn from_heading(heading: &str, document: &str) -> Self {
        let text = fs::read_to_string(format!("{REPOSITORY}/docs/{document}"));
        let text = text.expect("a document");
        let (_, rest) = text.split_once(heading).expect("a heading");
        Self(rest.to_owned())
    }

    /// Returns the first block of this language.
    pub(crate) fn first(&self, language: &str) -> String {
        let (_, rest) = self
            .0
            .split_once(&format!("```{language}\n"))
            .expect("a block");
        let (block, _) = rest.split_once("```").expect("an end of the block");
        block.to_owned()
    }
}

/// Deletes the directory of the project, creates the project in it, and returns the directory.
///
/// Paths of dependencies begin with `../tower-idempotency/` in the document. Here they lead to this repository.
pub(crate) fn create_project(name: &str, dependencies: &str, file: &str, source: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(directory.join("src")).expect("a directory");
    let dependencies = dependencies.replace("../tower-idempotency/", &format!("{REPOSITORY}/"));
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n{dependencies}\n[workspace]\n"
    );
    fs::write(directory.join("Cargo.toml"), manifest).expect("a manifest");
    fs::write(directory.join("src").join(file), source).expect("a source file");
    // Uses the versions of the workspace, so that dependencies are not built again.
    let lock = format!("{REPOSITORY}/Cargo.lock");
    fs::copy(lock, directory.join("Cargo.lock")).expect("a lock file");
    directory
}

/// Returns a cargo command in the directory of a project.
///
/// The command uses the profile of the workspace and its directory of intermediate artifacts. With another profile all
/// dependencies would be built again.
pub(crate) fn cargo_command(directory: &Path, subcommand: &str) -> Command {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let shared = target.parent().expect("a target directory");
    let manifest = fs::read_to_string(format!("{REPOSITORY}/Cargo.toml"));
    let manifest = manifest.expect("the manifest of the workspace");
    let (_, profile) = manifest.split_once("[profile.dev]").expect("a profile");
    let settings = directory.join("profile.toml");
    fs::write(&settings, format!("[profile.dev]{profile}")).expect("a file of settings");
    let mut command = cargo();
    command
        .args([subcommand, "--config"])
        .arg(settings)
        .args(NOT_OPTIMIZED)
        .current_dir(directory)
        .env("CARGO_TARGET_DIR", directory.join("target"))
        .env("CARGO_BUILD_BUILD_DIR", shared);
    command
}
