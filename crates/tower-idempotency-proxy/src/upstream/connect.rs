//! Connections to an upstream.

use std::{io, net::SocketAddr, sync::Arc};

use http::{HeaderValue, Uri};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
};
use tokio_rustls::TlsConnector;

use crate::{
    addresses::connect_first,
    config::{ConfigError, Upstream},
    tls,
};

/// The address of an upstream, and TLS to it.
pub(crate) struct Target {
    host: String,
    port: u16,
    pub(crate) authority: HeaderValue,
    pub(crate) scheme: &'static str,
    pub(crate) http2: bool,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// A stream of bytes to an upstream.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Target {
    /// Reads the address. The URL was checked with the configuration.
    pub(crate) fn new(upstream: &Upstream) -> Result<Self, ConfigError> {
        let invalid = |error: &dyn std::fmt::Display| {
            ConfigError::without_line(format!("upstream {}: {error}", upstream.url.get_ref()))
        };
        let url: Uri = upstream
            .url
            .get_ref()
            .parse()
            .map_err(|error| invalid(&error))?;
        let authority = url.authority().ok_or_else(|| invalid(&"no host"))?;
        // The brackets of an IPv6 address belong to the URL, not to the address.
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let is_tls = url.scheme_str() == Some("https");
        let tls = if is_tls {
            let ca_file = upstream.ca_file.as_ref().map(toml::Spanned::get_ref);
            let mut config = tls::client_config(ca_file)?;
            config.alpn_protocols = vec![if upstream.http2 {
                b"h2".to_vec()
            } else {
                b"http/1.1".to_vec()
            }];
            let name = ServerName::try_from(host.clone()).map_err(|error| invalid(&error))?;
            Some((connector(config), name))
        } else {
            None
        };
        Ok(Self {
            port: authority
                .port_u16()
                .unwrap_or(if is_tls { 443 } else { 80 }),
            authority: HeaderValue::from_str(authority.as_str())
                .map_err(|error| invalid(&error))?,
            scheme: if is_tls { "https" } else { "http" },
            http2: upstream.http2,
            host,
            tls,
        })
    }

    pub(crate) async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let found = lookup_host((self.host.as_str(), self.port)).await?;
        let addresses: Vec<_> = found.collect();
        self.connect_to(&addresses).await
    }

    /// Connects to the first of the addresses that accepts it.
    async fn connect_to(&self, addresses: &[SocketAddr]) -> io::Result<Box<dyn Io>> {
        let tcp = connect_first(addresses, TcpStream::connect::<SocketAddr>).await?;
        tcp.set_nodelay(true)?;
        let Some((connector, name)) = &self.tls else {
            return Ok(Box::new(tcp));
        };
        let tls = connector.connect(name.clone(), tcp).await?;
        if self.http2 && tls.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(io::Error::other("the upstream does not speak HTTP/2"));
        }
        Ok(Box::new(tls))
    }
}

fn connector(config: ClientConfig) -> TlsConnector {
    TlsConnector::from(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::tests::wire::full_listener;
    use tokio::{net::TcpListener, time::timeout};

    use super::*;
    use crate::config::Config;

    /// Without another attempt, the kernel tries the first address for two minutes.
    #[tokio::test]
    async fn next_address_is_tried_if_first_is_dead() {
        let config = Config::from_toml(
            r#"
            [listen]
            address = "127.0.0.1:0"
            [store]
            url = "memory"
            [upstream.app]
            url = "http://localhost:3000"
            [[route]]
            path = "/**"
            upstream = "app"
            "#,
        );
        let target = Target::new(&config.unwrap().0.upstream["app"]).unwrap();
        let (dead, _queued) = full_listener().await;
        let live = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [&dead, &live].map(|it| it.local_addr().unwrap());
        let connected = timeout(Duration::from_secs(30), target.connect_to(&addresses)).await;
        assert!(connected.is_ok_and(|it| it.is_ok()));
    }
}
