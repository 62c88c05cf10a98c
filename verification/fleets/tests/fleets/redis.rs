//! Several processes on one Redis, killed and paused at any moment. The tests check the executions and the responses.
//!
//! Strikes occur at random moments, in rounds, until each case that a test names was seen.
//!
//! `FULL=1` uses 300 kills, 20 pauses and 1,000 keys. The default uses fewer.

use std::{fmt, time::Duration};

use fleets::fleet::{Case, Load, StrikeKind, until_seen};
use tests::{few_or, servers::redis::RedisServer};
use verification::oracle::{History, Sums};

use crate::{DelayedServer, assert_executed_once, assert_explained, execute_keys_once};

const MEMBERS: usize = 4;
const LEASE: Duration = Duration::from_millis(700);
const POLL: Duration = Duration::from_millis(100);
const HANDLER: Duration = Duration::from_millis(40);

/// Runs a load on a server of its own.
async fn run_delayed(orphans: &str, load: Load) -> History {
    let redis = RedisServer::start(&[]);
    let address = redis.address();
    let server = DelayedServer::new(redis, address);
    let store = format!("redis://{}/0", server.address());
    server.run(MEMBERS, &store, orphans, load).await
}

fn kills(seed: u64) -> Load {
    Load {
        path: format!("/slow/{}", HANDLER.as_millis()),
        at_a_time: 16,
        keys: 0,
        poll: POLL,
        lease: LEASE,
        strike_count: few_or(40, 300),
        strike_kind: StrikeKind::Kill,
        at_once: 2,
        strike_interval: Duration::from_millis(70),
        seed,
    }
}

// F-031
#[tokio::test(flavor = "multi_thread")]
async fn refused_orphans_execute_once_despite_kills() {
    let cases: [Case<Sums>; 3] = [
        ("refused with effect", |sums| sums.refused_with_effect),
        ("refused without effect", |sums| sums.refused_without_effect),
        ("lost reply", |sums| sums.lost_replies),
    ];
    until_seen(&cases, async |round| {
        let history = run_delayed("refuse", kills(1 + round * 100)).await;
        assert_executed_once(&history);
        history.sums()
    })
    .await;
}

// F-030, F-034
#[tokio::test(flavor = "multi_thread")]
async fn takeovers_repeat_only_killed_work() {
    let cases: [Case<Sums>; 2] = [
        ("executed twice", |sums| sums.executed_twice),
        ("lost reply", |sums| sums.lost_replies),
    ];
    until_seen(&cases, async |round| {
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

// F-029
/// Kills are rare here. If they are frequent, the oracle seldom knows since when no process has held the lease.
///
/// A slow machine may delay any key, so the test requires only that some keys were free in time. If keys became free
/// only after two leases, there would be no such key.
#[tokio::test(flavor = "multi_thread")]
async fn killed_work_is_free_after_one_lease() {
    let lease = Duration::from_secs(2);
    let in_time: Case<TakeoverReport> = ("taken over in time", |it| it.taken_over_in_time);
    until_seen(&[in_time], async |round| {
        let rare = Load {
            lease,
            strike_count: few_or(6, 40),
            strike_interval: Duration::from_millis(1500),
            ..kills(7 + round * 100)
        };
        let history = run_delayed("take-over", rare).await;
        assert_explained(&history);
        TakeoverReport {
            sums: history.sums(),
            // A renewal at a third of the lease would make two leases last longer than this.
            taken_over_in_time: history.taken_over_within(lease * 3 / 2),
        }
    })
    .await;
}

struct TakeoverReport {
    sums: Sums,
    taken_over_in_time: usize,
}

impl fmt::Display for TakeoverReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sums,
            taken_over_in_time,
        } = self;
        write!(f, "{taken_over_in_time} taken over in time; {sums}")
    }
}

// F-035
#[tokio::test(flavor = "multi_thread")]
async fn paused_process_returns_stored_record() {
    let handler = Duration::from_millis(200);
    let lease = Duration::from_millis(500);
    let pauses = Load {
        lease,
        path: format!("/slow/{}", handler.as_millis()),
        at_a_time: 24,
        strike_count: few_or(6, 20),
        strike_kind: StrikeKind::Pause(lease * 3 / 2),
        at_once: 1,
        strike_interval: Duration::from_millis(300),
        ..kills(3)
    };
    let run = async |orphans, seed| {
        let load = Load {
            seed,
            ..pauses.clone()
        };
        let history = run_delayed(orphans, load).await;
        assert_eq!(history.sums().strikes, pauses.strike_count);
        assert_explained(&history);
        history
    };
    // A late response is the stored one, from the process that took over.
    let outrun: [Case<Sums>; 1] = [("answered by another process", |sums| sums.late_and_outrun)];
    let reexecuting = until_seen(&outrun, async |round| {
        run("take-over", 3 + round * 100).await.sums()
    });
    let late: [Case<Sums>; 1] = [("late", |sums| sums.late)];
    let refusing = until_seen(&late, async |round| {
        let history = run("refuse", 5 + round * 100).await;
        assert_executed_once(&history);
        history.sums()
    });
    tokio::join!(reexecuting, refusing);
}

// F-051
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_64_clients_execute_once() {
    for (in_flight, keys) in [("wait", few_or(40, 700)), ("conflict", few_or(25, 300))] {
        let redis = RedisServer::start(&[]);
        let args = ["--store", &redis.url(), "--in-flight", in_flight];
        let (poll, lease) = (Duration::from_millis(10), Duration::from_secs(15));
        execute_keys_once(MEMBERS, &args, keys, poll, lease).await;
    }
}
