//! The bank as a process.

use std::{io, path::PathBuf, time::Duration};

use clap::Parser;
use embedded::{Bank, Failure, GRACE, StopPoint, app, careless, serve};
use tower_idempotency::{IdempotencyLayer, MissingKey};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// A bank in one file.
#[derive(Debug, Parser)]
struct Args {
    /// Where to listen; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: String,

    /// The file, which is made if it is missing.
    #[arg(long, value_name = "FILE", default_value = "bank.db")]
    file: PathBuf,

    /// How long a lease lasts unless it is renewed: for so long a retry is refused after a crash.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "15s")]
    lease: Duration,

    /// Stop every deposit at this point for ever and print `stopped`, for a test that kills the process there.
    #[arg(long, value_name = "POINT")]
    stop_at: Option<StopPoint>,

    /// Serve what not to copy.
    #[arg(long)]
    careless: bool,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let quiet = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    tracing_subscriber::fmt()
        .with_env_filter(quiet.from_env_lossy())
        .with_writer(io::stderr)
        .init();
    let args = Args::parse();

    let mut bank = Bank::open(&args.file).await?;
    bank.stop_at = args.stop_at;
    let _purging = bank.store.spawn_purger(Duration::from_secs(60));
    let layer = IdempotencyLayer::new(bank.store.clone())
        .with_missing_key(MissingKey::Reject)
        .with_lease_ttl(args.lease.try_into()?);
    let app = match args.careless {
        true => careless(bank, layer.clone()),
        false => app(bank, layer.clone()),
    };

    serve(&args.listen, app).await?;
    // The server knows nothing of executions whose clients have left. What does not end in time is an orphan, once its
    // lease is over.
    layer.drain(GRACE).await;
    Ok(())
}
