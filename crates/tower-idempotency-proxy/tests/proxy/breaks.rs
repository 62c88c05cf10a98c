//! Upstreams that break at every byte of the request and of the response.

use std::sync::{Arc, Mutex};

use tests::few_or;

use crate::harness::{Script, Served, Then, Upstream, config, exchange, post};

/// Sends one request per script and retries it. Returns the replies of each.
async fn run(scripts: Vec<Script>) {
    let count = scripts.len();
    let planned: Arc<Mutex<Option<Script>>> = Arc::default();
    let plan = Arc::clone(&planned);
    // After the planned break, the upstream is healthy.
    let upstream =
        Upstream::start(move |_| plan.lock().unwrap().take().unwrap_or_else(Script::create));
    let upstream = upstream.await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let (mut recorded, mut attention) = (0, 0);
    for round in 0..few_or(1, 100) {
        for (at, script) in scripts.iter().enumerate() {
            let key = format!("k{round}-{at}");
            let before = upstream.effects();
            *planned.lock().unwrap() = Some(script.clone());
            let first = exchange(proxy.address, post("/pay", &key, "body")).await;
            let mut retries = Vec::new();
            for _ in 0..2 {
                retries.push(exchange(proxy.address, post("/pay", &key, "body")).await);
            }
            let effects = upstream.effects() - before;
            let context = format!("{at} {:?}: {first:?} {retries:?}", script.then);
            assert_eq!(effects, 1, "{context}");
            for retry in &retries {
                match retry.status() {
                    201 => assert!(retry.is_replay(), "{context}"),
                    409 => assert!(retry.is_problem("outcome-unknown"), "{context}"),
                    _ => panic!("{context}"),
                }
            }
            assert_eq!(retries[0].status(), retries[1].status(), "{context}");
            match retries[0].status() {
                201 => recorded += 1,
                _ => attention += 1,
            }
        }
    }
    println!("{recorded} recorded, {attention} need attention");
    assert!(
        attention > 0 && recorded + attention >= count,
        "{recorded} {attention}"
    );
}

#[tokio::test]
async fn break_at_each_byte_of_request_has_one_effect() {
    let probe = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(probe.address, "", "")).await;
    exchange(proxy.address, post("/pay", "k0-000", "body")).await;
    let length = probe.requests()[0].len();
    assert!(length > 100, "{length}");
    let mut scripts = Vec::new();
    for read in 0..=length {
        for then in [Then::Close, Then::Reset] {
            scripts.push(Script {
                read: Some(read),
                reply: Vec::new(),
                then,
            });
        }
    }
    run(scripts).await;
}

/// Returns a script for each prefix of a response, and each way to break.
fn prefixes(response: &str) -> Vec<Script> {
    let mut scripts = Vec::new();
    for sent in 0..=response.len() {
        for then in [Then::Close, Then::Reset] {
            scripts.push(Script::reply(&response.as_bytes()[..sent]).and(then));
        }
    }
    scripts
}

#[tokio::test]
async fn break_at_each_byte_of_response_has_one_effect() {
    let response = "HTTP/1.1 201 Created\r\nlocation: /1\r\ncontent-length: 7\r\n\r\ncreated";
    run(prefixes(response)).await;
}

#[tokio::test]
async fn break_at_each_byte_of_chunks_has_one_effect() {
    let response = "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n3\r\ncre\r\n4\r\nated\r\n0\r\nx-sum: 9\r\n\r\n";
    run(prefixes(response)).await;
}

#[tokio::test]
async fn break_after_informational_response_has_one_effect() {
    run(prefixes("HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")).await;
}
