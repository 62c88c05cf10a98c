//! Runs the counter or the shipments on a table, and prints the results.

use std::{io, pin::pin, sync::Arc, time::Duration};

use aws_config::{BehaviorVersion, Region};
use clap::{Parser, Subcommand, ValueEnum};
use consumers::{Applied, Counter, Failure, Queue, Shipments, Tally, Verdict, stop_signal};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_dynamodb::{
    DynamoDbOptions,
    aws_sdk_dynamodb::{Client, config::Credentials},
    https_client,
};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// A queue's consumers and a counter's writers, with their leases and records in DynamoDB.
#[derive(Debug, Parser)]
struct Args {
    /// The URL of a stand-in for `DynamoDB`. Default: AWS, with the region and the credentials of the environment.
    #[arg(long, value_name = "URL", global = true)]
    endpoint: Option<String>,

    /// The table of leases and records, which is made if it is missing; the effects are in another, of this name and
    /// `-tally`.
    #[arg(long, value_name = "NAME", default_value = "consumers", global = true)]
    table: String,

    /// The duration of a lease, unless it is renewed.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "15s", global = true)]
    lease: Duration,

    /// The largest difference between the clocks of processes.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "2s", global = true)]
    skew: Duration,

    /// The time after which the process ends with an error, for example if the database does not respond.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "5m", global = true)]
    patience: Duration,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Sends messages to a queue that delivers at least once, and a parcel for each message.
    Shipments {
        #[arg(long, value_name = "KIND", default_value = "standard")]
        queue: Kind,

        #[arg(long, value_name = "COUNT", default_value_t = 100)]
        messages: u32,

        #[arg(long, value_name = "COUNT", default_value_t = 4)]
        consumers: u32,

        /// The time to pack a parcel, before it is sent.
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "20ms")]
        packing: Duration,

        /// The time after which an equal message gets another parcel.
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "5m")]
        window: Duration,

        /// The time for further work after a parcel is sent.
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "0s")]
        work: Duration,

        /// Run the careless variant: do not copy it.
        #[arg(long)]
        careless: bool,
    },
    /// Applies updates to one number, each of them from several writers at once.
    Counter {
        #[arg(long, value_name = "COUNT", default_value_t = 50)]
        updates: u32,

        #[arg(long, value_name = "AMOUNT", default_value_t = 10)]
        by: u32,

        /// The number of writers that apply each update.
        #[arg(long, value_name = "COUNT", default_value_t = 3)]
        writers: u32,

        /// The time for further work after an update is added.
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "0s")]
        work: Duration,

        /// Run the careless variant: do not copy it.
        #[arg(long)]
        careless: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Fifo,
    Standard,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let warnings = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into());
    tracing_subscriber::fmt()
        .with_env_filter(warnings.from_env_lossy())
        .with_writer(io::stderr)
        .init();
    let args = Args::parse();

    let mut sdk = aws_config::defaults(BehaviorVersion::latest()).http_client(https_client());
    if let Some(endpoint) = &args.endpoint {
        // A stand-in on this machine, which does not check credentials.
        let placeholder = Credentials::new("none", "none", None, None, "consumers");
        sdk = sdk.endpoint_url(endpoint).credentials_provider(placeholder);
        sdk = sdk.region(Region::from_static("us-east-1"));
    }
    let client = Client::new(&sdk.load().await);
    let options = DynamoDbOptions::new().with_clock_skew(args.skew);
    let store = options.store(&client, &args.table);
    store.create_table().await?;
    let tally = Tally::new(&client, format!("{}-tally", args.table));
    tally.create_table().await?;
    // Before any work begins: a signal without a listener ends the process at once.
    let asked_to_stop = stop_signal()?;
    let layer = IdempotencyLayer::new(store).with_lease_ttl(args.lease.try_into()?);

    let (stop, stopping) = watch::channel(false);
    let mut all = pin!(run(args.command, layer.clone(), &tally, &stopping));
    let in_time = tokio::select! {
        done = &mut all => return done,
        () = asked_to_stop => true,
        () = sleep(args.patience) => false,
    };
    // Executions that have begun run to completion: if a consumer dies at a message, an operator has to inspect it.
    stop.send_replace(true);
    let done = timeout(GRACE, all).await;
    let ended = layer.drain(GRACE).await;
    match (ended, in_time) {
        (true, true) => done.unwrap_or_else(|_| Err("the consumers did not end in time".into())),
        (true, false) => {
            Err("not all messages were processed in time; see the messages above".into())
        }
        (false, _) => Err("executions did not end in time".into()),
    }
}

/// Runs the command until all work is done, or until `stop` is set.
async fn run(
    command: Command,
    layer: IdempotencyLayer,
    tally: &Tally,
    stopping: &watch::Receiver<bool>,
) -> Result<(), Failure> {
    match command {
        Command::Shipments {
            queue,
            messages,
            consumers,
            packing,
            window,
            work,
            careless,
        } => {
            let queue = match queue {
                Kind::Fifo => Queue::fifo(VISIBILITY),
                Kind::Standard => Queue::standard(VISIBILITY),
            };
            for n in 0..messages {
                queue.send(format!("customer {}", n % 10), order(n));
            }
            let shipments = Shipments::new(layer, tally.clone())
                .with_window(window.try_into()?)
                .with_packing(packing)
                .with_work(work);
            let shipments = match careless {
                true => shipments.careless(),
                false => shipments,
            };
            let queue = consume(queue, &shipments, consumers, stopping).await;
            let mut parcels = 0;
            for n in 0..messages {
                parcels += tally.amount(&order(n)).await?;
            }
            let dead = queue.dead_letters();
            for (why, body) in &dead {
                println!("dead letter, {why}: {body}");
            }
            println!(
                "{messages} messages, {} deliveries, {parcels} parcels, {} dead letters",
                queue.deliveries(),
                dead.len()
            );
        }
        Command::Counter {
            updates,
            by,
            writers,
            work,
            careless,
        } => {
            let counter = Counter::new(layer, tally.clone(), "visits").with_work(work);
            let counter = match careless {
                true => counter.careless(),
                false => counter,
            };
            count(&counter, updates, by, writers, stopping).await?;
            let sum = tally.amount("visits").await?;
            println!("{updates} updates by {by} from {writers} writers each: {sum}");
        }
    }
    Ok(())
}

fn order(n: u32) -> String {
    format!(r#"{{"order":{n},"items":["tea"]}}"#)
}

async fn consume(
    queue: Queue,
    shipments: &Shipments,
    consumers: u32,
    stopping: &watch::Receiver<bool>,
) -> Arc<Queue> {
    let queue = Arc::new(queue);
    let mut consuming = JoinSet::new();
    for _ in 0..consumers {
        let (queue, shipments) = (Arc::clone(&queue), shipments.clone());
        let stopping = stopping.clone();
        consuming.spawn(async move {
            while !queue.is_empty() && !*stopping.borrow() {
                let Some(delivery) = queue.receive() else {
                    sleep(LATER).await;
                    continue;
                };
                match shipments.receive(&delivery.body).await {
                    Verdict::Delete => queue.delete(&delivery),
                    Verdict::Leave => {}
                    Verdict::DeadLetter(why) => queue.move_to_dead_letters(delivery, why),
                }
            }
        });
    }
    consuming.join_all().await;
    queue
}

async fn count(
    counter: &Counter,
    updates: u32,
    by: u32,
    writers: u32,
    stopping: &watch::Receiver<bool>,
) -> Result<(), Failure> {
    let mut writing = JoinSet::new();
    for update in 0..updates {
        for _ in 0..writers {
            let (counter, stopping) = (counter.clone(), stopping.clone());
            writing.spawn(async move {
                let update = format!("update {update}");
                while !*stopping.borrow() && counter.add(&update, by).await? == Applied::Later {
                    sleep(LATER).await;
                }
                Ok::<_, Failure>(())
            });
        }
    }
    writing.join_all().await.into_iter().collect()
}

/// Shorter than some messages take: the queue delivers such a message again meanwhile.
const VISIBILITY: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_millis(50);
/// The time for the consumers to finish, and then for the layer.
const GRACE: Duration = Duration::from_secs(30);
