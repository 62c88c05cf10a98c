//! The bank as a process.

use std::{io, path::PathBuf, time::Duration};

use clap::Parser;
use embedded::{Bank, Failure, GRACE, StopPoint, app, careless, serve};
use tower_idempotency::{IdempotencyLayer, MissingKey};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// A bank in one file.
#[derive(Debug, Parser)]
struct Args {
    /// The address to listen on; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: String,

    /// The file, which is created if it is missing.
    #[arg(long, value_name = "FILE", default_value = "bank.db")]
    file: PathBuf,

    /// The duration of a lease, unless it is renewed. A retry after a crash is refused until the lease expires.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "15s")]
    lease: Duration,

    /// Stop every deposit at this point permanently and print `stopped`, for a test that kills the process there.
    #[arg(long, value_name = "POINT")]
    stop_at: Option<StopPoint>,

    /// Serve the careless variant: do not copy it.
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
    // The server does not wait for executions whose clients have disconnected. An execution that does not finish in time is
    // an orphan once its lease has expired.
    layer.drain(GRACE).await;
    Ok(())
}
