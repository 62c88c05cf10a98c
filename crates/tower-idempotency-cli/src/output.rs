//! Text tables and JSON.

use std::{
    fmt::Display,
    io::{self, IsTerminal as _, Write as _},
};

use console::{Alignment, Term, measure_text_width, pad_str};
use serde_json::Value;
use tower_idempotency::inspect::{Entry, State};
use tower_idempotency_console::describe::json_text;
pub(crate) use tower_idempotency_console::describe::{duration, entry_json, printable, time};

use crate::cli::Global;

/// The form of the output.
pub(crate) struct Output {
    pub(crate) is_json: bool,
    has_color: bool,
    /// The columns of the terminal, if standard output is one.
    columns: Option<usize>,
}

impl Output {
    pub(crate) fn new(global: &Global) -> Self {
        let is_disabled = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            is_json: global.json,
            has_color: !global.no_color && !is_disabled && io::stdout().is_terminal(),
            columns: Term::stdout()
                .size_checked()
                .map(|(_, columns)| usize::from(columns)),
        }
    }

    /// Prints a line of JSON, without characters that a terminal obeys.
    pub(crate) fn json(&self, value: &Value) -> io::Result<()> {
        self.line(&json_text(value))
    }

    pub(crate) fn line(&self, line: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{line}")
    }

    /// Prints a table whose columns are as wide as their cells. The last column is not padded. On a terminal, the widest
    /// cells are cut so that each row is one line.
    pub(crate) fn table(&self, head: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| measure_text_width(&row[column]));
            cells.chain([head[column].len()]).max().unwrap_or_default()
        };
        let mut widths: Vec<_> = (0..head.len()).map(width).collect();
        if let Some(columns) = self.columns {
            fit(&mut widths, columns);
        }
        let line = |cells: Vec<&str>| {
            let padded = cells.iter().zip(&widths);
            let padded = padded
                .map(|(cell, width)| pad_str(cell, *width, Alignment::Left, Some("\u{2026}")));
            padded.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
        };
        self.line(&self.bold(&line(head.to_vec())))?;
        for row in rows {
            self.line(&line(row.iter().map(String::as_str).collect()))?;
        }
        Ok(())
    }

    /// Prints names and values, one pair on each line.
    pub(crate) fn pairs(&self, pairs: &[(&str, String)]) -> io::Result<()> {
        let widths = pairs.iter().map(|(name, _)| name.len());
        let width = widths.max().unwrap_or_default();
        for (name, value) in pairs {
            let name = self.bold(&format!("{name:width$}"));
            self.line(&format!("{name}  {value}"))?;
        }
        Ok(())
    }

    fn bold(&self, text: &str) -> String {
        if self.has_color {
            format!("\x1b[1m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Prints a line to standard error. Does nothing if its reader has ended: the exit code stays.
pub(crate) fn print_note(line: impl Display) {
    writeln!(io::stderr(), "{line}").ok();
}

/// Makes the widest columns narrower until the table fits, but none narrower than a short ID.
fn fit(widths: &mut [usize], columns: usize) {
    let gaps = GAP.len() * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > columns {
        match widths.iter_mut().max() {
            Some(widest) if *widest > MIN_WIDTH => *widest -= 1,
            _ => return,
        }
    }
}

const GAP: &str = "  ";
const MIN_WIDTH: usize = 8;

/// Returns the text, or `-` if it is empty.
pub(crate) fn or_dash(text: &str) -> String {
    match text {
        "" => "-".to_owned(),
        text => printable(text),
    }
}

/// Returns the detail that matters most in this state.
pub(crate) fn remark(entry: &Entry) -> String {
    match entry.state() {
        State::Unreadable => {
            let problem = entry.problem.as_deref().unwrap_or_default();
            format!("unreadable: {}", or_dash(problem))
        }
        _ if entry.is_observed() => "observed: stops no retry".to_owned(),
        State::Orphaned if entry.retry_allowed => "retry allowed".to_owned(),
        State::NeedsAttention => or_dash(entry.attention_code.as_deref().unwrap_or_default()),
        _ => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widest_columns_are_cut_to_fit() {
        for (widths, columns, expected) in [
            (&[8, 20, 4][..], 40, &[8, 20, 4][..]),
            (&[8, 60, 4], 40, &[8, 24, 4]),
            (&[8, 60, 60], 40, &[8, 14, 14]),
            (&[8, 60, 60], 10, &[8, 8, 8]),
        ] {
            let mut fitted = widths.to_vec();
            fit(&mut fitted, columns);
            assert_eq!(fitted, expected, "{widths:?} in {columns}");
        }
    }
}
