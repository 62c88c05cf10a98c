//! `idempotency resolve`.

use std::{
    fs,
    io::{self, IsTerminal as _},
    path::PathBuf,
    time::Duration,
};

use bytes::Bytes;
use clap::ValueEnum;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::{Value, json};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, NeedsAttention, Ttl,
    inspect::{Entry, EntryDetails, IdPrefix, Inspect as _, Resolution, ResolveOutcome, Seen},
    replayed_by_default,
};
use tower_idempotency_console::{
    describe::{consequence, decisions, details_json, kept_for_operator, problem},
    response,
};

use crate::{
    change::Change,
    cli::{self, ChangeArgs},
    context::Context,
    failure::{Exit, Failure},
    lookup,
    output::{duration, entry_json, or_dash, print_note},
};

/// Resolve an entry, if it has not changed since it was seen
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The id, or its first 8 digits or more
    id: IdPrefix,

    /// The decision
    decision: Decision,

    /// The entry as it was seen: the value `seen` of list --json or show. Default: the state at the start of this command, which
    /// may differ from the one that a script with --yes has read before
    #[arg(long)]
    seen: Option<Seen>,

    #[command(flatten)]
    change: ChangeArgs,

    /// Required by break-lease and delete-record: a handler may rely on its lease, and a client on the recorded response
    #[arg(long)]
    force: bool,

    /// The status of the response, 200 to 599, for complete
    #[arg(long, value_name = "CODE", value_parser = status)]
    status: Option<StatusCode>,

    /// A header of the response, for complete; may be repeated
    #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
    header: Vec<(HeaderName, HeaderValue)>,

    /// The name of a header that the service replays by its setting `with_replayed_headers`, for complete; may be repeated.
    /// The tool knows only the headers that each service replays
    #[arg(long, value_name = "NAME")]
    replayed_header: Vec<HeaderName>,

    /// A file with the body of the response, for complete
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,

    /// The retention of the response, for complete. Default: 24h
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    retention: Option<Duration>,

    /// A code for clients, 1 to 64 characters of a to z, 0 to 9 and -, for needs-attention. Default: the code of the entry, or
    /// operator
    #[arg(long, value_parser = code)]
    code: Option<&'static str>,
}

/// The decisions about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Decision {
    /// Nothing happened: delete the entry
    Free,
    /// The handler may run once more
    Retry,
    /// The response is known: record it
    Complete,
    /// Nothing may execute until an operator has examined the entry. The reason is added to the one in the entry
    NeedsAttention,
    /// The handler never ends: end its lease
    BreakLease,
    /// The recorded response must not be sent again
    DeleteRecord,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    let Some(details) = find(context, args).await? else {
        return changed(context, None);
    };
    let entry = &details.entry;
    let seen = args.seen.unwrap_or(*entry.seen());
    if &seen != entry.seen() {
        return changed(context, Some(entry));
    }
    let resolution = resolution(args, &details)?;
    let (name, state) = (resolution.name(), entry.state());
    if !resolution.applies_to(state) {
        let message = format!("{name} does not apply to an entry in the state {state}");
        return Err(Failure::usage(message));
    }
    if args.decision == Decision::Complete && entry.is_of_run_once() {
        return Err(Failure::usage(
            "complete records an HTTP response, and the record of this entry is a value: the service stores one with encode_value_record",
        ));
    }
    if entry.is_observed() && !decisions(entry).contains(&name) {
        return Err(Failure::usage(format!(
            "{name} does not apply: the request was only observed, so this entry stops no retry"
        )));
    }
    let needs_force = matches!(args.decision, Decision::BreakLease | Decision::DeleteRecord);
    if needs_force && !args.force {
        return Err(Failure::usage(format!(
            "{name} needs --force: {}",
            consequence(name)
        )));
    }
    confirm(args, &details, &resolution)?;
    let id = entry.id().to_hex();
    // The decision may delete the record. Afterwards only the audit log has its reason.
    let before = details_json(&details);
    let mut change = Change::begin(context, &args.change, name, Some(&id), &before).await?;
    let resolved = change.call(context.store.resolve(&seen, &resolution)).await;
    let outcome = match resolved {
        Ok(outcome) => outcome,
        Err(failure) => {
            change.finish(&failure.outcome(), Value::Null).await?;
            return Err(failure.of_decision());
        }
    };
    let after = outcome.entry().map_or(Value::Null, entry_json);
    match outcome {
        ResolveOutcome::Applied(after_entry) => {
            change.finish("applied", after).await?;
            let reported = report(context, name, &id, after_entry.as_deref());
            reported.map_err(|error| {
                Failure::from(error).with_end(&format!("{name} was applied to {id}"))
            })?;
            Ok(Exit::Done)
        }
        ResolveOutcome::Changed(entry) => {
            change.finish("changed", after).await?;
            changed(context, entry.as_deref())
        }
    }
}

/// Returns the entry. Returns `None` if `--seen` names an entry that is absent now.
async fn find(context: &Context, args: &Args) -> Result<Option<EntryDetails>, Failure> {
    let Some(seen) = &args.seen else {
        return lookup::find(context, &args.id).await.map(Some);
    };
    if !args.id.matches(seen.id()) {
        return Err(Failure::usage(
            "expected the value of --seen of this entry, found that of another entry",
        ));
    }
    context.call(context.store.get(seen.id())).await
}

fn report(context: &Context, name: &str, id: &str, after: Option<&Entry>) -> io::Result<()> {
    let output = &context.output;
    if output.is_json {
        let after = after.map_or(Value::Null, entry_json);
        output.json(&json!({"outcome": "applied", "what": name, "id": id, "entry": after}))?;
    } else {
        output.line(&format!("{name}: applied to {id}"))?;
        output.line(consequence(name))?;
    }
    Ok(())
}

fn changed(context: &Context, present: Option<&Entry>) -> Result<Exit, Failure> {
    let printed = print_changed(context, present);
    Exit::Changed.after(printed.map_err(|error| {
        Failure::from(error).with_end("nothing was changed: the entry is no longer as it was seen")
    }))
}

fn print_changed(context: &Context, present: Option<&Entry>) -> io::Result<()> {
    let output = &context.output;
    if output.is_json {
        let entry = present.map_or(Value::Null, entry_json);
        output.json(&json!({"outcome": "changed", "entry": entry}))?;
    } else {
        let state = present.map_or("absent", |entry| entry.state().name());
        output.line(&format!(
            "nothing was changed: the entry is no longer as it was seen, it is {state} now"
        ))?;
    }
    Ok(())
}

/// Asks for a confirmation, unless `--yes` gives it.
fn confirm(args: &Args, details: &EntryDetails, resolution: &Resolution) -> Result<(), Failure> {
    if args.change.yes || !io::stdin().is_terminal() {
        return cli::confirm(args.change.yes);
    }
    let entry = &details.entry;
    print_note(format_args!(
        "{} has been {} for {}, generation {}: {}",
        entry.id(),
        entry.state(),
        duration(entry.age),
        entry.generation(),
        or_dash(&entry.operation)
    ));
    let record = details.record.as_deref();
    if let Some(attention) = record.and_then(NeedsAttention::in_record) {
        let (code, reason) = (attention.code(), or_dash(attention.reason()));
        print_note(format_args!("Its code is {code}, and its reason: {reason}"));
        if let Some(problem) = problem(details) {
            print_note(format_args!("Do not trust them: {problem}."));
        }
    }
    print_note(consequence(resolution.name()));
    if let Resolution::Complete { retention, .. } = resolution {
        let retention = humantime::format_duration(retention.as_duration());
        print_note(format_args!("The retention is {retention}."));
    }
    cli::confirm(false)
}

fn resolution(args: &Args, details: &EntryDetails) -> Result<Resolution, Failure> {
    if args.decision != Decision::Complete
        && (args.status.is_some()
            || !args.header.is_empty()
            || !args.replayed_header.is_empty()
            || args.body_file.is_some()
            || args.retention.is_some())
    {
        return Err(Failure::usage(
            "--status, --header, --replayed-header, --body-file and --retention are for complete",
        ));
    }
    if args.decision != Decision::NeedsAttention && args.code.is_some() {
        return Err(Failure::usage("--code is for needs-attention"));
    }
    Ok(match args.decision {
        Decision::Free => Resolution::Free,
        Decision::Retry => Resolution::Retry,
        Decision::BreakLease => Resolution::BreakLease,
        Decision::DeleteRecord => Resolution::DeleteRecord,
        Decision::NeedsAttention => {
            Resolution::NeedsAttention(kept_for_operator(details, args.code, &args.change.reason))
        }
        Decision::Complete => {
            let Some(status) = args.status else {
                return Err(Failure::usage("complete needs --status"));
            };
            let body = match &args.body_file {
                None => Bytes::new(),
                Some(path) => Bytes::from(fs::read(path).map_err(|error| {
                    Failure::failed(format!("cannot read {}: {error}", path.display()))
                })?),
            };
            let mut response = Response::new(body);
            *response.status_mut() = status;
            response.headers_mut().extend(args.header.iter().cloned());
            let retention = args.retention.unwrap_or(DEFAULT_RETENTION);
            let retention =
                Ttl::try_from(retention).map_err(|error| Failure::usage(error.to_string()))?;
            let replayed = args.replayed_header.clone();
            let layer =
                IdempotencyLayer::new(MemoryStore::new()).with_replayed_headers(move |name| {
                    replayed.contains(name) || replayed_by_default(name)
                });
            let record = response::encode(&layer, details.entry.id(), &response);
            let record = record.map_err(|problem| {
                let hint = if args.header.is_empty() {
                    ""
                } else {
                    "; if the service replays a header by its own setting, add --replayed-header NAME"
                };
                Failure::usage(format!("{problem}{hint}"))
            })?;
            Resolution::Complete { record, retention }
        }
    })
}

const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

fn status(text: &str) -> Result<StatusCode, String> {
    response::parse_status(text)
        .ok_or_else(|| format!("expected a status of {}", response::STATUSES))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    response::parse_header(text)
        .ok_or_else(|| "expected a header as in \"location: /orders/1\"".to_owned())
}

/// Parses a code. Its memory is not freed, because the process ends with this command.
fn code(text: &str) -> Result<&'static str, String> {
    let is_valid = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    if (1..=64).contains(&text.len()) && text.bytes().all(is_valid) {
        Ok(text.to_owned().leak())
    } else {
        Err("expected 1 to 64 characters of a to z, 0 to 9 and -".to_owned())
    }
}
