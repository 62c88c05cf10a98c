//! `idempotency watch`.

use std::time::{Duration, SystemTime};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::sleep,
};
use tower_idempotency::inspect::{Inspect as _, Query, State, Summary};

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

    /// Count at most this number of entries in each state. A count is unknown if it examines too many expired entries
    #[arg(long, default_value_t = 1_000)]
    limit: u32,

    /// End as soon as no entry is in this state. A listing decides if the count is unknown
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
                if is_empty(context, &summary, state).await? {
                    return Ok(exit);
                }
            }
        }
        sleep(args.interval.max(MIN_INTERVAL)).await;
    }
}

/// Returns `true` if no entry is in the state.
///
/// A count can end among expired entries, before it finds a live one. A listing then decides.
async fn is_empty(context: &Context, summary: &Summary, state: State) -> Result<bool, Failure> {
    let Some(count) = summary.count(state).filter(|count| count.value == 0) else {
        return Ok(false);
    };
    if count.is_exact {
        return Ok(true);
    }
    let mut query = Query::new(state).with_limit(500);
    loop {
        let page = context.call(context.store.list(&query)).await?;
        if !page.entries.is_empty() {
            return Ok(false);
        }
        // More entries may follow an empty page.
        match page.next {
            Some(next) => query = query.with_page(Some(next)),
            None => return Ok(true),
        }
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
