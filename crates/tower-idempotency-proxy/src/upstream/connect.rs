//! Connections to an upstream.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, select_all},
};
use http::{HeaderValue, Uri};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take},
    net::{TcpStream, lookup_host},
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

use crate::{
    addresses::connect_first,
    config::{ConfigError, Upstream},
    sockets::set_keepalive,
    tls,
};

/// The address of an upstream, and TLS to it.
pub(crate) struct Target {
    host: String,
    port: u16,
    pub(crate) authority: HeaderValue,
    pub(crate) scheme: &'static str,
    pub(crate) http2: bool,
    lookups: Lookups,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// Time after which a lookup is repeated. glibc itself repeats a query without a reply only after 5 s.
const LOOKUP_DELAY: Duration = Duration::from_millis(500);
/// Largest number of lookups in progress for one upstream. Each occupies a thread.
const MAX_LOOKUPS: usize = 4;

/// The lookups of the addresses of a host that have not ended.
///
/// A lookup has no time limit and cannot be cancelled, and each one occupies a thread that all upstreams and the store share. So
/// all connections wait for the same ones.
#[derive(Default)]
struct Lookups(Mutex<Vec<Lookup>>);

/// A lookup in a task.
struct Lookup {
    began: Instant,
    found: SharedLookup,
}

type LookupResult = Result<Vec<SocketAddr>, Arc<io::Error>>;
type SharedLookup = Shared<BoxFuture<'static, LookupResult>>;

impl Lookups {
    /// Returns the addresses that `look_up` finds, or those of a lookup in progress that ends before.
    async fn addresses<F>(&self, mut look_up: impl FnMut() -> F) -> io::Result<Vec<SocketAddr>>
    where
        F: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        loop {
            let lookups = select_all(self.in_progress(&mut look_up));
            if let Ok((found, ..)) = timeout(LOOKUP_DELAY, lookups).await {
                return found.map_err(|error| io::Error::new(error.kind(), error));
            }
        }
    }

    /// Returns the lookups in progress. Starts one if there is none, or if the last one takes long.
    fn in_progress<F>(&self, look_up: impl FnOnce() -> F) -> Vec<SharedLookup>
    where
        F: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        let mut lookups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The addresses of a lookup that has ended may be old.
        lookups.retain(|lookup| lookup.found.clone().now_or_never().is_none());
        let last = lookups.last();
        let is_due = last.is_none_or(|last| last.began.elapsed() >= LOOKUP_DELAY);
        if is_due && lookups.len() < MAX_LOOKUPS {
            lookups.push(Lookup::start(look_up()));
        }
        lookups.iter().map(|lookup| lookup.found.clone()).collect()
    }
}

impl Lookup {
    fn start(look_up: impl Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static) -> Self {
        // The task continues if all connections time out.
        let task = tokio::spawn(look_up);
        let found = async move {
            let found = task.await.unwrap_or_else(|error| Err(error.into()));
            found.map_err(Arc::new)
        };
        Self {
            began: Instant::now(),
            found: found.boxed().shared(),
        }
    }
}

/// A stream of bytes to an upstream.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Largest part of a response with HTTP/1.1 that is read at once. While its client does not read, hyper holds several parts.
///
/// hyper doubles its buffer of 8 KiB after each read that fills it, up to 408 KiB. A read of this size does not
/// fill a buffer of 64 KiB.
const MAX_READ: u64 = 64 * 1024 - 1;

/// A stream of which a read returns at most [`MAX_READ`] bytes.
struct LimitedReads(Take<Box<dyn Io>>);

impl LimitedReads {
    fn new(stream: Box<dyn Io>) -> Self {
        Self(stream.take(MAX_READ))
    }

    fn stream(self: Pin<&mut Self>) -> Pin<&mut Box<dyn Io>> {
        Pin::new(self.get_mut().0.get_mut())
    }
}

impl AsyncRead for LimitedReads {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self(stream) = self.get_mut();
        stream.set_limit(MAX_READ);
        Pin::new(stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for LimitedReads {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.get_ref().is_write_vectored()
    }
}

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
            Some((TlsConnector::from(Arc::new(config)), name))
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
            lookups: Lookups::default(),
            host,
            tls,
        })
    }

    pub(crate) async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let look_up = || {
            let host = (self.host.clone(), self.port);
            async move {
                let found = lookup_host(host).await?;
                Ok::<Vec<_>, io::Error>(found.collect())
            }
        };
        let addresses = self.lookups.addresses(look_up).await?;
        let stream = self.connect_to(&addresses).await?;
        if self.http2 {
            // The windows limit the bytes of each response.
            return Ok(stream);
        }
        Ok(Box::new(LimitedReads::new(stream)))
    }

    /// Connects to the first of the addresses that accepts it.
    async fn connect_to(&self, addresses: &[SocketAddr]) -> io::Result<Box<dyn Io>> {
        let tcp = connect_first(addresses, TcpStream::connect::<SocketAddr>).await?;
        tcp.set_nodelay(true)?;
        set_keepalive(&tcp);
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

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use ::tests::{barrier::bounded, wire::full_listener};
    use tokio::{io::AsyncWriteExt, net::TcpListener, sync::oneshot, task::yield_now, time::sleep};

    use super::*;
    use crate::config::tests::minimal;

    fn target() -> Target {
        target_at("http://localhost:3000")
    }

    fn target_at(url: &str) -> Target {
        Target::new(&minimal(url).0.upstream["app"]).unwrap()
    }

    /// Returns an address with this port.
    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Waits for the addresses that a lookup finds.
    async fn receive(addresses: oneshot::Receiver<Vec<SocketAddr>>) -> io::Result<Vec<SocketAddr>> {
        addresses.await.map_err(io::Error::other)
    }

    /// Without another attempt, the kernel tries the first address for two minutes.
    #[tokio::test]
    async fn next_address_is_tried_if_first_is_dead() {
        let target = target();
        let (dead, _queued) = full_listener().await;
        let live = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [&dead, &live].map(|it| it.local_addr().unwrap());
        let connected = timeout(Duration::from_secs(30), target.connect_to(&addresses)).await;
        assert!(connected.is_ok_and(|it| it.is_ok()));
    }

    #[tokio::test]
    async fn reads_are_limited() {
        const SIZE: usize = 1 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = target_at(&format!("http://{}", listener.local_addr().unwrap()));
        let (accepted, connected) =
            bounded(async { tokio::join!(listener.accept(), target.connect()) }).await;
        let ((mut upstream, _), mut stream) = (accepted.unwrap(), connected.unwrap());
        tokio::spawn(async move { upstream.write_all(&[b'x'; SIZE]).await });
        let (mut buffer, mut unread) = (vec![0; SIZE], SIZE);
        while unread > 0 {
            // The kernel receives more bytes than a read returns.
            sleep(Duration::from_millis(10)).await;
            let read = bounded(stream.read(&mut buffer)).await.unwrap();
            assert!((1..=MAX_READ).contains(&(read as u64)), "{read}");
            unread -= read;
        }
    }

    #[tokio::test]
    async fn connection_waits_for_lookup_in_progress() {
        let target = target();
        let live = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (found, addresses) = oneshot::channel();
        let mut addresses = Some(addresses);
        let look_up = || receive(addresses.take().expect("a single lookup"));
        let timed_out = target.lookups.addresses(look_up);
        assert!(timed_out.now_or_never().is_none());
        found.send(vec![live.local_addr().unwrap()]).unwrap();
        // A lookup of its own would find port 3000.
        assert!(bounded(target.connect()).await.is_ok());
        bounded(live.accept()).await.unwrap();
    }

    /// The reply of the name server is lost.
    #[tokio::test(start_paused = true)]
    async fn slow_lookup_is_repeated() {
        let lookups = Lookups::default();
        assert!(lookups.addresses(pending).now_or_never().is_none());
        let began = Instant::now();
        let found = lookups.addresses(|| ready(Ok(vec![address(1)])));
        assert_eq!(bounded(found).await.unwrap(), [address(1)]);
        let elapsed = began.elapsed();
        assert!(
            elapsed >= LOOKUP_DELAY && elapsed < LOOKUP_DELAY * 2,
            "{elapsed:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_lookups_are_limited() {
        let lookups = Lookups::default();
        let (found, addresses) = oneshot::channel();
        let mut addresses = Some(addresses);
        let mut count = 0;
        for _ in 0..100 {
            let look_up = || {
                count += 1;
                let addresses = addresses.take();
                async move {
                    match addresses {
                        Some(addresses) => receive(addresses).await,
                        None => pending().await,
                    }
                }
            };
            let timed_out = timeout(LOOKUP_DELAY / 10, lookups.addresses(look_up));
            assert!(timed_out.await.is_err());
        }
        assert_eq!(count, MAX_LOOKUPS);
        found.send(vec![address(1)]).unwrap();
        let waiting = lookups.addresses(pending);
        assert_eq!(bounded(waiting).await.unwrap(), [address(1)]);
    }

    #[tokio::test]
    async fn finished_lookup_is_repeated() {
        let lookups = Lookups::default();
        let refuse = || io::Error::new(io::ErrorKind::NotFound, "no such host");
        let failed = bounded(lookups.addresses(|| ready(Err(refuse())))).await;
        let error = failed.unwrap_err();
        let (kind, text) = (error.kind(), error.to_string());
        assert_eq!((kind, &*text), (io::ErrorKind::NotFound, "no such host"));
        for port in [1, 2] {
            let found = lookups.addresses(|| ready(Ok(vec![address(port)])));
            assert_eq!(bounded(found).await.unwrap(), [address(port)]);
        }
        // No connection waits for the end of this lookup.
        let (found, addresses) = oneshot::channel();
        let mut addresses = Some(addresses);
        let look_up = || receive(addresses.take().expect("a single lookup"));
        let timed_out = lookups.addresses(look_up);
        assert!(timed_out.now_or_never().is_none());
        found.send(vec![address(3)]).unwrap();
        for _ in 0..10 {
            yield_now().await;
        }
        let found = lookups.addresses(|| ready(Ok(vec![address(4)])));
        assert_eq!(bounded(found).await.unwrap(), [address(4)]);
    }
}
