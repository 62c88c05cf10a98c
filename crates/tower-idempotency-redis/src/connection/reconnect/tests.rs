use std::{
    collections::HashSet,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::time::{sleep, timeout};

use super::*;

const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns a connection that takes longer to establish than three calls may take, and the count of attempts.
fn slow_connection() -> (ReconnectingConnection<()>, Arc<AtomicUsize>) {
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let connection = ReconnectingConnection::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        async {
            // Two steps: the second has to start although no caller polls at that time.
            sleep(CALL_TIMEOUT * 7 / 4).await;
            sleep(CALL_TIMEOUT * 7 / 4).await;
            Ok(())
        }
    });
    (connection, attempts)
}

/// Returns a connection that the server always refuses, and the count of attempts.
fn refused_connection() -> (ReconnectingConnection<()>, Arc<AtomicUsize>) {
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let connection = ReconnectingConnection::new(move || {
        let counter = Arc::clone(&counter);
        async move {
            counter.fetch_add(1, Ordering::Relaxed);
            Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())
        }
    });
    (connection, attempts)
}

async fn call(connection: &ReconnectingConnection<()>) -> RedisResult<()> {
    connection
        .call(Instant::now() + CALL_TIMEOUT, |()| async { Ok(()) })
        .await
}

#[tokio::test(start_paused = true)]
async fn slow_connect_outlasts_calls_that_time_out() {
    let (connection, attempts) = slow_connection();
    for n in 0..4 {
        assert_eq!(call(&connection).await.is_ok(), n == 3, "call {n}");
    }
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn failed_connect_without_waiters_is_retried() {
    let attempts = AtomicUsize::default();
    let connection = ReconnectingConnection::new(move || {
        let is_first = attempts.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            if is_first {
                sleep(CALL_TIMEOUT * 3 / 2).await;
                return Err(io::Error::other("no").into());
            }
            Ok(())
        }
    });
    assert!(call(&connection).await.is_err(), "the call times out");
    sleep(CALL_TIMEOUT).await;
    assert!(call(&connection).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn connection_established_without_waiters_is_used() {
    let (connection, attempts) = slow_connection();
    for _ in 0..3 {
        let dropped = timeout(CALL_TIMEOUT / 10, call(&connection)).await;
        assert!(dropped.is_err());
    }
    sleep(CALL_TIMEOUT * 5).await;
    assert!(call(&connection).await.is_ok());
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
}

// F-133
#[tokio::test(start_paused = true)]
async fn failed_connects_back_off_exponentially() {
    let (connection, attempts) = refused_connection();
    assert!(call(&connection).await.is_err());
    for (n, longest) in [100, 200, 400, 800, 1_000, 1_000].into_iter().enumerate() {
        let start = Instant::now();
        let deadline = start + CALL_TIMEOUT * 2;
        let refused = connection.call(deadline, |()| async { Ok(()) });
        assert!(refused.await.is_err());
        // The clock has a resolution of 1 ms.
        let delay = start.elapsed().as_millis();
        let expected = longest * 3 / 4..=longest + 1;
        assert!(expected.contains(&delay), "{delay} ms after {n} failures");
        assert_eq!(attempts.load(Ordering::Relaxed), n + 2);
    }
}

#[tokio::test(start_paused = true)]
async fn success_resets_reconnect_backoff() {
    let is_refused = Arc::new(AtomicBool::new(true));
    let refused = Arc::clone(&is_refused);
    let connection = ReconnectingConnection::new(move || {
        let refused = Arc::clone(&refused);
        async move {
            match refused.load(Ordering::Relaxed) {
                true => Err(io::Error::from(io::ErrorKind::ConnectionRefused).into()),
                false => Ok(()),
            }
        }
    });
    for _ in 0..4 {
        assert!(call(&connection).await.is_err());
    }
    is_refused.store(false, Ordering::Relaxed);
    assert!(call(&connection).await.is_ok());
    let breaks =
        async || -> RedisResult<()> { Err(io::Error::from(io::ErrorKind::BrokenPipe).into()) };
    let broken = connection.call(Instant::now() + CALL_TIMEOUT, |()| breaks());
    assert!(broken.await.is_err());
    is_refused.store(true, Ordering::Relaxed);
    let start = Instant::now();
    assert!(call(&connection).await.is_err());
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(call(&connection).await.is_err());
    assert!(start.elapsed() <= Duration::from_millis(101));
}

// F-130
#[tokio::test(start_paused = true)]
async fn connects_to_replica_back_off_exponentially() {
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let connection = ReconnectingConnection::new(move || {
        let counter = Arc::clone(&counter);
        async move {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    });
    // Returns the time that a call took, which includes the delay before the attempt to connect.
    let refuse = async || {
        let start = Instant::now();
        let refused = connection.call(start + CALL_TIMEOUT * 2, |()| async {
            let reply = "-READONLY You can't write against a read only replica.\r\n";
            redis::parse_redis_value(reply.as_bytes())?.extract_error()
        });
        refused.await.expect_err("a replica");
        start.elapsed().as_millis()
    };
    for _ in 0..2 {
        let before = attempts.load(Ordering::Relaxed);
        let deadline = Instant::now() + CALL_TIMEOUT * 2;
        let served = connection.call(deadline, |()| async { Ok(()) });
        assert!(served.await.is_ok());
        // The server becomes a replica now. Its address still leads to it.
        sleep(MAX_BACKOFF).await;
        for (n, longest) in [0, 0, 100, 200, 400, 800, 1_000].into_iter().enumerate() {
            let delay = refuse().await;
            // The clock has a resolution of 1 ms.
            let expected = longest * 3 / 4..=longest + 1;
            assert!(expected.contains(&delay), "{delay} ms after {n} replies");
            assert_eq!(attempts.load(Ordering::Relaxed), before + n + 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn timeout_replaces_connection_despite_replies() {
    for replaces in [false, true] {
        let attempts = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&attempts);
        let mut connection = ReconnectingConnection::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            async { Ok(()) }
        });
        if replaces {
            connection = connection.replace_on_timeout();
        }
        let deadline = Instant::now() + CALL_TIMEOUT;
        let delayed = connection.call(deadline, |()| pending::<RedisResult<()>>());
        let served = async {
            sleep(CALL_TIMEOUT / 2).await;
            call(&connection).await
        };
        let (delayed, served) = tokio::join!(delayed, served);
        assert!(delayed.is_err() && served.is_ok());
        assert!(call(&connection).await.is_ok());
        let expected = 1 + usize::from(replaces);
        assert_eq!(attempts.load(Ordering::Relaxed), expected);
    }
}

// F-127
/// A node of a cluster is unresponsive. Each new connection connects to all other nodes.
#[tokio::test(start_paused = true)]
async fn replacements_in_cluster_back_off() {
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let connection = ReconnectingConnection::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        async {
            sleep(CALL_TIMEOUT / 2).await;
            Ok(())
        }
    });
    let connection = in_cluster(connection);
    call_unresponsive_node(&connection).await;
    // Without delays there would be 30: a call replaces the connection, and the second one after it uses the new one.
    let attempts = attempts.load(Ordering::Relaxed);
    assert!((10..20).contains(&attempts), "{attempts}");
    sleep(MIN_AGE_IN_CLUSTER).await;
    let mut current = connection.current.lock().expect("no panic");
    assert_eq!(current.delay_of_replacement(), Duration::ZERO);
}

// F-127
/// The nodes refuse each replacement of an old connection.
#[tokio::test(start_paused = true)]
async fn failed_replacements_in_cluster_back_off() {
    let attempts = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&attempts);
    let connection = in_cluster(ReconnectingConnection::new(move || {
        let is_first = counter.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            if is_first {
                return Ok(());
            }
            Err(io::Error::from(io::ErrorKind::ConnectionRefused).into())
        }
    }));
    assert!(call(&connection).await.is_ok());
    sleep(MIN_AGE_IN_CLUSTER).await;
    call_unresponsive_node(&connection).await;
    // Without delays there would be 31: every second call would connect.
    let attempts = attempts.load(Ordering::Relaxed);
    assert!((10..20).contains(&attempts), "{attempts}");
}

fn in_cluster(connection: ReconnectingConnection<()>) -> ReconnectingConnection<()> {
    ReconnectingConnection {
        is_cluster: true,
        replaces_on_timeout: true,
        ..connection
    }
}

/// Makes calls for a minute, one after the other. Each times out.
async fn call_unresponsive_node(connection: &ReconnectingConnection<()>) {
    let start = Instant::now();
    while start.elapsed() < CALL_TIMEOUT * 60 {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let delayed = connection.call(deadline, |()| pending::<RedisResult<()>>());
        assert!(delayed.await.is_err());
    }
}

#[test]
fn jitter_varies_delays() {
    let delays: HashSet<_> = (0..100).map(|_| add_jitter(MAX_BACKOFF)).collect();
    assert!(delays.len() > 10, "{delays:?}");
}

#[test]
fn ended_runtime_leaves_no_pending_timer() {
    let runtime = || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().build().unwrap()
    };
    let (connection, attempts) = refused_connection();
    let first = runtime();
    assert!(first.block_on(call(&connection)).is_err());
    let dropped = async { timeout(Duration::from_millis(10), call(&connection)).await };
    assert!(first.block_on(dropped).is_err());
    drop(first);
    let second = runtime();
    for _ in 0..2 {
        assert!(second.block_on(call(&connection)).is_err());
    }
    assert!(attempts.load(Ordering::Relaxed) > 1);
}
