//! The processes.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::{Request, StatusCode, request},
};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use rocket_rides::provider::{Charge, Mood};
use tests::{
    Answer,
    scratch::Scratch,
    servers::{Guard, directory, on_a_free_port, until_ready},
};
use tokio::time::{sleep, timeout};
use tower_idempotency_sqlx::sqlx::{self, PgPool};

/// Two services on one database, and a provider.
pub(super) struct Cast {
    pub(super) services: Vec<Arc<Actor>>,
    pub(super) provider: Arc<Actor>,
    pub(super) pool: PgPool,
    pub(super) mailbox: PathBuf,
    _scratch: Scratch,
}

impl Cast {
    /// `args` are for the services.
    pub(super) async fn start(database: &str, args: &[&str]) -> Self {
        let scratch = Scratch::new();
        let mailbox = scratch.file("mailbox");
        let ledger = scratch.file("ledger").display().to_string();
        let provider = Actor::start(
            env!("CARGO_BIN_EXE_rocket-rides-provider"),
            &["--ledger", &ledger, "--latency", "10ms"],
        );
        let url = format!("http://{}", provider.address);
        let services = (0..2).map(|_| {
            let mailbox = mailbox.display().to_string();
            let ours = ["--database", database, "--provider", &url];
            let times = ["--lease", "1s", "--patience", "300ms"];
            let more = ["--abandoned", "100ms", "--mailbox", &mailbox];
            let args = [&ours[..], &times, &more, args].concat();
            Arc::new(Actor::start(env!("CARGO_BIN_EXE_rocket-rides"), &args))
        });
        Self {
            services: services.collect(),
            provider: Arc::new(provider),
            pool: PgPool::connect(database).await.expect("the server runs"),
            mailbox,
            _scratch: scratch,
        }
    }

    /// The provider is well from now on.
    pub(super) async fn calm(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !set_mood(&self.provider, Mood::Well).await {
            assert!(Instant::now() < deadline, "the provider does not come back");
        }
    }

    /// Waits for the completer, which is given a minute, and for the worker.
    pub(super) async fn until_nothing_is_left_to_do(&self) {
        let left = "select (select count(*) from tower_idempotency where completed is null and checkpoint is not null),
                    (select count(*) from receipts where delivered is null)";
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let left = sqlx::query_as(left).fetch_one(&self.pool).await;
            let (rides, receipts): (i64, i64) = left.expect("the server runs");
            if (rides, receipts) == (0, 0) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{rides} rides and {receipts} receipts are stuck\n{}",
                self.said()
            );
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// How often a request was taken over.
    pub(super) async fn takeovers(&self) -> i64 {
        let sum = "select coalesce(sum(generation - 1), 0)::bigint from tower_idempotency";
        let sum = sqlx::query_scalar(sum).fetch_one(&self.pool).await;
        sum.expect("the server runs")
    }

    /// What the provider was asked for.
    pub(super) async fn charges(&self) -> Vec<Charge> {
        let req = Request::get(self.provider.url("/charges"));
        let answer = ask(req, String::new()).await.expect("the provider runs");
        serde_json::from_slice(&answer.body).expect("charges")
    }

    /// What the services said.
    pub(super) fn said(&self) -> String {
        let logs = self
            .services
            .iter()
            .map(|service| service.running().guard.log());
        logs.collect::<Vec<_>>().join("\n")
    }
}

/// A process on a port, which the next one takes when it was killed.
pub(super) struct Actor {
    address: SocketAddr,
    program: &'static str,
    args: Vec<String>,
    running: Mutex<Running>,
}

struct Running {
    guard: Guard,
    /// How many processes there were in the guard's directory, which share a log.
    starts: usize,
}

impl Actor {
    fn start(program: &'static str, args: &[&str]) -> Self {
        let args: Vec<_> = args.iter().map(|&arg| arg.to_owned()).collect();
        let directory = directory("rides");
        let (port, guard) = on_a_free_port(
            |port| {
                std::fs::create_dir_all(&directory).expect("a directory for throwaway files");
                Guard::start(&directory, &command(program, port, &args), "KILL")
            },
            |_, guard| is_ready(guard, 1),
        );
        Self {
            address: ([127, 0, 0, 1], port).into(),
            program,
            args,
            running: Mutex::new(Running { guard, starts: 1 }),
        }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// SIGKILL, and another one in its place.
    pub(super) fn kill(&self) {
        let mut running = self.running();
        let command = command(self.program, self.address.port(), &self.args);
        running.guard.replace(&command, "KILL");
        running.starts += 1;
        let is_back = until_ready(&running.guard, || is_ready(&running.guard, running.starts));
        assert!(is_back, "it does not come back:\n{}", running.guard.log());
    }

    /// SIGSTOP, and SIGCONT after a while.
    pub(super) fn pause(&self, length: Duration) {
        let running = self.running();
        running.guard.signal("STOP");
        thread::sleep(length);
        running.guard.signal("CONT");
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether it was told.
pub(super) async fn set_mood(provider: &Actor, mood: Mood) -> bool {
    let mood = serde_json::to_value(mood).expect("a name");
    let path = format!("/mood/{}", mood.as_str().expect("a name"));
    let told = ask(Request::put(provider.url(&path)), String::new()).await;
    told.is_some_and(|answer| answer.status == StatusCode::OK)
}

/// A whole answer, unless there is none within two seconds.
pub(super) async fn ask(req: request::Builder, body: String) -> Option<Answer> {
    let req = req.body(Body::from(body)).expect("a request");
    // A client that repeats requests by itself would hide what is tried.
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .retry_canceled_requests(false)
        .build_http();
    let answer = async {
        let (head, body) = client.request(req).await.ok()?.into_parts();
        Some(Answer {
            status: head.status,
            headers: head.headers,
            body: body.collect().await.ok()?.to_bytes(),
        })
    };
    timeout(Duration::from_secs(2), answer).await.ok()?
}

fn command(program: &str, port: u16, args: &[String]) -> Command {
    let mut command = Command::new(program);
    let listen = format!("127.0.0.1:{port}");
    command.args(["--listen", &listen]).args(args);
    command.env_remove("RUST_LOG");
    command
}

fn is_ready(guard: &Guard, starts: usize) -> bool {
    guard.log().matches("listening on http://").count() == starts
}
