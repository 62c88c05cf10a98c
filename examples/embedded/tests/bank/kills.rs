//! A bank that is killed repeatedly, and clients that retry until they have a response.
//!
//! `KILLS` sets the number of kills (30 unless set, or 300 with `FULL=1`), and `SEED` their times:
//! `KILLS=300 SEED=7 cargo test -p embedded --test bank kills`.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use axum::http::{Request, StatusCode};
use tests::{
    HANG_GUARD, TestResponse, few_or,
    random::Random,
    scratch::Scratch,
    server_process::{ServerProcess, send_http},
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

use crate::totals::Totals;

// F-032
/// The kills may hit any moment, but some of them interrupt deposits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_bank_makes_each_deposit_once() {
    let played = play().await;
    println!("{played:?}");
    assert!(played.interrupted > 0, "{played:?}");
    assert_eq!(played.deposits, played.keys, "{played:?}");
    assert_eq!(played.doubles, 0, "{played:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deposit_is_made_on_retry_if_killed_before_commit() {
    let retried = retry_after_kill(&["--stop-at", "before-commit"], &[]).await;
    assert_eq!(retried.deposits_when_killed, 0);
    assert_eq!(retried.deposits, 1);
    assert!(!retried.response.is_replay(), "{:?}", retried.response);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deposit_is_replayed_if_killed_after_commit() {
    let retried = retry_after_kill(&["--stop-at", "after-commit"], &[]).await;
    assert_eq!(retried.deposits_when_killed, 1);
    assert_eq!(retried.deposits, 1);
    assert!(retried.response.is_replay(), "{:?}", retried.response);
}

/// Shows that the tests above can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn careless_deposit_repeats_if_killed_after_commit() {
    let careless = ["--careless", "--stop-at", "after-commit"];
    let retried = retry_after_kill(&careless, &["--careless"]).await;
    assert_eq!(retried.deposits_when_killed, 1);
    assert!(retried.deposits >= 2, "{}", retried.deposits);
}

struct Retried {
    deposits_when_killed: i64,
    deposits: i64,
    /// The response to the retry.
    response: TestResponse,
}

/// Sends a deposit to a bank that stops at a certain point, and kills the bank there. Then sends the deposit again to
/// another bank on the same file.
async fn retry_after_kill(stopping: &[&str], then: &[&str]) -> Retried {
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let start = |args: &[&str]| {
        let path = file.display().to_string();
        let common = ["--file", &path, "--lease", "500ms"];
        let bank = ServerProcess::start(
            env!("CARGO_BIN_EXE_embedded"),
            &[&common[..], args].concat(),
        );
        Client {
            bank: Arc::new(bank),
            random: Random(1),
            retries: 0,
            interrupted: Arc::default(),
        }
    };
    let deposits = async || {
        let totals = Totals::open(&file).await;
        totals.deposits.values().sum()
    };

    let mut stopped = start(stopping);
    let bank = Arc::clone(&stopped.bank);
    tokio::select! {
        response = stopped.deposit(0) => panic!("expected a bank that stops, found {response:?}"),
        () = wait_until_stopped(&bank) => {}
    }
    drop((stopped, bank));
    let deposits_when_killed = deposits().await;
    let response = start(then).deposit(0).await;
    Retried {
        deposits_when_killed,
        deposits: deposits().await,
        response,
    }
}

async fn wait_until_stopped(bank: &ServerProcess) {
    let deadline = Instant::now() + HANG_GUARD;
    while !bank.log().lines().any(|line| line == "stopped") {
        assert!(Instant::now() < deadline, "{}", bank.log());
        sleep(Duration::from_millis(10)).await;
    }
}

#[derive(Debug)]
#[expect(dead_code, reason = "shown")]
struct Played {
    kills: usize,
    keys: usize,
    /// The number of retries before a client got its response.
    retries: usize,
    /// The number of deposits that began in a process that was killed, and that were retried.
    interrupted: usize,
    deposits: usize,
    /// Keys with more than one deposit.
    doubles: usize,
    took: Duration,
}

/// Clients deposit under one key after the other while the bank is killed, at least until a kill has interrupted a deposit.
/// Then each client retries all its keys once, and has to get the same responses.
async fn play() -> Played {
    let (kills, seed) = (number("KILLS", few_or(30, 300)), number("SEED", 1));
    let began = Instant::now();
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let path = file.display().to_string();
    let args = ["--file", &path, "--lease", "500ms"];
    let bank = Arc::new(ServerProcess::start(env!("CARGO_BIN_EXE_embedded"), &args));

    let over = Arc::<AtomicBool>::default();
    let interrupted = Arc::<AtomicUsize>::default();
    let killing = {
        let (bank, over, mut random) = (Arc::clone(&bank), Arc::clone(&over), Random(seed));
        let interrupted = Arc::clone(&interrupted);
        spawn_blocking(move || {
            let deadline = began + HANG_GUARD;
            let mut killed = 0;
            while killed < kills || (interrupted.load(SeqCst) == 0 && Instant::now() < deadline) {
                thread::sleep(random.around(Duration::from_millis(150)));
                bank.kill();
                killed += 1;
            }
            over.store(true, SeqCst);
            killed
        })
    };
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let (bank, over, next) = (Arc::clone(&bank), Arc::clone(&over), Arc::clone(&next));
        let mut client = Client {
            bank,
            random: Random(seed ^ (n as u64 + 1) << 32),
            retries: 0,
            interrupted: Arc::clone(&interrupted),
        };
        clients.spawn(async move {
            let mut responses = Vec::new();
            while !over.load(SeqCst) {
                let key = next.fetch_add(1, SeqCst);
                responses.push((key, client.deposit(key).await));
            }
            for (key, before) in &responses {
                let again = client.deposit(*key).await;
                assert!(again.is_replay(), "key {key}: {again:?}");
                assert_eq!(again.body, before.body, "key {key}");
            }
            client.retries
        });
    }
    let retries = clients.join_all().await.into_iter().sum();
    let kills = killing.await.expect("the bank comes back");

    let totals = Totals::open(&file).await;
    assert_eq!(totals.balances, totals.sums, "a balance is its deposits");
    Played {
        kills,
        keys: next.load(SeqCst),
        retries,
        interrupted: interrupted.load(SeqCst),
        deposits: totals.deposits.values().sum::<i64>().unsigned_abs() as usize,
        doubles: totals.deposits.values().filter(|count| **count > 1).count(),
        took: began.elapsed(),
    }
}

struct Client {
    bank: Arc<ServerProcess>,
    random: Random,
    retries: usize,
    interrupted: Arc<AtomicUsize>,
}

impl Client {
    /// Retries until the bank responds. Each key has a separate account.
    async fn deposit(&mut self, key: usize) -> TestResponse {
        let deadline = Instant::now() + HANG_GUARD;
        let (mut is_broken, mut is_interrupted) = (false, false);
        loop {
            let req = Request::post(self.bank.url("/deposits"))
                .header("idempotency-key", format!("key-{key}"))
                .header("content-type", "application/json");
            let body = format!(r#"{{"account":"account-{key}","cents":5}}"#);
            match send_http(req, body).await {
                Some(response) if response.status == StatusCode::CREATED => {
                    is_interrupted |= is_broken && response.is_replay();
                    self.interrupted
                        .fetch_add(usize::from(is_interrupted), SeqCst);
                    return response;
                }
                Some(response) => {
                    let again = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE];
                    assert!(again.contains(&response.status), "key {key}: {response:?}");
                    // The lease of an attempt without a response: no other client uses the key.
                    is_interrupted |= is_broken && response.status == StatusCode::CONFLICT;
                }
                // The bank does not run, or has not responded.
                None => is_broken = true,
            }
            assert!(Instant::now() < deadline, "key {key} has no response");
            self.retries += 1;
            sleep(self.random.around(Duration::from_millis(50))).await;
        }
    }
}

fn number<N: std::str::FromStr>(name: &str, default: N) -> N {
    match env::var(name) {
        Ok(text) => text.parse().ok().expect("a number in the environment"),
        Err(_) => default,
    }
}

const CLIENTS: usize = 8;
