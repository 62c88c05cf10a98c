//! A proxy that holds a request while the test changes the entries behind it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use tests::barrier::Barrier;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
};

/// Starts a proxy on a free port, and returns its address. Each request that contains these bytes passes the barrier.
pub(crate) async fn proxy_through(
    barrier: &Barrier,
    needle: &'static [u8],
    server: SocketAddr,
) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    let barrier = barrier.clone();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.expect("a connection");
            tokio::spawn(forward(client, server, needle, barrier.clone()));
        }
    });
    address
}

async fn forward(
    client: TcpStream,
    server: SocketAddr,
    needle: &[u8],
    barrier: Barrier,
) -> io::Result<()> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::spawn(async move { copy(&mut from_server, &mut to_client).await });
    // The bytes may arrive in two pieces.
    let (mut seen, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let read = from_client.read(&mut piece).await?;
        if read == 0 {
            return Ok(());
        }
        seen.extend_from_slice(&piece[..read]);
        if seen.windows(needle.len()).any(|it| it == needle) {
            seen.clear();
            barrier.pass().await;
        }
        seen.drain(..seen.len().saturating_sub(needle.len() - 1));
        to_server.write_all(&piece[..read]).await?;
    }
}
