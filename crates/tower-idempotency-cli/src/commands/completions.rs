//! `idempotency completions` and `idempotency man`.

use std::io::{self, Write as _};

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::{
    cli::Cli,
    failure::{Exit, Failure},
};

/// Print the completions of a shell
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    shell: Shell,
}

/// Print the manual page of the tool, or of a command
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// The command, as in `man resolve` or `man proxy policy`. Default: the page of the tool, which names its commands
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "idempotency", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(Exit::Done)
}

pub(crate) fn man(args: &ManArgs) -> Result<Exit, Failure> {
    // A page names the pages of its commands, and the command `help` has none.
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let mut command = &root;
    for name in &args.command {
        let Some(next) = command.find_subcommand(name) else {
            let message = format!("there is no manual page of {}", args.command.join(" "));
            return Err(Failure::usage(message));
        };
        command = next;
    }
    let source = concat!("idempotency ", env!("CARGO_PKG_VERSION"));
    let page_of_command = clap_mangen::Man::new(command.clone()).source(source);
    let mut page = Vec::new();
    page_of_command.render(&mut page)?;
    io::stdout().lock().write_all(&page)?;
    Ok(Exit::Done)
}
