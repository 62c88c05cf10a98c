//! gRPC clients of three languages with the retry policy of a service config, against a server of tonic.
//!
//! The programs are in `programs/grpc`. They decide nothing about retries: their libraries do, by the policy and the pushback.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    path::Path,
    pin::Pin,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use payments_grpc::{
    messages::{Balance, BalanceRequest, PayRequest, Payment},
    payments::payments_server::{Payments, PaymentsServer},
    service::protection,
};
use prost::Message;
use tests::{few_or, playground::run, proxy::Proxy};
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};
use tokio_stream::{Stream, StreamExt, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tower::ServiceBuilder;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

use super::python_interpreter;

const PUSHBACK: Duration = Duration::from_millis(500);
/// The slow execution ends after this number of attempts of its key: its own one, and two others that are rejected.
const SLOW_ATTEMPTS: usize = 3;
const FAILED_PRECONDITION: u64 = 9;
const INVALID_ARGUMENT: u64 = 3;

type PaymentStream = Pin<Box<dyn Stream<Item = Result<Payment, Status>> + Send>>;

/// Payments, and the attempts that reached the layer.
#[derive(Clone, Default)]
struct Bank {
    /// Effects of each account.
    effects: Arc<Mutex<HashMap<String, u64>>>,
    next: Arc<AtomicU64>,
    executions: Arc<AtomicU64>,
    /// Attempts of each key.
    attempts: Arc<Mutex<HashMap<String, Vec<Instant>>>>,
    /// Attempts that a library made by itself.
    retries: Arc<AtomicU64>,
}

impl Bank {
    fn pay(&self, req: &PayRequest) -> Payment {
        let mut effects = self.effects.lock().expect("no panic");
        *effects.entry(req.account.clone()).or_default() += 1;
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let amount = req.amount;
        Payment { id, amount }
    }

    fn effects(&self, account: &str) -> u64 {
        let effects = self.effects.lock().expect("no panic");
        effects.get(account).copied().unwrap_or_default()
    }

    fn attempts(&self, key: &str) -> Vec<Instant> {
        let attempts = self.attempts.lock().expect("no panic");
        attempts.get(key).cloned().unwrap_or_default()
    }

    fn note<B>(&self, req: &http::Request<B>) {
        let text = |name: &str| Some(req.headers().get(name)?.to_str().ok()?.to_owned());
        if text("grpc-previous-rpc-attempts").is_some() {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
        let key = text("idempotency-key").unwrap_or_default();
        let mut attempts = self.attempts.lock().expect("no panic");
        attempts.entry(key).or_default().push(Instant::now());
    }
}

#[tonic::async_trait]
impl Payments for Bank {
    /// Pays. Each tenth execution fails before its effect with a code that frees the key.
    async fn pay(&self, req: Request<PayRequest>) -> Result<Response<Payment>, Status> {
        let execution = self.executions.fetch_add(1, Ordering::Relaxed) + 1;
        let req = req.get_ref();
        if req.account.starts_with("call-") && execution.is_multiple_of(10) {
            return Err(Status::unavailable("not now"));
        }
        let payment = Bank::pay(self, req);
        match req.account.as_str() {
            "definite" => return Err(Status::failed_precondition("not enough money")),
            "slow" => {
                while self.attempts("slow").len() < SLOW_ATTEMPTS {
                    sleep(Duration::from_millis(10)).await;
                }
            }
            _ => tokio::task::yield_now().await,
        }
        Ok(Response::new(payment))
    }

    async fn get_balance(&self, _: Request<BalanceRequest>) -> Result<Response<Balance>, Status> {
        Ok(Response::new(Balance { amount: 0 }))
    }

    type WatchStream = PaymentStream;

    async fn watch(&self, _: Request<BalanceRequest>) -> Result<Response<PaymentStream>, Status> {
        let payments = (1..=3).map(|id| Ok(Payment { id, amount: 300 }));
        Ok(Response::new(Box::pin(tokio_stream::iter(payments))))
    }

    type PayAllStream = PaymentStream;

    async fn pay_all(
        &self,
        req: Request<Streaming<PayRequest>>,
    ) -> Result<Response<PaymentStream>, Status> {
        let payments = req.into_inner().map(|req| {
            let amount = req?.amount;
            Ok(Payment { id: 7, amount })
        });
        Ok(Response::new(Box::pin(payments)))
    }
}

async fn serve(layer: IdempotencyLayer, bank: Bank) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    let noting = bank.clone();
    let layers = ServiceBuilder::new()
        .map_request(move |req: http::Request<_>| {
            noting.note(&req);
            req
        })
        .layer(layer);
    let router = Server::builder()
        .layer(layers)
        .add_service(PaymentsServer::new(bank));
    tokio::spawn(router.serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

/// Returns the command of the client in this language, which is built first if necessary.
fn client(language: &str) -> Command {
    if language == "python" {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/programs/grpc");
        let mut command = Command::new(python_interpreter());
        command.arg(programs.join("calls.py"));
        return command;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/grpc-clients");
    let script = script.to_str().expect("a path in UTF-8");
    let printed = run(script, [language]);
    let printed = printed.unwrap_or_else(|error| panic!("gRPC for {language} is needed: {error}"));
    let printed = String::from_utf8(printed).expect("a command in UTF-8");
    let mut words = printed.lines();
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words);
    command
}

/// An outcome that a client printed: its name, its code and its text.
type Outcome = (String, u64, String);

/// Runs a client to its end.
async fn outcomes(mut command: Command, address: SocketAddr, args: &[&str]) -> Vec<Outcome> {
    command
        .arg(address.to_string())
        .args(args)
        // This version of grpc-go has retries only if it is set.
        .env("GRPC_GO_RETRY", "on")
        .stdin(Stdio::null());
    let mut command = tokio::process::Command::from(command);
    let output = command.kill_on_drop(true).output();
    let output = timeout(Duration::from_secs(500), output)
        .await
        .expect("the client ends")
        .expect("the client starts");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{stdout}{stderr}");
    let lines = stdout.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        let text = |name: &str| line[name].as_str().expect("text").to_owned();
        let status = line["status"].as_u64().expect("a number");
        (text("name"), status, text("body"))
    });
    lines.collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .collect();
    let bytes = digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8);
    bytes.collect()
}

/// Calls through a proxy that cuts all connections, or loses a reply, after every fourth execution.
async fn assert_calls_pay_once(language: &str) {
    let calls = few_or(1_000, 10_000);
    let command = client(language);
    let bank = Bank::default();
    let layer = protection(MemoryStore::new()).expect("valid paths");
    let layer = layer.with_retry_after(Duration::from_millis(5));
    let proxy = Proxy::start(serve(layer.clone(), bank.clone()).await);
    let count = calls.to_string();
    let args = ["calls", count.as_str()];
    let began = Instant::now();
    let client = outcomes(command, proxy.address(), &args);
    let executions = || bank.executions.load(Ordering::Relaxed);
    let mut outcomes = tokio::select! {
        outcomes = client => outcomes,
        never = proxy.cut_at_progress(executions) => match never {},
    };
    let took = began.elapsed();
    assert!(layer.drain(Duration::from_secs(30)).await);
    let (name, again, _) = outcomes.pop().expect("a last line");
    assert_eq!(name, "again");
    let mut ids = Vec::new();
    let mut names = Vec::new();
    for (name, code, body) in outcomes {
        assert_eq!(code, 0, "{name}: {body}");
        let payment = Payment::decode(&*from_hex(&body)).expect("a payment");
        ids.push(payment.id);
        names.push(name);
    }
    ids.sort_unstable();
    names.sort_unstable();
    let expected: Vec<_> = (1..=calls as u64).collect();
    assert_eq!(ids, expected, "each call has a payment of its own");
    names.dedup();
    assert_eq!(names.len(), calls);
    for name in names {
        assert_eq!(bank.effects(&name), 1, "{name}");
    }
    let retries = bank.retries.load(Ordering::Relaxed);
    println!(
        "{language}: {calls} calls in {took:.1?}, {} executions, {} replies lost, {} connections, {retries} retries \
         of the library, {again} calls made again",
        bank.executions.load(Ordering::Relaxed),
        proxy.lost(),
        proxy.counts().connections,
    );
    assert!(retries > 0 && proxy.lost() > 0 && proxy.counts().connections > 1);
}

/// Calls that are refused, a call that is in progress, and streams. The policy of the client retries each of these codes, so
/// that only the pushback prevents a retry.
async fn assert_refusals_are_obeyed(language: &str) {
    let command = client(language);
    let bank = Bank::default();
    let layer = protection(MemoryStore::new()).expect("valid paths");
    let address = serve(layer.with_retry_after(PUSHBACK), bank.clone()).await;
    let outcomes = outcomes(command, address, &["refusals"]).await;
    let mut of_name = BTreeMap::<_, Vec<_>>::new();
    for (name, code, body) in outcomes {
        of_name.entry(name).or_default().push((code, body));
    }
    let found = |name: &str| of_name[name].clone();
    let refused = |reason: &str| vec![(INVALID_ARGUMENT, reason.to_owned())];
    assert_eq!(found("reused"), refused("IDEMPOTENCY_KEY_REUSED"));
    assert_eq!(found("missing"), refused("IDEMPOTENCY_MISSING_KEY"));
    assert_eq!(bank.attempts("reused").len(), 2, "one for each call");
    assert_eq!(bank.attempts("").len(), 1);
    assert_eq!((bank.effects("reused"), bank.effects("missing")), (1, 0));

    // An outcome of the handler has no pushback: each retry of a wrong policy gets it again.
    let definite = (FAILED_PRECONDITION, "not enough money".to_owned());
    assert_eq!(found("definite"), [definite]);
    assert_eq!(bank.attempts("definite").len(), 5);
    assert_eq!(bank.effects("definite"), 1);

    let slow = found("slow");
    assert_eq!(slow[0].0, 0, "{slow:?}");
    assert_eq!(slow[0], slow[1]);
    assert_eq!(bank.effects("slow"), 1);
    let attempts = bank.attempts("slow");
    assert!(attempts.len() > SLOW_ATTEMPTS, "{attempts:?}");
    for pair in attempts[1..].windows(2) {
        assert!(pair[1] - pair[0] >= PUSHBACK, "{attempts:?}");
    }

    let stream = |payments: &[Payment]| {
        let mut all = String::new();
        for payment in payments {
            let hex = payment.encode_to_vec();
            let hex: String = hex.iter().map(|byte| format!("{byte:02x}")).collect();
            all += &hex;
            all += ";";
        }
        vec![(0, all)]
    };
    let payment = |id, amount| Payment { id, amount };
    let watched = stream(&[payment(1, 300), payment(2, 300), payment(3, 300)]);
    assert_eq!(found("watch"), watched);
    let paid = stream(&[payment(7, 5), payment(7, 6)]);
    assert_eq!(found("pay-all"), paid);
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_go_pays_once_through_cut_connections() {
    assert_calls_pay_once("go").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_go_obeys_refusals() {
    assert_refusals_are_obeyed("go").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_java_pays_once_through_cut_connections() {
    assert_calls_pay_once("java").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_java_obeys_refusals() {
    assert_refusals_are_obeyed("java").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpcio_pays_once_through_cut_connections() {
    assert_calls_pay_once("python").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grpcio_obeys_refusals() {
    assert_refusals_are_obeyed("python").await;
}
