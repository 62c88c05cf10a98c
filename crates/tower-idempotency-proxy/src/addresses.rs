//! Connections to a host that has several addresses.

use std::{io, net::SocketAddr, time::Duration};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::timeout;

/// Time after which the next address is tried too, as RFC 8305 recommends.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Returns the first connection to one of the addresses. The other attempts end with it.
///
/// The addresses are tried in their order. The next attempt begins when an earlier one fails, or after 250 ms. So an address that
/// drops packets leaves time for the others. An attempt has no time limit of its own.
///
/// # Errors
///
/// The error of the last attempt that failed, if all of them fail. Without addresses, an error of the kind
/// [`NotFound`](io::ErrorKind::NotFound).
// For the program `idempotency`, which connects to other servers in the same way.
#[doc(hidden)]
pub async fn connect_first<T, F>(
    addresses: &[SocketAddr],
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let mut attempts = FuturesUnordered::new();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        attempts.push(connect(*address));
        match timeout(ATTEMPT_DELAY, attempts.next()).await {
            Ok(Some(Ok(connection))) => return Ok(connection),
            Ok(Some(Err(error))) => failure = error,
            Ok(None) | Err(_) => {}
        }
    }
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Ok(connection) => return Ok(connection),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, future::pending};

    use tokio::time::{Instant, sleep};

    use super::*;

    /// Number of milliseconds after which an attempt ends, and its error if it fails.
    type Attempt = (u64, Option<&'static str>);

    /// Connects to an address for each attempt, whose port is its index. An attempt that is `None` never ends. Returns the port
    /// or the error, and the milliseconds after which each attempt began and the last one ended.
    async fn connect(attempts: &[Option<Attempt>]) -> (Result<u16, String>, Vec<u128>, u128) {
        let ports = 0..u16::try_from(attempts.len()).expect("few attempts");
        let addresses: Vec<_> = ports
            .map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
            .collect();
        let (start, begun) = (Instant::now(), RefCell::new(Vec::new()));
        let connected = connect_first(&addresses, |address| {
            begun.borrow_mut().push(start.elapsed().as_millis());
            let attempt = attempts[usize::from(address.port())];
            async move {
                let Some((duration, error)) = attempt else {
                    return pending::<io::Result<u16>>().await;
                };
                sleep(Duration::from_millis(duration)).await;
                error.map_or(Ok(address.port()), |error| Err(io::Error::other(error)))
            }
        });
        let connected = connected.await.map_err(|error| error.to_string());
        (connected, begun.into_inner(), start.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_begin_in_turn() {
        type Case = (
            &'static [Option<Attempt>],
            Result<u16, &'static str>,
            &'static [u128],
            u128,
        );
        let cases: [Case; 8] = [
            (&[Some((1000, None))], Ok(0), &[0], 1000),
            // The second address is not tried.
            (&[Some((240, None)), None], Ok(0), &[0], 240),
            // An address that drops packets leaves time for the next one.
            (&[None, None, Some((10, None))], Ok(2), &[0, 250, 500], 510),
            // The first connection wins.
            (
                &[Some((300, None)), Some((100, None))],
                Ok(0),
                &[0, 250],
                300,
            ),
            // After a failure, the next attempt begins at once.
            (
                &[Some((10, Some("a"))), Some((20, None))],
                Ok(1),
                &[0, 10],
                30,
            ),
            (
                &[Some((300, Some("a"))), None, Some((20, None))],
                Ok(2),
                &[0, 250, 300],
                320,
            ),
            // All attempts fail.
            (
                &[Some((400, Some("a"))), Some((10, Some("b")))],
                Err("a"),
                &[0, 250],
                400,
            ),
            (&[], Err("the host has no address"), &[], 0),
        ];
        for (attempts, connected, begun, end) in cases {
            let expected = (connected.map_err(str::to_owned), begun.to_vec(), end);
            assert_eq!(connect(attempts).await, expected, "{attempts:?}");
        }
    }
}
