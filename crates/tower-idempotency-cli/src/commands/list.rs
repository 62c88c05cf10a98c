//! `idempotency list`.

use std::{collections::HashSet, time::Duration};

use tower_idempotency::{
    inspect::{Entry, Inspect as _, PageToken, Query, State},
    store::KeyId,
};

use crate::{
    cli::state,
    context::Context,
    failure::{Exit, Failure},
    output::{duration, entry_json, or_dash, remark},
};

/// List the entries in a state
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// in-progress, orphaned, attention or completed. Overdue entries are `in-progress --older-than`
    #[arg(value_parser = state)]
    state: State,

    #[command(flatten)]
    filters: Filters,

    /// The largest number of entries, 1 to 1000
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,

    /// Continue after this token, which the previous page printed. With --json it is in the last line, {"next": TOKEN}
    #[arg(long, value_name = "TOKEN")]
    after: Option<PageToken>,

    /// Exit with 5 if there is an entry
    #[arg(long)]
    fail_if_any: bool,
}

/// Filters of listings.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Filters {
    /// Only entries of a greater age, as in 10m. In progress, the age counts from the first lease on the key
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,

    /// Only entries whose operation begins with this text, as in "POST /payments"
    #[arg(long, value_name = "TEXT")]
    operation: Option<String>,

    /// Only entries of this host and process
    #[arg(long, value_name = "NAME")]
    owner: Option<String>,
}

impl Filters {
    pub(crate) fn apply(&self, mut query: Query) -> Query {
        if let Some(age) = self.older_than {
            query = query.with_older_than(age);
        }
        if let Some(operation) = &self.operation {
            query = query.with_operation(operation.as_str());
        }
        if let Some(owner) = &self.owner {
            query = query.with_owner(owner.as_str());
        }
        query
    }
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    context.expect_listed(args.state)?;
    let query = args.filters.apply(Query::new(args.state));
    let mut query = query.with_limit(args.limit).with_page(args.after.clone());
    let (mut entries, mut listed) = (Vec::new(), HashSet::new());
    let limit = usize::from(args.limit);
    // A page may have few entries, or none, although more follow.
    let next = loop {
        let page = context.call(context.store.list(&query)).await?;
        entries.extend(new_entries(page.entries, &mut listed));
        match page.next {
            Some(next) if entries.len() < limit => {
                let rest = args.limit - u16::try_from(entries.len()).unwrap_or(args.limit);
                query = query.with_limit(rest).with_page(Some(next));
            }
            next => break next,
        }
    };
    let exit = if args.fail_if_any && !entries.is_empty() {
        Exit::NotEmpty
    } else {
        Exit::Done
    };
    exit.after(print(context, args.state, &entries, next.as_ref()))
}

/// Returns the entries of a page that no earlier page of the listing has, and adds their IDs to `listed`.
///
/// A listing in the order of lease ends repeats an entry whose lease is renewed between two pages.
pub(super) fn new_entries(mut page: Vec<Entry>, listed: &mut HashSet<KeyId>) -> Vec<Entry> {
    page.retain(|entry| listed.insert(*entry.id()));
    page
}

fn print(
    context: &Context,
    state: State,
    entries: &[Entry],
    next: Option<&PageToken>,
) -> Result<(), Failure> {
    let output = &context.output;
    if output.is_json {
        for entry in entries {
            output.json(&entry_json(entry))?;
        }
        if let Some(next) = next {
            output.json(&serde_json::json!({"next": next.to_string()}))?;
        }
    } else if entries.is_empty() {
        output.line(&format!("no {state} entry"))?;
    } else {
        print_table(context, entries)?;
        if let Some(next) = next {
            output.line(&format!("\nmore entries follow: --after {next}"))?;
        }
    }
    Ok(())
}

fn print_table(context: &Context, entries: &[Entry]) -> Result<(), Failure> {
    let rows: Vec<_> = entries
        .iter()
        .map(|entry| {
            vec![
                entry.id().to_string(),
                entry.state().to_string(),
                duration(entry.age),
                entry.generation().to_string(),
                or_dash(&entry.owner),
                remark(entry),
                or_dash(&entry.operation),
            ]
        })
        .collect();
    let head = ["ID", "STATE", "AGE", "GEN", "OWNER", "REMARK", "OPERATION"];
    Ok(context.output.table(&head, &rows)?)
}

#[cfg(test)]
mod tests {
    use tower_idempotency::inspect::Seen;

    use super::*;

    #[test]
    fn repeated_entries_are_dropped() {
        let entry = |byte: u8, version| {
            let id = KeyId::from_bytes([byte; 32]);
            Entry::new(Seen::new(id, State::InProgress, 1, version))
        };
        let mut listed = HashSet::new();
        let first = new_entries(vec![entry(1, 1), entry(2, 1)], &mut listed);
        // The lease of the first entry was renewed meanwhile.
        let second = new_entries(vec![entry(3, 1), entry(1, 2)], &mut listed);
        let ids: Vec<_> = first
            .iter()
            .chain(&second)
            .map(|it| it.id().as_bytes()[0])
            .collect();
        assert_eq!(ids, [1, 2, 3]);
    }
}
