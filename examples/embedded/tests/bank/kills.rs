//! A bank that is killed again and again, and clients that do not let go.
//!
//! `KILLS` says how often, 30 unless set, or 300 with `FULL=1`; `SEED` says when:
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
    Answer,
    actor::{Actor, ask},
    few_or,
    random::Random,
    scratch::Scratch,
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::sleep,
};

use crate::books::Books;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_deposit_is_made_once_however_often_the_bank_is_killed() {
    let played = play(&[]).await;
    println!("{played:?}");
    assert_eq!(played.deposits, played.keys, "{played:?}");
    assert_eq!(played.doubles, 0, "{played:?}");
    assert!(played.retries > 0, "nothing was tried: {played:?}");
}

/// The test can fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_not_to_copy_is_found_out() {
    let played = play(&["--careless"]).await;
    println!("careless: {played:?}");
    assert!(played.doubles > 0, "{played:?}");
}

#[derive(Debug)]
#[expect(dead_code, reason = "shown")]
struct Played {
    kills: usize,
    keys: usize,
    /// How often a client asked once more before it was told.
    retries: usize,
    deposits: usize,
    /// Keys with more than one deposit.
    doubles: usize,
    took: Duration,
}

/// Clients deposit under one key after the other while the bank is killed; then each asks under all its keys once more,
/// and has to be told the same.
async fn play(args: &[&str]) -> Played {
    let (kills, seed) = (number("KILLS", few_or(30, 300)), number("SEED", 1));
    let began = Instant::now();
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let path = file.display().to_string();
    let ours = ["--file", &path, "--lease", "500ms"];
    let bank = Actor::start(env!("CARGO_BIN_EXE_embedded"), &[&ours[..], args].concat());
    let bank = Arc::new(bank);

    let over = Arc::<AtomicBool>::default();
    let killing = {
        let (bank, over, mut random) = (Arc::clone(&bank), Arc::clone(&over), Random(seed));
        spawn_blocking(move || {
            for _ in 0..kills {
                thread::sleep(random.around(Duration::from_millis(150)));
                bank.kill();
            }
            over.store(true, SeqCst);
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
        };
        clients.spawn(async move {
            let mut told = Vec::new();
            while !over.load(SeqCst) {
                let key = next.fetch_add(1, SeqCst);
                told.push((key, client.deposit(key).await));
            }
            for (key, before) in &told {
                let again = client.deposit(*key).await;
                assert!(again.is_replay(), "key {key}: {again:?}");
                assert_eq!(again.body, before.body, "key {key}");
            }
            client.retries
        });
    }
    let retries = clients.join_all().await.into_iter().sum();
    killing.await.expect("the bank comes back");

    let books = Books::open(&file).await;
    assert_eq!(books.balances, books.sums, "a balance is its deposits");
    Played {
        kills,
        keys: next.load(SeqCst),
        retries,
        deposits: books.deposits.values().sum::<i64>().unsigned_abs() as usize,
        doubles: books.deposits.values().filter(|count| **count > 1).count(),
        took: began.elapsed(),
    }
}

struct Client {
    bank: Arc<Actor>,
    random: Random,
    retries: usize,
}

impl Client {
    /// Asks until it is told. Each key has an account of its own.
    async fn deposit(&mut self, key: usize) -> Answer {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let req = Request::post(self.bank.url("/deposits"))
                .header("idempotency-key", format!("key-{key}"))
                .header("content-type", "application/json");
            let body = format!(r#"{{"account":"account-{key}","cents":5}}"#);
            match ask(req, body).await {
                Some(answer) if answer.status == StatusCode::CREATED => return answer,
                Some(answer) => {
                    let again = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE];
                    assert!(again.contains(&answer.status), "key {key}: {answer:?}");
                }
                // Nobody there, or nothing said.
                None => {}
            }
            assert!(Instant::now() < deadline, "key {key} is never told");
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
