//! The first command of the README, as typed by a user after a clone of the repository.

use std::{fs, path::Path, process::Command};

use http::StatusCode;
use tests::playground::{Playground, cargo};

use crate::project::NOT_OPTIMIZED;

/// Returns the first command of the README with these additional arguments.
///
/// The command uses a separate target directory, because the other tests build the playground with more features, and
/// would replace the executable. It shares the build directory for intermediate artifacts with them. The layer and
/// tokio are not optimized, as in the projects of the documents.
fn first_command(args: &[&str]) -> Command {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = fs::read_to_string(readme).expect("a README");
    let (_, try_it) = readme.split_once("## Try it").expect("a heading");
    let (_, shell) = try_it.split_once("```sh\n").expect("a command");
    let line = shell.lines().next().expect("a line");
    let mut words = line.split_whitespace();
    assert_eq!(words.next(), Some("cargo"), "{line}");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let shared = target.parent().expect("a target directory");
    let mut command = cargo();
    command
        .args(words)
        .args(NOT_OPTIMIZED)
        .arg("--")
        .args(args)
        .env("CARGO_TARGET_DIR", target.join("first-command"))
        .env("CARGO_BUILD_BUILD_DIR", shared)
        .env_remove("RUST_LOG");
    command
}

#[tokio::test]
async fn first_readme_command_executes_key_once() {
    let playground = Playground::started_by(&first_command(&["--listen", "127.0.0.1:0"]));
    let key = "8e03978e-40d5";
    let first = playground.post("/orders", key, b"one espresso").await;
    let retry = playground.post("/orders", key, b"one espresso").await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(first.text().contains(r#""execution":1"#), "{first:?}");
    assert_eq!((first.is_replay(), retry.is_replay()), (false, true));
    assert_eq!(first.body, retry.body);
    assert_eq!(playground.executions().await, 1);
}

#[test]
fn missing_store_feature_is_named() {
    for (store, feature) in [
        (
            "dynamodb://hush?endpoint=http://localhost:8000",
            "the feature dynamodb",
        ),
        ("rediss://:hush@localhost/0", "the feature tls"),
    ] {
        let mut command = first_command(&["--store", store, "--listen", "127.0.0.1:0"]);
        let output = command.output().expect("cargo starts");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        let error = message.lines().last().unwrap_or_default();
        assert!(error.starts_with("error: "), "{message}");
        assert!(error.ends_with(feature), "{message}");
        assert!(!error.contains("hush"), "{message}");
    }
}
