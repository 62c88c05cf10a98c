//! `idempotency export`.

use std::collections::HashSet;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::json;
use tower_idempotency::inspect::{Inspect as _, Query, State};
use tower_idempotency_console::describe;

use super::{
    list::{Filters, new_entries},
    stats::states,
};
use crate::{
    cli::state,
    context::Context,
    failure::{Exit, Failure},
    output::entry_json,
    progress::Progress,
};

/// Print all entries as JSON, one object on each line
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only entries in this state, may be repeated. Default: all states that the store lists
    #[arg(long = "state", value_name = "STATE", value_parser = state)]
    states: Vec<State>,

    #[command(flatten)]
    filters: Filters,

    /// Print the stored bytes of the records too, in base64. They contain responses
    #[arg(long)]
    with_records: bool,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    let abilities = context.store.abilities();
    let selected: Vec<State> = if args.states.is_empty() {
        states().filter(|it| abilities.can_list(*it)).collect()
    } else {
        args.states.clone()
    };
    for state in &selected {
        context.expect_listed(*state)?;
    }
    let progress = Progress::alongside_output("entries exported");
    let mut exported = 0;
    for state in selected {
        let mut query = args.filters.apply(Query::new(state)).with_limit(500);
        let mut listed = HashSet::new();
        loop {
            let page = context.call(context.store.list(&query)).await?;
            // Only leases move when they are renewed. A set of all completed entries could fill the memory.
            let entries = match state {
                State::InProgress => new_entries(page.entries, &mut listed),
                _ => page.entries,
            };
            exported += entries.len() as u64;
            progress.set(exported);
            for entry in &entries {
                if !args.with_records {
                    context.output.json(&entry_json(entry))?;
                    continue;
                }
                // An entry may be deleted between its page and this call.
                if let Some(details) = context.call(context.store.get(entry.id())).await? {
                    let mut value = describe::details_json(&details);
                    let record = details.record.as_deref();
                    value["record"] = json!(record.map(|record| BASE64.encode(record)));
                    context.output.json(&value)?;
                }
            }
            match page.next {
                Some(next) => query = query.with_page(Some(next)),
                None => break,
            }
        }
    }
    Ok(Exit::Done)
}
