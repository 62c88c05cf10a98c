//! The payment provider as a separate process.

use std::{error::Error, path::PathBuf, time::Duration};

use clap::Parser;
use rocket_rides::{
    provider::{Ledger, app},
    serve,
};

/// A payment provider for tests: it charges once for each idempotency key, and can be set to misbehave.
#[derive(Debug, Parser)]
struct Args {
    /// The address to listen on; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:4000")]
    listen: String,

    /// The file in which charges are stored.
    #[arg(long, value_name = "FILE")]
    ledger: PathBuf,

    /// The delay before a charge, and again before the response.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "50ms")]
    latency: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let ledger = Ledger::open(&args.ledger)?;
    serve(&args.listen, app(ledger, args.latency), ()).await?;
    Ok(())
}
