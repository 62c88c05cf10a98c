//! Reports of the client, one on each line, which survive its kills.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
};

/// Reports that were read.
#[derive(Debug, Default)]
pub(super) struct Journal {
    /// Operations that were reported as done.
    pub(super) done: HashSet<usize>,
    /// Operations whose first report is of a recovery.
    pub(super) recovered: usize,
    /// Reports of operations that were reported before.
    pub(super) repeated: usize,
    pub(super) not_executed: usize,
    pub(super) contradictions: usize,
    /// Entries of the outbox at the end. More than zero if there was no report of the end.
    pub(super) pending: usize,
}

impl Journal {
    /// Reads the whole lines.
    pub(super) fn read(path: &Path) -> Self {
        Self::parse(&fs::read_to_string(path).unwrap_or_default())
    }

    /// Counts the reports.
    ///
    /// The client guarantees one response for each operation, but not one report. If a process is killed before it removes
    /// the entry, the recovery of a later process gets the response again. Any other second report is a contradiction.
    fn parse(text: &str) -> Self {
        let mut journal = Self {
            pending: usize::MAX,
            ..Self::default()
        };
        // The process and the response of the last report of each operation.
        let mut reports: HashMap<usize, (u32, &str)> = HashMap::new();
        let mut process = 0;
        // A line that a kill has cut off is shorter.
        for line in text.split_inclusive('\n').filter(|it| it.len() == LINE) {
            let words: Vec<_> = line.split_whitespace().collect();
            let parsed = match words[..] {
                [report, number, response] => {
                    let number = number.parse::<usize>().ok();
                    number.map(|number| (report, number, response))
                }
                _ => None,
            };
            let Some((report, number, response)) = parsed else {
                journal.contradictions += 1;
                continue;
            };
            match report {
                "started" => process += 1,
                "done" | "recovered" => {
                    let is_recovered = report == "recovered";
                    let known = reports.insert(number, (process, response));
                    if let Some((reporter, known)) = known {
                        let may_repeat = is_recovered && reporter < process && known == response;
                        journal.repeated += 1;
                        journal.contradictions += usize::from(!may_repeat);
                    } else {
                        journal.done.insert(number);
                        journal.recovered += usize::from(is_recovered);
                    }
                }
                "rejected" => {
                    journal.not_executed += 1;
                    journal.contradictions += usize::from(journal.done.contains(&number));
                }
                "pending" => journal.pending = number,
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

/// Writes a report. The kernel has it when this returns, so that a kill does not undo it. `response` is the digest of a
/// response, or 0.
pub(super) fn report(mut file: &File, report: &str, number: usize, response: u64) {
    let line = line(report, number, response);
    file.write_all(line.as_bytes())
        .expect("a file that can be written");
}

fn line(report: &str, number: usize, response: u64) -> String {
    format!("{report:<9} {number:>10} {response:016x}\n")
}

/// The bytes of a line.
pub(super) const LINE: usize = 38;

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(reports: &[(&str, usize, u64)]) -> Journal {
        let lines = reports.iter();
        let lines = lines.map(|(report, number, response)| line(report, *number, *response));
        Journal::parse(&lines.collect::<String>())
    }

    #[test]
    fn recovery_may_repeat_report_of_killed_process() {
        let found = journal(&[
            ("started", 100, 0),
            ("done", 1, 17),
            ("rejected", 2, 0),
            ("done", 2, 18),
            ("started", 101, 0),
            ("recovered", 2, 18),
            ("recovered", 3, 19),
            ("started", 102, 0),
            ("recovered", 2, 18),
            ("pending", 0, 0),
        ]);
        assert_eq!(found.done, HashSet::from([1, 2, 3]));
        assert_eq!((found.recovered, found.repeated), (1, 2));
        assert_eq!((found.not_executed, found.contradictions), (1, 0));
        assert_eq!(found.pending, 0);
    }

    #[test]
    fn second_report_of_one_process_is_contradiction() {
        let found = journal(&[
            ("started", 100, 0),
            ("done", 1, 17),
            ("recovered", 1, 17),
            ("started", 101, 0),
            ("recovered", 1, 17),
            ("recovered", 1, 17),
        ]);
        assert_eq!((found.repeated, found.contradictions), (3, 2));
    }

    #[test]
    fn second_response_is_contradiction() {
        let found = journal(&[
            ("started", 100, 0),
            ("done", 1, 17),
            ("started", 101, 0),
            ("recovered", 1, 18),
        ]);
        assert_eq!(found.contradictions, 1);
    }

    #[test]
    fn second_report_without_recovery_is_contradiction() {
        let found = journal(&[
            ("started", 100, 0),
            ("done", 1, 17),
            ("started", 101, 0),
            ("done", 1, 17),
            ("rejected", 1, 0),
        ]);
        assert_eq!(found.contradictions, 2);
    }

    #[test]
    fn cut_off_line_is_no_report() {
        let whole = line("done", 12, 17);
        for length in 1..LINE - 1 {
            let text = format!("{}\n{}", &whole[..length], line("done", 7, 18));
            let found = Journal::parse(&text);
            assert_eq!(found.done, HashSet::from([7]), "{length}");
            assert_eq!(found.contradictions, 0, "{length}");
        }
    }

    #[test]
    fn unknown_line_is_contradiction() {
        let found = journal(&[("wrong", 1, 17)]);
        assert_eq!((found.done.len(), found.contradictions), (0, 1));
        assert_eq!(found.pending, usize::MAX);
    }
}
