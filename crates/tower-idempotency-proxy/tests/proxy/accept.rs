//! Listeners that cannot accept a connection, as if the process had no file descriptor left.

#![cfg(unix)]

use std::{
    net::{TcpListener, UdpSocket},
    os::fd::OwnedFd,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tests::observed::{observed, paused, with_panicking_reports};
use tokio::{task::yield_now, time::sleep};
use tower_idempotency_proxy::{Config, Proxy, Sockets};

use crate::harness::config;

/// Returns a socket that has something to read, and whose accepts all fail.
fn broken_listener() -> TcpListener {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
    // Waits until the datagram has arrived.
    socket.peek(&mut [0]).unwrap();
    OwnedFd::from(socket).into()
}

/// Returns a proxy with listeners whose accepts all fail.
async fn bind_broken_listeners() -> Proxy {
    let upstream = "127.0.0.1:1".parse().unwrap();
    let config = Config::from_toml(&config(upstream, "", "")).unwrap();
    let sockets = Sockets::new()
        .with_listen(broken_listener())
        .with_admin(broken_listener());
    Proxy::bind_with(config, sockets).await.unwrap()
}

/// Serves for a little more than two seconds.
async fn serve(proxy: Proxy) {
    let shutdown = async {
        // The runtime sees that there is something to read before it advances the clock.
        for _ in 0..1_000 {
            yield_now().await;
        }
        sleep(Duration::from_millis(2_050)).await;
    };
    assert!(proxy.serve(shutdown).await);
}

/// Each listener accepts ten times a second.
#[test]
fn failed_accepts_warn_once_per_second() {
    let (_, log) = observed("warn", async { serve(bind_broken_listeners().await).await });
    for event in [
        ": connection not accepted error=",
        ": connection to the admin port not accepted error=",
    ] {
        let lines = log.lines().filter(|line| line.contains(event));
        let counts: Vec<_> = lines
            .filter_map(|line| Some(line.split_once(" count=")?.1))
            .collect();
        assert_eq!(counts, ["1", "10", "10"], "{event}{log}");
    }
}

/// The subscriber panics at each event, for example because the reader of standard error has ended.
#[test]
fn panicking_reports_end_no_listener() {
    with_panicking_reports(paused(), async |panics: &AtomicU64| {
        let proxy = bind_broken_listeners().await;
        let before = panics.load(Ordering::SeqCst);
        serve(proxy).await;
        // Three warnings of each listener, and the two events of the drain.
        let reports = panics.load(Ordering::SeqCst) - before;
        assert!(reports >= 8, "{reports}");
    });
}
