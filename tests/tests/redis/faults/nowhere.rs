//! A cluster node that redirects clients to an address without a listener.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use tests::sql;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_idempotency::store::{Acquired, Store};

use crate::{
    events::HANG,
    faults::node::{Node, options, options_with_long_timeout, until_connected},
};

// F-126
// No request is executed, and a refusal takes no longer than with an unresponsive store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_redirections_end_at_deadline() {
    let mut nowhere = Vec::new();
    for word in ["MOVED", "ASK"] {
        for rest in [
            "",
            " 1",
            " 1 ",
            " x y:1",
            " 99999 127.0.0.1:1",
            " 1 :",
            " 1 ?:6379",
        ] {
            nowhere.push(format!("{word}{rest}"));
        }
        for node in [
            "127.0.0.1:0",
            "127.0.0.1:99999",
            "[::1:1",
            ":::::",
            "\u{1f600}:7",
        ] {
            nowhere.push(format!("{word} 1 {node} more"));
        }
    }
    let server = ErrorServer::start();
    let prefixed = options().with_prefix("{strange}:");
    let node =
        Node::new(until_connected(|| prefixed.clone().connect_cluster([server.url()])).await);
    // The node also redirects to itself repeatedly.
    for word in ["MOVED", "ASK"] {
        nowhere.push(format!("{word} 1 {}", server.address));
        nowhere.push(format!("{word} 1 :{}", server.address.port()));
    }
    server.set_errors(&nowhere);
    let began = Instant::now();
    // Waits until the node has sent each of the errors.
    while server.sent_count() < nowhere.len() {
        assert!(began.elapsed() < HANG, "{} were sent", server.sent_count());
        let mut refused = JoinSet::new();
        for i in 0..4 {
            let node = node.clone();
            refused.spawn(async move {
                node.assert_unavailable("/orders", &format!("k-{i}")).await;
            });
        }
        refused.join_all().await;
    }
    server.set_errors(&[]);
    assert_eq!(node.database.total(), 0);
    node.until_served("/orders", "k").await;
}

// F-991
/// A node that refuses connections has executed nothing. It may be restarting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_is_sent_again_after_refused_connection() {
    let server = ErrorServer::start();
    let options = options_with_long_timeout();
    let store = until_connected(|| options.clone().connect_cluster([server.url()])).await;
    server.set_errors(&["MOVED 1 127.0.0.1:1".to_owned()]);
    let claim = sql::claim();
    let mut acquire = std::pin::pin!(store.acquire(&claim));
    let redirected_often = async {
        while server.sent_count() < 3 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        acquired = acquire.as_mut() => panic!("{acquired:?}"),
        () = redirected_often => server.set_errors(&[]),
    }
    let acquired = acquire.await.unwrap();
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
}

/// A server that is also a cluster of one node. It replies to scripts with the listed errors in order, or like after
/// an execution.
pub(crate) struct ErrorServer {
    pub(crate) address: SocketAddr,
    errors: Arc<Mutex<Errors>>,
}

#[derive(Default)]
struct Errors {
    errors: Vec<String>,
    sent: usize,
}

impl ErrorServer {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, errors) = (
            listener.local_addr().unwrap(),
            Arc::<Mutex<Errors>>::default(),
        );
        let shared = Arc::clone(&errors);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(client, address.port(), &shared));
            }
        });
        Self { address, errors }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Sets the errors that the node sends from now on.
    pub(crate) fn set_errors(&self, errors: &[String]) {
        let mut it = self.errors.lock().unwrap();
        it.errors = errors.to_vec();
        it.sent = 0;
    }

    /// Returns the number of errors that the node has sent since they were set.
    fn sent_count(&self) -> usize {
        self.errors.lock().unwrap().sent
    }
}

/// Serves a client until it disconnects.
fn serve(client: TcpStream, port: u16, errors: &Mutex<Errors>) -> Option<()> {
    let mut responses = client.try_clone().ok()?;
    let mut commands = BufReader::new(client);
    loop {
        let words = command(&mut commands)?;
        let response = match &*words[0].to_uppercase() {
            "PING" => "+PONG\r\n".to_owned(),
            "INFO" => bulk("redis_version:7.0.0\r\nrole:master\r\n"),
            "CLUSTER" => format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:{port}\r\n"),
            "SCRIPT" => bulk("0"),
            "EVALSHA" | "EVAL" => {
                let mut it = errors.lock().ok()?;
                let error = it.errors.iter().cycle().nth(it.sent);
                let error = error.cloned();
                it.sent += 1;
                match error {
                    Some(error) => format!("-{error}\r\n"),
                    // An acquire has more arguments than a completion.
                    None if words.len() == 14 => "*2\r\n:1\r\n:1\r\n".to_owned(),
                    None => ":1\r\n".to_owned(),
                }
            }
            _ => "+OK\r\n".to_owned(),
        };
        responses.write_all(response.as_bytes()).ok()?;
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

/// Reads a command, and returns its words as text.
fn command(stream: &mut impl BufRead) -> Option<Vec<String>> {
    let mut number = |sign| -> Option<usize> {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        line.trim_end().strip_prefix(sign)?.parse().ok()
    };
    let count = number('*')?;
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        let length: usize = line.trim_end().strip_prefix('$')?.parse().ok()?;
        let mut word = vec![0; length + 2];
        stream.read_exact(&mut word).ok()?;
        word.truncate(length);
        words.push(String::from_utf8_lossy(&word).into_owned());
    }
    Some(words)
}
