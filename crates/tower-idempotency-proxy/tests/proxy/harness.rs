//! A proxy on free ports, raw upstreams that follow a script, and raw clients.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, LocalRecorderGuard, Metadata, Recorder, SharedString,
    Unit,
};
use rustls::{ServerConfig, crypto::ring};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tests::{barrier::bounded, servers::certificates::Certificates};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;
use tower_idempotency_proxy::{Config, Proxy, ProxyHandle};

/// A proxy that serves in a task.
pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) handle: ProxyHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<bool>,
}

impl Served {
    pub(crate) async fn start(config: &str) -> Self {
        let proxy = Proxy::bind(Config::from_toml(config).unwrap())
            .await
            .unwrap();
        Self::serve(proxy)
    }

    pub(crate) fn serve(proxy: Proxy) -> Self {
        let (address, admin, handle) = (proxy.address(), proxy.admin_address(), proxy.handle());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(proxy.serve(async {
            let _ = stopped.await;
        }));
        Self {
            address,
            admin,
            handle,
            stop,
            task,
        }
    }

    /// Starts the shutdown. The task returns `true` if everything has finished.
    pub(crate) fn stop(self) -> JoinHandle<bool> {
        self.stop.send(()).unwrap();
        self.task
    }
}

/// The counters of the thread of a test.
#[derive(Default)]
pub(crate) struct Counters {
    values: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    units: Mutex<BTreeMap<String, Option<Unit>>>,
}

impl Counters {
    /// Counts the events of this thread until the guard is dropped.
    pub(crate) fn install(&self) -> LocalRecorderGuard<'_> {
        metrics::set_default_local_recorder(self)
    }

    /// Returns the values of a counter above zero, by the value of its last label.
    pub(crate) fn of(&self, name: &str) -> BTreeMap<String, u64> {
        let counters = self.values.lock().unwrap();
        let found = counters.iter().filter_map(|(series, value)| {
            let label = series.strip_prefix(name)?.strip_prefix(' ')?;
            Some((label.to_owned(), value.load(Ordering::SeqCst)))
        });
        found.filter(|(_, value)| *value > 0).collect()
    }

    /// Returns the units of all described metrics.
    pub(crate) fn units(&self) -> BTreeMap<String, Option<Unit>> {
        self.units.lock().unwrap().clone()
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>) {
        let name = name.as_str().to_owned();
        self.units.lock().unwrap().insert(name, unit);
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let label = key.labels().last().map_or("", |label| label.value());
        let series = format!("{} {label}", key.name());
        let counter = Arc::clone(self.values.lock().unwrap().entry(series).or_default());
        Counter::from_arc(counter)
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Returns a configuration with one protected route for all paths. `upstream` and `route` are further lines of each section.
pub(crate) fn config(upstream: SocketAddr, upstream_lines: &str, route_lines: &str) -> String {
    format!(
        r#"
        [listen]
        address = "127.0.0.1:0"
        [admin]
        address = "127.0.0.1:0"
        [store]
        url = "memory"
        [upstream.app]
        url = "http://{upstream}"
        {upstream_lines}
        [[route]]
        path = "/open/**"
        upstream = "app"
        mode = "off"
        [[route]]
        path = "/**"
        upstream = "app"
        {route_lines}
        "#
    )
}

/// Returns the server side of TLS, which offers one protocol.
pub(crate) fn tls_acceptor(certificates: &Certificates, protocol: &[u8]) -> TlsAcceptor {
    let chain = CertificateDer::pem_file_iter(certificates.certificate()).unwrap();
    let chain = chain.map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(certificates.key()).unwrap();
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_no_client_auth();
    let mut config = builder.with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![protocol.to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// The reaction of a raw upstream to a request.
#[derive(Clone)]
pub(crate) struct Script {
    /// The bytes of the request to read; the complete request if it is `None`.
    pub(crate) read: Option<usize>,
    pub(crate) reply: Vec<u8>,
    pub(crate) then: ConnectionEnd,
}

/// The end of a connection after a reply, if it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ConnectionEnd {
    Close,
    Reset,
    /// Waits for the next request on the connection.
    Continue,
    /// Never responds.
    Hang,
}

impl Script {
    /// Responds with 201 and continues.
    pub(crate) fn create() -> Self {
        Self::reply(CREATED)
    }

    pub(crate) fn reply(reply: impl Into<Vec<u8>>) -> Self {
        Self {
            read: None,
            reply: reply.into(),
            then: ConnectionEnd::Continue,
        }
    }

    pub(crate) fn then(self, then: ConnectionEnd) -> Self {
        Self { then, ..self }
    }
}

pub(crate) const CREATED: &str =
    "HTTP/1.1 201 Created\r\nlocation: /1\r\ncontent-length: 7\r\n\r\ncreated";

/// An upstream that follows a script for each request. It counts each request of which it has read a byte as an effect.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    effects: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<Vec<u8>>>>,
    task: JoinHandle<()>,
}

impl Upstream {
    pub(crate) async fn start(script: impl Fn(usize) -> Script + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), script).await
    }

    /// Starts an upstream. The script gets the number of the request, from 0.
    pub(crate) async fn start_at(
        address: SocketAddr,
        script: impl Fn(usize) -> Script + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (effects, requests) = (Arc::new(AtomicUsize::new(0)), Arc::default());
        let connections = Arc::<AtomicUsize>::default();
        let script: Arc<dyn Fn(usize) -> Script + Send + Sync> = Arc::new(script);
        let task = tokio::spawn({
            let (effects, requests) = (Arc::clone(&effects), Arc::clone(&requests));
            let connections = Arc::clone(&connections);
            async move {
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    connections.fetch_add(1, Ordering::SeqCst);
                    let (effects, requests) = (Arc::clone(&effects), Arc::clone(&requests));
                    tokio::spawn(follow(stream, Arc::clone(&script), effects, requests));
                }
            }
        });
        Self {
            address,
            connections,
            effects,
            requests,
            task,
        }
    }

    /// Returns the number of accepted connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn effects(&self) -> usize {
        self.effects.load(Ordering::SeqCst)
    }

    /// Returns the requests that were read, as text.
    pub(crate) fn requests(&self) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        requests
            .iter()
            .map(|request| String::from_utf8_lossy(request).into_owned())
            .collect()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(
    mut stream: TcpStream,
    script: Arc<dyn Fn(usize) -> Script + Send + Sync>,
    effects: Arc<AtomicUsize>,
    requests: Arc<Mutex<Vec<Vec<u8>>>>,
) {
    stream.set_nodelay(true).unwrap();
    loop {
        // The number of the request is known with its first byte.
        let mut first = [0];
        let peeked = stream.peek(&mut first).await;
        if !matches!(peeked, Ok(1)) {
            return;
        }
        let number = effects.fetch_add(1, Ordering::SeqCst);
        let script = script(number);
        let mut request = Vec::new();
        while !is_read(&request, script.read) {
            let left = script.read.map_or(64 * 1024, |read| read - request.len());
            let mut buffer = vec![0; left];
            match stream.read(&mut buffer).await {
                Ok(read @ 1..) => request.extend_from_slice(&buffer[..read]),
                Ok(_) | Err(_) => break,
            }
        }
        requests.lock().unwrap().push(request);
        if stream.write_all(&script.reply).await.is_err() {
            return;
        }
        match script.then {
            ConnectionEnd::Continue => {}
            ConnectionEnd::Close => {
                let _ = stream.shutdown().await;
                return;
            }
            ConnectionEnd::Reset => {
                stream.set_zero_linger().unwrap();
                return;
            }
            ConnectionEnd::Hang => {
                let _ = stream.read_to_end(&mut Vec::new()).await;
                return;
            }
        }
    }
}

/// Returns `true` if the request has `limit` bytes, or is complete: with its length or as chunks.
fn is_read(request: &[u8], limit: Option<usize>) -> bool {
    if let Some(limit) = limit {
        return request.len() >= limit;
    }
    let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") else {
        return false;
    };
    let head = String::from_utf8_lossy(&request[..end]).to_ascii_lowercase();
    let body = &request[end + 4..];
    if head.contains("transfer-encoding: chunked") {
        // Trailers may follow the last chunk.
        let has_last_chunk =
            body.starts_with(b"0\r\n") || body.windows(5).any(|five| five == b"\r\n0\r\n");
        return has_last_chunk && body.ends_with(b"\r\n\r\n");
    }
    let length = head.split("content-length: ").nth(1);
    let length = length.map_or(0, |rest| {
        rest.split("\r\n").next().unwrap().parse().unwrap()
    });
    body.len() >= length
}

/// The bytes that a proxy returned until it closed the connection.
#[derive(Debug)]
pub(crate) struct Reply(pub(crate) String);

impl Reply {
    /// Returns the status; 0 if there was no complete head.
    pub(crate) fn status(&self) -> u16 {
        if !self.0.contains("\r\n\r\n") {
            return 0;
        }
        self.0
            .get(9..12)
            .and_then(|status| status.parse().ok())
            .unwrap_or(0)
    }

    /// Returns `true` if it is a problem with this code.
    pub(crate) fn is_problem(&self, code: &str) -> bool {
        self.0.contains(&format!("\"code\":\"{code}\""))
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.0.contains("\r\nidempotent-replayed: true\r\n")
    }
}

/// Sends bytes, and reads until the proxy closes the connection.
pub(crate) async fn exchange(address: SocketAddr, request: impl AsRef<[u8]>) -> Reply {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A proxy that rejects the head may close before it has read everything.
    let _ = stream.write_all(request.as_ref()).await;
    let mut reply = Vec::new();
    let _ = bounded(stream.read_to_end(&mut reply)).await;
    Reply(String::from_utf8_lossy(&reply).into_owned())
}

/// Returns a POST with a key, which closes the connection afterwards.
pub(crate) fn post(path: &str, key: &str, body: &str) -> String {
    post_with(path, key, "", body)
}

/// Returns a POST with further header lines, each with its line break.
pub(crate) fn post_with(path: &str, key: &str, lines: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\nconnection: close\r\n{lines}content-length: {length}\r\n\r\n{body}"
    )
}

/// Sends a payment and its retry. The first response has this status, and the second one is its replay. Returns both.
pub(crate) async fn pay_twice(address: SocketAddr, status: u16) -> [Reply; 2] {
    let replies = [
        exchange(address, post("/pay", "k", "1")).await,
        exchange(address, post("/pay", "k", "1")).await,
    ];
    let seen = replies
        .each_ref()
        .map(|reply| (reply.status(), reply.is_replay()));
    assert_eq!(seen, [(status, false), (status, true)], "{replies:?}");
    replies
}

/// Sends a request until it is no duplicate of an execution in progress.
pub(crate) async fn exchange_until_resolved(address: SocketAddr, request: &str) -> Reply {
    let sending = async {
        loop {
            let reply = exchange(address, request).await;
            if !reply.is_problem("in-progress") {
                return reply;
            }
        }
    };
    bounded(sending).await
}
