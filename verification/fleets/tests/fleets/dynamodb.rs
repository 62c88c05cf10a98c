//! Several processes on one DynamoDB table, killed and paused at any moment, and 64 clients at a time.
//!
//! Strikes occur at random moments, in rounds, until each case that a test names was seen.
//!
//! `FULL=1` uses 100 kills, 24 pauses and 1,000 keys. The default uses fewer.

use std::time::Duration;

use fleets::fleet::{Case, Load, StrikeKind, until_seen};
use tests::{
    few_or,
    servers::dynamodb::{DynamoDbServer, StandIn},
};
use tokio::sync::Mutex;
use verification::oracle::{History, Sums};

use crate::{DelayedServer, assert_executed_once, assert_explained, execute_keys_once};

/// Fleets that run in parallel wait for processors longer than for leases, so they run one after another.
static EXCLUSIVE: Mutex<()> = Mutex::const_new(());

const MEMBERS: usize = 3;
const LEASE: Duration = Duration::from_millis(1500);
const POLL: Duration = Duration::from_millis(100);
const HANDLER: Duration = Duration::from_millis(40);

/// Runs a load on a server of its own.
async fn run_delayed(orphans: &str, load: Load) -> History {
    let server = DynamoDbServer::start(StandIn::Dynoxide);
    let address = server.address();
    let server = DelayedServer::new(server, address);
    let endpoint = format!("http://{}", server.address());
    // The processes of one machine share a clock.
    let store = format!("dynamodb://keys?endpoint={endpoint}&skew=0ms");
    server.run(MEMBERS, &store, orphans, load).await
}

fn kills(seed: u64) -> Load {
    Load {
        path: format!("/slow/{}", HANDLER.as_millis()),
        at_a_time: 6,
        keys: 0,
        poll: POLL,
        lease: LEASE,
        strike_count: few_or(12, 100),
        strike_kind: StrikeKind::Kill,
        at_once: 2,
        strike_interval: Duration::from_millis(500),
        seed,
    }
}

// F-031
#[tokio::test(flavor = "multi_thread")]
async fn refused_orphans_execute_once_on_dynamodb() {
    let _exclusive = EXCLUSIVE.lock().await;
    let refused: Case<Sums> = ("refused with effect", |sums| sums.refused_with_effect);
    until_seen(&[refused], async |round| {
        let history = run_delayed("refuse", kills(1 + round * 100)).await;
        assert_executed_once(&history);
        history.sums()
    })
    .await;
}

// F-030
#[tokio::test(flavor = "multi_thread")]
async fn takeovers_repeat_only_killed_work_on_dynamodb() {
    let _exclusive = EXCLUSIVE.lock().await;
    let twice: Case<Sums> = ("executed twice", |sums| sums.executed_twice);
    until_seen(&[twice], async |round| {
        let load = kills(2 + round * 100);
        let history = run_delayed("take-over", load).await;
        let sums = history.sums();
        assert_explained(&history);
        let refused = (sums.refused_with_effect, sums.refused_without_effect);
        assert_eq!(refused, (0, 0), "{sums}");
        sums
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_process_returns_record_of_dynamodb() {
    let _exclusive = EXCLUSIVE.lock().await;
    let handler = Duration::from_millis(200);
    let lease = Duration::from_millis(800);
    let outrun: Case<Sums> = ("answered by another process", |sums| sums.late_and_outrun);
    until_seen(&[outrun], async |round| {
        let pauses = Load {
            lease,
            path: format!("/slow/{}", handler.as_millis()),
            at_a_time: 18,
            strike_count: few_or(6, 24),
            strike_kind: StrikeKind::Pause(lease * 3 / 2),
            at_once: 1,
            ..kills(3 + round * 100)
        };
        let history = run_delayed("take-over", pauses).await;
        assert_explained(&history);
        history.sums()
    })
    .await;
}

// F-051
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_64_clients_execute_once() {
    let _exclusive = EXCLUSIVE.lock().await;
    let server = DynamoDbServer::start(StandIn::Dynoxide);
    let store = format!("dynamodb://keys?endpoint=http://{}", server.address());
    let args = ["--store", &store, "--in-flight", "wait", "--lease", "60s"];
    let lease = Duration::from_secs(60);
    execute_keys_once(MEMBERS, &args, few_or(25, 1000), POLL, lease).await;
}
