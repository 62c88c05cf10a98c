//! `idempotency check`.

use std::time::Instant;

use serde_json::json;
use tower_idempotency::inspect::{Inspect as _, State};

use super::stats::states;
use crate::{
    context::Context,
    failure::{Exit, Failure},
};

/// Check that the store can be reached and read, and print what it lists
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) async fn run(context: &Context, _args: &Args) -> Result<Exit, Failure> {
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
