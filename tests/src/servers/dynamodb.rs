//! Stand-ins for DynamoDB: moto and dynoxide. This project has compared neither of them with DynamoDB itself.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use aws_smithy_http_client::Builder;
use axum::Router;
use http::StatusCode;
use serde_json::json;
use tower_idempotency::store::{Claim, Fingerprint, KeyId, Store, Ttl};
use tower_idempotency_dynamodb::{
    DynamoDbOptions, DynamoDbStore,
    aws_sdk_dynamodb::{
        Client, Config,
        config::{BehaviorVersion, Credentials, Region, timeout::TimeoutConfig},
    },
};

use super::{Guard, READY_WITHIN, directory, start_on_free_port};
use crate::{playground::run, wire::Server};

/// The kind of stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandIn {
    /// The server moto in Python: a call takes milliseconds, and only one runs at a time.
    Moto,
    /// The server dynoxide in Rust, on SQLite.
    Dynoxide,
}

/// Returns the server that the tests of one binary share. It has no tables at first, and ends with the process.
///
/// # Panics
///
/// Like [`DynamoDbServer::start`].
#[must_use]
pub fn shared(stand_in: StandIn) -> &'static DynamoDbServer {
    static MOTO: OnceLock<DynamoDbServer> = OnceLock::new();
    static DYNOXIDE: OnceLock<DynamoDbServer> = OnceLock::new();
    let shared = match stand_in {
        StandIn::Moto => &MOTO,
        StandIn::Dynoxide => &DYNOXIDE,
    };
    shared.get_or_init(|| DynamoDbServer::start(stand_in))
}

/// A running stand-in, which keeps its tables in memory; killed when it is dropped.
#[derive(Debug)]
pub struct DynamoDbServer {
    guard: Guard,
    port: u16,
    tables: AtomicU32,
}

impl DynamoDbServer {
    /// Starts a server on a free port and waits until it is ready. A missing server is installed into the target
    /// directory first, which takes minutes.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be installed, or does not start.
    #[must_use]
    pub fn start(stand_in: StandIn) -> Self {
        let program = installed(stand_in);
        let directory = directory("dynamodb");
        let (port, guard) = start_on_free_port(
            |port| {
                std::fs::create_dir_all(&directory).expect("a directory for throwaway files");
                Guard::start(&directory, &command(stand_in, &program, port), "KILL")
            },
            |port, guard| is_ready(stand_in, port, guard),
        );
        let server = Self {
            guard,
            port,
            tables: AtomicU32::new(0),
        };
        if stand_in == StandIn::Moto {
            // Moto loads modules on the first call of each kind, which takes seconds and blocks all other calls.
            thread::scope(|scope| scope.spawn(|| server.warm_up()).join()).expect("it runs");
        }
        server
    }

    /// Makes each kind of call once, on a separate runtime: the caller may already be inside a runtime.
    fn warm_up(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let store = self
                .store(DynamoDbOptions::new().with_timeout(READY_WITHIN))
                .await;
            let claim = Claim::new(KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([1; 32]));
            let claim = claim.expect("the system has random numbers");
            let lease = claim.lease_ref(1);
            let minute = Ttl::from_secs(60);
            store.acquire(&claim).await.expect("the server runs");
            store.renew(&lease, minute).await.expect("the server runs");
            store.release(&lease).await.expect("the server runs");
            store.acquire(&claim).await.expect("the server runs");
            let completed = store.complete(&lease, "warm".into(), minute).await;
            completed.expect("the server runs");
            store.acquire(&claim).await.expect("the server runs");
        });
    }

    /// Returns the address of the server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns an unused table name.
    #[must_use]
    pub fn new_table(&self) -> String {
        format!("table-{}", self.tables.fetch_add(1, Ordering::SeqCst))
    }

    /// Creates a store in a new table.
    ///
    /// # Panics
    ///
    /// Panics if the table cannot be created.
    pub async fn store(&self, options: DynamoDbOptions) -> DynamoDbStore {
        let store = options.store(&client(self.address()), self.new_table());
        store.create_table().await.expect("the server runs");
        store
    }
}

impl_process_control!(DynamoDbServer);

/// Starts an endpoint that refuses each call with this error code and message, in the form of DynamoDB.
///
/// A stand-in accepts all credentials.
///
/// # Panics
///
/// Panics if there is no free port.
pub async fn start_refusing(code: &str, message: &str) -> Server {
    let error = json!({
        "__type": format!("com.amazon.coral.service#{code}"),
        "message": message,
    });
    let body = error.to_string();
    let headers = [
        ("content-type", "application/x-amz-json-1.0".to_owned()),
        ("x-amzn-requestid", "A".repeat(52)),
        ("x-amz-crc32", crc32fast::hash(body.as_bytes()).to_string()),
    ];
    let refusal = (StatusCode::BAD_REQUEST, headers, body);
    let app = Router::new().fallback(async move || refusal.clone());
    Server::start(app).await
}

/// Creates a client for this address, with placeholder credentials.
#[must_use]
pub fn client(address: SocketAddr) -> Client {
    // If many clients connect at once to an overloaded machine, some wait for longer than the SDK's timeout of 3 s.
    let patient = TimeoutConfig::builder()
        .connect_timeout(Duration::from_secs(30))
        .build();
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        // The client has no TLS, because loading certificates takes longer than a test.
        .http_client(Builder::new().build_http())
        .timeout_config(patient)
        .endpoint_url(format!("http://{address}"))
        .region(Region::new("eu-central-1"))
        .credentials_provider(Credentials::new("a", "a", None, None, "tests"));
    Client::from_conf(config.build())
}

/// Returns the path of the executable, which may have to be installed first.
fn installed(stand_in: StandIn) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/dynamodb-server");
    let name = match stand_in {
        StandIn::Moto => "moto",
        StandIn::Dynoxide => "dynoxide",
    };
    let script = script.to_str().expect("a path in UTF-8");
    let said = run(script, [name]).unwrap_or_else(|error| panic!("{name} is needed: {error}"));
    String::from_utf8(said).expect("a path").trim().into()
}

fn command(stand_in: StandIn, program: &Path, port: u16) -> Command {
    let mut command = Command::new(program);
    let port = port.to_string();
    match stand_in {
        StandIn::Moto => command.arg(&port),
        StandIn::Dynoxide => command.args(["--host", "127.0.0.1", "--port", &port]),
    };
    command
}

/// Another process may listen on the port, but only this server writes to this log.
fn is_ready(stand_in: StandIn, port: u16, guard: &Guard) -> bool {
    match stand_in {
        StandIn::Moto => guard
            .log()
            .contains(&format!("Running on http://127.0.0.1:{port}")),
        StandIn::Dynoxide => guard.log().contains(&format!("127.0.0.1:{port}")),
    }
}
