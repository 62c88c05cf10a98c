//! A bank that is killed in the middle of a batch of 1,000 deposits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::{Request, StatusCode};
use embedded::Bank;
use serde_json::{Value, json};
use tests::{
    HANG_GUARD, TestResponse,
    scratch::Scratch,
    server_process::{ServerProcess, send_http},
};
use tokio::{task::spawn_blocking, time::sleep};
use tower_idempotency_sqlx::sqlx;

use crate::totals::Totals;

// S-420
/// Kills the bank three times in the middle of the batch, while the client retries until it has each receipt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_batch_makes_each_deposit_once() {
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let path = file.display().to_string();
    let args = ["--file", &path, "--lease", "500ms"];
    let bank = Arc::new(ServerProcess::start(env!("CARGO_BIN_EXE_embedded"), &args));
    let client = tokio::spawn(retry_until_whole(Arc::clone(&bank)));
    let reader = Bank::open(&file).await.expect("a file");
    let mut made_when_killed = Vec::new();
    for share in [100, 400, 700] {
        let deadline = Instant::now() + HANG_GUARD;
        while deposits_in(&reader).await < share {
            assert!(Instant::now() < deadline, "{}", bank.log());
            sleep(Duration::from_millis(5)).await;
        }
        let killed = Arc::clone(&bank);
        let killing = spawn_blocking(move || killed.kill());
        killing.await.expect("a new process");
        made_when_killed.push(deposits_in(&reader).await);
    }
    let (response, attempts) = client.await.expect("no panic");
    println!("made when killed: {made_when_killed:?}, attempts: {attempts}");
    let is_middle = |made: &i64| *made < 1000;
    assert!(
        made_when_killed.iter().all(is_middle),
        "{made_when_killed:?}"
    );
    assert!(attempts >= 4, "one for each process");

    let totals = Totals::open(&file).await;
    assert_eq!(totals.deposits.len(), ITEMS);
    assert!(totals.deposits.values().all(|deposits| *deposits == 1));
    assert_eq!(totals.balances, totals.sums);
    // The request has an outcome now.
    let replay = attempt(bank).await.expect("a response");
    assert!(replay.is_replay() && !response.is_replay());
    assert_eq!(replay.body, response.body);
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

async fn deposits_in(bank: &Bank) -> i64 {
    let count = sqlx::query_scalar("select count(*) from deposits");
    count.fetch_one(&bank.pool).await.expect("a count")
}

const ITEMS: usize = 1000;
