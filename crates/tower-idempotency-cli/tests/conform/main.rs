//! `idempotency conform` as a process, against servers that conform and servers with one fault each.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

mod conforming;
mod faulty;
mod refusals;
mod service;
mod usage;

use std::{
    io,
    net::SocketAddr,
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use tests::environment::remove_settings;
use tokio::task::spawn_blocking;

/// The output of a run.
struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

/// Runs the command on a thread of its own, because the server is on this runtime.
async fn run(args: Vec<String>) -> CommandOutput {
    let run = move || -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency"));
        command.arg("conform").args(args);
        remove_settings(&mut command).stdin(Stdio::null());
        command.output().expect("the program starts")
    };
    let output = spawn_blocking(run).await.expect("the thread ends");
    CommandOutput {
        code: output.status.code().expect("an exit code"),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

/// Runs the command with an output and errors whose readers have ended. Returns the exit code.
async fn run_unread(args: Vec<String>) -> i32 {
    let run = move || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idempotency"));
        command.arg("conform").args(args);
        remove_settings(&mut command).stdin(Stdio::null());
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        command
            .stdout(writer.try_clone().expect("a pipe"))
            .stderr(writer);
        command.status().expect("the program starts")
    };
    let status = spawn_blocking(run).await.expect("the thread ends");
    status.code().expect("an exit code")
}

/// Returns the arguments that judge every row, for callers `a` and `b`.
fn every_row(server: SocketAddr) -> Vec<String> {
    let url = format!("http://{server}/orders");
    let args = [
        &url,
        "--header=authorization: Bearer a",
        "--other-header=authorization: Bearer b",
        "--other-path=/refunds",
        "--other-method=PATCH",
        "--require-key",
        "--timeout=60s",
    ];
    args.map(str::to_owned).to_vec()
}

impl CommandOutput {
    /// Returns the names of the rows with this verdict, from the lines of JSON.
    fn rows(&self, verdict: &str) -> Vec<String> {
        let lines = self.out.lines();
        let rows = lines.map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
        let rows = rows.filter(|row| row["verdict"] == verdict);
        rows.map(|row| row["row"].as_str().expect("a name").to_owned())
            .collect()
    }
}

/// Returns the row that a request belongs to, which its `User-Agent` names.
fn row(headers: &axum::http::HeaderMap) -> String {
    let agent = headers["user-agent"].to_str().expect("text");
    let (_, row) = agent.split_once('(').expect("a row");
    row.trim_end_matches(')').to_owned()
}
