//! `idempotency conform`: judges any server that supports `Idempotency-Key`, over HTTP.
//!
//! [`plan`] has the requests, [`judge`](mod@judge) sends them and judges the responses, and [`row`] has the rule of each row.
//! To add a row, add it to [`ROWS`] and to the judge.

mod client;
mod compare;
mod judge;
mod plan;
mod row;

use std::path::PathBuf;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri, header, uri::PathAndQuery};
use serde_json::json;

use self::{
    client::{Client, WRONG_URL},
    judge::{Verdicts, judge},
    plan::{Plan, Shape, other_body},
    row::{Level, ROWS, Row, Verdict},
};
use crate::{
    cli::Global,
    failure::{Exit, Failure},
    output::{Output, print_note},
};

/// The width of the last column, so that a line has at most 80 characters.
const REASON_WIDTH: usize = 40;

/// Judge how any server implements Idempotency-Key, by real requests
///
/// Sends real requests with random keys, and the server executes some of them: use a test system. The rows are those of
/// draft-ietf-httpapi-idempotency-key-header-07 and of the semantics of this project. The request must succeed, and its
/// response should differ from execution to execution, as one with a new id does.
///
/// The exit code is 0 if all rows of the level "must" hold or were not judged. It is 1 if one of these rows does not hold.
/// It is 2 if the command line is wrong, the server cannot be reached, or the request does not succeed.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// The address of the operation, http:// or https://. The system must trust the certificate
    url: String,
    /// The method
    #[arg(long, default_value = "POST")]
    method: Method,
    /// A header of each request, such as a credential
    #[arg(long = "header", value_name = "NAME:VALUE")]
    headers: Vec<String>,
    /// The body
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "{\"conform\":1}",
        conflicts_with = "body_file"
    )]
    body: String,
    /// The file with the body
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,
    /// The media type of the body
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    content_type: HeaderValue,
    /// Another valid body. By default the body with one more member of JSON, or one more character
    #[arg(long, value_name = "TEXT")]
    other_body: Option<String>,
    /// Another path on which the request succeeds: judges other-path
    #[arg(long, value_name = "PATH")]
    other_path: Option<PathAndQuery>,
    /// Another method with which the request succeeds: judges other-method
    #[arg(long, value_name = "METHOD")]
    other_method: Option<Method>,
    /// A header of another caller, in place of the one of --header: judges other-caller
    #[arg(long = "other-header", value_name = "NAME:VALUE")]
    other_headers: Vec<String>,
    /// The server demands a key: judges missing-key
    #[arg(long)]
    require_key: bool,
    /// Malformed keys must be refused: the rows key-* get the level "must"
    #[arg(long)]
    strict_keys: bool,
    /// Send keys without quotes, for servers that do not parse them as strings
    #[arg(long)]
    bare_keys: bool,
}

pub(crate) async fn run(args: &Args, global: &Global) -> Result<Exit, Failure> {
    // Parsed here and not by clap, whose errors show the value.
    let url: Uri = args.url.parse().map_err(|_| Failure::usage(WRONG_URL))?;
    let client = Client::new(&url, global.timeout)?;
    let plan = args.plan(&url)?;
    let (sent, executed) = plan.requests();
    print_note(format_args!(
        "idempotency conform sends at least {sent} requests. A server that conforms executes about {executed} of them, and others execute more."
    ));
    let verdicts = judge(&client, &plan, global.timeout).await?;
    let fails = |(row, verdict): (&Row, &Verdict)| {
        args.level(row) == Level::Must && matches!(verdict, Verdict::Fails(_))
    };
    let exit = if judged(&verdicts).any(fails) {
        Exit::Failed
    } else {
        Exit::Done
    };
    let output = Output::new(global);
    exit.after(if output.is_json {
        args.print_json(&output, &verdicts)
    } else {
        args.print(&output, &verdicts)
    })
}

/// Returns the rows in the order of the table.
fn judged(verdicts: &Verdicts) -> impl Iterator<Item = (&'static Row, &Verdict)> {
    let verdict = |row: &'static Row| Some((row, verdicts.get(row.name)?));
    ROWS.iter().filter_map(verdict)
}

impl Args {
    fn level(&self, row: &Row) -> Level {
        if self.strict_keys && row.name.starts_with("key-") {
            Level::Must
        } else {
            row.level
        }
    }

    fn plan(&self, url: &Uri) -> Result<Plan, Failure> {
        let body: Bytes = match &self.body_file {
            Some(file) => {
                let read = std::fs::read(file);
                let read = read.map_err(|error| {
                    Failure::usage(format!("cannot read {}: {error}", file.display()))
                })?;
                read.into()
            }
            None => self.body.clone().into(),
        };
        let host = url.authority().map_or("", |it| it.as_str());
        let mut headers = HeaderMap::new();
        let host =
            HeaderValue::from_str(host).map_err(|error| Failure::usage(error.to_string()))?;
        headers.insert(header::HOST, host);
        headers.insert(header::CONTENT_TYPE, self.content_type.clone());
        set(&mut headers, &self.headers)?;
        let target = url.path_and_query().map_or("/", PathAndQuery::as_str);
        let shape = Shape {
            method: self.method.clone(),
            target: target.to_owned(),
            headers,
            body,
        };
        let other_path = self.other_path.as_ref().map(|path| Shape {
            target: path.to_string(),
            ..shape.clone()
        });
        let other_method = self.other_method.as_ref().map(|method| Shape {
            method: method.clone(),
            ..shape.clone()
        });
        let other_caller = if self.other_headers.is_empty() {
            None
        } else {
            let mut other = shape.clone();
            set(&mut other.headers, &self.other_headers)?;
            Some(other)
        };
        let other_body = match &self.other_body {
            Some(body) => body.clone().into(),
            None => other_body(&shape.body),
        };
        Ok(Plan {
            shape,
            other_body,
            other_path,
            other_method,
            other_caller,
            has_bare_keys: self.bare_keys,
            requires_key: self.require_key,
        })
    }

    /// Prints one object for each row.
    fn print_json(&self, output: &Output, verdicts: &Verdicts) -> Result<(), Failure> {
        for (row, verdict) in judged(verdicts) {
            output.json(&json!({
                "row": row.name,
                "level": self.level(row).name(),
                "verdict": verdict.name(),
                "reason": verdict.reason(),
                "source": row.source,
                "rule": row.rule,
            }))?;
        }
        Ok(())
    }

    /// Prints the table, the rules of the rows that do not hold, and the number of rows with each verdict.
    fn print(&self, output: &Output, verdicts: &Verdicts) -> Result<(), Failure> {
        let mut lines = Vec::new();
        for (row, verdict) in judged(verdicts) {
            let level = self.level(row).name().to_owned();
            let mut reasons = wrap(verdict.reason()).into_iter();
            lines.push(vec![
                row.name.to_owned(),
                level,
                verdict.name().to_owned(),
                reasons.next().unwrap_or_default(),
            ]);
            for reason in reasons {
                lines.push(vec![String::new(), String::new(), String::new(), reason]);
            }
        }
        output.table(&["ROW", "LEVEL", "VERDICT", "REASON"], &lines)?;
        let mut counts = [0; 3];
        for (row, verdict) in judged(verdicts) {
            let index = match verdict {
                Verdict::Holds(_) => 0,
                Verdict::Fails(_) => 1,
                Verdict::Unjudged(_) => 2,
            };
            counts[index] += 1;
            if index == 1 && self.level(row) != Level::Report {
                output.line("")?;
                output.line(&format!("{} ({}):", row.name, row.source))?;
                output.line(row.rule)?;
            }
        }
        let [hold, fail, unjudged] = counts;
        output.line("")?;
        output.line(&format!(
            "{hold} hold, {fail} do not hold, {unjudged} were not judged"
        ))?;
        Ok(())
    }
}

/// Sets headers. All lines of one name are set, and replace those that were set before.
fn set(headers: &mut HeaderMap, lines: &[String]) -> Result<(), Failure> {
    let parsed: Result<Vec<_>, _> = lines.iter().map(|line| parse_header(line)).collect();
    let parsed = parsed.map_err(|error| Failure::usage(format!("invalid header: {error}")))?;
    for (name, _) in &parsed {
        headers.remove(name);
    }
    for (name, value) in parsed {
        headers.append(name, value);
    }
    Ok(())
}

/// Parses a header. The error does not show its value, which may be a credential.
fn parse_header(line: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = line.split_once(':').ok_or("expected NAME:VALUE")?;
    let name: HeaderName = name.trim().parse().map_err(|_| "invalid header name")?;
    let mut value =
        HeaderValue::from_str(value.trim()).map_err(|_| "invalid characters in the value")?;
    if name == "idempotency-key" {
        return Err("conform sets the key itself".to_owned());
    }
    if name == header::CONTENT_LENGTH || name == header::TRANSFER_ENCODING {
        return Err("conform sets the length itself".to_owned());
    }
    value.set_sensitive(true);
    Ok((name, value))
}

/// Splits a text into lines of the width of the last column.
fn wrap(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= REASON_WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
