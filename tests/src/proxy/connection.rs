//! A connection through the proxy.

use std::{
    cell::Cell,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, tcp},
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};

use super::{ConnectionEnd, Fault, Mode, State};

/// Forwards until both sides are done, or the connection is cut.
pub(super) async fn forward(mut client: TcpStream, state: Arc<State>) {
    let mut mode = state.mode.subscribe();
    let mut server = None;
    let forwarding = async {
        let upstream = *state.upstream();
        let server = server.insert(TcpStream::connect(upstream).await?);
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let lost = LostDirections::default();
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let up = Direction::new(Side::Up, &state, &lost);
        let down = Direction::new(Side::Down, &state, &lost);
        tokio::try_join!(
            up.pump(from_client, to_server),
            down.pump(from_server, to_client)
        )
    };
    let done = tokio::select! {
        // Without `biased`, bytes that have already arrived would get through.
        biased;
        _ = mode.wait_for(|mode| *mode == Mode::Cut) => false,
        done = forwarding => done.is_ok(),
    };
    if done {
        return;
    }
    let _ = client.set_zero_linger();
    drop(client);
    state.resets.fetch_add(1, Ordering::SeqCst);
    // A reset here could overtake the last request. So the proxy shuts down its sending side, and reads the server's replies
    // to their end.
    if let Some(mut server) = server {
        let _ = server.shutdown().await;
        let mut nowhere = tokio::io::sink();
        let heard = tokio::io::copy(&mut server, &mut nowhere);
        let _ = timeout(Duration::from_secs(5), heard).await;
    }
}

/// The directions in which a connection has lost bytes. Nothing is forwarded in them any more.
#[derive(Debug, Default)]
struct LostDirections {
    /// No more bytes go to the server.
    requests: Cell<bool>,
    /// No more bytes go to the client.
    replies: Cell<bool>,
    /// The connection is cut when the server replies.
    cut_at_reply: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Up,
    Down,
}

#[derive(Debug)]
struct Direction<'a> {
    side: Side,
    state: &'a State,
    lost: &'a LostDirections,
    /// The last bytes seen, as [`Fault::matches`] needs them.
    before: Vec<u8>,
}

impl<'a> Direction<'a> {
    fn new(side: Side, state: &'a State, lost: &'a LostDirections) -> Self {
        Self {
            side,
            state,
            lost,
            before: Vec::new(),
        }
    }

    /// Forwards the bytes of `from` to their end. Reads ahead, so that a delay postpones bytes without reducing the
    /// throughput.
    async fn pump(
        mut self,
        mut from: tcp::ReadHalf<'_>,
        mut to: tcp::WriteHalf<'_>,
    ) -> io::Result<()> {
        let (queue, mut due) = mpsc::channel::<(Instant, Bytes)>(64);
        let mode = self.state.mode.subscribe();
        let (side, received) = (self.side, &self.state.received);
        let read = async move {
            loop {
                let mut piece = BytesMut::with_capacity(64 * 1024);
                let read = match (from.read_buf(&mut piece).await, side) {
                    (Ok(read), _) => read,
                    // The bytes of a client are forwarded even if its connection was reset.
                    (Err(_), Side::Up) => 0,
                    (Err(error), Side::Down) => return Err(error),
                };
                if side == Side::Up {
                    count(received, &piece);
                }
                let delay = match (*mode.borrow(), side) {
                    (Mode::Delay { up, .. }, Side::Up) => up,
                    (Mode::Delay { down, .. }, Side::Down) => down,
                    _ => Duration::ZERO,
                };
                let piece = (Instant::now() + delay, piece.freeze());
                // An empty piece marks the end. It is delayed like any other piece.
                if queue.send(piece).await.is_err() || read == 0 {
                    return Ok(());
                }
            }
        };
        let write = async {
            let mut mode = self.state.mode.subscribe();
            while let Some((at, piece)) = due.recv().await {
                sleep_until(at).await;
                let now = mode.wait_for(|mode| *mode != Mode::Hold).await;
                // Both tasks wait for a new mode, and the task that cuts the connection may be woken last.
                if now.is_ok_and(|now| *now == Mode::Cut) {
                    return Err(cut());
                }
                if piece.is_empty() {
                    // An error means that the other side has already disconnected.
                    let _ = to.shutdown().await;
                    return Ok(());
                }
                match side {
                    Side::Up => self.up(piece, &mut to).await?,
                    Side::Down => self.down(&piece, &mut to).await?,
                }
            }
            Ok(())
        };
        tokio::try_join!(read, write).map(|_| ())
    }

    async fn up(&mut self, piece: Bytes, to: &mut tcp::WriteHalf<'_>) -> io::Result<()> {
        if self.lost.requests.get() {
            return Ok(());
        }
        let Some((fault, end)) = self.fault(&piece) else {
            count(&self.state.up, &piece);
            return to.write_all(&piece).await;
        };
        let forwarded = match fault {
            Fault::AfterBytes(left) => {
                self.lost.requests.set(true);
                self.lost.replies.set(true);
                piece.slice(..usize::try_from(left).map_or(piece.len(), |it| it.min(piece.len())))
            }
            Fault::Request { .. } => {
                self.lost.requests.set(true);
                Bytes::new()
            }
            Fault::Reply { .. } | Fault::ReplyTo { .. } => {
                self.lost.replies.set(true);
                piece
            }
        };
        count(&self.state.up, &forwarded);
        self.state.injected_faults.fetch_add(1, Ordering::SeqCst);
        to.write_all(&forwarded).await?;
        match end {
            ConnectionEnd::Hang => Ok(()),
            ConnectionEnd::Cut if self.lost.requests.get() => Err(cut()),
            ConnectionEnd::Cut => {
                self.lost.cut_at_reply.set(true);
                Ok(())
            }
        }
    }

    /// Takes the fault if it happens in this piece.
    fn fault(&mut self, piece: &[u8]) -> Option<(Fault, ConnectionEnd)> {
        let mut armed = self.state.fault();
        let (fault, _) = armed.as_mut()?;
        if fault.is_in_reply() != (self.side == Side::Down) {
            return None;
        }
        if fault.matches(&mut self.before, piece) {
            armed.take()
        } else {
            None
        }
    }

    async fn down(&mut self, piece: &[u8], to: &mut tcp::WriteHalf<'_>) -> io::Result<()> {
        let mode = *self.state.mode.borrow();
        if let Mode::LoseReplies(end) = mode {
            self.lost.replies.set(true);
            if end == ConnectionEnd::Cut {
                self.lost.cut_at_reply.set(true);
            }
            self.state.lost.fetch_add(1, Ordering::SeqCst);
        }
        if let Some((_, end)) = self.fault(piece) {
            self.lost.replies.set(true);
            self.lost.cut_at_reply.set(end == ConnectionEnd::Cut);
            self.state.injected_faults.fetch_add(1, Ordering::SeqCst);
        }
        if self.lost.cut_at_reply.get() {
            return Err(cut());
        }
        if self.lost.replies.get() {
            return Ok(());
        }
        count(&self.state.down, piece);
        if to.write_all(piece).await.is_err() {
            // The client has disconnected, but its requests are still forwarded.
            self.lost.replies.set(true);
        }
        Ok(())
    }
}

/// Counts bytes before they are written, so that an observer of their effect finds them counted.
fn count(counter: &AtomicU64, piece: &[u8]) {
    counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
}

fn cut() -> io::Error {
    io::Error::other("the connection must be cut")
}
