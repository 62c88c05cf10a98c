//! The project of the guide to testing, built from an empty folder: its tests pass, and fail if the service is broken.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Output,
};

use tests::playground::cargo;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Returns the first code block of this language in the chapter.
fn block(language: &str) -> String {
    let guide = fs::read_to_string(format!("{REPOSITORY}/docs/guide/testing.md"));
    let guide = guide.expect("the guide");
    let (_, chapter) = guide
        .split_once("## Exactly-once, without a server\n")
        .expect("the chapter");
    let (_, rest) = chapter
        .split_once(&format!("```{language}\n"))
        .expect("a block");
    let (block, _) = rest.split_once("```").expect("an end of the block");
    block.to_owned()
}

/// Creates the project in an empty folder.
fn project(name: &str, source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("src")).expect("a folder");
    let dependencies = block("toml").replace("../tower-idempotency/", &format!("{REPOSITORY}/"));
    let manifest = format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n{dependencies}\n[workspace]\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).expect("a manifest");
    fs::write(folder.join("src/lib.rs"), source).expect("a source file");
    // Uses the versions of the workspace, so that dependencies are not built again.
    let lock = format!("{REPOSITORY}/Cargo.lock");
    fs::copy(lock, folder.join("Cargo.lock")).expect("a lock file");
    folder
}

fn run_tests(folder: &Path) -> Output {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut command = cargo();
    command
        .args(["test", "--offline"])
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", target.join("testing-guide"))
        .env(
            "CARGO_BUILD_BUILD_DIR",
            target.parent().expect("a target directory"),
        );
    command.output().expect("cargo starts")
}

#[test]
fn guide_project_passes_its_tests() {
    let output = run_tests(&project("guide-payments", &block("rust")));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("3 passed"), "{text}");
}

/// The effect is outside of the transaction.
#[test]
fn guide_project_fails_without_transaction() {
    let source = block("rust");
    let broken = source.replace(
        ".bind(cents).execute(&mut *tx)",
        ".bind(cents).execute(&app.pool)",
    );
    // Before the transaction begins, because SQLite has one writer at a time.
    let begin = "    let mut tx = app.store.begin(lease, &app.pool).await?;\n";
    let effect = broken
        .lines()
        .find(|line| line.contains("insert into payments"))
        .expect("the effect")
        .to_owned();
    let broken = broken.replace(begin, "").replace(
        &effect,
        &format!("{effect}\n{}", begin.replace("let mut tx", "let tx")),
    );
    assert_ne!(broken, source);
    let output = run_tests(&project("guide-payments-broken", &broken));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("handler_without_its_lease_does_not_pay ... FAILED")
            && text.contains("left: 2\n right: 1"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
