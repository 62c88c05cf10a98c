//! Requests the metrics of a service for the chart of requests: `--metrics`.
//!
//! An endpoint may be faulty or hostile: a response has a limit of time and of size, and a redirect is not followed. The URL
//! may contain credentials, so only its host and its port are shown.

use std::{io, net::SocketAddr, pin::pin, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use http::{
    HeaderValue, Request, StatusCode, Uri,
    header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, USER_AGENT},
};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    net::{TcpStream, lookup_host},
    task::{JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};
use tokio_rustls::TlsConnector;
use tower_idempotency_console::scrape::{CounterReader, Endpoint, RequestCounters, ScrapedMetrics};
use tower_idempotency_proxy::connect_first;

use crate::{
    failure::Failure,
    stream::{self, Io, Tls},
};

/// Largest number of endpoints.
const MAX_TARGETS: usize = 32;
/// Longest time between two requests to an endpoint. A shorter chart has more of them: one for each point.
const PERIOD: Duration = Duration::from_secs(10);
/// Number of points of a chart.
const POINTS: u32 = 60;
/// Longest time of a request, from the connection to the end of the response.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Largest head of a response, in bytes.
const MAX_HEAD: usize = 64 * 1024;
const WRONG_URL: &str = "expected http://HOST:PORT/PATH or https://HOST:PORT/PATH, with %40 for @, and in a name or a \
     password also with %2F for /, %3F for ?, %23 for # and %25 for %";

/// The endpoints of `--metrics`.
pub(super) struct Targets(Vec<Target>);

/// An endpoint, and the request that it gets.
struct Target {
    /// The URL without credentials, path and query: each of them may be a secret.
    name: String,
    host: String,
    port: u16,
    tls: Option<Tls>,
    request: Request<Empty<Bytes>>,
    /// The lookup of the host, if it has not ended. It has no time limit and cannot be cancelled, so the next request waits for
    /// the same one.
    lookup: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
}

impl Targets {
    /// Parses the URLs. An error does not show them.
    pub(super) fn parse(urls: &[String]) -> Result<Self, Failure> {
        // Two spaces in the variable leave an empty URL between them.
        let urls: Vec<_> = urls.iter().filter(|url| !url.is_empty()).collect();
        if urls.len() > MAX_TARGETS {
            let found = urls.len();
            return Err(Failure::usage(format!(
                "expected at most {MAX_TARGETS} URLs of --metrics, found {found}"
            )));
        }
        let has_tls = urls.iter().any(|url| {
            let scheme = url.get(..6);
            scheme.is_some_and(|it| it.eq_ignore_ascii_case("https:"))
        });
        let connector = has_tls.then(stream::connector).transpose()?;
        let mut targets: Vec<Target> = Vec::new();
        for (index, url) in urls.iter().enumerate() {
            let number = index + 1;
            let target = Target::parse(url, connector.as_ref())
                .ok_or_else(|| Failure::usage(format!("URL {number} of --metrics: {WRONG_URL}")))?;
            if targets.iter().any(|earlier| earlier.is_same(&target)) {
                return Err(Failure::usage(format!(
                    "URL {number} of --metrics occurs twice, and its requests would count twice"
                )));
            }
            targets.push(target);
        }
        Ok(Self(targets))
    }

    /// Starts a task for each endpoint. The tasks end with the set. Returns `None` if there is no endpoint.
    pub(super) fn start(self, window: Duration) -> Option<(ScrapedMetrics, JoinSet<()>)> {
        if self.0.is_empty() {
            return None;
        }
        let metrics = ScrapedMetrics::new();
        let mut tasks = JoinSet::new();
        let period = PERIOD.min(window / POINTS);
        let mut names: Vec<String> = Vec::new();
        let mut endpoints = Vec::new();
        for target in self.0 {
            let earlier = names.iter().filter(|name| **name == target.name).count();
            names.push(target.name.clone());
            let endpoint = match earlier {
                0 => metrics.add_endpoint(&target.name),
                // Another path on the same port.
                _ => metrics.add_endpoint(&format!("{} ({})", target.name, earlier + 1)),
            };
            endpoints.push((target, endpoint));
        }
        // The chart begins when each endpoint has a result, so all of them are added before the first request.
        for (target, endpoint) in endpoints {
            tasks.spawn(target.run(endpoint, period));
        }
        Some((metrics, tasks))
    }
}

impl Target {
    /// Parses a URL. Returns `None` if it is wrong.
    fn parse(url: &str, connector: Option<&TlsConnector>) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        // A `/`, `?` or `#` in a password ends the authority before the host. The beginning of the password would be the port.
        let count = |text: &str| text.matches('@').count();
        if count(url) != count(authority.as_str()) {
            return None;
        }
        let (credentials, address) = match authority.as_str().rsplit_once('@') {
            Some((credentials, address)) => (Some(credentials), address),
            None => (None, authority.as_str()),
        };
        // The brackets of an IPv6 address belong to the URL, not to the address.
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        if host.is_empty() {
            return None;
        }
        let (scheme, default_port, tls) = match uri.scheme_str()? {
            "http" => ("http", 80, None),
            "https" => {
                let name = ServerName::try_from(host.clone()).ok()?;
                ("https", 443, Some((connector?.clone(), name)))
            }
            _ => return None,
        };
        let mut request = Request::get(uri.path_and_query()?.as_str())
            .header(HOST, address)
            .header(ACCEPT, "text/plain;version=0.0.4")
            .header(
                USER_AGENT,
                concat!("idempotency/", env!("CARGO_PKG_VERSION")),
            )
            .header(CONNECTION, "close");
        if let Some(credentials) = credentials {
            request = request.header(AUTHORIZATION, basic(credentials)?);
        }
        Some(Self {
            name: format!("{scheme}://{address}"),
            port: stream::port(address, authority.host(), default_port)?,
            host,
            tls,
            request: request.body(Empty::new()).ok()?,
            lookup: None,
        })
    }

    /// Returns `true` if both are the same page of the same process. Their credentials may differ.
    fn is_same(&self, other: &Self) -> bool {
        self.host.eq_ignore_ascii_case(&other.host)
            && self.port == other.port
            && self.tls.is_some() == other.tls.is_some()
            && self.request.uri() == other.request.uri()
    }

    /// Requests the metrics once in each period.
    async fn run(mut self, endpoint: Endpoint, period: Duration) {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            endpoint.record(self.scrape(TIME_LIMIT).await);
        }
    }

    /// Requests the metrics, and returns the counters or the reason why there are none.
    async fn scrape(&mut self, limit: Duration) -> Result<RequestCounters, String> {
        let (deadline, limit) = (Instant::now() + limit, humantime::format_duration(limit));
        let stream = timeout_at(deadline, self.connect()).await;
        let stream = stream
            .map_err(|_| format!("no connection within {limit}"))?
            .map_err(|error| format!("no connection: {error}"))?;
        let read = timeout_at(deadline, self.read_counters(stream)).await;
        read.map_err(|_| format!("no whole response within {limit}"))?
    }

    async fn read_counters(&self, stream: Box<dyn Io>) -> Result<RequestCounters, String> {
        let mut builder = http1::Builder::new();
        builder.max_buf_size(MAX_HEAD);
        let opened = builder.handshake(TokioIo::new(stream)).await;
        let (sender, connection) = opened.map_err(|error| broken(&error))?;
        let mut connection = pin!(connection);
        let mut response = pin!(read_response(sender, self.request.clone()));
        tokio::select! {
            biased;
            read = response.as_mut() => return read,
            // The connection has ended, and the rest of the response is in memory.
            _ = connection.as_mut() => {}
        }
        response.await
    }

    async fn connect(&mut self) -> io::Result<Box<dyn Io>> {
        let addresses = self.addresses().await?;
        let tcp = connect_first(&addresses, TcpStream::connect::<SocketAddr>).await?;
        stream::open(tcp, self.tls.as_ref()).await
    }

    /// Looks up the addresses of the host, or waits for the lookup of an earlier request.
    async fn addresses(&mut self) -> io::Result<Vec<SocketAddr>> {
        let lookup = self.lookup.get_or_insert_with(|| {
            let address = (self.host.clone(), self.port);
            tokio::spawn(async move {
                let found = lookup_host(address).await?;
                Ok::<Vec<_>, io::Error>(found.collect())
            })
        });
        let looked_up = lookup.await;
        self.lookup = None;
        looked_up?
    }
}

/// Sends the request, and reads the response to its end, or to the first error.
async fn read_response(
    mut sender: SendRequest<Empty<Bytes>>,
    request: Request<Empty<Bytes>>,
) -> Result<RequestCounters, String> {
    let response = sender.send_request(request).await;
    let response = response.map_err(|error| broken(&error))?;
    // A redirect would lead to a server that the operator has not named.
    if response.status() != StatusCode::OK {
        return Err(format!("status {}", response.status().as_u16()));
    }
    let mut body = response.into_body();
    let mut reader = CounterReader::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broken(&error))?;
        if let Some(part) = frame.data_ref() {
            reader.read(part).map_err(|error| error.to_string())?;
        }
    }
    reader.finish().map_err(|error| error.to_string())
}

fn broken(error: &hyper::Error) -> String {
    format!("the connection broke off: {error}")
}

/// Returns the credentials of a URL as a header. Returns `None` if they are wrong.
fn basic(credentials: &str) -> Option<HeaderValue> {
    let (name, password) = credentials.split_once(':').unwrap_or((credentials, ""));
    let mut plain = percent_decode(name)?;
    plain.push(b':');
    plain.extend(percent_decode(password)?);
    let mut value = HeaderValue::try_from(format!("Basic {}", BASE64.encode(plain))).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        decoded.push(u8::try_from(digit()? * 16 + digit()?).ok()?);
    }
    Some(decoded)
}

#[cfg(test)]
mod tests;
