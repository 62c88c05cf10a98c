//! Runs a range of seeds of the simulation on every core, or runs one seed and prints its events.
//!
//! ```text
//! simulate --from 0 --count 1000000 [--for SECONDS] [--threads 2] [--bug CompletionIsUnfenced]
//! simulate --seed 12236 [--bug CompletionIsUnfenced]
//! ```

use std::{env, process::ExitCode, thread, time::Duration};

use verification::simulation::{Bug, Sweep, run};

fn main() -> ExitCode {
    match Arguments::read(env::args().skip(1)) {
        Ok(Arguments {
            seed: Some(seed),
            bug,
            ..
        }) => print_run(seed, bug),
        Ok(arguments) => sweep(&arguments),
        Err(wrong) => {
            eprintln!(
                "{wrong}\n\nsimulate --from N --count N [--for SECONDS] [--threads N] [--bug NAME]"
            );
            eprintln!("simulate --seed N [--bug NAME]");
            ExitCode::from(2)
        }
    }
}

struct Arguments {
    seed: Option<u64>,
    from: u64,
    count: u64,
    threads: usize,
    limit: Option<Duration>,
    bug: Option<Bug>,
}

impl Arguments {
    fn read(mut given: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut arguments = Self {
            seed: None,
            from: 0,
            count: 100_000,
            threads: thread::available_parallelism().map_or(1, usize::from),
            limit: None,
            bug: None,
        };
        while let Some(name) = given.next() {
            let value = given.next().ok_or(format!("{name} needs a value"))?;
            let number = || {
                let number = value.replace('_', "").parse::<u64>();
                number.map_err(|_| format!("expected a number after {name}, found {value}"))
            };
            match name.as_str() {
                "--seed" => arguments.seed = Some(number()?),
                "--from" => arguments.from = number()?,
                "--count" => arguments.count = number()?,
                "--for" => arguments.limit = Some(Duration::from_secs(number()?)),
                "--threads" => {
                    arguments.threads = usize::try_from(number()?.max(1)).unwrap_or(1);
                }
                "--bug" => {
                    let named = |bug: &Bug| format!("{bug:?}") == value;
                    let bug = Bug::ALL.into_iter().find(named);
                    arguments.bug = Some(bug.ok_or(format!("there is no bug {value}"))?);
                }
                _ => return Err(format!("expected an option, found {name}")),
            }
        }
        Ok(arguments)
    }
}

fn print_run(seed: u64, bug: Option<Bug>) -> ExitCode {
    let report = run(seed, bug);
    print!("{report}");
    match report.violation {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}

fn sweep(arguments: &Arguments) -> ExitCode {
    let sweep = Sweep {
        seeds: arguments.from..arguments.from.saturating_add(arguments.count),
        threads: arguments.threads,
        bug: arguments.bug,
        limit: arguments.limit,
    };
    let swept = sweep.run();
    if swept.ran == 0 {
        eprintln!("no seed ran: raise --count or --for");
        return ExitCode::FAILURE;
    }
    println!("{swept}");
    match swept.found {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}
