//! The command line.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    time::Duration,
};

use clap::{
    Parser, Subcommand,
    builder::{BoolishValueParser, StringValueParser, TypedValueParser},
};
use tower_idempotency::inspect::State;

use crate::{
    commands::{
        check, completions, conform, export, find, list, purge, resolve, serve, show, stats, watch,
    },
    failure::Failure,
    proxy,
};

/// Makes unsafe HTTP requests safe to retry: tools for operators, and a proxy.
///
/// An entry is a key of a client: in progress, orphaned, needing attention or completed. A stuck key takes three commands:
/// list finds it, show explains it, and resolve decides on it.
#[derive(Debug, Parser)]
#[command(name = "idempotency", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of all commands.
#[derive(Debug, clap::Args)]
pub(crate) struct Global {
    /// The store: redis://HOST:PORT/DB, redis+cluster://HOST:PORT,.., postgres://.., mysql://.., sqlite:PATH or
    /// dynamodb://TABLE
    #[arg(
        long,
        global = true,
        env = "IDEMPOTENCY_STORE",
        hide_env_values = true,
        value_name = "URL"
    )]
    pub(crate) store: Option<String>,

    /// The table of a SQL store, if the service has set another one than tower_idempotency
    #[arg(long, global = true, env = "IDEMPOTENCY_TABLE", value_name = "NAME")]
    pub(crate) table: Option<String>,

    /// The prefix of the keys of a Redis store, if the service has set another one than `idempotency:`. An empty variable counts
    /// as absent
    #[arg(long, global = true, env = "IDEMPOTENCY_PREFIX", value_name = "TEXT")]
    pub(crate) prefix: Option<String>,

    /// Print JSON: one object, or one object on each line for lists. If more entries follow, the last line of list is
    /// {"next": TOKEN}
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Print no colours. The variable NO_COLOR does the same
    #[arg(long, global = true)]
    pub(crate) no_color: bool,

    /// The longest time for one call of the store, or for one request of conform. A purge of SQLite has no timeout. The proxy
    /// has the timeouts of its file instead
    #[arg(
        long,
        global = true,
        env = "IDEMPOTENCY_TIMEOUT",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = humantime::parse_duration
    )]
    pub(crate) timeout: Duration,
}

/// The commands. Each has a module.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    List(list::Args),
    Show(show::Args),
    Find(find::Args),
    Resolve(resolve::Args),
    Purge(purge::Args),
    Stats(stats::Args),
    Watch(watch::Args),
    Check(check::Args),
    Export(export::Args),
    Serve(serve::Args),
    Conform(conform::Args),
    /// Run a reverse proxy that sends each request with an Idempotency-Key to its upstream once
    Proxy(proxy::Args),
    Completions(completions::Args),
    Man(completions::ManArgs),
}

/// Options of the commands that change something.
#[derive(Debug, clap::Args)]
pub(crate) struct ChangeArgs {
    /// The reason of the change. The audit log records it
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub(crate) reason: String,

    /// The file to which the audit lines are appended. Nothing is changed without a line
    #[arg(
        long,
        env = "IDEMPOTENCY_AUDIT",
        value_name = "FILE",
        required_unless_present = "audit_table"
    )]
    pub(crate) audit: Option<PathBuf>,

    /// Append the audit lines to a table of the SQL store: its name is that of the entries and `_audit`. With --audit, to
    /// both
    #[arg(long, env = "IDEMPOTENCY_AUDIT_TABLE", value_parser = BoolishValueParser::new())]
    pub(crate) audit_table: bool,

    /// The operator, in the audit log. An empty name counts as absent
    #[arg(
        long,
        env = "USER",
        value_name = "NAME",
        default_value = UNKNOWN_ACTOR,
        value_parser = actor_parser()
    )]
    pub(crate) actor: String,

    /// Do not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Returns the reason without spaces around it.
pub(crate) fn reason(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        "" => Err("expected a reason, for the audit log"),
        reason => Ok(reason.to_owned()),
    }
}

/// Returns a parser of the name of an operator. Replaces an empty name by [`UNKNOWN_ACTOR`], because `USER` may be empty.
pub(crate) fn actor_parser() -> impl TypedValueParser<Value = String> {
    StringValueParser::new().map(|name| {
        if name.trim().is_empty() {
            UNKNOWN_ACTOR.to_owned()
        } else {
            name
        }
    })
}

/// The operator in the audit log if no name is set.
pub(crate) const UNKNOWN_ACTOR: &str = "unknown";

/// Asks for a confirmation, unless `--yes` gives it.
pub(crate) fn confirm(has_yes: bool) -> Result<(), Failure> {
    if has_yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::usage(
            "expected --yes, because standard input is no terminal",
        ));
    }
    let mut errors = io::stderr();
    let written = write!(errors, "Type yes to continue: ").and_then(|()| errors.flush());
    if written.is_err() {
        return Err(Failure::usage(
            "cannot write the question for the confirmation, so nothing was changed",
        ));
    }
    let mut reply = String::new();
    io::stdin().read_line(&mut reply)?;
    if reply.trim() == "yes" {
        Ok(())
    } else {
        Err(Failure::usage("not confirmed, so nothing was changed"))
    }
}

/// Parses the name of a state. `attention` is another name of `needs-attention`.
pub(crate) fn state(name: &str) -> Result<State, String> {
    match name {
        "attention" => Ok(State::NeedsAttention),
        "unreadable" => Err(
            "expected another state: the lists of all other states contain unreadable entries"
                .to_owned(),
        ),
        name => name.parse().map_err(|_| {
            "expected in-progress, orphaned, attention, needs-attention or completed".to_owned()
        }),
    }
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the store or a file failed, or a server does not conform
  2  the command line is wrong, the change was not confirmed, or conform cannot reach the server
  3  there is no such entry
  4  the entry has changed since it was seen; nothing was changed
  5  there are entries (list --fail-if-any)
  6  the store does not list this state, or does not need this command
  129, 130, 143  SIGHUP, SIGINT or SIGTERM ended a change, whose outcome is in the audit log; 130 also for watch";
