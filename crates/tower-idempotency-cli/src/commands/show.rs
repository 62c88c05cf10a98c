//! `idempotency show`.

use std::{fs, io::Write as _, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use tower_idempotency::{
    ExecutionTrace, NeedsAttention,
    inspect::{Entry, EntryDetails, IdPrefix, Resolution, State},
};

use crate::{
    context::Context,
    failure::{Exit, Failure},
    lookup,
    output::{duration, entry_json, or_dash, printable, time},
};

/// Show an entry, and the decisions that apply to it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The id, or its first 8 digits or more, as events and problem bodies show them
    id: IdPrefix,

    /// Write the stored bytes of the record to this file, - for standard output
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    let details = lookup::find(context, &args.id).await?;
    match &args.record {
        Some(path) => write_record(&details, path)?,
        None => print(context, &details)?,
    }
    Ok(Exit::Done)
}

fn write_record(details: &EntryDetails, path: &PathBuf) -> Result<(), Failure> {
    let Some(record) = &details.record else {
        return Err(Failure::new(Exit::NotFound, "the entry has no record"));
    };
    if path.as_os_str() == "-" {
        std::io::stdout().lock().write_all(record)?;
    } else {
        fs::write(path, record)?;
    }
    Ok(())
}

pub(crate) fn print(context: &Context, details: &EntryDetails) -> Result<(), Failure> {
    let output = &context.output;
    if output.is_json {
        return Ok(output.json(&details_json(details, false))?);
    }
    let entry = &details.entry;
    let mut pairs = vec![
        ("id", entry.id().to_hex()),
        ("state", entry.state().to_string()),
        ("operation", or_dash(&entry.operation)),
        ("owner", or_dash(&entry.owner)),
        ("generation", entry.generation().to_string()),
    ];
    if entry.state() != State::Unreadable {
        let since = format!("{} ({} ago)", time(entry.since), duration(entry.age));
        pairs.push(("since", since));
    }
    pairs.extend(entry.lease_expires.map(|it| ("lease expires", time(it))));
    pairs.extend(entry.expires.map(|it| ("entry expires", time(it))));
    if let Some(code) = &entry.attention_code {
        pairs.push(("code", or_dash(code)));
    }
    let attention = details
        .record
        .as_deref()
        .and_then(NeedsAttention::in_record);
    if let Some(attention) = attention {
        pairs.push(("reason", or_dash(attention.reason())));
    }
    pairs.extend(
        entry
            .record_bytes
            .map(|it| ("record", format!("{it} bytes"))),
    );
    if let Some(trace) = trace(details) {
        pairs.push(("trace", trace.trace_id().to_owned()));
    }
    if details.has_checkpoint {
        pairs.push((
            "checkpoint",
            "yes: a takeover continues after it".to_owned(),
        ));
    }
    if let Some(problem) = &entry.problem {
        pairs.push(("problem", printable(problem)));
    }
    pairs.push(("seen", entry.seen().to_string()));
    output.pairs(&pairs)?;
    output.line("")?;
    output.line(next_request(entry))?;
    output.line(&format!("decisions: {}", decisions(entry.state())))?;
    Ok(())
}

/// Returns the entry with its record as an object. The record is in base64.
pub(crate) fn details_json(details: &EntryDetails, with_record: bool) -> Value {
    let mut value = entry_json(&details.entry);
    let record = details.record.as_deref();
    let attention = record.and_then(NeedsAttention::in_record);
    value["reason"] = json!(attention.map(|attention| attention.reason().to_owned()));
    value["traceparent"] = json!(trace(details).map(|trace| trace.as_str().to_owned()));
    value["has_checkpoint"] = json!(details.has_checkpoint);
    if with_record {
        value["record"] = json!(record.map(|record| BASE64.encode(record)));
    }
    value
}

/// Returns the trace of the execution, if the service stores traces.
fn trace(details: &EntryDetails) -> Option<ExecutionTrace> {
    ExecutionTrace::in_record(details.entry.id(), details.record.as_ref()?)
}

/// Returns a sentence about the next request with the key.
pub(crate) fn next_request(entry: &Entry) -> &'static str {
    match entry.state() {
        State::InProgress => "A retry waits or is rejected while the lease lasts.",
        State::Orphaned if entry.retry_allowed => {
            "The next equal request executes once more, whatever the orphan policy is."
        }
        State::Orphaned => {
            "A retry executes again under the policy that takes over, and is rejected under the policy that refuses."
        }
        State::NeedsAttention => "Each retry is rejected until an operator resolves the entry.",
        State::Completed => "Each retry gets the recorded response.",
        _ => "A retry may be rejected: this version cannot read the entry.",
    }
}

fn decisions(state: State) -> String {
    let attention = Resolution::NeedsAttention(NeedsAttention::new("code"));
    let complete = Resolution::Complete {
        record: bytes::Bytes::new(),
        retention: tower_idempotency::Ttl::MAX,
    };
    let all = [
        Resolution::Free,
        Resolution::Retry,
        complete,
        attention,
        Resolution::BreakLease,
        Resolution::DeleteRecord,
    ];
    let names = all.iter().filter(|it| it.applies_to(state));
    names.map(Resolution::name).collect::<Vec<_>>().join(", ")
}
