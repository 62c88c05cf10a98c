//! Runs a fleet on a real server while one fault is injected repeatedly: see `scripts/campaign`.

use std::{
    env,
    process::ExitCode,
    time::{Duration, Instant},
};

use fleets::{
    campaign::{Campaign, Fault, Kind, Mode, Tally},
    outbox_clients::{Clients, StoreKind},
};

#[tokio::main]
async fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some("client") {
        return run_clients(env::args().skip(2)).await;
    }
    let campaign = match read(env::args().skip(1)) {
        Ok(campaign) => campaign,
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::from(2);
        }
    };
    let tally = campaign
        .run(|round| {
            println!(
                "seed {}, {} times, {} of them during a request: {}",
                round.seed, round.injected, round.strikes, round.sums
            );
            for violation in round.violations.iter().take(SHOWN) {
                println!("VIOLATION, key that {violation}");
            }
        })
        .await;
    println!("\n{}\n{tally}", Tally::HEAD);
    if tally.strikes() == 0 {
        eprintln!("no fault met a request: raise --for");
    }
    if tally.is_clean() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn read(mut words: impl Iterator<Item = String>) -> Result<Campaign, String> {
    let store = words.next().unwrap_or_default();
    let kind = Kind::ALL.into_iter().find(|kind| kind.name() == store);
    let kind = kind.ok_or_else(|| expected("a store", &Kind::ALL.map(Kind::name), &store))?;
    let name = words.next().unwrap_or_default();
    let fault = Fault::ALL.into_iter().find(|fault| fault.name() == name);
    let fault = fault.ok_or_else(|| expected("a fault", &Fault::ALL.map(Fault::name), &name))?;
    let mut campaign = Campaign {
        kind,
        fault,
        mode: Mode::Refuse,
        seed: 0,
        limit: Duration::from_secs(60),
        strikes: usize::MAX,
    };
    while let Some(option) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{option} needs a value"))?;
        let number = || {
            let number = value.parse::<u64>();
            number.map_err(|_| expected("a number", &[], &value))
        };
        match option.as_str() {
            "--mode" => {
                let mode = Mode::ALL.into_iter().find(|mode| mode.name() == value);
                campaign.mode =
                    mode.ok_or_else(|| expected("a mode", &Mode::ALL.map(Mode::name), &value))?;
            }
            "--seed" => campaign.seed = number()?,
            "--for" => campaign.limit = duration(&value)?,
            "--strikes" => campaign.strikes = usize::try_from(number()?).unwrap_or(usize::MAX),
            _ => {
                let options = ["--mode", "--seed", "--for", "--strikes"];
                return Err(expected("an option", &options, &option));
            }
        }
    }
    campaign.check()?;
    Ok(campaign)
}

/// Runs clients with an outbox, which are killed. Prints a line after every tenth kill, and the result.
async fn run_clients(words: impl Iterator<Item = String>) -> ExitCode {
    let clients = match read_clients(words) {
        Ok(clients) => clients,
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::from(2);
        }
    };
    let program = env::current_exe().expect("this program has a path");
    let began = Instant::now();
    let progress = |kills: usize, done| {
        if kills.is_multiple_of(10) {
            let seconds = began.elapsed().as_secs();
            println!("{seconds} s: {kills} kills, {done} operations done");
        }
    };
    let tally = clients
        .run(&program.with_file_name("orders"), progress)
        .await;
    let (store, seed) = (clients.store.name(), clients.seed);
    println!(
        "{store}, seed {seed}, {} s: {tally}",
        began.elapsed().as_secs()
    );
    match tally.is_clean() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn read_clients(mut words: impl Iterator<Item = String>) -> Result<Clients, String> {
    let name = words.next().unwrap_or_default();
    let store = StoreKind::ALL
        .into_iter()
        .find(|store| store.name() == name);
    let mut clients = Clients {
        store: store
            .ok_or_else(|| expected("a store", &StoreKind::ALL.map(StoreKind::name), &name))?,
        operations: 100_000,
        between_kills: 1000,
        seed: 0,
    };
    while let Some(option) = words.next() {
        let value = words.next().unwrap_or_default();
        let number = value.parse::<usize>().ok().filter(|number| *number > 0);
        let number = number.ok_or_else(|| expected("a number above 0", &[], &value));
        match option.as_str() {
            "--operations" => clients.operations = number?,
            "--between-kills" => clients.between_kills = number?,
            "--seed" => clients.seed = number? as u64,
            _ => {
                let options = ["--operations", "--between-kills", "--seed"];
                return Err(expected("an option", &options, &option));
            }
        }
    }
    Ok(clients)
}

/// Parses a duration such as `90s`, `10m` or `2h`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || expected("a duration such as 90s, 10m or 2h", &[], text);
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return Err(wrong()),
    };
    let number = text[..text.len() - 1].parse::<u64>().map_err(|_| wrong())?;
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

fn expected(what: &str, of: &[&str], found: &str) -> String {
    match of {
        [] => format!("expected {what}, found {found:?}"),
        of => format!("expected {what} of {}, found {found:?}", of.join(", ")),
    }
}

/// The number of violations of a round that are printed in full.
const SHOWN: usize = 5;
