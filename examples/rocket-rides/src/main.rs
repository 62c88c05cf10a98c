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
    /// The address to listen on; port 0 picks a free port.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    listen: String,

    /// A PostgreSQL database, such as postgres://USER@HOST/NAME; its tables are created.
    #[arg(long, value_name = "URL")]
    database: String,

    /// The payment provider.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:4000")]
    provider: String,

    /// The timeout of a call to the provider.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "5s")]
    patience: Duration,

    /// The timeout of a request, including all its calls, and of the delivery of a receipt.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s")]
    limit: Duration,

    /// The file that receipts are delivered to.
    #[arg(long, value_name = "FILE")]
    mailbox: PathBuf,

    /// The duration of a lease, unless it is renewed.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "15s")]
    lease: Duration,

    /// The time after which the completer finishes an abandoned request, and the interval of its sweeps.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s")]
    abandoned: Duration,

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
    let interval = Duration::from_millis(100);
    tokio::spawn(deliver(pool, mailbox, interval, args.limit));
    let _purging = store.spawn_purger(Duration::from_secs(60));
    if args.careless {
        serve(&args.listen, careless(rides, layer.clone()), ()).await?;
    } else {
        let completing = completer(&rides, &layer)
            .with_min_age(args.abandoned)
            .spawn(args.abandoned);
        serve(&args.listen, app(rides, layer.clone()), completing).await?;
    }
    // The server does not wait for executions whose clients have disconnected. An execution that does not finish in time is
    // an orphan once its lease has expired.
    layer.drain(GRACE).await;
    Ok(())
}
