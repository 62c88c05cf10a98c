//! Several processes on one DynamoDB table, killed and paused at any moment, and 64 clients at a time.
//!
//! Fewer kills, pauses and keys by default; `FULL=1` makes them 100, 24 and 1,000.

use std::{
    collections::BTreeMap,
    sync::{self, Arc, PoisonError},
    time::Duration,
};

use axum::body::Body;
use http::{Request, StatusCode};
use tests::{
    app, few_or,
    fleet::{Blow, Fleet, History, Load},
    post,
    proxy::{Mode, Proxy},
    send,
    servers::dynamodb::{DynamoDbServer, StandIn, client},
};
use tokio::{sync::Mutex, task::JoinSet, time::sleep};
use tower_idempotency::{IdempotencyLayer, Ttl};
use tower_idempotency_dynamodb::DynamoDbOptions;

/// Fleets beside each other wait for processors longer than for leases.
static TURN: Mutex<()> = Mutex::const_new(());

const MEMBERS: usize = 3;
const LEASE: Duration = Duration::from_millis(1500);
const POLL: Duration = Duration::from_millis(100);
const HANDLER: Duration = Duration::from_millis(40);
/// What everything else takes: the stand-in, which answers late, and processes that wait for a processor. Less than
/// another lease would be.
const SLACK: Duration = Duration::from_millis(1400);

/// A table whose answers come late: a process is often struck between what the table did and its hearing of it.
struct Late {
    _server: DynamoDbServer,
    proxy: Proxy,
}

impl Late {
    fn start() -> Self {
        let server = DynamoDbServer::start(StandIn::Dynoxide);
        let proxy = Proxy::start(server.address());
        proxy.set(Mode::Delay {
            up: Duration::ZERO,
            down: Duration::from_millis(8),
        });
        Self {
            _server: server,
            proxy,
        }
    }

    async fn run(self, orphans: &str, load: Load) -> History {
        let endpoint = format!("http://{}", self.proxy.address());
        // The processes of one machine have one clock.
        let store = format!("dynamodb://keys?endpoint={endpoint}&skew=0ms");
        let lease = format!("{}ms", load.lease.as_millis());
        let args = ["--store", &store, "--orphans", orphans, "--lease", &lease];
        let history = Fleet::start(MEMBERS, &args).run(load).await;
        println!("{orphans}: {}", history.sums());
        history
    }
}

fn kills(seed: u64) -> Load {
    Load {
        path: format!("/slow/{}", HANDLER.as_millis()),
        at_a_time: 6,
        keys: 0,
        poll: POLL,
        lease: LEASE,
        blows: few_or(30, 100),
        blow: Blow::Kill,
        at_once: 2,
        respite: Duration::from_millis(500),
        seed,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_refuses_orphans_executes_no_key_of_dynamodb_twice() {
    let _turn = TURN.lock().await;
    let history = Late::start().run("refuse", kills(1)).await;
    let sums = history.sums();
    none("doubles", &history.doubles());
    none("contradictions", &history.contradictions());
    assert!(sums.refused_with_effect > sums.strikes / 20, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_executes_orphans_of_dynamodb_again_executes_twice_only_what_was_killed_at_work() {
    let _turn = TURN.lock().await;
    let history = Late::start().run("reexecute", kills(2)).await;
    let sums = history.sums();
    none("unexplained", &history.unexplained());
    none("contradictions", &history.contradictions());
    none("stuck", &history.stuck(LEASE + POLL + HANDLER + SLACK));
    assert_eq!(
        (sums.refused_with_effect, sums.refused_without_effect),
        (0, 0)
    );
    assert!(sums.doubles > sums.strikes / 20, "{sums}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_paused_past_its_lease_answers_what_dynamodb_has_stored() {
    let _turn = TURN.lock().await;
    let handler = Duration::from_millis(200);
    let lease = Duration::from_millis(800);
    let pauses = Load {
        lease,
        path: format!("/slow/{}", handler.as_millis()),
        blows: few_or(10, 24),
        blow: Blow::Pause(lease * 3 / 2),
        at_once: 1,
        ..kills(3)
    };
    let history = Late::start().run("reexecute", pauses).await;
    let sums = history.sums();
    none("unexplained", &history.unexplained());
    none("contradictions", &history.contradictions());
    assert!(sums.late_and_outrun > 0, "{sums}");
}

/// In one process, with a store and a layer for each of four: the same calls, and fewer processes that wait for a
/// processor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_64_clients_ask_for_are_executed_once_each() {
    let _turn = TURN.lock().await;
    let keys = few_or(200, 1000);
    let server = DynamoDbServer::start(StandIn::Dynoxide);
    let effects = Ledger::default();
    let table = server.new_table();
    let mut apps = Vec::new();
    for _ in 0..4 {
        let options = DynamoDbOptions::new().with_timeout(PATIENCE);
        let store = options.store(&client(server.address()), table.as_str());
        store.create_table().await.expect("the server runs");
        let layer = IdempotencyLayer::new(store)
            .with_store_timeout(PATIENCE)
            .with_lease(Ttl::from_secs(120));
        let effects = Arc::clone(&effects);
        let count = move |_, req: Request<Body>| {
            let key = req.uri().path().to_owned();
            let mut effects = effects.lock().unwrap_or_else(PoisonError::into_inner);
            *effects.entry(key).or_default() += 1;
            async { StatusCode::CREATED }
        };
        apps.push(app(layer, count).0);
    }
    let mut clients = JoinSet::new();
    for n in 0..64 {
        let app = apps[n % apps.len()].clone();
        clients.spawn(async move {
            // All of them, and then eight, two of each process, are at the same key at the same time.
            for key in (0..keys).filter(|key| *key < 50 || key % 8 == n / 8) {
                let (path, key) = (format!("/{key}"), format!("key-{key}"));
                while send(&app, post(&path, &key, "tea")).await.status != StatusCode::CREATED {
                    sleep(POLL).await;
                }
            }
        });
    }
    clients.join_all().await;
    let effects = effects.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(effects.len(), keys);
    assert!(effects.values().all(|&times| times == 1));
}

type Ledger = Arc<sync::Mutex<BTreeMap<String, u64>>>;

/// A machine that is busy is no fault.
const PATIENCE: Duration = Duration::from_secs(20);

fn none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}
