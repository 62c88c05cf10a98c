//! `idempotency purge`.

use std::io;

use serde_json::json;
use tower_idempotency::inspect::Inspect as _;

use crate::{
    change::Change,
    cli::{ChangeArgs, confirm},
    context::Context,
    failure::{Exit, Failure},
    output::{Output, print_note},
    progress::Progress,
};

/// Delete expired entries. They already count as absent, but their data stays in the store until this deletes it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The number of entries that one call deletes
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,

    /// The largest number of entries. More may be left then
    #[arg(long, default_value_t = 100_000)]
    max: u64,

    #[command(flatten)]
    change: ChangeArgs,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    if !context.store.abilities().can_purge() {
        let name = context.name;
        let message = format!("the {name} store deletes expired entries itself");
        return Err(Failure::new(Exit::Unsupported, message));
    }
    if !args.change.yes {
        print_note(format!(
            "This deletes at most {} expired entries.",
            args.max
        ));
    }
    confirm(args.change.yes)?;
    let before = json!({"max": args.max});
    let mut change = Change::begin(context, &args.change, "purge", None, &before).await?;
    let progress = Progress::new("entries deleted");
    let mut deleted = 0;
    while deleted < args.max {
        let rest = u32::try_from(args.max - deleted).unwrap_or(u32::MAX);
        let batch = args.batch.min(rest);
        let purge = context.store.purge(batch);
        let purged = if context.name == "sqlite" {
            // The call pauses between its statements, so that other processes can write. It may outlast the timeout.
            change.long_call(purge).await
        } else {
            change.call(purge).await
        };
        match purged {
            Ok(count) => {
                deleted += count;
                progress.set(deleted);
                if count < u64::from(batch) {
                    break;
                }
            }
            Err(failure) => {
                // The store may have deleted the last batch, or a part of it.
                let outcome = change.partial_outcome(&failure);
                change.finish(&outcome, json!({"deleted": deleted})).await?;
                return Err(failure);
            }
        }
    }
    drop(progress);
    change
        .finish("applied", json!({"deleted": deleted}))
        .await?;
    let printed = print(&context.output, deleted, deleted >= args.max);
    printed.map_err(|error| {
        Failure::from(error).with_end(&format!("expired entries deleted: {deleted}"))
    })?;
    Ok(Exit::Done)
}

fn print(output: &Output, deleted: u64, has_reached_max: bool) -> io::Result<()> {
    if output.is_json {
        return output.json(&json!({"deleted": deleted, "has_reached_max": has_reached_max}));
    }
    output.line(&format!("expired entries deleted: {deleted}"))?;
    if has_reached_max {
        output.line("more may be left: repeat the command, or set a larger --max")?;
    }
    Ok(())
}
