//! Consumers of a retry queue, which send parcels, and the commands of its operator.

use std::{
    io,
    path::PathBuf,
    pin::pin,
    time::{Duration, SystemTime},
};

use clap::{Args, Parser, Subcommand};
use consumers::{
    Backoff, Carrier, Consumer, Failure,
    retry_queue::{Message, Move, PostgresQueue, RedisQueue, Resolution, RetryQueue, State},
    stop_signal,
};
use tokio::{sync::watch, task::JoinSet, time::timeout};
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_redis::RedisOptions;
use tower_idempotency_sqlx::PostgresStore;
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// A retry queue with dead letters in PostgreSQL or Redis, its consumers, and the commands of its operator.
#[derive(Debug, Parser)]
struct Cli {
    /// The database, such as postgres://USER@HOST/NAME or redis://HOST/0. Tables are created.
    #[arg(long, value_name = "URL")]
    database: String,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Sends a parcel for each message.
    Consume(Consume),

    #[command(flatten)]
    Operate(Operation),
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Sends a message, unless the queue has one with this id.
    Send {
        /// The id of the message.
        id: String,
        /// The order, such as "tea to Vienna".
        order: String,
    },
    /// Lists the messages in a state.
    List {
        #[arg(default_values_t = [State::NeedsAttention, State::DeadLetter])]
        states: Vec<State>,

        /// The largest number of messages in each state.
        #[arg(long, value_name = "COUNT", default_value_t = 100)]
        limit: u32,
    },
    /// Queues a dead letter again. Its cause has to be removed before.
    Redrive {
        /// The id of the message.
        id: String,
        /// The delivery that the list shows.
        delivery: i64,
    },
    /// Ends the wait of a message that needs attention. Check first with the carrier if the parcel was sent.
    Resolve {
        /// The id of the message.
        id: String,
        /// The delivery that the list shows.
        delivery: i64,
        resolution: Resolution,
    },
    /// Deletes messages that were done two weeks ago.
    Purge,
}

#[derive(Args, Clone, Debug)]
struct Consume {
    /// The file that parcels are sent to.
    #[arg(long, value_name = "FILE")]
    carrier: PathBuf,

    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    consumers: u32,

    /// The number of failed attempts after which a message is a dead letter.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    attempts: u32,

    /// The longest delay after the first failure; it doubles with each failure.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "1s")]
    base: Duration,

    /// The longest delay.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "10m")]
    cap: Duration,

    /// The time after which a message is delivered again if its consumer died.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "1m")]
    visibility: Duration,

    /// The duration of a lease, unless it is renewed.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s")]
    lease: Duration,

    /// End when no message is queued.
    #[arg(long)]
    until_empty: bool,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let warnings = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    tracing_subscriber::fmt()
        .with_env_filter(warnings.from_env_lossy())
        .with_writer(io::stderr)
        .init();
    let Cli { database, command } = Cli::parse();
    if database.starts_with("redis:") {
        let queue = RedisQueue::connect(&database).await?;
        match command {
            Command::Consume(args) => {
                let store = RedisOptions::new().with_timeout(STORE_TIMEOUT);
                let store = store.connect(&database).await?;
                consume(queue, IdempotencyLayer::new(store), args).await
            }
            Command::Operate(operation) => operate(&queue, operation).await,
        }
    } else {
        let queue = PostgresQueue::connect(&database).await?;
        match command {
            Command::Consume(args) => {
                let store = PostgresStore::from_url(&database)?;
                store.migrate().await?;
                // Redis deletes expired entries by itself.
                let _purging = store.spawn_purger(Duration::from_secs(60));
                consume(queue, IdempotencyLayer::new(store), args).await
            }
            Command::Operate(operation) => operate(&queue, operation).await,
        }
    }
}

async fn operate(queue: &impl RetryQueue, operation: Operation) -> Result<(), Failure> {
    match operation {
        Operation::Send { id, order } => {
            let is_new = queue.send(&id, &order).await?;
            println!("{id}: {}", if is_new { "queued" } else { "known" });
        }
        Operation::List { states, limit } => {
            for state in states {
                for message in queue.list(state, limit).await? {
                    println!("{}", line(&message));
                }
            }
        }
        Operation::Redrive { id, delivery } => {
            apply(queue, &Move::redrive(&id, delivery)).await?;
            println!("{id}: queued");
        }
        Operation::Resolve {
            id,
            delivery,
            resolution,
        } => {
            apply(queue, &Move::resolve(&id, delivery, resolution)).await?;
            println!("{id}: resolved");
        }
        Operation::Purge => println!("{} messages deleted", queue.purge().await?),
    }
    Ok(())
}

async fn apply(queue: &impl RetryQueue, next: &Move) -> Result<(), Failure> {
    match queue.apply(next).await? {
        true => Ok(()),
        false => Err("the message has changed since it was listed: list it again".into()),
    }
}

fn line(message: &Message) -> String {
    let since = Duration::from_millis(message.since.try_into().unwrap_or(0));
    let age = SystemTime::UNIX_EPOCH + since;
    let age = age.elapsed().unwrap_or_default().as_secs();
    // The producer chooses the id and the order: line breaks and escape sequences in them must not reach the terminal.
    format!(
        "{} {:?} delivery {}, {} failures, for {}: {:?} ({:?})",
        message.state,
        message.id,
        message.delivery,
        message.failures,
        humantime::format_duration(Duration::from_secs(age)),
        message.reason,
        message.body,
    )
}

async fn consume(
    queue: impl RetryQueue,
    layer: IdempotencyLayer,
    args: Consume,
) -> Result<(), Failure> {
    let asked_to_stop = stop_signal()?;
    let layer = layer
        .with_store_timeout(STORE_TIMEOUT)
        .with_lease_ttl(args.lease.try_into()?);
    let consumer = Consumer::new(layer.clone(), Carrier::new(&args.carrier))
        .with_attempts(args.attempts)
        .with_backoff(Backoff::new(args.base, args.cap))
        .with_visibility(args.visibility);
    let (stop, stopping) = watch::channel(false);
    let mut consuming = JoinSet::new();
    for _ in 0..args.consumers {
        let (queue, consumer) = (queue.clone(), consumer.clone());
        let (mut stopping, until_empty) = (stopping.clone(), args.until_empty);
        consuming.spawn(async move {
            while !*stopping.borrow() {
                match consumer.step(&queue).await {
                    Ok(true) => continue,
                    Ok(false) if until_empty && is_empty(&queue).await => return,
                    Ok(false) => {}
                    Err(error) => tracing::warn!(%error, "queue unavailable"),
                }
                let _ = timeout(LATER, stopping.wait_for(|it| *it)).await;
            }
        });
    }
    let mut all = pin!(async {
        while let Some(ended) = consuming.join_next().await {
            ended?;
        }
        Ok::<_, Failure>(())
    });
    tokio::select! {
        ended = &mut all => return ended,
        () = asked_to_stop => {}
    }
    // Attempts that have begun run to completion: a message whose consumer dies needs attention.
    stop.send_replace(true);
    let ended = timeout(GRACE, all).await;
    match layer.drain(GRACE).await {
        true => ended.unwrap_or_else(|_| Err("the consumers did not end in time".into())),
        false => Err("attempts that had begun have not ended in time".into()),
    }
}

async fn is_empty(queue: &impl RetryQueue) -> bool {
    let queued = queue.list(State::Queued, 1).await;
    queued.is_ok_and(|it| it.is_empty())
}

/// No client waits for a consumer, so it waits longer for a database that is slow.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
const LATER: Duration = Duration::from_millis(50);
const GRACE: Duration = Duration::from_secs(30);
