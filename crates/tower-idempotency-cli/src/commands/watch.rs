//! `idempotency watch`.

use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};
use tower_idempotency::inspect::{Inspect as _, State, Summary};

use super::stats::{states, summary_json, text};
use crate::{
    cli::state,
    context::Context,
    failure::{Exit, Failure},
    output::{Output, time},
};

/// Count the entries in each state repeatedly, until Ctrl-C
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The time between two counts
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    interval: Duration,

    /// Count at most this number of entries in each state
    #[arg(long, default_value_t = 1_000)]
    limit: u32,

    /// End as soon as no entry is in this state
    #[arg(long, value_name = "STATE", value_parser = state)]
    exit_when_empty: Option<State>,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    if let Some(state) = args.exit_when_empty {
        context.expect_listed(state)?;
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
        let printed = print(&context.output, &summary);
        match args.exit_when_empty {
            None => printed?,
            // The exit code is a result too, so the wait continues without a reader.
            Some(state) => {
                let exit = Exit::Done.after(printed)?;
                let count = summary.count(state);
                if count.is_some_and(|count| count.is_exact && count.value == 0) {
                    return Ok(exit);
                }
            }
        }
        sleep(args.interval.max(MIN_INTERVAL)).await;
    }
}

fn print(output: &Output, summary: &Summary) -> Result<(), Failure> {
    let now = time(SystemTime::now());
    if output.is_json {
        let mut line = summary_json(summary);
        line["at"] = json!(now);
        return Ok(output.json(&line)?);
    }
    let counts = states().filter_map(|state| {
        let count = summary.count(state)?;
        Some(format!("{state} {}", text(Some(count))))
    });
    let counts: Vec<_> = counts.collect();
    Ok(output.line(&format!("{now}  {}", counts.join("  ")))?)
}

const MIN_INTERVAL: Duration = Duration::from_millis(100);
