//! An endpoint between the DynamoDB store and a stand-in. It counts calls, requests the capacity that they consume, and
//! injects failures with the error messages of the service.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{Router, body::Body, extract::State, response::Response};
use bytes::Bytes;
use http::{
    HeaderMap, Request, StatusCode,
    header::{CONTENT_LENGTH, DATE},
};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot};
use tower_idempotency_dynamodb::aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};

/// A clock that only the test advances. Clones are the same clock.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Returns a clock that starts at the present time.
    ///
    /// # Panics
    ///
    /// Panics if the machine's clock shows a time before 1970.
    #[must_use]
    pub fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(Arc::new(AtomicU64::new(millis(now.expect("after 1970")))))
    }

    /// Returns the time of the clock.
    #[must_use]
    pub fn now(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.0.load(SeqCst))
    }

    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(millis(by), SeqCst);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The fault that the endpoint injects into calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EndpointFault {
    /// Forwards each call.
    #[default]
    None,
    /// Replies to this number of calls with a throttling error.
    Throttle(usize),
    /// Forwards this number of calls, and replies with an internal error.
    LoseReplies(usize),
    /// Like `LoseReplies`, but forwards reads with their replies.
    LoseWriteReplies(usize),
    /// Forwards this number of `UpdateItem` calls. Holds the next one, and replies with an internal error:
    /// [`Endpoint::deliver_held`] forwards it later.
    HoldUpdate(usize),
    /// Removes the item from the error of a refused write.
    LeaveOutItems,
    /// Replies to `PutItem` calls with the error that the client has no right to make them.
    DenyPuts,
    /// Replies to this number of `DescribeTable` calls with the error that the table does not exist.
    HideTables(usize),
    /// Reports tables as being updated, and rejects this number of `UpdateTimeToLive` calls because the table is in use.
    UpdateTables(usize),
    /// Reports tables as being updated, and their indexes as being created in this number of `DescribeTable` replies.
    MakeIndexes(usize),
}

/// A call and its result.
#[derive(Clone, Debug)]
pub struct Call {
    /// The operation, such as `UpdateItem`.
    pub operation: String,
    /// The client's request.
    pub request: Value,
    /// The status that the client received.
    pub status: StatusCode,
    /// The reply of the server, or the reply of the endpoint that replaced it.
    pub response: Value,
}

impl Call {
    /// Returns the units that the call consumed according to the server: of the table, and of its index.
    #[must_use]
    pub fn consumed(&self) -> (f64, f64) {
        let consumed = &self.response["ConsumedCapacity"];
        let units = |it: &Value| it["CapacityUnits"].as_f64().unwrap_or_default();
        let indexes = consumed["GlobalSecondaryIndexes"].as_object();
        let indexes = indexes.map_or(0.0, |it| it.values().map(units).sum());
        (units(&consumed["Table"]), indexes)
    }
}

/// A running endpoint, on a free port of this machine. It stops when it is dropped.
///
/// It runs on a separate thread, independent of the test's runtime.
#[derive(Debug)]
pub struct Endpoint {
    address: SocketAddr,
    server: SocketAddr,
    shared: Arc<Mutex<Shared>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    date_behind: Duration,
    meddling: EndpointFault,
    calls: Vec<Call>,
    held: Vec<(HeaderMap, Value)>,
}

#[derive(Clone)]
struct Forwarding {
    server: SocketAddr,
    shared: Arc<Mutex<Shared>>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Endpoint {
    /// Starts an endpoint in front of this server.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    #[must_use]
    pub fn start(server: SocketAddr) -> Self {
        let shared = Arc::default();
        let forwarding = Forwarding::new(server, Arc::clone(&shared));
        let (stop, stopped) = oneshot::channel();
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                let app = Router::new().fallback(forward).with_state(forwarding);
                tokio::select! {
                    _ = stopped => {}
                    served = axum::serve(listener, app) => served.expect("it serves"),
                }
            });
        });
        Self {
            address,
            server,
            shared,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Returns the address of the endpoint.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the fault for all later calls.
    pub fn set(&self, meddling: EndpointFault) {
        lock(&self.shared).meddling = meddling;
    }

    /// Sets the time by which the dates of later replies are behind the clock of this machine.
    pub fn set_date_behind(&self, by: Duration) {
        lock(&self.shared).date_behind = by;
    }

    /// Returns the calls since the last call of this method.
    #[expect(
        clippy::must_use_candidate,
        reason = "a caller may call it only to discard the calls"
    )]
    pub fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut lock(&self.shared).calls)
    }

    /// Returns the names of the calls since the last call of this method or of [`calls`](Self::calls).
    #[must_use]
    pub fn operations(&self) -> Vec<String> {
        let calls = self.calls().into_iter();
        calls.map(|call| call.operation).collect()
    }

    /// Forwards the calls that a fault has held, in their order. Returns the statuses of the replies.
    ///
    /// # Panics
    ///
    /// Panics if the server does not reply.
    pub async fn deliver_held(&self) -> Vec<StatusCode> {
        let held = std::mem::take(&mut lock(&self.shared).held);
        let forwarding = Forwarding::new(self.server, Arc::clone(&self.shared));
        let mut statuses = Vec::new();
        for (headers, request) in held {
            let (status, _) = forwarding.forward(headers, request).await;
            statuses.push(status);
        }
        statuses
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn forward(State(forwarding): State<Forwarding>, req: Request<Body>) -> Response {
    let target = req.headers().get("x-amz-target");
    let target = target.and_then(|it| it.to_str().ok()).unwrap_or_default();
    let operation = target.rsplit('.').next().unwrap_or_default().to_owned();
    let (head, body) = req.into_parts();
    let body = body.collect().await.expect("a whole request").to_bytes();
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let forward = async || {
        forwarding
            .forward(head.headers.clone(), request.clone())
            .await
    };
    let meddling = turn(&forwarding.shared, &operation);
    let (status, response) = match meddling {
        EndpointFault::Throttle(_) => (
            StatusCode::BAD_REQUEST,
            error("ProvisionedThroughputExceededException"),
        ),
        EndpointFault::LoseReplies(_) => {
            forward().await;
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                error("InternalServerError"),
            )
        }
        EndpointFault::LoseWriteReplies(_) if operation != "GetItem" && operation != "Query" => {
            forward().await;
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                error("InternalServerError"),
            )
        }
        EndpointFault::HoldUpdate(0) if operation == "UpdateItem" => {
            let held = (head.headers.clone(), request.clone());
            lock(&forwarding.shared).held.push(held);
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                error("InternalServerError"),
            )
        }
        EndpointFault::LeaveOutItems => {
            let (status, mut response) = forward().await;
            if status == StatusCode::BAD_REQUEST
                && let Some(members) = response.as_object_mut()
            {
                members.remove("Item");
            }
            (status, response)
        }
        EndpointFault::DenyPuts if operation == "PutItem" => {
            (StatusCode::BAD_REQUEST, error("AccessDeniedException"))
        }
        EndpointFault::HideTables(1..) if operation == "DescribeTable" => {
            (StatusCode::BAD_REQUEST, error("ResourceNotFoundException"))
        }
        EndpointFault::UpdateTables(1..) if operation == "UpdateTimeToLive" => {
            (StatusCode::BAD_REQUEST, error("ResourceInUseException"))
        }
        EndpointFault::UpdateTables(_) if operation == "DescribeTable" => {
            let (status, mut response) = forward().await;
            if let Some(table) = response.get_mut("Table") {
                table["TableStatus"] = json!("UPDATING");
            }
            (status, response)
        }
        EndpointFault::MakeIndexes(left) if operation == "DescribeTable" => {
            let (status, mut response) = forward().await;
            if let Some(table) = response.get_mut("Table") {
                table["TableStatus"] = json!("UPDATING");
                let status = if left > 0 { "CREATING" } else { "ACTIVE" };
                let indexes = table["GlobalSecondaryIndexes"].as_array_mut();
                for index in indexes.into_iter().flatten() {
                    index["IndexStatus"] = json!(status);
                }
            }
            (status, response)
        }
        EndpointFault::LoseWriteReplies(_)
        | EndpointFault::HoldUpdate(_)
        | EndpointFault::DenyPuts
        | EndpointFault::HideTables(_)
        | EndpointFault::UpdateTables(_)
        | EndpointFault::MakeIndexes(_)
        | EndpointFault::None => forward().await,
    };
    lock(&forwarding.shared).calls.push(Call {
        operation,
        request: request.clone(),
        status,
        response: response.clone(),
    });
    let date = SystemTime::now() - lock(&forwarding.shared).date_behind;
    let seconds = date.duration_since(UNIX_EPOCH).expect("after 1970");
    let date = DateTime::from_secs(seconds.as_secs().try_into().expect("a date"));
    let date = date.fmt(DateTimeFormat::HttpDate).expect("a date");
    Response::builder()
        .status(status)
        .header(DATE, date)
        .header("content-type", "application/x-amz-json-1.0")
        .body(Body::from(response.to_string()))
        .expect("a response")
}

impl Forwarding {
    /// Creates a client of the server, for the runtime that makes the first call.
    fn new(server: SocketAddr, shared: Arc<Mutex<Shared>>) -> Self {
        Self {
            server,
            shared,
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }

    /// Forwards the call and returns the server's reply. For writes it also requests the consumed capacity.
    async fn forward(&self, headers: HeaderMap, mut call: Value) -> (StatusCode, Value) {
        if call.get("Key").is_some() || call.get("Item").is_some() {
            call["ReturnConsumedCapacity"] = json!("INDEXES");
        }
        let mut req = Request::post(format!("http://{}/", self.server));
        *req.headers_mut().expect("a request") = without_length(headers);
        let req = req.body(Full::from(call.to_string())).expect("a request");
        let response = self.client.request(req).await.expect("the server replies");
        let status = response.status();
        let body = response.into_body().collect().await.expect("a reply");
        let body = serde_json::from_slice(&body.to_bytes()).expect("JSON");
        (status, body)
    }
}

fn without_length(mut headers: HeaderMap) -> HeaderMap {
    headers.remove(CONTENT_LENGTH);
    headers
}

/// Returns the fault for this call, and updates the remaining count.
fn turn(shared: &Mutex<Shared>, operation: &str) -> EndpointFault {
    let mut shared = lock(shared);
    let now = shared.meddling;
    shared.meddling = match now {
        EndpointFault::Throttle(0 | 1) | EndpointFault::LoseReplies(0 | 1) => EndpointFault::None,
        EndpointFault::Throttle(left) => EndpointFault::Throttle(left - 1),
        EndpointFault::LoseReplies(left) => EndpointFault::LoseReplies(left - 1),
        same @ EndpointFault::LoseWriteReplies(_)
            if operation == "GetItem" || operation == "Query" =>
        {
            same
        }
        EndpointFault::LoseWriteReplies(0 | 1) => EndpointFault::None,
        EndpointFault::LoseWriteReplies(left) => EndpointFault::LoseWriteReplies(left - 1),
        EndpointFault::HoldUpdate(0) if operation == "UpdateItem" => EndpointFault::None,
        EndpointFault::HoldUpdate(left) if operation == "UpdateItem" => {
            EndpointFault::HoldUpdate(left - 1)
        }
        EndpointFault::HideTables(left) if operation == "DescribeTable" => {
            EndpointFault::HideTables(left.saturating_sub(1))
        }
        EndpointFault::UpdateTables(left) if operation == "UpdateTimeToLive" => {
            EndpointFault::UpdateTables(left.saturating_sub(1))
        }
        EndpointFault::MakeIndexes(left) if operation == "DescribeTable" => {
            EndpointFault::MakeIndexes(left.saturating_sub(1))
        }
        same => same,
    };
    now
}

fn error(name: &str) -> Value {
    json!({
        "__type": format!("com.amazonaws.dynamodb.v20120810#{name}"),
        "message": "injected by the test",
    })
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
