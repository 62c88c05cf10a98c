//! The tool as a process, on every store.

mod audit;
mod calls;
mod counts;
mod damage;
mod document;
mod errors;
mod full_output;
mod interruption;
mod manual;
mod observed;
mod purge;
mod reading;
mod repair;
mod scenario;
mod scrape;
mod serve;
mod session;
mod stores;
mod terminal;

use std::{
    io::Write as _,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use tests::{HANG_GUARD, environment::remove_settings, proxy::Proxy};
use tower_idempotency_any::{AnyStore, OpenError, OpenOptions};

/// The output of a command, and its exit code.
#[derive(Debug)]
struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

/// Opens a store that waits for a busy machine.
async fn open(url: &str) -> Result<AnyStore, OpenError> {
    OpenOptions::new()
        .with_timeout(Duration::from_secs(120))
        .open(url)
        .await
}

/// Runs the tool. Its input is no terminal.
fn run(store: &str, args: &[&str]) -> CommandOutput {
    run_in(Path::new("."), store, args)
}

/// Returns the program, without settings of the environment. It gets SIGHUP, even if `nohup` has started the tests.
fn program() -> Command {
    let mut command = Command::new("env");
    remove_settings(&mut command);
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_idempotency")]);
    command
}

/// Returns a command of the tool, without its arguments.
fn command(directory: &Path, store: &str) -> Command {
    let mut command = program();
    command.current_dir(directory);
    command.env("IDEMPOTENCY_STORE", store);
    command.env("USER", "alice");
    // The machine may be busy.
    command.env("IDEMPOTENCY_TIMEOUT", "120s");
    // The SDK of DynamoDB looks for credentials only here.
    command
        .env("AWS_ACCESS_KEY_ID", "hush-id")
        .env("AWS_SECRET_ACCESS_KEY", "hush");
    command.env("AWS_REGION", "us-east-1");
    command
}

fn run_in(directory: &Path, store: &str, args: &[&str]) -> CommandOutput {
    let mut command = command(directory, store);
    command.args(args).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the tool starts");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(b"yes\n").ok();
    drop(input);
    let output = child.wait_with_output().expect("the tool ends");
    CommandOutput {
        code: output.status.code().expect("an exit code"),
        out: String::from_utf8(output.stdout).expect("text"),
        err: String::from_utf8(output.stderr).expect("text"),
    }
}

/// Waits until the proxy has injected this number of faults. The process must run until then.
fn wait_for_faults(proxy: &Proxy, faults: u64, process: &mut Child) {
    let began = Instant::now();
    while proxy.injected_faults() < faults {
        let ended = process.try_wait().expect("a child");
        assert!(ended.is_none(), "the tool ended before its call: {ended:?}");
        assert!(began.elapsed() < HANG_GUARD, "the tool makes no call");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of a process.
fn wait_for_end(process: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = process.try_wait().expect("a child") {
            return status;
        }
        assert!(began.elapsed() < HANG_GUARD, "the tool does not end");
        thread::sleep(Duration::from_millis(1));
    }
}
