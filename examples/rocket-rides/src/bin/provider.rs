//! The payment provider as a process of its own.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::Parser;
use rocket_rides::{
    provider::{Ledger, app},
    serve,
};

/// A payment provider to try things on: it charges once for each idempotency key, and can be told to misbehave.
#[derive(Debug, Parser)]
struct Args {
    /// Where to listen; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:4000")]
    listen: String,

    /// The file that it remembers charges in.
    #[arg(long, value_name = "FILE")]
    ledger: PathBuf,

    /// What it takes before it charges, and as long again before it answers.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "50ms")]
    latency: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let ledger = Ledger::open(&args.ledger)?;
    serve(&args.listen, app(ledger, args.latency)).await?;
    Ok(())
}
