//! Reports of the client, one on each line, which survive its kills.

use std::{
    collections::HashSet,
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
};

/// Reports that were read.
#[derive(Default)]
pub(super) struct Journal {
    /// Operations that were reported as done.
    pub(super) done: HashSet<usize>,
    pub(super) recovered: usize,
    pub(super) not_executed: usize,
    pub(super) contradictions: usize,
    /// Entries of the outbox at the end. More than zero if there was no report of the end.
    pub(super) pending: usize,
}

impl Journal {
    /// Reads the whole lines.
    pub(super) fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        let mut journal = Self {
            pending: usize::MAX,
            ..Self::default()
        };
        for line in text.split_inclusive('\n') {
            let Some((report, number)) = line.trim_end_matches('\n').split_once(' ') else {
                continue;
            };
            let number = number.trim_start().parse();
            match (report, number) {
                ("done", Ok(number)) => {
                    journal.contradictions += usize::from(!journal.done.insert(number));
                }
                ("recovered", Ok(number)) => {
                    journal.recovered += 1;
                    journal.contradictions += usize::from(!journal.done.insert(number));
                }
                ("rejected", Ok(number)) => {
                    journal.not_executed += 1;
                    journal.contradictions += usize::from(journal.done.contains(&number));
                }
                ("pending", Ok(number)) => journal.pending = number,
                _ => journal.contradictions += 1,
            }
        }
        journal
    }

    /// Opens the file to append lines. Ends a line that a kill has cut off.
    pub(super) fn append(path: &Path) -> File {
        let text = fs::read(path).unwrap_or_default();
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut file = file.expect("a file that can be written");
        if text.last().is_some_and(|last| *last != b'\n') {
            file.write_all(b"\n").expect("a file that can be written");
        }
        file
    }
}

/// Writes a report. The kernel has it when this returns, so that a kill does not undo it.
pub(super) fn report(mut file: &File, report: &str, number: usize) {
    let line = format!("{report} {number:>6}\n");
    file.write_all(line.as_bytes())
        .expect("a file that can be written");
}
