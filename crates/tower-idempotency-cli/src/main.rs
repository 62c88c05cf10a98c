//! `idempotency`: lists, shows and resolves the entries of a store, and runs the proxy.
//!
//! Each command is a module of [`commands`]. To add one, add a variant to [`Command`] and to [`run`](commands::run).

mod change;
mod cli;
mod commands;
mod context;
mod failure;
mod lookup;
mod output;
mod progress;
mod proxy;
mod stream;

use std::{env, process::ExitCode, time::Duration};

use clap::Parser;

use self::{
    cli::{Cli, Command},
    failure::Exit,
    output::print_note,
};

/// Longest time that the process waits for calls of the system that cannot be cancelled, such as the lookup of a name.
const BLOCKING_LIMIT: Duration = Duration::from_secs(5);

// The proxy allocates in each request. The allocators of glibc and of musl would take longer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // An error of the command line ends the process with 2.
    let mut cli = Cli::parse();
    // An empty variable counts as absent.
    let is_variable_empty = env::var("IDEMPOTENCY_PREFIX").is_ok_and(|value| value.is_empty());
    if is_variable_empty && cli.global.prefix.as_deref() == Some("") {
        cli.global.prefix = None;
    }
    let cli = match cli.command {
        Command::Proxy(_) if cli.global.table.is_some() || cli.global.prefix.is_some() => {
            print_note(
                "idempotency: the proxy uses the default table or prefix: remove --table, --prefix, IDEMPOTENCY_TABLE and IDEMPOTENCY_PREFIX",
            );
            return ExitCode::from(Exit::Usage.code());
        }
        Command::Proxy(args) => return proxy::main(args, cli.global.store, cli.global.json),
        command => Cli { command, ..cli },
    };
    log_events();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let exit = match runtime {
        Ok(runtime) => {
            let exit = runtime.block_on(commands::run(cli));
            runtime.shutdown_timeout(BLOCKING_LIMIT);
            exit
        }
        Err(error) => Err(failure::Failure::failed(format!(
            "cannot start the runtime: {error}"
        ))),
    };
    let exit = exit.unwrap_or_else(|failure| {
        // The reader of standard output may have ended, as with `| head`.
        if !failure.is_broken_pipe() {
            print_note(format_args!("idempotency: {failure}"));
        }
        failure.exit()
    });
    match exit {
        Exit::BrokenPipe => ExitCode::SUCCESS,
        exit => ExitCode::from(exit.code()),
    }
}

/// Prints the events of the process to standard error, from the level in `IDEMPOTENCY_LOG` on. Default: none.
fn log_events() {
    let Ok(filter) = tracing_subscriber::EnvFilter::try_from_env("IDEMPOTENCY_LOG") else {
        return;
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        // The subscriber would print its own errors to standard error, and panic if the reader has ended.
        .log_internal_errors(false)
        .init();
}
