//! `idempotency show`.

use std::{
    fs::{OpenOptions, Permissions},
    io::{self, IsTerminal as _, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use tower_idempotency::{
    ExecutionTrace, NeedsAttention,
    inspect::{EntryDetails, IdPrefix, State},
};
use tower_idempotency_console::describe;

use crate::{
    context::Context,
    failure::{Exit, Failure},
    lookup,
    output::{duration, or_dash, printable, time},
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

fn write_record(details: &EntryDetails, path: &Path) -> Result<(), Failure> {
    let Some(record) = &details.record else {
        return Err(Failure::new(Exit::NotFound, "the entry has no record"));
    };
    if path.as_os_str() == "-" {
        let mut out = io::stdout().lock();
        // A client has chosen a part of the bytes, and a terminal obeys them.
        if out.is_terminal() {
            return Err(Failure::usage(
                "expected a file or a pipe for the bytes of the record, found a terminal",
            ));
        }
        out.write_all(record)?;
        out.flush()?;
    } else {
        write_private(path, record).map_err(|error| {
            Failure::failed(format!("cannot write {}: {error}", path.display()))
        })?;
    }
    Ok(())
}

/// Writes to a file that only its owner reads, because a response may contain personal data.
fn write_private(path: &Path, record: &[u8]) -> io::Result<()> {
    const MODE: u32 = 0o600;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(MODE);
    let mut file = options.open(path)?;
    if file.metadata()?.is_file() {
        // An existing file has a mode of its own.
        file.set_permissions(Permissions::from_mode(MODE))?;
        file.set_len(0)?;
    }
    file.write_all(record)
}

pub(crate) fn print(context: &Context, details: &EntryDetails) -> Result<(), Failure> {
    let output = &context.output;
    if output.is_json {
        return Ok(output.json(&describe::details_json(details))?);
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
    if let Some(problem) = describe::problem(details) {
        pairs.push(("problem", printable(&problem)));
    }
    pairs.push(("seen", entry.seen().to_string()));
    output.pairs(&pairs)?;
    output.line("")?;
    output.line(describe::next_request_of(details))?;
    output.line(&format!(
        "decisions: {}",
        describe::decisions(entry).join(", ")
    ))?;
    Ok(())
}

/// Returns the trace of the execution, if the service stores traces.
fn trace(details: &EntryDetails) -> Option<ExecutionTrace> {
    ExecutionTrace::in_record(details.entry.id(), details.record.as_ref()?)
}
