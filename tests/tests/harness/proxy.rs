//! The fault-injecting proxy between a client and a Redis.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use tests::{
    proxy::{ConnectionEnd, Counts, Fault, Mode, Proxy},
    servers::redis::RedisServer,
};

#[test]
fn passed_bytes_are_counted() {
    let (server, proxy) = proxied();
    let mut client = connect(&proxy);
    assert_eq!(send_line(&mut client, "SET k v"), "+OK\r\n");
    assert_eq!(send_line(&mut connect(&proxy), "GET k"), "$1\r\nv\r\n");
    let counts = Counts {
        connections: 2,
        up: "SET k v\r\nGET k\r\n".len() as u64,
        down: "+OK\r\n$1\r\nv\r\n".len() as u64,
    };
    assert_eq!(proxy.counts(), counts);
    assert_eq!(server.command(&["GET", "k"]), "v");
}

#[test]
fn mebibyte_passes_both_ways() {
    let (_server, proxy) = proxied();
    let mut client = connect(&proxy);
    let value = "v".repeat(1 << 20);
    let command = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{value}", value.len());
    assert_eq!(send_line(&mut client, &command), "+OK\r\n");
    client.write_all(b"GET k\r\n").unwrap();
    let expected = format!("${}\r\n{value}\r\n", value.len());
    let mut response = vec![0; expected.len()];
    client.read_exact(&mut response).unwrap();
    assert!(response == expected.as_bytes());
}

#[test]
fn connection_end_passes_both_ways() {
    let (mut server, proxy) = proxied();
    let mut client = connect(&proxy);
    assert_eq!(send_line(&mut client, "QUIT"), "+OK\r\n");
    assert_eq!(read(&mut client, &mut [0]).unwrap(), 0, "the server closes");

    let client = connect(&proxy);
    let open = || {
        let clients = server.command(&["CLIENT", "LIST"]);
        clients.lines().count()
    };
    eventually("the client is there", || open() == 2);
    drop(client);
    eventually("the client has left", || open() == 1);

    let mut client = connect(&proxy);
    server.kill();
    assert_eq!(receive(&mut client, PATIENCE), Received::End);
    let unanswered = receive(&mut connect(&proxy), PATIENCE);
    assert_eq!(unanswered, Received::End, "no server listens");
    server.restart();
    assert_eq!(send_line(&mut connect(&proxy), "PING"), "+PONG\r\n");
}

#[test]
fn cut_closes_old_and_new_connections() {
    let (_server, proxy) = proxied();
    let mut client = connect(&proxy);
    assert_eq!(send_line(&mut client, "PING"), "+PONG\r\n");
    proxy.set(Mode::Cut);
    assert_eq!(receive(&mut client, PATIENCE), Received::End);
    let mut client = connect(&proxy);
    let _ = client.write_all(b"SET k v\r\n");
    assert_eq!(receive(&mut client, PATIENCE), Received::End);
    assert_eq!(proxy.counts().connections, 2);
    eventually("both are counted", || proxy.resets() == 2);
    proxy.set(Mode::Pass);
    assert_eq!(send_line(&mut connect(&proxy), "GET k"), "$-1\r\n");
}

#[test]
fn held_bytes_pass_later() {
    let (server, proxy) = proxied();
    let mut before = connect(&proxy);
    assert_eq!(send_line(&mut before, "PING"), "+PONG\r\n");
    proxy.set(Mode::Hold);
    let mut during = connect(&proxy);
    before.write_all(b"INCR n\r\n").unwrap();
    during.write_all(b"INCR n\r\n").unwrap();
    assert_eq!(receive(&mut before, MOMENT), Received::Nothing);
    assert_eq!(receive(&mut during, MOMENT), Received::Nothing);
    assert_eq!(server.command(&["GET", "n"]), "");
    // The bytes are forwarded although the client has disconnected.
    drop(during);
    proxy.set(Mode::Pass);
    assert!(matches!(receive(&mut before, PATIENCE), Received::Bytes(_)));
    eventually("both arrive", || server.command(&["GET", "n"]) == "2");
}

#[test]
fn request_passes_while_replies_are_lost() {
    for (end, timeout) in [
        (ConnectionEnd::Cut, PATIENCE),
        (ConnectionEnd::Hang, MOMENT),
    ] {
        let (server, proxy) = proxied();
        let mut client = connect(&proxy);
        assert_eq!(send_line(&mut client, "PING"), "+PONG\r\n");
        proxy.set(Mode::LoseReplies(end));
        client.write_all(b"INCR n\r\n").unwrap();
        let received = receive(&mut client, timeout);
        eventually("the command is executed", || {
            server.command(&["GET", "n"]) == "1"
        });
        // The proxy would forward a reply that reaches it later.
        eventually("the reply is lost", || proxy.lost() == 1);
        proxy.set(Mode::Pass);
        match end {
            ConnectionEnd::Cut => assert_eq!(received, Received::End),
            ConnectionEnd::Hang => {
                assert_eq!(received, Received::Nothing);
                // The client would take this reply for the lost one.
                client.write_all(b"INCR n\r\n").unwrap();
                assert_eq!(receive(&mut client, MOMENT), Received::Nothing);
                eventually("the command is executed", || {
                    server.command(&["GET", "n"]) == "2"
                });
            }
        }
        assert_eq!(send_line(&mut connect(&proxy), "PING"), "+PONG\r\n");
    }
}

#[test]
fn delay_applies_to_each_piece() {
    const PIECES: usize = 32;
    let (_server, proxy) = proxied();
    let later = Duration::from_secs(2);
    for (up, down) in [(later, Duration::ZERO), (Duration::ZERO, later)] {
        proxy.set(Mode::Delay { up, down });
        let mut client = connect(&proxy);
        let mut responses = client.try_clone().unwrap();
        let mut sent = Vec::new();
        let received = std::thread::spawn(move || {
            let response = |_| responses.read_exact(&mut [0; 7]).map(|()| Instant::now());
            (0..PIECES)
                .map(response)
                .collect::<Result<Vec<_>, _>>()
                .unwrap()
        });
        for _ in 0..PIECES {
            sent.push(Instant::now());
            client.write_all(b"PING\r\n").unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        let received = received.join().unwrap();
        let took = sent.iter().zip(&received);
        let took: Vec<_> = took.map(|(sent, received)| *received - *sent).collect();
        assert!(took.iter().all(|it| *it >= later), "{took:?}");
        // The delays do not add up, which would give 64 s for the last piece.
        let last = took.last().expect("a piece");
        assert!(*last < Duration::from_secs(30), "{took:?}");
    }
}

#[test]
fn delayed_bytes_arrive_after_client_left() {
    let (server, proxy) = proxied();
    let up = Duration::from_secs(2);
    let down = Duration::ZERO;
    proxy.set(Mode::Delay { up, down });
    let deadline = Instant::now() + PATIENCE;
    // Repeated until the check is earlier than the delayed bytes.
    for n in 0.. {
        let mut client = connect(&proxy);
        let sent = Instant::now();
        client.write_all(b"INCR n\r\n").unwrap();
        drop(client);
        let early = server.command(&["GET", "n"]);
        let is_conclusive = sent.elapsed() < up;
        eventually("it arrives", || {
            server.command(&["GET", "n"]) == (n + 1).to_string()
        });
        if is_conclusive {
            let before = if n == 0 { String::new() } else { n.to_string() };
            assert_eq!(early, before);
            return;
        }
        assert!(Instant::now() < deadline, "each check was late");
    }
}

#[test]
fn lost_reply_leaves_request_executed() {
    let needle = b"INCR".to_vec();
    for fault in [Fault::ReplyTo { needle, nth: 2 }, Fault::reply(":2")] {
        for (end, received, timeout) in [
            (ConnectionEnd::Cut, Received::End, PATIENCE),
            (ConnectionEnd::Hang, Received::Nothing, MOMENT),
        ] {
            let (server, proxy) = proxied();
            let mut client = connect(&proxy);
            let mut other = connect(&proxy);
            proxy.once(fault.clone(), end);
            assert_eq!(send_line(&mut client, "PING"), "+PONG\r\n");
            assert_eq!(send_line(&mut client, "INCR n"), ":1\r\n");
            assert_eq!(proxy.injected_faults(), 0);
            client.write_all(b"INCR n\r\n").unwrap();
            assert_eq!(receive(&mut client, timeout), received);
            eventually("the fault happens", || proxy.injected_faults() == 1);
            eventually("the command is executed", || {
                server.command(&["GET", "n"]) == "2"
            });
            assert_eq!(send_line(&mut other, "INCR n"), ":3\r\n");
            assert_eq!(send_line(&mut connect(&proxy), "INCR n"), ":4\r\n");
        }
    }
}

#[test]
fn lost_request_is_not_executed() {
    for (end, received, timeout) in [
        (ConnectionEnd::Cut, Received::End, PATIENCE),
        (ConnectionEnd::Hang, Received::Nothing, MOMENT),
    ] {
        let (server, proxy) = proxied();
        let mut client = connect(&proxy);
        proxy.once(Fault::request("INCR"), end);
        assert_eq!(send_line(&mut client, "PING"), "+PONG\r\n");
        client.write_all(b"INCR n\r\n").unwrap();
        assert_eq!(receive(&mut client, timeout), received);
        // Waits, because otherwise the request of the next client would be lost.
        eventually("the fault happens", || proxy.injected_faults() == 1);
        assert_eq!(send_line(&mut connect(&proxy), "INCR n"), ":1\r\n");
        drop(client);
        assert_eq!(server.command(&["GET", "n"]), "1");
    }
}

#[test]
fn proxy_stops_after_byte_limit() {
    let (server, proxy) = proxied();
    let two = "INCR n\r\n".len() as u64 * 2;
    for (bytes, done) in [(two - 1, "1"), (two, "2"), (two + 1, "2")] {
        server.command(&["DEL", "n"]);
        let mut client = connect(&proxy);
        let up = proxy.counts().up;
        proxy.once(Fault::AfterBytes(bytes), ConnectionEnd::Cut);
        client.write_all(b"INCR n\r\nINCR n\r\nINCR n\r\n").unwrap();
        assert_eq!(receive(&mut client, PATIENCE), Received::End);
        assert_eq!(proxy.counts().up - up, bytes);
        eventually("the forwarded requests are executed", || {
            server.command(&["GET", "n"]) == done
        });
    }
    assert_eq!(proxy.injected_faults(), 3);
}

#[tokio::test(start_paused = true)]
async fn proxy_works_on_one_thread_with_paused_clock() {
    let (_server, proxy) = proxied();
    let mut client = connect(&proxy);
    assert_eq!(send_line(&mut client, "PING"), "+PONG\r\n");
    let address: SocketAddr = proxy.address();
    assert!(tokio::net::TcpStream::connect(address).await.is_ok());
    // Another process may get the port at once, so the end of this connection shows that the proxy has ended.
    drop(proxy);
    assert_eq!(receive(&mut client, PATIENCE), Received::End);
}

// ---- Helpers ----

#[derive(Debug, PartialEq, Eq)]
enum Received {
    Bytes(Vec<u8>),
    Nothing,
    End,
}

fn proxied() -> (RedisServer, Proxy) {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    (server, proxy)
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).expect("a proxy");
    stream.set_nodelay(true).expect("a socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// Sends a line to Redis and returns its reply.
fn send_line(client: &mut TcpStream, line: &str) -> String {
    client.set_read_timeout(Some(PATIENCE)).expect("a socket");
    client
        .write_all(format!("{line}\r\n").as_bytes())
        .expect("an open connection");
    let mut response = [0; 100];
    let read = read(client, &mut response).expect("a reply");
    String::from_utf8(response[..read].to_vec()).expect("text")
}

/// Returns the bytes received within this time. Tests wait for expected bytes with [`PATIENCE`], and for unexpected
/// bytes with a [`MOMENT`].
fn receive(client: &mut TcpStream, timeout: Duration) -> Received {
    client.set_read_timeout(Some(timeout)).expect("a socket");
    let mut bytes = [0; 100];
    match read(client, &mut bytes) {
        Ok(0) => Received::End,
        Ok(read) => Received::Bytes(bytes[..read].to_vec()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Received::End,
        Err(error) if error.kind() == ErrorKind::WouldBlock => Received::Nothing,
        Err(error) => panic!("{error}"),
    }
}

/// Reads some bytes. On Linux, a read with a timeout fails if the process is stopped meanwhile.
fn read(client: &mut TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match client.read(bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "expected that {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const PATIENCE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(200);
