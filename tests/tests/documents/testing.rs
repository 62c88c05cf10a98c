//! The project of the guide to testing, built from an empty directory: its tests pass, and fail if the service is broken.

use std::process::Output;

use crate::project::{Blocks, cargo_command, create_project};

fn blocks() -> Blocks {
    Blocks::from_heading("## Exactly-once, without a server\n", "guide/testing.md")
}

/// Runs the tests of the guide's project with this source and these arguments of Cargo.
fn run_tests(name: &str, source: &str, args: &[&str]) -> Output {
    let directory = create_project(name, &blocks().first("toml"), "lib.rs", source);
    let mut command = cargo_command(&directory, "test");
    command.arg("--offline").args(args);
    command.output().expect("cargo starts")
}

#[test]
fn guide_project_passes_its_tests() {
    let output = run_tests("guide-payments", &blocks().first("rust"), &[]);
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
    let source = blocks().first("rust");
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
    // Builds no library without tests, and runs no doc tests.
    let output = run_tests("guide-payments-broken", &broken, &["--lib"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{text}");
    assert!(
        text.contains("handler_without_its_lease_does_not_pay ... FAILED")
            && text.contains("left: 2\n right: 1"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
