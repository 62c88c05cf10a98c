//! Upstreams that break at every byte of the request and of the response.

use std::{
    future::poll_fn,
    io::{Read, Write},
    net::TcpListener,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use tests::few_or;

use crate::harness::{
    CREATED, ConnectionEnd, Reply, Script, Served, Upstream, config, exchange, post,
};

/// Returns `true` if the reply refuses a retry because the first request needs attention. An orphan has no reason.
pub(crate) fn needs_attention(reply: &Reply) -> bool {
    let mut reasons = ["upstream-broken", "body-failed"].into_iter();
    reply.is_problem("outcome-unknown")
        && reasons.any(|reason| reply.0.contains(&format!("\"reason\":\"{reason}\"")))
}

/// Sends one request per script and retries it.
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
    for round in 0..few_or(1, 120) {
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
                    409 => assert!(needs_attention(retry), "{context}"),
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
        for then in [ConnectionEnd::Close, ConnectionEnd::Reset] {
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
        for then in [ConnectionEnd::Close, ConnectionEnd::Reset] {
            scripts.push(Script::reply(&response.as_bytes()[..sent]).then(then));
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

/// An upstream that closes a connection unread has not executed the request. The key is free if the proxy learns of the close
/// before it sends a byte.
#[tokio::test]
async fn close_before_first_byte_has_no_effect() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let is_closing = Arc::new(AtomicBool::new(true));
    let effects = Arc::<AtomicUsize>::default();
    let (closing, executed) = (Arc::clone(&is_closing), Arc::clone(&effects));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            if closing.load(Ordering::SeqCst) {
                continue;
            }
            let (mut request, mut byte) = (Vec::<u8>::new(), [0]);
            while !request.ends_with(b"\r\n\r\nbody") && stream.read_exact(&mut byte).is_ok() {
                request.extend(byte);
            }
            if request.ends_with(b"body") {
                executed.fetch_add(1, Ordering::SeqCst);
                let _ = stream.write_all(CREATED.as_bytes());
            }
        }
    });
    // The runtime of the proxy is always busy, so that it learns of new connections and of their close at the same time.
    let busy = tokio::spawn(poll_fn(|cx| {
        thread::sleep(Duration::from_micros(200));
        cx.waker().wake_by_ref();
        Poll::<()>::Pending
    }));
    let proxy = Served::start(&config(address, "keep_alive = \"0s\"", "")).await;
    let began = Instant::now();
    let (mut free, mut attention) = (0, 0);
    for round in 0.. {
        let request = post("/pay", &format!("k{round}"), "body");
        let before = effects.load(Ordering::SeqCst);
        is_closing.store(true, Ordering::SeqCst);
        let first = exchange(proxy.address, &request).await;
        assert_eq!(first.status(), 502, "{first:?}");
        is_closing.store(false, Ordering::SeqCst);
        let retry = exchange(proxy.address, &request).await;
        let executions = effects.load(Ordering::SeqCst) - before;
        if first.is_problem("upstream-unreachable") {
            assert_eq!((retry.status(), executions), (201, 1), "{retry:?}");
            free += 1;
        } else {
            assert!(needs_attention(&retry), "{first:?} {retry:?}");
            assert_eq!((retry.status(), executions), (409, 0), "{retry:?}");
            attention += 1;
        }
        if free == 3 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no key is free");
    }
    println!("{free} free, {attention} need attention");
    busy.abort();
}
