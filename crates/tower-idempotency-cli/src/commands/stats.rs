//! `idempotency stats`.

use serde_json::{Map, Value, json};
use tower_idempotency::inspect::{Count, Inspect as _, State, Summary};

use crate::{
    context::Context,
    failure::{Exit, Failure},
};

/// Count the entries in each state
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Count at most this number of entries in each state. A count is unknown if it examines too many expired entries
    #[arg(long, default_value_t = 100_000)]
    limit: u32,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    let summary = context.call(context.store.summary(args.limit)).await?;
    let output = &context.output;
    if output.is_json {
        output.json(&summary_json(&summary))?;
    } else {
        let pairs = states().map(|state| (state.name(), text(summary.count(state))));
        output.pairs(&pairs.collect::<Vec<_>>())?;
    }
    Ok(Exit::Done)
}

pub(crate) fn states() -> impl Iterator<Item = State> {
    let all = State::ALL.iter().copied();
    all.filter(|state| *state != State::Unreadable)
}

/// Returns the count for people: `12`, `1000+`, `unknown` or `not listed by this store`.
pub(crate) fn text(count: Option<Count>) -> String {
    match count {
        None => "not listed by this store".to_owned(),
        Some(count) if count.is_exact => count.value.to_string(),
        // The query stopped before it found an entry.
        Some(count) if count.value == 0 => "unknown".to_owned(),
        Some(count) => format!("{}+", count.value),
    }
}

pub(crate) fn summary_json(summary: &Summary) -> Value {
    let counts = states().map(|state| {
        let count = summary.count(state);
        let count = count.map(|it| json!({"count": it.value, "is_exact": it.is_exact}));
        (state.name().to_owned(), json!(count))
    });
    Value::Object(counts.collect::<Map<_, _>>())
}
