//! HTTP/1.1 to the judged server, with a connection for each request.

use std::{io, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tower_idempotency_proxy::connect_first;

use crate::{
    failure::Failure,
    stream::{self, Io, Tls},
};

/// The largest response body that is read.
const BODY_LIMIT: usize = 16 << 20;

/// The longest time that an abandoned request waits for its response.
const PATIENCE: Duration = Duration::from_secs(1);

/// A request whose target is a path and a query.
pub(super) type Call = Request<Full<Bytes>>;

/// A response, read to its end.
#[derive(Clone, Debug)]
pub(super) struct ServerResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// An open connection, for one request.
pub(super) struct Connection(Box<dyn Io>);

/// The address of the server, and TLS to it.
pub(super) struct Client {
    host: String,
    port: u16,
    tls: Option<Tls>,
    timeout: Duration,
}

impl Client {
    /// Reads the address. The certificate of the server must be one that the system trusts.
    pub(super) fn new(url: &Uri, timeout: Duration) -> Result<Self, Failure> {
        let authority = url.authority().filter(|it| !it.host().is_empty());
        let authority = authority.ok_or_else(|| Failure::usage(WRONG_URL))?;
        // The authority of http://user:1/2@host is user:1. An `@` after it may belong to a password.
        if url.to_string().contains('@') {
            return Err(Failure::usage(
                "the URL contains credentials or an @: send credentials with --header, and write %40 in a path",
            ));
        }
        // The brackets of an IPv6 address belong to the URL, not to the address.
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let is_tls = match url.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(Failure::usage(WRONG_URL)),
        };
        let default_port = if is_tls { 443 } else { 80 };
        let port = stream::port(authority.as_str(), authority.host(), default_port);
        Ok(Self {
            port: port.ok_or_else(|| Failure::usage(WRONG_URL))?,
            tls: is_tls.then(|| tls(&host)).transpose()?,
            host,
            timeout,
        })
    }

    /// Sends a request on a new connection, and reads the response to its end.
    pub(super) async fn send(&self, call: Call) -> Result<ServerResponse, String> {
        let connection = self.connect().await?;
        self.send_on(connection, call).await
    }

    /// Opens a connection.
    pub(super) async fn connect(&self) -> Result<Connection, String> {
        let opened = async {
            let found = lookup_host((self.host.as_str(), self.port)).await?;
            self.open(&found.collect::<Vec<_>>()).await
        };
        let opened = timeout(self.timeout, opened).await;
        opened
            .map_err(|_| "no connection within --timeout".to_owned())?
            .map_err(|error| format!("no connection: {error}"))
    }

    /// Opens a connection to the first of the addresses that accepts it.
    async fn open(&self, addresses: &[SocketAddr]) -> io::Result<Connection> {
        let tcp = connect_first(addresses, TcpStream::connect::<SocketAddr>).await?;
        tcp.set_nodelay(true)?;
        Ok(Connection(stream::open(tcp, self.tls.as_ref()).await?))
    }

    pub(super) async fn send_on(
        &self,
        connection: Connection,
        call: Call,
    ) -> Result<ServerResponse, String> {
        let exchanged = timeout(self.timeout, exchange(connection, call)).await;
        exchanged.map_err(|_| "no response within --timeout".to_owned())?
    }

    /// Sends a whole request, and closes the connection at the status of the response, or after [`PATIENCE`]. Returns the
    /// status, or `None` if it did not arrive.
    pub(super) async fn abandon(&self, bytes: Vec<u8>) -> Result<Option<StatusCode>, String> {
        let mut connection = self.connect().await?;
        self.write(&mut connection, &bytes).await?;
        // A close at once could reach the server before its handler runs. Then there would be nothing to retry.
        let status = timeout(PATIENCE, read_status(&mut connection)).await;
        Ok(status.ok().flatten())
    }

    /// Sends bytes that need not be valid HTTP. Returns the status, or `None` if the server closes the connection.
    pub(super) async fn send_bytes(&self, bytes: Vec<u8>) -> Result<Option<StatusCode>, String> {
        let mut connection = self.connect().await?;
        self.write(&mut connection, &bytes).await?;
        let status = timeout(self.timeout, read_status(&mut connection)).await;
        status.map_err(|_| "no response within --timeout".to_owned())
    }

    async fn write(&self, connection: &mut Connection, bytes: &[u8]) -> Result<(), String> {
        let written = async {
            connection.0.write_all(bytes).await?;
            connection.0.flush().await
        };
        let written = timeout(self.timeout, written).await;
        written
            .map_err(|_| "the request was not read within --timeout".to_owned())?
            .map_err(|error| format!("the request broke off: {error}"))
    }
}

pub(super) const WRONG_URL: &str =
    "expected a URL of the form http://HOST:PORT/PATH or https://HOST/PATH";

fn tls(host: &str) -> Result<Tls, Failure> {
    let connector = stream::connector()?;
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|_| Failure::usage(WRONG_URL))?;
    Ok((connector, name))
}

async fn exchange(connection: Connection, call: Call) -> Result<ServerResponse, String> {
    let broken = |error: hyper::Error| format!("no response: {error}");
    let io = TokioIo::new(connection.0);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
        .await
        .map_err(broken)?;
    let driver = tokio::spawn(connection);
    let response = sender.send_request(call).await.map_err(broken)?;
    let (head, body) = response.into_parts();
    let body = Limited::new(body, BODY_LIMIT).collect().await;
    let body = body.map_err(|error| format!("the response broke off: {error}"))?;
    driver.abort();
    Ok(ServerResponse {
        status: head.status,
        headers: head.headers,
        body: body.to_bytes(),
    })
}

/// Reads the status of a response. Returns `None` if the connection ends before it.
async fn read_status(connection: &mut Connection) -> Option<StatusCode> {
    // `HTTP/1.1 400`
    let mut head = [0; 12];
    connection.0.read_exact(&mut head).await.ok()?;
    StatusCode::from_bytes(&head[9..]).ok()
}

/// Returns a request as HTTP/1.1. `key` is the line of the key, whose bytes are sent as they are.
pub(super) fn to_bytes(call: &Call, body: &Bytes, key: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = format!("{} {} HTTP/1.1\r\n", call.method(), call.uri()).into_bytes();
    for (name, value) in call.headers() {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    if let Some(key) = key {
        bytes.extend_from_slice(b"idempotency-key: ");
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(b"\r\n");
    }
    let length = format!("{}: {}\r\n\r\n", header::CONTENT_LENGTH, body.len());
    bytes.extend_from_slice(length.as_bytes());
    bytes.extend_from_slice(body);
    bytes
}

#[cfg(test)]
mod tests {
    use ::tests::wire::full_listener;
    use tokio::net::TcpListener;

    use super::*;

    /// Without the check, requests would go to port 80.
    #[test]
    fn wrong_port_is_rejected() {
        for url in ["http://localhost:99999/pay", "http://[::1]:8O80/pay"] {
            let client = Client::new(&url.parse().unwrap(), PATIENCE);
            assert_eq!(client.err().unwrap().to_string(), WRONG_URL);
        }
        let client = Client::new(&"http://[::1]:8080/pay".parse().unwrap(), PATIENCE);
        assert_eq!(client.ok().unwrap().port, 8080);
    }

    /// Without another attempt, the kernel tries the first address for two minutes.
    #[tokio::test]
    async fn next_address_is_tried_if_first_is_dead() {
        let (dead, _queued) = full_listener().await;
        let live = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addresses = [&dead, &live].map(|it| it.local_addr().expect("an address"));
        let url = Uri::from_static("http://localhost");
        let client = Client::new(&url, Duration::from_secs(30)).expect("a URL");
        let opened = timeout(client.timeout, client.open(&addresses)).await;
        opened.expect("the second address").expect("a connection");
    }
}
