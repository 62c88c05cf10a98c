//! Streams of bytes to a server, with or without TLS.

use std::{io, sync::Arc};

use rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::failure::Failure;

/// A stream of bytes to a server.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A client of TLS, and the name that the certificate of the server must have.
pub(crate) type Tls = (TlsConnector, ServerName<'static>);

/// Returns the port of `HOST:PORT`, or the default port if the address is only `HOST`. Returns `None` if the port is not a number
/// up to 65535.
///
/// `Uri` accepts a wrong port and then returns none. Without this check, requests would go to the default port.
pub(crate) fn port(address: &str, host: &str, default_port: u16) -> Option<u16> {
    match address.strip_prefix(host)? {
        "" => Some(default_port),
        port => port.strip_prefix(':')?.parse().ok(),
    }
}

/// Returns a client of TLS for HTTP/1.1 that trusts the certificates of the system.
pub(crate) fn connector() -> Result<TlsConnector, Failure> {
    let mut roots = RootCertStore::empty();
    let _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::failed(format!("TLS is not available: {error}")))?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Returns the stream of a connection, after the handshake of TLS if there is any.
pub(crate) async fn open(tcp: TcpStream, tls: Option<&Tls>) -> io::Result<Box<dyn Io>> {
    let stream: Box<dyn Io> = match tls {
        Some((connector, name)) => Box::new(connector.connect(name.clone(), tcp).await?),
        None => Box::new(tcp),
    };
    Ok(stream)
}
