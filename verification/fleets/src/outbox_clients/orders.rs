//! The client: sends each operation until its outcome is known, and recovers the operations of the previous process.

use std::{
    collections::HashSet,
    fs::File,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tests::database::pool_options;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header::AUTHORIZATION};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{
    FileOutbox, Operation, Outbox, OutboxLayer, OutboxService, Outcome, PostgresOutbox,
    ResponseBody, RetryLayer, SqliteOutbox,
    sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};

use super::journal::{Journal, report};

type Hyper = Client<HttpConnector, Full<Bytes>>;
type Res = Response<ResponseBody<hyper::body::Incoming>>;

/// Runs the client with the arguments of a command line: the URL of the server, the outbox, the journal and the number of
/// operations. The outbox is `file:PATH`, `sqlite:PATH` or the URL of a PostgreSQL.
///
/// # Panics
///
/// Panics if an argument is missing, or if the outbox fails.
pub async fn run(words: &[String]) {
    let [server, outbox, journal, operations] = words else {
        panic!("expected a server, an outbox, a journal and a number");
    };
    let operations = operations.parse().expect("a number");
    let journal = PathBuf::from(journal);
    if let Some(path) = outbox.strip_prefix("file:") {
        let outbox = FileOutbox::open(path).expect("the former process is dead");
        Orders::new(outbox, server, &journal, operations)
            .run()
            .await;
    } else if let Some(path) = outbox.strip_prefix("sqlite:") {
        // The data survives the process. The campaign does not include crashes of the machine.
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(PATIENCE);
        let pool = pool_options::<tower_idempotency_sqlx::sqlx::Sqlite>()
            .max_connections(1)
            .acquire_timeout(PATIENCE);
        let outbox = SqliteOutbox::new(pool.connect_with(options).await.expect("a file"));
        outbox.migrate().await.expect("a file");
        Orders::new(outbox, server, &journal, operations)
            .run()
            .await;
    } else {
        let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
            .max_connections(8)
            .acquire_timeout(PATIENCE);
        let pool = pool.connect(outbox).await.expect("a server");
        let outbox = PostgresOutbox::new(pool);
        outbox.migrate().await.expect("a server");
        Orders::new(outbox, server, &journal, operations)
            .run()
            .await;
    }
}

struct Orders<O> {
    client: OutboxService<Hyper, O>,
    outbox: Arc<O>,
    server: String,
    journal: File,
    done: Mutex<HashSet<usize>>,
    operations: usize,
}

impl<O: Outbox> Orders<O> {
    fn new(outbox: O, server: &str, journal: &std::path::Path, operations: usize) -> Arc<Self> {
        let outbox = Arc::new(outbox);
        let retries = RetryLayer::new()
            .with_deadline(PATIENCE)
            .with_backoff(Duration::from_millis(2), Duration::from_millis(50))
            .with_throttled_base(Duration::from_millis(5))
            .with_max_retry_after(Duration::from_millis(20));
        let layer = OutboxLayer::new(outbox.clone(), retries).with_manual_removal();
        let done = Journal::read(journal).done;
        let journal = Journal::append(journal);
        report(&journal, "started", process::id() as usize, 0);
        Arc::new(Self {
            client: layer.layer(Client::builder(TokioExecutor::new()).build_http()),
            outbox,
            server: server.to_owned(),
            journal,
            done: Mutex::new(done),
            operations,
        })
    }

    /// Works until all operations are done and the outbox is empty.
    async fn run(self: Arc<Self>) {
        loop {
            let pending = self.recover().await;
            let done = self.done.lock().expect("no panic").clone();
            let left: Vec<_> = (0..self.operations)
                .filter(|number| !done.contains(number) && !pending.contains(number))
                .collect();
            if left.is_empty() && pending.is_empty() {
                break;
            }
            self.clone().send_all(left).await;
        }
        let pending = self.outbox.pending(0, 1).await.expect("an outbox");
        report(&self.journal, "pending", pending.len(), 0);
    }

    /// Sends the pending operations again. Returns those that are still pending.
    async fn recover(&self) -> HashSet<usize> {
        let mut pending = HashSet::new();
        let mut recovery = self.client.recover();
        let authorize = |req: &mut Request<Full<Bytes>>| {
            let token = "Bearer token".parse().expect("a valid header");
            req.headers_mut().insert(AUTHORIZATION, token);
        };
        while let Some(recovered) = recovery.next(authorize).await.expect("an outbox") {
            let number = number_of(recovered.entry.body());
            let key = recovered.entry.key();
            let outcome = recovered.operation.outcome();
            assert_ne!(outcome, Outcome::NotExecuted, "an entry is stored");
            let is_settled = match recovered.result {
                Ok(res) if outcome == Outcome::Definite => {
                    self.settle(number, key, res, "recovered").await
                }
                _ => false,
            };
            if !is_settled {
                pending.insert(number);
            }
        }
        if !pending.is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
        pending
    }

    async fn send_all(self: Arc<Self>, numbers: Vec<usize>) {
        let numbers = Arc::new(numbers);
        let next = Arc::new(AtomicUsize::new(0));
        let mut workers = JoinSet::new();
        for _ in 0..WORKERS {
            let (orders, numbers, next) = (self.clone(), numbers.clone(), next.clone());
            workers.spawn(async move {
                while let Some(&number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                    orders.send(number).await;
                }
            });
        }
        workers.join_all().await;
    }

    /// Sends an operation. While it is reported as not executed, its key is forgotten, and it is sent under a new one.
    async fn send(&self, number: usize) {
        loop {
            let operation = Operation::new();
            let req = Request::post(format!("{}/orders/{number}", self.server))
                .header(AUTHORIZATION, "Bearer token")
                .header("content-type", "text/plain")
                .extension(operation.clone())
                .body(Full::from(format!("order {number}")))
                .expect("a valid request");
            let result = self.client.clone().oneshot(req).await;
            match (operation.outcome(), result) {
                (Outcome::NotExecuted, _) => report(&self.journal, "rejected", number, 0),
                (Outcome::Definite, Ok(res)) => {
                    self.settle(number, operation.key(), res, "done").await;
                    return;
                }
                // The operation stays pending: the next recovery sends it again.
                _ => return,
            }
        }
    }

    /// Reports a response, and removes the entry. Returns `false` if the body did not arrive.
    ///
    /// A recovery reports again if an earlier process was killed between its report and the removal.
    async fn settle(&self, number: usize, key: &str, res: Res, word: &str) -> bool {
        let status = res.status();
        let Ok(body) = res.into_body().collect().await else {
            return false;
        };
        let body = body.to_bytes();
        let mut digest = DefaultHasher::new();
        (status.as_u16(), &body[..]).hash(&mut digest);
        let response = digest.finish();
        let expected = format!("effect 1 of {number} ");
        if status != StatusCode::CREATED || !body.starts_with(expected.as_bytes()) {
            let text = String::from_utf8_lossy(&body);
            eprintln!("CONTRADICTION: order {number} got {status}: {text}");
            report(&self.journal, "wrong", number, response);
        }
        report(&self.journal, word, number, response);
        self.done.lock().expect("no panic").insert(number);
        self.outbox.remove(key).await.expect("an outbox");
        true
    }
}

fn number_of(body: &[u8]) -> usize {
    let text = str::from_utf8(body).expect("text");
    let number = text.strip_prefix("order ").expect("an order");
    number.parse().expect("a number")
}

/// Operations at a time.
const WORKERS: usize = 24;
/// Deadline of a call, longer than the lease of the server (15 s).
const PATIENCE: Duration = Duration::from_secs(30);
