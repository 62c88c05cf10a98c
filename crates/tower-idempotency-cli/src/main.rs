//! `idempotency`: lists, shows and resolves the entries of a store, and runs the proxy.
//!
//! Each command is a module of [`commands`]. To add one, add a variant to [`Command`] and to [`run`](commands::run).

mod audit;
mod cli;
mod commands;
mod context;
mod failure;
mod lookup;
mod output;
mod proxy;

use std::process::ExitCode;

use clap::Parser;

use self::{
    cli::{Cli, Command},
    failure::Exit,
};

fn main() -> ExitCode {
    // An error of the command line ends the process with 2.
    let cli = Cli::parse();
    let cli = match cli.command {
        Command::Proxy(args) => return proxy::main(args, cli.global.store, cli.global.json),
        command => Cli { command, ..cli },
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let exit = match runtime {
        Ok(runtime) => runtime.block_on(commands::run(cli)),
        Err(error) => Err(failure::Failure::failed(format!(
            "cannot start the runtime: {error}"
        ))),
    };
    let exit = exit.unwrap_or_else(|failure| {
        // The reader of standard output may have ended, as with `| head`.
        if !failure.is_broken_pipe() {
            eprintln!("idempotency: {failure}");
        }
        failure.exit()
    });
    match exit {
        Exit::BrokenPipe => ExitCode::SUCCESS,
        exit => ExitCode::from(exit.code()),
    }
}
