//! Requests over loopback: each contender serves in a process of its own, and the client is another process.

use std::{
    hint::black_box,
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Instant,
};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

use crate::{
    contenders::{BARE, Effects, FLOOR, Handler, LAYER, all},
    measure::{Rounds, print_table, runtime},
    requests::{COLUMNS, Column, order, request},
};

const CONNECTIONS: usize = 64;
const EACH: usize = 60;
const ROUNDS: usize = 30;

/// Serves a contender until standard input ends.
pub fn serve(handler: Handler, name: &str) {
    runtime().block_on(async {
        let contenders = all();
        let found = contenders.iter().find(|contender| contender.name == name);
        let app = found
            .expect("a contender")
            .build(handler, &Effects::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        println!("{}", listener.local_addr().expect("an address"));
        let server = async { axum::serve(listener, app).await };
        let ended = tokio::task::spawn_blocking(|| {
            let _ = std::io::stdin().read(&mut [0]);
        });
        tokio::select! {
            _ = server => {}
            _ = ended => {}
        }
    });
    // A thread that waits for standard input would keep the runtime.
    std::process::exit(0);
}

/// A server process. It ends when its standard input is closed.
struct Server(Child, SocketAddr);

impl Server {
    fn start(handler: &str, name: &str) -> Self {
        let program = std::env::current_exe().expect("the path of this program");
        let mut child = Command::new(program)
            .args(["serve", handler, name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program runs");
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let addr = line.trim().parse().expect("an address");
        Self(child, addr)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Compares the layer with bare axum and with the floor, over 64 connections.
pub fn compare(handler: &str) {
    let names = [BARE, FLOOR, LAYER];
    let servers = names.map(|name| Server::start(handler, name));
    let runtime = runtime();
    let body = order();
    let mut connections: Vec<Vec<SendRequest<Body>>> = servers
        .iter()
        .map(|Server(_, addr)| runtime.block_on(connect(*addr)))
        .collect();
    let mut times = vec![Rounds::default(); names.len()];
    for taken in &mut connections {
        // Of many concurrent requests with a new key, the layer rejects all but one.
        let first = taken.pop().expect("a connection");
        let first = runtime.block_on(drive(first, body.clone(), Column::Replay, 1));
        taken.push(first);
    }
    for round in 0..ROUNDS + 2 {
        for (at, column) in COLUMNS.into_iter().enumerate() {
            for turn in 0..names.len() {
                let index = (turn + round) % names.len();
                let taken = std::mem::take(&mut connections[index]);
                let started = Instant::now();
                connections[index] = runtime.block_on(async {
                    let tasks: Vec<_> = taken
                        .into_iter()
                        .map(|connection| {
                            tokio::spawn(drive(connection, body.clone(), column, EACH))
                        })
                        .collect();
                    let mut connections = Vec::new();
                    for task in tasks {
                        connections.push(task.await.expect("no panic"));
                    }
                    connections
                });
                let nanos = started.elapsed().as_nanos() as f64 / (CONNECTIONS * EACH) as f64;
                // The first two rounds warm up.
                if round >= 2 {
                    times[index][at].push(nanos);
                }
            }
        }
    }
    print_table(&names, &times);
}

async fn connect(addr: SocketAddr) -> Vec<SendRequest<Body>> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect(addr).await.expect("a server");
        stream.set_nodelay(true).expect("an option");
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (connection, driver) = shaken.expect("HTTP");
        tokio::spawn(driver);
        connections.push(connection);
    }
    connections
}

/// Sends requests one after another and reads each response.
async fn drive(
    mut connection: SendRequest<Body>,
    body: Bytes,
    column: Column,
    each: usize,
) -> SendRequest<Body> {
    for _ in 0..each {
        connection.ready().await.expect("an open connection");
        let req = request(&body, column.key().as_deref());
        let res = connection.send_request(req).await.expect("a response");
        assert!(res.status().is_success(), "{}", res.status());
        black_box(res.into_body().collect().await.expect("a body").to_bytes());
    }
    connection
}
