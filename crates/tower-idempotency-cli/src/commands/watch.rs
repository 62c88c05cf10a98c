//! `idempotency watch`.

use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};
use tower_idempotency::inspect::{Inspect as _, State};

use super::stats::{states, summary_json, text};
use crate::{
    cli::state,
    context::Context,
    failure::{Exit, Failure},
    output::time,
};

/// Count the entries in each state again and again, until Ctrl-C
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The time between two counts
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    interval: Duration,

    /// Count at most so many of each state
    #[arg(long, default_value_t = 1_000)]
    limit: u32,

    /// End as soon as no entry is in this state
    #[arg(long, value_name = "STATE", value_parser = state)]
    exit_when_empty: Option<State>,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    if let Some(state) = args.exit_when_empty
        && !context.store.abilities().can_list(state)
    {
        let message = format!("this store does not list entries that are {state}");
        return Err(Failure::new(Exit::NotKept, message));
    }
    let mut interrupt = signal(SignalKind::interrupt())
        .map_err(|error| Failure::failed(format!("cannot catch signals: {error}")))?;
    // One signal future for all counts: none of them misses a Ctrl-C.
    tokio::select! {
        biased;
        _ = interrupt.recv() => Ok(Exit::Interrupted),
        ended = count(context, args) => ended,
    }
}

/// Prints counts until no entry is in the awaited state.
async fn count(context: &Context, args: &Args) -> Result<Exit, Failure> {
    loop {
        let summary = context.call(context.store.summary(args.limit)).await?;
        let now = time(SystemTime::now());
        if context.output.is_json {
            let mut line = summary_json(&summary);
            line["at"] = json!(now);
            context.output.json(&line)?;
        } else {
            let counts = states().filter_map(|state| {
                let count = summary.count(state)?;
                Some(format!("{state} {}", text(Some(count))))
            });
            let counts: Vec<_> = counts.collect();
            let line = format!("{now}  {}", counts.join("  "));
            context.output.line(&line)?;
        }
        let awaited = args.exit_when_empty.and_then(|state| summary.count(state));
        if awaited.is_some_and(|count| count.is_exact && count.value == 0) {
            return Ok(Exit::Done);
        }
        sleep(args.interval.max(MIN_INTERVAL)).await;
    }
}

const MIN_INTERVAL: Duration = Duration::from_millis(100);
