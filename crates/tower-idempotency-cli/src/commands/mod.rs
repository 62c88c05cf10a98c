//! The commands, one module each.

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod conform;
pub(crate) mod export;
pub(crate) mod find;
pub(crate) mod list;
pub(crate) mod purge;
pub(crate) mod resolve;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod stats;
pub(crate) mod watch;

use crate::{
    cli::{Cli, Command},
    context::Context,
    failure::{Exit, Failure},
};

/// Runs the command.
pub(crate) async fn run(cli: Cli) -> Result<Exit, Failure> {
    let Cli { global, command } = cli;
    // These need no store.
    match &command {
        Command::Completions(args) => return completions::run(args),
        Command::Man(args) => return completions::man(args),
        Command::Conform(args) => return conform::run(args, &global).await,
        _ => {}
    }
    let context = Context::open(&global).await?;
    match command {
        Command::List(args) => list::run(&context, &args).await,
        Command::Show(args) => show::run(&context, &args).await,
        Command::Find(args) => find::run(&context, &args).await,
        Command::Resolve(args) => resolve::run(&context, &args).await,
        Command::Purge(args) => purge::run(&context, &args).await,
        Command::Stats(args) => stats::run(&context, &args).await,
        Command::Watch(args) => watch::run(&context, &args).await,
        Command::Check(args) => check::run(&context, &args).await,
        Command::Export(args) => export::run(&context, &args).await,
        Command::Serve(args) => serve::run(&context, &args, &global).await,
        Command::Conform(_) | Command::Proxy(_) | Command::Completions(_) | Command::Man(_) => {
            Ok(Exit::Done)
        }
    }
}
