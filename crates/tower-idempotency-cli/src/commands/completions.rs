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

pub(crate) fn run(args: &Args) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "idempotency", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(Exit::Done)
}

pub(crate) fn man() -> Result<Exit, Failure> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    io::stdout().lock().write_all(&page)?;
    Ok(Exit::Done)
}
