//! A session of an operator: commands on a store, and their output.

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader, Read as _},
    path::PathBuf,
    process::Stdio,
    thread,
};

use tests::scratch::Scratch;

use crate::{CommandOutput, command, interruption::end, run_in};

/// Replacements for the parts of an output that differ from run to run, or between stores with the same abilities.
pub(crate) const FILTERS: [(&str, &str); 11] = [
    // A record has the time of its response.
    (r#""record":"[^"]+""#, r#""record":"RECORD""#),
    (r"(seen\W+)[\w-]{67}", "${1}SEEN"),
    (r#"(--after |"next":")[\w-]+"#, "${1}TOKEN"),
    // An ID.
    (r"\b([0-9a-f]{8})[0-9a-f]{56}\b", "${1}.."),
    (r"\b[\d-]{10}T[\d:.]{12}Z\b", "TIME"),
    (r#"(ms":|summary took +)\d+"#, "${1}N"),
    (r"\(\d+\w+( \d+\w+)? ago\)", "(AGE ago)"),
    // The column of ages is as wide as the longest one.
    (r"(?m)^(ID +STATE +AGE) +", "${1}  "),
    (
        r"(?m)^([0-9a-f]{8} +[a-z-]+ +)\d+(?:ms|[dhms])(?: \d+[hms])? +",
        "${1}AGE  ",
    ),
    // In a cluster, each slot with an entry has a key for its index.
    (r"(examined\W+|keys with the prefix +)\d+", "${1}N"),
    (r"\b(?:mysql|postgres|sqlite)\b", "STORE"),
];

/// Runs commands in a directory, and notes each one with its output and its exit code.
pub(crate) struct Session<'a> {
    store: &'a str,
    scratch: Scratch,
    notes: String,
    changes: usize,
}

impl<'a> Session<'a> {
    pub(crate) fn new(store: &'a str) -> Self {
        Self {
            store,
            scratch: Scratch::new(),
            notes: String::new(),
            changes: 0,
        }
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// Runs a command. A space separates two arguments.
    pub(crate) fn run(&mut self, line: &str) -> CommandOutput {
        let output = self.output(line);
        self.note(line, &output);
        output
    }

    /// Runs a command that changes something, with the options that it requires. The audit log is `audit.jsonl`.
    pub(crate) fn change(&mut self, line: &str) {
        let line = format!("{line} --reason ticket-17 --audit audit.jsonl --yes");
        let ran = self.run(&line);
        self.changes += usize::from(ran.code == 0);
    }

    /// Returns the number of changes that succeeded.
    pub(crate) fn changes(&self) -> usize {
        self.changes
    }

    /// Runs commands that change nothing, each one in text and in JSON. Notes them in this order.
    ///
    /// Several commands run at the same time, because a command on a cluster takes a second.
    pub(crate) fn read(&mut self, lines: &[&str]) {
        let forms = lines
            .iter()
            .flat_map(|line| [(*line).to_owned(), format!("{line} --json")]);
        let forms: Vec<_> = forms.collect();
        for forms in forms.chunks(COMMANDS_AT_ONCE) {
            let this = &*self;
            let outputs: Vec<_> = thread::scope(|scope| {
                let running: Vec<_> = forms
                    .iter()
                    .map(|line| scope.spawn(move || this.output(line)))
                    .collect();
                let ended = running.into_iter();
                ended.map(|it| it.join().expect("it runs")).collect()
            });
            for (line, output) in forms.iter().zip(&outputs) {
                self.note(line, output);
            }
        }
    }

    /// Runs a command that prints a line and then waits. Sends SIGINT after the line.
    pub(crate) fn interrupt(&mut self, line: &str) {
        let mut tool = command(self.scratch.path(), self.store);
        tool.args(line.split(' ')).stdin(Stdio::null());
        let tool = tool.stdout(Stdio::piped());
        let mut tool = tool.spawn().expect("the tool starts");
        let mut reader = BufReader::new(tool.stdout.take().expect("a pipe"));
        let mut out = String::new();
        reader.read_line(&mut out).expect("a line");
        let code = end(&mut tool, "-INT");
        reader.read_to_string(&mut out).expect("text");
        let err = String::new();
        self.note(line, &CommandOutput { code, out, err });
    }

    /// Returns the text of the session.
    pub(crate) fn into_notes(self) -> String {
        self.notes
    }

    fn output(&self, line: &str) -> CommandOutput {
        let args: Vec<_> = line.split(' ').collect();
        run_in(self.scratch.path(), self.store, &args)
    }

    fn note(&mut self, line: &str, output: &CommandOutput) {
        let CommandOutput { code, out, err } = output;
        let mut text = escape(&format!("{out}{err}"));
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let noted = writeln!(self.notes, "$ idempotency {line}\n{text}exit {code}\n");
        noted.expect("memory");
    }
}

/// Returns the text with its control characters as escapes. The bytes of a record contain some.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if c.is_control() && c != '\n' {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped
}

pub(crate) const COMMANDS_AT_ONCE: usize = 8;
