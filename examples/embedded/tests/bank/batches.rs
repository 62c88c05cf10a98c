//! A bank that is killed in the middle of a batch of 1,000 deposits.

use std::{
    io::Read,
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tests::{
    HANG_GUARD, TestResponse,
    scratch::Scratch,
    server_process::{ServerProcess, send_http},
};
use tokio::{task::spawn_blocking, time::sleep};
use tower_idempotency_sqlx::sqlx::{
    self, ConnectOptions, SqliteConnection, sqlite::SqliteConnectOptions,
};

use crate::totals::Totals;

// S-420
/// Kills the bank three times in the middle of the batch, while the client retries until it has each receipt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_batch_makes_each_deposit_once() {
    let deadline = Instant::now() + HANG_GUARD;
    loop {
        let made_when_killed = play().await;
        if made_when_killed.iter().all(|made| *made < ITEMS as i64) {
            return;
        }
        // The batch was finished before the last kill.
        assert!(Instant::now() < deadline, "{made_when_killed:?}");
    }
}

/// Sends a batch to a bank that is killed three times, and checks the result. Returns the number of deposits at each kill.
async fn play() -> Vec<i64> {
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let path = file.display().to_string();
    let args = ["--file", &path, "--lease", "500ms"];
    let bank = Arc::new(ServerProcess::start(env!("CARGO_BIN_EXE_embedded"), &args));
    // The bank is without the write lock only for moments. SQLite itself would try to take the lock too rarely.
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .busy_timeout(Duration::ZERO);
    let mut reader = options.connect().await.expect("a file");
    let client = tokio::spawn(retry_until_whole(Arc::clone(&bank)));
    let mut made_when_killed = Vec::new();
    let mut made = 0_i64;
    for _ in 0..3 {
        // Each process makes some of the deposits.
        made = kill_after((made + 200).min(ITEMS as i64), &bank, &mut reader).await;
        made_when_killed.push(made);
    }
    let (response, attempts) = client.await.expect("no panic");
    println!("made when killed: {made_when_killed:?}, attempts: {attempts}");

    let totals = Totals::open(&file).await;
    assert_eq!(totals.deposits.len(), ITEMS);
    assert!(totals.deposits.values().all(|deposits| *deposits == 1));
    assert_eq!(totals.balances, totals.sums);
    if made < ITEMS as i64 {
        assert!(attempts >= 4, "one for each process");
        // The request has an outcome now.
        let replay = attempt(bank).await.expect("a response");
        assert!(replay.is_replay() && !response.is_replay());
        assert_eq!(replay.body, response.body);
    }
    made_when_killed
}

/// Kills the bank when it has made at least this number of deposits. Returns their number at that time.
async fn kill_after(
    deposits: i64,
    bank: &Arc<ServerProcess>,
    reader: &mut SqliteConnection,
) -> i64 {
    let deadline = Instant::now() + HANG_GUARD;
    while count(reader).await.is_none_or(|made| made < deposits) {
        assert!(Instant::now() < deadline, "{}", bank.log());
        sleep(Duration::from_millis(5)).await;
    }
    // The bank cannot commit while the reader has the write lock.
    while let Err(error) = sqlx::query("begin immediate").execute(&mut *reader).await {
        assert!(Instant::now() < deadline, "{error}");
    }
    let made = count(reader).await.expect("a count");
    let url = bank.url("");
    let address = url.strip_prefix("http://").expect("an address");
    let mut connection = TcpStream::connect(address).expect("the bank runs");
    let limited = connection.set_read_timeout(Some(HANG_GUARD));
    limited.expect("a TCP socket");
    let killed = Arc::clone(bank);
    let killing = spawn_blocking(move || killed.kill());
    // The connection ends with the process. The next process needs the lock before it is ready.
    let ended = spawn_blocking(move || connection.read(&mut [0]));
    let _ = ended.await.expect("no panic");
    let released = sqlx::query("rollback").execute(&mut *reader).await;
    released.expect("an open transaction");
    killing.await.expect("a new process");
    made
}

/// Returns the number of deposits, or `None` if SQLite is busy.
async fn count(reader: &mut SqliteConnection) -> Option<i64> {
    let count = sqlx::query_scalar("select count(*) from deposits");
    count.fetch_one(reader).await.ok()
}

/// Returns the response in which each item has its receipt, and the number of attempts.
async fn retry_until_whole(bank: Arc<ServerProcess>) -> (TestResponse, usize) {
    let deadline = Instant::now() + HANG_GUARD;
    for attempts in 1.. {
        match attempt(Arc::clone(&bank)).await {
            Some(response) if is_whole(&response) => return (response, attempts),
            _ => sleep(Duration::from_millis(100)).await,
        }
        assert!(Instant::now() < deadline, "{}", bank.log());
    }
    unreachable!("the deadline ends the attempts")
}

/// Sends the batch: each item has an account of its own.
async fn attempt(bank: Arc<ServerProcess>) -> Option<TestResponse> {
    let item =
        |n| json!({ "key": format!("item-{n}"), "account": format!("account-{n}"), "cents": 5 });
    let body = Value::from_iter((0..ITEMS).map(item));
    let req = Request::post(bank.url("/deposits/batch"))
        .header("idempotency-key", "batch-1")
        .header("content-type", "application/json");
    send_http(req, body.to_string()).await
}

/// Returns `true` if each item has its receipt.
fn is_whole(response: &TestResponse) -> bool {
    if response.status != StatusCode::MULTI_STATUS {
        return false;
    }
    let entries: Vec<Value> = serde_json::from_slice(&response.body).expect("a list");
    let is_done = |entry: &Value| entry["status"] == 200 && entry["receipt"]["balance"] == 5;
    entries.len() == ITEMS && entries.iter().all(is_done)
}

const ITEMS: usize = 1000;
