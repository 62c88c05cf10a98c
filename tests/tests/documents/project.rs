//! A project outside of the workspace, made of the code blocks of a document.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use tests::playground::cargo;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Code blocks of one chapter of a document.
pub(crate) struct Blocks(String);

impl Blocks {
    /// Reads the document from the heading on.
    pub(crate) fn after(heading: &str, document: &str) -> Self {
        let text = fs::read_to_string(format!("{REPOSITORY}/docs/{document}"));
        let text = text.expect("a document");
        let (_, chapter) = text.split_once(heading).expect("a heading");
        Self(chapter.to_owned())
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

/// Creates a project in an empty folder, and returns the folder.
pub(crate) fn project(name: &str, dependencies: &str, file: &str, source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("src")).expect("a folder");
    let dependencies = dependencies.replace("../tower-idempotency/", &format!("{REPOSITORY}/"));
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n{dependencies}\n[workspace]\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).expect("a manifest");
    fs::write(folder.join("src").join(file), source).expect("a source file");
    // Uses the versions of the workspace, so that dependencies are not built again.
    let lock = format!("{REPOSITORY}/Cargo.lock");
    fs::copy(lock, folder.join("Cargo.lock")).expect("a lock file");
    folder
}

/// Returns a cargo command in the folder of a project.
///
/// The command uses the profile of the workspace and its directory of intermediate artifacts. With another profile all
/// dependencies would be built again.
pub(crate) fn command(folder: &Path, subcommand: &str) -> Command {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let shared = target.parent().expect("a target directory");
    let manifest = fs::read_to_string(format!("{REPOSITORY}/Cargo.toml"));
    let manifest = manifest.expect("the manifest of the workspace");
    let (_, profile) = manifest.split_once("[profile.dev]").expect("a profile");
    let settings = folder.join("profile.toml");
    fs::write(&settings, format!("[profile.dev]{profile}")).expect("a file of settings");
    let mut command = cargo();
    command
        .args([subcommand, "--config"])
        .arg(settings)
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .env("CARGO_BUILD_BUILD_DIR", shared);
    command
}
