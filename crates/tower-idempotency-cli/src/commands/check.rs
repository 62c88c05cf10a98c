//! `idempotency check`.

use std::{io, path::PathBuf, time::Instant};

use serde_json::{Value, json};
use tower_idempotency::inspect::{Inspect as _, State};
use tower_idempotency_any::IndexRepair;

use super::stats::states;
use crate::{
    change::Change,
    cli::{ChangeArgs, UNKNOWN_ACTOR, actor_parser, confirm, reason},
    context::Context,
    failure::{Exit, Failure},
    output::{Output, print_note},
    progress::Progress,
};

/// Check the tables and settings of the store, and print the states that it lists
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Repair the indexes from which Redis lists entries: add entries that are missing, remove members without an entry.
    /// This reads all keys of all servers, as no other command does. The other stores need no repair
    #[arg(long)]
    repair: bool,

    /// The reason of the repair. The audit log records it
    #[arg(
        long,
        value_name = "TEXT",
        value_parser = reason,
        requires = "repair",
        required_if_eq("repair", "true")
    )]
    reason: Option<String>,

    /// The file to which the audit lines of the repair are appended
    #[arg(
        long,
        env = "IDEMPOTENCY_AUDIT",
        value_name = "FILE",
        required_if_eq("repair", "true")
    )]
    audit: Option<PathBuf>,

    /// The operator, in the audit log. An empty name counts as absent
    #[arg(
        long,
        env = "USER",
        value_name = "NAME",
        default_value = UNKNOWN_ACTOR,
        value_parser = actor_parser()
    )]
    actor: String,

    /// Do not ask for confirmation
    #[arg(long, requires = "repair")]
    yes: bool,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    if args.repair {
        return repair(context, args).await;
    }
    context.check().await?;
    let start = Instant::now();
    context.call(context.store.summary(1)).await?;
    let took = start.elapsed();
    let abilities = context.store.abilities();
    let lists: Vec<_> = states()
        .filter(|state| abilities.can_list(*state))
        .map(State::name)
        .collect();
    let output = &context.output;
    if output.is_json {
        output.json(&json!({
            "store": context.name,
            "lists": lists,
            "details": abilities.has_details(),
            "purges": abilities.can_purge(),
            "ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        }))?;
        return Ok(Exit::Done);
    }
    let yes = |it: bool| if it { "yes" } else { "no" }.to_owned();
    output.pairs(&[
        ("store", context.name.to_owned()),
        ("lists", lists.join(", ")),
        ("owner and operation", yes(abilities.has_details())),
        ("needs purging", yes(abilities.can_purge())),
        ("summary took", format!("{} ms", took.as_millis())),
    ])?;
    Ok(Exit::Done)
}

async fn repair(context: &Context, args: &Args) -> Result<Exit, Failure> {
    if context.name != "redis" {
        let message = format!("the {} store maintains its indexes itself", context.name);
        return Err(Failure::new(Exit::Unsupported, message));
    }
    print_note(
        "This reads all keys of all servers of the store. Other clients are served more slowly meanwhile.",
    );
    confirm(args.yes)?;
    let change = ChangeArgs {
        reason: args.reason.clone().unwrap_or_default(),
        audit: args.audit.clone(),
        audit_table: false,
        actor: args.actor.clone(),
        yes: args.yes,
    };
    let mut change = Change::begin(context, &change, "repair", None, &Value::Null).await?;
    // The servers examine more keys, and do not report how many.
    let progress = Progress::new("keys with the prefix");
    let mut last = IndexRepair::default();
    let show = |repair: &IndexRepair| {
        progress.set(repair.examined);
        last = *repair;
    };
    let repaired = change.long_call(context.any.repair_indexes(show)).await;
    drop(progress);
    let repair = match repaired {
        Ok(repair) => repair.unwrap_or_default(),
        Err(failure) => {
            // The servers may have repaired more than they reported.
            let outcome = change.partial_outcome(&failure);
            change.finish(&outcome, counts(&last)).await?;
            return Err(failure);
        }
    };
    let counts = counts(&repair);
    change.finish("applied", counts.clone()).await?;
    let printed = print_repair(&context.output, &repair, &counts);
    printed.map_err(|error| Failure::from(error).with_end("the repair was applied"))?;
    Ok(Exit::Done)
}

fn print_repair(output: &Output, repair: &IndexRepair, counts: &Value) -> io::Result<()> {
    if output.is_json {
        return output.json(counts);
    }
    output.pairs(&[
        ("keys with the prefix", repair.examined.to_string()),
        ("entries added", repair.added.to_string()),
        ("members removed", repair.removed.to_string()),
    ])?;
    if repair.skipped > 0 {
        let skipped = repair.skipped;
        output.line(&format!(
            "entries left out, because their slots are being moved: {skipped}. Repeat the repair afterwards"
        ))?;
    }
    Ok(())
}

fn counts(repair: &IndexRepair) -> Value {
    json!({
        "examined": repair.examined,
        "added": repair.added,
        "removed": repair.removed,
        "skipped": repair.skipped,
    })
}
