//! The service as a process: requests, the completer, and the worker that delivers receipts.

use std::{io, path::PathBuf, time::Duration};

use clap::Parser;
use rocket_rides::{
    Failure, GRACE, Mailbox, Payments, Rides, app, careless, completer, connect, deliver, migrate,
    serve,
};
use tower_idempotency::{IdempotencyLayer, MissingKey};
use tower_idempotency_sqlx::PostgresStore;
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// Books rides on rockets.
#[derive(Debug, Parser)]
struct Args {
    /// Where to listen; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: String,

    /// A PostgreSQL database, as in postgres://USER@HOST/NAME; its tables are made.
    #[arg(long, value_name = "URL")]
    database: String,

    /// The payment provider.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:4000")]
    provider: String,

    /// How long the provider is waited for.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "5s")]
    patience: Duration,

    /// How long a request may take, whatever hangs.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s")]
    limit: Duration,

    /// The file that receipts are delivered to.
    #[arg(long, value_name = "FILE")]
    mailbox: PathBuf,

    /// How long a lease lasts unless it is renewed.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "15s")]
    lease: Duration,

    /// For how long a request has to be abandoned before the completer finishes it, and how often that looks.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s")]
    abandoned: Duration,

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

    let pool = connect(&args.database, args.limit).await?;
    migrate(&pool).await?;
    let store = PostgresStore::from_url(&args.database)?;
    store.migrate().await?;
    let layer = IdempotencyLayer::new(store.clone())
        .with_missing_key(MissingKey::Reject)
        .with_lease_ttl(args.lease.try_into()?);
    let rides = Rides {
        store: store.clone(),
        pool: pool.clone(),
        payments: Payments::new(&args.provider, args.patience),
        limit: args.limit,
    };

    let mailbox = Mailbox::new(&args.mailbox);
    tokio::spawn(deliver(pool, mailbox, Duration::from_millis(100)));
    let _purging = store.spawn_purger(Duration::from_secs(60));
    if args.careless {
        serve(&args.listen, careless(rides, layer.clone())).await?;
    } else {
        let _completing = completer(&rides, &layer)
            .with_min_age(args.abandoned)
            .spawn(args.abandoned);
        serve(&args.listen, app(rides, layer.clone())).await?;
    }
    // The server knows nothing of executions whose clients have left. What does not end in time is an orphan, once its
    // lease is over.
    layer.drain(GRACE).await;
    Ok(())
}
