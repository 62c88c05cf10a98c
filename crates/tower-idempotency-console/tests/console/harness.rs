//! A console on a socket, a store with an entry in each state, and a client.

#![allow(dead_code, reason = "the tests with a browser use a part")]

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::Router;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use tests::{barrier::Barrier, scratch::Scratch, sql};
use tokio::{
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, NeedsAttention,
    inspect::{
        Abilities, Count, EntryDetails, Inspect, InspectError, InspectErrorKind, Inspector, Page,
        PageToken, Query, Resolution, ResolveOutcome, Seen, State, Summary,
    },
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_console::{Access, Console, audit::AuditLog};

/// A store that counts summaries, and can hold resolutions at a barrier.
#[derive(Clone)]
pub(crate) struct Counted {
    pub(crate) store: MemoryStore,
    pub(crate) summaries: Arc<AtomicUsize>,
    /// Each resolution passes it.
    pub(crate) resolutions: Barrier,
    /// Duration of a summary.
    pub(crate) summary_delay: Duration,
    fault: Arc<Mutex<Option<Fault>>>,
}

/// A fault of a [`Counted`] store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// A resolution changes nothing, and fails with this error.
    Resolve(InspectErrorKind),
    /// The second page of a listing has all entries, and the first one has the first of them.
    RepeatedEntry,
    /// No page of a listing has an entry, and each page has a token of another one.
    EndlessList,
    /// A summary examines too few entries to find one.
    UnknownCounts,
    /// The store does not list completed entries.
    UnlistedCompleted,
}

impl Counted {
    pub(crate) fn new() -> Self {
        Self::held_at(Barrier::open())
    }

    /// Creates a store that holds each resolution at the barrier.
    pub(crate) fn held_at(resolutions: Barrier) -> Self {
        Self {
            store: MemoryStore::new().with_details(),
            summaries: Arc::default(),
            resolutions,
            summary_delay: Duration::ZERO,
            fault: Arc::default(),
        }
    }

    pub(crate) fn set_fault(&self, fault: Fault) {
        *self.fault.lock().expect("no panic") = Some(fault);
    }

    fn fault(&self) -> Option<Fault> {
        *self.fault.lock().expect("no panic")
    }
}

impl Inspect for Counted {
    fn abilities(&self) -> Abilities {
        let abilities = self.store.abilities();
        if let Some(Fault::UnlistedCompleted) = self.fault() {
            return abilities.without_list(State::Completed);
        }
        abilities
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        if let Some(Fault::EndlessList) = self.fault() {
            sleep(Duration::from_millis(100)).await;
            let next = PageToken::new("counted", query, b"1");
            return Ok(Page::new(Vec::new(), Some(next)));
        }
        if let Some(Fault::RepeatedEntry) = self.fault() {
            let mut page = self.store.list(&Query::new(query.state())).await?;
            if query.page().is_none() {
                page.entries.truncate(1);
                page.next = Some(PageToken::new("counted", query, b"1"));
            }
            return Ok(page);
        }
        self.store.list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.store.get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.summaries.fetch_add(1, Ordering::Relaxed);
        sleep(self.summary_delay).await;
        if let Some(Fault::UnknownCounts) = self.fault() {
            let mut summary = Summary::default();
            for state in [State::Orphaned, State::NeedsAttention] {
                summary.set(state, Count::new(0, false));
            }
            return Ok(summary);
        }
        self.store.summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        self.resolutions.pass().await;
        if let Some(Fault::Resolve(kind)) = self.fault() {
            return Err(InspectError::new(kind));
        }
        self.store.resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.store.purge(batch).await
    }
}

/// A console under `/`, for an operator whose name and right are in the header `x-actor`.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) store: Counted,
    pub(crate) scratch: Scratch,
}

/// The entries of a store: one in each state.
pub(crate) struct Keys {
    pub(crate) in_progress: Claim,
    pub(crate) orphaned: Claim,
    pub(crate) attention: Claim,
    pub(crate) completed: Claim,
}

#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

/// Decides by the header `x-actor`: `read:NAME`, `resolve:NAME`, or none. `resolve:alice` if the header is missing.
pub(crate) fn access(head: &http::request::Parts) -> Access {
    let actor = head.headers.get("x-actor");
    match actor
        .map_or("resolve:alice", |it| it.to_str().expect("text"))
        .split_once(':')
    {
        Some(("read", name)) => Access::read(name),
        Some(("resolve", name)) => Access::resolve(name),
        _ => Access::None,
    }
}

pub(crate) async fn listen(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_with(|console| console).await
    }

    /// Starts a console with changed settings.
    pub(crate) async fn start_with(change: impl FnOnce(Console) -> Console) -> Self {
        Self::start_on(Counted::new(), |console| change(console).into_router()).await
    }

    /// Starts an app with the console of this store.
    pub(crate) async fn start_on(store: Counted, app: impl FnOnce(Console) -> Router) -> Self {
        let scratch = Scratch::new();
        let log = AuditLog::new(scratch.file("audit.jsonl"));
        let console = Console::new(Inspector::new(store.clone()), access)
            .with_refresh(Duration::from_millis(100))
            .with_title("payments")
            .with_store_name("memory")
            .with_audit_log(log);
        let address = listen(app(console)).await;
        Self {
            address,
            store,
            scratch,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> TestResponse {
        self.send(Method::GET, path, &[], "").await
    }

    pub(crate) async fn post(&self, path: &str, fields: &[(&str, &str)]) -> TestResponse {
        let body = form(fields);
        let headers = [
            ("content-type", "application/x-www-form-urlencoded"),
            ("sec-fetch-site", "same-origin"),
        ];
        self.send(Method::POST, path, &headers, &body).await
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> TestResponse {
        send(self.address, method, path, headers, body).await
    }

    pub(crate) async fn state(&self, id: &KeyId) -> Option<State> {
        let details = self.store.get(id).await.expect("memory");
        details.map(|it| it.entry.state())
    }

    pub(crate) async fn seen(&self, id: &KeyId) -> String {
        let details = self.store.get(id).await.expect("memory").expect("an entry");
        details.entry.seen().to_string()
    }

    pub(crate) fn audit(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.scratch.file("audit.jsonl")
    }
}

pub(crate) fn form(fields: &[(&str, &str)]) -> String {
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.extend_pairs(fields);
    form.finish()
}

pub(crate) async fn send(
    address: SocketAddr,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TestResponse {
    let stream = TcpStream::connect(address)
        .await
        .expect("the server listens");
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.expect("HTTP");
    tokio::spawn(connection);
    let mut req = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "console.test");
    for (name, value) in headers {
        req = req.header(*name, *value);
    }
    let req = req.body(Full::new(Bytes::copy_from_slice(body.as_bytes())));
    let res = sender.send_request(req.expect("a request")).await;
    let (head, body) = res.expect("a response").into_parts();
    let body = body.collect().await.expect("a body").to_bytes();
    TestResponse {
        status: head.status,
        headers: head.headers,
        text: String::from_utf8_lossy(&body).into_owned(),
    }
}

pub(crate) fn claim(operation: &str) -> Claim {
    let mut claim = sql::claim();
    claim.owner = "host-1:4711";
    claim.operation = operation.into();
    claim.lease = Ttl::from_secs(600);
    claim
}

/// Creates an orphan.
pub(crate) async fn orphan(store: &impl Store, operation: &str) -> Claim {
    let mut claim = claim(operation);
    claim.lease = Ttl::from_millis(1);
    acquire(store, &claim).await;
    sleep(Duration::from_millis(20)).await;
    claim
}

pub(crate) async fn acquire(store: &impl Store, claim: &Claim) {
    let acquired = store.acquire(claim).await.expect("the store replies");
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
}

/// Completes an entry with a response.
pub(crate) async fn complete(store: &impl Store, claim: &Claim, response: http::Response<Bytes>) {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let record = layer.encode_response_record(&claim.id, &response);
    let lease = claim.lease_ref(1);
    let stored = store.complete(&lease, record, Ttl::from_secs(600));
    stored.await.expect("memory");
}

/// Ends an entry so that it needs attention.
pub(crate) async fn attention(store: &impl Store, claim: &Claim, reason: &str) {
    let attention = NeedsAttention::new("refund-failed").with_reason(reason);
    let record = Resolution::NeedsAttention(attention).record(&claim.id);
    let (record, retention) = record.expect("it stores a record");
    let lease = claim.lease_ref(1);
    let stored = store.complete(&lease, record, retention);
    stored.await.expect("memory");
}

impl Keys {
    pub(crate) async fn create(store: &impl Store) -> Self {
        let keys = Self {
            in_progress: claim("POST /payments"),
            orphaned: orphan(store, "POST /orders").await,
            attention: claim("POST /refunds"),
            completed: claim("POST /payments"),
        };
        for claim in [&keys.in_progress, &keys.attention, &keys.completed] {
            acquire(store, claim).await;
        }
        attention(store, &keys.attention, "refund re_7").await;
        let response = http::Response::builder()
            .status(201)
            .header("location", "/payments/7");
        let response = response.body(Bytes::from("paid")).expect("a response");
        complete(store, &keys.completed, response).await;
        keys
    }
}
