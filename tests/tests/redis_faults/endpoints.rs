//! How the nodes of a cluster name each other where they send clients on: failure mode 40.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    mem,
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use http::StatusCode;
use tests::servers::redis::{RedisCluster, RedisServer};
use tokio::task::{self, JoinSet};

use crate::{
    cluster::connect,
    node::{Node, options, until_connected},
};

// A node that does not know under which name it is reached says "where you asked, on this port".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirection_without_a_host_is_one_to_the_host_that_was_asked() {
    let cluster = nameless();
    let node = Node::new(connect(&cluster, "{nameless}:").await);
    let other = Node::with(connect(&cluster, "{nameless}:").await, &node.books, |it| it);
    assert_is_sent_on(&cluster, "{nameless}", &node, &other).await;
}

// What is not known is not guessed: another cluster may listen on the port of another host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_host_and_with_several_to_choose_from_what_moves_is_refused_until_it_has_moved() {
    let cluster = nameless();
    let mut urls = cluster.urls();
    urls[1] = urls[1].replace("127.0.0.1", "localhost");
    let prefixed = options().with_prefix("{nameless}:");
    let node = Node::new(until_connected(|| prefixed.clone().connect_cluster(&urls)).await);
    let slot = cluster.slot("{nameless}");
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    let before = node.post("/orders", "before").await;
    cluster.begin_move(slot, to);
    node.assert_unavailable("/orders", "asked").await;
    node.assert_replays("/orders", "before", &before).await;
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);
    let patience = Duration::from_secs(5);
    node.until_served("/orders", "asked", patience).await;
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(node.books.total(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirection_to_an_address_with_colons_is_followed() {
    let both = ["--bind", "127.0.0.1", "::1"];
    let announced = ["--cluster-announce-ip", "::1"];
    let cluster = RedisCluster::start_with(&[both.as_slice(), &announced].concat());
    let node = Node::new(connect(&cluster, "{colons}:").await);
    let other = Node::with(connect(&cluster, "{colons}:").await, &node.books, |it| it);
    assert_is_sent_on(&cluster, "{colons}", &node, &other).await;
}

/// Not a test of its own: what the next one starts, since who is trusted is asked of the environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_of_a_cluster_with_tls() {
    let Ok(urls) = env::var("CLUSTER_WITH_TLS") else {
        return;
    };
    let urls: Vec<_> = urls.split(' ').collect();
    let prefixed = options().with_prefix("{tls}:");
    let node = Node::new(until_connected(|| prefixed.clone().connect_cluster(&urls)).await);
    let answer = node.post("/orders", "asked").await;
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    node.assert_replays("/orders", "asked", &answer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_that_is_to_get_a_slot_is_asked_over_tls_too() {
    let cluster = RedisCluster::start_with_tls();
    let slot = cluster.slot("{tls}");
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    cluster.begin_move(slot, to);
    let nodes = (0..3).map(|n| cluster.node(n));
    let urls: Vec<_> = nodes.map(RedisServer::tls_url).collect();
    let mut client = Command::new(env::current_exe().unwrap());
    client
        .args(["--exact", "endpoints::client_of_a_cluster_with_tls"])
        .env("CLUSTER_WITH_TLS", urls.join(" "))
        .env("SSL_CERT_FILE", cluster.node(0).certificates().ca());
    let done = task::spawn_blocking(move || client.output()).await.unwrap();
    let done = done.unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(cluster.node(to).command(&["DBSIZE"]), "1");
}

/// A key that is to move is asked for at its new node, and one that has moved is found there, both at once and without
/// looking for the nodes again. `other` has an old table of slots.
async fn assert_is_sent_on(cluster: &RedisCluster, tag: &str, node: &Node, other: &Node) {
    let slot = cluster.slot(tag);
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    for it in [node, other] {
        let answer = it.post("/orders", "before").await;
        assert_eq!(answer.text(), "effect 1 of before");
    }
    cluster.begin_move(slot, to);
    let asked = node.post("/orders", "asked").await;
    assert_eq!(asked.text(), "effect 1 of asked");
    assert_eq!(cluster.node(to).command(&["DBSIZE"]), "1");
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);

    let connected = connections(cluster);
    other.assert_replays("/orders", "asked", &asked).await;
    let fresh = other.post("/orders", "moved").await;
    assert_eq!(fresh.text(), "effect 1 of moved");
    // Those that counted.
    assert_eq!(connections(cluster) - connected, 3);
    node.assert_replays("/orders", "moved", &fresh).await;
    assert_eq!(node.books.total(), 3);
}

/// A cluster whose nodes do not know under which name they are reached.
fn nameless() -> RedisCluster {
    RedisCluster::start_with(&["--cluster-preferred-endpoint-type", "unknown-endpoint"])
}

/// How many were made to the nodes so far, this one's included.
fn connections(cluster: &RedisCluster) -> u64 {
    let made = |n| {
        let stats = cluster.node(n).command(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let made = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        made.unwrap().parse::<u64>().unwrap()
    };
    (0..3).map(made).sum()
}

// Nothing of it is executed, and it takes no longer than a store that is silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirections_that_lead_nowhere_end_with_the_deadline() {
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
    let strange = Strange::start();
    let prefixed = options().with_prefix("{strange}:");
    let node =
        Node::new(until_connected(|| prefixed.clone().connect_cluster([strange.url()])).await);
    // And to itself, again and again.
    for word in ["MOVED", "ASK"] {
        nowhere.push(format!("{word} 1 {}", strange.address));
        nowhere.push(format!("{word} 1 :{}", strange.address.port()));
    }
    strange.says(&nowhere);
    let mut refused = JoinSet::new();
    for i in 0..4 {
        let node = node.clone();
        refused.spawn(async move {
            node.assert_unavailable("/orders", &format!("k-{i}")).await;
        });
    }
    refused.join_all().await;
    let said = strange.says(&[]);
    assert!(said >= nowhere.len(), "{said} of {}", nowhere.len());
    assert_eq!(node.books.total(), 0);
    let patience = Duration::from_secs(5);
    node.until_served("/orders", "k", patience).await;
}

/// A cluster of one node that answers scripts with errors, one after the other and again from the first, or as if it had
/// done what it was asked for.
struct Strange {
    address: SocketAddr,
    errors: Arc<Mutex<Errors>>,
}

#[derive(Default)]
struct Errors {
    errors: Vec<String>,
    said: usize,
}

impl Strange {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, errors) = (
            listener.local_addr().unwrap(),
            Arc::<Mutex<Errors>>::default(),
        );
        let said = Arc::clone(&errors);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let said = Arc::clone(&said);
                thread::spawn(move || serve(client, address.port(), &said));
            }
        });
        Self { address, errors }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// What it says from now on; how often it said what it was to say before.
    fn says(&self, errors: &[String]) -> usize {
        let mut it = self.errors.lock().unwrap();
        it.errors = errors.to_vec();
        mem::take(&mut it.said)
    }
}

/// Until the client is gone.
fn serve(client: TcpStream, port: u16, errors: &Mutex<Errors>) -> Option<()> {
    let mut answers = client.try_clone().ok()?;
    let mut commands = BufReader::new(client);
    loop {
        let words = command(&mut commands)?;
        let answer = match &*words[0].to_uppercase() {
            "PING" => "+PONG\r\n".to_owned(),
            "INFO" => bulk("redis_version:7.0.0\r\nrole:master\r\n"),
            "CLUSTER" => format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$0\r\n\r\n:{port}\r\n"),
            "SCRIPT" => bulk("0"),
            "EVALSHA" | "EVAL" => {
                let mut it = errors.lock().ok()?;
                it.said += 1;
                let error = it.errors.iter().cycle().nth(it.said);
                match error {
                    Some(error) => format!("-{error}\r\n"),
                    // An acquire has more arguments than a completion.
                    None if words.len() == 11 => "*2\r\n:1\r\n:1\r\n".to_owned(),
                    None => ":1\r\n".to_owned(),
                }
            }
            _ => "+OK\r\n".to_owned(),
        };
        answers.write_all(answer.as_bytes()).ok()?;
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

/// The words of a command, as far as they are text.
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
